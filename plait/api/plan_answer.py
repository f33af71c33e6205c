"""Answers of planning: the best strategies, two plans side by side, the clusters that ship."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from plait.api.choose import unmodelled
from plait.core.base.text import Column, Part, Shown, Table, in_bytes, in_seconds
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.plan.answer import Planner
from plait.plan.candidate import Answer, Candidate
from plait.plan.divisors import Hint
from plait.plan.expense import Expense
from plait.plan.fits import KINDS
from plait.plan.freeing import told_together
from plait.plan.memory_report import percent
from plait.plan.own_strategy import OwnStrategy
from plait.plan.reasons import PARTS, SHOWN, TOGETHER, WORDS, differences, recomputed
from plait.plan.sensitivity import Sensitivity
from plait.plan.what_if import told_changes

Told = tuple[str, Callable[[Candidate], str]]
"""A column's name, and its text for a strategy."""


class Hypothesis(NamedTuple):
    """Factors by which the cluster is other than it is, and the best strategy as it is; None where nothing
    can be planned."""

    factors: Mapping[str, float]
    before: Candidate | None

    def told(self, best: Candidate) -> str:
        """What the change makes of the best step."""
        what = told_changes(self.factors)
        if self.before is None:
            return f"What if there were {what}: then this can be planned, and nothing can as things are."
        ratio = self.before.seconds / best.seconds
        times = f"{ratio:.3g} times as fast" if ratio >= 1 else f"{1 / ratio:.3g} times as long"
        return (
            f"What if there were {what}: the best step takes {in_seconds(best.seconds)} in place of "
            f"{in_seconds(self.before.seconds)}, {times}."
        )


@dataclass(frozen=True, kw_only=True)
class PlanAnswer(Shown):
    """The best strategies of a job. measured: seconds of a step that was run, by number of a candidate.
    explain: whether parts show more columns, where the step goes, and what fills the memory. change: of the
    cluster, if one is only tried. hints: numbers near those of the job that can be shared out better,
    and CUDA graphs where they gain. turned: what would have the second be the faster one; None if that was
    not looked for. written: the strategy of another framework's file; closing: a sentence on it."""

    answer: Answer
    measured: Mapping[int, float] = field(default_factory=dict[int, float])
    explain: bool = False
    change: Hypothesis | None = None
    hints: Sequence[Hint] = ()
    turned: Sensitivity | None = None
    written: OwnStrategy | None = None
    closing: str = ""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """Strategies, the one that is predicted to be fastest first."""
        return self.answer.candidates

    @property
    def chosen(self) -> int:
        """Number of the best candidate: the fastest that was measured, or else the first."""
        return min(self.measured, key=lambda number: self.measured[number]) if self.measured else 0

    @property
    def best(self) -> Candidate:
        """The candidate that is chosen."""
        return self.candidates[self.chosen]

    def to_dict(self) -> dict[str, Any]:
        """Candidates with their predictions; if some were measured, their seconds and which one is chosen."""
        values = self.answer.to_dict()
        for at, seconds in self.measured.items():
            values["candidates"][at]["measured"] = seconds
        for one, told in zip(self.candidates, values["candidates"], strict=True):
            told["expense"] = Expense.of(one, self.answer.cluster).to_dict()
        values["runner_up_wins_if"] = self.turned and [turn.to_dict() for turn in self.turned.turns]
        values["hints"] = [hint.to_dict() for hint in self.hints]
        if left_out := unmodelled(self.best.job):
            values["not_modelled"] = left_out
        if self.written:
            values["as_written"] = self.written.to_dict()
        before = {"unchanged": self.change.before and self.change.before.to_dict()} if self.change else {}
        return values | before | ({"chosen": self.chosen} if self.measured else {})

    def parts(self) -> Iterator[Part]:
        """A line for each strategy, and why the first is the first. Settings that all of them share stand
        above the table, not in it."""
        found, candidates = self.answer, self.candidates
        ranks = f"{found.ranks:,} rank{'s' * (found.ranks > 1)} of {found.cluster.name}"
        searched = f": {found.searched:,} strategies, the best of those that fit" if found.searched > 1 else ""
        runtime = f", run by {found.framework}" if found.framework else ""
        precision = self.best.job.train.precision
        told = f" in {precision}" if found.cluster.device.kind == "cuda" and precision != "bf16-mixed" else ""
        yield f"{found.model.num_parameters:,} parameters{told} on {ranks}{runtime}{searched}"
        if self.change:
            yield self.change.told(found.best)
        shared, shown = self._settings()
        if shared:
            yield f"{'all of them' if len(candidates) > 1 else 'it has'}: {', '.join(shared)}"
        yield ""
        unit, name = _unit(candidates)
        shown += [(name, lambda one: f"{one.most_memory / unit:.0f}"), *RESULTS]
        shown += [*(() if self.best.mfu is None else UTILISATION), *(MORE if self.explain else ())]
        rows = [(number, *(told(one) for _, told in shown)) for number, one in enumerate(candidates, 1)]
        yield Table("", ("", *(head for head, _ in shown)), rows)
        yield ""
        fullest = found.best.memory.fullest
        tensors, beside = in_bytes(fullest.place.memory.total), in_bytes(fullest.overhead)
        what = "the fullest rank's tensors and what its process holds beside them"
        yield f"{name}: {what}; of 1, {tensors} and {beside}."
        yield f"1 {found.best.memory.told}."
        yield Expense.of(found.best, found.cluster).told
        yield from unmodelled(self.best.job)
        if frees := told_together(found.frees):
            yield frees
        yield from found.why
        if self.turned:
            yield self.turned.told()
        yield from (hint.told for hint in self.hints)
        if self.closing:
            yield self.closing
        if self.explain:
            yield from _explained(found.best)
        if self.measured:
            yield ""
            yield self._measured()

    def _settings(self) -> tuple[list[str], list[Told]]:
        """Settings that all strategies share, in words, and columns of those that differ."""
        shared, shown, alike = list[str](), list[Told](), {0: list(self.candidates)}
        for head, told in (*SETTINGS, *TUNING):
            values = {told(one) for one in self.candidates}
            if len(values) > 1 or head == "pp dp cp tp":
                split = _split(alike.values(), told)
                if self.explain or head in FIRST or len(split) > len(alike):  # rows that differ look different
                    shown, alike = [*shown, (head, told)], split
            elif values != {"-"} and (head, told) in SETTINGS:
                shared.append(f"{head} {values.pop()}")
        return shared, shown

    def _measured(self) -> Table:
        header = ("", Column("predicted", in_seconds), Column("measured", in_seconds), Column("ratio", ".2f"), "")
        rows = [
            (at + 1, predicted := self.candidates[at].seconds, seconds, predicted / seconds,
             "chosen" if at == self.chosen else "")
            for at, seconds in self.measured.items()
        ]  # fmt: skip
        return Table("Predicted and measured seconds of a step", header, rows)


