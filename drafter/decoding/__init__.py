"""Propose, verify, accept: the engine that decodes with a drafter and never changes the answer."""
