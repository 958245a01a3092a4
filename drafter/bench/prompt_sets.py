"""Prompt sets of the benchmark: any file of prompts that `drafter decode` reads, and a few known ones by name.

Wiring between the rooms of data and bench. Nothing here imports torch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafter.bench.workload import Item, Workload, as_raw, item_of
from drafter.utils.io import first_line


@dataclass(frozen=True)
class HubSet:
    """Where a named prompt set lies, and how its columns are called here.

    Attributes:
        path: hub data set, or a builder of the `datasets` package with `data_files`.
        split: its split.
        config: its configuration.
        data_files: address of its file, where it is on no hub.
        columns: our key -> the set's key.
        category: of all rows, where the set has no column for it.
    """

    path: str
    split: str
    config: str | None = None
    data_files: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    category: str = ""


HUB_SETS = {
    "mtbench": HubSet("HuggingFaceH4/mt_bench_prompts", "train", columns={"turns": "prompt", "id": "prompt_id"}),
    "specbench": HubSet(
        "json",
        "train",
        data_files="https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        columns={"id": "question_id"},
    ),
    "humaneval": HubSet("openai/openai_humaneval", "test", columns={"id": "task_id"}, category="code"),
    "gsm8k": HubSet("openai/gsm8k", "test", config="main", columns={"prompt": "question"}, category="math"),
}


def read_prompt_set(name: str, *, raw: bool = False) -> Workload:
    """A prompt set by name (`HUB_SETS`), a file or hub data set that `drafter decode --prompts` takes, or `default`.

    A row with `turns` is a conversation whose turns follow the method's own answers; a row with `category` belongs to
    that column of the results.

    Raises:
        FileNotFoundError: no such file.
        ValueError: what is wrong with it, with file and line; or the hub cannot be reached.
    """
    if name in HUB_SETS:
        items = tuple(_hub_items(name, HUB_SETS[name]))
        label = name
    else:
        from drafter.distill.prompts import builtin_prompts

        items = tuple(_file_items(str(builtin_prompts()) if name == "default" else name))
        label = Path(name).name.partition(".")[0] or name
    return Workload(label, as_raw(items) if raw else items)


def _file_items(name: str) -> Iterator[Item]:
    from drafter.data.files import read_records
    from drafter.data.formats import parse_row

    for record in read_records(name):
        if "turns" in record.fields:
            row_id = record.fields.get("id", record.fields.get("question_id"))
            yield item_of(record.fields, (), None, id=_name(row_id, record.number), where=record.where)
        else:
            row = parse_row(record)
            yield item_of(record.fields, row.prompt, row.text, id=_name(row.id, record.number), where=record.where)


def _name(row_id: object, number: int) -> str:
    return str(number - 1) if row_id is None else str(row_id)


def _hub_items(name: str, place: HubSet) -> Iterator[Item]:
    for number, row in enumerate(load_hub_rows(name, place)):
        fields = {"category": place.category, **row}
        for ours, theirs in place.columns.items():
            fields[ours] = row[theirs]
        where = f"{name}, row {number + 1}"
        if "turns" not in fields:
            fields["turns"] = [fields["prompt"]]
        yield item_of(fields, (), None, id=_name(fields.get("id"), number + 1), where=where)


def load_hub_rows(name: str, place: HubSet) -> list[dict[str, Any]]:
    """Fetch a named set through the `datasets` package.

    Raises:
        ValueError: it cannot be fetched.
    """
    import datasets

    files = {} if place.data_files is None else {"data_files": place.data_files}
    try:
        rows = datasets.load_dataset(place.path, place.config, split=place.split, **files)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"--prompts {name} cannot be fetched from {place.data_files or place.path}: {first_line(error)}; "
            "give a file of prompts instead"
        ) from error
    return [dict(row) for row in rows]
