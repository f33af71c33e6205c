"""Which collective or transfer each wait of a recording waited for: the one place that knows.

    wait                            what it waits for
    idle of a pipeline              the transfer of the same meeting: the one that ended last
    a wait named as a collective    that collective, in the same occurrence
    ``need UNIT``                   the latest ``gather UNIT`` or ``publish UNIT`` until it ended
    ``settle``                      the latest ``reduce`` until it ended, of any unit

A wait may find nothing: of the first step nobody has published anything, and settling with no reduction under
way is recorded too.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from plait.core.record.records import AWAITED

WAITS = ("wait", "idle")
"""Kinds of spans that wait."""
SETTLE = "settle"
_HERE = ("step", "rank", "axis")


def awaited(spans: pl.DataFrame) -> pl.DataFrame:
    """Pairs of rows of ``spans``: ``wait``, in order, and ``on``, what it waited for. A wait stands in one
    pair at most. spans: of a recording, with axis and meeting."""
    rows = spans.select(
        *_HERE, "kind", "name", "seq", "start", "end", "meeting", row=pl.int_range(pl.len(), dtype=pl.UInt32)
    )
    verbs = {wait: wait for wait in AWAITED}, {verb: wait for wait, verbs in AWAITED.items() for verb in verbs}
    waits, comm = (
        rows.filter(pl.col("kind") == kind).with_columns(unit=_unit(known))
        for kind, known in zip(("wait", "comm"), verbs, strict=True)
    )
    return pl.concat([_transfers(rows), _same_name(waits, comm), _units(waits, comm)]).sort("wait")


def _unit(known: Mapping[str, str]) -> pl.Expr:
    """Equal for the waits and collectives of sharding that belong together; null for all others. known: which
    wait a verb is of."""
    verb, of = (pl.col("name").str.extract(r"^(\S+) (.*)$", n) for n in (1, 2))
    wait = verb.replace_strict(known, default=None, return_dtype=pl.String)
    return pl.when(wait == SETTLE).then(wait).otherwise(pl.format("{} {}", wait, of))


def _transfers(rows: pl.DataFrame) -> pl.DataFrame:
    met = rows.filter(pl.col("meeting").is_not_null())
    sent = met.filter(pl.col("kind") == "transfer").sort("end").unique("meeting", keep="last", maintain_order=True)
    waits = met.filter(pl.col("kind") == "idle")
    return _pairs(waits.join(sent.select("meeting", on="row"), on="meeting"))


def _same_name(waits: pl.DataFrame, comm: pl.DataFrame) -> pl.DataFrame:
    keys = [*_HERE, "name", "seq"]
    comm = comm.unique(keys, keep="first", maintain_order=True)
    return _pairs(waits.filter(pl.col("unit").is_null()).join(comm.select(*keys, on="row"), on=keys))


def _units(waits: pl.DataFrame, comm: pl.DataFrame) -> pl.DataFrame:
    """By time: a unit that is here already is needed again without another gather. What counts is a
    collective's middle, because the next one may begin at the moment in which the wait ends."""
    keys = [*_HERE, "unit"]
    middle = (pl.col("start") + pl.col("end")) / 2
    began = comm.filter(pl.col("unit").is_not_null()).select(*keys, middle.alias("end"), on="row").sort("end")
    ends = waits.filter(pl.col("unit").is_not_null()).sort("end")
    found = ends.join_asof(began, on="end", by=keys, check_sortedness=False)
    return _pairs(found.filter(pl.col("on").is_not_null()))


def _pairs(found: pl.DataFrame) -> pl.DataFrame:
    return found.select(pl.col("row").alias("wait"), pl.col("on").cast(pl.UInt32))
