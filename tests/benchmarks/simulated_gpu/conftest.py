"""The card is there before the tests of this folder are imported."""

from card_in_place import gpu, on_the_same_stream, without_cycles, without_workspaces

__all__ = ["gpu", "on_the_same_stream", "without_cycles", "without_workspaces"]
