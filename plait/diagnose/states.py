"""The state of every rank on the tp x dp x pp grid: who waits for whom, who has ended, who is slow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import polars as pl

from plait.core.runs.evidence import Evidence, Verdict
from plait.diagnose.stragglers import Straggler
from plait.diagnose.waits import Waits

State = Literal["named", "crashed", "stopped", "silent", "slow", "works", "waits", "ended", "runs", "unknown"]
STATES: dict[State, str] = {
    "named": "the cause: named by the verdict",
    "crashed": "ended with an error or by a signal",
    "stopped": "its process is stopped",
    "silent": "does not answer",
    "slow": "a straggler",
    "works": "does something else than communicate",
    "waits": "waits for other ranks",
    "ended": "has ended, without an error of its own",
    "runs": "runs",
    "unknown": "nothing is known of it",
}
"""What is drawn, the most important first, and what each means."""
EDGES = 4000
"""Who waits for whom: so many lines are drawn at most."""


class Standing(NamedTuple):
    """Of a rank. doing: what it is at. error: what it said in the end. waits_for: ranks."""

    rank: int
    state: State
    host: str = ""
    doing: str = ""
    error: str = ""
    where: str = ""
    waits_for: tuple[int, ...] = ()


def standings(
    grid: pl.DataFrame,
    *,
    hang: tuple[Verdict, Sequence[Evidence]] | None = None,
    stragglers: Iterable[Straggler] = (),
    errors: Mapping[int, str] | None = None,
    live: bool = True,
) -> list[Standing]:
    """Of every rank of the grid, in order of their numbers. hang: the verdict and what it was made of.
    errors: what else ranks said in the end. live: whether the run goes on."""
    slow = {rank: one.what for one in stragglers for rank in one.ranks}
    said = errors or {}
    hosts = dict(grid.select("rank", "host").iter_rows())
    ranks = grid["rank"].sort().to_list()
    if hang is None:
        return [
            Standing(
                rank, "crashed" if rank in said else "slow" if rank in slow else "runs" if live else "ended",
                hosts[rank] or "",
                slow.get(rank, ""), said.get(rank, ""),
            )
            for rank in ranks
        ]  # fmt: skip
    verdict, evidence = hang
    known = {one.rank: one for one in evidence}
    waits = _waits(verdict, evidence, max(ranks, default=-1) + 1)
    found: list[Standing] = []
    for rank in ranks:
        one = known.get(rank, Evidence(rank=rank, recorded=False))
        state = "named" if verdict.certain and rank in verdict.ranks else _state(one)
        if state in ("runs", "waits") and rank in slow:
            state = "slow"
        found.append(
            Standing(
                rank, state, one.host or hosts[rank] or "", one.doing or _calling(one), one.error or said.get(rank, ""),
                one.stack[-1] if one.stack else "", waits.get(rank, ()),
            )
        )  # fmt: skip
    return found


def _state(one: Evidence) -> State:
    if one.state == "ended":
        return "ended" if one.status in (0, None) and not one.error else "crashed"
    if one.state == "stopped":
        return "stopped"
    if one.thread in ("waits", "works", "silent"):
        return one.thread
    return "runs" if one.state == "runs" else "unknown"


def _calling(one: Evidence) -> str:
    """The oldest call that it has begun and not ended."""
    return next((str(call) for call in one.calls if not call.over), "")


def _waits(verdict: Verdict, evidence: Sequence[Evidence], world: int) -> dict[int, tuple[int, ...]]:
    """For whom ranks wait: by their calls; where those tell nothing, by the verdict's chain."""
    found: dict[int, set[int]] = {}
    graph = Waits(evidence, world)
    for at, missing in graph.missing.items():
        for rank in graph.at[at]:
            found.setdefault(rank, set()).update(missing)
    for link in verdict.chain:
        for rank in link.ranks:
            if not found.get(rank):
                found[rank] = set(link.on)
    return {rank: tuple(sorted(on - {rank})) for rank, on in found.items() if on - {rank}}


def edges(found: Sequence[Standing], most: int = EDGES) -> list[tuple[int, int]]:
    """(who waits, for whom), towards the ranks that are waited for most."""
    pairs = [(one.rank, on) for one in found for on in one.waits_for]
    if len(pairs) <= most:
        return pairs
    waited: dict[int, int] = {}
    for _, on in pairs:
        waited[on] = waited.get(on, 0) + 1
    return sorted(pairs, key=lambda pair: (-waited[pair[1]], pair))[:most]
