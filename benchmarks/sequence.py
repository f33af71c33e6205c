"""Long sequences: Ulysses, ring attention and both against Megatron's sequence parallelism, in time and in
memory.

    python benchmarks/sequence.py [--json] [--quick] [--rounds 6] [--case speed] [--save FILE]

On a lab of 2 hosts of 2 ranks (``plait lab``; needs Linux and root or user namespaces), 1 Gbit/s between
hosts, loopback inside, four ranks on the machine's cores in all variants alike. A step is forward and
backward of one sequence through a Llama, and AdamW whose states four ranks share wherever they hold the same
weights.

    speed    all variants interleaved: tensor parallelism with all-reduce, Megatron's sequence parallelism
             (all-gather and reduce-scatter, a backward collective hidden behind its weight gradient),
             Ulysses, ring, both; and the memory that ``plan`` predicts for each
    memory   a sequence of 65,536 tokens in the memory that is predicted for both at once, and 5 % more: a
             rank that takes more is ended, and what was resident at most is measured. Tensor parallelism is
             given as much. Counted from the moment at which processes and wires are there
    hidden   how much of attention's communication is hidden, on a link so slow that it is about 30 % of the
             step that hides nothing: Ulysses and ring on 2 hosts of 1 rank, both on 2 hosts of 2 (heads
             inside). Forward and backward of ``BATCH`` sequences. before: heads awaited where they are
             exchanged, the next block of a ring behind attention to this one; then lists, with 1, 2 and 4
             slices; none: sends nothing. hidden = (before - x) / (before - none), medians over rounds
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from keeping import SEGMENT, finish, keep, make_parser, ranks_on_lab, rate_for, ratio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from plait.core.base.errors import PlaitError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.activations import TracedBatch, activations
from plait.core.step.memory.memory_options import MemoryOptions
from plait.core.step.memory.states import HeldStates, position_tables, states_of_pp_rank, unit_counts
from plait.core.step.stages import Stage
from plait.core.step.traffic import unit_sizes
from plait.lab import LabSpec

RANKS, SLACK = 4, 1.05
VARIANTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 4, "overlap": "async"},
    "megatron sp": {"tp": 4, "overlap": "async", "sequence_parallel": True},
    "ulysses": {"cp": 4, "optim": 4},
    "ring": {"cp": 4, "ring": 4, "optim": 4},
    "2 x 2": {"cp": 4, "ring": 2, "optim": 4},
}
CASES = {
    "hidden": ModelSpec(
        family="llama", num_layers=3, hidden=512, num_heads=8, ffn_hidden=1408, vocab=256, max_sequence=512
    ),
    "speed": ModelSpec(
        family="llama", num_layers=2, hidden=512, num_heads=8, ffn_hidden=1408, vocab=256, max_sequence=4096
    ),
    "memory": ModelSpec(
        family="llama", num_layers=2, hidden=256, num_heads=4, ffn_hidden=704, vocab=256, max_sequence=65536
    ),
}

KINDS: dict[str, dict[str, Any]] = {"ulysses": {"cp": 2}, "ring": {"cp": 2, "ring": 2}, "2 x 2": {"cp": 4, "ring": 2}}
BATCH, SHARE = 4, 0.3
HIDING: dict[str, dict[str, Any]] = {
    "before": {"overlap": "async"}, "1 slice": {}, "2 slices": {"p1": 2}, "4 slices": {"p1": 4},
    "none": {"overlap": "no-communication"},
}  # fmt: skip


def main() -> int:
    """Measure the cases; print a table each, and with --json one last line for programs."""
    parser = make_parser(__doc__, rounds=6, cases=CASES)
    parser.add_argument("--nic", help="rate of the link in the case hidden, instead of one that is looked for")
    options = parser.parse_args()
    found, cases = dict[str, Any](), options.case or CASES
    if "speed" in cases:
        found["speed"] = speed(options)
    if "memory" in cases:
        found["memory"] = memory(options)
    if "hidden" in cases:
        found["hidden"] = {kind: hidden(kind, options) for kind in KINDS}
    keep(found, options)
    return 0


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds a step of every variant, and ratios within a round."""
    measured, found = _run("speed", VARIANTS, rounds=options.rounds), dict[str, Any]()
    times: dict[str, list[float]] = measured["seconds"]
    for name, seconds in times.items():
        against = ratio(times, "megatron sp", name)
        lasting, within = predicted("speed", name)
        found[name] = {"seconds": statistics.median(seconds), "against_megatron": against, "lasting": lasting}
        found[name] |= {"within_a_step": measured["within"][name], "predicted": within}
    if not options.json:
        columns = ("variant", "ms", "against megatron sp", "MB lasting", "MB within a step", "predicted")
        table = Table(*columns, title=f"{CASES['speed'].max_sequence} tokens")
        for name, row in found.items():
            memory = (f"{row[key] / 1e6:.0f}" for key in ("lasting", "within_a_step", "predicted"))
            table.add_row(name, f"{row['seconds'] * 1e3:.0f}", f"{row['against_megatron']:.2f}x", *memory)
        Console(width=140).print(table)
    return found


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """One long sequence within a limit: what each variant took of it, or how it failed."""
    limit, found = round(sum(predicted("memory", "2 x 2")) * SLACK), dict[str, Any]()
    for name in ("2 x 2", "tp"):
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.json"
            try:
                row = _run("memory", {name: VARIANTS[name]}, limit=limit, report=str(report))
            except PlaitError:
                if not report.exists():
                    raise
                row = json.loads(report.read_text())
        found[name] = row | {"predicted": sum(predicted("memory", name)), "limit": limit}
    if not options.json:
        table = Table(
            "variant",
            "MB predicted",
            "MB allowed",
            "MB taken",
            "off",
            "outcome",
            title=f"{CASES['memory'].max_sequence} tokens",
        )
        for name, row in found.items():
            outcome = row.get("failure") or f"a step in {row['seconds']:.0f} s"
            off = "" if "failure" in row else f"{row['taken'] / row['predicted'] - 1:+.1%}"
            table.add_row(
                name, *(f"{row[key] / 1e6:.0f}" for key in ("predicted", "limit", "taken")), off, Text(outcome)
            )
        Console(width=160).print(table)
    return found


