"""Kernels in Triton, one a file, each beside a plain PyTorch reference. Importing one of them imports triton."""
