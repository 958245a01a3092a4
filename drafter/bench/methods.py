"""Methods of a benchmark by their written form, such as `drafter:W8:L4:N24`. Imports no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from drafter.engine.settings import EngineConfig
from drafter.proposers.options import Drafting
from drafter.utils.options import suggestion

BASELINES = ("none", "autoregressive")  # plain decoding of this package; the second name is that of older results
BASELINE = BASELINES[0]
# llama.cpp without speculation; the program that was built for the processor comes first.
LLAMA_CPP_BASELINES = ("llama-cpp:native", "llama-cpp:BF16:native", "llama-cpp", "llama-cpp:BF16")

GGUF_WEIGHTS = ("F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0")  # formats of the weights of a GGUF file

# Options after a method's name; those of `_NUMBERS` take a number.
_OPTIONS: dict[str, tuple[str, ...]] = {
    "none": (),
    "drafter": ("W", "L", "N", "tau", "noise", "final-beams", "uncoupled", "alone", "tuned"),
    "lookup": ("W", "L", "N"),
    "draft-model": ("G", "rejection"),
    "hf-generate": (),
    "hf-lookup": ("G",),
    "llama-cpp": (*GGUF_WEIGHTS, "native"),
    "vllm": (),
}
_NUMBERS = {
    "W": "beam_width",
    "L": "draft_length",
    "N": "tree_size",
    "G": "num_speculative_tokens",
    "tau": "tau",
    "noise": "noise_weight",
}
_LOOKUP_NUMBERS = {"W": "num_matches", "L": "lookup_length", "N": "tree_size"}
_WORDS = {
    "final-beams": ("tree_policy", "final-beams"),
    "uncoupled": ("coupled", False),
    "alone": ("copying", False),
    "rejection": ("verify", "rejection"),
}
_SETTINGS = {item.name for item in fields(EngineConfig)}
# The engines of other people; the last one is a name in results of earlier releases.
_ENGINES = {"hf": "transformers", "llama-cpp": "llama.cpp", "vllm": "vLLM", "openvino-genai": "OpenVINO GenAI"}
PEER_PACKAGES = ("xllamacpp", "llama-cpp-python", "vllm")


def engine_of(label: str) -> str:
    """Name of the engine that decodes a method."""
    name = label.partition(":")[0]
    return _ENGINES.get("hf" if name.startswith("hf-") else name, "Drafter")


@dataclass(frozen=True)
class MethodSpec:
    """One method of a benchmark, read from its written form.

    Attributes:
        label: the written form, which the results use as the name.
        name: the method.
        options: the number of each option; 1 for a word.
    """

    label: str
    name: str
    options: Mapping[str, float]

    @property
    def engine(self) -> str:
        """Name of the engine that decodes."""
        return engine_of(self.name)

    @property
    def is_peer(self) -> bool:
        """Whether another engine decodes."""
        return self.engine != "Drafter"

    @property
    def package(self) -> str | None:
        """The package of an engine that decodes in a process of its own, a name of `--peer-python`; else None."""
        if self.name == "llama-cpp":
            return "llama-cpp-python" if "native" in self.options else "xllamacpp"
        return "vllm" if self.name == "vllm" else None

    @property
    def gguf_weights(self) -> str:
        """Format of the weights in the GGUF file of llama.cpp."""
        return next((word for word in self.options if word in GGUF_WEIGHTS), "BF16")

    @property
    def is_tuned(self) -> bool:
        """Whether the file of `drafter tune` gives the size of the tree."""
        return "tuned" in self.options

    @property
    def is_one_at_a_time(self) -> bool:
        """Whether the method answers no prompts together."""
        return self.name == "hf-lookup" or "native" in self.options

    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings of :class:`EngineConfig` that the written form gives, and its other numbers of a Plan."""
        assert not self.is_peer, self.label
        names = _LOOKUP_NUMBERS if self.name == "lookup" else _NUMBERS
        numbers = {names[letter]: value for letter, value in self.options.items() if letter in names}
        given = {"method": self.name, **numbers, **dict(_WORDS[word] for word in self.options if word in _WORDS)}
        config = {name: value for name, value in given.items() if name in _SETTINGS}
        return config, {name: value for name, value in given.items() if name not in _SETTINGS}


def parse_method(text: str) -> MethodSpec:
    """Read `NAME`, or `NAME:OPTION:...` with options such as W8, L4, N24, G5, tau1.5, final-beams, tuned.

    Raises:
        ValueError: an unknown name or option, an option given twice or one that its method does not take.
    """
    name, *given = text.split(":")
    if name not in _OPTIONS:
        hint = suggestion(name, _OPTIONS)
        raise ValueError(f"--methods: unknown method {name!r}{hint}; methods are {', '.join(_OPTIONS)}")
    options: dict[str, float] = {}
    for option in given:
        number = re.fullmatch(r"([WLNG])(\d{1,4})|(tau|noise)(\d{0,3}\.?\d{1,3})", option)
        key, value = (number[1] or number[3], number[2] or number[4]) if number else (option, None)
        if key not in _OPTIONS[name] or (key in _NUMBERS) != bool(number):
            takes = ", ".join(f"{key}<{_NUMBERS[key]}>" if key in _NUMBERS else key for key in _OPTIONS[name])
            raise ValueError(f"--methods {text}: {option!r} is no option of {name}, which takes {takes or 'none'}")
        if key in options:
            raise ValueError(f"--methods {text}: {key} is given twice")
        options[key] = 1 if value is None else float(value) if key in ("tau", "noise") else int(value)
    weights = sorted(set(GGUF_WEIGHTS) & set(options))
    if len(weights) > 1:
        raise ValueError(f"--methods {text}: {' and '.join(weights)} exclude each other")
    spec = MethodSpec(text, name, options)
    if spec.is_tuned and set(options) - {"tuned", "alone", "uncoupled"}:
        raise ValueError(f"--methods {text}: tuned takes the tree's size from a file: leave the other options out")
    if not spec.is_peer and not spec.is_tuned:
        config, numbers = spec.settings()
        EngineConfig(**config)  # checks the ranges
        Drafting(**{"method": spec.name, **numbers})
    return spec


def parse_methods(texts: tuple[str, ...]) -> tuple[MethodSpec, ...]:
    """All methods of a benchmark, each once."""
    if not texts:
        raise ValueError(f"--methods is empty: give at least one of {', '.join(_OPTIONS)}")
    for text in texts:
        if texts.count(text) > 1:
            raise ValueError(f"--methods: {text} is given twice")
    return tuple(map(parse_method, texts))
