"""The mathematics of speculative decoding: sampling, trees, verification. Pure tensors."""
