"""Draws tree.svg: one tree, its packed form and its mask, computed by drafter.reference.

Run from the repository root: python docs/img/draw_tree.py
"""

from pathlib import Path
from xml.sax.saxutils import escape

import torch

from drafter.reference import Node, accept_tree, ancestors, path_to

PREFIX = ["Once", "upon"]
WORDS = ["a", "time", "big", ",", "there", "old", "there"]
NODES = [
    Node(0, 0, 0, 0.0),
    Node(1, 0, 1, 0.0),
    Node(2, 0, 1, 0.0),
    Node(3, 1, 2, 0.0),
    Node(4, 1, 2, 0.0),
    Node(5, 2, 2, 0.0),
    Node(6, 3, 3, 0.0),
]
PICK_WORDS = ["time", ",", "house", "there", "was", "house", "was"]  # what the target says after each node
AT = [(190, 110), (110, 210), (280, 210), (60, 310), (160, 310), (280, 310), (60, 410)]  # where the tree shows them

CELL, LEFT, TOP = 50, 545, 96
INK, FAINT, GREEN, PALE, BLUE = "#1f2937", "#6b7280", "#15803d", "#dcfce7", "#dbeafe"


def text(x, y, label, *, size=15, color=INK, anchor="middle", weight="normal"):
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(str(label))}</text>'
    )


def rect(x, y, width, height, fill, stroke="#d1d5db"):
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="{stroke}"/>'


def draw_tree(accepted):
    parts = [text(40, 40, "the tree", size=19, anchor="start", weight="bold")]
    for i, node in enumerate(NODES[1:], start=1):
        (x1, y1), (x2, y2) = AT[node.parent], AT[i]
        color, width = (GREEN, 3) if i in accepted else (FAINT, 1.5)
        parts.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="{width}"/>')
    for i, (x, y) in enumerate(AT):
        fill, stroke = (PALE, GREEN) if i in accepted else ("#ffffff", FAINT)
        parts.append(
            f'<rect x="{x - 38}" y="{y - 18}" width="76" height="36" rx="18" fill="{fill}" stroke="{stroke}"/>'
        )
        parts.append(text(x, y + 6, WORDS[i], size=17))
        parts.append(text(x + 44, y - 10, i, size=12, color=FAINT, anchor="start"))
    x, y = AT[0]
    parts.append(text(x - 62, y + 6, " ".join(PREFIX), size=17, color=FAINT, anchor="end"))
    parts.append(text(x + 62, y + 6, "root", size=14, color=FAINT, anchor="start"))
    last = accepted[-1]
    x, y = AT[last]
    parts.append(
        f'<line x1="{x}" y1="{y + 18}" x2="{x}" y2="{y + 68}" stroke="{GREEN}" stroke-width="2" '
        'stroke-dasharray="5 4"/>'
    )
    parts.append(text(x, y + 90, PICK_WORDS[last], size=17, color=GREEN, weight="bold"))
    parts.append(
        text(x + 36, y + 90, "the target's pick, no child: the next root", size=14, color=GREEN, anchor="start")
    )
    return parts


def draw_packed():
    length = len(PREFIX)
    parts = [text(LEFT, 40, "packed, and what each node may see", size=19, anchor="start", weight="bold")]
    rows = {
        "slot": list(range(length + len(NODES))),
        "token": PREFIX + WORDS,
        "node": [""] * length + list(range(len(NODES))),
        "parent": [""] * length + [node.parent for node in NODES],
        "depth": [""] * length + [node.depth for node in NODES],
        "position": list(range(length)) + [length + node.depth for node in NODES],
    }
    for r, (name, values) in enumerate(rows.items()):
        y = TOP + 26 * r
        parts.append(text(LEFT - 16, y, name, size=14, color=FAINT, anchor="end"))
        for c, value in enumerate(values):
            weight = "bold" if name == "token" else "normal"
            parts.append(text(LEFT + CELL * (c + 0.5), y, value, size=15, weight=weight))
    return parts


def draw_mask(accepted):
    length, parts = len(PREFIX), []
    top = TOP + 26 * 6 - 8
    parent = torch.tensor([node.parent for node in NODES])
    sees = ancestors(parent, 3).tolist()
    for i in range(len(NODES)):
        y = top + 34 * i
        color = GREEN if i in accepted else INK
        parts.append(text(LEFT - 16, y + 23, WORDS[i], size=15, color=color, anchor="end"))
        for c in range(length + len(NODES)):
            is_seen = c < length or sees[i][c - length]
            fill = (BLUE if c < length else PALE) if is_seen else "#ffffff"
            parts.append(rect(LEFT + CELL * c, y, CELL, 34, fill))
            if is_seen:
                parts.append(text(LEFT + CELL * (c + 0.5), y + 23, "1", size=14))
    y = top + 34 * len(NODES) + 44
    parts.append(text(LEFT - 16, y + 23, "after", size=14, color=FAINT, anchor="end"))
    kept = PREFIX + [WORDS[i] for i in accepted]
    for c in range(length + len(NODES)):
        fill = BLUE if c < len(kept) else "#ffffff"
        parts.append(rect(LEFT + CELL * c, y, CELL, 34, fill))
        parts.append(text(LEFT + CELL * (c + 0.5), y + 23, kept[c] if c < len(kept) else "", size=15))
    for c, i in enumerate(accepted):
        if i != c:
            x1, x2 = LEFT + CELL * (length + i + 0.5), LEFT + CELL * (length + c + 0.5)
            parts.append(
                f'<path d="M {x1} {y - 42} C {x1} {y - 16}, {x2} {y - 30}, {x2} {y - 4}" fill="none" '
                f'stroke="{GREEN}" stroke-width="2" marker-end="url(#arrow)"/>'
            )
    note = "accepted keys and values move together; the rest is free"
    parts.append(text(LEFT, y + 58, note, size=14, color=FAINT, anchor="start"))
    return parts


def main():
    token, parent, depth = (torch.tensor([node[k] for node in NODES]) for k in range(3))
    ids = {word: i for i, word in reversed(list(enumerate(WORDS)))}
    token = torch.tensor([ids[word] for word in WORDS])
    pick = torch.tensor([ids.get(word, -1) for word in PICK_WORDS])
    accepted = path_to(NODES, int(accept_tree(token, parent, depth, pick, 3)))
    assert [WORDS[i] for i in accepted] == ["a", "time", ",", "there"]
    parts = [*draw_tree(accepted), *draw_packed(), *draw_mask(accepted)]
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1030 600" '
        'font-family="DejaVu Sans, Helvetica, sans-serif">'
        '<defs><marker id="arrow" markerUnits="userSpaceOnUse" markerWidth="9" markerHeight="9" '
        'refX="8" refY="4" orient="auto">'
        f'<path d="M 0 0 L 8 4 L 0 8 z" fill="{GREEN}"/></marker></defs>'
        + rect(0, 0, 1030, 600, "#ffffff", "#ffffff")
        + "\n".join(parts)
        + "</svg>\n"
    )
    Path(__file__).with_name("tree.svg").write_text(svg)


if __name__ == "__main__":
    main()
