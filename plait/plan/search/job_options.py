"""Options of the planner's models of time and memory, derived from a job file.

| job | options |
|---|---|
| none of the following | Plait's own runs (``plait_on``) |
| ``plan.framework`` | those of the framework (``frameworks``) |
| ``train.precision`` = fp8, mxfp8, nvfp4 | layers' matrices quantised: kept, and gathered from shards |
| ``recipe.fp8_param_gather = false`` | the same, in addition to parameters in bf16, which are gathered |
| ``recipe.moe_token_dispatcher = "deepep"`` | a token is sent once per node and rank |
| ``recipe.overlap_moe_expert_parallel_comm`` | overlaps with another micro-batch, which stays in memory |
| ``strategy.etp = 1`` | experts are whole |
| ``recipe.grad_reduce_in_bf16``, ``exp_avg_dtype``, ``exp_avg_sq_dtype`` | bytes of gradients and moments |
| ``recipe.optimizer_offload_fraction``, ``activation_offload_fraction`` | less memory, and the host's link |
| ``recipe.vocabulary_parallel_stages`` | embedding and head cut over stages |

Quantised copies live as long as their parameters. If a rank keeps parameters whole, that is from
step to step, since the first micro-batch quantises for all (Transformer Engine's
is_first_microbatch); else while they are gathered. Products' inputs are kept quantised, attention's
output in both precisions; routed rows count in bf16.
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
from plait.formats.base.frameworks import MULTIPLES, Framework, framework_of, odd_widths


def options_of(job: Job, device: Device, framework: Framework | None = None) -> MemoryOptions:
    """Return the options of a job on a device. framework: the framework that runs it, with options
    of its configuration; None: the one that ``plan.framework`` names. Raises JobError if offloading
    needs a rate that the device lacks."""
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
        experts_whole=job.strategy.etp == 1,
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
    """Return True if a framework has fused attention on a device. The kernels that Megatron-LM
    calls need compute capability 8.0, the first with bf16 products."""
    return framework.name != "megatron" or "bf16-mixed" not in device.stands_for


RATES = ("host_rate", "host_memory_rate")
"""Rates of a device that offloading needs."""


def _states(job: Job, options: MemoryOptions) -> MemoryOptions:
    """Return the options with the bytes of the job's types of gradients and moments, and with the
    part of optimizer states that is kept on the host."""
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
"""Bytes of one number of a gradient or a moment, by type."""


def planned_only(job: Job, model: ModelSpec, device: Device, trained: float | None = None) -> list[str]:
    """Return sentences on properties of a job and its model that Plait's ranks cannot run, and on
    those left out or approximated on its device. trained: seconds of a step without them, in closed
    form."""
    others = job.plan.framework != "plait"  # no rank of Plait runs the job
    keys = [] if others else [f"{key} = {shown(value)}" for key, value in job.planning_only]
    without = f" Without them, the closed form predicts {in_seconds(trained)} per step." if trained else ""
    told = [f"Plait plans these in closed form and cannot train with them: {', '.join(keys)}.{without}"] if keys else []
    runs = framework_of(job.plan.framework)
    if runs and not _fuses(runs, device):
        told.append(
            f"{device.name} lacks the fused attention kernels of {runs.version}: attention scores are kept in memory."
        )
    precision = job.train.precision
    if precision in MULTIPLES and job.plan.framework != "megatron" and (odd := odd_widths(model, precision)):
        each = MULTIPLES[precision][1]
        told.append(
            f"{' and '.join(odd)}: {precision} kernels need widths divisible by {each}; the prediction assumes this."
        )
    return [*told, *([f"Planned without {', '.join(model.without)}."] if model.without else [])]


def _quantised(job: Job, device: Device, options: MemoryOptions) -> MemoryOptions:
    recipe = QUANTISED.get(job.train.precision)
    if recipe is None:
        return options
    copies, beside = recipe.element_bytes(reads_columns=device.reads_columns), float(ITEMSIZE[job.train.precision])
    if recipe.primary and job.recipe.fp8_param_gather:
        matrices = MatrixBytes(whole=copies, share=recipe.number, gathered=copies)
        return replace(options, matrices=matrices, quantised=recipe.number / beside, input_bytes=recipe.number)
    matrices = MatrixBytes(beside + copies, beside, beside + copies)
    return replace(options, matrices=matrices, input_bytes=recipe.number)
