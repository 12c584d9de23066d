"""Measurements. Speed is measured in pairs: both sides in one process, in turn, ratio of medians."""
