"""Files, provenance and checks of values; standard library only."""
