"""What the values of a job forbid each other; advice comes as changes, which ``Job.read`` tries."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from plait.core.base.errors import JobError
from plait.core.base.numbers import nearest_batch
from plait.core.job.constraint import Constraint
from plait.core.job.stage_rules import check_stages
from plait.core.model.experts import check_expert_parallel
from plait.core.model.spec import ModelSpec

if TYPE_CHECKING:
    from plait.core.job.spec import Job


def check_job(job: Job) -> None:
    """Raise JobError for values that are fine alone and wrong together."""
    spec = job.model_spec(vocab=1)  # the tokenizer's own, not known yet, changes no rule
    check_stages(job.strategy, spec.num_layers, job.open)
    _check_batch(job)
    _check_rates(job)
    for text in job.plan.constraints:
        Constraint.parse(text)
    for dp, tp in dict.fromkeys(job.degrees):
        try:
            _check_place(job, spec, dp, tp)
        except JobError as error:
            raise _of_places(job, error, {"strategy.dp": dp, "strategy.tp": tp}) from None


def _check_batch(job: Job) -> None:
    """A replica's micro-batch is as large as the job says; only a batch that is not cut may leave replicas
    with unequal shares."""
    batch, dp, size = job.train.global_batch_size, job.degrees[0][0], job.train.micro_batch_size
    if batch % job.num_micro_batches or (size and -(-job.micro_batch // dp) != size):
        raise JobError(
            f"{batch} sequences are not a multiple of micro_batch_size x dp = {size} x {dp}",
            key="train.global_batch_size",
            changes=nearest_batch(batch, size, dp),
        )


def _check_rates(job: Job) -> None:
    """Raise JobError for learning rates that contradict each other."""
    train = job.train
    decayed, key = (train.lr_decay_steps, "lr_decay_steps") if train.lr_decay_steps else (train.steps, "steps")
    if train.warmup_steps > decayed:
        raise JobError(
            f"{train.warmup_steps} exceeds {key} = {decayed}",
            key="train.warmup_steps",
            changes=[{"train.warmup_steps": decayed}, {f"train.{key}": train.warmup_steps}],
        )
    if train.lr_wsd_decay_steps > decayed - train.warmup_steps:
        raise JobError(
            f"{train.lr_wsd_decay_steps} exceeds {key} - warmup_steps = {decayed - train.warmup_steps}",
            key="train.lr_wsd_decay_steps",
            changes=[
                {"train.lr_wsd_decay_steps": decayed - train.warmup_steps},
                {f"train.{key}": train.warmup_steps + train.lr_wsd_decay_steps},
            ],
        )
    if train.min_learning_rate > train.learning_rate:
        raise JobError(
            f"{train.min_learning_rate} exceeds learning_rate = {train.learning_rate}",
            key="train.min_learning_rate",
            changes=[{"train.min_learning_rate": train.learning_rate}],
        )


def _check_place(job: Job, spec: ModelSpec, dp: int, tp: int) -> None:
    """Raise JobError for what a place of the pipeline, of ``dp`` x ``tp`` ranks, cannot do."""
    replicas = dp * job.strategy.cp
    if dp > job.micro_batch:
        changes = [{"strategy.dp": job.micro_batch}, {"train.global_batch_size": dp * job.num_micro_batches}]
        problem = f"dp = {dp} shares a micro-batch of {job.micro_batch} sequences"
        raise JobError(problem, key="strategy.dp", changes=changes)
    strategy = replace(job.base_strategy, tp=tp)
    strategy.check(spec, batch=job.micro_batch // dp, sequence=job.data.sequence_length)
    sharding = job.sharding(replicas)
    sharding.check(replicas)
    if job.strategy.cuda_graphs is True and not sharding.stays:
        raise JobError(
            "what is captured works on memory that stays, and this sharding gathers weights, or reduces gradients, in "
            "memory that does not",
            key="strategy.cuda_graphs",
            changes=[
                {"strategy.cuda_graphs": False},
                {"strategy.cuda_graphs": "auto"},
                {"strategy.shard": "ddp"},
                {"strategy.shard": "zero1"},
            ],
        )
    check_expert_parallel(spec, job.strategy.ep, replicas)


def _of_places(job: Job, error: JobError, of: dict[str, int]) -> JobError:
    """The error about one place of a pipeline, its changes made in the lists that the job gives. of: the
    place's degrees, by key."""

    given = {"strategy.dp": job.strategy.dp, "strategy.tp": job.strategy.tp}

    def in_list(key: str, value: Any) -> Any:
        listed = given.get(key)
        return [value if one == of[key] else one for one in listed] if isinstance(listed, tuple) else value

    changes = [{key: in_list(key, value) for key, value in change.items()} for change in error.changes]
    return JobError(error.problem, file=error.file, key=error.key, fix=error.fix, changes=changes)
