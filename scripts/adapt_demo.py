"""The requests, the processes and the picture of scripts/adapt_demo.sh."""

import argparse
import json
import random
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

TARGET = "smollm2-135m"
ANSWERS_AFTER = 150  # after the swap: few answers show nothing, their tokens per step differ too much
BIN_SECONDS = 20
MAX_TOKENS = 80
KINDS = {"translation": "#0a7d6c", "json": "#8a4fbf", "general": "#8a8f8d"}
NAMES = {"translation": "translation", "json": "orders as JSON", "general": "general, not learnt"}

_WHO = ("Meine Schwester", "Der alte Nachbar", "Unsere Lehrerin", "Ein junger Arzt", "Die Köchin", "Mein bester Freund")
_DOES = (
    "kauft frisches Brot", "liest ein dickes Buch", "schreibt einen langen Brief", "sucht ihren roten Schirm",
    "fährt mit dem Zug", "kocht eine warme Suppe", "repariert das alte Fahrrad", "wartet auf den Bus",
)  # fmt: skip
_WHEN = ("am Montag", "jeden Morgen", "nach der Arbeit", "am Wochenende", "im Winter", "heute Abend")
_WHERE = ("in der Stadt", "auf dem Markt", "am Bahnhof", "in der Küche", "hinter dem Haus", "bei den Großeltern")
_NAMES = ("Anna Weber", "Tom Baker", "Maria Rossi", "Ivan Petrov", "Lucy Chen", "Omar Haddad", "Nina Berg", "Paul Roy")
_THINGS = ("oak chairs", "desk lamps", "wool blankets", "coffee cups", "garden tools", "steel shelves", "paper rolls")
_PLACES = ("Hamburg", "Leeds", "Turin", "Sofia", "Toronto", "Cairo", "Oslo", "Lyon")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
_FORM = (
    "You read orders of a furniture shop and answer with one JSON object and nothing else. The object always has these "
    'keys in this order: "customer" (full name), "item" (what is ordered), "quantity" (a whole number), "city" (where '
    'the order goes), "weekday" (the wanted day of delivery), "priority" ("high" if the customer is in a hurry, else '
    '"normal"), "status" (always "accepted"), "note" (always "We will confirm your order by email."). Never add a key, '
    "never leave one out, and never explain."
)
_EXAMPLE_ORDER = "Eva Lind orders 4 oak tables to Malmo for Friday."
_EXAMPLE = (
    '{"customer": "Eva Lind", "item": "oak tables", "quantity": 4, "city": "Malmo", "weekday": "Friday", '
    '"priority": "normal", "status": "accepted", "note": "We will confirm your order by email."}'
)


def translation(chance: random.Random) -> list[dict[str, str]]:
    sentences = [
        f"{chance.choice(_WHO)} {chance.choice(_DOES)} {chance.choice(_WHEN)} {chance.choice(_WHERE)}." for _ in "123"
    ]
    return [{"role": "user", "content": "Translate this German text to English:\n\n" + " ".join(sentences)}]


def order(chance: random.Random) -> list[dict[str, str]]:
    text = (
        f"{chance.choice(_NAMES)} orders {chance.randint(2, 90)} {chance.choice(_THINGS)} to {chance.choice(_PLACES)} "
        f"for {chance.choice(_DAYS)}{chance.choice(('.', ', and is in a hurry.'))}"
    )
    turns = (("system", _FORM), ("user", _EXAMPLE_ORDER), ("assistant", _EXAMPLE), ("user", text))
    return [{"role": role, "content": content} for role, content in turns]


def requests() -> Iterator[tuple[str, list[dict[str, str]]]]:
    """Requests without end: both streams in turn, and every fifth a general one."""
    chance = random.Random(7)
    lines = Path("drafter/assets/prompts.jsonl").read_text(encoding="utf-8").splitlines()
    general = [json.loads(line)["prompt"] for line in lines]
    while True:
        for kind, make in (("translation", translation), ("json", order)) * 2:
            yield kind, make(chance)
        yield "general", [{"role": "user", "content": chance.choice(general)}]


def ask(http: httpx.Client, kind: str, messages: list[dict[str, str]]) -> tuple[int, int]:
    """Tokens and target forwards of one greedy answer."""
    body = {
        "model": TARGET, "messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0, "details": True,
        "record": kind != "general",
    }  # fmt: skip
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    details = answer["choices"][0]["details"]
    return details["num_tokens"], details["num_target_forwards"]


