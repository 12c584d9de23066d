"""Measurements and their tables: ``python -m benchmarks NAME``, from a clone.

Speed is measured in pairs: both sides in one process, in turn, ratio of medians. Nothing of the package imports this.
"""
