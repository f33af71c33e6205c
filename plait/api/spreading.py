"""Costs of spreading groups of ranks over minipods: measured collectives, and a job's step times by
placement."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base import programs
from plait.core.base.errors import JobError
from plait.core.base.files import explained
from plait.core.base.text import Column, Part, Shown, Table

if TYPE_CHECKING:
    from plait.api.places.base import LaunchTarget
    from plait.api.placing import PlacementRequest
    from plait.core.cluster.network import Order, PlacedJob, PlacementProfile, Steps

TIMEOUT = 600.0
"""Seconds that a rank may be silent."""
WARM = 2
"""The number of a timed run's first steps that do not count."""
FEWEST_STEPS = WARM + 3
MOST_DRAWN = 64
"""The largest number of random orders that are tried for an order that keeps neither kind of group
together."""


ORDER_LABELS = {"dp": "DP groups in minipods", "pp": "PP groups in minipods", "random": "random"}


@dataclass(frozen=True)
class SpreadAnswer(Shown):
    """Measured costs of spreading groups of ranks over minipods."""

    profile: PlacementProfile

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as in its file."""
        return json.loads(self.profile.to_json())

    def parts(self) -> Iterator[Part]:
        """Yield tables of collectives by spread, of two concurrent jobs, and of a job's steps by
        placement."""
        found, machine = self.profile, self.profile.machine
        pods = machine.ranks // machine.ranks_per_node // found.nodes_per_minipod
        header = (
            "collective", "ranks", "minipods", Column("us at 4 KiB", ".0f"), Column("MiB", ".3g"), Column("ms", ".3g"),
            Column("MB/s", ".4g"), Column("90 % from MiB", ".3g"),
        )  # fmt: skip
        rows = [
            (one.kind, one.group.ranks, one.group.minipods, one.latency * 1e6, one.points[-1].bytes / 2**20,
             one.points[-1].seconds * 1e3, one.bandwidth / 1e6, one.saturation_bytes / 2**20)
            for one in sorted(found.collectives, key=lambda one: (one.kind, one.group.ranks, one.group.minipods))
        ]  # fmt: skip
        title = f"{machine.name}: {machine.ranks} ranks in {pods} minipods, {machine.backend}, {found.date}"
        yield Table(title, header, rows)
        if found.interference:
            yield ""
            header = (
                "two jobs side by side", "minipods", Column("MiB", ".3g"), Column("ms alone", ".3g"),
                Column("both", ".3g"), "takes",
            )  # fmt: skip
            rows = [
                (one.kind, one.group.minipods, one.bytes / 2**20, one.alone * 1e3, one.together * 1e3,
                 f"{one.slowdown:.2f}x")
                for one in found.interference
            ]  # fmt: skip
            yield Table("", header, rows)
        if job := found.job:
            yield ""
            name = f"steps of {job.name}"[:30]
            header = (name, "dp over", "pp over", Column("s", ".3g"), Column("gain", "+.1%", none=""))
            rows = [
                (ORDER_LABELS[one.order], one.dp_spread, one.pp_spread, statistics.median(one.seconds),
                 None if one.order == "random" else job.gain(one.order))
                for one in job.steps
            ]  # fmt: skip
            yield Table("", header, rows)
        yield ""

    def draw(self, file: Path) -> None:
        """Draw bandwidth by size: a panel for each kind of collective, a line for each group size
        and spread."""
        from plait.api.pictures import draw_curves
        from plait.core.base.pictures import PlotCurve
        from plait.core.cluster.profile import wire_share

        panels: dict[str, list[PlotCurve]] = {}
        for one in self.profile.collectives:
            name = f"{one.group.ranks} ranks in {one.group.minipods} minipod{'s' * (one.group.minipods > 1)}"
            share = wire_share(one.kind, one.group.ranks)
            points = [(log2(p.bytes), p.bytes * share / p.seconds / 1e6) for p in one.points]
            panels.setdefault(f"{one.kind}, MB/s", []).append(PlotCurve(name, points))
        title = f"Collectives by spread: {self.profile.machine.name}"
        draw_curves(list(panels.items()), file, title=title, x_label="log2 of bytes")

    def with_job(self, job: PlacedJob) -> SpreadAnswer:
        """Return this answer with a job's step times by placement added."""
        return SpreadAnswer(self.profile.model_copy(update={"job": job}))

    @property
    def own_affinity(self) -> Path | None:
        """The user's own file of profiled jobs, if the measurements give a row of it; else None."""
        from plait.core.cluster.network import affinity_row
        from plait.place.solve.affinity import own_rows

        try:
            affinity_row(self.profile)
        except JobError:
            return None
        return own_rows()

    def append_affinity(self, file: Path) -> None:
        """Append the job's row to a file of profiled jobs. Raises JobError if no job was measured,
        LaunchError if the file cannot be written."""
        from plait.core.cluster.network import affinity_row

        row = affinity_row(self.profile)
        with explained(f"{file} cannot be written", fix="Choose another with --affinity"):
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as end:
                end.write(row)

    def write_network(self, file: Path) -> None:
        """Write the costs of spreading as a file for ``place.network``. Raises LaunchError."""
        from plait.core.cluster.network import network_file

        with explained(f"{file} cannot be written", fix="Choose another with --network"):
            file.write_text(network_file(self.profile))


