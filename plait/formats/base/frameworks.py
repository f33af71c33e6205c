"""Other frameworks for which Plait can plan a job: their possible strategies, their memory, and the
transfers that they overlap with computation.

| framework | version | sources |
|---|---|---|
| megatron | Megatron-LM d98e8a64, August 2026 | its arguments.py and core; arXiv 2205.05198, 2104.04473 |
| torchtitan | 0.3.0, with torch's FSDP2 | its configuration; torch/distributed/pipelining/stage.py |
| deepspeed | 0.19.8 | ZeRO (arXiv 1910.02054); the files listed below |
| llama3 | Meta's training of Llama 3, not public | arXiv 2407.21783, section 3.3.2, taken literally |

Megatron-LM, ``core/pipeline_parallel/schedules.py``: interleaved rounds take groups of N
micro-batches, with N from pp to all of a step. The last group is full, or has at least pp
micro-batches. N is pp unless a flag sets it.

DeepSpeed, by file of ``deepspeed/runtime``:

| file | fact |
|---|---|
| engine.py, get_data_types | gradients accumulate in the model's dtype, unless grad_accum_dtype is set |
| engine.py, allreduce_gradients | without ZeRO gradients are all-reduced in buckets after the last backward |
| engine.py | ZeRO shards over the context-parallel ranks, too; no overlap_comm within a pipeline |
| zero/stage_1_and_2.py, step | a rank copies its shard's gradients to fp32 while it applies them |
| zero/stage_1_and_2.py, step | new parameters are gathered at a step's end, without overlap |
| zero/parameter_offload.py | ZeRO-3 gathers on a stream of its own with overlap_comm, the default |
| pipe/engine.py | refuses ZeRO-2 and 3 |
| tensor_parallel/config.py | tp_overlap_comm hides all-reduces |

torchtitan, by file of ``torchtitan``:

| file | fact |
|---|---|
| components/loss.py, models/*/config_registry.py | the loss is computed in 8 parts, one after the other |
| config/configs.py | FSDP2 reduces gradients in fp32; asynchronous tensor parallelism needs compile |
| distributed/fsdp.py | in a pipeline parameters stay gathered by default |

torch's pipelines keep FSDP2's parameters gathered and gradients unsharded until the last
micro-batch of a step. torch's ``pipelining/schedules.py`` refuses 1F1B of fewer micro-batches than
pipeline ranks, and Interleaved1F1B if the micro-batches do not divide into rounds of pp or a few
more. The memory of torchtitan's six published pipelines
(benchmarks/llama3_h100_202412_torchtitan.md) is 15 to 29 % above that of their tensors, 22 % in the
quadratic mean. Their steps have as many micro-batches as stages, torchtitan's default at that time.
``MEMORY_OPTIONS`` has the memory of these and other frameworks, as derived from published figures
(docs/adr/0014).

Matrix products in 8 and 4 bits: Transformer Engine's limits on sizes, as rules on strategies.
``assert_dim_for_fp8_exec`` (transformer_engine/pytorch/utils.py) wants a height divisible by 8 and
a width divisible by 16; the block quantisers want multiples of these. The height is the tokens of a
micro-batch; the width is the dimension that a product sums over on one tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import JobError
from plait.core.model.precision import Precision
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import JOB_DEFAULTS, OVERLAPS, RECOMPUTES, SCHEDULES, StrategyTable
from plait.core.step.memory.memory_options import PLAIT, MemoryOptions
from plait.formats.base.kept_memory import FrameworkMemory

COMMON = FrameworkMemory(
    recompute_attention=True, recompute_collectives=True, rounds_hide_transfers=False, in_lists=False,
    sums_in_place=True, rotary_in_place=True, regathers=True, ends_fill=True,
)  # fmt: skip
"""Memory options common to all other frameworks. Logits: in bf16, in fp32, and the softmax's kept
output."""
_FSDP = replace(
    COMMON, parameter_bytes=4.0, gathered_bytes=2.0, main_gradient_bytes=4.0, optimizer_bytes=8.0, gathers_stay=True
)  # fmt: skip
MEMORY_OPTIONS: Mapping[str, MemoryOptions] = {
    "plait": PLAIT,
    "megatron": replace(COMMON, fused_gate=True, rounds_hide_transfers=True),
    "nemo": replace(COMMON, fused_gate=True, main_gradient_bytes=2.0),  # distributed_fused_adam, grad_sync_dtype bf16
    "megatron-deepspeed": replace(
        COMMON, main_gradient_bytes=2.0, optimizer_bytes=18.0, stream_bytes=2.0, fixed_bytes=2e9, logit_bytes=8.0,
        gradient_bytes=2.0,
    ),
    "zero-bubble": replace(COMMON, main_gradient_bytes=2.0, stream_bytes=2.0, ends_count=True, fused_attention=False),
    "aleph-alpha": replace(
        COMMON, main_gradient_bytes=2.0, score_bytes=8.0, logit_bytes=22.0, logits_whole=True, regathers=False
    ),
    "internevo": replace(COMMON, main_gradient_bytes=2.0, update_bytes=14.0),
    "paddlenlp": replace(COMMON, logit_bytes=22.0),
    "llama3": replace(
        COMMON, fused_gate=True, transfers_hidden=True, rounds_reduce=True, frees_inputs=True
    ),  # FSDP shards gradients and optimizer states; stages free their inputs; transfers are asynchronous
    "fsdp": _FSDP,
    "torchtitan": replace(
        _FSDP, logit_bytes=4.0, shared_logit_bytes=20.0, pipeline_doubt=0.22
    ),  # torch.compile fuses the loss into one kernel, except over vocabulary shards
    "deepspeed": replace(
        COMMON, main_gradient_bytes=2.0, update_bytes=4.0, gradient_bytes=2.0, sums_late=True
    ),  # 2 + 2 + 12 bytes (arXiv 1910.02054, section 3.1), and a shard's gradients in fp32 while these are applied
    "llm-foundry": replace(_FSDP, logit_bytes=4.0),  # fused_crossentropy: logits and their gradient share a buffer
}  # fmt: skip

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Rule:
    """A constraint on strategies. sentence, key, fix: message, job key and advice for a strategy
    that breaks it. scheduling: True if it concerns only pp, micro-batches and schedule. search: the
    model part for which a search applies the rule; a fixed strategy that breaks such a rule still
    runs, but differently. Empty: the rule always applies."""

    sentence: str
    key: str
    fix: str
    holds: Callable[[StrategyTable], Mask]
    scheduling: bool = False
    search: Literal["", "experts", "window"] = ""


def _whole(points: StrategyTable) -> Mask:
    """Return a mask of the strategies whose parameters and gradients are unsharded."""
    return (points.params == 1) & (points.grads == 1)


def _alike(points: StrategyTable) -> Mask:
    """Return a mask of the strategies whose gradients are sharded like the optimizer states, and
    whose parameters are sharded like these or not at all."""
    return (points.grads == points.optim) & ((points.params == points.optim) | (points.params == 1))


def _zero(points: StrategyTable) -> Mask:
    """Return a mask of the strategies whose parameters, gradients and optimizer states are each
    unsharded or sharded over all replicas."""
    kept = np.ones(len(points), dtype=bool)
    for factor in (points.params, points.grads, points.optim):
        kept &= (factor == 1) | (factor == points.replicas)
    return kept


def _grouped(points: StrategyTable) -> Mask:
    """Return a mask that is False for interleaved schedules whose micro-batches do not divide into
    groups of pp."""
    return (points.schedule != _INTERLEAVED) | (points.num_micro % points.pp == 0)


def _rounded(points: StrategyTable) -> Mask:
    """Return a mask that is False for interleaved schedules whose micro-batches do not divide into
    micro-batches // pp equal groups (at least one group)."""
    rounds = np.maximum(1, points.num_micro // points.pp)
    return (points.schedule != _INTERLEAVED) | (points.num_micro % rounds == 0)


def _filled(points: StrategyTable) -> Mask:
    """Return a mask that is False for 1F1B with fewer micro-batches than pipeline ranks."""
    plain = points.schedule == SCHEDULES.index("1f1b")
    return ~plain | (points.num_micro >= points.pp)


def sequences(points: StrategyTable) -> NDArray[np.int64]:
    """Return the sequences per step of each strategy: micro-batch size x micro-batches x dp."""
    return points.micro * points.num_micro * points.dp


_INTERLEAVED = SCHEDULES.index("interleaved")
GROUPS = "strategy.virtual_stages"
"""The key of Megatron-LM's rule on groups of micro-batches; a flag sets another group size."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework's strategies, memory and time. name: the word in a job. version: the version
    described. options: memory and time options. values: possible values by column of
    ``StrategyTable``, the default first; a column without an entry may have any. rules: constraints
    on several columns at once."""

    name: str
    version: str
    options: MemoryOptions
    values: Mapping[str, Sequence[int]]
    rules: Sequence[Rule]

    def feasible(self, points: StrategyTable, model: ModelSpec | None = None) -> Mask:
        """Return a mask of the strategies that keep the framework's rules. model: the model of a
        search; None leaves out the rules that apply to searches alone."""
        kept = np.ones(len(points), dtype=bool)
        for rule in self.rules:
            if not rule.search or (model and getattr(model, rule.search)):
                kept &= rule.holds(points)
        return kept

    def supports_schedule(self, name: str, pp: int, num_micro: int) -> bool:
        """True if the framework runs ``num_micro`` micro-batches over ``pp`` pipeline ranks in a
        schedule."""
        points = StrategyTable.of([{"pp": pp, "num_micro": num_micro, "schedule": SCHEDULES.index(name)}])
        return all(bool(rule.holds(points).all()) for rule in self.rules if rule.scheduling)

    def within(self, fixed: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """Return a job's fixed values by column, limited to those of the framework. The framework's
        default replaces Plait's default. Raises JobError for any other value that the framework
        lacks."""
        found = {name: list(values) for name, values in fixed.items()}
        for name in self.values.keys() & fixed.keys():
            values = self.values[name]
            both = [one for one in found[name] if one in values]
            if not both and found[name] != [JOB_DEFAULTS.get(name)]:
                told = ", ".join(_word(name, one) for one in found[name])
                raise JobError(
                    f"{self.version} does not support {told}", key=KEYS.get(name, f"strategy.{name}"),
                    fix=f"Use {' or '.join(_word(name, one) for one in values)}, or leave it out",
                )  # fmt: skip
            found[name] = both or [values[0]]
        return found

    def adapt(self, strategy: Mapping[str, int], batch: int = 0) -> dict[str, int]:
        """Return a strategy as the framework runs it. batch: sequences per step, 0 for any. Raises
        JobError if the framework cannot run it."""
        settled = self.within({name: [value] for name, value in strategy.items()})
        found = {name: values[0] for name, values in settled.items()}
        points = StrategyTable.of([found])
        for rule in self.rules:
            if not rule.search and not rule.holds(points).all():
                raise JobError(f"{rule.sentence} ({self.version})", key=rule.key, fix=rule.fix)
        if batch and int(sequences(points)[0]) != batch:
            micro, dp = found["micro"], found["dp"]
            problem = f"{batch:,} sequences are no whole number of micro-batches of {micro} on each of {dp} replicas"
            below = batch // (micro * dp) * micro * dp
            fix = f"Use {' or '.join(str(one) for one in (below, below + micro * dp) if one)}, or another micro-batch"
            raise JobError(f"{problem}, which {self.version} refuses", key="train.global_batch_size", fix=fix)
        return found

    def replacements(self, point: Mapping[str, int]) -> list[str]:
        """Return a sentence for each default of Plait's that the framework lacks, with its
        replacement."""
        found = self.adapt(point)
        return [
            f"{_word(name, value)} is Plait's alone: {_word(name, found[name])} stands for it."
            for name, value in point.items() if name in self.values and value != found[name]
        ]  # fmt: skip


KEYS = {
    "overlap": "strategy.overlap", "p1": "strategy.slices", "p2": "strategy.slices", "secondary": "strategy.shard",
    "recompute_layers": "strategy.recompute", "ring": "strategy.cp_comm_type", "shard_overlap": "strategy.overlap",
    "graphs": "strategy.cuda_graphs",
}  # fmt: skip
"""A job's keys by column of ``StrategyTable``, for columns named otherwise than their key."""
WORDS: Mapping[str, Sequence[str]] = {
    "schedule": SCHEDULES, "recompute": RECOMPUTES, "overlap": OVERLAPS, "graphs": ("false", "true"),
}  # fmt: skip


def _word(name: str, value: int) -> str:
    return WORDS[name][value] if name in WORDS else str(value)


def _numbers(words: Sequence[str], *wanted: str) -> tuple[int, ...]:
    return tuple(map(words.index, wanted))


UNSLICED: Mapping[str, Sequence[int]] = {"p1": (1,), "p2": (1,), "secondary": (0,)}
"""Values of ``StrategyTable`` columns in all other frameworks: no Domino slices, and no secondary
copy of parameters."""
UNCAPTURED: Mapping[str, Sequence[int]] = {"graphs": (0,)}
"""Value of the ``graphs`` column without CUDA graphs. Only Plait captures the segments between
collectives; Megatron-LM's graphs also contain the collectives."""
FRAMEWORKS: Mapping[str, Framework] = {
    "megatron": Framework(
        name="megatron",
        version="Megatron-LM d98e8a64 (August 2026)",
        options=MEMORY_OPTIONS["megatron"],
        values=UNSLICED | UNCAPTURED | {
            "overlap": _numbers(OVERLAPS, "async"),
            "schedule": _numbers(SCHEDULES, "1f1b", "interleaved"),
        },
        rules=(
            Rule(
                "Its distributed optimizer shards optimizer states only; Megatron-FSDP shards gradients over the same "
                "ranks, and parameters over these or not at all",
                "strategy.shard", 'Use "ddp", "zero1", "zero2" or "fsdp"',
                lambda points: _whole(points) | _alike(points),
            ),
            Rule(
                "Its interleaved schedule takes micro-batches in groups of pp", GROUPS,
                "Use 1, or a train.global_batch_size whose micro-batches are a multiple of strategy.pp", _grouped, True,
            ),
            Rule(
                "Its experts of several tensor-parallel ranks need sequence parallelism", "strategy.sequence_parallel",
                "Use true", lambda points: (points.tp == 1) | (points.sequence_parallel > 0), search="experts",
            ),
            Rule(
                "Transformer Engine supports sliding windows under context parallelism only by all-to-all",
                "strategy.cp_comm_type", 'Use "ulysses"', lambda points: points.ring == 1, search="window",
            ),
        ),
    ),
    "llama3": Framework(
        name="llama3",
        version="Meta's training of Llama 3 (arXiv 2407.21783)",
        options=MEMORY_OPTIONS["llama3"],
        values=UNSLICED | UNCAPTURED | {
            "overlap": _numbers(OVERLAPS, "async"),
            "schedule": _numbers(SCHEDULES, "1f1b", "interleaved"),
        },
        rules=(
            Rule(
                "Its parameters stay gathered from forward to backward, and a stage's gradients are whole while its "
                "micro-batches follow each other",
                "strategy.shard", 'Use "zero1"', _whole,
            ),
        ),
    ),
    "torchtitan": Framework(
        name="torchtitan",
        version="torchtitan 0.3.0",
        options=replace(MEMORY_OPTIONS["torchtitan"], loss_chunks=8),
        values=UNSLICED | {
            "overlap": _numbers(OVERLAPS, "sync", "async"),
            "schedule": _numbers(SCHEDULES, "1f1b", "interleaved", "zb-v", "gpipe"),
            "recompute": _numbers(RECOMPUTES, "none", "full"),
            "recompute_layers": (-1,),
            "ep": (1,),
        },
        rules=(
            Rule(
                "FSDP2 shards gradients as optimizer states, and parameters likewise or not at all; in a pipeline "
                "both stay unsharded until the last micro-batch",
                "strategy.shard", 'Use "fsdp" without a pipeline, "zero1" with one',
                lambda points: np.where(points.pp == 1, _alike(points), _whole(points)),
            ),
            Rule(
                "FSDP2 also shards over the context-parallel ranks",
                "strategy.shard", 'Use "fsdp" or "zero1"', lambda points: points.optim % points.cp == 0,
            ),
            Rule(
                "Its context parallelism is a ring",
                "strategy.cp_comm_type", 'Use "ring"', lambda points: points.ring == points.cp,
            ),
            Rule(
                "Its ring overlaps all-gathers with attention", "strategy.overlap", 'Use "async"',
                lambda points: (points.tp > 1) | (points.cp == 1) | (points.overlap == OVERLAPS.index("async")),
            ),
            Rule(
                "It captures whole steps, without a pipeline", "strategy.cuda_graphs", "Use false, or strategy.pp=1",
                lambda points: (points.graphs == 0) | (points.pp == 1),
            ),
            Rule(
                "Its 1F1B needs at least pp micro-batches", "strategy.schedule",
                'Use "gpipe", a smaller strategy.pp or a larger train.global_batch_size', _filled, True,
            ),
            Rule(
                "Its interleaved schedule takes micro-batches in equal groups of pp or a few more", "strategy.schedule",
                "Use a train.global_batch_size whose micro-batches are a multiple of strategy.pp", _rounded, True,
            ),
        ),
    ),
    "deepspeed": Framework(
        name="deepspeed",
        version="DeepSpeed 0.19.8",
        options=MEMORY_OPTIONS["deepspeed"],
        values=UNCAPTURED | {
            "p1": (1,), "p2": (1,), "sequence_parallel": (0,),
            "overlap": _numbers(OVERLAPS, "sync", "async"),
            "schedule": _numbers(SCHEDULES, "1f1b"),
            "recompute": _numbers(RECOMPUTES, "none", "full"),
            "recompute_layers": (-1,),
            "ring": (1,),
        },
        rules=(
            Rule(
                "ZeRO shards over all dp x cp ranks, in stages", "strategy.shard",
                'Use "ddp", "zero1", "zero2" or "zero3"', _zero,
            ),
            Rule(
                "Its pipeline runs with ZeRO-1 at most, and without cp",
                "strategy.pp", "Use pp = 1, or another sharding",
                lambda points: (points.pp == 1) | (_whole(points) & (points.cp == 1)),
            ),
        ),
    ),
}  # fmt: skip
"""The frameworks by their name in ``plan.framework``."""


def framework_of(name: str) -> Framework | None:
    """Return the framework by its name in ``plan.framework``; None for Plait's own runtime."""
    return FRAMEWORKS.get(name)


MULTIPLES: Mapping[Precision, tuple[int, int]] = {"fp8": (8, 16), "mxfp8": (32, 32), "nvfp4": (16, 16)}
"""The required divisors of a matrix's height and width, by precision."""


def fp8_rules(model: ModelSpec, sequence: int, precision: Precision) -> Iterator[Rule]:
    """Yield the rules on the sizes of a model's matrix products. sequence: tokens per sequence."""
    height, width = MULTIPLES[precision]
    engine = f"Transformer Engine multiplies in {precision} what {height} divides in height and {width} in width"
    yield Rule(
        f"{engine}, which a micro-batch's tokens of sequences of {sequence:,} do not", "data.sequence_length",
        f"Use a multiple of {height} tokens on each rank of the sequence, or another train.micro_batch_size",
        partial(_rows, sequence, height),
    )  # fmt: skip
    for key, size, cut in _widths(model):
        share = ", sharded over tp ranks," if cut else ""
        yield Rule(
            f"{engine}: {key} = {size:,}{share} is none such", key if key.startswith("model.") else "model.hidden",
            f"Use a multiple of {width}{' x tp' if cut else ''}, or train.precision=bf16-mixed",
            partial(_width, size, width, cut),
        )  # fmt: skip


def check_widths(model: ModelSpec, precision: Precision) -> None:
    """Raise JobError if a model's widths break the rules under every strategy."""
    if odd := odd_widths(model, precision):
        height, width = MULTIPLES[precision]
        problem = f"Transformer Engine multiplies in {precision} what {height} divides in height and {width} in width"
        fix = f"Use a multiple of {width}, or train.precision=bf16-mixed"
        raise JobError(f"{problem}, which {' and '.join(odd)} are not", key=odd[0].split()[0], fix=fix)


def odd_widths(model: ModelSpec, precision: Precision) -> list[str]:
    """Return the model's widths that a precision cannot multiply even without tensor
    parallelism."""
    return [f"{key} {size:,}" for key, size, _ in _widths(model) if size % MULTIPLES[precision][1]]


def _widths(model: ModelSpec) -> Iterator[tuple[str, int, bool]]:
    """Yield the dimensions that the layers' products sum over: key, size, and whether tensor
    parallelism cuts it."""
    yield "model.hidden", model.hidden, False
    if not model.kv_lora_rank:
        yield "model.num_heads x head_size", model.num_heads * model.head_size, True
    if not model.experts or model.experts.first_dense or model.experts.every > 1:
        yield "model.ffn_hidden", model.ffn_hidden, True
    if model.experts:
        yield "model.experts.ffn_hidden", model.experts.ffn_hidden, True


def _rows(sequence: int, height: int, points: StrategyTable) -> NDArray[np.bool_]:
    return np.asarray(points.micro * sequence % (points.cp * height) == 0)


def _width(size: int, width: int, cut: bool, points: StrategyTable) -> NDArray[np.bool_]:
    return np.asarray(size % (width * (points.tp if cut else 1)) == 0) & np.ones(len(points), dtype=bool)
