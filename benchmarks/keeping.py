"""What every benchmark does with its result: one line for programs, a file that says where and how it was measured."""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def machine() -> str:
    """What the figures were measured on."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "cpu"
    )
    cores = subprocess.run(["nproc"], capture_output=True, text=True, check=False).stdout.strip()
    return f"{cores} cores of {model}, {platform.system()} {platform.release()}, Python {platform.python_version()}"


def keep(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Write ``result`` to the file that ``--save`` names, with date, machine and command; print it as one line with ``--json``."""
    if options.save:
        kept = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(), "command": " ".join(["python", *sys.argv]), **result}
        Path(options.save).parent.mkdir(parents=True, exist_ok=True)
        Path(options.save).write_text(json.dumps(kept, indent=2) + "\n")
    if options.json:
        print(json.dumps(result))
