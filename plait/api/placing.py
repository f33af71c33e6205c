"""Placing: reads and checks a job, a topology and weights, and finds placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from plait.api.placement_answer import PlacedAnswer, placement_file
from plait.core.base.codec.json_text import read_table
from plait.core.base.codec.toml_text import COMMAND_LINE
from plait.core.base.errors import JobError, PlacementError, nearest
from plait.core.base.files import reason_of
from plait.core.cluster.network import Network
from plait.core.job.cluster_settings import PlaceSection
from plait.core.job.communication import CommunicationMatrix, Volume
from plait.core.job.plan import Plan
from plait.core.topology.hostlist import expand
from plait.core.topology.placement import Placement
from plait.core.topology.rank_table import RankTable
from plait.core.topology.switches import Topology
from plait.place.placing import (
    NodeFilter,
    check_available,
    gpus_per_node,
    has_enough_gpus,
    place,
    pools_of,
    remarks_on,
    spots_of,
    types_of,
)
from plait.place.repair import Repair, Spot, from_table, repair
from plait.place.solve.affinity import affinity_of, known_profiled, read_profiled
from plait.place.solve.bounds import lower_bound
from plait.place.solve.problem import Pool, Problem, Spares
from plait.place.topologies import Remarks


@dataclass(kw_only=True)
class PlacementRequest:
    """A job to place; ``read`` makes the placement problem. job: a job file, or a plan. topology:
    the cluster's switches, a file of them, or another source that ``plait topology`` reads.
    overrides: ``SECTION.KEY=VALUE``; for a plan only those of [place]. alpha: the weight of DP
    groups' spread; affinity_reason: its reason."""

    job: Path | Plan
    topology: str | Topology
    overrides: Sequence[str] = ()
    settings: PlaceSection = field(default_factory=PlaceSection)
    """The settings of the job's table ``[place]``; known after ``read``."""
    alpha: float = 0.0
    affinity_reason: str = ""
    problem: Problem = field(init=False)
    cluster_topology: Topology = field(init=False)
    spots: dict[str, Spot] = field(init=False)
    remarks: Remarks = field(init=False)
    """Remarks on the topology, and on its nodes that are not used; known after ``read``."""
    ranks_per_node: int = 0
    """Ranks per node."""
    planned_cluster: tuple[Plan, float | None, str, int] | None = None
    """The result of ``plan_of`` for ``job``: plan, rate of its links, device, ranks per node; None
    until it is known."""

    def read(self) -> None:
        """Read job, topology and weights. Raises JobError or PlacementError that names the invalid
        input."""
        try:
            self._read()
        except JobError as error:
            if error.file or not (error.key or "").startswith("place."):
                raise
            typed = any(one.partition("=")[0].strip() == error.key for one in self.overrides)
            raise error.in_file(COMMAND_LINE if typed else str(self.job)) from None

    def _read(self) -> None:
        self.planned_cluster = self.planned_cluster or plan_of(self.job, self.overrides)
        plan, rate, device, each = self.planned_cluster
        self.settings = asked = (plan.job.place if plan.job else PlaceSection()).changed(self.overrides)
        self.cluster_topology, self.remarks = self._read_topology()
        self.spots = spots_of(self.cluster_topology, asked.level or None)
        gpus = asked.gpu
        _check_types(self.cluster_topology, [one.rpartition("=")[2] for one in gpus])
        kind = next((one for one in gpus if "=" not in one), "")
        self.ranks_per_node = each = asked.gpus_per_node or gpus_per_node(self.cluster_topology, kind) or each
        if each < 1:
            counts = sorted({node.hardware.gpus for node in self.cluster_topology.nodes if node.hardware.gpus})
            problem = "neither the plan's cluster nor the topology says how many GPUs a node has"
            if counts:
                problem = f"nodes have {', '.join(map(str, counts))} GPUs, and the plan does not say which it is for"
            raise JobError(problem, key="place.gpus_per_node", fix="Set place.gpus_per_node")
        self.remarks.over.add(remarks_on(self.cluster_topology, each))
        matrix = CommunicationMatrix.of(plan, ranks_per_node=each, volumes=volumes_of(plan))
        if asked.alpha is None:
            jobs = known_profiled() if asked.affinity == "auto" else read_profiled(Path(asked.affinity))
            gpu = kind or next(iter(types_of(self.cluster_topology)), "") or device
            found = affinity_of(matrix, jobs, gpu, asked.distance)
            self.alpha, self.affinity_reason = found.alpha, found.why
        else:
            self.alpha = asked.alpha
        stages = len(matrix.heights)
        self.problem = Problem.of(
            matrix, self._pools(kind), alpha=self.alpha, by=asked.by, keep_together=asked.unit,
            spares=_spares(asked.spares),
            price=asked.preempt, forbidden=self._forbidden(stages), gpus=self._gpus(stages), limit=asked.limit,
            network=self._network(rate), plan=plan.key, topology=self.cluster_topology.key,
        )  # fmt: skip

    def _read_topology(self) -> tuple[Topology, Remarks]:
        from plait.api.topologies import read_topology

        asked = self.settings
        if isinstance(self.topology, Topology):
            return self.topology, Remarks()
        if not (given := self.topology or asked.topology):
            raise JobError("no topology is given", key="--topology", fix="Give the file of the cluster's switches")
        return read_topology(given, form=asked.format, states=asked.states, tolerated=asked.tolerate)

    def _node_filter(self, gpu: str) -> NodeFilter:
        asked = self.settings
        return NodeFilter(
            avoid=frozenset(names_of(asked.avoid, "place.avoid")),
            gpu=gpu,
            mixed=any("=" in one for one in asked.gpu),
            preempt=asked.preempt is not None,
            level=asked.level or None,
            gpus=self.ranks_per_node,
        )

    def _pools(self, gpu: str) -> tuple[Pool, ...]:
        return pools_of(self.cluster_topology, self._node_filter(gpu))

    def _gpus(self, stages: int) -> tuple[str, ...]:
        """Return the GPU type of each pipeline stage; empty if the stages have no types of their
        own. Raises JobError for a type that no node has."""
        found = [""] * stages
        for one in self.settings.gpu:
            stage, _, kind = one.rpartition("=")
            if stage:
                found[_stage(stage, stages, "place.gpu")] = kind
        return tuple(found) if any(found) else ()

    def _forbidden(self, stages: int) -> frozenset[tuple[int, str]]:
        known, found = {spot.minipod for spot in self.spots.values()}, set[tuple[int, str]]()
        for one in self.settings.forbid:
            stage, _, minipod = one.partition(":")
            if minipod not in known:
                raise JobError(f"no minipod '{minipod}' in the topology", key="place.forbid", fix="Write STAGE:MINIPOD")
            found.add((_stage(stage, stages, "place.forbid"), minipod))
        return frozenset(found)

    def solve(self) -> Placement:
        """Return the placement by the chosen method. If the topology has several types of GPU and
        none is named, the best type is used."""
        types = types_of(self.cluster_topology)
        if self.settings.gpu or len(types) < 2:
            return self._best(self.problem)
        found: list[Placement] = []
        refused: PlacementError | None = None
        for kind in types:
            try:
                found.append(self._best(replace(self.problem, pools=self._pools(kind))))
            except PlacementError as error:
                refused = refused or error
        if not found:
            assert refused is not None
            raise PlacementError(f"On one type of GPU alone ({', '.join(types)}): {refused}")
        return min(found, key=lambda one: one.score)

    def _best(self, problem: Problem) -> Placement:
        """Return the best placement of a problem by the chosen method; nodes of an expert-parallel
        group stay in one minipod if that costs nothing. Raises PlacementError if there is none."""
        apart, together = place(problem, self.settings.method), problem.together
        if together is None:
            return apart
        bound = lower_bound(replace(problem, expert_cells=1))
        try:
            whole = place(together, self.settings.method)
        except PlacementError:  # minipods have too few free nodes in such blocks
            return replace(apart, bound=bound)
        return replace(whole if whole.score <= apart.score + 1e-9 else apart, bound=bound)

    def answer(self, placement: Placement, repaired: Repair | None = None) -> PlacedAnswer:
        """Return a placement of this job as an answer to show."""
        return PlacedAnswer(
            placement=placement, problem=self.problem, affinity_reason=self.affinity_reason, repaired=repaired,
            spots=self.spots, remarks=self.remarks,
        )  # fmt: skip

    def repair_placement(self, old_file: Path, down: Sequence[str]) -> PlacedAnswer:
        """Return the placement in the file ``old_file``, repaired to avoid nodes that are down.
        Raises JobError for unknown nodes, PlacementError if none is down."""
        before = self._earlier(old_file)
        unknown = [name for name in down if name not in self.spots and name not in (*before.hosts, *before.spares)]
        if unknown:
            raise JobError(
                f"no node '{unknown[0]}' in the topology or the placement", key="--down", fix="Correct the name"
            )
        lost = (
            one.name
            for one in self.cluster_topology.nodes
            if one.state.status == "down" or not has_enough_gpus(one, self.ranks_per_node)
        )
        broken = {*lost, *down}
        failed = sorted(broken.intersection((*before.hosts, *before.spares)))
        if not failed:
            raise PlacementError(f"No node of {old_file} is down. Name those that failed with --down.")
        self.own_hosts = (*before.hosts, *before.spares)
        together = self.problem.together
        if together and before.nodes_per_cell == together.nodes_per_cell:
            self.problem = together
        found = repair(self.problem, before, down=failed, where=self.spots, move_price=self.settings.move_price)
        return self.answer(found.placement, found)

    own_hosts: Sequence[str] = ()
    """Names of hosts that the job already has, which count as free."""

    def _earlier(self, old_file: Path) -> Placement:
        try:
            whole = "heights" in read_table(old_file)
        except (OSError, ValueError) as error:
            raise PlacementError(
                f"{old_file}: cannot be read as a rank table ({reason_of(error)}). Name one that plait place wrote."
            ) from None
        if whole:
            return Placement.read(old_file)
        table = RankTable.read(old_file)
        kept = placement_file(old_file)
        if kept.is_file() and (placement := Placement.read(kept)).hosts == table.hosts:
            return placement
        return from_table(self.problem, table, self.spots)

    def check_again(self, placement: Placement) -> None:
        """Raise PlacementError if the cluster has changed since it was read, in a way that matters.
        A pipe cannot be read again and is not checked."""
        if isinstance(self.topology, Topology) or any(map(_is_pipe, (self.topology, *self.settings.states))):
            return
        try:
            now, _ = self._read_topology()
        except JobError as error:
            changed = "It could be read when the job was placed: it has changed since. Nothing was written."
            raise PlacementError(f"{error} {changed}") from None
        if now.key != placement.topology:
            check_available(placement, now, self.own_hosts)

    def draw(self, placement: Placement, file: Path) -> None:
        """Draw the cluster, with a colour for every DP group."""
        from plait.api.pictures import draw_topology

        groups = {host: f"stage {at}" for host, at in zip(placement.hosts, placement.stages, strict=True)}
        title = f"PP groups in {placement.row_spread} minipods at most, DP groups in {placement.column_spread}"
        draw_topology(self.cluster_topology, file, groups=groups, level=self.settings.level or None, title=title)

    def draw_pairs(self, placement: Placement, file: Path) -> float:
        """Draw the bytes that ranks send each other in a step into a file; return the share of
        pairs that send nothing. Raises JobError for a model with experts, whose bytes are counted
        only by group."""
        from plait.api.pictures import draw_pairs
        from plait.plan.search.volumes import pairs_of

        assert self.planned_cluster
        plan = self.planned_cluster[0]
        found = pairs_of(plan)
        name = plan.job.run.name if plan.job else ""
        draw_pairs(found, file, pods=placement.minipods, ranks_per_node=placement.ranks_per_node, title=name or "job")
        return found.silent

    def _network(self, rate: float | None) -> Network:
        """Return the network between minipods, with conflicts of hashed flows if ``place.flows`` is
        set."""
        file, flows = self.settings.network, self.settings.flows
        network = Network.read(Path(file) if file else None, rate=None if file else rate)
        free = next((node.name for node in self.cluster_topology.nodes if node.state.status == "free"), None)
        if not flows or free is None:
            return network
        from plait.place.ecmp import RailFabric, conflict_factor

        return replace(
            network, conflicts=network.conflicts * conflict_factor(RailFabric.of(self.cluster_topology, free), flows)
        )


