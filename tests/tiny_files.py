"""Tiny targets and drafters as folders, for tests that go through the command line."""

from pathlib import Path


def make_target(folder: Path, *, seed: int = 0) -> str:
    """A Llama of hidden size 32, context 128, with a byte-level tokenizer and a chat template; its folder."""
    from drafter.targets.catalog import resolve
    from tests.targets.tiny_gguf import write_gguf

    return str(resolve(str(write_gguf(folder / "tiny.gguf", seed=seed))))


def make_drafter(target: str, folder: Path) -> str:
    """An untrained drafter with a head of its own for the target in a folder."""
    from drafter import DrafterConfig, RecurrentDrafter, Target

    loaded = Target.load(target, device="cpu")
    config = DrafterConfig(
        vocab_size=loaded.vocab_size,
        hidden_size=loaded.hidden_size,
        head="full",
        target_name="tiny",
        target_fingerprint=loaded.fingerprint,
    )
    RecurrentDrafter(config).save_pretrained(folder)
    return str(folder)


# Settings of drafter.training.adapt with which a tiny drafter learns enough in seconds.
SMALL_ADAPT = {"_NUM_TRAFFIC": 8, "_NUM_TOKENS": 12, "_LR": 0.01, "_EPOCHS": 12, "_SPEED_TOKENS": 64}
