"""Calibration: a cluster's constants, refitted to recordings of runs, training logs, profiler
traces and logs of links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.text import Column, Part, Shown, Table

if TYPE_CHECKING:
    from plait.core.cluster.hardware import Cluster
    from plait.plan.calibrate.recorded import Refitted, TimedRun
    from plait.plan.calibrate.sources import Measured, Sources

LEARNT_RATIO = 0.9
"""The largest ratio of a constant's error after the fit to its error before, at which it counts as
learnt."""
FAR_OFF = 0.15
"""Relative error of a run's prediction after the fit above which it is reported. If most runs
exceed it, nothing is written."""


@dataclass(frozen=True, kw_only=True)
class FittedConstantRow:
    """A constant before and after the fit. prior, value: before and after. error, error_after: its
    relative error before and after, one standard deviation; None if unknown. If timed steps
    determine the constant, ``error`` is at least the error that the fit begins with. sources: files
    that determine or shift the constant; empty if it is unchanged. improved: True if the sources
    reduce its error. missing_format: the number format that the constant belongs to, if the device
    lacks that format."""

    name: str
    prior: float
    value: float
    error: float | None
    error_after: float | None
    sources: Sequence[str]
    improved: bool
    missing_format: str = ""

    @property
    def provenance(self) -> str:
        """A phrase on the files that changed the constant."""
        if self.missing_format:
            return f"unused: the device has no {self.missing_format}"
        if not self.sources:
            return "stays prior"
        first, *more = self.sources
        named = f"{first}{f' and {len(more)} more' if more else ''}"
        return (
            f"learnt from {named}" if self.improved else f"shifted with other constants by {named}, error not reduced"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "name": self.name, "prior": self.prior, "now": self.value, "prior_error": self.error,
            "error": self.error_after, "learnt": self.improved, "sources": list(self.sources),
        }  # fmt: skip


@dataclass(frozen=True)
class Calibration(Shown):
    """A cluster with refitted constants. runs: the timed runs behind it. refitted: the fit to timed
    steps; None if no steps were timed. file: the cluster file that was written. constants: each
    before and after. sources: the kind of each input file. conflicts, notes: sentences. ignored:
    counts of input that readers ignored."""

    runs: Sequence[TimedRun]
    refitted: Refitted | None
    file: Path
    constants: Sequence[FittedConstantRow] = ()
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    conflicts: Sequence[str] = ()
    notes: Sequence[str] = ()
    ignored: IgnoredInput = field(default_factory=IgnoredInput)

    def to_dict(self) -> dict[str, Any]:
        """Return the seconds per step of every run, measured and predicted before and after the
        fit, and every constant."""
        header = (Column("run"), Column("measured"), Column("before"), Column("after"))
        rows = [(run.folder, run.seconds, before, after) for run, before, after in self._seconds()]
        return {
            "cluster": str(self.file), "sources": dict(self.sources), "runs": Table("", header, rows).records(),
            "moved": dict(self.refitted.moved) if self.refitted else {},
            "constants": [one.to_dict() for one in self.constants], "conflicts": list(self.conflicts),
            "notes": list(self.notes), "passed_over": self.ignored.rows(),
        }  # fmt: skip

    def parts(self) -> Iterator[Part]:
        """Yield tables of the files, of predicted and measured seconds per step, and of the
        constants."""
        if self.sources:
            yield Table("Read", ("file", "what it is"), list(self.sources.items()))
            yield ""
        off = Column("", "+.1%")
        header = ("run", Column("measured", ".4g"), Column("predicted before", ".4g"), off, Column("after", ".4g"), off)
        rows = [
            (run.folder, run.seconds, before, before / run.seconds - 1, after, after / run.seconds - 1)
            for run, before, after in self._seconds()
        ]
        if rows:
            yield Table("Seconds of a step", header, rows)
            yield ""
        errors = (Column(head, ".0%", none="unknown") for head in ("error was", "is"))
        columns = ("constant", Column("prior", ".4g"), Column("now", ".4g"), *errors, "")
        known = [(one.name, one.prior, one.value, one.error, one.error_after, one.provenance) for one in self.constants]
        yield Table("Constants", columns, known)
        yield from (f"CONFLICT: {one}" for one in self.conflicts)
        yield from (f"note: {one}" for one in self.notes)
        if not any(one.improved for one in self.constants):
            yield "Nothing was learnt: the files reduce no constant's error."
        yield "Constants are keys of [efficiency] in the cluster's file: docs/profile.md says what each is."
        yield f"The cluster is in {self.file}; plans use it with cluster.file={self.file}."

    def _seconds(self) -> Iterator[tuple[TimedRun, float, float]]:
        if (found := self.refitted) is not None:
            yield from zip(self.runs, found.before.tolist(), found.after.tolist(), strict=True)


def calibrate_cluster(
    files: Sequence[Path], out: Path, cluster: str | None = None, overrides: Sequence[str] = (), *, force: bool = False
) -> Calibration:
    """Refit a cluster's constants to recordings, and write the cluster to ``out`` (TOML).

    files: of any kind that ``plait.plan.calibrate.sources`` reads. cluster: a preset or a file to
    begin with; None: the cluster of the first run. overrides: ``section.key=value`` settings of
    logs. force: True to write constants even if they explain most runs badly. Raises JobError,
    DataError, LaunchError.
    """
    from datetime import UTC, datetime

    from plait.core.base.codec.toml_text import to_toml
    from plait.core.base.files import check_target, explained, replacing
    from plait.core.job.settings import BYTES
    from plait.plan.calibrate import sources as told
    from plait.plan.calibrate.recorded import refit
    from plait.train.data.tokenizer import load_tokenizer

    fix = "Choose another with --out"
    check_target(out, fix=fix)
    kinds = {path: told.source_kind(path) for path in files}
    found = told.read_runs(kinds, overrides, load_tokenizer(BYTES).vocab)
    begin = _initial_cluster(cluster, found)
    told.read_profiles(found, kinds, begin.ranks_per_node)
    told.leave_out_devices(found, begin)
    direct = told.measured(begin, found)
    told.leave_out_other_runs(found, direct.cluster)
    date = datetime.now(UTC).date().isoformat()
    refitted = refit(direct.cluster, found.runs, date=date) if found.runs else None
    if refitted and not force:
        _check_explained(found.runs, refitted)
    now = refitted.cluster if refitted else direct.cluster
    found.conflicts += _conflicts(direct, found, refitted)
    with explained(f"{out} cannot be written", fix=fix), replacing(out) as partial:
        partial.write_text(to_toml(now.model_dump(mode="json", exclude_none=True)))
    known = list(_constants(begin, direct, now, refitted))
    return Calibration(found.runs, refitted, out, known, found.files, found.conflicts, found.notes, found.over)


def _initial_cluster(cluster: str | None, sources: Sources) -> Cluster:
    """Return the cluster that the fit begins with. Raises JobError if neither ``cluster`` nor a run
    names it."""
    from plait.core.base.errors import JobError
    from plait.core.cluster.hardware import Cluster
    from plait.plan.calibrate.recorded import Recorded
    from plait.plan.explain.job_cluster import find_cluster, read_cluster

    if cluster is not None:
        return read_cluster(Path(cluster)) if Path(cluster).is_file() else Cluster.preset(cluster)
    ours = [run for run in sources.runs if isinstance(run, Recorded)]
    if not ours:
        fix = "Add --cluster NAME (plait plan lists them), or --cluster FILE"
        raise JobError("is missing: logs and traces do not say on which cluster they ran", key="--cluster", fix=fix)
    job = ours[0].plan.job
    assert job is not None
    return find_cluster(job)


def _check_explained(runs: Sequence[TimedRun], refitted: Refitted) -> None:
    """Raise JobError naming the worst run if the predictions of most runs are off by more than
    ``FAR_OFF`` after the fit."""
    from statistics import median_high

    from plait.core.base.errors import JobError

    off: list[float] = [after / run.seconds - 1 for run, after in zip(runs, refitted.after.tolist(), strict=True)]
    middle = off[[abs(one) for one in off].index(median_high(map(abs, off)))]
    if abs(middle) <= FAR_OFF:
        return
    run = runs[off.index(middle)]
    fix = (
        f"Name the cluster of the run with --cluster, of which {refitted.cluster.name} was tried; check its "
        "configuration (ranks, batch, precision, recomputation); or add --force"
    )
    after = f"after the fit {run.seconds * (1 + middle):.4g} s are predicted ({middle:+.0%})"
    problem = f"{run.seconds:.4g} s a step were measured, and {after}: no constants explain it, and nothing was written"
    raise JobError(problem, file=run.folder, fix=fix)


def _conflicts(direct: Measured, sources: Sources, refitted: Refitted | None) -> Iterator[str]:
    """Yield sentences on constants that profiles and timed steps determine differently, and on runs
    that no constants explain."""
    from plait.plan.calibrate.sources import contradictions

    if refitted is None:
        return
    for name, (constant, files) in direct.fitted.items():
        if name in refitted.moved:
            steps = f"the steps of {' and '.join(refitted.sources.get(name, ('all runs',))[:2])}"
            values = {
                files[-1]: (constant.value, constant.error),
                steps: (refitted.moved[name][1], refitted.left[name][1]),
            }
            yield from contradictions(name, values)
    for run, after in zip(sources.runs, refitted.after.tolist(), strict=True):
        if abs(after / run.seconds - 1) > FAR_OFF:
            yield (
                f"{run.folder}: {run.seconds:.4g} s measured and {after:.4g} s predicted after the fit: its "
                "configuration, its cluster or the other sources are not those of this run."
            )


def _constants(
    begin: Cluster, direct: Measured, now: Cluster, refitted: Refitted | None
) -> Iterator[FittedConstantRow]:
    """Yield every constant, before and after the fit."""
    from plait.plan.calibrate.fit import constant_of, lacked_format, timed_constants

    for name in timed_constants(begin):
        prior, last = constant_of(begin, name), constant_of(now, name)
        if lacked := lacked_format(begin, name):
            yield FittedConstantRow(
                name=name, prior=prior.value, value=last.value, error=None, error_after=None,
                sources=(), improved=False, missing_format=lacked,
            )  # fmt: skip
            continue
        error, left, sources = prior.error, last.error, list(direct.sources.get(name, ()))
        surer = bool(sources)
        if refitted and name in refitted.left:
            before, after = refitted.left[name]
            told = after <= LEARNT_RATIO * before
            if name in refitted.moved or told:
                sources += [one for one in refitted.sources.get(name, ()) if one not in sources]
                error, left, surer = max(error, before), after, surer or told
        yield FittedConstantRow(  # an error that the cluster's file leaves out is read as 0
            name=name, prior=prior.value, value=last.value, error=error or None, error_after=left or None,
            sources=sources, improved=surer,
        )  # fmt: skip
