"""Kernels in Triton, one a file, each with a plain PyTorch reference. Importing one of them imports triton."""
