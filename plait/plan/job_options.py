"""What a job says of how its ranks compute, as options of the planner's models of time and memory.

| job | options |
|---|---|
| none of what follows | Plait's own runs (``plait_on``) |
| ``plan.framework`` | that framework's (``frameworks``) |
| ``train.precision`` = fp8, mxfp8, nvfp4 | layers' matrices quantised: kept, and gathered from shares |
| ``recipe.fp8_param_gather = false`` | the same beside parameters in bf16, which are what is gathered |
| ``recipe.moe_token_dispatcher = "deepep"`` | a token is sent once to a node and a rank |
| ``recipe.overlap_moe_expert_parallel_comm`` | beside another micro-batch, which stays in memory meanwhile |
| ``recipe.expert_tensor_parallel_size = 1`` | experts are whole |

Quantised copies live as long as the parameters that they are of: from step to step where a rank keeps
parameters whole, since the first micro-batch quantises for all (Transformer Engine's is_first_microbatch),
else while they are gathered. Activations are counted in bf16: recipes keep the inputs of products quantised,
and attention's output in both; that is not deducted.
"""

from __future__ import annotations

from dataclasses import replace

from plait.core.base.numbers import shown
from plait.core.cluster.hardware import Device
from plait.core.job.spec import Job
from plait.core.model.precision import ITEMSIZE, QUANTISED
from plait.core.model.spec import ModelSpec
from plait.core.step.memory.closed_memory import plait_on
from plait.core.step.memory.memory_options import MatrixBytes, MemoryOptions
from plait.plan.frameworks import Framework, framework_of


def options_of(job: Job, device: Device, framework: Framework | None = None) -> MemoryOptions:
    """Of a job on a device. framework: the one that runs it, with what a configuration says; None: what
    ``plan.framework`` names."""
    other, recipe = framework or framework_of(job.plan.framework), job.recipe
    options = replace(
        other.options if other else plait_on(device),
        dispatch_once=recipe.moe_token_dispatcher == "deepep",
        exchange_hidden=recipe.overlap_moe_expert_parallel_comm,
        more_alive=int(recipe.overlap_moe_expert_parallel_comm),
        experts_whole=recipe.expert_tensor_parallel_size == 1,
    )
    return _quantised(job, device, options)


def planned_only(job: Job, model: ModelSpec) -> list[str]:
    """Sentences on what of a job and its model no rank of Plait's can do, and what is left out."""
    keys = [f"{key} = {shown(value)}" for key, value in job.untrained]
    told = [f"Planned in closed form, and not trained: {', '.join(keys)}."] if keys else []
    return [*told, *([f"Planned without {', '.join(model.without)}."] if model.without else [])]


def _quantised(job: Job, device: Device, options: MemoryOptions) -> MemoryOptions:
    recipe = QUANTISED.get(job.train.precision)
    if recipe is None:
        return options
    copies, beside = recipe.kept(reads_columns=device.reads_columns), float(ITEMSIZE[job.train.precision])
    if recipe.primary and job.recipe.fp8_param_gather:
        matrices = MatrixBytes(whole=copies, share=recipe.number, gathered=copies)
        return replace(options, matrices=matrices, quantised=recipe.number / beside)
    return replace(options, matrices=MatrixBytes(beside + copies, beside, beside + copies))
