"""How much of tensor parallelism's communication is hidden: every variant and PyTorch's own, interleaved on
one emulated link.

    python benchmarks/domino.py [--json] [--quick] [--share 0.3 --share 0.52 | --nic 1gbit ...] [--rounds 9]
                                [--whole] [--family gpt|llama|parallel]

Two hosts of one rank each (``plait lab``; needs Linux and root or user namespaces). A step is forward and
backward of one batch by every variant with equal shapes, one thread a rank, every rank on a core of its own;
rounds are interleaved, each begins with another variant, and ratios are medians of the ratios within a round,
so that the machine's noise hits both sides alike.
``none`` leaves the collectives out (wrong numbers, the speed of hiding everything); ``comm`` does nothing but
the plain variant's collectives; the limit is the slower of the two. hidden = (sync - x) / (sync - none).
``comm_share`` is what communication adds to the synchronous step, as a share of it. A point is given by this
share, because what a rate means depends on how fast the machine computes today: a few steps before it find
the link rate at which communication has it.
``--whole``: a step also reads its batch, completes and clips gradients and updates by AdamW, as in training.
``--family parallel``: a GPT of parallel blocks. PyTorch's own is left out of both.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from keeping import SEGMENT, finish, keep, make_parser, ranks_on_lab, rate_for, ratio
from rich.console import Console
from rich.table import Table

from plait.lab import LabSpec

VARIANTS = ("sync", "async", "domino", "domino_p4", "column", "hybrid", "none", "comm", "dtensor")


def main() -> int:
    """Measure every link rate; print a table each, and with --json one last line for programs."""
    options = _options()
    points = [measure(nic, options) for nic in options.nic or [_rate(share, options) for share in options.share]]
    result = {"points": points}
    keep(result, options)
    return 0


def run(nic: str, options: argparse.Namespace, variants: Sequence[str], rounds: int) -> dict[str, Any]:
    """What the ranks measured on a lab with this link."""
    sizes = (options.layers, options.hidden, options.sequence, options.batch, rounds, int(options.whole))
    shape = [str(value) for value in sizes]
    return ranks_on_lab(
        LabSpec(2, 1, nic, segment=SEGMENT), "domino_ranks.py", ",".join(variants), options.family, *shape
    )


def _rate(share: float, options: argparse.Namespace) -> str:
    ends = ("sync", "none")
    return rate_for(share, 500.0, (3, 6), lambda nic, rounds: run(nic, options, ends, rounds)["seconds"], *ends)


def measure(nic: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run every variant with this link and work the times out."""
    alone = options.whole or options.family == "parallel"
    point = work_out(nic, run(nic, options, VARIANTS[:-1] if alone else VARIANTS, options.rounds))
    if not options.json:
        show(point)
    return point


def work_out(nic: str, found: dict[str, Any]) -> dict[str, Any]:
    """Medians of seconds, and medians over rounds of ratios."""
    times: dict[str, list[float]] = found["seconds"]
    names = list(times)
    times["limit"] = [max(none, comm) for none, comm in zip(times["none"], times["comm"], strict=True)]

    share = 1 - ratio(times, "none", "sync")

    def hidden(name: str) -> float:
        return (1 - ratio(times, name, "sync")) / share

    against = {
        name: {
            **{than: ratio(times, than, name) for than in ("sync", "none", "limit")},
            "hidden": hidden(name),
        }
        for name in names
    }
    domino = against["domino"]
    point: dict[str, Any] = {"nic": nic, "comm_share": share}
    point |= {f"{name}_s": statistics.median(times[name]) for name in names}
    if "dtensor" in times:
        point["dtensor_over_domino"] = ratio(times, "dtensor", "domino")
    return point | {
        "domino_speedup": domino["sync"],
        "of_none": domino["none"],
        "of_limit": domino["limit"],
        "hidden": domino["hidden"],
        "column_hidden": hidden("column"),
        "recorded_hidden": found["recorded_hidden"],
        "against": against,
        "spread": {name: (min(times[name]), max(times[name])) for name in names},
        "cpu_s": {name: statistics.median(values) for name, values in found["cpu"].items()},
        "rounds": len(times["sync"]),
    }


def show(point: dict[str, Any]) -> None:
    """One table for people."""
    columns = ("variant", "median ms", "spread", "against sync", "of none", "of limit", "hidden", "CPU s")
    table = Table(*columns, title=f"{point['nic']}: communication is {point['comm_share']:.0%} of the synchronous step")
    for name in point["against"]:
        low, high = point["spread"][name]
        found = point["against"][name]
        ratios = (f"{found['sync']:.2f}x", f"{found['none']:.0%}", f"{found['limit']:.0%}", f"{found['hidden']:.0%}")
        table.add_row(
            name,
            f"{point[f'{name}_s'] * 1e3:.0f}",
            f"{low * 1e3:.0f}-{high * 1e3:.0f}",
            *(ratios if name != "comm" else ("", "", "", "")),
            f"{point['cpu_s'][name]:.2f}",
        )
    Console(width=120).print(table)
    print(f"hidden by the recorder's count (waiting against the link's busy time): {point['recorded_hidden']}\n")


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=9, quick=3)
    parser.add_argument("--nic", action="append", help="rate of each host's link instead; may be repeated")
    parser.add_argument(
        "--share",
        action="append",
        type=float,
        help="a share of communication to find the rate for (default 0.3 and 0.52)",
    )
    parser.add_argument("--family", choices=("gpt", "llama", "parallel"), default="gpt", help="PyTorch's is a GPT")
    parser.add_argument("--whole", action="store_true", help="data, clipping and optimizer, too")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    options.share = options.share or [0.3, 0.52]
    return options


if __name__ == "__main__":
    finish(main)