def place_job(request: PlacementRequest) -> PlacedAnswer:
    """Return the host of every rank of a job, and a bound on how much better any other placement
    could be. Raises JobError and PlacementError."""
    request.read()
    return request.answer(request.solve())


def write_placement(request: PlacementRequest, answer: PlacedAnswer, table: Path, picture: Path | None = None) -> None:
    """Draw a placement, check the cluster once more, write the placement and the rank table next to
    it.

    The rank table is written last, when nothing else can fail, because ranks obey it. Raises
    PlacementError for a cluster that has changed meanwhile, LaunchError for files that cannot be
    written.
    """
    from plait.core.base.files import explained

    request.check_again(answer.placement)
    if picture:
        with explained(f"{picture} cannot be written", fix="Choose another with --draw"):
            request.draw(answer.placement, picture)
        request.check_again(answer.placement)
    answer.write(table)


def _read_plan(file: Path) -> Plan:
    from plait.api.choices import reading_job

    with reading_job(file):
        return Plan.read(file)


def plan_of(file: Path | Plan, overrides: Sequence[str]) -> tuple[Plan, float | None, str, int]:
    """Return the plan, read or made, and three facts of its cluster: bytes per second of a rank's
    outermost link, the device, and ranks per node (0 if unknown). file: a plan, or the file of a
    plan or job."""
    from plait.api.choices import close_job, cluster_of, reading_job
    from plait.core.job.spec import Job

    if isinstance(file, Plan) or file.suffix == ".json":
        if others := [one for one in overrides if not one.startswith("place.")]:
            raise JobError(f"'{others[0]}' would change the plan", file=str(file), fix="Plan the job again")
        plan = file if isinstance(file, Plan) else _read_plan(file)
        if plan.job is None or (plan.job.cluster.file is None and plan.job.cluster.preset == "here"):
            return plan, None, "", 0
        cluster = cluster_of(plan.job, None)
    else:
        from plait.plan.answer import Planner
        from plait.train.data.tokenizer import load_tokenizer

        with reading_job(file):
            job = Job.read(file, list(overrides)).named(file.stem)
        vocab = load_tokenizer(job.data.tokenizer).vocab
        job, _ = close_job(job, vocab, None)
        if job.cluster.ranks not in (0, job.world_size):
            problem = f"{job.cluster.ranks} are not the {job.world_size} ranks of the strategy"
            raise JobError(problem, key="cluster.ranks", fix="Leave it out, or leave a degree of the strategy out")
        cluster = cluster_of(job, None)
        plan = Planner(job, cluster, vocab).plan(job)
        if job.cluster.file is None and job.cluster.preset == "here":
            return plan, None, "", 0
    return plan, cluster.tiers[-1].rate.value, cluster.device.name, cluster.ranks_per_node


