"""The page at ``/`` is self-contained."""

import re
from importlib.resources import files

from tests.serving.live import Live


def test_page_loads_nothing_from_elsewhere_and_no_text_becomes_markup(idle: Live) -> None:
    html = (files("drafter.serving") / "page.html").read_text(encoding="utf-8")
    with idle.http() as http:
        answer = http.get("/")
    assert answer.text == html and answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"""(src|href|action)\s*=\s*["']?(https?:)?//""", html)
    assert not re.search(r"@import|url\(|<script[^>]+src|<link[^>]+stylesheet", html)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    # What the page puts between tags is escaped or a number; other texts of the server are set as text.
    assert not re.search(r"outerHTML|insertAdjacentHTML|document\.write|srcdoc|eval\(|new Function", html)
    templates = [found for found in re.findall(r"`[^`]*`", html) if "<" in found]
    put = [part for found in templates for part in re.findall(r"\$\{([^{}]*)\}", found)]
    texts = [part for part in put if re.search(r"label|token\b|text|name\b|content|message|bonus|model", part)]
    assert len(put) > 10 and {part for part in texts if not part.startswith("escape(")} <= {
        "name",  # of a bar: a constant
        'same ? "the same text" : "the text differs"',
    }
    assert '"&": "&amp;", "<": "&lt;", ">": "&gt;"' in html
    assert re.findall(r"innerHTML = (\S+)", html) == ['parts.join("");', 'row("Drafts', "`<svg", "`<div"]
