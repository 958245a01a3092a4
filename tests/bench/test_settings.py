"""Settings and methods as they are written, and what is refused by name."""

import pytest

from drafter.bench.settings import BenchOptions, parse_method
from drafter.engine.settings import EngineConfig


def test_options_become_settings_of_the_engine_and_numbers_of_the_proposers() -> None:
    for text, config, knobs in (
        ("drafter:W6:L3:N12:uncoupled", {"beam_width": 6, "draft_length": 3, "tree_size": 12}, {"coupled": False}),
        ("drafter:W6:tau1.5:noise0.5", {"beam_width": 6}, {"tau": 1.5, "noise_weight": 0.5}),
        ("drafter:alone", {"copying": False}, {}),
        ("draft-model:G3", {"num_speculative_tokens": 3}, {}),
        ("lookup:W3:L6:N8", {"tree_size": 8}, {"num_matches": 3, "lookup_length": 6}),
    ):
        spec = parse_method(text)
        assert (spec.config, spec.numbers) == (EngineConfig(method=spec.name, **config), knobs), text
    specs = [parse_method(text) for text in ("llama-cpp", "llama-cpp:Q4_1", "ik-llama-cpp", "hf-generate", "none")]
    assert [spec.is_peer for spec in specs] == [True, True, True, True, False]
    assert [spec.gguf_weights for spec in specs[:2]] == ["BF16", "Q4_1"]
    spec = parse_method("llama-cpp:stored:draft")
    assert spec.gguf_weights == "stored" and spec.speculation == "draft" and spec.needs_draft_model
    tuned = parse_method("drafter:tuned:uncoupled")
    assert tuned.is_tuned and tuned.numbers == {"coupled": False} and tuned.config == EngineConfig(method="drafter")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"methods": ("draftr",)}, "unknown method 'draftr'.*did you mean drafter"),
        ({"methods": ("drafter:Z4",)}, "'Z4' is no option of drafter"),
        ({"methods": ("drafter:W4:W5",)}, "W4 and W5 exclude each other"),
        ({"methods": ("drafter:tuned:W4",)}, "leave the other options out"),
        ({"methods": ("drafter:tuned:alone",)}, "leave the other options out"),
        ({"methods": ("llama-cpp:BF16:F16",)}, "BF16 and F16 exclude each other"),
        ({"methods": ("drafter:W2:L2:N99",)}, "--tree-size 99"),
        ({"methods": ("ik-llama-cpp:W4",)}, "takes none"),
        ({"prompts": ("a", "a")}, "--prompts is empty or names a value twice: a, a"),
        ({"batch_sizes": ()}, "--batch-sizes is empty"),
        ({"methods": ("lookup", "lookup")}, "--methods is empty or names a value twice: lookup, lookup"),
        ({"methods": ("drafter",)}, "drafter needs a drafter: give --drafter"),
        ({"methods": ("draft-model",)}, "draft-model needs a smaller model: give --draft-model"),
        ({"methods": ("none", "llama-cpp:draft")}, "llama-cpp:draft needs a smaller model"),
        ({"peer_python": ("vlm=p",)}, "--peer-python vlm=p must be NAME=PYTHON with llama-cpp-python"),
    ],
)
def test_wrong_methods_and_settings_are_refused_by_name(changes: dict[str, object], reason: str) -> None:
    fields: dict[str, object] = {"target": "t", "out": "o", "prompts": ("p",), "methods": ("none",), **changes}
    with pytest.raises(ValueError, match=reason):
        BenchOptions(**fields)  # type: ignore[arg-type]
