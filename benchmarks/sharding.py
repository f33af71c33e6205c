"""Sharded data parallelism: what of its communication is hidden, and what redundancy saves, against PyTorch's
FSDP2, interleaved.

    python benchmarks/sharding.py [--json] [--quick] [--rounds 8] [--case overlap] [--share 0.35] [--save
    FILE]

Four cases, each on a lab of its own (``plait lab``; needs Linux and root or user namespaces). A step is
forward and backward of all micro-batches of a GPT and AdamW; one thread a rank; ratios are medians of the
ratios within a round.

    overlap      2 hosts of one rank, a core each; the link's rate is found such that communication is
                 ``--share`` of the step without overlap. Variants: zero3, the same waiting for every transfer
                 (zero3_sync), FSDP2 with the same sharding; ``compute`` leaves the network out (wrong
                 numbers), ``comm`` does the transfers alone; the limit is the slower of the two
    redundancy   2 hosts of 2 ranks, 1 Gbit/s between hosts, loopback inside: full sharding, node-local and
                 partial, FSDP2 1-D and HSDP. Four ranks share two cores, in all variants alike. Bytes over a
                 host's link as counted by the kernel, beside the formula's
    optimizers   as overlap, optimizer states sharded (zero1): AdamW, and Muon, which orthogonalises in bf16
                 as torch does, or in fp32. A step has 64 tokens for each number of a hidden state; real ones
                 have hundreds, and orthogonalising is then a smaller share
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from keeping import SEGMENT, finish, keep, make_parser, ranks_on_lab, rate_for, ratio
from rich.console import Console
from rich.table import Table

from plait.lab import LabSpec

OVERLAP: dict[str, Any] = {
    "zero3": {"shard": [2, 2, 2]},
    "zero3_sync": {"shard": [2, 2, 2], "overlap": "none"},
    "fsdp2": {"fsdp": [2]},
    "compute": {"shard": [2, 2, 2], "only": "compute"},
    "comm": {"shard": [2, 2, 2], "only": "communication"},
}
REDUNDANCY: dict[str, Any] = {
    "4,4,4 (zero3)": {"shard": [4, 4, 4]},
    "2,2,2 (hsdp)": {"shard": [2, 2, 2]},
    "2,2,4 (hierarchical)": {"shard": [2, 2, 4]},
    "1,2,4 (partial)": {"shard": [1, 2, 4]},
    "1,1,4 (zero1)": {"shard": [1, 1, 4]},
    "1,1,2": {"shard": [1, 1, 2]},
    "fsdp2": {"fsdp": [4]},
    "fsdp2 hsdp": {"fsdp": [2, 2]},
}
LOADING = 1.0
ZERO3: dict[str, Any] = {"shard": [2, 2, 2]}
BESIDE: dict[str, Any] = {
    "beside": ZERO3 | {"load": LOADING},
    "after": ZERO3 | {"load": LOADING, "ahead": False},
    "gather": ZERO3 | {"only": "first gather"},
}
ZERO1: dict[str, Any] = {"shard": [1, 1, 2]}
OPTIMIZERS: dict[str, Any] = {
    "zero1": ZERO1,
    "zero1_sync": ZERO1 | {"overlap": "none"},
    "muon": ZERO1 | {"optimizer": "muon"},
    "muon in fp32": ZERO1 | {"optimizer": "muon", "muon": {"precision": "master"}},
    "compute": ZERO1 | {"only": "compute"},
}
CASES: dict[str, dict[str, Any]] = {
    "overlap": {
        "hosts": (2, 1),
        "layers": 4,
        "hidden": 512,
        "sequence": 256,
        "batch": 8,
        "micro_batches": 1,
        "variants": OVERLAP,
    },
    "redundancy": {
        "hosts": (2, 2),
        "layers": 4,
        "hidden": 512,
        "sequence": 64,
        "batch": 2,
        "micro_batches": 2,
        "variants": REDUNDANCY,
    },
    "optimizers": {
        "hosts": (2, 1),
        "layers": 4,
        "hidden": 256,
        "sequence": 256,
        "batch": 32,
        "micro_batches": 4,
        "variants": OPTIMIZERS,
    },
    "loading": {
        "hosts": (2, 1),
        "layers": 1,
        "hidden": 256,
        "vocab": 32768,
        "sequence": 32,
        "batch": 2,
        "micro_batches": 1,
        "variants": BESIDE,
    },
}


def main() -> int:
    """Measure the cases; print a table each, and with --json one last line for programs."""
    options = _options()
    found = [measure(name, options) for name in options.case or CASES]
    keep({"cases": found}, options)
    return 0


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one case and work its times out."""
    nic = options.nic or (_rate(name, options) if name in SYNC else NICS[name])
    point = work_out(name, nic, run(name, nic, options.rounds))
    if not options.json:
        show(point)
    return point


