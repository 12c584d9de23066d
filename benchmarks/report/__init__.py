"""A page on this machine: measurements, charts, and claims that they confirm or refute."""
