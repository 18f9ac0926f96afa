"""Headless Chromium through chromedriver's WebDriver HTTP interface, without a client package."""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Self
from urllib.request import Request, urlopen

import pytest

FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars",
]  # fmt: skip


def missing() -> str | None:
    """The program that is not on PATH, if any."""
    return next((p for p in ("chromium", "chromedriver") if shutil.which(p) is None), None)


class Browser:
    """A context manager: one window on its own profile. Skips the test without the programs."""

    def __init__(self, width: int = 1280, height: int = 1000, *flags: str):
        self.flags = [*FLAGS, f"--window-size={width},{height}", *flags]

    def __enter__(self) -> Self:
        if program := missing():
            pytest.skip(f"no {program} on PATH (Debian: apt-get install chromium chromium-driver)")
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            for line in self.driver.stdout:
                if match := re.search(r"started successfully on port (\d+)", line):
                    break
            self.url = f"http://127.0.0.1:{match[1]}/session"
            self.url += "/" + self._call("", {"capabilities": {"alwaysMatch": {
                "goog:chromeOptions": {
                    "binary": shutil.which("chromium"),
                    "args": [*self.flags, f"--user-data-dir={self.folder.name}"],
                },
                "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            }}})["sessionId"]  # fmt: skip
        except BaseException:
            self.driver.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._call("", method="DELETE")
        finally:
            self.driver.terminate()
            self.driver.wait(20)
            self.folder.cleanup()

    def _call(self, path: str, body: dict | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(
            self.url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, page: Path | str) -> None:
        """A file, or an address."""
        self.address = page if isinstance(page, str) else page.resolve().as_uri()
        self._call("/url", {"url": self.address})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that `script` returns in the page."""
        return self._call("/execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, seconds: float = 20) -> Any:
        """The value of `script` as soon as it is true; the last one when it never is."""
        end = monotonic() + seconds
        while not (value := self.run(script)) and monotonic() < end:
            sleep(0.05)
        return value

    def log(self, kind: str) -> list[dict]:
        """Entries of the "browser" (console) or "performance" (DevTools events) log."""
        return self._call("/se/log", {"type": kind})

    def requests(self) -> list[str]:
        """The addresses that opened files, themselves among them, asked for."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
            and event["params"]["documentURL"].startswith("file:")
        ]
