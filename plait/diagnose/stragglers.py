"""Verdicts: which rank, host or link is slow, since when, and how one can tell.

A rank is judged by its own work against the ranks of its stage, never by when it arrives: whoever waits for a
slow stage of its own pipeline is late at the gradients' reduction as well. Arrivals are the check on it: the
last to come is followed back along its pipeline to the rank whose own work explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl

from plait.diagnose.noise import SIGMA
from plait.diagnose.outliers import FEWEST, LEAST, MINIMUM, RECURS, Outlier, UnitSpread, outliers
from plait.diagnose.peers import (
    PeerComparison,
    crowded,
    hosts_known,
    members_of,
    own_work,
    processor_work,
    transfers,
    typical_work,
)
from plait.diagnose.recording import Recording

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

What = Literal["slow processor", "slow host", "slow link"]
LINK = 0.5
"""By how much more a transfer must take: bandwidth is shared, and varies more than computation."""
OTHERS, CLEAR = 0.25, 3.0
"""By how much more an end's transfers with others must take, and how many standard errors that must be, for
the end to be named and not the path: one of two is to be told from the other, not one of thousands."""
FEW = 8
"""Ranks below which their spread says little, and more is asked for."""
MINIMUM_OF_FEW = 0.05
MINIMUM_OF_CROWDED = 0.25
"""Where ranks share processors: what they do by the clock differs by how these are dealt out."""
PAIR = 2
"""Ranks of which none tells how far apart healthy ones are. Where they share processors with other work, one
may be the slower for it (caches, threads of one core) in processor time, too: 20 to 40 % for twenty steps."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """ranks: whom it is about; of a link, those at its ends. hosts: as far as they are known. since, until:
    steps. effect: share by which it takes longer than its peers. seconds: of a step, by which its own work
    or its transfers are longer. z, recurs: how clear it is, and in which share of steps. computing: share of
    ``seconds`` that is computation. where: coordinates or groups, in words."""

    what: What
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    since: int
    until: int
    effect: float
    seconds: float
    z: float
    recurs: float
    computing: float
    where: str


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """Who comes last to an axis' meetings most often. lateness: mean seconds behind the first of its group.
    share: of meetings in which it is the last, over what chance would give. behind: the rank whose own work
    explains it, itself if it is, None if nobody's does."""

    axis: str
    what: str
    rank: int
    lateness: float
    share: float
    behind: int | None


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """healthiest: how far the rest are apart, so that a reader sees what the threshold was set against.
    comparable: ranks that had anybody to be compared with."""

    stragglers: tuple[Straggler, ...]
    spread: UnitSpread
    comparable: int
    arrivals: tuple[Arrival, ...]


def verdicts(recording: Recording) -> Verdicts:
    """All that can be said of a recording."""
    work = own_work(recording)
    minimum = MINIMUM if len(work.units) >= FEW else MINIMUM_OF_FEW
    ranks: dict[tuple[int, ...], Straggler] = {}
    nearest: list[tuple[UnitSpread, PeerComparison]] = []
    by_the_clock = MINIMUM_OF_CROWDED if crowded(recording) else minimum
    if len(work.units) <= PAIR:
        minimum = by_the_clock
    looks = (processor_work(recording), minimum), (typical_work(recording), minimum), (work, by_the_clock)
    for of, least in looks:  # of one that several name, the last
        found, spread = outliers(of.deviation, minimum=least, twins=of.twins(recording.grid))
        ranks |= {one.ranks: one for one in [_rank(recording, of, one) for one in found]}
        nearest.append((spread, of))
    slow = _of_hosts(list(ranks.values()), recording.grid)
    links = _links(recording, {rank for one in slow for rank in one.ranks})
    named = {rank for one in slow for rank in one.ranks}
    rest = [
        replace(one, unit=int(of.units[one.unit]))
        for one, of in nearest
        if one.unit >= 0 and of.units[one.unit] not in named
    ]
    return Verdicts(
        stragglers=(*slow, *links),
        spread=max(rest, key=lambda one: one.z - one.named_from, default=UnitSpread(effect=0.0, z=0.0, unit=-1)),
        comparable=int(np.isfinite(work.deviation).any(axis=1).sum()),
        arrivals=_arrivals(recording, work),
    )


