"""Cross-mesh resharding on emulated hosts: the paper's cases, ours against every published way and order,
interleaved.

    python benchmarks/reshard.py [--json] [--quick] [--nic 1gbit] [--rounds 7] [--case many3] [--save FILE]

Five hosts of two ranks (``plait lab``; needs Linux and root or user namespaces): as many as the paper's
cluster, whose hosts have four ranks. One sender device on host 0 to one to four receiver hosts (section 5.1.1
of arXiv 2211.05322), and the nine many-to-many cases (5.1.2) with meshes (2,2) instead of (2,4), (3,2)
instead of (3,4), (1,2) instead of (1,4); cases 7 and 8 are one. Sizes are such that the slowest NIC needs
about --seconds at its rate. Every variant runs once a round; times are medians, ratios medians of the ratios
within a round. Alpa: its own rule, senders and order (``baselines/reshard_unicast.py``); the three ways
named after it have one sender for all receivers of a box. ``of bound``: what the slowest NIC would need at
its nominal rate (headers count against us), over what we need.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from keeping import SEGMENT, finish, keep, make_parser, ranks_on_lab, ratio
from rich.console import Console
from rich.table import Table

from plait.core.base.lab_hosts import parse_rate
from plait.core.reshard.layouts import TensorLayout, unit_tasks
from plait.lab import LabSpec
from plait.plan.reshard.boundary import even_hosts
from plait.plan.reshard.cost import Fabric, lower_bound

HOSTS, PER_HOST = 5, 2

# name: source, destination, shape in units that are scaled to the link
CASES = {
    "one(1,1)": ("(1,1) R", "(1,1)@2 R", (1,)),
    "one(1,2)": ("(1,1) R", "(1,2)@2 R", (1,)),
    "one(2,2)": ("(1,1) R", "(2,2)@2 R", (1,)),
    "one(3,2)": ("(1,1) R", "(3,2)@2 R", (1,)),
    "one(4,2)": ("(1,1) R", "(4,2)@2 R", (1,)),
    "many1": ("(2,2) S0 R R", "(2,2)@4 S0 R R", (256, 256, 128)),
    "many2": ("(2,2) R R R", "(2,2)@4 S0 R R", (256, 256, 128)),
    "many3": ("(2,2) R S0 R", "(2,2)@4 S0 R R", (256, 256, 128)),
    "many4": ("(2,2) R S01 R", "(2,2)@4 S01 R R", (256, 256, 128)),
    "many5": ("(2,2) S1 R R", "(2,2)@4 S0 R R", (256, 256, 128)),
    "many6": ("(2,2) S0 R R", "(3,2)@4 S0 R R", (768, 256, 42)),
    "many7": ("(1,2) S1 R R", "(2,2)@2 R R R", (256, 256, 128)),
    "many9": ("(2,2) R S0 R", "(2,2)@4 R R S0", (256, 256, 128)),
}
WAYS: dict[str, dict[str, str]] = {
    "Alpa": {"unicast": "alpa"},
    "send/recv": {"order": "load_balance", "way": "send_recv"},
    "local all-gather": {"order": "load_balance", "way": "local_all_gather"},
    "global all-gather": {"order": "load_balance", "way": "global_all_gather"},
}
ORDERS: dict[str, dict[str, str]] = {"naive order": {"order": "naive"}, "load balance": {"order": "load_balance"}}


def main() -> int:
    """Measure every case; print a table, and with --json one last line for programs."""
    options = _options()
    found = measure(options)
    result = {"nic": options.nic, "hosts": HOSTS, "ranks_per_host": PER_HOST, "rounds": options.rounds, "cases": found}
    if not options.json:
        show(result)
    keep(result, options)
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks on a lab and work their times out."""
    rate = parse_rate(options.nic)
    if rate is None:
        raise SystemExit("--nic unlimited leaves nothing to measure against; give a rate, such as 1gbit")
    fabric: dict[str, Any] = {
        "hosts": even_hosts(HOSTS * PER_HOST, PER_HOST),
        "rate": rate / 8,
        "latency": options.latency * 1e-6,
        "local_rate": options.local_rate,
        "min_chunk": options.min_chunk,
        "max_chunk": options.max_chunk,
    }
    cases = {name: _scaled(name, Fabric(**fabric), options.seconds) for name in options.case or CASES}
    for case in cases.values():
        case["variants"] = {name: how for name, how in case["variants"].items() if name == "ours" or not options.ours}
    setting = json.dumps({"fabric": fabric, "rounds": options.rounds, "cases": cases})
    times = ranks_on_lab(LabSpec(HOSTS, PER_HOST, options.nic, segment=SEGMENT), "reshard_ranks.py", setting)
    return {name: work_out(cases[name], times[name]) for name in cases}


