"""Plans that move a tensor from one layout to another, explained before they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.core.base.errors import ReshardError
from plait.core.base.pictures import Bar, Drawing
from plait.core.base.text import Column, Part, Shown, Table
from plait.core.reshard.layouts import Reshard, TensorLayout
from plait.core.reshard.plan import ReshardPlan, TransferMethod
from plait.plan.reshard.boundary import Fabric, even_hosts, mesh_hosts, plan_reshard
from plait.plan.reshard.cost import nics_used

MOST_ROWS = 24
"""The largest number of steps in the printed table."""


@dataclass(frozen=True)
class ReshardAnswer(Shown):
    """A plan that moves one tensor to another layout, and the NICs that it uses. title: layouts,
    type, shape and rate, as text."""

    plan: ReshardPlan
    fabric: Fabric
    title: str = ""

    @property
    def bars(self) -> list[Bar]:
        """Bars of the transfers of every NIC over time, in seconds; a kind (colour) for each
        sending host."""
        fabric = self.fabric
        bars: list[tuple[int, int, Bar]] = []
        for number, step in enumerate(self.plan.steps):
            kind = f"from host {fabric.host(step.chains[0].sender)}"
            start, end = step.start / 1e9, (step.start + step.duration) / 1e9
            sides = [nics_used(step.way, chain, fabric) for chain in step.chains]
            for side, word in enumerate(("sends", "receives")):
                for nic in sorted(set[int]().union(*(each[side] for each in sides))):
                    host, rail = divmod(nic, fabric.nics_per_host)
                    name = f"host {host}" + (f" nic {rail}" if fabric.nics_per_host > 1 else "")
                    bars.append((nic, side, Bar(f"{name} {word}", start, end, str(number), kind)))
        return [bar for *_, bar in sorted(bars, key=lambda entry: entry[:2])]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as ``ReshardPlan.from_dict`` reads it, with predicted nanoseconds, for
        JSON."""
        plan = self.plan
        return plan.to_dict() | {"predicted": plan.predicted, "key": plan.key}

    def parts(self) -> Iterator[Part]:
        """Yield a row for each step, every NIC's use, and predicted seconds against the lower
        bound."""
        plan = self.plan
        header = (
            "step", "box", Column("MB", ".1f"), "may send", "sends", "receives", "way", "chunks",
            Column("start s", ".4f"), Column("time s", ".4f"),
        )  # fmt: skip
        rows = [
            (number, str(step.task.box), step.task.box.elements * plan.itemsize / 1e6, _ranks(step.task.holders),
             _ranks([chain.sender for chain in step.chains]), _ranks(step.task.receivers), step.way, step.chunks,
             step.start / 1e9, step.duration / 1e9)
            for number, step in enumerate(plan.steps[:MOST_ROWS])
        ]  # fmt: skip
        yield Table(self.title, header, rows)
        if len(plan.steps) > MOST_ROWS:
            yield f"and {len(plan.steps) - MOST_ROWS} more steps (all of them with --json)"
        yield Drawing(self.bars)
        ratio = f", {plan.lower_bound / plan.predicted:.1%} of it by the bound" if plan.predicted else ""
        yield f"predicted {plan.predicted / 1e9:.4f} s; lower bound {plan.lower_bound / 1e9:.4f} s{ratio}"

    def draw(self, file: Path) -> None:
        """Draw every NIC's use over time into a file. Raises DataError for a file ending that names
        no picture format, OSError if the file cannot be written."""
        from plait.api.pictures import draw_gantt

        draw_gantt(self.bars, file, title=self.title)


def explain_reshard(reshard: Reshard, fabric: Fabric, way: TransferMethod | None = None) -> ReshardAnswer:
    """Return the plan that moves one tensor. way: the communication method of all its parts; None:
    the cheapest for each. Raises ReshardError for invalid layouts or an unknown method."""
    plan = plan_reshard(reshard, fabric, way=way)
    shape = "x".join(map(str, reshard.shape)) or "scalar"
    return ReshardAnswer(plan, fabric, f"{reshard.source} -> {reshard.destination}, {shape}")


def fabric_of(
    source: TensorLayout, destination: TensorLayout, *, rate: float, latency: float = 50e-6, nics_per_host: int = 1,
    ranks_per_host: int | None = None,
) -> Fabric:  # fmt: skip
    """Return the hosts and NICs of the ranks of two layouts. rate: bytes per second of a NIC, each
    way. latency: seconds of each message. ranks_per_host: None: each row of a mesh is a host.
    Raises ReshardError for numbers below 1, and for meshes that share ranks."""
    if nics_per_host < 1 or (ranks_per_host is not None and ranks_per_host < 1):
        raise ReshardError("nics_per_host and ranks_per_host must be at least 1.")
    if ranks_per_host is not None:
        hosts = even_hosts(1 + max(*source.ranks, *destination.ranks), ranks_per_host)
    elif set(source.ranks) & set(destination.ranks):
        raise ReshardError(
            "The two meshes share ranks, so rows of a mesh do not say what a host is. Set ranks_per_host=N."
        )
    else:
        hosts = mesh_hosts(source, destination)
    return Fabric(hosts=hosts, rate=rate, latency=latency, nics_per_host=nics_per_host)


def _ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, with consecutive ranks shortened: ``0-3 8``."""
    words: list[str] = []
    start = None
    for rank, following in zip(ranks, (*ranks[1:], None), strict=True):
        start = rank if start is None else start
        if following != rank + 1:
            words.append(str(rank) if start == rank else f"{start}-{rank}")
            start = None
    return " ".join(words)