def _rank(recording: Recording, work: PeerComparison, one: Outlier) -> Straggler:
    rank = int(work.units[one.unit])
    window = slice(one.first, one.last + 1)
    excess = float(np.nanmedian(work.excess[one.unit, window]))
    computing = float(np.nanmedian(work.computing[one.unit, window])) / excess if excess > 0 else 1.0
    at = recording.grid.row(by_predicate=pl.col("rank") == rank, named=True)
    return Straggler(
        what="slow processor" if computing >= 0.5 else "slow host",
        ranks=(rank,),
        hosts=(at["host"],) if at["host"] else (),
        since=work.steps[one.first],
        until=work.steps[one.last],
        effect=one.effect,
        seconds=excess,
        z=one.z,
        recurs=one.recurs,
        computing=min(1.0, max(0.0, computing)),
        where=where(recording, rank),
    )


def where(recording: Recording, rank: int) -> str:
    """``stage 0, dp 1``: the coordinates on which ranks differ."""
    at = recording.grid.row(by_predicate=pl.col("rank") == rank, named=True)
    names = {"pp": "stage", "dp": "dp", "cp": "cp", "tp": "tp"}
    return ", ".join(f"{word} {at[axis]}" for axis, word in names.items() if recording.grid[axis].n_unique() > 1)


def _of_hosts(found: list[Straggler], grid: pl.DataFrame) -> list[Straggler]:
    """Several slow ranks that are all of one host are one slow host."""
    sizes = dict(grid.drop_nulls("host").group_by("host").len().iter_rows())
    whole = {
        host for host, size in sizes.items() if size > 1 and sum(one.hosts == (host,) for one in found) == size
    }  # fmt: skip
    merged: list[Straggler] = [one for one in found if not set(one.hosts) & whole]
    for host in sorted(whole):
        own = [one for one in found if one.hosts == (host,)]
        merged.append(
            Straggler(
                what="slow host", ranks=tuple(sorted(rank for one in own for rank in one.ranks)), hosts=(host,),
                since=min(one.since for one in own), until=max(one.until for one in own),
                effect=float(np.median([one.effect for one in own])), seconds=max(one.seconds for one in own),
                z=min(one.z for one in own), recurs=min(one.recurs for one in own),
                computing=float(np.median([one.computing for one in own])), where=f"all {len(own)} ranks of {host}",
            )
        )  # fmt: skip
    return sorted(merged, key=lambda one: -one.seconds)


# ---- links ----


def _links(recording: Recording, slow: set[int]) -> list[Straggler]:
    """Groups whose transfers take long, put together to what they share; nobody where they cost little."""
    moved = transfers(recording)
    found, _ = outliers(moved.deviation, minimum=LINK, lower=hosts_known(recording))
    step = float(np.median(list(recording.seconds.values()))) if recording.seconds else 0.0
    members = {unit: frozenset(ranks) for unit, ranks in members_of(recording).group_by("unit").agg("rank").iter_rows()}
    kept = [
        (one, float(np.nanmedian(moved.excess[one.unit, one.first : one.last + 1])), str(moved.units[one.unit]))
        for one in found
        if not members[str(moved.units[one.unit])] & slow  # a slow processor moves its bytes slowly, too
    ]
    if not kept or max(seconds for _, seconds, _ in kept) < MINIMUM * step:
        return []
    clearest, seconds, _ = max(kept, key=lambda each: each[1])
    ranks, place, hosts = _shared([unit for _, _, unit in kept], members, recording.grid)
    if len(hosts) == 2 and place and (host := _end(moved, members, recording.grid, hosts, clearest)):
        other = next(name for name in hosts if name != host)
        ranks = tuple(sorted(recording.grid.filter(pl.col("host") == host)["rank"].to_list()))
        hosts, place = (host,), f"links of {host}, clearest to {other}"
    return [
        Straggler(
            what="slow link", ranks=ranks, hosts=hosts, since=min(moved.steps[one.first] for one, _, _ in kept),
            until=max(moved.steps[one.last] for one, _, _ in kept), effect=clearest.effect, seconds=seconds,
            z=clearest.z, recurs=clearest.recurs, computing=0.0,
            where=place or " and ".join(unit for _, _, unit in kept[:3]),
        )
    ]  # fmt: skip


