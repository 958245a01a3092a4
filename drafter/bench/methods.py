"""Methods of a benchmark by their written form, such as `drafter:W8:L4:N24`. No torch here."""

import difflib
import re
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from drafter.engine.config import EngineConfig

BASELINE = "none"
PEER_BASELINE = "hf-generate"
NATIVE_BASELINES = ("llama-cpp", "llama-cpp:BF16")

# How the weights of a GGUF file may be stored.
GGUF_WEIGHTS = ("F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0")

_TREE = ("W", "L", "N")
# Options after a method's name; letters take a number.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "none": ("N",),
    "drafter": (*_TREE, "tau", "noise", "all-nodes", "final-beams", "uncoupled", "alone", "tuned"),
    "lookup": _TREE,
    "draft-model": ("G", "rejection"),
    "hf-generate": (),
    "hf-static": (),
    "hf-compile": (),
    "hf-lookup": ("G",),
    "hf-assistant": ("G",),
    "llama-cpp": (*GGUF_WEIGHTS, "ngram-simple", "ngram-cache", "ngram-mod"),
    "openvino-genai": ("F16", "Q8_0", "lookup", "G"),
}
_ABOUT = {
    "W": "beam width",
    "L": "draft length",
    "N": "tree size",
    "G": "drafted tokens",
    "tau": "softness of coupled drafting",
    "noise": "weight of the noise in coupled drafting",
}
_NEEDS_DRAFT_MODEL = ("draft-model", "hf-assistant")
_ONE_AT_A_TIME = ("hf-lookup", "hf-assistant", "openvino-genai")  # no batches
_PACKAGES = {"llama-cpp": ("xllamacpp",), "openvino-genai": ("openvino_genai", "openvino")}
_NATIVE = {"llama-cpp": "llama.cpp", "openvino-genai": "OpenVINO GenAI"}


@dataclass(frozen=True)
class MethodSpec:
    """One method of a benchmark, read from its written form.

    Attributes:
        label: the written form, which the results use as the name.
        name: the method.
        numbers: options that take a number, by letter.
        words: options that are words.
    """

    label: str
    name: str
    numbers: tuple[tuple[str, float], ...] = ()
    words: tuple[str, ...] = ()

    @property
    def is_peer(self) -> bool:
        """Whether another engine decodes."""
        return self.engine != "Drafter"

    @property
    def is_native(self) -> bool:
        """Whether an engine that reads a GGUF file decodes, in its own process."""
        return self.name in _NATIVE

    @property
    def engine(self) -> str:
        """Name of the engine that decodes."""
        return "transformers" if self.name.startswith("hf-") else _NATIVE.get(self.name, "Drafter")

    def check_installed(self) -> None:
        """ValueError if a package of the engine is missing."""
        for name in _PACKAGES.get(self.name, ()):
            if find_spec(name) is None:
                raise ValueError(
                    f"--methods {self.label} needs {name}: in the repository, "
                    "pip install -c constraints.txt -e '.[peers]'"
                )

    def versions(self) -> dict[str, str]:
        """Versions of the engine's packages, beside torch and transformers."""
        return {name.replace("_", "-"): version(name) for name in _PACKAGES.get(self.name, ())}

    @property
    def gguf_weights(self) -> str:
        """Format of the weights in the GGUF file of a native engine."""
        default = "BF16" if self.name == "llama-cpp" else "F16"  # OpenVINO GenAI reads no BF16
        return next((word for word in self.words if word in GGUF_WEIGHTS), default)

    @property
    def native_speculation(self) -> str:
        """Kind of speculation of a native engine; empty is none."""
        return next((word for word in self.words if word not in GGUF_WEIGHTS), "")

    @property
    def is_tuned(self) -> bool:
        """Whether the file of `drafter tune` gives the size of the tree."""
        return "tuned" in self.words

    @property
    def needs_drafter(self) -> bool:
        return self.name == "drafter"

    @property
    def needs_draft_model(self) -> bool:
        return self.name in _NEEDS_DRAFT_MODEL

    @property
    def max_batch_size(self) -> int | None:
        """Largest number of prompts that the method answers together; None is no limit."""
        return 1 if self.name in _ONE_AT_A_TIME else None

    def number(self, letter: str) -> int | None:
        """The value of an option that takes a whole number, or None."""
        value = dict(self.numbers).get(letter)
        return None if value is None else int(value)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the engine's settings that the options give, the method included."""
        assert not self.is_peer, self.label
        fields: dict[str, Any] = {}
        for letter, name in (
            ("W", "beam_width"),
            ("L", "draft_length"),
            ("N", "tree_size"),
            ("G", "num_speculative_tokens"),
        ):
            value = self.number(letter)
            if value is not None:
                fields[name] = value
        if self.name == "lookup" and "draft_length" in fields:
            fields["lookup_length"] = fields.pop("draft_length")
        for option, name in (("tau", "tau"), ("noise", "noise_weight")):
            if option in dict(self.numbers):
                fields[name] = dict(self.numbers)[option]
        if "final-beams" in self.words:
            fields["tree_policy"] = "final-beams"
        if "uncoupled" in self.words:
            fields["coupled"] = False
        if "alone" in self.words:
            fields["copying"] = False
        if "rejection" in self.words:
            fields["verify"] = "rejection"
        return {"method": self.name, **fields}


