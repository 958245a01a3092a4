"""Files, provenance, options and checks of values; standard library, and jsonargparse for options."""
