"""``plait reshard``: how a tensor would get from one layout to another, before it does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from plait.core.base.pictures import Bar
    from plait.core.reshard.plan import ReshardPlan
    from plait.plan.reshard import Fabric

app = typer.Typer(
    no_args_is_help=True,
    help="Cross-mesh resharding: which pieces go where, in which order, and how close to the bound.",
)

Draw = Annotated[
    list[Path] | None, typer.Option(metavar="FILE", help="Also draw to this file (.svg, .png, .pdf); may be repeated.")
]
MAX_ROWS = 24  # of the table for people
ITEMSIZE = {
    **dict.fromkeys(("bool", "int8", "uint8", "fp8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("int16", "fp16", "float16", "bf16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "fp32", "float32"), 4),
    **dict.fromkeys(("int64", "fp64", "float64", "complex64"), 8),
}


@app.callback()
def _group() -> None:
    """Keeps ``explain`` a command of its own."""


@app.command()
def explain(
    source: Annotated[
        str,
        typer.Option("--from", metavar="LAYOUT", help="Mesh, then R or S and mesh axes a dimension: '(2,4) S0 R R'."),
    ],
    destination: Annotated[
        str,
        typer.Option("--to", metavar="LAYOUT", help="Ranks go on after the source's unless it says: '(2,4)@8 ...'."),
    ],
    shape: Annotated[str, typer.Option(metavar="N,N,...", help="Of the whole tensor.")],
    dtype: Annotated[str, typer.Option(help="Type of its elements.")] = "bf16",
    nic: Annotated[str, typer.Option(metavar="RATE", help="Of one NIC, each way.")] = "10gbit",
    nics_per_host: Annotated[
        int, typer.Option(help="NICs (rails) of a host, shared out among its ranks in order.")
    ] = 1,
    latency: Annotated[str, typer.Option(metavar="TIME", help="For each message: 50us, 1ms, 0s.")] = "50us",
    ranks_per_host: Annotated[
        int | None, typer.Option(help="Ranks of a host, in order.", show_default="each row of a mesh is a host")
    ] = None,
    order: Annotated[str, typer.Option(help="Search: list, naive, load_balance, greedy, dfs or exact.")] = "list",
    way: Annotated[
        str,
        typer.Option(
            "--strategy", help="auto, or one for all: send_recv, local_all_gather, global_all_gather, broadcast."
        ),
    ] = "auto",
    draw: Draw = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Show the plan for one tensor: unit tasks, senders, order, way, predicted time against the lower bound,
    and every NIC's use.

    Example: plait reshard explain --from "(2,4) R S0 R" --to "(2,4) S0 R R" --shape 1024,1024,512 --dtype
    int32
    """
    from plait.core.reshard.layouts import TensorLayout
    from plait.plan.reshard import plan_reshard

    first = TensorLayout.parse(source)
    second = TensorLayout.parse(destination, first_rank=max(first.ranks) + 1)
    sizes, itemsize = _shape(shape), _itemsize(dtype)
    fabric = _fabric(first, second, nic, nics_per_host, latency, ranks_per_host)
    chosen: Any = {"order": order, "way": None if way == "auto" else way}
    plan = plan_reshard(first, second, sizes, itemsize, fabric, **chosen)
    bars = _bars(plan, fabric)
    title = f"{plan.source} -> {plan.destination}, {dtype} {'x'.join(map(str, sizes)) or 'scalar'}, {nic}"
    for path in draw or []:
        from plait.api.pictures import draw_gantt
        from plait.core.base.files import explained

        with explained(f"{path} cannot be written", fix="Choose another with --draw"):
            draw_gantt(bars, path, title=title)
    if as_json:
        typer.echo(
            json.dumps(
                plan.to_dict() | {"predicted": plan.predicted, "compared": _compared(plan, fabric), "key": plan.key}
            )
        )
    else:
        _print(plan, fabric, bars, title)


def _fabric(
    source: Any, destination: Any, nic: str, nics_per_host: int, latency: str, ranks_per_host: int | None
) -> Fabric:
    from plait.core.base.errors import ReshardError
    from plait.lab import parse_rate
    from plait.plan.reshard import Fabric, even_hosts, mesh_hosts

    rate = parse_rate(nic)
    if rate is None:
        raise ReshardError("--nic unlimited leaves nothing to plan for. Give a rate, such as 10gbit.")
    if nics_per_host < 1 or (ranks_per_host is not None and ranks_per_host < 1):
        raise ReshardError("--nics-per-host and --ranks-per-host must be at least 1.")
    if ranks_per_host is not None:
        hosts = even_hosts(1 + max(*source.ranks, *destination.ranks), ranks_per_host)
    elif set(source.ranks) & set(destination.ranks):
        raise ReshardError(
            "The two meshes share ranks, so rows of a mesh do not say what a host is. Add --ranks-per-host."
        )
    else:
        hosts = mesh_hosts(source, destination)
    return Fabric(hosts=hosts, rate=rate / 8, latency=_seconds(latency), nics_per_host=nics_per_host)


