"""Attention: the backends, and which of them runs."""
