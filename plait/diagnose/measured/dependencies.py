"""Find the dependencies of a span, on its own rank and across tp, cp, dp and pp.

Dependencies follow from the recording, as in the replay (`verdicts.replay`). A wait needs the
collective or transfer that ended it. Members of a collective need each other. An op needs, in each
lane of its rank, the last op that ended before it began. No dependency crosses steps.

    wait                            dependency
    idle of a pipeline              the transfer of the same meeting that ended last
    a wait named as a collective    the collective with the same occurrence number
    ``need UNIT``                   the latest ``gather UNIT`` or ``publish UNIT`` until the wait ended
    ``settle``                      the latest ``reduce`` until the wait ended, of any unit

A wait may have no dependency: in the first step no rank has published anything yet, and a settling
without a pending reduction is recorded too.

``aligned`` aligns the clocks of hosts by the ends of common collectives: a collective ends at one
moment for all, up to the last message's latency. So the median difference of ends on two hosts is
their clocks' offset, and the spread is its error. With rings, ``core.record.clocks`` also knows
drift and a bound; this module serves runs of which only the timeline was kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import polars as pl

from plait.core.record.records import AWAITED
from plait.core.record.timeline import SpanKey
from plait.diagnose.measured.recording import Recording
from plait.diagnose.verdicts.outliers import SIGMA

Why = Literal["order", "collective", "member", "transfer", "wait"]
MANY = 64
"""The largest number of a collective's members that are listed."""
ROUNDING_SECONDS = 1e-6
"""Seconds by which neighbouring spans may seem to overlap."""
WAITS = ("wait", "idle")
"""Kinds of spans that are waits."""
SETTLE = "settle"
_HERE = ("step", "rank", "axis")
LEAST = 8
"""Least number of common collectives from which two hosts' clocks are compared."""
MOST = 200_000
"""The largest number of spans that are examined, the last ones."""


class Dependency(NamedTuple):
    """A span that another span needs, or that needs the other span.

    axis: of the communication between the two; "" on the same rank. why: ``order`` of the program
    on a rank, the ``collective`` or ``transfer`` that ended a wait, another ``member`` of the
    collective, the ``wait`` for it. last: True for the member that arrived last and held up the
    others. late: seconds after the first member.
    """

    key: SpanKey
    axis: str
    why: Why
    start: float
    end: float
    last: bool = False
    late: float = 0.0


class SpanDependencies(NamedTuple):
    """A span with its columns and dependencies. needs: spans that it depends on. needed_by: spans
    that depend on it. Both have the nearest in time first."""

    span: dict[str, Any]
    needs: tuple[Dependency, ...]
    needed_by: tuple[Dependency, ...]

    @property
    def held_up_by(self) -> Dependency | None:
        """The dependency that held the span up: the last member to arrive. For that member itself,
        and for any other span, the dependency that ended last. Following these links never returns
        to a span."""
        last = [link for link in self.needs if link.last]
        others = [link for link in self.needs if link.why != "member"]
        return max(last or others, key=lambda link: link.end, default=None)


def dependencies_of(spans: pl.DataFrame, key: SpanKey, *, clocks_agree: bool = True) -> SpanDependencies | None:
    """Return a span's dependencies; None if there is no span with that key. spans: of a recording,
    with axis and meeting, of any number of steps.

    clocks_agree: True if starts on different ranks can be compared; otherwise durations decide
    which member came last."""
    step = spans.filter(step=key.step)
    found = step.filter(is_span(key))
    if found.is_empty():
        return None
    one = found.row(0, named=True)
    mine = step.filter(rank=key.rank)
    needs, needed = _in_order(mine, one)
    matched, waits = _awaited(step, one)
    members = _members(step, one, clocks_agree)
    for link in [one for one in matched if one.why == "collective"]:
        row = step.filter(is_span(link.key)).row(0, named=True)
        # The member that held up the awaited collective.
        matched += [member for member in _members(step, row, clocks_agree) if member.last]
    return SpanDependencies(one, _once([*matched, *members, *needs]), _once([*waits, *needed]))


def _once(links: list[Dependency]) -> tuple[Dependency, ...]:
    kept: dict[SpanKey, Dependency] = {}
    for link in links:
        kept.setdefault(link.key, link)
    return tuple(kept.values())


def is_span(key: SpanKey) -> pl.Expr:
    """Return an expression that is true for the span with this key."""
    return pl.all_horizontal(pl.col(name) == value for name, value in key._asdict().items())