def _shape(text: str) -> tuple[int, ...]:
    from plait.core.base.errors import ReshardError

    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise ReshardError(
            f"--shape {text}: whole numbers with commas between them are expected, such as 1024,1024,512."
        ) from None


def _itemsize(dtype: str) -> int:
    from plait.core.base.errors import ReshardError, nearest

    if dtype not in ITEMSIZE:
        raise ReshardError(f"--dtype {dtype} is unknown{nearest(dtype, ITEMSIZE)}. Use one of {', '.join(ITEMSIZE)}.")
    return ITEMSIZE[dtype]


def _seconds(text: str) -> float:
    from plait.core.base.errors import ReshardError

    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ns|us|ms|s)", text.strip())
    if not match:
        raise ReshardError(f"--latency {text}: a number and ns, us, ms or s is expected, such as 50us.")
    return float(match[1]) * {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}[match[2]]


def _bars(plan: ReshardPlan, fabric: Fabric) -> list[Bar]:
    """What every NIC sends and receives, in seconds; a colour for each sending host."""
    from plait.core.base.pictures import Bar
    from plait.plan.reshard_cost import nics_used

    bars: list[tuple[int, int, Bar]] = []
    for number, step in enumerate(plan.steps):
        kind = f"from host {fabric.host(step.chains[0].sender)}"
        start, end = step.start / 1e9, (step.start + step.duration) / 1e9
        sides = [nics_used(step.way, chain, fabric) for chain in step.chains]
        for side, word in enumerate(("sends", "receives")):
            for nic in sorted(set().union(*(each[side] for each in sides))):
                host, rail = divmod(nic, fabric.nics_per_host)
                name = f"host {host}" + (f" nic {rail}" if fabric.nics_per_host > 1 else "")
                bars.append((nic, side, Bar(f"{name} {word}", start, end, str(number), kind)))
    return [bar for *_, bar in sorted(bars, key=lambda entry: entry[:2])]


def _compared(plan: ReshardPlan, fabric: Fabric) -> dict[str, int]:
    """Predicted nanoseconds of every order with the plan's ways, and of the published baselines."""
    from plait.core.reshard.layouts import unit_tasks
    from plait.plan.reshard import ORDERS, problem, search, unicast
    from plait.plan.reshard_order import ends

    tasks = unit_tasks(plan.source, plan.destination, plan.shape)
    sizes = [task.box.elements * plan.itemsize for task in tasks]
    same = plan.steps[0].way if len({step.way for step in plan.steps}) == 1 else None
    jobs, _ = problem(tasks, sizes, fabric, same)
    found: dict[str, int] = {
        order: ends(jobs, search(jobs, order)) for order in ORDERS if order != "exact" or len(jobs) <= 64
    }
    found["send/recv"] = unicast(tasks, sizes, fabric, way="send_recv")
    found["send/recv or all-gather (Alpa)"] = unicast(tasks, sizes, fabric, way="alpa")
    return found


def _print(plan: ReshardPlan, fabric: Fabric, bars: list[Bar], title: str) -> None:
    from plait.cli import terminal
    from plait.core.base.pictures import text_gantt

    terminal.title(title)
    header = ("step", "box", "MB", "may send", "sends", "receives", "way", "chunks", "start s", "time s")
    rows = [
        (
            str(number),
            str(step.task.box),
            f"{step.task.box.elements * plan.itemsize / 1e6:.1f}",
            _ranks(step.task.holders),
            _ranks(tuple(chain.sender for chain in step.chains)),
            _ranks(step.task.receivers),
            step.way,
            str(step.chunks),
            f"{step.start / 1e9:.4f}",
            f"{step.duration / 1e9:.4f}",
        )
        for number, step in enumerate(plan.steps[:MAX_ROWS])
    ]
    terminal.table(header, rows)
    if len(plan.steps) > MAX_ROWS:
        terminal.text(f"and {len(plan.steps) - MAX_ROWS} more steps (all of them with --json)")
    names = max((len(bar.row) for bar in bars), default=0)
    for line in text_gantt(bars, max(20, terminal.drawing_width() - names - 3)):
        terminal.say(line)
    ratio = f", {plan.lower_bound / plan.predicted:.1%} of it by the bound" if plan.predicted else ""
    terminal.text(f"predicted {plan.predicted / 1e9:.4f} s; lower bound {plan.lower_bound / 1e9:.4f} s{ratio}")
    others = ", ".join(f"{name} {nanoseconds / 1e9:.4f} s" for name, nanoseconds in _compared(plan, fabric).items())
    terminal.text(f"orders and baselines: {others}")


def _ranks(ranks: tuple[int, ...]) -> str:
    """Ranks with runs of neighbours shortened: 0-3 8."""
    words: list[str] = []
    start = None
    for rank, following in zip(ranks, (*ranks[1:], None), strict=True):
        start = rank if start is None else start
        if following != rank + 1:
            words.append(str(rank) if start == rank else f"{start}-{rank}")
            start = None
    return " ".join(words)
