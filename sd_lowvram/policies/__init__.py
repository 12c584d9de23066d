"""Policies: the memory management of other programs, by name, for comparison with ours."""
