"""Kernels: packed matrices, argmax and topk, writes into a cache. Tensors in, tensors out."""
