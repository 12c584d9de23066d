"""The optimisations, one a file; see ``patches.py`` for what a hook is."""
