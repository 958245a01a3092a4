"""The image and the unit start the server with flags that it has."""

import json
import re
import shlex
from pathlib import Path

from drafter.serving.options import ServeOptions
from drafter.utils.options import read_options

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "scripts/deploy/Dockerfile").read_text()
UNIT = (ROOT / "scripts/deploy/drafter.service").read_text()


def parse(words: list[str]) -> ServeOptions:
    assert words[0] == "serve"
    # The unit's comments say which file is put there.
    words = [str(ROOT / "configs/serve/smollm2-135m.yaml") if word.startswith("/etc/") else word for word in words[1:]]
    options = read_options(ServeOptions, words, "drafter serve")
    assert options is not None
    return options


def test_image_serves_on_the_port_that_it_exposes_and_probes() -> None:
    found = re.search(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found
    options = parse(json.loads(found[1]))
    assert options.host == "0.0.0.0"
    assert f"EXPOSE {options.port}" in DOCKERFILE and f"127.0.0.1:{options.port}/health" in DOCKERFILE
    for name in re.findall(r"^COPY ((?:[\w.]+ )+)\S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / part).exists() for part in name.split())


def test_unit_waits_longer_than_the_server_drains() -> None:
    found = re.search(r"^ExecStart=/opt/drafter/bin/drafter (.*)$", UNIT, re.MULTILINE)
    assert found
    options = parse(shlex.split(found[1]))
    stop = re.search(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    assert stop and int(stop[1]) > options.drain_seconds