def _split(groups: Iterable[Sequence[Candidate]], told: Callable[[Candidate], str]) -> dict[int, list[Candidate]]:
    """Groups of strategies that look alike, by one column more."""
    found = dict[tuple[int, str], list[Candidate]]()
    for number, group in enumerate(groups):
        for one in group:
            found.setdefault((number, told(one)), []).append(one)
    return dict(enumerate(found.values()))


def _explained(best: Candidate) -> Iterator[Part]:
    """Tables of the seconds of a step by part, and of the memory of a rank by kind."""
    yield ""
    header = ("part", Column("seconds", in_seconds), Column("of the step", ".1%"))
    rows = [(PARTS[name], each, each / best.seconds) for name, each in best.parts.items() if each > 0]
    yield Table("Where the step goes, on the mean rank", header, rows)
    if best.mfu is not None:
        precision = best.job.train.precision
        of = f"the dense peak in {precision}{' without TF32' if precision == 'fp32' else ''}"
        counts = "with the causal half of attention's scores"
        yield f"MFU {best.mfu:.1%} of {of}, {counts}; {best.mfu_full:.1%} with all of them."
    yield ""
    names, *places = best.memory.rows()
    yield Table("What fills a rank's memory", names, places)
    yield ""


# ---- two plans ----


class PredictedPlan(NamedTuple):
    """A plan's file, the planner of its job, and what is predicted for it."""

    file: str
    planner: Planner
    candidate: Candidate

    @property
    def cluster(self) -> Cluster:
        """It is for."""
        return self.planner.cluster


