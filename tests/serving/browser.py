"""A headless Chromium, driven through chromedriver's own protocol (W3C WebDriver: JSON over HTTP)."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key under which the protocol names an element


def is_installed() -> bool:
    """Whether this machine has the browser and its driver."""
    return bool(shutil.which("chromedriver") and (shutil.which("chromium") or shutil.which("google-chrome")))


class Browser:
    """One window."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http = http
        self._session = session

    def call(self, method: str, path: str, **body: Any) -> Any:
        response = self._http.request(
            method, f"/session/{self._session}{path}", json=body if method == "POST" else None
        )
        assert response.status_code == 200, response.text
        return response.json()["value"]

    def open(self, url: str) -> None:
        self.call("POST", "/url", url=url)

    def run(self, script: str, *args: Any) -> Any:
        """The value of a script's ``return``."""
        return self.call("POST", "/execute/sync", script=script, args=list(args))

    def find(self, selector: str) -> str:
        element = self.call("POST", "/element", using="css selector", value=selector)
        return str(element[_ELEMENT])

    def click(self, selector: str) -> None:
        self.call("POST", f"/element/{self.find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self.call("POST", f"/element/{self.find(selector)}/value", text=text)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def wait(self, script: str, seconds: float = 30) -> None:
        """Until the script's expression is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"return Boolean({script})"):
            assert time.monotonic() < deadline, f"waited in vain for {script}"
            time.sleep(0.05)


@contextmanager
def browser() -> Iterator[Browser]:
    """Start a browser, and end it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen(["chromedriver", f"--port={port}", "--silent"], stdout=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
            deadline = time.monotonic() + 30
            while not _is_up(http):
                assert time.monotonic() < deadline
                time.sleep(0.1)
            flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
            options = {"goog:chromeOptions": {"args": flags}}
            answer = http.post("/session", json={"capabilities": {"alwaysMatch": options}})
            assert answer.status_code == 200, answer.text
            window = Browser(http, answer.json()["value"]["sessionId"])
            try:
                yield window
            finally:
                window.call("DELETE", "")  # else the browser outlives its driver
    finally:
        driver.terminate()
        driver.wait(10)


def _is_up(http: httpx.Client) -> bool:
    try:
        return bool(http.get("/status").json()["value"]["ready"])
    except httpx.TransportError:
        return False
