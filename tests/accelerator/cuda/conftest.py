"""Only scripts/pretend_cuda.sh runs these tests: they need torch's CUDA build and the device of pretend.c."""

import os

if "DRAFTER_PRETEND_CUDA" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
