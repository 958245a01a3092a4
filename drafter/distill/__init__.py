"""Training data: the target answers prompts."""
