"""Answers of planning: the best strategies, two plans side by side, the shipped clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from plait.api.choices import unmodelled_notes
from plait.core.base.text import Column, Part, Shown, Table, counted, in_bytes, in_seconds
from plait.core.cluster.hardware import Cluster
from plait.core.job.resuming import TRAIN_EFFECTS
from plait.core.job.spec import Job
from plait.core.job.texts import in_tokens
from plait.plan.answer import Planner
from plait.plan.emit import OwnStrategy
from plait.plan.explain.hints import Hint
from plait.plan.explain.memory_report import percent, unit_of
from plait.plan.explain.reasons import DEGREE_KEYS, PARTS, SHOWN, differences, legend, part_names, settings
from plait.plan.explain.what_if import format_changes
from plait.plan.search.candidate import Answer, Candidate
from plait.plan.search.expense import Expense
from plait.plan.search.fits import MEMORY_KINDS

TextColumn = tuple[str, Callable[[Candidate], str]]
"""A column's name, and a function that returns its text for a strategy."""


class ClusterChange(NamedTuple):
    """A what-if change: factors by which the cluster is changed, and the best strategy without the
    change; None if nothing can be planned without it."""

    factors: Mapping[str, float]
    before: Candidate | None

    def description(self, best: Candidate) -> str:
        """Return a sentence on the change's effect on the best step."""
        what = format_changes(self.factors)
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
    """The best strategies of a job. measured: measured seconds per step, by a candidate's index.
    explain: True to show more columns, the parts of the step, and the contents of memory. what_if:
    the what-if change of the cluster, if any. hints: values near the job's that can be divided
    better among ranks, and CUDA graphs where they gain. file_strategy: the strategy of another
    framework's file, beside which a better one was searched for; closing_note: a sentence on such a
    file without a search."""

    answer: Answer
    measured: Mapping[int, float] = field(default_factory=dict[int, float])
    explain: bool = False
    what_if: ClusterChange | None = None
    hints: Sequence[Hint] = ()
    file_strategy: OwnStrategy | None = None
    closing_note: str = ""

    @property
    def candidates(self) -> Sequence[Candidate]:
        """Strategies, the one that is predicted to be fastest first."""
        return self.answer.candidates

    @property
    def chosen(self) -> int:
        """The index of the best candidate: the fastest measured one, or else the first."""
        return min(self.measured, key=lambda number: self.measured[number]) if self.measured else 0

    @property
    def best(self) -> Candidate:
        """The chosen candidate."""
        return self.candidates[self.chosen]

    def to_dict(self) -> dict[str, Any]:
        """Return candidates with their predictions; if some were measured, also their seconds and
        the chosen index."""
        values = self.answer.to_dict()
        for at, seconds in self.measured.items():
            values["candidates"][at]["measured"] = seconds
        for one, told in zip(self.candidates, values["candidates"], strict=True):
            told["expense"] = Expense.of(one, self.answer.cluster).to_dict()
        values["hints"] = [hint.to_dict() for hint in self.hints]
        if left_out := unmodelled_notes(self.best.job):
            values["not_modelled"] = left_out
        if self.file_strategy:
            values["as_written"] = self.file_strategy.to_dict()
        before = {"unchanged": self.what_if.before and self.what_if.before.to_dict()} if self.what_if else {}
        return values | before | ({"chosen": self.chosen} if self.measured else {})

    def parts(self) -> Iterator[Part]:
        """Yield the job, a row for each strategy, and explanations of the first. Settings that all
        strategies share stand above the table, not in it."""
        found, best = self.answer, self.answer.best
        yield self._job()
        if self.what_if:
            yield self.what_if.description(best)
        shared, shown = self._settings()
        if shared:
            yield f"{'The same in all' if len(self.candidates) > 1 else 'Its settings'}: {', '.join(shared)}."
        yield ""
        shown.sort(key=lambda column: column[0] not in FRONT)
        front = sum(head in FRONT for head, _ in shown)
        shown[front:front] = self._results
        rows = [(number, *(told(one) for _, told in shown)) for number, one in enumerate(self.candidates, 1)]
        yield Table("", ("", *(head for head, _ in shown)), rows)
        yield ""
        yield from legend((*shared, *(cell for row in rows for cell in row[1:])))
        yield best.memory.description(gpu=self._device == "GPU")
        yield Expense.of(best, found.cluster).description
        yield from unmodelled_notes(self.best.job)
        yield from found.why
        yield from (hint.sentence for hint in self.hints)
        if found.frees:
            yield ""
            yield Table(SAVINGS_TITLE, SAVINGS, [one.cells for one in found.frees[:MOST_SAVINGS]])
        if self.file_strategy:
            yield from self._beside_file(self.file_strategy)
        if self.closing_note:
            yield ""
            yield self.closing_note
        if self.explain:
            yield from _explained(best)
        if self.measured:
            yield ""
            yield self._measured()

    @property
    def _device(self) -> str:
        return "GPU" if self.answer.cluster.device.kind == "cuda" else "rank"

    def _job(self) -> str:
        """Return a sentence on the job, its devices, and the search."""
        found, job = self.answer, self.best.job
        batch, length = job.train.global_batch_size, job.data.sequence_length
        model = f"{in_tokens(found.model.num_parameters)} parameters"
        model = f"{job.model['preset']} ({model})" if "preset" in job.model else f"A model of {model}"
        work = f"batches of {counted(batch, 'sequence')} x {length:,} tokens ({in_tokens(batch * length)} tokens)"
        on = "this machine" if found.cluster.name == "here" else found.cluster.name
        where = (
            f"{counted(found.ranks, self._device)} of {on}{f', run by {found.framework}' if found.framework else ''}"
        )
        many = len(self.candidates)
        best = f": the {f'{many} ' if many > 1 else ''}best of {found.searched:,} strategies searched"
        return f"{model}, {work}, {job.train.precision}, on {where}{best if found.searched > 1 else ''}."

    @property
    def _results(self) -> list[TextColumn]:
        """Columns of predictions; MFU only if the device's peak is known."""
        each, unit = unit_of(max(one.most_memory for one in self.candidates))
        digits = int(unit == "GiB" and max(one.most_memory for one in self.candidates) < 10 << 30)
        return [
            *RESULTS,
            (f"tokens/s/{self._device}", lambda one: f"{one.tokens_per_second / one.job.world_size:,.0f}"),
            *(() if self.best.mfu is None else UTILISATION),
            ("memory", lambda one: " of ".join(
                f"{size / each:,.{digits}f}" for size in (one.most_memory, one.memory.usable)) + f" {unit}"),
            *(MORE if self.explain else ()),
        ]  # fmt: skip

    def _beside_file(self, written: OwnStrategy) -> Iterator[Part]:
        """Yield the strategy in another framework's file beside the best one, and the settings that
        change, as lines of that file."""
        best = self.answer.best
        if written.own:
            yield ""
            rows = [
                (name, *(told(one) for _, told in self._results))
                for name, one in ((written.file, written.own), ("best found", best))
            ]
            yield Table("", ("", *(head for head, _ in self._results)), rows)
        yield written.describe(best)
        if written.gains(best) and written.lines:
            yield ""
            yield Table("", (f"To write into {written.file}:",), [(line,) for line in written.lines])
            if written.removed:
                yield f"To take out of it: {', '.join(written.removed)}."

    def _settings(self) -> tuple[list[str], list[TextColumn]]:
        """Return settings that all strategies share, in words, and columns of settings that
        differ."""
        shared, shown, alike = list[str](), list[TextColumn](), {0: list(self.candidates)}
        for head, told in SETTINGS:
            values = {told(one) for one in self.candidates}
            if len(values) > 1 or head == FIRST[0]:
                split = _split(alike.values(), told)
                if self.explain or head in FIRST or len(split) > len(alike):  # rows that differ must look different
                    shown, alike = [*shown, (head, told)], split
            elif values != {"-"} and head not in TUNING:
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


