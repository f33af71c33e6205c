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
| ``recipe.grad_reduce_in_bf16``, ``exp_avg_dtype``, ``exp_avg_sq_dtype`` | bytes of gradients and moments |
| ``recipe.optimizer_offload_fraction``, ``activation_offload_fraction`` | less memory, and the host's link |
| ``recipe.vocabulary_parallel_stages`` | embedding and head cut over stages |

Quantised copies live as long as the parameters that they are of: from step to step where a rank keeps
parameters whole, since the first micro-batch quantises for all (Transformer Engine's is_first_microbatch),
else while they are gathered. Products' inputs are kept quantised, attention's output in both; routed rows are
counted in bf16.
"""

from __future__ import annotations

from dataclasses import replace

from plait.core.base.errors import JobError
from plait.core.base.numbers import shown
from plait.core.base.text import in_seconds
from plait.core.cluster.hardware import Device
from plait.core.job.spec import Job
from plait.core.model.precision import ITEMSIZE, MASTER, QUANTISED
from plait.core.model.spec import ModelSpec
from plait.core.step.memory.closed_memory import plait_on
from plait.core.step.memory.memory_options import MatrixBytes, MemoryOptions
from plait.plan.fp8_shapes import MULTIPLES, odd_widths
from plait.plan.frameworks import Framework, framework_of


def options_of(job: Job, device: Device, framework: Framework | None = None) -> MemoryOptions:
    """Of a job on a device. framework: the one that runs it, with what a configuration says; None: what
    ``plan.framework`` names."""
    other, recipe = framework or framework_of(job.plan.framework), job.recipe
    kept = other.options if other else plait_on(device)
    if other and not _fuses(other, device):
        kept = replace(kept, fused_attention=False)
    options = replace(
        kept,
        optimizer=job.train.optimizer,
        muon_steps=job.train.muon.ns_steps if job.train.optimizer == "muon" else 0,
        matrix_itemsize=job.train.muon.itemsize(job.train.precision),
        moment_bytes=BYTES["bf16"] if job.train.optimizer_dtype == "bf16" else None,
        reduced_bytes=BYTES["bf16"] if job.strategy.reduce_dtype == "bf16" else None,
        dispatch_once=recipe.moe_token_dispatcher == "deepep",
        exchange_hidden=recipe.overlap_moe_expert_parallel_comm,
        more_alive=int(recipe.overlap_moe_expert_parallel_comm) + int(recipe.vocabulary_parallel_stages),
        experts_whole=recipe.expert_tensor_parallel_size == 1,
        ends_shared=recipe.vocabulary_parallel_stages,
        kept_on_host=recipe.activation_offload_fraction,
    )
    for key, rates in (("activation_offload_fraction", RATES[:1]), ("optimizer_offload_fraction", RATES)):
        missing = [name for name in rates if getattr(device, name) is None]
        if missing and getattr(recipe, key):
            problem = f"{device.name} has no {' and no '.join(missing)}"
            fix = f"Give cluster.device.{missing[0]} in a cluster file, or leave recipe.{key} out"
            raise JobError(problem, key=f"recipe.{key}", fix=fix)
    if options.reduced_bytes is not None:
        options = replace(options, gradient_bytes=options.reduced_bytes)
    return _quantised(job, device, _states(job, options))


def _fuses(framework: Framework, device: Device) -> bool:
    """Whether a framework has attention in one kernel on a device: those that Megatron-LM calls need compute
    capability 8.0, the first to multiply in bf16."""
    return framework.name != "megatron" or "bf16-mixed" not in device.stands_for


RATES = ("host_rate", "host_memory_rate")
"""What of a device offloading needs."""


def _states(job: Job, options: MemoryOptions) -> MemoryOptions:
    """With gradients and moments of other types, and with states on the host."""
    recipe, master, away = job.recipe, float(MASTER), job.recipe.optimizer_offload_fraction
    smaller = sum(master - BYTES[name] for name in (recipe.exp_avg_dtype, recipe.exp_avg_sq_dtype))
    if options.moment_bytes is not None:
        moved = (2 * (3 * master - 2 * (master - options.moment_bytes)) + master) / (7 * master)
        options = replace(options, states_moved=moved)
    if not (recipe.grad_reduce_in_bf16 or smaller or away):
        return options
    if recipe.grad_reduce_in_bf16:
        options = replace(options, main_gradient_bytes=BYTES["bf16"], gradient_bytes=BYTES["bf16"])
    kept = options.optimizer_bytes if options.optimizer_bytes is not None else 3 * master
    gradient = options.main_gradient_bytes if options.main_gradient_bytes is not None else master
    parameter = float(ITEMSIZE[job.train.precision])
    moved = (2 * (kept - smaller) + gradient + parameter) / (2 * kept + master + parameter)
    held = (kept - smaller) * (1 - away)
    return replace(options, states_moved=moved, optimizer_bytes=held, states_on_host=away)


BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0}
"""Of a gradient or a moment."""


def planned_only(job: Job, model: ModelSpec, device: Device, trained: float | None = None) -> list[str]:
    """Sentences on what of a job and its model no rank of Plait's can do, and what is left out or stands for
    something on its device. trained: seconds of a step without it, in closed form."""
    others = job.plan.framework != "plait"  # no rank of Plait's is to do it
    keys = [] if others else [f"{key} = {shown(value)}" for key, value in job.untrained]
    without = f" Without, the closed form says {in_seconds(trained)}." if trained else ""
    told = [f"Planned in closed form, and not trained: {', '.join(keys)}.{without}"] if keys else []
    runs = framework_of(job.plan.framework)
    if runs and not _fuses(runs, device):
        told.append(
            f"{device.name} has none of the kernels of fused attention that {runs.version} calls: scores are kept."
        )
    precision = job.train.precision
    if precision in MULTIPLES and job.plan.framework != "megatron" and (odd := odd_widths(model, precision)):
        each = MULTIPLES[precision][1]
        told.append(
            f"{' and '.join(odd)}: devices multiply widths in {precision} that {each} divides; all are counted so."
        )
    return [*told, *([f"Planned without {', '.join(model.without)}."] if model.without else [])]


def _quantised(job: Job, device: Device, options: MemoryOptions) -> MemoryOptions:
    recipe = QUANTISED.get(job.train.precision)
    if recipe is None:
        return options
    copies, beside = recipe.kept(reads_columns=device.reads_columns), float(ITEMSIZE[job.train.precision])
    if recipe.primary and job.recipe.fp8_param_gather:
        matrices = MatrixBytes(whole=copies, share=recipe.number, gathered=copies)
        return replace(options, matrices=matrices, quantised=recipe.number / beside, input_bytes=recipe.number)
    matrices = MatrixBytes(beside + copies, beside, beside + copies)
    return replace(options, matrices=matrices, input_bytes=recipe.number)
