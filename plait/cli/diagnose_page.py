"""What ``plait diagnose`` prints: one page of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.cli import terminal
from plait.core.base.text import counted, duration

if TYPE_CHECKING:
    from plait.diagnose.explain import Report
    from plait.diagnose.late import Late
    from plait.diagnose.progress import Goodput
    from plait.diagnose.shares import Drift
    from plait.diagnose.stragglers import Straggler
    from plait.diagnose.what_if import WhatIf

ROWS = 8
"""Of a table, at most."""
WORTH = 0.001
"""Share of a step from which on a row of it is shown."""


def show(report: Report) -> None:
    """All of it."""
    axes = ", ".join(f"{axis} {n}" for axis, n in report.axes.items())
    terminal.title(f"{report.name}: {counted(report.ranks, 'rank')}{f' ({axes})' if axes else ''}")
    _hang(report)
    _steps(report)
    _verdict(report)
    _shares(report)
    _not_equal(report)
    _predicted(report)
    _memory(report)
    _progress(report)
    for note in report.notes:
        terminal.text(f"note: {note}", indent="  ")


def _hang(report: Report) -> None:
    if report.hang:
        terminal.text(f"{report.hang.heading}. {report.hang.why}", indent="  ")
        for other in report.hang.also:
            terminal.text(f"Besides: {other.why}", indent="  ")
        terminal.text(f"plait diagnose {report.name} --hang says who waited for whom.", indent="  ")
        terminal.say("")


def _steps(report: Report) -> None:
    steps = report.steps
    if not steps:
        return
    speed = f", {steps.tokens_per_second:,.0f} tokens/s" if steps.tokens_per_second else ""
    terminal.text(
        f"{steps.count} steps ({steps.first + 1} to {steps.last + 1}), median {_time(steps.median)} (10 % under "
        f"{_time(steps.p10)}, 10 % over {_time(steps.p90)}), longest {_time(steps.longest)} at step "
        f"{steps.longest_at + 1}{speed}"
    )


# ---- who is slow ----


def _verdict(report: Report) -> None:
    terminal.say("")
    if not report.stragglers:
        _nobody(report)
    if report.late:
        terminal.text(_late(report.late), indent="  ")
    for one, cost in zip(report.stragglers, report.costs, strict=True):
        terminal.text(_sentence(one), indent="  ")
        if cost is not None and report.what_if:
            step = report.what_if.replayed
            share = f" ({cost / step:.0%} of it)" if step > 0 else ""
            what = "it" if len(one.ranks) == 1 else "they"
            terminal.text(f"  If {what} were as the others, a step would be {_time(max(0.0, cost))} shorter{share}.")
        elif cost is None and report.what_if and one.what != "slow link":
            terminal.text("  What that costs is not known: the traces do not tell which messages belong together.")
    for one in report.verdicts.arrivals:
        named = {rank for straggler in report.stragglers for rank in straggler.ranks}
        if one.behind in named and one.rank != one.behind:
            terminal.text(
                f"  The last to come to {one.axis} ({one.what}) is most often rank {one.rank}, {_time(one.lateness)} "
                f"after the first; it waits for rank {one.behind}, which is in its pipeline."
            )
    what_if = report.what_if
    if what_if and what_if.slowdown >= 1.05:
        shares = [  # 3 % of few workers are none
            f"{who} cost {share:.0%} of what is lost"
            for share, who in ((what_if.m_w, _worst(what_if)), (what_if.m_s, "the last stage's ranks"))
            if share is not None and share >= 0.2
        ]
        more = f"; {', '.join(shares)}" if shares else ""
        terminal.text(
            f"On average a step takes {what_if.slowdown:.2f} times what it would with all ranks equal "
            f"({_time(what_if.ideal)}){more}."
        )


def _worst(found: WhatIf) -> str:
    every = len(found.worst)
    return f"the worst {found.few} of {every} workers" if found.few > 1 else f"the worst of {every} workers"


def _nobody(report: Report) -> None:
    from plait.diagnose.outliers import FEWEST

    spread, comparable = report.verdicts.spread, report.verdicts.comparable
    if comparable < 2:
        why = (
            "there are too few steps"
            if not report.steps or report.steps.count < FEWEST
            else "every rank is alone with what it does (its stage and its part of sequences), with nobody to be "
            "compared with"
        )
        terminal.text(f"No straggler can be told: {why}.")
        return
    lasting = ", were it so in most steps and for longer" if spread.z >= spread.named_from else ""
    slowest = (
        f" The slowest of {comparable} comparable ranks is rank {spread.unit}: {spread.effect:+.1%} against its "
        f"equals, z {spread.z:.1f} (named from {spread.named_from:.1f} on{lasting})."
        if spread.unit >= 0
        else ""
    )
    terminal.text(f"No straggler.{slowest}")


def _late(one: Late) -> str:
    if not one.in_steps:
        why = "dumps do not tell why"
    elif one.computing >= 0.5 * one.seconds:
        why = f"it computes {_time(one.computing)} longer"
    else:
        why = "it computes no longer than they do: its host is late (loading of data, launches, other processes)"
    often, each = ("steps", "a step") if one.in_steps else ("its collectives", "each")
    return (
        f"LATE: rank {one.rank} is the last to come to {one.axis} collectives in {one.recurs:.0%} of {often}, "
        f"{_time(one.seconds)} of {each} behind the others; {why}."
    )


def _sentence(one: Straggler) -> str:
    ranks = f"rank {one.ranks[0]}" if len(one.ranks) == 1 else f"ranks {', '.join(map(str, one.ranks[:8]))}"
    more = f" and {len(one.ranks) - 8} more" if len(one.ranks) > 8 else ""
    on = f" on {' and '.join(one.hosts)}" if one.hosts else ""
    place = f" ({one.where})" if one.where else ""
    if one.what == "slow link":
        return (
            f"SLOW LINK at {ranks}{more}{on}{place}, since step {one.since + 1}: transfers take "
            f"{1 + one.effect:.1f} times what others' of the same bytes do once all have come, "
            f"{_time(one.seconds)} of a step, in {one.recurs:.0%} of steps (z {one.z:.0f})."
        )
    kind = {"slow processor": "SLOW PROCESSOR", "slow host": "SLOW HOST"}[one.what]
    how = (
        f"{one.computing:.0%} of it in computation"
        if one.computing >= 0.5
        else f"{1 - one.computing:.0%} of it between ops: the host launches late"
    )
    return (
        f"{kind}: {ranks}{more}{on}{place}, since step {one.since + 1}: {one.effect:.0%} more own work than its "
        f"equals, {_time(one.seconds)} of a step, {how}, in {one.recurs:.0%} of steps (z {one.z:.0f})."
    )


# ---- where steps go ----


def _shares(report: Report) -> None:
    from plait.diagnose.recording import AFTER
    from plait.diagnose.shares import NAMES

    rows = [
        (
            NAMES.get(one.what, one.what),
            _time(one.seconds),
            f"{'+' if one.what in AFTER else ''}{one.share:.1%}",
            "" if one.late is None else _time(one.late),
        )
        for one in report.shares
        if one.share >= WORTH
    ]
    if rows:
        terminal.say("")
        late = any(row[3] for row in rows)
        header = ("where a mean rank's step goes", "time", "share", "for the last to come")
        terminal.table(header if late else header[:3], [row if late else row[:3] for row in rows[: ROWS + 2]])
    drift = report.drift
    if drift:
        word = "longer" if drift.share > 0 else "shorter"
        terminal.text(
            f"Steps became {abs(drift.share):.0%} {word}: {_time(drift.first)} in the first quarter, "
            f"{_time(drift.last)} in the last{_grew(drift)}."
        )


def _grew(drift: Drift) -> str:
    """What changed most, and how much of the change it is."""
    from plait.diagnose.shares import NAMES

    if not drift.of > 0:
        return ""
    what = f"{NAMES.get(drift.grew, drift.grew)} ({drift.by * 1e3:+.1f} ms)"
    if drift.of > 1:
        return f"; {what} changed by more than that, other parts the other way"
    return f"; {drift.of:.0%} of that is {what}{', the largest part' if drift.of < 0.5 else ''}"


def _not_equal(report: Report) -> None:
    from plait.diagnose.imbalance import ALIKE, HEAVY, UNEVEN

    stages, batches = report.stages, report.batches
    if stages and stages.ratio >= HEAVY and not report.stragglers:
        terminal.text(
            f"Stage {stages.heaviest} computes {stages.ratio:.2f} times as long as the other stages' mean: no rank's "
            "fault; other bounds between stages would help."
        )
    if batches and batches.spread >= UNEVEN and batches.alike >= ALIKE and batches.turns >= 0.5:
        terminal.text(
            f"Micro-batches are uneven: their computation varies by {batches.spread:.0%}, forward and backward alike, "
            f"and a step's slowest rank, which computes {batches.longer:.0%} longer than its stage's mean, is "
            "another one in most steps. That is the data's fault, not a machine's."
        )


def _predicted(report: Report) -> None:
    found = report.prediction
    if not found:
        return
    from plait.diagnose.compare import MISSED

    terminal.say("")
    rows = [
        (
            row.kind,
            row.where or "-",
            row.direction or "-",
            _ms(row.predicted or 0.0),
            _ms(row.measured),
            _ratio(row.ratio),
        )
        for row in found.rows[:ROWS]
    ]
    terminal.table(("against the plan", "axis", "direction", "predicted ms", "measured ms", "ratio"), rows)
    step = report.steps.median if report.steps else 0.0
    for one in found.overlap:
        if one.missed >= MISSED * step:
            terminal.text(
                f"{one.axis}: {one.planned:.0%} of its communication was to be hidden, and {one.measured:.0%} was: "
                f"{_time(one.missed)} of a step that overlap was to save."
            )


def _memory(report: Report) -> None:
    if not report.memory:
        return
    from plait.core.base.text import in_bytes

    terminal.say("")
    rows = [
        (
            one.place,
            "-" if one.predicted is None else in_bytes(one.predicted),
            "-" if one.measured is None else in_bytes(one.measured),
            _ratio(one.measured / one.predicted) if one.predicted and one.measured else "-",
            "-" if one.rank is None else str(one.rank),
            "-" if one.process is None else in_bytes(one.process),
        )
        for one in report.memory[:ROWS]
    ]
    terminal.table(("tensors of a rank, at most", "predicted", "measured", "ratio", "rank", "its process"), rows)


# ---- how it got on ----


def _progress(report: Report) -> None:
    said: list[str] = []
    loss = report.loss
    if loss:
        evaluated = f", evaluation {loss.evaluation:.3f}" if loss.evaluation is not None else ""
        skipped = f", {loss.skipped} updates skipped" if loss.skipped else ""
        said.append(f"loss {loss.first:.3f} to {loss.last:.3f} (least {loss.least:.3f}{evaluated}{skipped})")
    saved = report.checkpoints
    if saved:
        share = f" ({saved.share:.1%} of the time)" if saved.share is not None else ""
        each = f", each pauses training for {_time(saved.seconds)}{share}" if saved.seconds is not None else ""
        last = f", the end waits {_time(saved.last)} for the last" if saved.last is not None else ""
        said.append(f"{counted(saved.count, 'checkpoint')} kept{each}{last}")
    good = report.goodput
    if good:
        said.append(_goodput(good))
    if said:
        terminal.say("")
        terminal.text("; ".join(said) + ".")


def _goodput(good: Goodput) -> str:
    attempts = f" in {good.attempts} attempts" if good.attempts > 1 else ""
    redone = f", {good.redone} step{'s' if good.redone > 1 else ''} done again" if good.redone else ""
    apart = f"; beside that nobody ran it for {duration(good.apart)}" if good.apart >= 1 else ""
    spent = f"{duration(good.productive)} of {duration(good.total)} in steps"
    return f"goodput {good.share:.0%}: {spent}{attempts}{redone}{apart}"


def _time(seconds: float) -> str:
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