def _split(groups: Iterable[Sequence[Candidate]], text_of: Callable[[Candidate], str]) -> dict[int, list[Candidate]]:
    """Divide groups of strategies that look alike by one more column."""
    found = dict[tuple[int, str], list[Candidate]]()
    for number, group in enumerate(groups):
        for one in group:
            found.setdefault((number, text_of(one)), []).append(one)
    return dict(enumerate(found.values()))


def _explained(best: Candidate) -> Iterator[Part]:
    """Yield tables of the step's seconds by part, and of a rank's memory by kind."""
    yield ""
    header = ("part", Column("seconds", in_seconds), Column("of the step", ".1%"))
    names = part_names(best.point["pp"])
    rows = [(names[name], each, each / best.seconds) for name, each in best.parts.items() if each > 0]
    yield Table("Where the step goes, on the mean rank", header, rows)
    if best.mfu is not None:
        precision = best.job.train.precision
        of = f"the dense peak in {precision}{' without TF32' if precision == 'fp32' else ''}"
        counts = "with the causal half of attention's scores"
        yield f"MFU {best.mfu:.1%} of {of}, {counts}; {best.mfu_full:.1%} with all of them."
    yield ""
    names, *by_pp_rank = best.memory.rows()
    yield Table("What fills a rank's memory", names, by_pp_rank)
    yield ""