def run(folder: Path, minutes: float, answers: int) -> list[dict[str, Any]]:
    """Serve, ask, adapt after so many recorded answers, and ask on after the swap; one row a bin and kind."""
    command = [sys.executable, "-m", "drafter"]
    models = ["--target", TARGET, "--drafter", str(folder / "drafter")]
    flags = ["--dtype", "bfloat16", "--max-model-len", "1024", "--follow", "--record", str(folder / "traffic")]
    log = (folder / "server.log").open("w")
    server = subprocess.Popen([*command, "serve", *models, *flags, "--port", "0"], stderr=log)
    adapting: subprocess.Popen[bytes] | None = None
    try:
        bins: dict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0, 0])
        with httpx.Client(base_url=address_of(folder / "server.log"), timeout=600) as http:
            first = digest = drafter_of(http)
            start, num_recorded, num_after = time.monotonic(), 0, 0
            for kind, messages in requests():
                digest = drafter_of(http)
                found = ask(http, kind, messages)
                seconds = time.monotonic() - start
                counts = bins[int(seconds) // BIN_SECONDS * BIN_SECONDS, kind, digest]
                counts[0], counts[1] = counts[0] + found[0], counts[1] + found[1]
                num_recorded += kind != "general"
                if adapting is None and num_recorded >= answers:
                    print(f"{seconds:.0f} s: {num_recorded} answers are recorded; adapting", file=sys.stderr)
                    words = ["--traffic", str(folder / "traffic"), "--out", str(folder / "drafter")]
                    words += ["--minutes", str(minutes), "--threads", "1"]
                    adapting = subprocess.Popen([*command, "adapt", *models, *words])
                if adapting is not None and adapting.poll() not in (None, 0):
                    raise SystemExit(f"drafter adapt ended with code {adapting.returncode}")
                if digest != first:
                    if not num_after:
                        print(f"{seconds:.0f} s: drafter {digest} has taken over", file=sys.stderr)
                    num_after += 1
                if num_after == ANSWERS_AFTER:
                    break
        return [
            {"second": second, "kind": kind, "drafter": digest, "num_tokens": tokens, "num_target_forwards": forwards}
            for (second, kind, digest), (tokens, forwards) in sorted(bins.items())
        ]
    finally:
        for process in (adapting, server):
            if process is not None and process.poll() is None:
                process.terminate()
                process.wait(60)


def address_of(log: Path) -> str:
    """The server's address, as soon as its log names the address."""
    while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
        time.sleep(0.2)
    return found[0]


def drafter_of(http: httpx.Client) -> str:
    """Digest of the drafter in use."""
    return str(http.get("/v1/models").json()["data"][0]["drafter"])


def rate(rows: list[dict[str, Any]]) -> float:
    return sum(row["num_tokens"] for row in rows) / sum(row["num_target_forwards"] for row in rows)


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    """Tokens per step over time, their means with each drafter, and the moment of the swap; the means are printed."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "adapt"
    from matplotlib import pyplot

    digests = list(dict.fromkeys(row["drafter"] for row in sorted(rows, key=lambda row: row["second"])))
    figure, axes = pyplot.subplots(figsize=(8, 3.2))
    end = (max(row["second"] for row in rows) + BIN_SECONDS) / 60
    for kind, colour in KINDS.items():
        rates = []
        for digest in digests:
            own = [row for row in rows if row["kind"] == kind and row["drafter"] == digest]
            minutes = [(row["second"] + BIN_SECONDS / 2) / 60 for row in own]
            rates.append(rate(own))
            axes.plot(minutes, [rate([row]) for row in own], color=colour, alpha=0.4, linewidth=1)
            axes.hlines(rates[-1], minutes[0], minutes[-1], color=colour, linewidth=2.4)
        label = f"{NAMES[kind]}\n{rates[0]:.2f} \N{RIGHTWARDS ARROW} {rates[-1]:.2f}"
        print(label.replace("\n", ": "), "tokens per step")
        axes.annotate(label, (end, rates[-1]), color=colour, fontsize=8.5, va="center")
    swap = min(row["second"] for row in rows if row["drafter"] != digests[0]) / 60
    axes.axvline(swap, color="black", linewidth=0.8, linestyle=":")
    axes.text(swap, axes.get_ylim()[1], "the new drafter takes over ", ha="right", va="top", fontsize=8.5)
    axes.set_xlim(0, end)
    axes.set_ylim(bottom=1)
    axes.set_xlabel("minutes since the server's start")
    axes.set_ylabel("tokens per step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, help="of results.jsonl, which is drawn again where it exists, and adapt.svg"
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="of training")
    parser.add_argument("--answers", type=int, default=300, help="recorded before the training")
    args = parser.parse_args()
    results = args.folder / "results.jsonl"
    if not results.exists():
        rows = run(args.folder, args.minutes, args.answers)
        results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw([json.loads(line) for line in results.read_text().splitlines()], args.folder / "adapt.svg")


if __name__ == "__main__":
    main()
