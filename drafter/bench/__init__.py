"""Measurements: methods against each other, reports, plots, and the tuning of speculation."""
