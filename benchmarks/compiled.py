"""What compiling what lies between matrix products gives on a CPU: steps with and without, interleaved.

    python benchmarks/compiled.py [--json] [--quick] [--rounds 9] [--case domino] [--save FILE]

A step is forward and backward of one micro-batch by one of two tensor-parallel ranks, one thread, its
collectives left out: what is compiled is computation. Rounds are interleaved, each begins with the other one,
ratios are medians of the ratios within a round. Every case starts from an empty cache of the compiler's, in a
process of its own; how long a second start takes that finds what the first has compiled is measured too.
*Its ops* are those that hold something compiled, with the matrix products in them. Without --case the first
and the last case are measured, in two to three minutes.

    domino      the model of ``domino.py``: GPT, hidden 768, sequence 256, batch 8, 3 layers, two slices
    dropout     the same with dropout 0.1
    llama       a Llama of the same size
    quickstart  the model and batch of ``specs/jobs/quickstart.toml``
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

from keeping import HERE, finish, keep, make_parser, timed
from rich.console import Console
from rich.table import Table

DEFAULT = ("domino", "quickstart")
CASES = ("domino", "dropout", "llama", "quickstart")


def main() -> int:
    """Measure the cases; print a table, and with --json one last line for programs."""
    options = make_parser(__doc__, rounds=9, quick=3, cases=CASES).parse_args()
    found = {name: measure(name, options.rounds) for name in options.case or DEFAULT}
    if not options.json:
        show(found)
    keep(found, options)
    return 0


def measure(name: str, rounds: int) -> dict[str, Any]:
    """One case, and a second start of it."""
    with tempfile.TemporaryDirectory() as cache:
        argv = [sys.executable, "-W", "ignore", str(HERE / "compiled_case.py"), cache, name]
        case = json.loads(timed([*argv, str(rounds)]).output)
        again = json.loads(timed([*argv, "0"]).output)
    return case | {"again_s": again["compiling_s"]}


def show(found: dict[str, Any]) -> None:
    """One table for people, and where the time went."""
    columns = (
        "case",
        "op by op, ms",
        "compiled, ms",
        "gain",
        "its ops, ms",
        "compiled, ms",
        "compiling, s",
        "again, s",
    )
    table = Table(*columns)
    for name, row in found.items():
        table.add_row(
            name, f"{row['eager_s'] * 1e3:.1f}", f"{row['compiled_s'] * 1e3:.1f}", f"{row['gain']:.2f}x",
            f"{sum(row['ops']['eager'].values()) * 1e3:.1f}", f"{sum(row['ops']['compiled'].values()) * 1e3:.1f}",
            f"{row['compiling_s']:.1f}", f"{row['again_s']:.1f}",
        )  # fmt: skip
    Console(width=120).print(table)
    for name, row in found.items():
        ops = ((key, row["ops"]["eager"][key], row["ops"]["compiled"][key]) for key in row["ops"]["eager"])
        print(f"{name}:", ", ".join(f"{key} {a * 1e3:.2f} -> {b * 1e3:.2f} ms" for key, a, b in ops))


if __name__ == "__main__":
    finish(main)
