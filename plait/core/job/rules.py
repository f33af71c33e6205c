"""Rules about several values of a job at once. Advice is given as changes, which ``Job.read`` tries
first."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.errors import JobError, nearest
from plait.core.base.numbers import divisors, nearest_batch
from plait.core.job.constraint import Constraint, Margin
from plait.core.job.rampup import check_rampup
from plait.core.job.recipe import check_recipe
from plait.core.job.settings import STDLIB, RecomputeLayers, StrategySection
from plait.core.job.texts import tokens_of
from plait.core.model.experts import check_expert_parallel
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import slice_sizes
from plait.core.step.schedules import GENERATORS, chunks_problem, own_chunks
from plait.core.step.stages import Stage, stage_weights

if TYPE_CHECKING:
    from plait.core.job.spec import Job


def check_job(job: Job) -> None:
    """Raise JobError for values that are valid alone and contradict each other."""
    spec = job.model_spec(vocab=1)  # the tokenizer's vocabulary, not known yet, changes no rule
    check_stages(job.strategy, spec.num_layers, job.open, ends=0 if job.plan.framework == "plait" else 2)
    _check_batch(job)
    check_rampup(job)
    _check_rates(job)
    _check_moments(job)
    _check_patterns(job, spec)
    check_recipe(job, spec)
    _check_documents(job, spec)
    for text in job.plan.constraints:
        Constraint.parse(text)
    Margin.parse(job.plan.memory_margin)
    _check_tokens(job)
    for dp, tp in dict.fromkeys(job.degrees):
        try:
            _check_place(job, spec, dp, tp)
        except JobError as error:
            raise _for_pipeline_ranks(job, error, {"strategy.dp": dp, "strategy.tp": tp}) from None


def _check_tokens(job: Job) -> None:
    """Raise JobError for ``plan.tokens`` that are fewer than the tokens of one step."""
    tokens, step = tokens_of(job.plan.tokens), job.train.global_batch_size * job.data.sequence_length
    if 0 < tokens < step:
        problem = f"{tokens:,} are fewer than the {step:,} tokens of one step"
        raise JobError(problem, key="plan.tokens", fix='Write more, as in 2e12 or "15T" (K, M, B, T), or leave it out')


def _check_documents(job: Job, spec: ModelSpec) -> None:
    """Raise JobError for contradictory settings of documents and chats."""
    data = job.data
    if data.masks and spec.levels:
        problem = '"mask", and a model that halves sequences joins tokens of two documents'
        raise JobError(problem, key="data.documents", changes=[{"data.documents": "join"}])
    if data.masks and job.strategy.cuda_graphs is True:
        problem = (
            'true, and documents at whose ends attention stops (data.documents = "mask") differ from batch to batch'
        )
        raise JobError(problem, key="strategy.cuda_graphs",
                       changes=[{"strategy.cuda_graphs": False}, {"data.documents": "join"}])  # fmt: skip
    for key, sources in (("data.sources" if data.sources else "data.text", data.train), ("data.eval", data.eval)):
        for source in sources:
            if data.rows_of(source) != "text" and STDLIB in source.paths:
                fix = "Name a file of JSON lines, for example"
                raise JobError(f"{STDLIB} has no {data.rows_of(source)}", key=key, fix=fix)
    if data.chat_template is not None and not data.chat_rows:
        raise JobError("is for chats, and data.rows is text", key="data.chat_template",
                       changes=[{"data.rows": "chats"}, {"data.chat_template": None}])  # fmt: skip


def _check_batch(job: Job) -> None:
    """Raise JobError unless a replica's micro-batch has the size that the job sets. Only a batch
    that is not cut into micro-batches may leave replicas with unequal shares."""
    batch, dp, size = job.train.global_batch_size, job.degrees[0][0], job.train.micro_batch_size
    cut = job.num_micro_batches > 1 and dp > job.micro_batch
    if batch % job.num_micro_batches or cut or (size and -(-job.micro_batch // dp) != size):
        raise JobError(
            f"{batch} sequences are not a multiple of micro_batch_size x dp = {size} x {dp}",
            key="train.global_batch_size",
            changes=nearest_batch(batch, size, dp),
        )


MOST_DECAY_BF16 = 0.998
"""Decay rate of the second moment above which a step changes it by less than bf16 can hold,
2^-9."""


def _check_moments(job: Job) -> None:
    """Raise JobError for a second moment that rounding would freeze: updates would be scaled by old
    gradients."""
    first, second = job.train.adam_betas
    if job.train.optimizer_dtype == "bf16" and job.train.optimizer != "sgd" and second > MOST_DECAY_BF16:
        raise JobError(
            f"{second}: a step changes the second moment by less than bf16 can hold",
            key="train.adam_betas",
            changes=[{"train.optimizer_dtype": "master"}, {"train.adam_betas": [first, 0.95]}],
        )


def _check_patterns(job: Job, spec: ModelSpec) -> None:
    """Raise JobError for a pattern of ``weight_decay_of`` that matches no weight: it would silently
    have no effect."""
    if not job.train.weight_decay_of or spec.experts is not None:  # weights of experts have no names yet
        return
    names = [name for name, _ in stage_weights(spec, Stage(0, 1, 0, spec.num_layers))]
    for pattern in job.train.weight_decay_of:
        if not any(fnmatchcase(name, pattern) for name in names):
            key = "train.weight_decay_of"
            others = {one: decay for one, decay in job.train.weight_decay_of.items() if one != pattern}
            close = nearest(pattern, names) or "; names are those of checkpoints, such as layers.0.attn.q.weight"
            problem = f"no weight of this model is called '{pattern}'{close}"
            raise JobError(problem, key=key, changes=[{key: others or None}])


def _check_rates(job: Job) -> None:
    """Raise JobError for learning-rate settings that contradict each other."""
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
    """Raise JobError for settings that a pipeline stage of ``dp`` x ``tp`` ranks cannot run."""
    replicas = dp * job.strategy.cp
    if dp > job.micro_batch:
        changes = [{"strategy.dp": job.micro_batch}, {"train.global_batch_size": dp * job.num_micro_batches}]
        batch, first = job.train.global_batch_size, job.degrees[0][0]
        widest = max(each for each, _ in job.degrees)
        if enough := [one for one in divisors(batch // first, widest) if one * first >= widest]:
            changes.insert(0, {"train.micro_batch_size": enough[0]})
        problem = f"dp = {dp} exceeds the {job.micro_batch} sequences of a micro-batch over all replicas"
        raise JobError(problem, key="strategy.dp", changes=changes)
    strategy = replace(job.base_strategy, tp=tp)
    strategy.check(spec, batch=job.micro_batch // dp, sequence=job.data.sequence_length)
    sharding, known = job.sharding(replicas), not {"strategy.dp", "strategy.cp"}.intersection(job.open)
    sharding.check(replicas if known else sharding.optim)
    if job.strategy.cuda_graphs is True and not sharding.keeps_buffers:
        raise JobError(
            "CUDA graphs need weights and gradients at fixed addresses, but this sharding gathers weights, "
            "or reduces gradients, in temporary buffers",
            key="strategy.cuda_graphs",
            changes=[
                {"strategy.cuda_graphs": False},
                {"strategy.cuda_graphs": "auto"},
                {"strategy.shard": "ddp"},
                {"strategy.shard": "zero1"},
            ],
        )
    whole = job.strategy.etp == 1
    if whole and spec.experts is None:
        raise JobError("1 is about experts, and the model has none", key="strategy.etp",
                       changes=[{"strategy.etp": None}])  # fmt: skip
    if whole and tp > 1 and not strategy.sequence_parallel and "strategy.sequence_parallel" not in job.open:
        problem = "experts that tensor parallelism does not cut need sequence parallelism"
        raise JobError(problem, key="strategy.etp",
                       changes=[{"strategy.sequence_parallel": True}])  # fmt: skip
    known = known and not (whole and "strategy.tp" in job.open)
    check_expert_parallel(spec, job.strategy.ep, replicas * (tp if whole else 1) if known else None)


def _for_pipeline_ranks(job: Job, error: JobError, of: dict[str, int]) -> JobError:
    """Return the error about one pipeline stage, with its changes made in the lists that the job
    gives. of: the stage's degrees, by key."""

    given = {"strategy.dp": job.strategy.dp, "strategy.tp": job.strategy.tp}

    def in_list(key: str, value: Any) -> Any:
        listed = given.get(key)
        return [value if one == of[key] else one for one in listed] if isinstance(listed, tuple) else value

    changes = [{key: in_list(key, value) for key, value in change.items()} for change in error.changes]
    return JobError(error.problem, file=error.file, key=error.key, fix=error.fix, changes=changes)


