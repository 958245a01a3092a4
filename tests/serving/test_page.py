"""The page at ``/``: self-contained, and alive in a browser."""

import re
from importlib.resources import files

import pytest

from tests.serving.live import MODEL, Live, offline, wait_until
from tests.sizes import only_full


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


@only_full
def test_a_chat_in_the_browser(live: Live) -> None:
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    with webdriver.Chrome(options=options) as window:

        def text(selector: str) -> str:
            return str(window.find_elements("css selector", selector)[-1].get_property("textContent"))

        def count(selector: str) -> int:
            return len(window.find_elements("css selector", selector))

        def ask(question: str) -> None:
            window.execute_script("document.getElementById('max-tokens').value = 24")
            window.find_element("css selector", "#input").send_keys(question)
            window.find_element("css selector", "#send").click()

        window.get(live.url)
        wait_until(lambda: text("#model") == MODEL)
        ask("Name a colour.")
        wait_until(lambda: count(".again"))
        turns = [{"role": "user", "content": "Name a colour."}]
        wanted = offline(turns).text
        assert text(".answer .text") == wanted and count(".answer .text .d") > 0 < count(".answer .text .o")
        assert "24 tokens" in text(".facts") and float(text("#per-step")) > 1
        assert count("#tree .root") == 1 and count("#tree g") == 97
        window.find_element("css selector", ".again").click()
        wait_until(lambda: count(".facts .tag") == 3)
        assert "the same text" in text("#log") and float(text("#per-step")) == 1 and count("#tree g") == 2
        ask("And another one.")
        wait_until(lambda: count(".answer:not(.live)") == 3)
        turns += [{"role": "assistant", "content": wanted}, {"role": "user", "content": "And another one."}]
        assert text(".answer .text") == offline(turns).text
        window.find_element("css selector", "#new").click()
        wait_until(lambda: count(".hello"))
        live.wait_until_idle()
