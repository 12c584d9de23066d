"""The card is there before the tests of this folder are imported."""

from card_in_place import gpu, without_cycles

__all__ = ["gpu", "without_cycles"]
