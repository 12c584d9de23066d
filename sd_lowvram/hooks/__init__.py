"""The optimisations, one a file. ``registry.py`` has the order in which they wrap the model."""
