"""Training of the recurrent drafter on a frozen target's hidden states."""
