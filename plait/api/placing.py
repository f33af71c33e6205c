"""Placing: job, topology and weights, read and checked, and the placements of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from plait.api.placed import PlacedAnswer, beside
from plait.core.base.codec.json_text import read_table
from plait.core.base.codec.toml_text import COMMAND_LINE
from plait.core.base.errors import JobError, PlacementError, nearest
from plait.core.base.files import reason_of
from plait.core.cluster.network import Network
from plait.core.job.communication import CommunicationMatrix, Volume
from plait.core.job.place_settings import PlaceSection
from plait.core.job.plan import Plan
from plait.core.topology.hostlist import expand
from plait.core.topology.placement import Placement
from plait.core.topology.rank_table import RankTable
from plait.core.topology.switches import Topology
from plait.place.affinity import affinity_of, known_profiled, read_profiled
from plait.place.bounds import lower_bound
from plait.place.placing import place
from plait.place.pools import Wanted, check_still_there, enough, gpus_per_node, pools_of, remarks_on, spots_of, types_of
from plait.place.problem import Pool, Problem, Spares
from plait.place.readers import Remarks
from plait.place.repair import Repair, Spot, from_table, repair


@dataclass(kw_only=True)
class Placing:
    """A job to place; ``read`` makes the problem of it. job: a job file, or a plan. topology: the cluster's
    switches, or a file of them, or what else ``plait topology`` reads. overrides: ``SECTION.KEY=VALUE``; of a
    plan only those of [place]."""

    job: Path | Plan
    topology: str | Topology
    overrides: Sequence[str] = ()
    settings: PlaceSection = field(default_factory=PlaceSection)
    """The job's [place], once it is read."""
    alpha: float = 0.0
    why: str = ""
    problem: Problem = field(init=False)
    tree: Topology = field(init=False)
    spots: dict[str, Spot] = field(init=False)
    remarks: Remarks = field(init=False)
    """What is to be said of the topology, and which of its nodes are not used."""
    each: int = 0
    """Ranks of a node."""
    planned: tuple[Plan, float | None, str, int] | None = None
    """What ``plan_of`` says of ``job``, once it is known."""

    def read(self) -> None:
        """Read job, topology, weights. Raises JobError or PlacementError naming what is wrong."""
        try:
            self._read()
        except JobError as error:
            if error.file or not (error.key or "").startswith("place."):
                raise
            typed = any(one.partition("=")[0].strip() == error.key for one in self.overrides)
            raise error.in_file(COMMAND_LINE if typed else str(self.job)) from None

    def _read(self) -> None:
        self.planned = self.planned or plan_of(self.job, self.overrides)
        plan, rate, device, each = self.planned
        self.settings = asked = (plan.job.place if plan.job else PlaceSection()).changed(self.overrides)
        self.tree, self.remarks = self._read_topology()
        self.spots = spots_of(self.tree, asked.level or None)
        gpus = asked.gpu
        _check_types(self.tree, [one.rpartition("=")[2] for one in gpus])
        kind = next((one for one in gpus if "=" not in one), "")
        self.each = each = asked.gpus_per_node or gpus_per_node(self.tree, kind) or each
        if each < 1:
            counts = sorted({node.hardware.gpus for node in self.tree.nodes if node.hardware.gpus})
            problem = "neither the plan's cluster nor the topology says how many GPUs a node has"
            if counts:
                problem = f"nodes have {', '.join(map(str, counts))} GPUs, and the plan does not say which it is for"
            raise JobError(problem, key="place.gpus_per_node", fix="Give it")
        self.remarks.over.add(remarks_on(self.tree, each))
        matrix = CommunicationMatrix.of(plan, ranks_per_node=each, volumes=volumes_of(plan))
        if asked.alpha is None:
            jobs = known_profiled() if asked.affinity == "auto" else read_profiled(Path(asked.affinity))
            gpu = kind or next(iter(types_of(self.tree)), "") or device
            found = affinity_of(matrix, jobs, gpu, asked.distance)
            self.alpha, self.why = found.alpha, found.why
        else:
            self.alpha = asked.alpha
        stages = len(matrix.heights)
        self.problem = Problem.of(
            matrix, self._pools(kind), alpha=self.alpha, by=asked.by, unit=asked.unit, spares=_spares(asked.spares),
            price=asked.preempt, forbidden=self._forbidden(stages), gpus=self._gpus(stages), limit=asked.limit,
            network=self._network(rate), plan=plan.key, topology=self.tree.key,
        )  # fmt: skip

    def _read_topology(self) -> tuple[Topology, Remarks]:
        from plait.api.topologies import read_topology

        asked = self.settings
        if isinstance(self.topology, Topology):
            return self.topology, Remarks()
        if not (given := self.topology or asked.topology):
            raise JobError("no topology is given", key="--topology", fix="Give the file of the cluster's switches")
        return read_topology(given, form=asked.format, states=asked.states, tolerated=asked.tolerate)

    def _wanted(self, gpu: str) -> Wanted:
        asked = self.settings
        return Wanted(
            avoid=frozenset(names_of(asked.avoid, "place.avoid")),
            gpu=gpu,
            mixed=any("=" in one for one in asked.gpu),
            preempt=asked.preempt is not None,
            level=asked.level or None,
            gpus=self.each,
        )

    def _pools(self, gpu: str) -> tuple[Pool, ...]:
        return pools_of(self.tree, self._wanted(gpu))

    def _gpus(self, stages: int) -> tuple[str, ...]:
        """Types of GPU of the columns, where they differ."""
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

    def placed(self) -> Placement:
        """The placement by the method asked for; with several types of GPU, on the best unless one is
        named."""
        types = types_of(self.tree)
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
        """The best placement; nodes that share out experts lie in one minipod where that costs nothing."""
        apart, together = place(problem, self.settings.method), problem.together
        if together is None:
            return apart
        bound = lower_bound(replace(problem, expert_cells=1))
        try:
            whole = place(together, self.settings.method)
        except PlacementError:  # minipods have not as many nodes free in such blocks
            return replace(apart, bound=bound)
        return replace(whole if whole.score <= apart.score + 1e-9 else apart, bound=bound)

    def answer(self, placement: Placement, repaired: Repair | None = None) -> PlacedAnswer:
        """A placement of this job as it is shown."""
        return PlacedAnswer(
            placement=placement, problem=self.problem, why=self.why, repaired=repaired, spots=self.spots,
            remarks=self.remarks,
        )  # fmt: skip

    def repaired(self, old: Path, down: Sequence[str]) -> PlacedAnswer:
        """The placement in ``old`` without the nodes that are down."""
        before = self._earlier(old)
        unknown = [name for name in down if name not in self.spots and name not in (*before.hosts, *before.spares)]
        if unknown:
            raise JobError(f"no node '{unknown[0]}' in the topology or the placement", key="--down")
        lost = (one.name for one in self.tree.nodes if one.state.status == "down" or not enough(one, self.each))
        broken = {*lost, *down}
        failed = sorted(broken.intersection((*before.hosts, *before.spares)))
        if not failed:
            raise PlacementError(f"No node of {old} is down. Name those that failed with --down.")
        self.own = (*before.hosts, *before.spares)
        together = self.problem.together
        if together and before.nodes_per_cell == together.nodes_per_cell:
            self.problem = together
        found = repair(self.problem, before, down=failed, where=self.spots, move_price=self.settings.move_price)
        return self.answer(found.placement, found)

    own: Sequence[str] = ()
    """Hosts that the job has already."""

    def _earlier(self, old: Path) -> Placement:
        try:
            whole = "heights" in read_table(old)
        except (OSError, ValueError) as error:
            raise PlacementError(f"{old}: cannot be read as a rank table ({reason_of(error)}).") from None
        if whole:
            return Placement.read(old)
        table = RankTable.read(old)
        kept = beside(old)
        if kept.is_file() and (placement := Placement.read(kept)).hosts == table.hosts:
            return placement
        return from_table(self.problem, table, self.spots)

    def check_again(self, placement: Placement) -> None:
        """Raise PlacementError if the cluster has changed since it was read, in a way that matters; of a pipe
        nobody knows."""
        if isinstance(self.topology, Topology) or any(map(_read_once, (self.topology, *self.settings.states))):
            return
        try:
            now, _ = self._read_topology()
        except JobError as error:
            changed = "It could be read when the job was placed: it has changed since. Nothing was written."
            raise PlacementError(f"{error} {changed}") from None
        if now.key != placement.topology:
            check_still_there(placement, now, self.own)

    def draw(self, placement: Placement, file: Path) -> None:
        """The cluster, with a colour for every DP group."""
        from plait.api.topology_picture import draw

        groups = {host: f"stage {at}" for host, at in zip(placement.hosts, placement.stages, strict=True)}
        title = f"PP groups in {placement.row_spread} minipods at most, DP groups in {placement.column_spread}"
        draw(self.tree, file, groups=groups, level=self.settings.level or None, title=title)

    def draw_pairs(self, placement: Placement, file: Path) -> float:
        """Draw what ranks send each other; returns the share of pairs that send nothing. Raises JobError
        for a model with experts, whose bytes are counted by group alone."""
        from plait.api.pairs_picture import draw_pairs
        from plait.plan.pairs import pairs_of

        assert self.planned
        plan = self.planned[0]
        found = pairs_of(plan)
        name = plan.job.run.name if plan.job else ""
        draw_pairs(found, file, pods=placement.minipods, each=placement.ranks_per_node, title=name or "job")
        return found.silent

    def _network(self, rate: float | None) -> Network:
        """The network between minipods, with conflicts of hashed flows where they are asked for."""
        file, flows = self.settings.network, self.settings.flows
        network = Network.read(Path(file) if file else None, rate=None if file else rate)
        free = next((node.name for node in self.tree.nodes if node.state.status == "free"), None)
        if not flows or free is None:
            return network
        from plait.place.ecmp import RailFabric, conflict_factor

        return replace(network, conflicts=network.conflicts * conflict_factor(RailFabric.of(self.tree, free), flows))


