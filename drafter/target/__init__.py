"""The frozen language model: the only room that knows Hugging Face internals."""
