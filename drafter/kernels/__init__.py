"""Kernels of this machine: packed matrices, largest values, writes into a cache. Tensors in, tensors out."""
