"""Diagnosis of a run: its report, compared with its plan's prediction, and the cause of a hang.
``timelines.py`` compares timelines."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.text import Part, Shown, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plait.core.job.plan import Plan
    from plait.core.runs.evidence import Evidence, Verdict
    from plait.diagnose.measured.compare import Prediction
    from plait.diagnose.measured.importing import Imported
    from plait.diagnose.measured.reading import RecordedRun
    from plait.diagnose.measured.run_files import UniformRun
    from plait.diagnose.report import Report

COMPARED = 64
"""The largest number of ranks that are all compared with the plan; of more, one rank of each
pipeline rank is."""
SHOWN = 16
"""The largest number of ranks of a hang whose states are shown."""
RINGS = 64
"""The largest number of ring buffers of a live run that are read for its ranks' states; each has
megabytes."""


@dataclass(frozen=True)
class HangReport(Shown):
    """The verdict on a run that hangs, with the evidence of its ranks. problems: sentences on ring
    buffers that cannot be read. notes: sentences on other files of the run's folder."""

    verdict: Verdict
    evidence: Sequence[Evidence]
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict, and the state, stack and open calls of every rank as text."""
        from dataclasses import asdict

        over = IgnoredInput()
        over.note("rings that cannot be read", next(iter(self.problems), ""), len(self.problems))
        return {
            "verdict": asdict(self.verdict),
            "evidence": [_plain(one) for one in self.evidence],
            "notes": list(self.notes),
            "passed_over": over.rows(),
        }

    def parts(self) -> Iterator[Part]:
        """Yield the verdict, the chain of waiting ranks, and a line for each rank that the verdict
        concerns."""
        from plait.core.runs.evidence import spoken_ranks

        yield Table(self.verdict.heading)
        yield self.verdict.why
        yield from (f"Besides: {other.why}" for other in self.verdict.also)
        if self.verdict.chain:
            yield ""
            yield Table("Who waits for whom")
        for link in self.verdict.chain:
            on = f" for {spoken_ranks(link.on)}" if link.on else ""
            yield f"{spoken_ranks(link.ranks)}{on}: {link.call}"
        if shown := self._worth_showing():
            yield ""
            rows = [(one.rank, one.host, _state(one), one.doing, one.stack[-1] if one.stack else "") for one in shown]
            yield Table("Their states", ("rank", "host", "state", "doing", "where"), rows)
            if left := len(self.evidence) - len(shown):
                yield f"{left} more with --json"
        yield from (f"note: {note}" for note in self.notes)

    def _worth_showing(self) -> list[Evidence]:
        """Return the ranks that the verdict names, then those in the chain."""
        chain = (rank for link in self.verdict.chain for rank in (*link.on, *link.ranks))
        by_rank = {one.rank: one for one in self.evidence}
        return [by_rank[rank] for rank in list(dict.fromkeys((*self.verdict.ranks, *chain)))[:SHOWN] if rank in by_rank]


def _state(evidence: Evidence) -> str:
    if evidence.state == "ended":
        return "ended" if evidence.status is None else f"ended ({evidence.status})"
    if evidence.state == "runs":
        return {"waits": "waits", "works": "works", "silent": "does not answer", "unknown": "runs"}[evidence.thread]
    return evidence.state if evidence.recorded else "no evidence"


def _plain(evidence: Evidence) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: getattr(evidence, name) for name in evidence.__dataclass_fields__ if name != "calls"
    }
    return values | {"open": [str(call) for call in evidence.calls if not call.over]}


def diagnose_run(folder: Path | str) -> Report | HangReport:
    """Return the report of a run's folder: where step time goes, which ranks are slow, why the run
    hung. For a run that hung before its first step, return the result of ``explain_hang``. Raises
    DataError if nothing was recorded."""
    from dataclasses import replace

    from plait.core.base.errors import DataError
    from plait.core.runs.evidence import FILE
    from plait.diagnose.measured.reading import read_run
    from plait.diagnose.measured.run_files import imported_notes

    folder = Path(folder)
    try:
        run = read_run(folder)
    except DataError as error:
        if not (folder / FILE).exists():
            raise
        said = imported_notes(folder)
        return replace(explain_hang(folder), notes=(*said.notes, *said.over.lines()) if said else (str(error),))
    verdict, notes = hang_of(folder)
    report = report_of(run)
    return replace(report, hang=verdict, notes=(*notes, *report.notes))


def report_of(run: RecordedRun) -> Report:
    """Return the report of a run, compared with its plan's prediction."""
    from plait.diagnose.report import explain

    prediction, notes = _prediction(run.plan, run.uniform) if run.plan else (None, [])
    memory = {
        label: sum(kinds.values()) for label, kinds in (predicted_memory(run.plan, run.metrics) if run.plan else ())
    }
    notes = [*run.notes, *notes]
    return explain(run.recording, str(run.folder), run=run, prediction=prediction, memory=memory, notes=notes)


