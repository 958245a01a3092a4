"""Torch runs the target: the module of transformers, over a cache of slots."""
