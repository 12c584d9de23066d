"""The machine: its memory, its speed, and what runs on it."""
