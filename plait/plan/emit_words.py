"""What every framework is told of a job, and what none of them can be told.

A framework cannot say everything that a strategy says: each such thing becomes one line of
``Emitted.unsaid``, and what is said in its place is the nearest that the framework knows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from plait.core.job.spec import Job
from plait.core.parallel.strategy import SLICED
from plait.core.step.stages import Stage, split_layers
from plait.plan.frameworks import FRAMEWORKS, framework_of


@dataclass
class Emitted:
    """text: a file, or a command line. target: the version for which it is. launch: command lines that start
    it. unsaid: what the framework cannot say, and what stands there instead."""

    text: str = ""
    unsaid: list[str] = field(default_factory=list[str])
    target: str = ""
    launch: list[str] = field(default_factory=list[str])


class Words:
    """A job that leaves nothing open, and what could not be said of it so far."""

    def __init__(self, job: Job) -> None:
        self.job, self.section, self.strategy = job, job.strategy, job.base_strategy
        self.dp, self.tp = job.degrees[0]
        self.micro = -(-job.micro_batch // self.dp)
        self.sharding = job.sharding(self.dp * job.strategy.cp)
        self.replicas = self.dp * job.strategy.cp
        self.model = job.model_spec(vocab=1)
        self.unsaid: list[str] = []
        if len(set(job.degrees)) > 1:
            self.cannot("unequal places of the pipeline (the first place's tp and dp stand for all)")

    def cannot(self, what: str) -> None:
        """Name something, once."""
        if what not in self.unsaid:
            self.unsaid.append(what)

    def common(self) -> None:
        """Name what no framework has a setting for."""
        strategy, sharding = self.strategy, self.sharding
        if strategy.overlap in SLICED and self.tp > 1 and (strategy.p1, strategy.p2) != (1, 1):
            self.cannot(f"slices {strategy.p1}x{strategy.p2} of Domino (their batch is not sliced)")
        if self.model.without:
            self.cannot(f"what the model has besides ({', '.join(self.model.without)}; not planned either)")
        if sharding.secondary:
            self.cannot(f"shard.secondary = {sharding.secondary} (no second copy of parameters is kept)")

    def schedule(self, framework: str, known: Collection[str], instead: Mapping[str, str]) -> str:
        """The schedule, or one that stands for it, which the framework runs with as many micro-batches."""
        name, rounds = self.section.schedule, self.job.num_micro_batches
        runs = partial(FRAMEWORKS[framework].schedules, pp=self.section.pp, num_micro=rounds)
        tried = [one for one in (name, instead.get(name, "1f1b"), "1f1b", "gpipe") if one in known]
        other = next(filter(runs, tried), tried[0])
        if other != name:
            why = f", not of {rounds} micro-batches" if name in known else ""
            self.cannot(f"schedule = {name}{why} ({other} stands for it)")
        return other

    def stages(self, schedule: str) -> tuple[Stage, ...]:
        """Cuts of the model for a schedule, place by place and round after round."""
        rounds = {"interleaved": self.section.virtual_stages, "zb-v": 2}.get(schedule, 1)
        given = self.section.stage_layers
        count = self.section.pp * max(1, rounds)
        runs = framework_of(self.job.plan.framework)
        if runs and len(given) != count:  # embedding and head may have stages to themselves
            return runs.options.stages(self.model.num_layers, count)
        return split_layers(self.model.num_layers, count, given if len(given) == count else ())

    def launch(self, program: str, each: int) -> list[str]:
        """Command lines: torchrun on every node of ``each`` ranks, and the same by Slurm."""
        nodes, per = max(1, -(-self.ranks // each)), min(each, self.ranks)
        several = f" --nnodes={nodes} --node-rank=$NODE_RANK --master-addr=$HOST --master-port=29500"
        meets = " --rdzv-backend=c10d --rdzv-endpoint=$HOST:29500 --nnodes=" + str(nodes)
        return [
            f"torchrun --nproc-per-node={per}{several if nodes > 1 else ''} {program}",
            f"srun --nodes={nodes} --ntasks-per-node=1 --gpus-per-node={per} "
            f"torchrun --nproc-per-node={per}{meets if nodes > 1 else ''} {program}",
        ]

    @cached_property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.job.world_size
