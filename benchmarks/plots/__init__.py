"""Charts of measurements, one a file."""
