"""What of a job is planned and not trained: formats and techniques of other runtimes, under the names that
Megatron-LM has for them where it has one. Which key says what to ``plait plan`` stands here; what it does to
time and memory, in ``plait.plan.job_options``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from plait.core.base.codec.data import Section
from plait.core.base.errors import JobError
from plait.core.base.numbers import shown
from plait.core.model.experts import refuse_experts
from plait.core.model.precision import QUANTISED
from plait.core.model.spec import ModelSpec

if TYPE_CHECKING:
    from plait.core.job.spec import Job


Share = Annotated[float, Field(ge=0, le=1)]


class RecipeSection(Section):
    """What other runtimes do in a step and Plait's ranks cannot do yet: planned, not trained. ``plait train``
    refuses a job that sets any of it."""

    fp8_param_gather: bool = True
    """Whether fp8 and mxfp8 keep and gather parameters quantised, with no copy in bf16 beside the fp32
    masters, as NVIDIA's recipes have it. If not, quantised copies stand beside parameters in bf16."""
    moe_token_dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    """How tokens reach their experts: ``alltoall``, NCCL's, sends a token once for every expert that it goes
    to; ``deepep`` (and HybridEP) once to every node, and there once to every rank."""
    overlap_moe_expert_parallel_comm: bool = False
    """Whether tokens travel beside another micro-batch's layers, whose activations are kept meanwhile."""
    expert_tensor_parallel_size: Literal[0, 1] = 0
    """1: tensor parallelism cuts no expert, and ``ep`` shares experts out over neighbours of dp x cp x tp,
    with sequence parallelism. 0: it cuts each expert."""
    grad_reduce_in_bf16: bool = False
    """Whether gradients are kept and reduced in bf16, in place of fp32."""
    exp_avg_dtype: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Type of the optimizer's first moment."""
    exp_avg_sq_dtype: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Type of its second moment."""
    optimizer_offload_fraction: Share = 0.0
    """Share of the optimizer's states and masters that are kept, and updated, on the host: needs
    ``device.host_rate`` and ``host_memory_rate`` of the cluster."""
    activation_offload_fraction: Share = 0.0
    """Share of what layers keep for the backward that goes to the host meanwhile: needs ``device.host_rate``
    of the cluster."""
    vocabulary_parallel_stages: bool = False
    """Whether embedding and head are cut over all stages of the pipeline (Yeung 2024, arXiv 2411.05288), for
    which a micro-batch more is alive."""


def untrained_keys(job: Job) -> Iterator[tuple[str, Any, Any]]:
    """Keys of a job that are planned and not trained, with their values, and what to train it with."""
    if job.train.precision in QUANTISED:
        yield "train.precision", job.train.precision, "bf16-mixed"
    for name, field in RecipeSection.model_fields.items():
        if (value := getattr(job.recipe, name)) != field.default:
            yield f"recipe.{name}", value, None


OF_EXPERTS = ("moe_token_dispatcher", "overlap_moe_expert_parallel_comm", "expert_tensor_parallel_size")
"""Keys that say nothing of a model without experts."""


def check_recipe(job: Job, model: ModelSpec) -> None:
    """Raise JobError for a key that says nothing of this job, or that its model cannot be planned with."""
    kept = QUANTISED.get(job.train.precision)
    for key, value, _ in untrained_keys(job):
        name = key.partition(".")[2]
        if model.levels:
            problem = f"{shown(value)} is not known of a utransformer, whose memory is walked list by list"
            raise JobError(problem, key=key, changes=[{key: None}, {"model.family": "gpt", "model.levels": None}])
        if name in OF_EXPERTS and model.experts is None:
            raise JobError(f"{shown(value)} is about experts, and the model has none", key=key, changes=[{key: None}])
        if name == "fp8_param_gather" and not (kept and kept.primary):
            problem = f"{shown(value)} is about fp8 and mxfp8, and train.precision is {job.train.precision}"
            raise JobError(problem, key=key, changes=[{key: None}, {"train.precision": "fp8"}])


def refuse_untrained(job: Job, model: ModelSpec, doing: str) -> None:
    """Raise JobError for what can be planned for, and not be trained yet, or what ``doing`` says: experts, a
    model without some of its parts, keys of a job."""
    refuse_experts(model, doing)
    if job.plan.framework != "plait" and doing == "trained":
        problem = f"{job.plan.framework} is to run the job, and plait train is Plait's"
        raise JobError(problem, key="plan.framework", changes=[{"plan.framework": None}])
    if job.base_strategy.overlap == "no-communication" and doing == "trained":
        problem = '"no-communication" leaves sums over ranks out, and would train a wrong model: it is planned alone'
        changes = [{"strategy.overlap": "off"}, {"strategy.overlap": "domino"}]
        raise JobError(problem, key="strategy.overlap", changes=changes)
    if model.kv_lora_rank:
        problem = f"a model with latent attention can be planned for, and not be {doing} yet"
        raise JobError(problem, key="model.kv_lora_rank", fix="Use plait plan alone, or a model without")
    if model.without and doing == "trained":
        problem = (
            f"the model is planned without {', '.join(model.without)}, and would be another one if it were trained"
        )
        raise JobError(problem, key="model.without", fix="Use plait plan alone, or model.without = []")
    for key, value, other in untrained_keys(job):
        problem = f"{shown(value)} can be planned for, and not be {doing} yet"
        raise JobError(problem, key=key, changes=[{key: other}])
