"""Find the slow ranks, hosts and links, since when, and the evidence.

A rank is judged by its own work against the ranks of its stage, never by its arrival: a rank that
waits for a slow stage of its pipeline is also late at the gradients' reduction. Arrivals are a
check: the last rank to arrive is traced along its pipeline to the rank whose own work explains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import polars as pl

from plait.diagnose.measured.recording import Recording, coordinates
from plait.diagnose.verdicts.outliers import FEWEST, LEAST, MINIMUM, RECURS, SIGMA, Outlier, PeerSpread, outliers
from plait.diagnose.verdicts.peers import (
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

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

What = Literal["slow processor", "slow host", "slow link"]
Measure = Literal["processor time", "time in undisturbed ops", "own work", "transfers"]
LINK = 0.5
"""Least relative excess of a slow link's transfers: bandwidth is shared, and varies more than
computation."""
END_EXCESS, CLEAR = 0.25, 3.0
"""Least relative excess of a host's transfers with other hosts, and its least number of standard
errors, to name the host and not the path. One of two hosts is chosen, not one of thousands."""
FEW = 8
"""Least number of ranks whose spread is informative; with fewer ranks the least effect is
larger."""
MINIMUM_OF_FEW = 0.05
MINIMUM_OF_CROWDED = 0.25
"""Least effect if ranks share processors: their wall-clock times depend on the scheduling."""
ALIKE = 2.0
"""Largest ratio between the effects of a host's ranks for one common cause."""
LATEST = 10
"""The largest number of ranks whose lateness is listed."""
PAIR = 2
"""Number of ranks (2) from which no spread of healthy ranks follows. If they share processors with
other work, one may be slower for it (caches, threads of one core) in processor time, too: 20 to 40
% for twenty steps."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A slow rank, host or link. ranks: the slow ranks; of a link, those at its ends. hosts: as far
    as known. since, until: steps. by: the compared measure. effect: its relative excess; seconds:
    its excess per step. z: significance; recurs: share of steps with the excess. computing: share
    of ``seconds`` that is computation. where: coordinates or groups, as text. parts: the single
    ranks of a host."""

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
    """The rank that most often arrives last at an axis' meetings. lateness: mean seconds behind the
    group's first rank. share: of meetings in which the rank is last. behind: the rank whose own
    work explains it, perhaps itself; None if there is none."""

    axis: str
    what: str
    rank: int
    lateness: float
    share: float
    behind: int | None


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """All verdicts on a recording. spread: of the unnamed ranks by ``nearest_by``, to compare with
    the threshold. comparable: number of ranks with peers. lateness: of the latest of these ranks;
    for a named rank as in its verdict."""

    stragglers: tuple[Straggler, ...]
    spread: PeerSpread
    comparable: int
    arrivals: tuple[Arrival, ...]
    lateness: tuple[Lateness, ...] = ()
    nearest_by: Measure = "own work"


class _Look(NamedTuple):
    """A comparison of ranks by one measure. work: the comparison. least: least effect for naming a
    rank, as a fraction."""

    measure: Measure
    work: PeerComparison
    least: float


def verdicts(recording: Recording) -> Verdicts:
    """Return all verdicts on a recording."""
    work = own_work(recording)
    ranks: dict[tuple[int, ...], Straggler] = {}
    nearest: list[tuple[PeerSpread, _Look]] = []
    for look in _looks(recording, work):
        found, spread = outliers(look.work.deviation, minimum=look.least, pair_ids=look.work.pair_ids(recording.grid))
        for one in (_rank(recording, look, each) for each in found):
            if (
                one.ranks not in ranks or one.z >= ranks[one.ranks].z
            ):  # of several verdicts on a rank, the most significant
                ranks[one.ranks] = one
        nearest.append((spread, look))
    slow = _of_hosts(list(ranks.values()), recording.grid)
    links = _links(recording, {rank for one in slow for rank in one.ranks})
    named = {rank for one in slow for rank in one.ranks}
    rest = [one for one in nearest if one[0].peer >= 0 and one[1].work.peers[one[0].peer] not in named]
    spread, look = max(rest, key=lambda one: one[0].z - one[0].named_from, default=(None, None))
    return Verdicts(
        stragglers=(*slow, *links),
        spread=replace(spread, peer=int(look.work.peers[spread.peer]))
        if spread and look else PeerSpread(effect=0.0, z=0.0, peer=-1),
        nearest_by=look.measure if look else "own work",
        comparable=int(np.isfinite(work.deviation).any(axis=1).sum()),
        arrivals=_arrivals(recording, work),
        lateness=_latest(work, slow),
    )  # fmt: skip


