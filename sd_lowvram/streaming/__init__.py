"""Weight streaming: copies to the device that run while it computes."""
