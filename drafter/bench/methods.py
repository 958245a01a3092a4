"""Methods of a benchmark by their written form, such as `drafter:W8:L4:N24`. Imports no torch."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from drafter.engine.loading import shipped_drafter
from drafter.engine.settings import EngineConfig
from drafter.proposers.options import Drafting
from drafter.utils.options import suggestion

BASELINE = "none"  # plain decoding of this package
GGUF_WEIGHTS = ("F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_0")  # formats of the weights of a GGUF file

_TREE = {"W": "beam_width", "L": "draft_length", "N": "tree_size"}
# Options after a method's name. A text is the setting whose number follows, a pair is a setting and its value.
_OPTIONS: dict[str, dict[str, str | tuple[str, Any]]] = {
    "none": {},
    "drafter": {
        **_TREE,
        "tau": "tau",
        "noise": "noise_weight",
        "final-beams": ("tree_policy", "final-beams"),
        "uncoupled": ("coupled", False),
        "alone": ("copying", False),
        "tuned": ("method", "drafter"),
    },
    "lookup": {**_TREE, "W": "num_matches", "L": "lookup_length"},
    "draft-model": {"G": "num_speculative_tokens", "rejection": ("verify", "rejection")},
    "hf-generate": {},
    "llama-cpp": {word: ("", None) for word in GGUF_WEIGHTS},
    "vllm": {},
}
_SETTINGS = {item.name for item in fields(EngineConfig)}
# The engines that decode in a process of their own, and their packages.
PEER_PACKAGES = {"llama-cpp": "llama-cpp-python", "vllm": "vllm"}


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
    def is_peer(self) -> bool:
        """Whether another engine decodes."""
        return self.name == "hf-generate" or self.name in PEER_PACKAGES

    @property
    def gguf_weights(self) -> str:
        """Format of the weights in the GGUF file of llama.cpp."""
        return next((word for word in self.options if word in GGUF_WEIGHTS), "BF16")

    @property
    def is_tuned(self) -> bool:
        """Whether the file of `drafter tune` gives the size of the tree."""
        return "tuned" in self.options

    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings of :class:`EngineConfig` that the written form gives, and its other numbers of a Plan."""
        assert not self.is_peer, self.label
        given: dict[str, Any] = {"method": self.name}
        for option, number in self.options.items():
            meaning = _OPTIONS[self.name][option]
            name, value = (meaning, number) if isinstance(meaning, str) else meaning
            given[name] = value
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
        number = re.fullmatch(r"([WLNG]|tau|noise)(\d{1,4}|\d{0,3}\.\d{1,3})", option)
        key = number[1] if number else option
        meaning = _OPTIONS[name].get(key)
        if meaning is None or isinstance(meaning, str) != bool(number):
            takes = [f"{key}<{each}>" if isinstance(each, str) else key for key, each in _OPTIONS[name].items()]
            raise ValueError(
                f"--methods {text}: {option!r} is no option of {name}, which takes {', '.join(takes) or 'none'}"
            )
        if key in options:
            raise ValueError(f"--methods {text}: {key} is given twice")
        options[key] = 1 if number is None else float(number[2]) if "." in number[2] else int(number[2])
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


def drafter_of(specs: Iterable[MethodSpec], target: str, drafter: str | None) -> str | None:
    """The drafter of the methods: the given one, else the package's own for the target; None if no method needs one.

    Raises:
        ValueError: a method needs a drafter, and there is none.
    """
    spec = next((spec for spec in specs if spec.name == "drafter"), None)
    if spec is None:
        return None
    found = drafter or (target if shipped_drafter(target) is not None else None)
    if found is None:
        raise ValueError(f"method {spec.label} needs a drafter: give --drafter DIR")
    return found