def place_job(asked: Placing) -> PlacedAnswer:
    """The host of every rank of a job, and how much better any other placement could be. Raises JobError and
    PlacementError."""
    asked.read()
    return asked.answer(asked.placed())


def write_placement(asked: Placing, found: PlacedAnswer, table: Path, picture: Path | None = None) -> None:
    """Draw a placement, check the cluster once more, write the rank table and the placement beside it.

    Ranks are bound by the table: it comes last, when nothing else can fail. Raises PlacementError for a
    cluster that has changed meanwhile, LaunchError for files that cannot be written.
    """
    from plait.core.base.files import explained

    asked.check_again(found.placement)
    if picture:
        with explained(f"{picture} cannot be written", fix="Choose another with --draw"):
            asked.draw(found.placement, picture)
        asked.check_again(found.placement)
    found.write(table)


def plan_of(file: Path | Plan, overrides: Sequence[str]) -> tuple[Plan, float | None, str, int]:
    """The plan, in a file or not, and of the cluster that it is for: bytes per second of a rank's outermost
    link, the device, ranks of a node (0: nobody says)."""
    from plait.api.choose import planned, the_cluster
    from plait.core.job.spec import Job

    if isinstance(file, Plan) or file.suffix == ".json":
        if others := [one for one in overrides if not one.startswith("place.")]:
            raise JobError(f"'{others[0]}' would change the plan", file=str(file), fix="Plan the job again")
        plan = file if isinstance(file, Plan) else Plan.read(file)
        if plan.job is None or (plan.job.cluster.file is None and plan.job.cluster.preset == "here"):
            return plan, None, "", 0
        cluster = the_cluster(plan.job, None)
    else:
        from plait.plan.answer import Planner
        from plait.train.data.tokenizer import load_tokenizer

        job = Job.read(file, list(overrides)).named(file.stem)
        vocab = load_tokenizer(job.data.tokenizer).vocab
        job, _ = planned(job, vocab, None)
        if job.cluster.ranks not in (0, job.world_size):
            problem = f"{job.cluster.ranks} are not the {job.world_size} ranks of the strategy"
            raise JobError(problem, key="cluster.ranks", fix="Leave it out, or leave a degree of the strategy out")
        cluster = the_cluster(job, None)
        plan = Planner(job, cluster, vocab).plan(job)
        if job.cluster.file is None and job.cluster.preset == "here":
            return plan, None, "", 0
    return plan, cluster.tiers[-1].rate.value, cluster.device.name, cluster.ranks_per_node


