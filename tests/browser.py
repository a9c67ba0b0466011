"""A headless Chromium that tests talk to: DevTools protocol over a websocket, nothing downloaded."""

import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "google-chrome")
_START_SECONDS = 60
_ALONE = (  # without a window and without asking anybody; root, as in containers, has no sandbox
    *("--headless", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
    *(["--no-sandbox"] if os.geteuid() == 0 else []),
)


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CHROME_PATH", ""), *_NAMES))), None)


class Browser:
    """One tab; `events` holds all that it told: requests, exceptions, lines of its console."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.as_uri())
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait_for(self, expression: str) -> None:
        until = time.monotonic() + _START_SECONDS
        while not self.evaluate(expression):
            assert time.monotonic() < until, f"never true: {expression}"
            time.sleep(0.05)

    def resize(self, *, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )


@contextmanager
def browser() -> Iterator[Browser]:
    """Needs websockets and a browser; ends the browser however the block ends."""
    from websockets.sync.client import connect

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = ("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank")
        process = subprocess.Popen(
            [find_browser(), *_ALONE, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            port = _port(Path(profile) / "DevToolsActivePort")
            direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with direct.open(f"http://127.0.0.1:{port}/json/list") as answer:
                (tab,) = [target for target in json.load(answer) if target["type"] == "page"]
            with connect(tab["webSocketDebuggerUrl"], max_size=None, proxy=None) as socket:
                yield Browser(socket)
        finally:
            process.terminate()
            process.wait(timeout=20)


def _port(file: Path) -> int:
    until = time.monotonic() + _START_SECONDS
    while not (file.exists() and file.read_text().count("\n")):
        assert time.monotonic() < until, "the browser did not start"
        time.sleep(0.05)
    return int(file.read_text().splitlines()[0])
