"""Files, provenance, options and checks of values; standard library, jsonargparse for options, pydantic for checks."""

VERSION = "0.1.0"
