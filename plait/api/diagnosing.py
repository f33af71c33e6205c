"""Explaining a run: its report beside what its plan predicts, why it hangs, its timeline beside another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from plait.core.base.passed_over import PassedOver
from plait.core.base.text import Part, Shown, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plait.core.job.plan import Plan
    from plait.core.runs.evidence import Evidence, Verdict
    from plait.diagnose.alike import Alike
    from plait.diagnose.compare import Prediction
    from plait.diagnose.importing import Imported
    from plait.diagnose.reading import RecordedRun
    from plait.diagnose.report import Report

COMPARED = 64
"""Ranks that are compared with the plan."""
SHOWN = 16
"""Ranks of a hang whose states are shown."""
RINGS = 64
"""Rings of a live run that are read to say what its ranks do, at most: each has megabytes."""


@dataclass(frozen=True)
class HangReport(Shown):
    """Verdict on a run that hangs, with the evidence of its ranks. problems: sentences on rings that cannot
    be read. notes: sentences on the rest of its folder."""

    verdict: Verdict
    evidence: Sequence[Evidence]
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """The verdict, and of every rank its state, stack and open calls as text."""
        from dataclasses import asdict

        over = PassedOver()
        over.note("rings that cannot be read", next(iter(self.problems), ""), len(self.problems))
        return {
            "verdict": asdict(self.verdict),
            "evidence": [_plain(one) for one in self.evidence],
            "notes": list(self.notes),
            "passed_over": over.rows(),
        }

    def parts(self) -> Iterator[Part]:
        """The verdict, the chain of ranks that wait, and a line for each rank that matters."""
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
        """Ranks that are named, then those in the chain."""
        chain = (rank for link in self.verdict.chain for rank in (*link.on, *link.ranks))
        by_rank = {one.rank: one for one in self.evidence}
        return [by_rank[rank] for rank in list(dict.fromkeys((*self.verdict.ranks, *chain)))[:SHOWN] if rank in by_rank]


def _state(one: Evidence) -> str:
    if one.state == "ended":
        return "ended" if one.status is None else f"ended ({one.status})"
    if one.state == "runs":
        return {"waits": "waits", "works": "works", "silent": "does not answer", "unknown": "runs"}[one.thread]
    return one.state if one.recorded else "no evidence"


def _plain(one: Evidence) -> dict[str, Any]:
    values: dict[str, Any] = {name: getattr(one, name) for name in one.__dataclass_fields__ if name != "calls"}
    return values | {"open": [str(call) for call in one.calls if not call.over]}


def diagnose_run(folder: Path | str) -> Report | HangReport:
    """The report of a run's folder: where steps go, which ranks are slow, why it hung. Of a run that hung
    before its first step it is what ``explain_hang`` finds. Raises DataError if nothing was recorded."""
    from dataclasses import replace

    from plait.core.base.errors import DataError
    from plait.core.runs.evidence import FILE
    from plait.diagnose.imported import imported_notes
    from plait.diagnose.reading import read_run

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


def explain_trace(traces: Sequence[Path], meta: Path | None) -> Report:
    """The report of an operation trace (``.parquet``). meta: the file (YAML) of its degrees of parallelism.
    Raises JobError and DataError."""
    from plait.core.base.errors import JobError
    from plait.diagnose.explain import explain
    from plait.diagnose.operations import read_meta, read_operations

    trace = traces[0]
    if len(traces) > 1:
        raise JobError(f"{len(traces)} files are named", file=str(trace), fix="Name one operation trace")
    if meta is None:
        raise JobError(
            "a trace does not tell its degrees of parallelism", file=str(trace), fix="Name its meta file with --meta"
        )
    return explain(read_operations(trace, read_meta(meta)), str(trace))


def report_of(run: RecordedRun) -> Report:
    """The report of a run that was read, beside what its plan predicts."""
    from plait.core.runs.memory_peaks import PROCESS, peaks_of
    from plait.diagnose.explain import explain

    prediction, notes = _prediction(run.plan, run.alike) if run.plan else (None, [])
    memory = {}
    if run.plan and (peaks_of(run.metrics) or peaks_of(run.metrics, PROCESS)):
        memory = {place: sum(kinds.values()) for place, kinds in predicted_memory(run.plan, run.metrics)}
    notes = [*run.notes, *notes]
    return explain(run.recording, str(run.folder), run=run, prediction=prediction, memory=memory, notes=notes)


def predicted_memory(plan: Plan, metrics: Sequence[Mapping[str, Any]] = ()) -> Sequence[tuple[str, Mapping[str, int]]]:
    """Predicted bytes of a rank of every stage, by kind; nothing for a plan that cannot be estimated.

    metrics: lines of metrics.jsonl, which say whether ranks computed on GPUs, whose kernels keep less.
    """
    from plait.core.base.errors import PlaitError
    from plait.core.cluster.mfu import on_gpu
    from plait.core.step.memory.estimate import estimate

    try:
        places = estimate(plan, gpu=on_gpu(metrics)).places
    except PlaitError:
        return ()
    kinds = ("parameters", "gradients", "optimizer", "buffers", "activations")
    return [(f"stage {n}", {kind: getattr(one.memory, kind) for kind in kinds}) for n, one in enumerate(places)]


def hang_of(folder: Path) -> tuple[Verdict | None, list[str]]:
    """The verdict of a launcher on a run that hung, or None; and sentences on a file that cannot be
    read."""
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
    """Find out why the run in a folder hangs, or hung.

    The verdict of the launcher is read again. Without one, evidence is gathered from the rings, also of a run
    that goes on, or whose ranks were started by torchrun or a cluster's manager. Raises DataError.
    """
    from plait.core.base.errors import DataError
    from plait.core.runs.evidence import FILE, read_hang

    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder} is no run's folder.")
    if (folder / FILE).exists():
        return HangReport(*read_hang(folder / FILE))
    found = _gathered(folder)
    if not found.evidence:
        raise DataError(f"{folder} has no rings: nothing is known of its ranks. {' '.join(found.problems)}".strip())
    return found


def live_hang(folder: Path, *, live: bool) -> HangReport | None:
    """The verdict of the launcher; of a live run what its rings say, if they are not too many to read often.
    None where nothing is known."""
    from plait.core.runs.evidence import FILE, read_hang
    from plait.core.runs.ring_calls import RINGS as FOLDER

    if (folder / FILE).exists():
        return HangReport(*read_hang(folder / FILE))
    if not live or not 0 < len(list((folder / FOLDER).glob("rank-*.ring"))) <= RINGS:
        return None
    return _gathered(folder)


def _gathered(folder: Path) -> HangReport:
    """The verdict on what rings tell now. A rank without a ring tells nothing."""
    from plait.diagnose.hang import localise
    from plait.launch.gather import gather

    gathered = gather(folder)
    verdict = localise(gathered.evidence, world=len(gathered.evidence), **deadlines_of(folder))
    return HangReport(verdict, gathered.evidence, gathered.problems)


def deadlines_of(folder: Path) -> dict[str, float]:
    """Seconds that a call may take, later and the first time, by the run's plan; defaults without one."""
    from plait.core.base.errors import PlaitError
    from plait.core.job.plan import Plan
    from plait.core.job.settings import RunSection

    try:
        job = Plan.read(folder / "plan.json").job
    except PlaitError:
        job = None
    run = job.run if job else RunSection()
    return {"deadline": run.call_deadline, "first": run.first_deadline}


