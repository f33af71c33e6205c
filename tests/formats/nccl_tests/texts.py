"""What nccl-tests print, made up: all numbers are."""

from __future__ import annotations

from pathlib import Path

from plait.core.base.ignored_input import IgnoredInput
from plait.plan.calibrate.profile_import import import_profile

HEAD = "#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong"
UNITS = "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"
OLD_HEAD = "#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error"


def ranks(*hosts: str, each: int = 2, group: str = "Group  0 ") -> list[str]:
    found = [f"on {host} device {at} [0x0{at}] Acme X1" for host in hosts for at in range(each)]
    return ["# Using devices", *(f"#  Rank {n:2} {group}Pid {100 + n} {where}" for n, where in enumerate(found))]


def row(size: int, out: float, into: float, name: str = "float     sum      -1") -> str:
    first, second = (f"{time:8} {size / time / 1e3 if time else 0:.2f} 1.00 0" for time in (out, into))
    return f"{size:12} {size // 4:13} {name} {first} {second}"


def log(tmp_path: Path, lines: list[str], name: str = "test.log") -> Path:
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return path


ALL_REDUCE = ["# nThread 1 nGpus 1 minBytes 8", "mpirun -np 4 ./build/all_reduce_perf -b 8", *ranks("node1", "node2"),
              "NCCL version 2.28.7+cuda13.0", "#", HEAD, UNITS, row(1024, 30.0, 20.0), row(1048576, 300.0, 250.0),
              "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 9.25"]  # fmt: skip


def read(path: Path) -> tuple[list[int], list[str]]:
    """Sizes of the one curve of a file, and what is said of what was passed over."""
    over = IgnoredInput()
    (curve,) = import_profile(path, over).collectives
    return [point.bytes for point in curve.points], over.lines()
