"""Pipelines whose two stages lie on meshes that differ, trained by every way of resharding, interleaved on
emulated links.

    python benchmarks/pipeline_meshes.py [--json] [--quick] [--rounds 5] [--case "u 4>2"] [--save FILE]

Each case is on a lab of its own (``plait lab``; needs Linux and root or user namespaces), for a GPT and for a
U-Transformer, two of whose skip connections cross beside the residual stream:

    tp2>dp2  two hosts of two ranks: tp 2, then dp 2
    4>2      three hosts of two ranks: tp 4 on two of them, then tp 2
    2>1      three hosts of one rank: tp 2 on two of them, then one rank

Every computation is a STAND-IN, a wait of fixed length, so that two cores do for six ranks; the transfers are
real, and in the warm-up every rank compares what arrives with what was to. Ways, as arXiv 2211.05322, section
5.2, has them: send/recv, Alpa's (``baselines/reshard_unicast.py``) and broadcast, under 1F1B whose sends are
awaited; overlap and eager, broadcast under 1F1B and eager-1F1B whose sends are not; and the bound, eager's
order with one number sent for each tensor. ``of bound``: bound / time, medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from keeping import SEGMENT, finish, keep, make_parser, ranks_on_lab, ratio
from rich.console import Console
from rich.table import Table

from plait.lab import LabSpec

NIC = "1gbit"
SETUP: dict[str, Any] = {"micro_batches": 8, "forward": 0.03, "boundary": (256, 4, 512)}
MESHES: dict[str, dict[str, Any]] = {
    "tp2>dp2": {"hosts": 2, "ranks_per_host": 2, "degrees": ((1, 2), (2, 1))},
    "4>2": {"hosts": 3, "ranks_per_host": 2, "degrees": ((1, 4), (1, 2))},
    "2>1": {"hosts": 3, "ranks_per_host": 1, "degrees": ((1, 2), (1, 1))},
}
MODELS: dict[str, dict[str, Any]] = {"gpt": {"layers": 2, "levels": 0}, "u": {"layers": 10, "levels": 2}}
CASES = {f"{model} {meshes}": MESHES[meshes] | MODELS[model] for model in MODELS for meshes in MESHES}


def main() -> int:
    """Measure every case; print a table, and with --json one last line for programs."""
    options = make_parser(__doc__, rounds=5, cases=CASES).parse_args()
    found = {name: measure(CASES[name], options) for name in options.case or CASES}
    result = {"nic": NIC, "computation": "stand-in waits", "rounds": options.rounds, "cases": found}
    if not options.json:
        show(result)
    keep(result, options)
    return 0


def measure(case: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks of one case on its lab, and work their times out."""
    lab = LabSpec(case["hosts"], case["ranks_per_host"], NIC, segment=SEGMENT)
    setup = json.dumps(case | SETUP | {"rounds": options.rounds})
    found = ranks_on_lab(lab, "pipeline_meshes_ranks.py", setup)
    times: dict[str, list[float]] = found["seconds"]
    ways = {
        way: {
            "seconds": statistics.median(seconds),
            "spread": (min(seconds), max(seconds)),
            "of_bound": ratio(times, "bound", way),
            "over_alpa": ratio(times, "alpa", way),
        }
        for way, seconds in times.items()
    }
    return {"transfer_s": found["transfer_s"], "checked": found["checked"], "ways": ways}


def show(result: dict[str, Any]) -> None:
    """One table for people: seconds of a step by way, and what it is of the bound."""
    names = list(next(iter(result["cases"].values()))["ways"])
    title = f"{result['nic']} a host, computation {result['computation']}: ms of a step, of the bound"
    table = Table("case", *names, "eager over Alpa", title=title)
    for case, found in result["cases"].items():
        ways = found["ways"]
        cells = (f"{ways[name]['seconds'] * 1e3:.0f}, {ways[name]['of_bound']:.0%}" for name in names)
        table.add_row(case, *cells, f"{ways['eager']['over_alpa']:.2f}x")
    Console(width=140).print(table)


if __name__ == "__main__":
    finish(main)
