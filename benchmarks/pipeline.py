"""Pipelines whose transfers take time: our schedules and PyTorch's, interleaved on emulated links, against
transfers removed.

    python benchmarks/pipeline.py [--json] [--quick] [--rounds 5] [--case waits] [--save FILE]

Four cases, each on a lab of its own (``plait lab``; needs Linux and root or user namespaces):

    gpt      2 hosts of one rank, a GPT really computed on both
    u        likewise a U-Transformer, cut at its bottom: two skip connections cross beside the residual
             stream
    waits    4 hosts, a transfer takes about as long as a forward. Four ranks would hide waiting behind each
             other's computation on two cores, so every computation is a STAND-IN: a wait of fixed length. The
             transfers are real
    slow     as waits, with only the last boundary slow: what slack-1f1b is for

Variants: 1f1b (sends awaited), 1f1b_overlap, eager, slack, torch_1f1b (Schedule1F1B), torch_runtime (the same
order on torch's action runtime), bound (eager's order, one number sent instead of each tensor). ``of bound``:
bound / time. ``filled``: the same without the transfers of fill and drain, which no schedule hides (twice the
sum over boundaries). ``steady``: periods after the fill compared likewise. The theorem:
``steady.steady_period`` with each boundary's transfer as measured alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from keeping import SEGMENT, finish, keep, make_parser, ranks_on_lab, ratio
from rich.console import Console
from rich.table import Table

from plait.core.step.clock.pipeline_clock import peak_activations
from plait.core.step.schedules import Shape, generate
from plait.lab import Lab, LabSpec

ALL = ("1f1b", "1f1b_overlap", "eager", "slack", "torch_1f1b", "torch_runtime", "bound")
FORWARD = 0.04  # seconds of a stand-in forward; a backward takes twice that
BYTES = 4_800_000  # over 1 Gbit/s, headers included, about a forward
REAL: dict[str, Any] = {"places": 2, "micro_batches": 8, "boundary": (256, 2, 512), "forward": None, "variants": ALL}
WAITS: dict[str, Any] = {"places": 4, "micro_batches": 24, "forward": FORWARD, "layers": 1, "levels": 0}
CASES: dict[str, dict[str, Any]] = {
    "gpt": REAL | {"nic": "70mbit", "layers": 2, "levels": 0},
    "u": REAL | {"nic": "100mbit", "layers": 5, "levels": 2},
    "waits": WAITS | {"nic": "1gbit", "boundary": (250, 4, BYTES // 4000), "variants": ALL},
    "slow": WAITS | {"nic": "unlimited", "slow": "125mbit", "boundary": (250, 4, BYTES // 32000),
                     "variants": ("1f1b_overlap", "eager", "slack", "bound")},
}  # fmt: skip


def main() -> int:
    """Measure every case; print a table each, and with --json one last line for programs."""
    options = make_parser(__doc__, rounds=5, cases=CASES).parse_args()
    result = {"cases": [measure(name, options) for name in options.case or CASES]}
    keep(result, options)
    return 0


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks of one case on its lab, and work their times out."""
    case = CASES[name]
    spec = LabSpec(case["places"], 1, case["nic"], segment=SEGMENT)
    setup = {key: value for key, value in case.items() if key not in ("nic", "slow")} | {"rounds": options.rounds}

    def slow(lab: Lab) -> None:
        if "slow" in case:
            lab.slow(case["places"] - 1, case["slow"])

    found = ranks_on_lab(spec, "pipeline_ranks.py", json.dumps(setup), prepare=slow)
    point = work_out(name, case, found)
    if not options.json:
        show(point)
    return point


def work_out(name: str, case: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Medians of seconds, medians over rounds of ratios, periods against the theorem, live activations."""
    times: dict[str, list[float]] = found["seconds"]

    period: dict[str, Any] = found["period"]
    theory: dict[str, float] = period.pop("of")
    schedules = {"1f1b": "1f1b", "1f1b_overlap": "1f1b", "eager": "eager-1f1b", "slack": "slack-1f1b"}
    variants: dict[str, dict[str, Any]] = {}
    for variant, seconds in times.items():
        row: dict[str, Any] = {"seconds": statistics.median(seconds), "of_bound": ratio(times, "bound", variant)}
        ends = 2 * sum(found["travel"]) * (variant != "bound")
        row["of_bound_filled"] = statistics.median(b / (a - ends) for a, b in zip(seconds, times["bound"], strict=True))
        row |= {"steady": period["bound"] / period[variant], "period": period[variant]} if variant in period else {}
        if variant in theory and variant != "1f1b":  # whose sends are awaited, which the theorem does not speak of
            row |= {"theory": theory[variant], "off_theory": period[variant] / theory[variant] - 1}
        if "torch_1f1b" in times:
            row["against_torch"] = ratio(times, "torch_1f1b", variant)
        if variant in schedules:
            slack = tuple(found["slack"]["slack"]) if variant == "slack" else ()
            shape = Shape(ranks=case["places"], micro_batches=case["micro_batches"], slack=slack)
            row["alive"] = sum(peak_activations(generate(schedules[variant], shape)).values())
        variants[variant] = row
    return {
        "case": name,
        "computation": "stand-in waits" if case["forward"] else "real",
        "nic": case["nic"],
        "transfer_s": found["travel"],
        "transfer_share": 1 - ratio(times, "bound", "1f1b") if "1f1b" in times else None,
        "slack": found["slack"]["slack"],
        "slack_against_eager": ratio(times, "slack", "eager"),
        "rounds": len(times["bound"]),
        "variants": variants,
    }


def show(point: dict[str, Any]) -> None:
    """One table for people."""
    travel = ", ".join(f"{seconds * 1e3:.0f}" for seconds in point["transfer_s"])
    title = (
        f"{point['case']}: computation {point['computation']}, links {point['nic']}, "
        f"a transfer takes {travel} ms; slack {point['slack']}"
    )
    table = Table(
        "variant",
        "ms",
        "of bound",
        "filled",
        "steady",
        "period ms",
        "theorem ms",
        "against torch 1F1B",
        "alive",
        title=title,
    )

    def text(value: float | None, form: str, scale: float = 1) -> str:
        return "" if value is None else form.format(value * scale)

    for name, row in point["variants"].items():
        table.add_row(
            name,
            text(row["seconds"], "{:.0f}", 1e3),
            text(row["of_bound"], "{:.0%}"),
            text(row["of_bound_filled"], "{:.0%}"),
            text(row.get("steady"), "{:.0%}"),
            text(row.get("period"), "{:.1f}", 1e3),
            text(row.get("theory"), "{:.1f}", 1e3),
            text(row.get("against_torch"), "{:.2f}x"),
            text(row.get("alive"), "{:.0f}"),
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    finish(main)
