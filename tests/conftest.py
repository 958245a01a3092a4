"""Shared test settings: no network, one thread (many tiny tensors), deterministic seeds."""

import os
import tempfile

os.environ["NO_PROXY"] = "*"  # servers of tests are on this machine
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_DATASETS_CACHE", os.path.join(tempfile.gettempdir(), f"drafter-test-datasets-{os.getuid()}"))
