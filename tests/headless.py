"""Headless Chromium, driven through the DevTools protocol over two pipes: no port, no driver, no package.

Messages are JSON with a zero byte behind each (``--remote-debugging-pipe``): what we ask goes in on descriptor 3,
answers and events come out on descriptor 4.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium")
_PATIENCE_S = 240.0


class Browser:
    """One tab. ``events`` are all that it has reported so far: requests, console messages, exceptions."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        ours, its_input = None, None
        its_input, ours = os.pipe()
        self._output, its_output = os.pipe()
        arguments = [
            CHROMIUM,
            "--headless",
            "--no-sandbox",  # without it Chromium refuses to run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-extensions",
            "--disable-background-networking",
            "--no-first-run",
            f"--user-data-dir={profile}",
            "--remote-debugging-pipe",
            "about:blank",
        ]
        # The shell puts the pipes where Chromium looks for them.
        script = f'exec "$@" 3<&{its_input} 4>&{its_output}'
        with open(profile.parent / "chromium.log", "wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", script, "chromium", *arguments],
                pass_fds=(its_input, its_output),
                stdout=log,
                stderr=log,
            )
        os.close(its_input)
        os.close(its_output)
        self._input = ours
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        os.close(self._input)  # Chromium ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._output)

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result; events that come in meanwhile are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._input, content) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def open(self, address: str, width: int, *, dark: bool = False) -> None:
        """Load a page at a width in CSS pixels and wait until all of it is there."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def of_kind(self, *methods: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event.get("method") in methods]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"Chromium said nothing for {_PATIENCE_S:g} s"
            part = os.read(self._output, 2**20)
            assert part, f"Chromium ended with status {self._process.wait(10)}"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        received = json.loads(message)
        if "method" in received:
            self.events.append(received)
        return received
