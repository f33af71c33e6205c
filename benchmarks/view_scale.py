"""How long until the heat map of 12,288 ranks is on the screen, and how much memory its server takes; prints
JSON.

    python benchmarks/view_scale.py [--json] [--steps 100] [--replicas 192] [--run FOLDER] [--picture FILE]

The run is that of ``diagnose_scale.py``, its roll-ups as agents write them: a file for each host, and its
totals. With ``--apart`` they are as earlier versions wrote them, a file for each rank and no totals. A
browser (Debian's chromium, headless) is there; a server is started as a user starts it, and the page is
opened as soon as it says its address: *first_paint* is from there until plotly has drawn the map's image,
*after_start* from the command on. *later* is a page that is opened when all has been read. *sums_after*:
until columns can be steps. Memory is the largest that the kernel saw of the server, at the end of the
diagnosis.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from diagnose_scale import write_run
from keeping import finish, make_parser, tell

from plait.core.base.process import process_memory
from plait.core.record.rollup import FOLDER

CHROMIUM = shutil.which("chromium") or "chromium"
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--enable-unsafe-swiftshader"]
PAINTED = "#heat-figure .heatmaplayer image"
LONGEST = 600_000
"""Milliseconds."""
PAINT, GIB = 3.0, 4.0
"""Seconds to the first paint, and memory, at most."""


def peak_gib(pid: int) -> float:
    """The most that was resident so far."""
    used = process_memory(pid)
    assert used, "the server has ended"
    return used.peak / 2**30


def opened(browser: Any, url: str) -> tuple[float, Any]:
    """Seconds from asking for the page until its heat map is painted; the page."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.set_default_timeout(LONGEST)
    start = time.perf_counter()
    page.goto(url)
    page.wait_for_selector(PAINTED)
    return time.perf_counter() - start, page


def measured(folder: Path, culprit: int, picture: Path | None) -> dict[str, Any]:
    """Times in seconds, memory in GiB, and whether the slow rank is told."""
    from playwright.sync_api import sync_playwright

    argv = [sys.executable, "-m", "plait.cli.main", "view", str(folder), "--port", "0"]
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        browser.new_page().goto("about:blank")
        began = time.perf_counter()
        server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[0]
            found: dict[str, Any] = {"answers_after": time.perf_counter() - began}
            found["first_paint"], page = opened(browser, url)
            found["after_start"] = time.perf_counter() - began
            found["gib_at_first_paint"] = peak_gib(server.pid)
            page.wait_for_function("/diagnosing|all spans/.test(document.querySelector('#status').textContent)")
            found["sums_after"] = time.perf_counter() - began
            page.wait_for_function("document.querySelector('#text').textContent.includes('ranks (')")
            found["diagnosed_after"] = time.perf_counter() - began
            found["later"], later = opened(browser, url)
            start = time.perf_counter()
            later.locator("#heat-box").focus()
            later.keyboard.press("ArrowDown")
            later.wait_for_function("document.querySelector('#cell').textContent.startsWith('rank ')")
            found["a_key_takes"] = time.perf_counter() - start
            first = later.locator("#unlike button").first
            found["first_of_the_unlike"] = first.inner_text()
            found["told"] = f"rank {culprit} " in first.inner_text() if culprit >= 0 else None
            if picture:
                later.wait_for_timeout(3000)
                later.locator("#heat").screenshot(path=picture)
            browser.close()
            found["gib"] = peak_gib(server.pid)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(30)
    return {key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()}


def main() -> int:
    """Make the run, open its page, say what it took."""
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--replicas", type=int, default=192, help="ranks = 64 x this")
    parser.add_argument("--run", type=Path, help="a run made before; a folder that is not there is made and kept")
    parser.add_argument("--apart", action="store_true", help="roll-ups in a file for each rank, without totals")
    parser.add_argument("--picture", type=Path, help="keep a picture of the heat map")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, culprit = args.run or Path(name) / "run", args.replicas * 64 // 3
        if not folder.is_dir():
            folder.mkdir()
            culprit, _ = write_run(folder, args.replicas, args.steps, 0.1, apart=args.apart)
        found = {
            "ranks": args.replicas * 64,
            "steps": args.steps,
            "slow_rank": culprit,
            "rollups": sum(1 for _ in (folder / "timeline" / FOLDER).rglob("*.parquet")),
            **measured(folder, culprit, args.picture),
        }
    tell(found, args)
    return 0 if found["told"] and found["first_paint"] < PAINT and found["gib"] < GIB else 1


if __name__ == "__main__":
    finish(main)