def _shared(
    slow: Sequence[str], members: dict[str, frozenset[int]], grid: pl.DataFrame
) -> tuple[tuple[int, ...], str, tuple[str, ...]]:
    """Whom slow groups have in common: a host, the path between two; else all their ranks."""
    ranks = [members[unit] for unit in slow]
    of = {rank: host for rank, host in grid.select("rank", "host").iter_rows() if host}
    if of and all(rank in of for some in ranks for rank in some):
        axes = {unit.split()[0] for unit in slow}
        leaving = [{of[one] for one in some if one in of} for unit, some in members.items() if unit.split()[0] in axes]
        leaving = [hosts for hosts in leaving if len(hosts) > 1]
        common = sorted(set.intersection(*({of[rank] for rank in some} for some in ranks)))
        own = {host: [hosts for hosts in leaving if host in hosts] for host in common}
        # With one partner only, it may as well be the partner's.
        whole = [host for host in common if len(own[host]) == len(slow) and len(set.union(*own[host])) > 2]
        named = whole if len(whole) == 1 else common
        if 0 < len(named) <= 2:
            place = f"every link of {named[0]}" if whole == named else f"{len(slow)} links of {named[0]}"
            place = place if len(named) == 1 else f"between {' and '.join(named)}"
            return tuple(sorted(rank for rank, host in of.items() if host in named)), place, tuple(named)
    both = frozenset.intersection(*ranks) or frozenset.union(*ranks)
    return tuple(sorted(both)), "", tuple(sorted({of[rank] for rank in both if rank in of}))


def _end(
    moved: PeerComparison, members: dict[str, frozenset[int]], grid: pl.DataFrame, hosts: tuple[str, ...], one: Outlier
) -> str | None:
    """Of two hosts between which transfers are slow, the one whose transfers with other hosts are slow as
    well; None where that is neither, or both: then it may be the path between them."""
    of = dict(grid.select("rank", "host").iter_rows())
    logs = np.log1p(np.maximum(moved.deviation[:, one.first : one.last + 1], LEAST))
    slow: list[str] = []
    for host in hosts:
        others = [
            row for row, unit in enumerate(moved.units)
            if len(at := {of[rank] for rank in members[str(unit)]}) == 2 and at & set(hosts) == {host}
        ]  # fmt: skip
        known = logs[others][:, np.isfinite(logs[others]).any(axis=0)]
        if others and known.shape[1] >= FEWEST:
            steps = np.nanmedian(known, axis=0)
            effect, error = float(np.median(steps)), _error_of_median(steps)
            often = float((steps >= np.log1p(OTHERS) / 2).mean())
            if effect >= np.log1p(OTHERS) and often >= RECURS and effect >= CLEAR * error:
                slow.append(host)
    return slow[0] if len(slow) == 1 else None


def _error_of_median(values: Floats) -> float:
    """Its standard error, by the median absolute deviation; for a normal distribution."""
    spread = SIGMA * float(np.median(np.abs(values - np.median(values))))
    return 1.2533 * spread / len(values) ** 0.5


# ---- arrivals ----


def _arrivals(recording: Recording, work: PeerComparison) -> tuple[Arrival, ...]:
    """Of each axis' collectives, who comes last, and whom it waited for itself."""
    met = recording.met.filter(pl.col("members") > 1, pl.col("axis") != "pp")
    if met.is_empty():
        return ()
    excess = {int(rank): float(np.nanmedian(own)) for rank, own in zip(work.units, work.excess, strict=True)}
    keys = ["axis", "site", "direction"]
    late = met.group_by(*keys, "last").agg(
        pl.col("lateness").sum().alias("late"), pl.len().alias("n"), pl.col("members").first()
    )
    late = late.with_columns(share=pl.col("n") / pl.col("n").sum().over(keys), total=pl.col("late").sum().over(keys))
    worst = late.sort("late", descending=True).group_by("axis", maintain_order=True).first()
    found: list[Arrival] = []
    for row in worst.iter_rows(named=True):
        rank = int(row["last"])
        found.append(
            Arrival(
                axis=row["axis"], what=f"{row['site']} {row['direction']}".strip(), rank=rank,
                lateness=row["late"] / row["n"], share=row["share"], behind=_behind(recording, rank, excess),
            )
        )  # fmt: skip
    return tuple(found)


def _behind(recording: Recording, rank: int, excess: dict[int, float]) -> int | None:
    """Along the pipeline of ``rank``, the rank with the most own work above its equals'."""
    at = recording.grid.row(by_predicate=pl.col("rank") == rank, named=True)
    same = recording.grid.filter(pl.col("dp") == at["dp"], pl.col("cp") == at["cp"])
    candidates = {other: excess.get(other, 0.0) for other in same["rank"].to_list()}
    worst = max(candidates, key=lambda other: candidates[other], default=rank)
    return worst if candidates.get(worst, 0.0) > 0 else None
