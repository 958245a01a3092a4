"""The image and the unit start the server with flags that it has."""

import json
import re
from pathlib import Path

from drafter.serving.options import ServeOptions
from drafter.utils.options import read_options

ROOT = Path(__file__).resolve().parents[2]


def test_image_and_unit() -> None:
    image, unit = ((ROOT / "scripts/deploy" / name).read_text() for name in ("Dockerfile", "drafter.service"))
    words = json.loads(re.findall(r"^CMD (\[.*\])$", image, re.MULTILINE)[0])
    options = read_options(ServeOptions, words[1:], "drafter serve")
    assert words[0] == "serve" and options.host == "0.0.0.0"
    assert f"EXPOSE {options.port}" in image and f"127.0.0.1:{options.port}/health" in image
    for names in re.findall(r"^COPY ((?:[\w.]+ )+)\S+$", image, re.MULTILINE):
        assert all((ROOT / name).exists() for name in names.split())
    flags = re.findall(r"^ExecStart=/opt/drafter/bin/drafter serve (.*)$", unit, re.MULTILINE)[0]
    # The unit's comments say which file is put there.
    flags = re.sub(r"/etc/\S+", str(ROOT / "configs/serve/smollm2-135m.yaml"), flags)
    options = read_options(ServeOptions, flags.split(), "drafter serve")
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]) > options.drain_seconds