@dataclass(frozen=True)
class ComparedPlans(Shown):
    """Two plans: what they have otherwise, and what that makes of a step. turned: what would have the slower
    one be the faster; None if that was not looked for."""

    first: PredictedPlan
    second: PredictedPlan
    turned: Sensitivity | None = None

    @property
    def jobs_differ(self) -> list[tuple[str, str, str]]:
        """What their jobs and clusters have otherwise, besides the strategy: both values."""
        a, b = self.first.candidate, self.second.candidate
        rows = [
            ("cluster", self.first.cluster.name, self.second.cluster.name),
            *((what, told(a), told(b)) for what, told in JOBS),
            *_otherwise(a.job, b.job),
        ]
        return [row for row in rows if row[1] != row[2]]

    @property
    def same_work(self) -> bool:
        """Whether a step of both is the same work on the same devices."""
        return not self.jobs_differ

    def to_dict(self) -> dict[str, Any]:
        """Settings that differ, and both predictions."""
        both = self.first.candidate.readable, self.second.candidate.readable
        return {
            "jobs_differ": {key: values for key, *values in self.jobs_differ},
            "differences": {key: list(values) for key, values in differences(*both).items()},
            "slower_wins_if": self.turned and [turn.to_dict() for turn in self.turned.turns],
            "plans": [
                {"file": file, "cluster": planner.cluster.name, "ranks": one.job.world_size, **one.to_dict()}
                for file, planner, one in (self.first, self.second)
            ],
        }

    def parts(self) -> Iterator[Part]:
        """Tables of settings, of seconds and of bytes, with the second plan's figures against the first's."""
        a, b = self.first.candidate, self.second.candidate
        jobs = self.jobs_differ
        if work := [row[0] for row in jobs if not row[0].startswith(("strategy.", "cluster", "ranks"))]:
            yield f"The jobs differ ({', '.join(work)}): a step of one is not the work of a step of the other."
        settings = [*jobs, *((key, *values) for key, values in differences(a.readable, b.readable).items())]
        if settings:
            yield Table("What is different", ("setting", "first", "second"), settings)
        else:
            yield Table("What is different")
            yield "Nothing: both have the same strategy, ranks and cluster."
        yield ""
        yield Table("What a step takes", HEADER, list(_seconds(a, b)))
        yield ""
        sizes = zip(_sizes(a).items(), _sizes(b).values(), strict=True)
        rows = [(kind, *map(in_bytes, pair), _ratio(*pair)) for (kind, x), y in sizes if any(pair := (x, y))]
        yield Table("What fills the fullest rank", HEADER, rows)
        for name, (file, _, one) in zip(("first", "second"), (self.first, self.second), strict=True):
            verdict = "fits" if one.memory.fits else "does not fit"
            yield f"{name}: {file}, which {verdict} into {in_bytes(one.memory.usable)}"
        if self.turned:
            slower = "the second" if b.seconds > a.seconds else "the first"
            yield self.turned.told(slower)


def _otherwise(a: Job, b: Job) -> list[tuple[str, str, str]]:
    """What two jobs say otherwise of their model, of training, and of what no point of a space holds."""
    first, second = a.to_dict(), b.to_dict()
    keys = [(section, key) for section in ("model", "train") for key in {**first[section], **second[section]}]
    keys += [("strategy", key) for key in UNSEARCHED]
    found = list[tuple[str, str, str]]()
    for section, key in keys:
        one, other = first[section].get(key), second[section].get(key)
        if one != other and key != "micro_batch_size":  # of one replica, among the points
            found.append((f"{section}.{key}", "-" if one is None else str(one), "-" if other is None else str(other)))
    return found


UNSEARCHED = ("stage_layers", "slack", "compile", "cuda_graphs", "streams")
"""Keys of a strategy that are no columns of a space."""
HEADER = ("", "first", "second", "second/first")
JOBS: Sequence[Told] = (
    ("parameters", lambda one: f"{one.job.model_spec(vocab=1).num_parameters:,}"),
    ("tokens of a sequence", lambda one: f"{one.job.data.sequence_length:,}"),
    ("ranks", lambda one: f"{one.job.world_size:,}"),
)
"""What jobs may have otherwise, said before their strategies."""


def _seconds(a: Candidate, b: Candidate) -> Iterator[tuple[str, ...]]:
    yield "a step", in_seconds(a.seconds), in_seconds(b.seconds), _ratio(a.seconds, b.seconds)
    yield "p10-p90", *(f"{in_seconds(one.low)} - {in_seconds(one.high)}" for one in (a, b)), ""
    for name, words in PARTS.items():
        pair = a.parts.get(name, 0.0), b.parts.get(name, 0.0)
        if pair[0] > SHOWN * a.seconds or pair[1] > SHOWN * b.seconds:
            yield words, *map(in_seconds, pair), _ratio(*pair)
    pair = a.tokens_per_second, b.tokens_per_second
    yield "tokens/s", *(f"{each:,.0f}" for each in pair), _ratio(*pair)
    if a.mfu is not None and b.mfu is not None:
        yield "MFU", f"{a.mfu:.1%}", f"{b.mfu:.1%}", _ratio(a.mfu, b.mfu)


