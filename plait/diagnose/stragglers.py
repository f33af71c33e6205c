"""Verdicts: which rank, host or link is slow, since when, and how one can tell.

A rank is judged by its own work against the ranks of its stage, never by when it arrives: whoever waits for a
slow stage of its own pipeline is late at the gradients' reduction as well. Arrivals are the check on it: the
last to come is followed back along its pipeline to the rank whose own work explains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import polars as pl

from plait.diagnose.noise import SIGMA
from plait.diagnose.outliers import FEWEST, LEAST, MINIMUM, RECURS, Outlier, UnitSpread, outliers
from plait.diagnose.peers import (
    Lateness,
    PeerComparison,
    crowded,
    hosts_known,
    lateness,
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
Measure = Literal["processor time", "time in undisturbed ops", "own work", "transfers"]
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
ALIKE = 2.0
"""Times by which the effects of a host's ranks may differ for one cause of all."""
LATEST = 10
"""Ranks whose lateness is listed, at most."""
PAIR = 2
"""Ranks of which none tells how far apart healthy ones are. Where they share processors with other work, one
may be the slower for it (caches, threads of one core) in processor time, too: 20 to 40 % for twenty steps."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """ranks: whom it is about; of a link, those at its ends. hosts: as far as they are known. since, until:
    steps. by: what was held against its equals'. effect: share by which that is longer; seconds: likewise, of
    a step. z, recurs: how clear it is, and in which share of steps. computing: share of ``seconds`` that is
    computation. where: coordinates or groups, in words. parts: the ranks of a host, one by one."""

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
    by: Measure = "own work"
    parts: tuple[Straggler, ...] = ()


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
    """spread: how far the rest are apart by ``nearest_by``, so that a reader sees what the threshold was set
    against. comparable: ranks that had anybody to be compared with. lateness: of the latest of these; of a
    named one as its verdict has it."""

    stragglers: tuple[Straggler, ...]
    spread: UnitSpread
    comparable: int
    arrivals: tuple[Arrival, ...]
    lateness: tuple[Lateness, ...] = ()
    nearest_by: Measure = "own work"


class _Look(NamedTuple):
    """What ranks are held against each other by. least: effect from which on one is named."""

    measure: Measure
    work: PeerComparison
    least: float


def verdicts(recording: Recording) -> Verdicts:
    """All that can be said of a recording."""
    work = own_work(recording)
    ranks: dict[tuple[int, ...], Straggler] = {}
    nearest: list[tuple[UnitSpread, _Look]] = []
    for look in _looks(recording, work):
        found, spread = outliers(look.work.deviation, minimum=look.least, twins=look.work.twins(recording.grid))
        for one in (_rank(recording, look, each) for each in found):
            if one.ranks not in ranks or one.z >= ranks[one.ranks].z:  # of several, the clearest
                ranks[one.ranks] = one
        nearest.append((spread, look))
    slow = _of_hosts(list(ranks.values()), recording.grid)
    links = _links(recording, {rank for one in slow for rank in one.ranks})
    named = {rank for one in slow for rank in one.ranks}
    rest = [one for one in nearest if one[0].unit >= 0 and one[1].work.units[one[0].unit] not in named]
    spread, look = max(rest, key=lambda one: one[0].z - one[0].named_from, default=(None, None))
    return Verdicts(
        stragglers=(*slow, *links),
        spread=replace(spread, unit=int(look.work.units[spread.unit]))
        if spread and look else UnitSpread(effect=0.0, z=0.0, unit=-1),
        nearest_by=look.measure if look else "own work",
        comparable=int(np.isfinite(work.deviation).any(axis=1).sum()),
        arrivals=_arrivals(recording, work),
        lateness=_latest(work, slow),
    )  # fmt: skip


def _looks(recording: Recording, work: PeerComparison) -> Iterator[_Look]:
    """The measures."""
    minimum = MINIMUM if len(work.units) >= FEW else MINIMUM_OF_FEW
    by_the_clock = MINIMUM_OF_CROWDED if crowded(recording) else minimum
    if len(work.units) <= PAIR:
        minimum = by_the_clock
    yield _Look("processor time", processor_work(recording), minimum)
    yield _Look("time in undisturbed ops", typical_work(recording), minimum)
    yield _Look("own work", work, by_the_clock)


def _latest(work: PeerComparison, slow: Sequence[Straggler]) -> tuple[Lateness, ...]:
    named = {rank: Lateness(rank, one.effect, one.seconds, one.since) for one in slow for rank in one.ranks}
    every = [named.get(one.rank, one) for one in lateness(work)]
    return tuple(sorted(every, key=lambda one: (one.rank not in named, -one.share))[:LATEST])


def _rank(recording: Recording, look: _Look, one: Outlier) -> Straggler:
    work = look.work
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
        by=look.measure,
    )


def where(recording: Recording, rank: int) -> str:
    """``stage 0, dp 1``: the coordinates on which ranks differ."""
    at = recording.grid.row(by_predicate=pl.col("rank") == rank, named=True)
    names = {"pp": "stage", "dp": "dp", "cp": "cp", "tp": "tp"}
    return ", ".join(f"{word} {at[axis]}" for axis, word in names.items() if recording.grid[axis].n_unique() > 1)


def _of_hosts(found: list[Straggler], grid: pl.DataFrame) -> list[Straggler]:
    """Slow ranks that are all of one host, at once and for one cause, are one slow host."""
    merged = list(found)
    for host in sorted({one.hosts[0] for one in found if one.hosts}):
        own = [one for one in found if one.hosts == (host,)]
        if _is_of_host(host, own, grid):
            merged = [one for one in merged if one not in own]
            merged.append(
                Straggler(
                    what="slow host", ranks=tuple(sorted(rank for one in own for rank in one.ranks)), hosts=(host,),
                    since=min(one.since for one in own), until=max(one.until for one in own),
                    effect=float(np.median([one.effect for one in own])), seconds=max(one.seconds for one in own),
                    z=min(one.z for one in own), recurs=min(one.recurs for one in own),
                    computing=float(np.median([one.computing for one in own])),
                    where=f"all {len(own)} ranks of {host}", by=own[0].by, parts=tuple(own),
                )
            )  # fmt: skip
    return sorted(merged, key=lambda one: -one.seconds)


def _is_of_host(host: str, own: Sequence[Straggler], grid: pl.DataFrame) -> bool:
    """True where all ranks of a host are slow in the same way, by about as much, in the same steps, and each
    has equals elsewhere that are not."""
    ranks = grid.filter(pl.col("host") == host)
    if len(own) < 2 or len(own) < ranks.height or len({one.what for one in own}) > 1:
        return False
    effects = [one.effect for one in own]
    together = max(one.since for one in own) <= min(one.until for one in own)
    elsewhere = grid.filter((pl.col("host") != host).fill_null(value=True)).select("pp", "cp").unique()
    return (
        together and max(effects) <= ALIKE * min(effects)
        and ranks.join(elsewhere, on=["pp", "cp"], how="anti").is_empty()
    )  # fmt: skip


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
            where=place or " and ".join(unit for _, _, unit in kept[:3]), by="transfers",
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
            effect, error = float(np.median(steps)), error_of_median(steps)
            often = float((steps >= np.log1p(OTHERS) / 2).mean())
            if effect >= np.log1p(OTHERS) and often >= RECURS and effect >= CLEAR * error:
                slow.append(host)
    return slow[0] if len(slow) == 1 else None


def error_of_median(values: Floats) -> float:
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