def _link(row: dict[str, Any], axis: str, why: Why, **more: Any) -> Dependency:
    return Dependency(_key(row), axis, why, row["start"], row["end"], **more)


def _key(row: dict[str, Any]) -> SpanKey:
    return SpanKey(*(row[name] for name in SpanKey._fields))


def _in_order(mine: pl.DataFrame, one: dict[str, Any]) -> tuple[list[Dependency], list[Dependency]]:
    """Return (what the span needs, what needs it) on the same rank: the processor's spans before
    and after, and the communication that the span launched."""
    before = mine.filter(
        pl.col("lane") == "processor", pl.col("end") <= one["start"] + ROUNDING_SECONDS, pl.col("start") < one["start"]
    ).sort("end")
    needs = [_link(row, "", "order") for row in before.tail(1).iter_rows(named=True)]
    if one["lane"] != "processor":
        return needs, []
    after = mine.filter(
        pl.col("lane") == "processor", pl.col("start") >= one["end"] - ROUNDING_SECONDS, pl.col("end") > one["end"]
    )
    needed = [_link(row, "", "order") for row in after.sort("start").head(1).iter_rows(named=True)]
    until = min((link.end for link in needed), default=float("inf"))
    begun = mine.filter(pl.col("lane") != "processor", pl.col("start").is_between(one["end"] - ROUNDING_SECONDS, until))
    begun = begun.sort("start").unique("lane", keep="first", maintain_order=True)
    return needs, needed + [_link(row, "", "order") for row in begun.iter_rows(named=True)]


def _awaited(step: pl.DataFrame, one: dict[str, Any]) -> tuple[list[Dependency], list[Dependency]]:
    """Return (the communication that the span waited for, the waits that waited for the span)."""
    if one["kind"] in ("idle", "transfer"):
        near = step.filter(pl.col("meeting") == pl.lit(one["meeting"], pl.UInt64))
    else:
        near = step.filter(pl.col("rank") == one["rank"], pl.col("kind").is_in(["wait", "comm"]))
    pairs, rows = awaited(near), near.rows(named=True)
    at = [number for number, row in enumerate(rows) if _key(row) == _key(one)]
    needs: list[dict[str, Any]] = [rows[on] for on in pairs.filter(pl.col("wait").is_in(at))["on"]]
    needed: list[dict[str, Any]] = [rows[wait] for wait in pairs.filter(pl.col("on").is_in(at))["wait"]]
    why: Why = "transfer" if one["kind"] == "idle" else "collective"
    return [_link(row, one["axis"], why) for row in needs], [_link(row, one["axis"], "wait") for row in needed]


def _members(step: pl.DataFrame, one: dict[str, Any], clocks_agree: bool) -> list[Dependency]:
    """Return the other members of the span's collective, the last to arrive first."""
    if one["kind"] != "comm" or one["meeting"] is None:
        return []
    met = step.filter(meeting=one["meeting"], kind="comm")
    came = pl.col("start") if clocks_agree else pl.col("start") - pl.col("end")
    met = met.with_columns(late=came - came.min()).sort("late", descending=True)
    links = [
        _link(row, one["axis"], "member", last=n == 0, late=row["late"])
        for n, row in enumerate(met.head(MANY).iter_rows(named=True))
    ]
    return [link for link in links if link.key.rank != one["rank"]]


def awaited(spans: pl.DataFrame) -> pl.DataFrame:
    """Return the table (wait, on) of pairs of row numbers of ``spans``: a wait, in order, and the
    communication that it waited for. A wait is in at most one pair. spans: of a recording, with
    axis and meeting."""
    rows = spans.select(
        *_HERE, "kind", "name", "seq", "start", "end", "meeting", row=pl.int_range(pl.len(), dtype=pl.UInt32)
    )
    verbs = {wait: wait for wait in AWAITED}, {verb: wait for wait, verbs in AWAITED.items() for verb in verbs}
    waits, comm = (
        rows.filter(kind=kind).with_columns(unit=_unit(known))
        for kind, known in zip(("wait", "comm"), verbs, strict=True)
    )
    return pl.concat([_transfers(rows), _same_name(waits, comm), _units(waits, comm)]).sort("wait")


