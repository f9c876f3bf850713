"""A page in Debian's chromium, driven through its DevTools protocol over a pipe: no package is needed."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
AXE = Path(__file__).parents[1] / ".axe" / "node_modules" / "axe-core" / "axe.min.js"  # `make axe` installs it
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
needs_axe = pytest.mark.skipif(CHROMIUM is None or not AXE.exists(), reason="needs chromium, and axe-core: `make axe`")


class Browser:
    """One chromium with one tab. ``errors`` collects what its console and its network say is wrong."""

    def __init__(self, folder: Path) -> None:
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()

        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"]
        # Chromium reads commands from 3 and answers on 4. A shell puts them there: Python would have to fork beside other threads.
        shell = ["bash", "-c", f'exec "$@" 3<&{to_read} 4>&{to_write}', "bash"]
        self._process = subprocess.Popen(
            [*shell, *command], pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_read)
        os.close(to_write)
        self._count, self._buffer, self._session = 0, b"", None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._in, 1 << 16)
            assert read, "chromium has ended"
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\0")
        found = json.loads(line)
        method, about = found.get("method"), found.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(about["exceptionDetails"]))
        if method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(str(about["args"]))
        if method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(about["entry"]["text"])
        if method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        return found

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command and its answer."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._out, json.dumps(command).encode() + b"\0")
        while True:
            found = self._message()
            if found.get("id") == self._count:
                assert "error" not in found, found
                return found["result"]

    def open(self, path: Path, width: int = 1280, theme: str = "light", query: str = "") -> None:
        """Opens a file in a window of a width and a theme, and waits until it is loaded."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.errors.clear()
        self.requests.clear()
        self.send("Page.navigate", url=path.as_uri() + query)
        while self._message().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """What an expression is in the page; promises are waited for."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> Any:
        """The value of an expression in the page, once it is true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"{script} stays {found!r}"
            time.sleep(0.05)
        return found

    def serious_findings(self) -> list[str]:
        """What axe-core calls serious or critical in the page: the rule, and where."""
        self.run(AXE.read_text(encoding="utf-8"))
        found = self.run("axe.run(document, {resultTypes: ['violations']}).then(result => result.violations)")
        return [
            f"{each['id']}: {node['html'][:120]}"
            for each in found
            if each["impact"] in ("serious", "critical")
            for node in each["nodes"]
        ]

    def key(self, name: str, code: int) -> None:
        """Presses a key."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code)

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        found = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        """Ends chromium."""
        os.close(self._out)
        self._process.wait(20)
        os.close(self._in)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One chromium for all tests of a process."""
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()
