"""Weights that are brought to the device while others compute."""
