"""How much of tensor parallelism's communication is hidden: every variant and PyTorch's own, interleaved on one emulated link.

    python benchmarks/domino.py [--json] [--quick] [--nic 1gbit --nic 400mbit] [--rounds 9]

Two hosts of one rank each (``plait lab``; needs Linux and root or user namespaces). A step is forward and backward of one batch
by every variant with equal shapes, one thread a rank; rounds are interleaved so that the machine's noise hits all alike, and medians count.
``none`` leaves the collectives out (wrong numbers, the speed of hiding everything); ``comm`` does nothing but the plain
variant's collectives; the limit is the slower of the two. hidden = (sync - x) / (sync - none).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from plait.core.errors import PlaitError
from plait.lab import Lab, LabSpec
from plait.launch.local import run_ranks

HERE = Path(__file__).resolve().parent
VARIANTS = ("sync", "async", "domino", "domino_p4", "column", "hybrid", "none", "comm", "dtensor")


def main() -> int:
    """Measure every link rate; print a table each, and with --json one last line for programs."""
    options = _options()
    points = [measure(nic, options) for nic in options.nic]
    result = {"points": points}
    if options.save:
        HERE.joinpath("results").mkdir(exist_ok=True)
        kept = {"date": datetime.now(UTC).date().isoformat(), "machine": machine(), "command": " ".join(["python", *sys.argv]), **result}
        Path(options.save).write_text(json.dumps(kept, indent=2) + "\n")
    if options.json:
        print(json.dumps(result))
    return 0


def measure(nic: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks on a lab with this link and work their times out."""
    spec = LabSpec.parse(f"2x1@{nic}")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        shape = [str(value) for value in (options.layers, options.hidden, options.sequence, options.batch, options.rounds)]
        argv = [sys.executable, "-W", "ignore", str(HERE / "domino_ranks.py"), str(out), nic, options.family, *shape]
        with Lab(spec, command=argv) as lab:
            run_ranks(lambda rank, o, e: lab.popen(rank, argv, stdout=o, stderr=e), spec.world_size, Path(folder) / "logs")
        found = json.loads(out.read_text())
    point = work_out(nic, found)
    if not options.json:
        show(point, found)
    return point


def work_out(nic: str, found: dict[str, Any]) -> dict[str, Any]:
    """Ratios of medians."""
    m = {name: found["seconds"][name] for name in VARIANTS}
    limit = max(m["none"], m["comm"])
    exposed = m["sync"] - m["none"]
    point: dict[str, Any] = {"nic": nic, "comm_share": exposed / m["sync"], **{f"{name}_s": m[name] for name in VARIANTS}}
    return point | {
        "domino_speedup": m["sync"] / m["domino"],
        "of_none": m["none"] / m["domino"],
        "of_limit": limit / m["domino"],
        "hidden": (m["sync"] - m["domino"]) / exposed,
        "column_hidden": (m["sync"] - m["column"]) / exposed,
        "dtensor_over_domino": m["dtensor"] / m["domino"],
        "recorded_hidden": found["recorded_hidden"],
        "cpu": found["cpu"],
        "rounds": found["rounds"],
    }


def show(point: dict[str, Any], found: dict[str, Any]) -> None:
    """One table for people."""
    sync, none, limit = point["sync_s"], point["none_s"], max(point["none_s"], point["comm_s"])
    table = Table(
        "variant",
        "median ms",
        "spread",
        "against sync",
        "of none",
        "of limit",
        "hidden",
        "CPU s",
        title=f"{point['nic']}: communication is {point['comm_share']:.0%} of the synchronous step",
    )
    for name in VARIANTS:
        seconds = point[f"{name}_s"]
        low, high = found["spread"][name]
        hidden = f"{(sync - seconds) / (sync - none):.0%}" if name not in ("none", "comm") else ""
        ratios = (f"{sync / seconds:.2f}x", f"{none / seconds:.0%}", f"{limit / seconds:.0%}") if name != "comm" else ("", "", "")
        table.add_row(name, f"{seconds * 1e3:.0f}", f"{low * 1e3:.0f}-{high * 1e3:.0f}", *ratios, hidden, f"{found['cpu'][name]:.2f}")
    Console(width=120).print(table)
    print(f"hidden by the recorder's count (waiting against the link's busy time): {found['recorded_hidden']}\n")


def machine() -> str:
    """What the figures were measured on."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "cpu"
    )
    cores = subprocess.run(["nproc"], capture_output=True, text=True, check=False).stdout.strip()
    return f"{cores} cores of {model}, {platform.system()} {platform.release()}, Python {platform.python_version()}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--nic", action="append", help="rate of each host's link; may be repeated (default 1gbit and 400mbit)")
    parser.add_argument("--rounds", type=int, default=0, help="interleaved rounds after one to warm up (default 9)")
    parser.add_argument("--family", choices=("gpt", "llama"), default="gpt", help="the peer is a GPT in either case")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--save", help="also write the result, with machine and command, to this file")
    options = parser.parse_args()
    options.nic = options.nic or ["1gbit", "400mbit"]
    options.rounds = options.rounds or (3 if options.quick else 9)
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PlaitError as error:
        print(f"{error}", file=sys.stderr)
        sys.exit(error.exit_status)
