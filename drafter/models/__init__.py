"""The drafter: its configuration, cells and heads."""
