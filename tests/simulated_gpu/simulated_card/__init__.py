"""A CUDA card without a GPU: torch's own CUDA build over a runtime whose device is memory of this process.

torch's caching allocator, its pinned memory, its streams, events, graphs and errors are the real ones. Under them is
``runtime/cudart.cpp`` in place of NVIDIA's runtime (:mod:`card`), and the kernels are the CPU's, over the same bytes
(:mod:`kernels`). What streams did is checked for races (:mod:`races`).
"""
