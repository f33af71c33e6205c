"""Format verdicts on slow ranks, links and networks as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from plait.core.base.text import Part, seconds_text
from plait.diagnose.measured.shares import StepTimes
from plait.diagnose.verdicts.bottlenecks import Late, SlowNetwork
from plait.diagnose.verdicts.outliers import FEWEST
from plait.diagnose.verdicts.stragglers import Straggler
from plait.diagnose.verdicts.what_if import WhatIf

if TYPE_CHECKING:
    from plait.diagnose.report import Report

WORTH = 0.001
"""Least share of a step for a reported part or gain."""


def verdict_words(report: Report) -> Iterator[Part]:
    """Yield sentences on stragglers and their cost, a slow network, and the last ranks to arrive;
    or that no rank is slow."""
    yield ""
    if report.network:
        yield _network(report.network)
    elif not report.stragglers:
        yield _nobody(report)
    if report.late:
        yield _late(report.late)
    for one, cost in zip(report.stragglers, report.costs, strict=True):
        yield _sentence(one, report.steps)
        if cost is not None and report.what_if:
            yield _gain(cost, report.what_if, one.ranks)
        elif cost is None and report.what_if and one.what != "slow link":
            yield ("  What that costs is not known: the traces do not tell which messages belong together.")
    for one in report.verdicts.arrivals:
        named = {rank for straggler in report.stragglers for rank in straggler.ranks}
        if one.behind in named and one.rank != one.behind:
            yield (
                f"  The last to come to {one.axis} ({one.what}) is most often rank {one.rank}, "
                f"{seconds_text(one.lateness)} after the first (mean of those times); it waits "
                f"for rank {one.behind}, which is in its pipeline."
            )
    what_if = report.what_if
    if what_if and what_if.slowdown >= 1.05:
        shares = [  # 3 % of few workers round to none
            f"{who} cost {min(share, 1):.0%} of what is lost"
            for share, who in ((what_if.m_w, _worst(what_if)), (what_if.m_s, "the last stage's ranks"))
            if share is not None and share >= 0.2
        ]
        more = f"; {', '.join(shares)}" if shares else ""
        yield (
            f"Replayed, a step of all ranks takes {seconds_text(what_if.replayed)} (the "
            f"mean of the last {what_if.steps:,}), {what_if.slowdown:.2f} times what it "
            f"would with all ranks equal ({seconds_text(what_if.ideal)}){more}."
        )


def _gain(cost: float, found: WhatIf, ranks: Sequence[int]) -> str:
    what, step = "it" if len(ranks) == 1 else "they", found.replayed
    if cost < WORTH * step:
        return f"  If {what} were as fast as the others, a step would take as long: other ranks are waited for longer."
    share = f" ({cost / step:.0%} of it)" if step > 0 else ""
    return (
        f"  If {what} were as fast as the others, a step would be {seconds_text(cost)} "
        f"shorter{share}, replayed (the mean of the last {found.steps:,})."
    )


def _worst(found: WhatIf) -> str:
    every = len(found.worst)
    return f"the worst {found.few} of {every} workers" if found.few > 1 else f"the worst of {every} workers"


def _nobody(report: Report) -> str:
    spread, comparable = report.verdicts.spread, report.verdicts.comparable
    if comparable < 2:
        why = (
            "there are too few steps"
            if not report.steps or report.steps.count < FEWEST
            else "no rank has peers (ranks of its stage with the same part of sequences)"
        )
        return f"No straggler can be identified: {why}."
    lasting = ", if in most steps and for longer" if spread.z >= spread.named_from else ""
    latest = report.verdicts.lateness[:1]
    slowest = [
        f" The latest of {comparable} comparable ranks is rank {one.rank}: "
        f"{one.share:+.1%} own work against its "
        f"peers, {seconds_text(one.seconds, signed=True)} of a step (medians of all "
        "steps but the first)."
        for one in latest
    ]
    if spread.peer >= 0:
        slowest.append(
            f" Nearest to being named, by {report.verdicts.nearest_by}, is rank "
            f"{spread.peer}: z {spread.z:.1f}, from {spread.named_from:.1f} on{lasting}."
        )
    return f"No straggler.{''.join(slowest)}"


def _network(one: SlowNetwork) -> str:
    hosts = ", ".join(one.hosts[:4]) + (f" and {len(one.hosts) - 4} more" if len(one.hosts) > 4 else "")
    usual = "the links give that were planned" if one.against == "plan" else "they take in the other steps"
    return (
        f"SLOW NETWORK: {one.axis} transfers between {hosts}, steps {one.since + 1} to "
        f"{one.until + 1}: {one.times:.1f} times what {usual}, "
        f"{seconds_text(one.seconds)} of a step and not {seconds_text(one.usual)} "
        "(medians, of the fastest group). All share it: no host can be singled out."
    )


def _late(one: Late) -> str:
    if not one.in_steps:
        why = "dumps do not show why"
    elif one.computing >= 0.5 * one.seconds:
        why = f"it computes {seconds_text(one.computing)} longer (by the medians of all steps)"
    else:
        why = "it computes no longer than they do: its host is late (loading of data, launches, other processes)"
    often, each = ("steps", "a step") if one.in_steps else ("its collectives", "each")
    return (
        f"LATE: rank {one.rank} is the last to come to {one.axis} collectives in "
        f"{one.recurs:.0%} of {often}, {seconds_text(one.seconds)} of {each} behind "
        f"the others (median of these); {why}."
    )


def _sentence(one: Straggler, steps: StepTimes | None) -> str:
    ranks = f"rank {one.ranks[0]}" if len(one.ranks) == 1 else f"ranks {', '.join(map(str, one.ranks[:8]))}"
    more = f" and {len(one.ranks) - 8} more" if len(one.ranks) > 8 else ""
    on = f" on {' and '.join(one.hosts)}" if one.hosts else ""
    place = f" ({one.where})" if one.where else ""
    since = f"since step {one.since + 1}"
    if steps and one.until < steps.last:
        since = f"steps {one.since + 1} to {one.until + 1}"
    several = len(one.ranks) > 1
    if one.what == "slow link":
        return (
            f"SLOW LINK at {ranks}{more}{on}{place}, {since}: transfers take "
            f"{1 + one.effect:.1f} times what others' of the same bytes do once all have "
            f"come (trimmed mean), {seconds_text(one.seconds)} of a step (median), both of "
            f"the slowest group, in {one.recurs:.0%} of steps (z {one.z:.0f})."
        )
    kind = {"slow processor": "SLOW PROCESSOR", "slow host": "SLOW HOST"}[one.what]
    how = (
        f"{one.computing:.0%} of it in computation"
        if one.computing >= 0.5
        else f"{1 - one.computing:.0%} of it between ops: the host launches late"
    )
    return (
        f"{kind}: {ranks}{more}{on}{place}, {since}: {one.effect:.0%} more {one.by} "
        f"than its peers (trimmed mean{', the median rank' * several}), "
        f"{seconds_text(one.seconds)} of a step "
        f"(median{', the slowest rank' * several}), {how}, in {one.recurs:.0%} of "
        f"steps (z {one.z:.0f})."
    )
