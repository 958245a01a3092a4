"""The page at ``/``: self-contained, and alive in a browser."""

import re
from importlib.resources import files

import pytest

from tests.serving.browser import browser, is_installed
from tests.serving.live import MODEL, Live, live_server, offline
from tests.serving.tiny import tiny_engine
from tests.sizes import IS_FULL


def test_page_loads_nothing_from_elsewhere(idle: Live) -> None:
    html = (files("drafter.serving") / "page.html").read_text(encoding="utf-8")
    with idle.http() as http:
        answer = http.get("/")
    assert answer.text == html and answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"""(src|href|action)\s*=\s*["']?(https?:)?//""", html)
    assert not re.search(r"@import|url\(|<script[^>]+src|<link[^>]+stylesheet", html)
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_no_text_becomes_markup() -> None:
    """What the page puts between tags is escaped or a number; other texts of the server are set as text."""
    html = (files("drafter.serving") / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"outerHTML|insertAdjacentHTML|document\.write|srcdoc|eval\(|new Function", html)
    templates = [found for found in re.findall(r"`[^`]*`", html) if "<" in found]
    put = [part for found in templates for part in re.findall(r"\$\{([^{}]*)\}", found)]
    texts = [part for part in put if re.search(r"label|token\b|text|name\b|content|message|bonus|model", part)]
    assert len(put) > 10 and {part for part in texts if not part.startswith("escape(")} <= {
        "name",  # of a bar: a constant
        'same ? "the same text" : "the text differs"',
    }
    assert '"&": "&amp;", "<": "&lt;", ">": "&gt;"' in html
    assert re.findall(r"innerHTML = (\S+)", html) == ['parts.join("");', 'row("Drafter', "`<svg", "`<div"]


def test_a_name_with_markup_stays_in_json() -> None:
    name = "</script><img src=x onerror=alert(1)>"
    engine = tiny_engine(method="none", tree_size=1)
    with live_server(engine, model_name=name) as server, server.http() as http:
        assert name not in http.get("/").text, "the page asks for the name, and sets the name as text"
        answer = http.get("/v1/models")
        assert answer.headers["content-type"] == "application/json" and answer.json()["data"][0]["id"] == name


@pytest.mark.skipif(not (IS_FULL and is_installed()), reason="needs DRAFTER_FULL_TESTS=1, chromium and chromedriver")
def test_a_chat_in_the_browser(live: Live) -> None:
    def ask(text: str) -> None:
        window.run("document.getElementById('max-tokens').value = 24")
        window.type("#input", text)
        window.click("#send")

    with browser() as window:
        window.open(live.url)
        window.wait(f"document.getElementById('model').textContent === '{MODEL}'")
        assert window.count(".tries button") == 3
        ask("Name a colour.")
        window.wait("document.querySelector('.again')")
        wanted = offline([{"role": "user", "content": "Name a colour."}])
        assert window.text(".answer .text") == wanted.text
        assert window.count(".answer .text .d") > 0 < window.count(".answer .text .o")
        assert "24 tokens" in window.text(".facts") and "drafter on" in window.text(".facts")
        assert float(window.text("#per-step")) > 1
        assert window.count("#tree .root") == 1 and window.count("#tree g") == 97
        window.click(".again")
        window.wait("document.querySelectorAll('.facts .tag').length === 3")
        assert "the same text" in window.text("#log")
        assert window.run("return document.getElementById('drafter').checked") is False
        assert float(window.text("#per-step")) == 1 and window.count("#tree g") == 2
        window.run("document.getElementById('drafter').click()")
        ask("And another one.")
        window.wait("document.querySelectorAll('.answer:not(.live)').length === 3")
        turns = [{"role": "user", "content": "Name a colour."}, {"role": "assistant", "content": wanted.text}]
        again = offline([*turns, {"role": "user", "content": "And another one."}])
        assert window.run("return [...document.querySelectorAll('.answer .text')].at(-1).textContent") == again.text
        window.click("#new")
        window.wait("document.querySelector('.hello')")
        live.wait_until_idle()