def _scaled(name: str, fabric: Fabric, seconds: float) -> dict[str, Any]:
    """The case with a tensor (of 4-byte elements) that takes the slowest NIC about ``seconds``."""
    source, destination, shape = CASES[name]
    first, second = TensorLayout.parse(source), TensorLayout.parse(destination)
    base = tuple(size * (1 << 20) for size in shape) if len(shape) == 1 else shape
    tasks = [(task, 4 * task.box.elements) for task in unit_tasks(first, second, base)]
    factor = seconds * 1e9 / lower_bound(tasks, fabric)
    scaled = (round(base[0] * factor / 12) * 12, *base[1:])  # still divided evenly by 2, 3 and 4
    variants = {"ours": {"order": "list"}, **WAYS, **(ORDERS if name.startswith("many") else {})}
    return {"source": source, "destination": destination, "shape": scaled, "variants": variants}


def work_out(case: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Medians of seconds, and medians over rounds of ratios."""
    times: dict[str, list[float]] = found["seconds"]
    nbytes = 4
    for size in case["shape"]:
        nbytes *= size
    variants: dict[str, Any] = {}
    for name, seconds in times.items():
        median = statistics.median(seconds)
        variants[name] = {
            "seconds": median,
            "spread": (min(seconds), max(seconds)),
            "predicted": found["plans"][name]["predicted"],
            "ways": found["plans"][name]["ways"],
            "of_bound": found["bound"] / median,
            "bytes_per_second": nbytes / median,
            "over_ours": ratio(times, name, "ours"),
            "cpu_s": statistics.median(found["cpu"][name]),
        }
    about = {key: case[key] for key in ("source", "destination", "shape")}
    return {**about, "bytes": nbytes, "units": found["units"], "bound": found["bound"], "variants": variants}


def show(result: dict[str, Any]) -> None:
    """One table for people: ours in full, the others by how much longer they take."""
    others = [*WAYS, *ORDERS]
    table = Table(
        "case",
        "from",
        "to",
        "MB",
        "bound s",
        "ours s",
        "of bound",
        "Gbit/s",
        "CPU s",
        *others,
        title=f"{result['nic']} a host",
    )
    for name, case in result["cases"].items():
        ours = case["variants"]["ours"]
        ratios = (
            f"{case['variants'][other]['over_ours']:.2f}x" if other in case["variants"] else "" for other in others
        )
        table.add_row(
            name,
            case["source"],
            case["destination"],
            f"{case['bytes'] / 1e6:.0f}",
            f"{case['bound']:.3f}",
            f"{ours['seconds']:.3f}",
            f"{ours['of_bound']:.1%}",
            f"{ours['bytes_per_second'] * 8 / 1e9:.2f}",
            f"{ours['cpu_s']:.2f}",
            *ratios,
        )
    Console(width=160).print(table)


def _options() -> argparse.Namespace:
    parser = make_parser(__doc__, rounds=7, cases=CASES)
    parser.add_argument("--nic", default="1gbit", help="rate of each host's link (default 1gbit)")
    parser.add_argument("--seconds", type=float, default=0.4, help="what the slowest NIC needs (default 0.4)")
    parser.add_argument("--ours", action="store_true", help="leave out what ours is compared with")
    parser.add_argument(
        "--latency", type=float, default=100.0, help="microseconds a message is planned with (default 100)"
    )
    parser.add_argument(
        "--local-rate", type=float, default=1e9, help="bytes per second planned for within a host (default 1e9)"
    )
    parser.add_argument("--min-chunk", type=int, default=1 << 16, help="bytes (default 64 KiB)")
    parser.add_argument("--max-chunk", type=int, default=1 << 20, help="bytes (default 1 MiB)")
    return parser.parse_args()


if __name__ == "__main__":
    finish(main)