# ---- the pipeline and its layers ----


MOST_STAGES = 1_000


def check_stages(section: StrategySection, layers: int, left_open: Collection[str], *, ends: int = 0) -> None:
    """Raise JobError for a pipeline that the model's layers do not fill, before anything is made
    for every stage. layers: number of the model's layers. left_open: keys that the planner chooses.
    ends: stages that embedding and head may have to themselves."""
    stages, most = section.pp * section.virtual_stages, min(layers + ends, MOST_STAGES)
    if stages > most:
        _check_name(section.schedule)  # other numbers would not help an unknown schedule
        problem = f"{layers} layers cannot fill {stages} stages"
        if stages <= layers + ends:
            problem = f"{stages} stages are more than {MOST_STAGES}"
        each = section.virtual_stages
        even = [one for one in range(most // each, 1, -1) if layers % (one * each) == 0][:3]
        fewer = [one for one in (most // each, *even, 1) if one and one < section.pp]
        changes: list[dict[str, Any]] = [{"strategy.pp": one} for one in dict.fromkeys(fewer)]
        if section.virtual_stages > 1:
            changes += [{"strategy.virtual_stages": 1}, {"strategy.pp": 1, "strategy.virtual_stages": 1}]
        raise JobError(problem, key="strategy.pp", changes=changes)
    again = section.recompute
    if isinstance(again, RecomputeLayers) and again.layers > layers:
        problem = f"{again.layers} are more than the model's {layers} layers"
        raise JobError(problem, key="strategy.recompute.layers",
                       changes=[{"strategy.recompute.layers": layers}])  # fmt: skip
    if section.schedule in GENERATORS and "strategy.schedule" not in left_open:
        _check_chunks(section.schedule, section.virtual_stages)
        if section.slack:
            _check_slack(section, left_open)
    _check_layers(section, layers, left_open)


def _check_name(schedule: str) -> None:
    """Raise JobError for a text that is neither the name of a schedule nor an existing file."""
    if schedule not in GENERATORS and not Path(schedule).exists():
        problem = f"unknown schedule '{schedule}'{nearest(schedule, GENERATORS)}"
        raise JobError(problem, key="strategy.schedule", fix=f"Use {', '.join(GENERATORS)}, or a schedule file")


def _check_layers(section: StrategySection, layers: int, left_open: Collection[str]) -> None:
    """Raise JobError if the layers of all stages do not add up, provided that the job sets them and
    the number of stages."""
    given, known = section.stage_layers, section.schedule in GENERATORS
    if (
        not given
        or not known
        or {"strategy.pp", "strategy.virtual_stages", "strategy.schedule"}.intersection(left_open)
    ):
        return
    stages = section.pp * max(section.virtual_stages, own_chunks(section.schedule))
    if len(given) != stages or sum(given) != layers:
        changes: list[dict[str, Any]] = [{"strategy.stage_layers": None}]
        if stages <= layers:
            changes.insert(0, {"strategy.stage_layers": list(slice_sizes(layers, stages))})
        problem = f"{list(given)} is not a division of {layers} layers over {stages} stage{'s' * (stages > 1)}"
        raise JobError(problem, key="strategy.stage_layers", changes=changes)


def _check_slack(section: StrategySection, left_open: Collection[str]) -> None:
    """Raise JobError unless the schedule is slack-1f1b with one slack for every boundary between
    stages."""
    changes: list[dict[str, Any]] = [{"strategy.slack": None}]
    if section.schedule != "slack-1f1b":
        problem = f"{list(section.slack)} is for slack-1f1b, and the schedule is {section.schedule}"
        changes.append({"strategy.schedule": "slack-1f1b"})
        raise JobError(problem, key="strategy.slack", changes=changes)
    if "strategy.pp" not in left_open and len(section.slack) != section.pp - 1:
        problem = f"{list(section.slack)} has {len(section.slack)} numbers for {section.pp - 1} boundaries of stages"
        raise JobError(problem, key="strategy.slack", changes=changes)


def _check_chunks(schedule: str, chunks: int) -> None:
    """Raise JobError for a number of stages on a rank that the schedule cannot have; 1, the
    default, stands for the schedule's own number."""
    if chunks > 1 and (problem := chunks_problem(schedule, chunks)):
        changes = [{"strategy.virtual_stages": own_chunks(schedule)}, {"strategy.schedule": "interleaved"}]
        raise JobError(problem, key="strategy.virtual_stages", changes=changes)
