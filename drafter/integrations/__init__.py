"""Drafters in transformers and on the Hugging Face hub."""