def parse_method(text: str) -> MethodSpec:
    """Read `NAME`, or `NAME:OPTION:...` with options such as W8, L4, N24, G5, tau1.5, final-beams, tuned.

    Raises:
        ValueError: an unknown name or option, an option given twice or one that its method does not take.
    """
    name, *options = text.split(":")
    if name not in _OPTIONS:
        raise ValueError(f"--methods: unknown method {name!r}{_suggest(name)}; methods are {', '.join(_OPTIONS)}")
    numbers: dict[str, float] = {}
    words: list[str] = []
    for option in options:
        found = re.fullmatch(r"([A-Z])([0-9]{1,4})|(tau|noise)([0-9]+(?:\.[0-9]+)?)", option)
        found = None if option in GGUF_WEIGHTS else found
        key = found[1] or found[3] if found else option
        if key not in _OPTIONS[name] or (key in _ABOUT) != bool(found):
            takes = ", ".join(f"{key}<{_ABOUT[key]}>" if key in _ABOUT else key for key in _OPTIONS[name])
            raise ValueError(f"--methods {text}: {option!r} is no option of {name}, which takes {takes or 'none'}")
        if key in numbers or key in words:
            raise ValueError(f"--methods {text}: {key} is given twice")
        if found:
            numbers[key] = int(found[2]) if found[2] else float(found[4])
        else:
            words.append(key)
    if {"all-nodes", "final-beams"} <= set(words):
        raise ValueError(f"--methods {text}: all-nodes and final-beams exclude each other")
    for group in (GGUF_WEIGHTS, ("ngram-simple", "ngram-cache", "ngram-mod")):
        if len(set(group) & set(words)) > 1:
            raise ValueError(f"--methods {text}: {' and '.join(sorted(set(group) & set(words)))} exclude each other")
    if "tuned" in words and (numbers or "final-beams" in words):
        raise ValueError(f"--methods {text}: tuned takes the tree's size from a file: leave the other options out")
    spec = MethodSpec(text, name, tuple(numbers.items()), tuple(words))
    if not spec.is_peer and not spec.is_tuned:
        EngineConfig(**spec.fields)  # checks the ranges
    return spec


def parse_methods(texts: tuple[str, ...]) -> tuple[MethodSpec, ...]:
    """All methods of a benchmark, each once."""
    if not texts:
        raise ValueError(f"--methods is empty: give at least one of {', '.join(_OPTIONS)}")
    for text in texts:
        if texts.count(text) > 1:
            raise ValueError(f"--methods: {text} is given twice")
    return tuple(parse_method(text) for text in texts)


def _suggest(name: str) -> str:
    close = difflib.get_close_matches(name, list(_OPTIONS), n=2, cutoff=0.5)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