def import_run(files: Sequence[Path], out: Path, said: Callable[[str], None] = print) -> Imported:
    """Make a run's folder of other tools' recordings, one file a rank. said: takes sentences on files that
    are skipped. Raises DataError."""
    from plait.diagnose.importing import import_traces

    return import_traces(files, out, said)


@contextmanager
def as_run(paths: Sequence[Path], said: Callable[[str], None] = print) -> Iterator[Path]:
    """A run's folder: the one that is named, or one made of other tools' recordings while the block runs.
    said: takes sentences on files that are skipped. Raises DataError for several paths of which some are no
    recordings."""
    from plait.core.base.errors import DataError
    from plait.diagnose.importing import recordings_in

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
        import_run(files, out, said)
        yield out


def _is_run(path: Path) -> bool:
    """True for a run's folder, also where a part of it is missing."""
    return path.is_dir() and any((path / name).exists() for name in ("timeline", "plan.json", "rings", "hang.json"))


def page_predictions() -> Callable[[Plan, Sequence[int]], Any]:
    """A function that gives the predicted spans of some ranks of a plan (a polars table), or None for a plan
    that cannot be simulated. It simulates each plan once."""
    from plait.core.base.errors import PlaitError
    from plait.plan.simulate import simulate_plan

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


def _prediction(plan: Plan, steps: Alike) -> tuple[Prediction | None, list[str]]:
    """Prediction of steps by a plan of measured costs; and sentences on a plan that predicts nothing of
    them."""
    from plait.core.base.errors import PlaitError
    from plait.diagnose.compare import UNMEASURED, against
    from plait.plan.simulate import simulate_plan

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
    return against(steps.recording, timeline, _spans(plan, timeline)), []


def _spans(plan: Plan, timeline: Any) -> Any:
    """A predicted timeline in columns, with the axis of every collective."""
    from plait.diagnose.compare import table_of
    from plait.diagnose.recording import grid_of, with_axes

    places = {op.stage: place for place, ops in enumerate(plan.schedule.ranks) for op in ops}
    return with_axes(table_of(timeline), grid_of(plan.layout), plan.shardings, places)
