"""The section ``[recipe]`` of a job: formats and techniques of other runtimes that can be planned
and not trained, under Megatron-LM's names where it has them. This file has the keys and their
rules; their effect on time and memory is in ``plait.plan.search.job_options``."""

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
    """Formats and techniques of other runtimes that Plait's ranks do not have yet: they can be
    planned, not trained. ``plait train`` refuses a job that sets any of these keys."""

    fp8_param_gather: bool = True
    """Keep and gather parameters quantised in fp8 and mxfp8, without a bf16 copy besides the fp32
    master weights, as in NVIDIA's recipes. If false, parameters are kept in bf16, and their
    quantised copies in addition."""
    moe_token_dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    """Method by which tokens reach their experts. ``alltoall``, with NCCL: a token is sent once for
    every expert that it goes to. ``deepep`` (and HybridEP): once to every node, and there once to
    every rank."""
    overlap_moe_expert_parallel_comm: bool = False
    """Send tokens to their experts while layers of another micro-batch are computed, whose
    activations are kept meanwhile."""
    grad_reduce_in_bf16: bool = False
    """Keep and reduce gradients in bf16 instead of fp32."""
    exp_avg_dtype: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Type of the optimizer's first moment."""
    exp_avg_sq_dtype: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Type of the optimizer's second moment."""
    optimizer_offload_fraction: Share = 0.0
    """Share of optimizer states and master weights that are kept, and updated, on the host: needs
    ``device.host_rate`` and ``host_memory_rate`` in the cluster's file."""
    activation_offload_fraction: Share = 0.0
    """Share of the activations kept for the backward that is offloaded to the host meanwhile: needs
    ``device.host_rate`` in the cluster's file."""
    vocabulary_parallel_stages: bool = False
    """Cut embedding and head over all stages of the pipeline (Yeung 2024, arXiv 2411.05288); one
    more micro-batch is then alive."""


def planning_only_keys(job: Job) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys of a job that can be planned and not trained, with their values and the values
    to train with instead."""
    if job.train.precision in QUANTISED:
        yield "train.precision", job.train.precision, "bf16-mixed"
    for name, field in RecipeSection.model_fields.items():
        if (value := getattr(job.recipe, name)) != field.default:
            yield f"recipe.{name}", value, None


OF_EXPERTS = ("moe_token_dispatcher", "overlap_moe_expert_parallel_comm")
"""Keys that have no effect on a model without experts."""


def check_recipe(job: Job, model: ModelSpec) -> None:
    """Raise JobError for a key that has no effect on this job, or with which its model cannot be
    planned."""
    kept = QUANTISED.get(job.train.precision)
    for key, value, _ in planning_only_keys(job):
        name = key.partition(".")[2]
        if model.levels:
            problem = f"{shown(value)} is not supported for a utransformer, whose memory is traced through its op lists"
            raise JobError(problem, key=key, changes=[{key: None}, {"model.family": "gpt", "model.levels": None}])
        if name in OF_EXPERTS and model.experts is None:
            raise JobError(f"{shown(value)} is about experts, and the model has none", key=key, changes=[{key: None}])
        if name == "fp8_param_gather" and not (kept and kept.primary):
            problem = f"{shown(value)} is about fp8 and mxfp8, and train.precision is {job.train.precision}"
            raise JobError(problem, key=key, changes=[{key: None}, {"train.precision": "fp8"}])


def _check_trained_experts(job: Job) -> None:
    """Raise JobError for settings with which experts cannot be trained yet."""
    for key, wrong, other in (
        ("train.optimizer", job.train.optimizer == "muon", "adamw"),
        ("strategy.cuda_graphs", job.strategy.cuda_graphs is True, False),
        ("strategy.streams", job.strategy.streams > 1, 1),
    ):
        if wrong:
            raise JobError("is not supported for a model with experts yet", key=key, changes=[{key: other}])


def refuse_untrained(job: Job, model: ModelSpec, doing: str) -> None:
    """Raise JobError for parts of a job that can be planned, and not be trained (or ``doing``) yet:
    experts, latent attention, a model with parts left out, keys of the job."""
    refuse_experts(model, doing)
    if model.experts and doing == "trained":
        _check_trained_experts(job)
    if job.plan.framework != "plait" and doing == "trained":
        problem = f"the job is planned for {job.plan.framework}, but plait train runs only Plait's own plans"
        raise JobError(problem, key="plan.framework", changes=[{"plan.framework": None}])
    if job.base_strategy.overlap == "no-communication" and doing == "trained":
        problem = '"no-communication" leaves out sums over ranks and would train a wrong model: it can only be planned'
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
    for key, value, other in planning_only_keys(job):
        problem = f"{shown(value)} can be planned for, and not be {doing} yet"
        raise JobError(problem, key=key, changes=[{key: other}])
