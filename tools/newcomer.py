"""What somebody does who has the wheel and nothing of the source: installs it, writes a job, plans it, trains
it, looks at the run, exports it, and loads it by transformers; the seconds that each takes.

    python tools/newcomer.py dist/plait-0.1.0-*.whl [FOLDER]

FOLDER must not be there; by default it is a temporary one, removed at the end. What pip downloads has its own
line. The rest must take less than ten minutes, which the exit status says.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from contextlib import suppress
from pathlib import Path

LIMIT = 600.0
"""Seconds from the first command to the model that is loaded."""
PAGE = 8059
LOADED = """
from transformers import AutoModelForCausalLM
import torch
model = AutoModelForCausalLM.from_pretrained("hf")
print(model(torch.arange(8)[None]).logits.shape)
"""
STEPS = (
    ("plait init", "plait init job.toml --model small --defaults"),
    ("plait plan", "plait plan job.toml"),
    ("plait train", "plait train job.toml"),
    ("plait view", ""),
    ("plait export", "plait export runs/job --out hf"),
    ("transformers", f"python -c {shlex.quote(LOADED)}"),
)


class Steps:
    """Commands in an environment of their own, and their seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.took = folder, folder / "venv" / "bin", list[tuple[str, float]]()
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.env = kept | {"PATH": f"{self.bin}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}

    def step(self, name: str, command: str) -> None:
        print(f"$ {command or 'plait view runs/job'}", flush=True)
        began = time.monotonic()
        if command:
            subprocess.run(shlex.split(command), cwd=self.folder, env=self.env, check=True)
        else:
            self.look()
        self.took.append((name, time.monotonic() - began))

    def look(self) -> None:
        """Until the page answers, as a browser would ask for it."""
        command = ["plait", "view", "runs/job", "--port", str(PAGE)]
        server = subprocess.Popen(command, cwd=self.folder, env=self.env)
        try:
            while server.poll() is None:
                with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{PAGE}/_dash-layout") as answer:
                    print(f"{answer.status}: {len(answer.read()):,} bytes", flush=True)
                    return
                time.sleep(0.2)
            sys.exit(f"plait view ended with status {server.returncode}")
        finally:
            server.terminate()
            server.wait()


def main(wheel: str, where: str) -> int:
    """Whether all of it went, in time."""
    folder = Path(where).absolute()
    folder.mkdir(parents=True)
    venv.create(folder / "venv", with_pip=True)
    steps = Steps(folder)
    steps.step("download and install", f"python -m pip install -q '{Path(wheel).resolve()}[train,view]' transformers")
    for step in STEPS:
        steps.step(*step)
    for name, seconds in steps.took:
        print(f"{name:22}{seconds:7.1f} s")
    total = sum(seconds for _, seconds in steps.took[1:])
    print(f"{'after the download':22}{total:7.1f} s, of {LIMIT:.0f}")
    return total > LIMIT


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit(main(sys.argv[1], sys.argv[2]))
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(main(sys.argv[1], f"{temporary}/newcomer"))