def hidden(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step with every way of hiding one kind's communication, and what share of it each
    hides."""
    nic = options.nic or _rate(kind)
    times: dict[str, list[float]] = _hiding(kind, nic, HIDING, options.rounds)
    share = 1 - ratio(times, "none", "before")
    found: dict[str, Any] = {"nic": nic, "share": share, "rounds": options.rounds}
    found |= {
        name: {
            "seconds": statistics.median(seconds),
            "spread": (min(seconds), max(seconds)),
            "hidden": (1 - ratio(times, name, "before")) / share,
        }
        for name, seconds in times.items()
    }
    if not options.json:
        table = Table("variant", "ms", "from", "to", "hidden", title=f"{kind}, {nic}: {share:.0%} of the step before")
        for name in HIDING:
            row = found[name]
            ms = (f"{seconds * 1e3:.0f}" for seconds in (row["seconds"], *row["spread"]))
            table.add_row(name, *ms, f"{row['hidden']:.0%}")
        Console(width=100).print(table)
    return found


def _rate(kind: str) -> str:
    ends = {name: HIDING[name] for name in ("before", "none")}
    return rate_for(SHARE, 300.0, (2, 4), lambda nic, rounds: _hiding(kind, nic, ends, rounds), *ends)


def _hiding(kind: str, nic: str, variants: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    setup = {"model": CASES["hidden"].to_dict(), "base": KINDS[kind], "batch": BATCH, "variants": variants}
    lab = LabSpec(2, KINDS[kind]["cp"] // 2, nic, segment=SEGMENT)
    return ranks_on_lab(lab, "sequence_hiding.py", json.dumps(setup | {"rounds": rounds}))["seconds"]


def predicted(case: str, variant: str) -> tuple[int, int]:
    """Bytes of one rank by ``plan``'s formulas: what lasts, and the peak within a step."""
    given = dict(VARIANTS[variant])
    sharding, model = Sharding(optim=given.pop("optim", 1)), CASES[case]
    strategy, sequence = Strategy(**given), model.max_sequence
    stage = Stage(0, 1, 0, model.num_layers)
    units = unit_counts(unit_sizes(model, strategy, stage, sharding))
    lasting = states_of_pp_rank(HeldStates(units, bare=True), sharding, itemsize=4, options=MemoryOptions())
    tables = position_tables(model, strategy, sequence=sequence, itemsize=4)
    within = activations(model, strategy, stage, TracedBatch(batch=1, sequence=sequence, itemsize=4))
    whole = lasting.parameters + lasting.gradients + lasting.optimizer + lasting.buffers
    return whole + tables, within.peak()


def _run(case: str, variants: dict[str, Any], **more: Any) -> dict[str, Any]:
    setup = {"model": CASES[case].to_dict(), "variants": variants, "ranks": RANKS, "rounds": 0, **more}
    return ranks_on_lab(LabSpec(2, 2, "1gbit", segment=SEGMENT), "sequence_ranks.py", json.dumps(setup))


if __name__ == "__main__":
    finish(main)
