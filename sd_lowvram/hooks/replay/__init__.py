"""Recordings of a pass that run in its place: compiled, traced, captured as CUDA graphs."""
