"""Ways to draft tokens, one file each."""
