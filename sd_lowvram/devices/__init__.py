"""What the machine has, how fast it is, and what runs on it."""