# ---- two plans ----


class PredictedPlan(NamedTuple):
    """A plan's file, the planner of its job, and its prediction."""

    file: str
    planner: Planner
    candidate: Candidate

    @property
    def cluster(self) -> Cluster:
        """The plan's cluster."""
        return self.planner.cluster


@dataclass(frozen=True)
class ComparedPlans(Shown):
    """A comparison of two plans: their differences, and the effect on a step."""

    first: PredictedPlan
    second: PredictedPlan

    @property
    def jobs_differ(self) -> list[tuple[str, str, str]]:
        """Differences of the jobs and clusters, apart from the strategy: a name and both values."""
        a, b = self.first.candidate, self.second.candidate
        rows = [
            ("cluster", self.first.cluster.name, self.second.cluster.name),
            (
                "parameters",
                f"{self.first.planner.model.num_parameters:,}",
                f"{self.second.planner.model.num_parameters:,}",
            ),
            *((what, told(a), told(b)) for what, told in JOBS),
            *_job_differences(a.job, b.job),
        ]
        return [row for row in rows if row[1] != row[2]]

    def to_dict(self) -> dict[str, Any]:
        """Return settings that differ, and both predictions."""
        both = self.first.candidate.readable, self.second.candidate.readable
        return {
            "jobs_differ": {key: values for key, *values in self.jobs_differ},
            "differences": {key: list(values) for key, values in differences(*both).items()},
            "plans": [
                {"file": file, "cluster": planner.cluster.name, "ranks": one.job.world_size, **one.to_dict()}
                for file, planner, one in (self.first, self.second)
            ],
        }

    def parts(self) -> Iterator[Part]:
        """Yield tables of settings, of seconds and of bytes, with the ratio of the second plan's
        figures to the first's."""
        a, b = self.first.candidate, self.second.candidate
        jobs = self.jobs_differ
        if work := [name for name, *_ in jobs if not name.startswith(("strategy.", "cluster", "ranks", *BESIDE_STEPS))]:
            yield f"The jobs differ ({', '.join(work)}): a step of one is not the work of a step of the other."
        changed = differences(*(settings(one.point, one.schedule) for one in (a, b)))
        rows = [*jobs, *((key, *values) for key, values in changed.items())]
        if rows:
            yield Table("What is different", ("setting", "first", "second"), rows)
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


def _job_differences(a: Job, b: Job) -> list[tuple[str, str, str]]:
    """Return keys with different values in two jobs: of the model, of training, and of the strategy
    outside the search space."""
    first, second = a.to_dict(), b.to_dict()
    keys = [(section, key) for section in ("model", "train") for key in {**first[section], **second[section]}]
    keys += [("strategy", key) for key in UNSEARCHED]
    found = list[tuple[str, str, str]]()
    for section, key in keys:
        one, other = first[section].get(key), second[section].get(key)
        if one != other and key != "micro_batch_size":  # per replica, it is a column of the search space
            found.append((f"{section}.{key}", "-" if one is None else str(one), "-" if other is None else str(other)))
    return found