def _looks(recording: Recording, work: PeerComparison) -> Iterator[_Look]:
    """Yield the comparisons of ranks by which stragglers are named: own work, typical work or
    processor time."""
    minimum = MINIMUM if len(work.peers) >= FEW else MINIMUM_OF_FEW
    by_the_clock = MINIMUM_OF_CROWDED if crowded(recording) else minimum
    if len(work.peers) <= PAIR:
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
    rank = int(work.peers[one.peer])
    window = slice(one.first, one.last + 1)
    excess = float(np.nanmedian(work.excess[one.peer, window]))
    computing = float(np.nanmedian(work.computing[one.peer, window])) / excess if excess > 0 else 1.0
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
        where=coordinates(recording.grid, rank),
        by=look.measure,
    )


def _of_hosts(found: list[Straggler], grid: pl.DataFrame) -> list[Straggler]:
    """Return the stragglers, with a host in place of its ranks if all of them are slow at once and
    for one cause."""
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
    """True if all ranks of a host are slow in the same way and steps and by about as much, and each
    has healthy peers elsewhere."""
    ranks = grid.filter(host=host)
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
    """Return slow links: groups of ranks with slow transfers, merged to what they have in common;
    empty if they cost little. slow: ranks that are slow by themselves."""
    moved = transfers(recording)
    found, _ = outliers(moved.deviation, minimum=LINK, lower_half=hosts_known(recording))
    step = float(np.median(list(recording.seconds.values()))) if recording.seconds else 0.0
    members = {peer: frozenset(ranks) for peer, ranks in members_of(recording).group_by("peer").agg("rank").iter_rows()}
    kept = [
        (one, float(np.nanmedian(moved.excess[one.peer, one.first : one.last + 1])), str(moved.peers[one.peer]))
        for one in found
        if not members[str(moved.peers[one.peer])] & slow  # a slow processor also transfers slowly
    ]
    if not kept or max(seconds for _, seconds, _ in kept) < MINIMUM * step:
        return []
    clearest, seconds, _ = max(kept, key=lambda each: each[1])
    ranks, place, hosts = _shared([peer for _, _, peer in kept], members, recording.grid)
    if len(hosts) == 2 and place and (host := _end(moved, members, recording.grid, hosts, clearest)):
        other = next(name for name in hosts if name != host)
        ranks = tuple(sorted(recording.grid.filter(host=host)["rank"].to_list()))
        hosts, place = (host,), f"links of {host}, clearest to {other}"
    return [
        Straggler(
            what="slow link", ranks=ranks, hosts=hosts, since=min(moved.steps[one.first] for one, _, _ in kept),
            until=max(moved.steps[one.last] for one, _, _ in kept), effect=clearest.effect, seconds=seconds,
            z=clearest.z, recurs=clearest.recurs, computing=0.0,
            where=place or " and ".join(peer for _, _, peer in kept[:3]), by="transfers",
        )
    ]  # fmt: skip


