"""Files, provenance, options and checks of values; standard library, jsonargparse for options, pydantic for checks."""

from pathlib import Path

VERSION = "0.1.0"
ASSETS = Path(__file__).parents[1] / "assets"  # data files of the package