def predicted_memory(plan: Plan, metrics: Sequence[Mapping[str, Any]] = ()) -> Sequence[tuple[str, Mapping[str, int]]]:
    """Return predicted bytes by kind, for a rank of every stage; empty for a plan that cannot be
    estimated.

    metrics: lines of metrics.jsonl, which record whether ranks computed on GPUs; GPU kernels keep
    less memory.
    """
    from plait.core.base.errors import PlaitError
    from plait.core.cluster.mfu import on_gpu
    from plait.core.step.memory.estimate import estimate

    try:
        estimates = estimate(plan, gpu=on_gpu(metrics)).places
    except PlaitError:
        return ()
    kinds = ("parameters", "gradients", "optimizer", "buffers", "activations")
    return [(f"stage {n}", {kind: getattr(one.memory, kind) for kind in kinds}) for n, one in enumerate(estimates)]


def hang_of(folder: Path) -> tuple[Verdict | None, list[str]]:
    """Return the launcher's verdict on a run that hung, or None; and sentences on a file that
    cannot be read."""
    from plait.core.base.errors import DataError
    from plait.core.runs.evidence import FILE, read_hang

    if not (folder / FILE).exists():
        return None, []
    try:
        verdict = read_hang(folder / FILE)[0]
    except DataError as error:
        return None, [str(error)]
    return (None if verdict.cause == "none" else verdict), []


def explain_hang(folder: Path | str) -> HangReport:
    """Return the cause of a hang of the run in a folder.

    The launcher's verdict is read if there is one. Otherwise evidence is gathered from the ring
    buffers. This also works for a run that goes on, and for ranks started by torchrun or a cluster
    manager. Raises DataError if the folder has neither.
    """
    from plait.core.base.errors import DataError
    from plait.core.runs.evidence import FILE, read_hang
    from plait.core.runs.folder import check_run_folder

    folder = Path(folder)
    check_run_folder(folder)
    if (folder / FILE).exists():
        return HangReport(*read_hang(folder / FILE))
    found = _gathered(folder)
    if not found.evidence:
        why = " ".join(found.problems)
        raise DataError(f"{folder} has no rings: nothing is known of its ranks. Name a run's folder. {why}".strip())
    return found


def live_hang(folder: Path, *, live: bool) -> HangReport | None:
    """Return the launcher's verdict; without one, for a live run, the verdict on its ring buffers,
    if there are at most ``RINGS``. None if nothing is known."""
    from plait.core.runs.evidence import FILE, read_hang
    from plait.core.runs.evidence import RINGS as FOLDER

    if (folder / FILE).exists():
        return HangReport(*read_hang(folder / FILE))
    if not live or not 0 < len(list((folder / FOLDER).glob("rank-*.ring"))) <= RINGS:
        return None
    return _gathered(folder)


def _gathered(folder: Path) -> HangReport:
    """Return the verdict on the present content of the ring buffers. A rank without a ring buffer
    gives no evidence."""
    from plait.diagnose.verdicts.hang import localise
    from plait.launch.hang import gather

    gathered = gather(folder)
    verdict = localise(gathered.evidence, world=len(gathered.evidence), **deadlines_of(folder))
    return HangReport(verdict, gathered.evidence, gathered.problems)


def deadlines_of(folder: Path) -> dict[str, float]:
    """Return deadlines in seconds from the run's plan, or defaults: ``deadline`` of a collective or
    transfer, and ``first`` of work that a rank does for the first time."""
    from plait.core.base.errors import PlaitError
    from plait.core.job.plan import Plan
    from plait.core.job.settings import RunSection

    try:
        job = Plan.read(folder / "plan.json").job
    except PlaitError:
        job = None
    run = job.run if job else RunSection()
    return {"deadline": run.call_deadline, "first": run.first_deadline}


