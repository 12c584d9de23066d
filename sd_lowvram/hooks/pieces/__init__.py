"""A map or a call piece by piece: spans, strips with their halo, statistics of the whole map."""