def run(name: str, nic: str, rounds: int, variants: tuple[str, ...] = ()) -> dict[str, Any]:
    """What the ranks measured on a lab with this link."""
    case = CASES[name]
    hosts, each = case["hosts"]
    setup = {key: value for key, value in case.items() if key != "hosts"}
    setup |= {"ranks": hosts * each, "per_host": each, "rounds": rounds}
    if variants:
        setup["variants"] = {key: case["variants"][key] for key in variants}
    return ranks_on_lab(LabSpec(hosts, each, nic, segment=SEGMENT), "sharding_ranks.py", json.dumps(setup))


def _rate(name: str, options: argparse.Namespace) -> str:
    ends = (SYNC[name], "compute")
    return rate_for(options.share, 1000.0, (2, 4), lambda nic, rounds: run(name, nic, rounds, ends)["seconds"], *ends)


def work_out(name: str, nic: str, found: dict[str, Any]) -> dict[str, Any]:
    """Medians of seconds, medians over rounds of ratios, bytes."""
    times: dict[str, list[float]] = found["seconds"]
    point: dict[str, Any] = {"case": name, "nic": nic, "rounds": len(next(iter(times.values()))), "variants": {}}
    if name == "overlap":
        times["limit"] = [max(pair) for pair in zip(times["compute"], times["comm"], strict=True)]
    if name in SYNC:
        point["comm_share"] = 1 - ratio(times, "compute", SYNC[name])
    if name == "loading":
        point |= {"load": LOADING} | hidden(times)
    base, peer = BASES[name], "fsdp2" if "fsdp2" in times else ""
    for variant, seconds in times.items():
        row: dict[str, Any] = {"seconds": statistics.median(seconds), "against_base": ratio(times, base, variant)}
        row |= {"against_fsdp2": ratio(times, peer, variant)} if peer else {}
        row |= {"of_limit": ratio(times, "limit", variant)} if name == "overlap" else {}
        row |= {"link_bytes": found["link"].get(variant), "link_formula": found["formula"].get(variant)}
        point["variants"][variant] = row
    return point


def hidden(times: dict[str, list[float]]) -> dict[str, Any]:
    """Of the first gather's seconds those that loading hides, and the least and the most of the rounds.

    >>> hidden({"beside": [1.0, 1.0], "after": [1.25, 1.5], "gather": [0.5, 0.5]})["hidden"]
    0.75
    """
    rounds = zip(times["after"], times["beside"], times["gather"], strict=True)
    shares = [(after - beside) / alone for after, beside, alone in rounds]
    return {"hidden": statistics.median(shares), "spread": [min(shares), max(shares)]}


NICS = {"redundancy": "1gbit", "loading": "300mbit"}
"""Rates of links that are not found."""
SYNC = {"overlap": "zero3_sync", "optimizers": "zero1_sync"}
"""By case whose link's rate is found: the variant that waits for every transfer."""
BASES = {"overlap": "zero3", "redundancy": "4,4,4 (zero3)", "optimizers": "zero1", "loading": "beside"}
"""Which variant the others are compared with."""


def show(point: dict[str, Any]) -> None:
    """One table for people."""
    share = f", communication {point['comm_share']:.0%} of the step without overlap" if "comm_share" in point else ""
    share += f", {point['hidden']:.0%} of the first gather's time saved" if "hidden" in point else ""
    rows = point["variants"].values()
    peer, limit = (
        [title] * any(key in row for row in rows)
        for title, key in (("against fsdp2", "against_fsdp2"), ("of limit", "of_limit"))
    )
    table = Table(
        "variant",
        "ms",
        *peer,
        f"against {BASES[point['case']]}",
        *limit,
        "MB over a host's link",
        "by the formula",
        title=f"{point['case']}: {point['nic']}{share}",
    )
    for name, row in point["variants"].items():
        megabytes = [
            f"{value / 1e6:.1f}" if value is not None else "" for value in (row["link_bytes"], row["link_formula"])
        ]
        table.add_row(
            name,
            f"{row['seconds'] * 1e3:.0f}",
            *(f"{row['against_fsdp2']:.2f}x" for _ in peer),
            f"{row['against_base']:.2f}x",
            *(f"{row['of_limit']:.0%}" for _ in limit),
            *megabytes,
        )
    Console(width=140).print(table)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=8, cases=CASES)
    parser.add_argument(
        "--share", type=float, default=0.35, help="communication's share of the step without overlap (default 0.35)"
    )
    parser.add_argument("--nic", help="rate of each host's link instead")
    return parser.parse_args()


if __name__ == "__main__":
    finish(main)
