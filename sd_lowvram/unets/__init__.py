"""Smaller UNets: what its units take, cut and combined; changes of the model itself, in the manner of A-SDM (2023)."""
