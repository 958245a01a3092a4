"""Kernels: the native step, packed matrices, argmax and topk, sampling. Tensors in, tensors out."""