UNSEARCHED = ("stage_layers", "slack", "compile", "cuda_graphs", "streams")
"""Keys of a strategy that are no columns of the search space."""
BESIDE_STEPS = tuple(f"train.{key}" for key, effect in TRAIN_EFFECTS.items() if effect == "at once")
"""Keys of [train] without effect on the work of a step."""
HEADER = ("", "first", "second", "second/first")
JOBS: Sequence[TextColumn] = (
    ("tokens of a sequence", lambda one: f"{one.job.data.sequence_length:,}"),
    ("ranks", lambda one: f"{one.job.world_size:,}"),
)
"""Properties in which jobs may differ, listed before their strategies."""


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
    fullest = side.memory.fullest
    kinds = {kind: getattr(fullest.estimate.memory, kind) for kind in MEMORY_KINDS}
    return {**kinds, "beside tensors": fullest.overhead, "total": fullest.total}


def _ratio(first: float, second: float) -> str:
    return f"{second / first:.2f}" if first else "-"


# ---- columns ----


def _setting(name: str) -> Callable[[Candidate], str]:
    """Return a function from a strategy to the text of a setting."""
    return lambda one: settings(one.point, one.schedule)[name]


def _degrees(candidate: Candidate) -> str:
    return " ".join(str(candidate.point[key]) for key in DEGREE_KEYS)


def _band(candidate: Candidate) -> str:
    """Return p10 and p90 of a step in the unit of its seconds."""
    unit = in_seconds(candidate.seconds).split()[-1]
    scaled = [each * {"s": 1, "ms": 1e3, "us": 1e6}[unit] for each in (candidate.low, candidate.high)]
    return "-".join(f"{each:,.{int(scaled[0] < 10)}f}" for each in scaled)


SETTINGS: Sequence[TextColumn] = (
    (" ".join(DEGREE_KEYS), _degrees),
    *((name, _setting(name)) for name in (
        "ep", "micro-batch", "schedule", "sharding", "recompute", "cp type", "slices", "sequence parallel",
        "tp overlap", "dp overlap",
    )),
)  # fmt: skip
TUNING = ("tp overlap", "dp overlap")
"""Settings that are shown only if the strategies differ in them."""
FRONT = (" ".join(DEGREE_KEYS), "micro-batch")
"""Settings that stand before the predictions: as many as 80 characters hold."""
FIRST = (" ".join(DEGREE_KEYS), "ep", "micro-batch", "schedule", "sharding", "recompute")
"""Settings that are shown by default where they differ."""
RESULTS: Sequence[TextColumn] = (
    ("step", lambda one: in_seconds(one.seconds)),
    ("p10-p90", _band),
)
UTILISATION: Sequence[TextColumn] = (("MFU", lambda one: f"{one.mfu:.0%}"),)
"""The column that is shown if the device's peak is known."""
MORE: Sequence[TextColumn] = (
    ("chance to fit", lambda one: percent(one.memory.likely)),
    ("tokens/s", lambda one: f"{one.tokens_per_second:,.0f}"),
    ("micro-batches", lambda one: str(one.point["num_micro"])),
)
SAVINGS_TITLE = "What would free memory of strategy 1, all else staying as it is"
SAVINGS, MOST_SAVINGS = ("held", "freed", "step", "setting to write"), 3
"""Header of the table of what would free memory, and the most rows that are shown."""


# ---- clusters ----


@dataclass(frozen=True)
class KnownClusters(Shown):
    """The shipped clusters, by name."""

    clusters: Mapping[str, Cluster]

    def to_dict(self) -> dict[str, Any]:
        """Return the constants of every cluster."""
        return {name: cluster.model_dump(mode="json") for name, cluster in self.clusters.items()}

    def parts(self) -> Iterator[Part]:
        """Yield a line for each cluster, with the memory of a device that a plan may fill."""
        from plait.core.step.memory.closed_memory import usable

        header = ("preset", "device", Column("usable memory", in_bytes), "a node", "links, each way")
        rows = [
            (name, each.device.name, int(usable(each.device, each.overhead)), each.ranks_per_node,
             ", ".join(f"{tier.name} {tier.rate.value / 1e9:.4g} GB/s" for tier in each.tiers))
            for name, each in self.clusters.items()
        ]  # fmt: skip
        yield Table("", header, rows)
