"""Constants of a cluster, refitted to what people have: runs, training logs, traces, logs of links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.passed_over import PassedOver
from plait.core.base.text import Column, Part, Shown, Table

if TYPE_CHECKING:
    from plait.core.cluster.hardware import Cluster
    from plait.plan.calibration_sources import Measured, Sources
    from plait.plan.recorded import Refitted, TimedRun

LEARNT = 0.9
"""Of a constant's error what is left at most, where anything was learnt."""
FAR_OFF = 0.15
"""How far a run's prediction is off after the fit, from which on that is said, and nothing is written where
most are."""


@dataclass(frozen=True, kw_only=True)
class KnownConstant:
    """A constant before and after. error, left: relative, one standard deviation; before, at least what the
    fit begins with where steps tell it; None where nobody knows. sources: files that tell it or shift it;
    none where it stays as it was. surer: whether they tell it. lacked: the format that it is of, where the
    device has none."""

    name: str
    prior: float
    now: float
    error: float | None
    left: float | None
    sources: Sequence[str]
    surer: bool
    lacked: str = ""

    @property
    def learnt(self) -> str:
        """In words."""
        if self.lacked:
            return f"unused: the device has no {self.lacked}"
        if not self.sources:
            return "stays prior"
        first, *more = self.sources
        named = f"{first}{f' and {len(more)} more' if more else ''}"
        return f"learnt from {named}" if self.surer else f"shifted with the rest by {named}, no surer"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name, "prior": self.prior, "now": self.now, "prior_error": self.error, "error": self.left,
            "learnt": self.surer, "sources": list(self.sources),
        }  # fmt: skip


@dataclass(frozen=True)
class Calibration(Shown):
    """A cluster whose constants were refitted. refitted: None where no steps were timed. file: where it is
    written. sources: by file, what it is. conflicts, notes: sentences."""

    runs: Sequence[TimedRun]
    refitted: Refitted | None
    file: Path
    constants: Sequence[KnownConstant] = ()
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    conflicts: Sequence[str] = ()
    notes: Sequence[str] = ()
    over: PassedOver = field(default_factory=PassedOver)

    def to_dict(self) -> dict[str, Any]:
        """Seconds of a step of every run, predicted before and after, and every constant."""
        header = (Column("run"), Column("measured"), Column("before"), Column("after"))
        rows = [(run.folder, run.seconds, before, after) for run, before, after in self._seconds()]
        return {
            "cluster": str(self.file), "sources": dict(self.sources), "runs": Table("", header, rows).records(),
            "moved": dict(self.refitted.moved) if self.refitted else {},
            "constants": [one.to_dict() for one in self.constants], "conflicts": list(self.conflicts),
            "notes": list(self.notes), "passed_over": self.over.rows(),
        }  # fmt: skip

    def parts(self) -> Iterator[Part]:
        """What was read, predicted seconds of a step against measured ones, and constants."""
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
        known = [(one.name, one.prior, one.now, one.error, one.left, one.learnt) for one in self.constants]
        yield Table("Constants", columns, known)
        yield from (f"CONFLICT: {one}" for one in self.conflicts)
        yield from (f"note: {one}" for one in self.notes)
        if not any(one.surer for one in self.constants):
            yield "Nothing was learnt: what was read makes no constant surer."
        yield "Constants are keys of [efficiency] in the cluster's file: docs/profile.md says what each is."
        yield f"The cluster is in {self.file}; plans use it with cluster.file={self.file}."

    def _seconds(self) -> Iterator[tuple[TimedRun, float, float]]:
        if (found := self.refitted) is not None:
            yield from zip(self.runs, found.before.tolist(), found.after.tolist(), strict=True)


