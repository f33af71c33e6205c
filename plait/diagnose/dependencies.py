"""What a span waited for and what waited for it, on its own rank and across tp, cp, dp and pp.

Read off the recording, as the replay does (`plait.diagnose.replay`): a wait needs the collective or transfer
that ended it, members of a collective need each other, and an op needs what ended last before it in each lane
of its rank. All of one step: nothing that counts crosses steps.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import polars as pl

from plait.core.record.timeline import SpanKey
from plait.diagnose.awaited import awaited

Why = Literal["order", "collective", "member", "transfer", "wait"]
MANY = 64
"""Members of a group that are listed."""
ROUNDED = 1e-6
"""Seconds by which neighbours may seem to overlap."""


class Dependency(NamedTuple):
    """A span that another one needs, or that needs it.

    axis: of the communication between them; "" on the same rank. why: ``order`` of the program on a rank,
    the ``collective`` or ``transfer`` that a wait waits for, another ``member`` of the collective, the
    ``wait`` for it. last: of members, the one that came last, for which the others waited. late: seconds
    after the first.
    """

    key: SpanKey
    axis: str
    why: Why
    start: float
    end: float
    last: bool = False
    late: float = 0.0


class Around(NamedTuple):
    """A span with its columns, and its neighbours: the nearest in time first."""

    span: dict[str, Any]
    needs: tuple[Dependency, ...]
    needed_by: tuple[Dependency, ...]

    @property
    def held_up_by(self) -> Dependency | None:
        """What it needed last: the member that came last; for that one itself, and for all else, what ended
        last of what it needed. Who goes on from there never comes back."""
        last = [link for link in self.needs if link.last]
        others = [link for link in self.needs if link.why != "member"]
        return max(last or others, key=lambda link: link.end, default=None)


def around(spans: pl.DataFrame, key: SpanKey, *, clocks_agree: bool = True) -> Around | None:
    """spans: of a recording, any number of steps. None if there is no such span.

    clocks_agree: whether starts on different ranks can be compared; else who came last is told by durations.
    """
    step = spans.filter(pl.col("step") == key.step)
    found = step.filter(
        pl.col("rank") == key.rank, pl.col("kind") == key.kind, pl.col("name") == key.name, pl.col("seq") == key.seq
    )
    if found.is_empty():
        return None
    one = found.row(0, named=True)
    mine = step.filter(pl.col("rank") == key.rank)
    needs, needed = _in_order(mine, one)
    matched, waits = _awaited(step, one)
    members = _members(step, one, clocks_agree)
    for link in [one for one in matched if one.why == "collective"]:
        row = step.filter(_is(link.key)).row(0, named=True)
        # Whom the collective that it waits for waited for itself.
        matched += [member for member in _members(step, row, clocks_agree) if member.last]
    return Around(one, _once([*matched, *members, *needs]), _once([*waits, *needed]))


def _once(links: list[Dependency]) -> tuple[Dependency, ...]:
    kept: dict[SpanKey, Dependency] = {}
    for link in links:
        kept.setdefault(link.key, link)
    return tuple(kept.values())


def _is(key: SpanKey) -> pl.Expr:
    return (
        (pl.col("rank") == key.rank) & (pl.col("kind") == key.kind) & (pl.col("name") == key.name)
        & (pl.col("seq") == key.seq)
    )  # fmt: skip


def _link(row: dict[str, Any], axis: str, why: Why, **more: Any) -> Dependency:
    return Dependency(_key(row), axis, why, row["start"], row["end"], **more)


def _key(row: dict[str, Any]) -> SpanKey:
    return SpanKey(row["step"], row["rank"], row["kind"], row["name"], row["seq"])


def _in_order(mine: pl.DataFrame, one: dict[str, Any]) -> tuple[list[Dependency], list[Dependency]]:
    """On its own rank: what the processor did before and after; what communication it set off."""
    before = mine.filter(
        pl.col("lane") == "processor", pl.col("end") <= one["start"] + ROUNDED, pl.col("start") < one["start"]
    ).sort("end")
    needs = [_link(row, "", "order") for row in before.tail(1).iter_rows(named=True)]
    if one["lane"] != "processor":
        return needs, []
    after = mine.filter(
        pl.col("lane") == "processor", pl.col("start") >= one["end"] - ROUNDED, pl.col("end") > one["end"]
    )
    needed = [_link(row, "", "order") for row in after.sort("start").head(1).iter_rows(named=True)]
    until = min((link.end for link in needed), default=float("inf"))
    begun = mine.filter(pl.col("lane") != "processor", pl.col("start").is_between(one["end"] - ROUNDED, until))
    begun = begun.sort("start").unique("lane", keep="first", maintain_order=True)
    return needs, needed + [_link(row, "", "order") for row in begun.iter_rows(named=True)]


def _awaited(step: pl.DataFrame, one: dict[str, Any]) -> tuple[list[Dependency], list[Dependency]]:
    """What it waited for, and the waits that waited for it."""
    if one["kind"] in ("idle", "transfer"):
        near = step.filter(pl.col("meeting") == pl.lit(one["meeting"], pl.UInt64))
    else:
        near = step.filter(pl.col("rank") == one["rank"], pl.col("kind").is_in(["wait", "comm"]))
    pairs, rows = awaited(near), near.rows(named=True)
    at = [number for number, row in enumerate(rows) if _key(row) == _key(one)]
    needs = [rows[on] for on in pairs.filter(pl.col("wait").is_in(at))["on"]]
    needed = [rows[wait] for wait in pairs.filter(pl.col("on").is_in(at))["wait"]]
    why: Why = "transfer" if one["kind"] == "idle" else "collective"
    return [_link(row, one["axis"], why) for row in needs], [_link(row, one["axis"], "wait") for row in needed]


def _members(step: pl.DataFrame, one: dict[str, Any], clocks_agree: bool) -> list[Dependency]:
    """Of its collective, the others; the last to come first."""
    if one["kind"] != "comm" or one["meeting"] is None:
        return []
    met = step.filter(pl.col("meeting") == one["meeting"], pl.col("kind") == "comm")
    came = pl.col("start") if clocks_agree else pl.col("start") - pl.col("end")
    met = met.with_columns(late=came - came.min()).sort("late", descending=True)
    links = [
        _link(row, one["axis"], "member", last=n == 0, late=row["late"])
        for n, row in enumerate(met.head(MANY).iter_rows(named=True))
    ]
    return [link for link in links if link.key.rank != one["rank"]]