def profile_spread(
    out: Path, place: LaunchTarget, nodes_per_minipod: int, ranks: int | None, seconds: float, *, quiet: bool
) -> SpreadAnswer | int:
    """Measure collectives of groups that lie in one or several minipods, with ranks that write to
    ``out``; return the costs, or the exit status if ranks fail. ranks: their number, if the launch
    target does not fix it. seconds: longest duration. Raises JobError."""
    from plait.api.ranks import RankSet
    from plait.core.cluster.network import PlacementProfile

    if not 5 <= seconds < 1e6:
        raise JobError(f"{seconds:g} is not allowed", key="seconds", fix="Allowed: at least 5")
    world = place.world_size or ranks
    if world is None:
        raise JobError("does not fix the number of ranks", key="--on", fix="Set world_size=N")
    pod = nodes_per_minipod or (place.lab.hosts // place.lab.pods if place.lab else 0)
    if place.lab and (place.lab.hosts == pod or pod < 1 or place.lab.hosts % pod):
        fix = "Use several minipods, such as lab:4x1@1gbit,2pods@300mbit"
        raise JobError(f"is not divided into several minipods of {pod} hosts", key="--on", fix=fix)
    arguments = ["--placement", "--out", str(out.absolute()), "--seconds", str(seconds)]
    arguments += ["--nodes-per-minipod", str(pod), *(["--quiet"] if quiet else [])]
    logs = out.with_name(f"{out.name}.logs")
    with explained(f"{logs} cannot be made", fix="Choose another with --out"):
        logs.mkdir(parents=True, exist_ok=True)
    status = place.run(RankSet(module=programs.PROFILER, arguments=arguments, world=world, logs=logs, timeout=TIMEOUT))
    if status:
        return status
    shutil.rmtree(logs, ignore_errors=True)
    return SpreadAnswer(PlacementProfile.read(out))


def time_by_placement(
    file: Path, on: str, topology: str, *, rounds: int, seed: int, report: Callable[[str], None] | None = None
) -> PlacedJob:
    """Return the job's step times with DP groups in minipods, with PP groups in minipods, and with
    neither; the orders take turns. report: called with a line before each run. Raises JobError and
    the errors of a run."""
    from plait.api.placing import plan_of, volumes_of
    from plait.core.cluster.network import PlacedJob
    from plait.core.job.communication import CommunicationMatrix

    plan, _, _, _ = plan_of(file, [])
    if plan.job is None or plan.job.train.steps < FEWEST_STEPS:
        fix = f"Use at least {FEWEST_STEPS}"
        raise JobError("are too few steps to time", file=str(file), key="train.steps", fix=fix)
    orders, each = _orders(file, topology or on, seed)
    matrix = CommunicationMatrix.of(plan, ranks_per_node=each, volumes=volumes_of(plan))
    taken: dict[str, list[float]] = {one.order: [] for one in orders}
    for number in range(rounds):
        shift = number % len(orders)
        for one in (*orders[shift:], *orders[:shift]):
            if report:
                report(f"round {number + 1} of {rounds}: {file.stem} in order {one.order}")
            taken[one.order].append(_run(file, on, one.hosts, each))
    mean = matrix.mean
    return PlacedJob(
        name=plan.job.run.name or file.stem, micro_batch=matrix.micro_batch,
        weights=mean.weights, dp=mean.dp + mean.ep, pp=mean.pp,
        steps=tuple(one.model_copy(update={"seconds": tuple(taken[one.order])}) for one in orders),
    )  # fmt: skip


def _orders(file: Path, topology: str, seed: int) -> tuple[list[Steps], int]:
    """Return (the orders of nodes that are compared, ranks per node). Aligned orders are computed
    by ``plait place`` at alpha 1 and 0. The random order is the first draw that spreads both kinds
    of groups; the last draw if none does."""
    import random

    from plait.api.placing import PlacementRequest, place_job
    from plait.core.cluster.network import Steps

    found: list[Steps] = []
    kept: tuple[tuple[str, ...], int] = ((), 1)
    asked: PlacementRequest | None = None
    aligned: tuple[tuple[Order, float], ...] = (("dp", 1.0), ("pp", 0.0))
    for order, alpha in aligned:
        asked = PlacementRequest(job=file, topology=topology, overrides=[f"place.alpha={alpha}"])
        one = place_job(asked).placement
        kept = one.hosts, one.ranks_per_node
        found.append(
            Steps(order=order, hosts=one.hosts, dp_spread=one.column_spread, pp_spread=one.row_spread, seconds=(1.0,))
        )
    assert asked is not None
    best = [min(getattr(one, key) for one in found) for key in ("dp_spread", "pp_spread")]
    chance, hosts = random.Random(seed), list(kept[0])
    drawn: Steps | None = None
    for _ in range(MOST_DRAWN):
        chance.shuffle(hosts)
        spreads = _spreads(asked, hosts)
        drawn = Steps(order="random", hosts=tuple(hosts), dp_spread=spreads[0], pp_spread=spreads[1], seconds=(1.0,))
        if spreads[0] > best[0] and spreads[1] > best[1]:
            break
    assert drawn is not None
    return [*found, drawn], kept[1]


def _spreads(request: PlacementRequest, hosts: Sequence[str]) -> tuple[int, int]:
    """Return (minipods of the most spread DP group, of the most spread PP group). hosts: by node
    rank."""
    from plait.core.job.communication import columns_of, rows_of

    heights, block = request.problem.heights, request.problem.nodes_per_cell
    pods = [request.spots[host].minipod for host in hosts]
    cells = [pods[at : at + block] for at in range(0, len(pods), block)]
    dp, pp = (
        max(len({pod for cell in group for pod in cells[cell]}) for group in groups)
        for groups in (columns_of(heights), rows_of(heights))
    )
    return dp, pp


def _run(file: Path, on: str, hosts: Sequence[str], each: int) -> float:
    """Train a job with this order of nodes; return the median seconds per step. each: ranks per
    node. Raises LaunchError if the run fails."""
    from plait.api.places import place_of, with_table
    from plait.api.planning import without_batch_rampup
    from plait.api.training import prepare, run_plan
    from plait.core.base.errors import LaunchError
    from plait.core.topology.rank_table import RankTable
    from plait.plan.calibrate.recorded import read_seconds

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        RankTable(tuple(hosts), each).write(Path(name) / "table.json")
        place = with_table(place_of(on), Path(name) / "table.json")
        settings = [f"run.folder={name}", "run.name=run", "train.checkpoint_every=0", "train.eval_every=0"]
        plan = without_batch_rampup(prepare(file, settings, place, check_memory=False).plan)
        status = run_plan(plan, folder, place, silent=True)
        if status:
            logs = " ".join(one.read_text()[-1000:] for one in sorted((folder / "logs").glob("*"))[:1])
            raise LaunchError(f"a run of {file} ended with status {status}. {logs}")
        return statistics.median(read_seconds(folder)[WARM:])
