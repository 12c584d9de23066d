"""Common parts of the adapters for all hosts."""
