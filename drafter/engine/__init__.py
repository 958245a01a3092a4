"""The engine: schedules requests, steps over their rows, hands out tokens."""
