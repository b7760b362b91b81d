# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium driven over its debugging pipe; no package is needed, only the browser."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-quic --no-first-run"
    " --no-default-browser-check --disable-background-networking --disable-component-update --disable-sync"
    " --disable-extensions --disable-default-apps --mute-audio --hide-scrollbars --remote-debugging-pipe"
)


def find() -> str | None:
    """The browser's path: the environment's CHROMIUM, or the first of the usual names."""
    named = os.environ.get("CHROMIUM")
    if named:
        return named
    installed = filter(None, map(shutil.which, NAMES))
    return next(installed, None)


class Chromium:
    """One browser with one page at a time. Use it in a ``with``: it leaves no process behind."""

    def __init__(self, binary: str, profile: Path, *, timeout: float = 60.0) -> None:
        self.timeout = timeout
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        self._target: str | None = None
        self._last = 0
        self._buffer = b""
        browser_input, self._commands = os.pipe()
        self._answers, browser_output = os.pipe()
        # Above 9, so that neither is overwritten when they become 3 and 4 in the browser.
        browser_input = _raised(browser_input)
        browser_output = _raised(browser_output)
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$@" 3<&{browser_input} 4>&{browser_output}', "bash"),
                *(binary, *_FLAGS.split(), f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=(browser_input, browser_output),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(browser_input)
        os.close(browser_output)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command of the DevTools protocol to the page (to the browser, for Target and Browser) and waits."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": params}
        if self._session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def open(self, url: str, window: tuple[int, int], *, dark: bool = False, touch: bool = False) -> None:
        """Opens an address in a fresh page of a size; events of the page before are forgotten."""
        if self._target:
            self.call("Target.closeTarget", targetId=self._target)
        self._target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        self.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        width, height = window
        pixels_per_point = 2 if touch else 1
        metrics = {"width": width, "height": height, "deviceScaleFactor": pixels_per_point, "mobile": touch}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        until = time.monotonic() + self.timeout
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            if time.monotonic() > until:
                raise TimeoutError(f"{url} did not load in {self.timeout:g} s")
            self.events.append(self._read())
        self.settle()

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def settle(self) -> None:
        """Waits until the page has been laid out and its scroll events are through."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def press(self, key: str) -> None:
        """Presses a key such as Tab, Escape or ArrowRight, and waits for what the page does then."""
        codes = {"Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])
        self.settle()

    def move(self, x: float, y: float) -> None:
        """Moves the mouse, and waits as well."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        self.settle()

    def tap(self, x: float, y: float) -> None:
        """Taps with a finger, and waits as well."""
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settle()

    def complaints(self) -> list[str]:
        """Exceptions, console errors and warnings, and log entries of the page."""
        complaints = []
        for event in self.events:
            method = event.get("method")
            params = event.get("params", {})
            bad_call = method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert")
            bad_entry = method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning")
            if method == "Runtime.exceptionThrown" or bad_call or bad_entry:
                complaints.append(json.dumps(params))
        return complaints

    def requests(self) -> list[str]:
        """Every address that the page asked for, data: addresses aside."""
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        urls = [params["request"]["url"] for params in sent]
        return [url for url in urls if not url.startswith("data:")]

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + self.timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium did not answer in {self.timeout:g} s")
            received = os.read(self._answers, 1 << 20)
            if not received:
                raise OSError(f"Chromium ended with exit code {self._process.wait()}")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)


def _raised(descriptor: int) -> int:
    raised = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return raised
