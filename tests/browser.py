"""A headless Chromium, spoken to through a pipe by the DevTools protocol: what a page logs, asks for and looks like."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe"),
)


def found() -> str | None:
    """The browser of this machine, if it has one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page at a time.

    Attributes:
        errors: what the page logged to the console, or threw.
        requests: every address that the page asked for.
    """

    def __enter__(self):
        self.errors, self.requests, self._answers, self._sent, self._rest = [], [], {}, 0, b""
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        command = [found(), *OPTIONS, f"--user-data-dir={self._profile.name}", "about:blank"]
        # The protocol is spoken on the descriptors 3 and 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{answers}', "browser", *command]
        quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._process = subprocess.Popen(shell, pass_fds=(theirs, answers), **quiet)
        os.close(theirs), os.close(answers)
        self._session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self._session = None
        self.call("Browser.close")
        os.close(self._write), os.close(self._read)
        self._process.wait(20)
        self._profile.cleanup()

    def call(self, method: str, **parameters) -> dict:
        """Send a command and return its result."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while self._sent not in self._answers:
            self._hear()
        answer = self._answers.pop(self._sent)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def open(self, url: str, width: int = 1000, scheme: str = "light") -> None:
        """Open a page in a window so wide, for a reader who prefers a light or a dark scheme."""
        self.errors.clear(), self.requests.clear()
        size = dict(width=width, height=800, deviceScaleFactor=1, mobile=True)  # no scroll bars
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._loaded = False
        self.call("Page.navigate", url=url)
        while not self._loaded:
            self._hear()

    def value(self, script: str):
        """What a script gives in the page."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def picture(self) -> bytes:
        """The whole page as a PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        return base64.b64decode(shot["data"])

    def _hear(self) -> None:
        """Take in what comes next."""
        until = time.monotonic() + 60
        while b"\0" not in self._rest:
            assert select.select([self._read], [], [], until - time.monotonic())[0], "The browser says nothing."
            part = os.read(self._read, 1 << 20)
            assert part, "The browser has gone."
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        message = json.loads(line)
        method, parameters = message.get("method"), message.get("params", {})
        if "id" in message:
            self._answers[message["id"]] = message
        elif method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("warning", "error"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(str(parameters["args"]))
