"""Latents of a run on their way, kept in a file from which the run goes on with the same bits."""