def _unit(known: Mapping[str, str]) -> pl.Expr:
    """Return an expression with equal values for a wait of sharding and the collectives that it
    waits for; null for all other spans. known: the kind of wait for each verb, such as ``gather``.
    """
    verb, of = (pl.col("name").str.extract(r"^(\S+) (.*)$", n) for n in (1, 2))
    wait = verb.replace_strict(known, default=None, return_dtype=pl.String)
    return pl.when(wait == SETTLE).then(wait).otherwise(pl.format("{} {}", wait, of))


def _transfers(rows: pl.DataFrame) -> pl.DataFrame:
    met = rows.filter(pl.col("meeting").is_not_null())
    sent = met.filter(kind="transfer").sort("end").unique("meeting", keep="last", maintain_order=True)
    waits = met.filter(kind="idle")
    return _pairs(waits.join(sent.select("meeting", on="row"), on="meeting"))


def _same_name(waits: pl.DataFrame, comm: pl.DataFrame) -> pl.DataFrame:
    keys = [*_HERE, "name", "seq"]
    comm = comm.unique(keys, keep="first", maintain_order=True)
    return _pairs(waits.filter(pl.col("unit").is_null()).join(comm.select(*keys, on="row"), on=keys))


def _units(waits: pl.DataFrame, comm: pl.DataFrame) -> pl.DataFrame:
    """Return pairs of waits of sharding and their collectives, by time, since a group of matrices
    may be needed again without another gather. A collective's middle decides, because the next one
    may begin at the moment in which the wait ends."""
    keys = [*_HERE, "unit"]
    middle = (pl.col("start") + pl.col("end")) / 2
    began = comm.filter(pl.col("unit").is_not_null()).select(*keys, middle.alias("end"), on="row").sort("end")
    ends = waits.filter(pl.col("unit").is_not_null()).sort("end")
    found = ends.join_asof(began, on="end", by=keys, check_sortedness=False)
    return _pairs(found.filter(pl.col("on").is_not_null()))


def _pairs(found: pl.DataFrame) -> pl.DataFrame:
    return found.select(pl.col("row").alias("wait"), pl.col("on").cast(pl.UInt32))


class Alignment(NamedTuple):
    """The result of aligning clocks. offsets: by rank, seconds to add to the rank's times; only
    ranks whose clock was compared. error: seconds by which two ranks may still differ (three times
    the spread of ends); 0 with one clock. lost: hosts whose clocks could not be compared."""

    offsets: dict[int, float]
    error: float
    lost: tuple[str, ...] = ()


def aligned(recording: Recording) -> Alignment:
    """Return the offsets in seconds that align every host's clock with that of the lowest rank's
    host; none with one clock."""
    if recording.clocks_agree:
        return Alignment({}, 0.0)
    hosts = dict(recording.grid.drop_nulls("host").sort("rank").select("rank", "host").iter_rows())
    meetings = recording.meetings.filter(pl.col("axis") != "pp").tail(MOST)
    ends = meetings.join(recording.grid.select("rank", "host"), on="rank").group_by("meeting", "host").agg(
        pl.max("end")
    )  # fmt: skip
    both = ends.join(ends, on="meeting", suffix="_other").filter(pl.col("host") != pl.col("host_other"))
    apart = pl.col("end_other") - pl.col("end")
    pairs = both.group_by("host", "host_other").agg(
        n=pl.len(), offset=apart.median(), spread=(apart - apart.median()).abs().median() * SIGMA
    ).filter(pl.col("n") >= LEAST)  # fmt: skip
    edges: dict[str, list[tuple[str, float, float]]] = {}
    for host, other, _, offset, spread in pairs.sort("host", "host_other").iter_rows():
        edges.setdefault(host, []).append((other, offset, spread))
    names = list(dict.fromkeys(hosts.values()))
    led: dict[str, tuple[float, float]] = {}
    reached: dict[str, tuple[float, float]] = {names[0]: (0.0, 0.0)} if names else {}
    while reached:  # the least error first, so that every host is aligned along the most precise pairs
        host = min(reached, key=lambda name: reached[name][1])
        led[host] = offset, error = reached.pop(host)
        for other, ahead, spread in edges.get(host, []):
            if other not in led and (other not in reached or error + spread < reached[other][1]):
                reached[other] = offset - ahead, error + spread
    errors = [error for _, error in led.values()]
    return Alignment(
        {rank: led[host][0] for rank, host in hosts.items() if host in led}, 3 * float(np.max(errors, initial=0.0)),
        tuple(name for name in names if name not in led),
    )  # fmt: skip