def _sizes(side: Candidate) -> dict[str, int]:
    place = side.memory.fullest
    kinds = {kind: getattr(place.place.memory, kind) for kind in KINDS}
    return {**kinds, "beside tensors": place.overhead, "total": place.total}


def _ratio(first: float, second: float) -> str:
    return f"{second / first:.2f}" if first else "-"


# ---- columns ----


def _degrees(one: Candidate) -> str:
    shared = f" ep{one.point['ep']}" if one.point["ep"] > 1 else ""
    return " ".join(str(one.point[key]) for key in ("pp", "dp", "cp", "tp")) + shared


def _schedule(one: Candidate) -> str:
    point = one.point
    if point["pp"] == 1:
        return "-"
    return f"{one.schedule} x{point['virtual']}" if one.schedule == "interleaved" else one.schedule


def _shard(one: Candidate) -> str:
    point = one.point
    if point["dp"] * point["cp"] == 1:
        return "-"
    copies = f"+{point['secondary']}" if point["secondary"] else ""
    return f"{point['params']},{point['grads']},{point['optim']}{copies}"


def _slices(one: Candidate) -> str:
    return TOGETHER["p1"](one.point) if one.point["tp"] > 1 else "-"


def _stream(one: Candidate) -> str:
    return "-" if one.point["tp"] == 1 else "yes" if one.point["sequence_parallel"] else "no"


def _overlap(one: Candidate, axis: str, name: str) -> str:
    point = one.point
    size = point["tp"] if axis == "tp" else point["dp"] * point["cp"]
    return WORDS[name][point[name]] if size > 1 else "-"


def _rings(one: Candidate) -> str:
    return TOGETHER["ring"](one.point) if one.point["cp"] > 1 else "-"


SETTINGS: Sequence[Told] = (
    ("pp dp cp tp", _degrees),
    ("micro", lambda one: str(one.point["micro"])),
    ("schedule", _schedule),
    ("p,g,o", _shard),
    ("recompute", lambda one: recomputed(one.point)),
    ("heads x ring", _rings),
    ("slices", _slices),
    ("sequence-parallel", _stream),
)
TUNING: Sequence[Told] = (
    ("overlap", lambda one: _overlap(one, "tp", "overlap")),
    ("shard overlap", lambda one: _overlap(one, "dp", "shard_overlap")),
)
"""What is shown only of strategies that differ in it."""
FIRST = ("pp dp cp tp", "micro", "schedule", "p,g,o", "recompute")
"""Which of them are shown unasked: as many as 80 columns hold."""
RESULTS: Sequence[Told] = (("step", lambda one: in_seconds(one.seconds)),)
UTILISATION: Sequence[Told] = (("MFU", lambda one: f"{one.mfu:.0%}"),)
"""What is shown where a device's peak is known."""
MORE: Sequence[Told] = (
    ("sure to fit", lambda one: percent(one.memory.likely)),
    ("p10-p90", lambda one: f"{in_seconds(one.low)}-{in_seconds(one.high)}"),
    ("tokens/s", lambda one: f"{one.tokens_per_second:,.0f}"),
    ("a rank", lambda one: f"{one.tokens_per_second / one.job.world_size:,.0f}"),
    ("micro-batches", lambda one: str(one.point["num_micro"])),
)


def _unit(candidates: Sequence[Candidate]) -> tuple[int, str]:
    most = max(one.most_memory for one in candidates)
    return (1 << 30, "GiB") if most >= 10 << 30 else (1 << 20, "MiB")


# ---- clusters ----


@dataclass(frozen=True)
class KnownClusters(Shown):
    """Clusters that ship, by name."""

    clusters: Mapping[str, Cluster]

    def to_dict(self) -> dict[str, Any]:
        """Constants of every cluster."""
        return {name: cluster.model_dump(mode="json") for name, cluster in self.clusters.items()}

    def parts(self) -> Iterator[Part]:
        """A line for each cluster, with the memory of a device that a plan may fill."""
        from plait.core.step.memory.closed_memory import usable

        header = ("preset", "device", Column("usable memory", in_bytes), "a node", "links, each way")
        rows = [
            (name, each.device.name, int(usable(each.device, each.overhead)), each.ranks_per_node,
             ", ".join(f"{tier.name} {tier.rate.value / 1e9:.4g} GB/s" for tier in each.tiers))
            for name, each in self.clusters.items()
        ]  # fmt: skip
        yield Table("", header, rows)
