"""Answers by engines on a Ray cluster: the same rows as by one engine here, also when a worker is lost."""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from drafter.cli.distill import DistillOptions, engine_answerer
from drafter.cli.main import main
from drafter.distill.prompts import AnswerSettings, AnswerStream, WantedAnswer
from drafter.distill.ray_answers import ClusterOptions, RayAnswerer
from drafter.distill.run import EngineAnswerer, distill
from tests.data.tiny import write_jsonl
from tests.distill.test_local import rows_of
from tests.tiny_files import make_target

NUM_PROMPTS = 30


class DyingAnswerer(EngineAnswerer):
    """The first of all workers to get its second batch takes its process down in the middle of it."""

    def __init__(self, options: DistillOptions, marker: Path) -> None:
        super().__init__(engine_answerer(options).engine)
        self.marker, self.num_batches = marker, 0

    def answer(self, wanted: Sequence[WantedAnswer]) -> AnswerStream:
        self.num_batches += 1
        for done, pair in enumerate(super().answer(wanted)):
            if self.num_batches == 2 and done == 2 and not self.marker.exists():
                self.marker.write_text("dead")
                os._exit(1)
            yield pair


def words(folder: Path, out: str, *more: str) -> list[str]:
    files = f"--target {folder}/target --prompts {folder}/prompts.jsonl --out {folder}/{out}"
    settings = "--max-new-tokens 8 --temperature 0,0.9 --num-answers 2 --seed 5 --dtype float32 --device cpu"
    return ["distill", *files.split(), *settings.split(), *more]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a target, prompts, the answers of one engine here, and a cluster of this machine."""
    ray = pytest.importorskip("ray")
    folder = tmp_path_factory.mktemp("ray")
    (folder / "target").symlink_to(make_target(folder))
    prompts = [{"id": f"q{i}", "prompt": f"What is {i} and " + "more " * (i % 7)} for i in range(NUM_PROMPTS)]
    write_jsonl(folder / "prompts.jsonl", prompts)
    assert main(words(folder, "alone.jsonl", "--max-num-seqs", "8")) == 0
    ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        yield folder
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_cluster_gives_the_rows_of_one_engine(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_cluster = words(place, "cluster.jsonl", "--ray", "auto", "--ray-workers", "2", "--max-num-seqs", "7")
    assert main(on_cluster) == 0
    wanted = rows_of(place / "alone.jsonl")
    assert rows_of(place / "cluster.jsonl") == wanted and len(wanted) == 2 * NUM_PROMPTS
    assert main(["distill", "--target", "./nowhere", "--out", str(place / "x.jsonl"), "--ray", "auto"]) == 2
    assert "there is no such file or folder" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_rows_of_a_lost_worker_are_made_again(place: Path) -> None:
    options = DistillOptions(target=f"{place}/target", out=place / "lossy.jsonl", dtype="float32", device="cpu")
    answerer = RayAnswerer(partial(DyingAnswerer, options, place / "died"), ClusterOptions(ray_workers=2), batch_size=7)
    settings = AnswerSettings(8, temperature=(0.0, 0.9), num_answers=2, seed=5)
    report = distill(answerer, place / "prompts.jsonl", options.out, settings)
    assert (place / "died").exists(), "a worker was lost"
    assert report.num_new == 2 * NUM_PROMPTS
    assert rows_of(place / "lossy.jsonl") == rows_of(place / "alone.jsonl")
