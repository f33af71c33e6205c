"""How long until the heat map of 12,288 ranks is on the screen, and how much memory its server takes; prints
JSON.

    python benchmarks/view_scale.py [--json] [--steps 100] [--replicas 192] [--run FOLDER] [--picture FILE]

The run is that of ``diagnose_scale.py``. A server is started as a user starts it; a browser (Debian's
chromium, headless) opens the page as soon as it answers, and once more when the server has read the sums.
Painted is when plotly has drawn the map's image. Memory is the largest that the kernel saw of the server,
up to the end of the diagnosis, which begins when the page has been drawn.
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

CHROMIUM = shutil.which("chromium") or "chromium"
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage", "--enable-unsafe-swiftshader"]
PAINTED = "#heat-figure .heatmaplayer image"
LONGEST = 600_000
"""Milliseconds."""


def peak_gib(pid: int) -> float:
    """The most that was resident so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 2**20


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

    began = time.perf_counter()
    argv = [sys.executable, "-m", "plait.cli.main", "view", str(folder), "--port", "0"]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = server.stdout.readline().split()[0]
        found: dict[str, Any] = {"answers_after": time.perf_counter() - began}
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            _, page = opened(browser, url)
            found["painted_after_start"] = time.perf_counter() - began
            found["gib_at_first_paint"] = peak_gib(server.pid)
            page.close()
            found["first_paint"], page = opened(browser, url)
            start = time.perf_counter()
            page.wait_for_function("document.querySelector('#text').textContent.includes('ranks (')")
            found["diagnosed_after"] = time.perf_counter() - start
            found["first_paint_later"], later = opened(browser, url)
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
    parser.add_argument("--run", type=Path, help="a run made before, in place of a new one")
    parser.add_argument("--picture", type=Path, help="keep a picture of the heat map")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, culprit = args.run or Path(name) / "run", args.replicas * 64 // 3
        if not args.run:
            folder.mkdir()
            culprit, _ = write_run(folder, args.replicas, args.steps, 0.1)
        found = {
            "ranks": args.replicas * 64,
            "steps": args.steps,
            "slow_rank": culprit,
            **measured(folder, culprit, args.picture),
        }
    tell(found, args)
    return 0 if found["told"] and found["first_paint"] < 3 and found["gib"] < 4 else 1


if __name__ == "__main__":
    finish(main)
