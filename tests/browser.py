"""Page of headless Chromium, for tests that look at HTML."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Programs by which systems know it.
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
#: The browser's own requests, such as those for updates, are off.
_OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --remote-debugging-pipe --window-size=1400,1000 --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync"
)


class Browser:
    """A page of headless Chromium, driven through its debugging pipe.

    Args:
        read: descriptor of the browser's output.
        write: descriptor of the browser's input.

    Attributes:
        events: reports of the page so far, after :meth:`listen`.
    """

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write = os.fdopen(read, "rb"), os.fdopen(write, "wb")
        self._numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol to the page, and wait for its result."""
        return self._send(method, self._session, **params)

    def listen(self) -> None:
        """Report requests, messages of the console, and errors from now on."""
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    @property
    def requests(self) -> list[str]:
        """Addresses that the page has asked for."""
        asked = (event for event in self.events if event["method"] == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in asked]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """Errors, and all that the page or the browser wrote to the console."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event["method"] in kinds]

    def open(self, url: str) -> None:
        """Go to an address."""
        self.send("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        return self.send("Runtime.evaluate", expression=expression)["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> Any:
        """Return the value of an expression as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.1)
        return value

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        """Show the page on a screen of this size in pixels, in light or dark colours."""
        mobile = width < 600
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, whole: bool = False) -> bytes:
        """Take a picture of the screen, or of the whole page, as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"])

    def close(self) -> None:
        """Close the pipe."""
        for pipe in (self._read, self._write):
            with contextlib.suppress(OSError):
                pipe.close()

    def _send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while True:
            answer = json.loads(b"".join(iter(lambda: self._read.read(1), b"\0")))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            if "method" in answer:
                self.events.append(answer)


def find_chromium() -> str | None:
    """Find the program; ``None`` where there is none. With Debian: ``apt-get install chromium``."""
    return next(filter(None, map(shutil.which, _PROGRAMS)), None)


@contextlib.contextmanager
def chromium(program: str, profile: Path) -> Iterator[Browser]:
    """Start a browser, and end it after the block.

    Args:
        program: of Chromium.
        profile: directory that it may fill.
    """
    from_browser, to_us = os.pipe()
    from_us, to_browser = os.pipe()
    # Chromium reads from descriptor 3 and writes to 4.
    command = f'exec "{program}" {_OPTIONS} --user-data-dir="{profile}" 3<&{from_us} 4>&{to_us}'
    process = subprocess.Popen(["bash", "-c", command], pass_fds=(from_us, to_us), stderr=subprocess.DEVNULL)
    os.close(from_us)
    os.close(to_us)
    try:
        with contextlib.closing(Browser(from_browser, to_browser)) as browser:
            yield browser
    finally:
        process.kill()
        process.wait()
