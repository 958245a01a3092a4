"""Ways to draft tokens, one file each, and the table of them."""
