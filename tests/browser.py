"""A real headless browser for tests, driven over its DevTools pipe: no driver, no port, no network.

    with Browser(find_browser()) as browser:
        page = browser.open(file, width=390)
        assert page.evaluate("document.title") == "..."
        assert page.errors == []

Which browser: the executable that ARMILLARY_BROWSER names, or the one inside the archive that it
names, or a Chromium on the PATH. The archive is the package @sparticuz/chromium of npm, which holds
a whole Chromium (`npm pack @sparticuz/chromium@153.0.0`; `.ci/run` fetches it). It is unpacked
once, beside itself, with the package `brotli`.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes.util
import itertools
import json
import os
import select
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

VARIABLE = "ARMILLARY_BROWSER"
_ON_PATH = ("chromium", "chromium-browser", "chrome-headless-shell", "google-chrome")
_FLAGS = (
    "--headless=shell", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
    "--hide-scrollbars", "--font-render-hinting=none", "--remote-debugging-pipe",
)  # fmt: skip
_SECONDS = 60.0


class NoBrowser(Exception):
    """There is none; says why and how to get one."""


@dataclass(frozen=True, slots=True)
class Found:
    """A browser that can be started."""

    executable: Path
    environment: Mapping[str, str]


def find_browser() -> Found:
    """The browser of this machine.

    Raises:
        NoBrowser: in words that a skipped test can give as its reason.
    """
    named = os.environ.get(VARIABLE, "")
    if named.endswith(".tgz"):
        return _unpacked(Path(named))
    candidates = [named] if named else [shutil.which(name) or "" for name in _ON_PATH]
    for candidate in candidates:
        if candidate and os.access(candidate, os.X_OK):
            return Found(Path(candidate), {})
    raise NoBrowser(
        f"no browser: {VARIABLE} names none and there is no Chromium on the PATH"
        " (npm pack @sparticuz/chromium@153.0.0, then name the .tgz)"
    )


def _unpacked(archive: Path) -> Found:
    folder = archive.with_suffix("")
    if not folder.is_dir():
        try:
            import brotli
        except ImportError:
            raise NoBrowser("the package brotli, which unpacks the browser, is missing") from None
        if not archive.is_file():
            raise NoBrowser(f"{VARIABLE} names {archive}, which is not there")
        with tempfile.TemporaryDirectory(dir=archive.parent) as part:
            _unpack(archive, Path(part), brotli.decompress)
            with contextlib.suppress(OSError):  # another process was first
                Path(part).rename(folder)
                Path(part).mkdir()  # for the context to remove
    fonts = folder / "fonts.conf"
    environment = {"FONTCONFIG_FILE": str(fonts)}
    if ctypes.util.find_library("nss3") is None:  # the archive brings what a bare machine lacks
        environment["LD_LIBRARY_PATH"] = str(folder / "lib")
    return Found(folder / "chromium", environment)


def _unpack(archive: Path, folder: Path, decompress: Any) -> None:
    with tarfile.open(archive) as package:
        for name in ("chromium.br", "fonts.tar.br", "al2023.tar.br"):
            member = package.extractfile(f"package/bin/{name}")
            assert member is not None, name
            (folder / name.removesuffix(".br")).write_bytes(decompress(member.read()))
    for name in ("fonts.tar", "al2023.tar"):
        with tarfile.open(folder / name) as inner:
            inner.extractall(folder, filter="data")
        (folder / name).unlink()
    (folder / "chromium").chmod(0o755)
    (folder / "fonts.conf").write_text(
        '<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd"><fontconfig>'
        '<dir prefix="relative">fonts</dir><cachedir prefix="xdg">fontconfig</cachedir>'
        "</fontconfig>"
    )


class Browser:
    """A browser while it is entered; entering raises NoBrowser where it does not run."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._profile = tempfile.TemporaryDirectory(prefix="armillary-browser-")
        self._ids = itertools.count(1)
        self._buffer = b""
        self.pages: dict[str, Page] = {}

    def __enter__(self) -> Browser:
        read_commands, self._write = os.pipe()
        self._read, write_answers = os.pipe()

        def arrange() -> None:  # the browser reads from 3 and writes to 4
            commands, answers = os.dup(read_commands), os.dup(write_answers)
            os.dup2(commands, 3)
            os.dup2(answers, 4)

        profile = self._profile.name
        self._process = subprocess.Popen(
            [self._found.executable, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
            env=os.environ | {"XDG_CACHE_HOME": profile} | dict(self._found.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=arrange,  # noqa: PLW1509  # dup2 alone, and no thread runs here
            close_fds=False,
        )
        os.close(read_commands)
        os.close(write_answers)
        try:
            self.send("Browser.getVersion")
        except (AssertionError, OSError) as error:
            self.__exit__(None, None, None)
            raise NoBrowser(f"{self._found.executable} does not run here: {error}") from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        time.sleep(0.1)  # its children leave their profile
        shutil.rmtree(self._profile.name, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._profile.cleanup()

    def open(self, file: Path, *, width: int, height: int = 900, dark: bool = False) -> Page:
        """Shows a file, with the network off, and waits until it is loaded."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.send(f"{domain}.enable")
        offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
        page.send("Network.emulateNetworkConditions", **offline)
        page.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.send("Emulation.setEmulatedMedia", features=scheme)
        page.send("Page.navigate", url=file.absolute().as_uri())
        while not page.is_loaded:
            self._take(self._message())
        return page

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol; returns its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._take(answer)

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], _SECONDS)
            assert ready, f"the browser said nothing for {_SECONDS:g} s"
            more = os.read(self._read, 1 << 16)
            assert more, "the browser has ended"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def _take(self, event: dict[str, Any]) -> None:
        page = self.pages.get(event.get("sessionId", ""))
        if page is not None and "method" in event:
            page.take(event["method"], event["params"])


@dataclass(slots=True)
class Page:
    """A page that is shown, and what it complained about."""

    browser: Browser
    session: str
    errors: list[str] = field(default_factory=list)
    """What went to the console as an error or warning, and exceptions that nobody caught."""
    requests: list[str] = field(default_factory=list)
    """Addresses that it asked for, the file itself left out."""
    is_loaded: bool = False

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the DevTools protocol for this page."""
        return self.browser.send(method, self.session, **parameters)

    def take(self, method: str, parameters: dict[str, Any]) -> None:
        """Hears of an event."""
        if method == "Page.loadEventFired":
            self.is_loaded = True
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"].get("exception", parameters)))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.errors.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent" and parameters["type"] != "Document":
            self.requests.append(parameters["request"]["url"])

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, as JSON has it."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def resize(self, width: int, height: int = 900) -> None:
        """As a window of that size, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)

    def move_mouse(self, x: float, y: float) -> None:
        """To a place of the window."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Writes a PNG: of the whole page, or of what the window shows."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        if whole:
            size = self.send("Page.getLayoutMetrics")["cssContentSize"]
            clip = {**size, "scale": 1}
            shot = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
