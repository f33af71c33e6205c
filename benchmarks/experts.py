"""Experts shared out over two hosts: how much of their all-to-alls slices hide, and against what.

    python benchmarks/experts.py [--json] [--quick] [--rounds 6] [--share 0.3 --share 0.5] [--save FILE]

On a lab of 2 hosts of 1 rank (``plait lab``; needs Linux and root or user namespaces). A step is forward and
backward of a Llama whose MLPs are 8 experts, 2 a token; each rank has a batch of its own and half of the
experts. The link's rate is found such that the all-to-alls are ``--share`` of the step that awaits them.

    awaited    every all-to-all is awaited where it starts
    1 slice    one chain: shared work of the same tokens alone hides them
    2, 4       that many slices hide each other's
    plain      the usual form in PyTorch: autograd functions around ``all_to_all_single``, the same grouped
               products, tokens and weights
    none       sends nothing (wrong numbers, the speed of hiding everything)

hidden = (awaited - x) / (awaited - none), medians of ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from keeping import SEGMENT, keep, make_parser, ranks_on_lab, rate_for, ratio
from rich.console import Console
from rich.table import Table

from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.lab import LabSpec

MODEL = ModelSpec(
    family="llama", num_layers=4, hidden=256, num_heads=8, ffn_hidden=704, vocab=256, max_sequence=256,
    experts=Experts(count=8, per_token=2, ffn_hidden=704, balance_loss=0.01),
)  # fmt: skip
BATCH = 8
SHARES = (0.3, 0.5)
VARIANTS: dict[str, dict[str, Any]] = {
    "awaited": {"overlap": "sync"}, "1 slice": {}, "2 slices": {"p1": 2}, "4 slices": {"p1": 4}, "plain": {},
    "none": {"overlap": "no-communication"},
}  # fmt: skip


def main() -> int:
    """Measure every share; print a table each, and with --json one last line for programs."""
    parser = make_parser(__doc__, rounds=6)
    parser.add_argument("--share", type=float, action="append", help="the all-to-alls' share of the awaited step")
    parser.add_argument("--nic", help="rate of the link, instead of one that is looked for")
    options = parser.parse_args()
    shares = [0.0] if options.nic else options.share or SHARES
    keep({"points": [point(share, options) for share in shares]}, options)
    return 0


def point(share: float, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every variant at one rate of the link."""
    nic = options.nic or _rate(share)
    times = _run(nic, VARIANTS, options.rounds)
    found: dict[str, Any] = {"nic": nic, "rounds": options.rounds, "share": 1 - ratio(times, "none", "awaited")}
    for name, seconds in times.items():
        found[name] = {
            "seconds": statistics.median(seconds), "spread": (min(seconds), max(seconds)),
            "against_awaited": ratio(times, "awaited", name), "of_none": ratio(times, "none", name),
            "hidden": (1 - ratio(times, name, "awaited")) / found["share"],
        }  # fmt: skip
    if not options.json:
        table = Table(
            "variant", "ms", "from", "to", "against awaited", "of none", "hidden",
            title=f"{nic}: all-to-alls are {found['share']:.0%} of the awaited step",
        )  # fmt: skip
        for name in times:
            row = found[name]
            ms = (f"{seconds * 1e3:.0f}" for seconds in (row["seconds"], *row["spread"]))
            table.add_row(name, *ms, f"{row['against_awaited']:.2f}x", f"{row['of_none']:.0%}", f"{row['hidden']:.0%}")
        Console(width=100).print(table)
    return found


def _rate(share: float) -> str:
    ends = {name: VARIANTS[name] for name in ("awaited", "none")}
    return rate_for(share, 300.0, (2, 4), lambda nic, rounds: _run(nic, ends, rounds), *ends)


def _run(nic: str, variants: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    setup = {"model": MODEL.to_dict(), "batch": BATCH, "variants": variants, "rounds": rounds}
    return ranks_on_lab(LabSpec(2, 1, nic, segment=SEGMENT), "experts_ranks.py", json.dumps(setup))["seconds"]


if __name__ == "__main__":
    raise SystemExit(main())
