"""A run's page, served from this process on a port of its own; and a browser to look at it."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from plait.view.app import make_app, make_server
from plait.view.store import Watched, watch
from tests.support.recordings.made import At, Job

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--enable-unsafe-swiftshader", "--hide-scrollbars"]
"""root may not use the sandbox; containers have a small /dev/shm; 3-D without a GPU."""


def slow(at: At) -> float:
    return (0.1 if at.way == "forward" else 0.2) * (1.5 if (at.dp, at.stage) == (2, 1) else 1.0)


SLOW = Job(dp=4, pp=2, steps=12, compute=slow)
"""Rank 6 (stage 1, dp 2) is slower than the others of its stage."""
CULPRIT = 6


@contextmanager
def served(folders: Sequence[Path], *, read: bool = True, late: float = 0.0) -> Iterator[tuple[str, list[Watched]]]:
    """The address of the page. read: whether everything was read before. late: seconds before each
    answer."""
    watched = watch(folders)
    app = make_app(watched)
    app.server.before_request(lambda: time.sleep(late))
    if read:
        for one in watched:
            one.read()
    server = make_server(app, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, name="page")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}", watched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def browser() -> Iterator[Browser]:
    """The system's. Skips where there is none."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright, which drives the browser, is not installed"
    )
    if not CHROMIUM:
        pytest.skip("no chromium on this machine (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield chromium
        finally:
            chromium.close()