def volumes_of(plan: Plan) -> tuple[Volume, ...]:
    """Bytes of a step along every axis of every place, as the planner counts them."""
    from plait.plan.volumes import expert_volume

    ep = plan.job.strategy.ep if plan.job else 1
    return tuple(expert_volume(plan, place, ep) for place in range(len(plan.layout.degrees)))


def _read_once(path: str) -> bool:
    """True for a pipe, which can be read once."""
    return path == "-" or (Path(path).exists() and not Path(path).is_file())


def _check_types(tree: Topology, asked: Sequence[str]) -> None:
    """Raise JobError for a type of GPU that no node has."""
    there = sorted({node.hardware.device for node in tree.nodes} - {""})
    for kind in asked:
        if kind.lower() not in map(str.lower, there):
            problem = f"no node has GPUs of type '{kind}'{nearest(kind, there)}"
            fix = f"Types there are: {', '.join(there)}" if there else "The topology names no types: leave it out"
            raise JobError(problem, key="place.gpu", fix=fix)


def _spares(asked: str | int) -> Spares:
    number, _, where = str(asked).partition("/")
    return Spares(**{{"": "total", "minipod": "per_minipod", "row": "per_row"}[where]: int(number)})


def names_of(text: str, key: str) -> list[str]:
    """Names of a host list. Raises JobError, naming the key or option, for text that is none."""
    try:
        return expand(text) if text else []
    except ValueError as error:
        raise JobError(str(error), key=key, fix="Write names as in n3,leaf07,n[10-14]") from None


def _stage(text: str, stages: int, key: str) -> int:
    if not text.isdecimal() or int(text) >= stages:
        raise JobError(f"'{text}' is no stage", key=key, fix=f"Stages are 0 to {stages - 1}")
    return int(text)
