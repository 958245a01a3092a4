import json
from pathlib import Path

import pytest

from drafter.models.config import DrafterConfig
from drafter.utils.fingerprint import same_fingerprint


def test_sizes_and_json_round_trip(tmp_path: Path) -> None:
    whole = DrafterConfig(vocab_size=100, hidden_size=8)
    assert (whole.num_outputs, whole.context_size) == (100, 8)
    sizes = {"vocab_size": 100, "hidden_size": 8, "draft_vocab_size": 30}
    config = DrafterConfig(**sizes, context="fused", context_layers=[1, 3, 5], target_name="t", embedding_scale=8.5)
    assert (config.num_outputs, config.context_size, config.context_layers) == (30, 24, (1, 3, 5))
    config.save_pretrained(tmp_path)
    again = DrafterConfig.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict() and again.context_layers == (1, 3, 5)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "recurrent_drafter"
    (tmp_path / "config.json").write_text(json.dumps({**saved, "beam": 3}))
    with pytest.raises(ValueError, match="unknown key 'beam'"):
        DrafterConfig.from_pretrained(tmp_path)
    for field, value in {"num_res_blocks": [], "hidden_scale": [1.0], "draft_length": None, "id2label": "x"}.items():
        with pytest.raises(ValueError, match=f"a.json: .*{field if value != 'x' else 'items'}"):
            DrafterConfig.from_fields({**saved, field: value}, "a.json")


def test_fingerprints_forgive_rounding_only() -> None:
    one, next_to_one, two = "803f", "813f", "0040"
    assert same_fingerprint(one * 2, one + next_to_one)
    assert not same_fingerprint(one * 2, one + two)
    assert not same_fingerprint(one, one * 2) and not same_fingerprint("zz", "zz")
    of_output, of_all = one * 32, one * 32 + two * 8
    assert same_fingerprint(of_output, of_all) and same_fingerprint(of_all, of_all[:-4] + two)
    assert not same_fingerprint(of_all, of_all[:-4] + one) and not same_fingerprint(two * 32, of_all)
