"""Weights, skip connections and models that wait in host memory or on the processor."""