def import_run(files: Sequence[Path], out: Path, warn: Callable[[str], None] = print) -> Imported:
    """Make a run's folder from recordings of other tools, one file per rank. warn: called with
    sentences on files that are skipped. Raises DataError."""
    from plait.diagnose.measured.importing import import_traces

    return import_traces(files, out, warn)


@contextmanager
def as_run(paths: Sequence[Path], warn: Callable[[str], None] = print) -> Generator[Path]:
    """Yield a run's folder: the named one, or a temporary one made from recordings of other tools.
    warn: called with sentences on files that are skipped. Raises DataError for several paths of
    which some are no recordings, and for a folder whose recordings lie in subfolders."""
    from plait.core.base.errors import DataError
    from plait.diagnose.measured.importing import recordings_in

    if len(paths) == 1 and (not paths[0].exists() or _is_run(paths[0])):
        yield paths[0]
        return
    files = recordings_in(paths)
    if not files and len(paths) == 1:
        if inside := [one.name for one in sorted(paths[0].glob("*/")) if _is_run(one) or recordings_in([one])]:
            raise DataError(
                f"{paths[0]} has no recording itself, but its folder(s) {', '.join(inside[:12])} have; name one"
            )
        yield paths[0]
        return
    with TemporaryDirectory(prefix="plait-") as folder:
        out = Path(folder) / "run"
        import_run(files, out, warn)
        try:
            yield out
        except DataError as error:
            raise DataError(str(error).replace(str(out), str(paths[0]))) from None


def _is_run(path: Path) -> bool:
    """Return True for a run's folder, even if a part of it is missing."""
    return path.is_dir() and any((path / name).exists() for name in ("timeline", "plan.json", "rings", "hang.json"))


def page_predictions() -> Callable[[Plan, Sequence[int]], Any]:
    """Return a function that predicts spans of some ranks of a plan, as a polars table; its result
    is None for a plan that cannot be simulated. Each plan is simulated once."""
    from plait.core.base.errors import PlaitError
    from plait.plan.search.simulate import simulate_plan

    simulated: dict[str, Any] = {}

    def predicted(plan: Plan, ranks: Sequence[int]) -> Any:
        if plan.key not in simulated:
            try:
                simulated[plan.key] = simulate_plan(plan)
            except PlaitError:
                simulated[plan.key] = None
        found = simulated[plan.key]
        return found and _spans(plan, found.timeline((1,), list(ranks)))

    return predicted


def _prediction(plan: Plan, steps: UniformRun) -> tuple[Prediction | None, list[str]]:
    """Return the prediction of steps by a plan with measured costs, and sentences on why there is
    no prediction."""
    from plait.core.base.errors import PlaitError
    from plait.diagnose.measured.compare import UNMEASURED, compare_with_plan
    from plait.plan.search.simulate import simulate_plan

    if plan.costs is None:
        return None, [UNMEASURED]
    whole = plan.workload.micro_batch * plan.workload.num_micro_batches * plan.workload.sequence
    if steps.tokens not in (None, whole):
        return None, [f"The plan predicts steps of {whole:,} tokens, and the recorded ones have {steps.tokens:,}."]
    world = plan.layout.world_size
    ranks = None if world <= COMPARED else [rank for mesh in plan.layout.meshes for rank in mesh.ranks[:1]]
    try:
        timeline = simulate_plan(plan).timeline((1,), ranks)
    except PlaitError as error:
        return None, [f"The plan cannot be simulated: {error}"]
    return compare_with_plan(steps.recording, timeline, _spans(plan, timeline)), []


def _spans(plan: Plan, timeline: Any) -> Any:
    """Return a predicted timeline as a table, with the axis of every collective."""
    from plait.diagnose.measured.compare import table_of
    from plait.diagnose.measured.recording import grid_of, with_axes

    pp_rank_of = {op.stage: pp_rank for pp_rank, ops in enumerate(plan.schedule.ranks) for op in ops}
    return with_axes(table_of(timeline), grid_of(plan.layout), plan.shardings, pp_rank_of)