def calibrate_cluster(
    files: Sequence[Path], out: Path, cluster: str | None = None, overrides: Sequence[str] = (), *, force: bool = False
) -> Calibration:
    """Refit the constants of a cluster to what files say, and write it to ``out`` (TOML).

    files: of any kind that ``plait.plan.calibration_sources`` tells. cluster: a preset or a file to begin
    with; None: the first run's. overrides: ``section.key=value`` of logs. force: whether constants are
    written that explain most runs badly. Raises JobError, DataError, LaunchError.
    """
    from datetime import UTC, datetime

    from plait.core.base.codec.toml_text import to_toml
    from plait.core.base.files import check_target, explained, replacing
    from plait.core.job.settings import BYTES
    from plait.plan import calibration_sources as told
    from plait.plan.recorded import refit
    from plait.train.data.tokenizer import load_tokenizer

    fix = "Choose another with --out"
    check_target(out, fix=fix)
    kinds = {path: told.source_kind(path) for path in files}
    found = told.read_runs(kinds, overrides, load_tokenizer(BYTES).vocab)
    begin = _begin(cluster, found)
    told.read_profiles(found, kinds, begin.ranks_per_node)
    told.leave_out_devices(found, begin)
    direct = told.measured(begin, found)
    told.leave_out_others(found, direct.cluster)
    date = datetime.now(UTC).date().isoformat()
    refitted = refit(direct.cluster, found.runs, date=date) if found.runs else None
    if refitted and not force:
        _check_explained(found.runs, refitted)
    now = refitted.cluster if refitted else direct.cluster
    found.conflicts += _conflicts(direct, found, refitted)
    with explained(f"{out} cannot be written", fix=fix), replacing(out) as partial:
        partial.write_text(to_toml(now.model_dump(mode="json", exclude_none=True)))
    known = list(_known(begin, direct, now, refitted))
    return Calibration(found.runs, refitted, out, known, found.files, found.conflicts, found.notes, found.over)


def _begin(cluster: str | None, found: Sources) -> Cluster:
    """Whose constants to begin with. Raises JobError where nobody says."""
    from plait.core.base.errors import JobError
    from plait.core.cluster.hardware import Cluster
    from plait.plan.recorded import Recorded
    from plait.plan.where import find_cluster, read_cluster

    if cluster is not None:
        return read_cluster(Path(cluster)) if Path(cluster).is_file() else Cluster.preset(cluster)
    ours = [run for run in found.runs if isinstance(run, Recorded)]
    if not ours:
        fix = "Add --cluster NAME (plait plan lists them), or --cluster FILE"
        raise JobError("is missing: logs and traces do not say on which cluster they ran", key="--cluster", fix=fix)
    job = ours[0].plan.job
    assert job is not None
    return find_cluster(job)


def _check_explained(runs: Sequence[TimedRun], refitted: Refitted) -> None:
    """Raise JobError where, after the fit, the prediction of most runs is far off."""
    from statistics import median_high

    from plait.core.base.errors import JobError

    off = [after / run.seconds - 1 for run, after in zip(runs, refitted.after.tolist(), strict=True)]
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


def _conflicts(direct: Measured, found: Sources, refitted: Refitted | None) -> Iterator[str]:
    """Between direct measurements and steps, and of runs that no constants explain."""
    from plait.plan.calibration_sources import contradictions

    if refitted is None:
        return
    for name, (constant, files) in direct.fitted.items():
        if name in refitted.moved:
            steps = f"the steps of {' and '.join(refitted.told.get(name, ('all runs',))[:2])}"
            values = {
                files[-1]: (constant.value, constant.error),
                steps: (refitted.moved[name][1], refitted.left[name][1]),
            }
            yield from contradictions(name, values)
    for run, after in zip(found.runs, refitted.after.tolist(), strict=True):
        if abs(after / run.seconds - 1) > FAR_OFF:
            yield (
                f"{run.folder}: {run.seconds:.4g} s measured and {after:.4g} s predicted after the fit: its "
                "configuration, its cluster or the other sources are not those of this run."
            )


def _known(begin: Cluster, direct: Measured, now: Cluster, refitted: Refitted | None) -> Iterator[KnownConstant]:
    """Every constant, before and after."""
    from plait.plan.constants import constant_of, lacked_format, timed_constants

    for name in timed_constants(begin):
        prior, last = constant_of(begin, name), constant_of(now, name)
        if lacked := lacked_format(begin, name):
            yield KnownConstant(
                name=name, prior=prior.value, now=last.value, error=None, left=None, sources=(), surer=False,
                lacked=lacked,
            )  # fmt: skip
            continue
        error, left, sources = prior.error, last.error, list(direct.told.get(name, ()))
        surer = bool(sources)
        if refitted and name in refitted.left:
            before, after = refitted.left[name]
            told = after <= LEARNT * before
            if name in refitted.moved or told:
                sources += [one for one in refitted.told.get(name, ()) if one not in sources]
                error, left, surer = max(error, before), after, surer or told
        yield KnownConstant(  # where a cluster's file gives no error it reads as 0
            name=name, prior=prior.value, now=last.value, error=error or None, left=left or None, sources=sources,
            surer=surer,
        )  # fmt: skip