def _shared(
    slow: Sequence[str], members: dict[str, frozenset[int]], grid: pl.DataFrame
) -> tuple[tuple[int, ...], str, tuple[str, ...]]:
    """Return what slow groups have in common: a host, or the path between two hosts; otherwise all
    their ranks."""
    ranks = [members[peer] for peer in slow]
    of = {rank: host for rank, host in grid.select("rank", "host").iter_rows() if host}
    if of and all(rank in of for some in ranks for rank in some):
        axes = {peer.split()[0] for peer in slow}
        leaving = [{of[one] for one in some if one in of} for peer, some in members.items() if peer.split()[0] in axes]
        leaving = [hosts for hosts in leaving if len(hosts) > 1]
        common = sorted(set[str].intersection(*({of[rank] for rank in some} for some in ranks)))
        own = {host: [hosts for hosts in leaving if host in hosts] for host in common}
        # With one partner only, the partner may be the slow end.
        whole = [host for host in common if len(own[host]) == len(slow) and len(set[str].union(*own[host])) > 2]
        named = whole if len(whole) == 1 else common
        if 0 < len(named) <= 2:
            place = f"every link of {named[0]}" if whole == named else f"{len(slow)} links of {named[0]}"
            place = place if len(named) == 1 else f"between {' and '.join(named)}"
            return tuple(sorted(rank for rank, host in of.items() if host in named)), place, tuple(named)
    both = frozenset[int].intersection(*ranks) or frozenset[int].union(*ranks)
    return tuple(sorted(both)), "", tuple(sorted({of[rank] for rank in both if rank in of}))


def _end(
    moved: PeerComparison, members: dict[str, frozenset[int]], grid: pl.DataFrame, hosts: tuple[str, ...], one: Outlier
) -> str | None:
    """Return the one of two hosts with slow transfers whose transfers with other hosts are slow as
    well; None if neither or both are: then the path between them may be slow."""
    of = dict(grid.select("rank", "host").iter_rows())
    logs = np.log1p(np.maximum(moved.deviation[:, one.first : one.last + 1], LEAST))
    slow: list[str] = []
    for host in hosts:
        others = [
            row for row, peer in enumerate(moved.peers)
            if len(at := {of[rank] for rank in members[str(peer)]}) == 2 and at & set(hosts) == {host}
        ]  # fmt: skip
        known = logs[others][:, np.isfinite(logs[others]).any(axis=0)]
        if others and known.shape[1] >= FEWEST:
            steps = np.nanmedian(known, axis=0)
            effect, error = float(np.median(steps)), error_of_median(steps)
            often = float((steps >= np.log1p(END_EXCESS) / 2).mean())
            if effect >= np.log1p(END_EXCESS) and often >= RECURS and effect >= CLEAR * error:
                slow.append(host)
    return slow[0] if len(slow) == 1 else None


def error_of_median(values: Floats) -> float:
    """Return the standard error of the median of ``values``, from their median absolute deviation,
    for a normal distribution."""
    spread = SIGMA * float(np.median(np.abs(values - np.median(values))))
    return 1.2533 * spread / len(values) ** 0.5


# ---- arrivals ----


def _arrivals(recording: Recording, work: PeerComparison) -> tuple[Arrival, ...]:
    """Return, for each axis, the rank that arrives last at its collectives, and the rank that it
    waited for itself."""
    met = recording.met.filter(pl.col("members") > 1, pl.col("axis") != "pp")
    if met.is_empty():
        return ()
    excess = {int(rank): float(np.nanmedian(own)) for rank, own in zip(work.peers, work.excess, strict=True)}
    keys = ["axis", "site", "direction"]
    late = met.group_by(*keys, "last").agg(pl.first("members"), late=pl.sum("lateness"), n=pl.len())
    late = late.with_columns(share=pl.col("n") / pl.sum("n").over(keys), total=pl.sum("late").over(keys))
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
    """Return the rank, along the pipeline of ``rank``, whose own work is furthest above its peers';
    None if none is above."""
    at = recording.grid.row(by_predicate=pl.col("rank") == rank, named=True)
    same = recording.grid.filter(dp=at["dp"], cp=at["cp"])
    candidates = {other: excess.get(other, 0.0) for other in same["rank"].to_list()}
    worst = max(candidates, key=lambda other: candidates[other], default=rank)
    return worst if candidates.get(worst, 0.0) > 0 else None