def volumes_of(plan: Plan) -> tuple[Volume, ...]:
    """Return, for each pipeline rank, the bytes that a rank sends in a step along dp and pp and
    between experts, as the planner counts them."""
    from plait.plan.search.volumes import expert_volume

    ep = plan.job.strategy.ep if plan.job else 1
    return tuple(expert_volume(plan, pp_rank, ep) for pp_rank in range(len(plan.layout.degrees)))


def _is_pipe(path: str) -> bool:
    """Return True for a pipe, which can be read only once."""
    return path == "-" or (Path(path).exists() and not Path(path).is_file())


def _check_types(tree: Topology, requested: Sequence[str]) -> None:
    """Raise JobError for a type of GPU that no node has."""
    there = sorted({node.hardware.device for node in tree.nodes} - {""})
    for kind in requested:
        if kind.lower() not in map(str.lower, there):
            problem = f"no node has GPUs of type '{kind}'{nearest(kind, there)}"
            fix = f"Types there are: {', '.join(there)}" if there else "The topology names no types: leave it out"
            raise JobError(problem, key="place.gpu", fix=fix)


def _spares(setting: str | int) -> Spares:
    number, _, where = str(setting).partition("/")
    return Spares(**{{"": "total", "minipod": "per_minipod", "row": "per_row"}[where]: int(number)})


def names_of(text: str, key: str) -> list[str]:
    """Return the names of a host list. Raises JobError that names ``key``, a key or option, for
    invalid text."""
    try:
        return expand(text) if text else []
    except ValueError as error:
        raise JobError(str(error), key=key, fix="Write names as in n3,leaf07,n[10-14]") from None


def _stage(text: str, stages: int, key: str) -> int:
    if not text.isdecimal() or int(text) >= stages:
        raise JobError(f"'{text}' is no stage", key=key, fix=f"Stages are 0 to {stages - 1}")
    return int(text)
