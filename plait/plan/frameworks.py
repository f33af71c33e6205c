"""Frameworks for which a job can be planned besides Plait: what their strategies can be, and what their runs
keep in memory and hide behind computation.

| framework | version | sources |
|---|---|---|
| megatron | Megatron-LM d98e8a64, August 2026 | its arguments.py and core; arXiv 2205.05198, 2104.04473 |
| torchtitan | 0.3.0, with torch's FSDP2 | its configuration; torch/distributed/pipelining/stage.py |
| deepspeed | 0.19.8 | ZeRO (arXiv 1910.02054); what its files below say |
| llama3 | Meta's training of Llama 3, not public | arXiv 2407.21783, section 3.3.2, taken at its word |

Megatron-LM, ``core/pipeline_parallel/schedules.py``: interleaved rounds take groups of N micro-batches, N
from pp to all of a step, and what is left over is none, or pp at least. N is pp unless a flag says another.

DeepSpeed, by file of ``deepspeed/runtime``:

| file | fact |
|---|---|
| engine.py, get_data_types | gradients are summed in the model's type, unless grad_accum_dtype says another |
| engine.py, allreduce_gradients | without ZeRO they are summed in buckets after the last backward |
| engine.py | ZeRO shares out over the ranks of a sequence, too; no overlap_comm within a pipeline |
| zero/stage_1_and_2.py, step | of its shard a rank copies gradients to fp32, while they are applied |
| zero/stage_1_and_2.py, step | new parameters are gathered at a step's end, and waited for |
| zero/parameter_offload.py | ZeRO-3 gathers on a stream of its own if overlap_comm, its default |
| pipe/engine.py | refuses ZeRO-2 and 3 |
| tensor_parallel/config.py | tp_overlap_comm hides all-reduces |

torchtitan, by file of ``torchtitan``:

| file | fact |
|---|---|
| components/loss.py, models/*/config_registry.py | the loss is computed in 8 parts, one by one |
| config/configs.py | FSDP2 reduces gradients in fp32; asynchronous tensor parallelism needs compile |
| distributed/fsdp.py | under a pipeline parameters stay gathered unless told otherwise |

torch's pipelines keep FSDP2's parameters gathered and gradients whole until the last micro-batch of a step.
Its ``pipelining/schedules.py`` refuses 1F1B of fewer micro-batches than places, and Interleaved1F1B whose
micro-batches do not divide into rounds of pp or a few more. Memory of torchtitan's six published pipelines
(benchmarks/llama3_h100_202412_torchtitan.md) is 15 to 29 % above that of their tensors, 22 % in the quadratic
mean, where a step has as many micro-batches as stages, its default then.
``KEPT`` has what published memory tells of these and of others (docs/adr/0014).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from plait.core.base.errors import JobError
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, Points
from plait.core.step.memory.memory_options import PLAIT, MemoryOptions
from plait.core.step.seconds.options import OTHERS
from plait.plan.relax import DEFAULTS
from plait.plan.space import SearchRequest

_OTHER = replace(
    MemoryOptions.of(OTHERS), sums_in_place=True, rotary_in_place=True, regathers=True, logit_bytes=10.0, defers=False,
    ends_fill=True,
)  # fmt: skip
"""What all others have in common. Logits: in bf16, in fp32, and what the softmax keeps."""
_FSDP = replace(
    _OTHER, parameter_bytes=4.0, gathered_bytes=2.0, main_gradient_bytes=4.0, optimizer_bytes=8.0, gathers_stay=True
)  # fmt: skip
KEPT: Mapping[str, MemoryOptions] = {
    "plait": PLAIT,
    "megatron": replace(_OTHER, fused_gate=True, rounds_hide_transfers=True),
    "nemo": replace(_OTHER, fused_gate=True, main_gradient_bytes=2.0),  # distributed_fused_adam, grad_sync_dtype bf16
    "megatron-deepspeed": replace(
        _OTHER, main_gradient_bytes=2.0, optimizer_bytes=18.0, stream_bytes=2.0, fixed_bytes=2e9, logit_bytes=8.0,
        gradient_bytes=2.0,
    ),
    "zero-bubble": replace(_OTHER, main_gradient_bytes=2.0, stream_bytes=2.0, ends_count=True, fused_attention=False),
    "aleph-alpha": replace(
        _OTHER, main_gradient_bytes=2.0, score_bytes=8.0, logit_bytes=22.0, logits_whole=True, regathers=False
    ),
    "internevo": replace(_OTHER, main_gradient_bytes=2.0, update_bytes=14.0),
    "paddlenlp": replace(_OTHER, logit_bytes=22.0),
    "llama3": replace(
        _OTHER, fused_gate=True, transfers_hidden=True, rounds_reduce=True, frees_inputs=True
    ),  # FSDP shares out gradients and optimizer states; inputs of stages are let go of; transfers asynchronous
    "fsdp": _FSDP,
    "torchtitan": replace(
        _FSDP, logit_bytes=4.0, shared_logit_bytes=20.0, pipeline_doubt=0.22
    ),  # torch.compile makes one kernel of the loss, but not of one over shards of the vocabulary
    "deepspeed": replace(
        _OTHER, main_gradient_bytes=2.0, update_bytes=4.0, gradient_bytes=2.0, sums_late=True
    ),  # 2 + 2 + 12 bytes (arXiv 1910.02054, section 3.1), and a shard's gradients in fp32 while they are applied
    "llm-foundry": replace(_FSDP, logit_bytes=4.0),  # fused_crossentropy: logits and their gradient in one place
}  # fmt: skip

Mask = NDArray[np.bool_]


class Rule(NamedTuple):
    """A sentence and the key and advice that go with it where a point does not keep it. scheduling: whether
    it is on places, micro-batches and their schedule alone. search: a part of models that have it, where it
    holds of searches alone: a strategy that is given runs otherwise than it says."""

    sentence: str
    key: str
    fix: str
    kept: Callable[[Points], Mask]
    scheduling: bool = False
    search: Literal["", "experts", "window"] = ""


def _whole(points: Points) -> Mask:
    """Whether parameters and gradients are whole on every rank."""
    return (points.params == 1) & (points.grads == 1)


def _alike(points: Points) -> Mask:
    """Whether gradients are shared out as optimizer states, and parameters so, too, or not at all."""
    return (points.grads == points.optim) & ((points.params == points.optim) | (points.params == 1))


def _zero(points: Points) -> Mask:
    """Whether each of the three is whole, or shared out over all."""
    kept = np.ones(len(points), dtype=bool)
    for factor in (points.params, points.grads, points.optim):
        kept &= (factor == 1) | (factor == points.replicas)
    return kept


def _grouped(points: Points) -> Mask:
    """Whether interleaved micro-batches divide into groups of pp."""
    return (points.schedule != _INTERLEAVED) | (points.num_micro % points.pp == 0)


def _rounded(points: Points) -> Mask:
    """Whether interleaved micro-batches divide into as many groups as there are whole ones of pp."""
    rounds = np.maximum(1, points.num_micro // points.pp)
    return (points.schedule != _INTERLEAVED) | (points.num_micro % rounds == 0)


def _filled(points: Points) -> Mask:
    """Whether 1F1B has a micro-batch for every place."""
    plain = points.schedule == SCHEDULES.index("1f1b")
    return ~plain | (points.num_micro >= points.pp)


def _sequences(points: Points) -> NDArray[np.int64]:
    """Of a step, where every replica has whole micro-batches."""
    return points.micro * points.num_micro * points.dp


_INTERLEAVED = SCHEDULES.index("interleaved")
GROUPS = "strategy.virtual_stages"
"""Key of Megatron-LM's rule on groups of micro-batches, of which a flag says another size."""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """name: as a job says it. version: of which this is. options: its memory and time. has: by column of
    ``Points`` its values, the first of them its default; any where none stand. rules: on several columns at
    once. entry: the program that torchrun starts."""

    name: str
    version: str
    options: MemoryOptions
    has: Mapping[str, Sequence[int]]
    rules: Sequence[Rule]
    entry: str = ""

    def can(self, points: Points, model: ModelSpec | None = None) -> Mask:
        """Of every point, whether it keeps the rules. model: is searched for; None: whatever it is."""
        kept = np.ones(len(points), dtype=bool)
        for rule in self.rules:
            if not rule.search or (model and getattr(model, rule.search)):
                kept &= rule.kept(points)
        return kept

    def schedules(self, name: str, pp: int, num_micro: int) -> bool:
        """Whether it runs so many micro-batches over so many places in a schedule of its own."""
        points = Points.of([{"pp": pp, "num_micro": num_micro, "schedule": SCHEDULES.index(name)}])
        return all(bool(rule.kept(points).all()) for rule in self.rules if rule.scheduling)

    def within(self, fixed: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
        """By column, of the values that a job fixes those that the framework has; in place of Plait's default
        the framework's. Raises JobError for any other value that it has not."""
        found = {name: list(values) for name, values in fixed.items()}
        for name in self.has.keys() & fixed.keys():
            values = self.has[name]
            both = [one for one in found[name] if one in values]
            if not both and found[name] != [DEFAULTS.get(name)]:
                told = ", ".join(_word(name, one) for one in found[name])
                raise JobError(
                    f"{told} is nothing that {self.version} has", key=KEYS.get(name, f"strategy.{name}"),
                    fix=f"Use {' or '.join(_word(name, one) for one in values)}, or leave it out",
                )  # fmt: skip
            found[name] = both or [values[0]]
        return found

    def asked(self, asked: SearchRequest, options: MemoryOptions) -> SearchRequest:
        """Of a space the part that the framework has. options: of the job on its device."""
        ends = 2 if options.ends_fill else 0

        def can(points: Points) -> Mask:
            return self.can(points, asked.model) & (_sequences(points) == asked.global_batch)

        return replace(asked, fixed=self.within(asked.fixed), has=self.has, can=can, options=options, ends=ends)

    def point(self, point: Mapping[str, int], batch: int = 0) -> dict[str, int]:
        """A point as the framework runs it. batch: sequences of a step, 0 where any will do. Raises JobError
        where it cannot."""
        settled = self.within({name: [value] for name, value in point.items()})
        found = {name: values[0] for name, values in settled.items()}
        points = Points.of([found])
        for rule in self.rules:
            if not rule.search and not rule.kept(points).all():
                raise JobError(f"{rule.sentence} ({self.version})", key=rule.key, fix=rule.fix)
        if batch and int(_sequences(points)[0]) != batch:
            micro, dp = found["micro"], found["dp"]
            problem = f"{batch:,} sequences are no whole number of micro-batches of {micro} on each of {dp} replicas"
            below = batch // (micro * dp) * micro * dp
            fix = f"Use {' or '.join(str(one) for one in (below, below + micro * dp) if one)}, or another micro-batch"
            raise JobError(f"{problem}, which {self.version} refuses", key="train.global_batch_size", fix=fix)
        return found

    def instead(self, point: Mapping[str, int]) -> list[str]:
        """What stands for Plait's defaults that it has not, a sentence each."""
        found = self.point(point)
        return [
            f"{_word(name, value)} is Plait's alone: {_word(name, found[name])} stands for it."
            for name, value in point.items() if name in self.has and value != found[name]
        ]  # fmt: skip


KEYS = {
    "overlap": "strategy.overlap", "p1": "strategy.slices", "p2": "strategy.slices", "secondary": "strategy.shard",
    "recompute_layers": "strategy.recompute", "ring": "strategy.cp_comm_type", "shard_overlap": "strategy.overlap",
    "graphs": "strategy.cuda_graphs",
}  # fmt: skip
"""Keys of a job that say what a column holds, where they have other names."""
WORDS: Mapping[str, Sequence[str]] = {
    "schedule": SCHEDULES, "recompute": RECOMPUTES, "overlap": OVERLAPS, "graphs": ("false", "true"),
}  # fmt: skip


def _word(name: str, value: int) -> str:
    return WORDS[name][value] if name in WORDS else str(value)


def _numbers(words: Sequence[str], *wanted: str) -> tuple[int, ...]:
    return tuple(map(words.index, wanted))


UNSLICED: Mapping[str, Sequence[int]] = {"p1": (1,), "p2": (1,), "secondary": (0,)}
"""Of all others: no Domino, and no second copy of parameters."""
UNCAPTURED: Mapping[str, Sequence[int]] = {"graphs": (0,)}
"""What is captured are stretches between collectives, by Plait alone; Megatron-LM's graphs hold both."""
FRAMEWORKS: Mapping[str, Framework] = {
    "megatron": Framework(
        name="megatron",
        version="Megatron-LM d98e8a64 (August 2026)",
        options=KEPT["megatron"],
        has=UNSLICED | UNCAPTURED | {
            "overlap": _numbers(OVERLAPS, "async"),
            "schedule": _numbers(SCHEDULES, "1f1b", "interleaved"),
        },
        rules=(
            Rule(
                "Its distributed optimizer shares out optimizer states alone, Megatron-FSDP the rest as these",
                "strategy.shard", 'Use "ddp", "zero1", "zero2" or "fsdp"',
                lambda points: _whole(points) | _alike(points),
            ),
            Rule(
                "Its interleaved rounds take groups of as many micro-batches as there are places", GROUPS,
                "Use 1, or a train.global_batch_size whose micro-batches are a multiple of strategy.pp", _grouped, True,
            ),
            Rule(
                "Its experts of several tensor-parallel ranks need sequence parallelism", "strategy.sequence_parallel",
                "Use true", lambda points: (points.tp == 1) | (points.sequence_parallel > 0), search="experts",
            ),
            Rule(
                "Transformer Engine has windows over the ranks of a sequence by exchanging heads",
                "strategy.cp_comm_type", 'Use "ulysses"', lambda points: points.ring == 1, search="window",
            ),
        ),
        entry="pretrain_gpt.py",
    ),
    "llama3": Framework(
        name="llama3",
        version="Meta's training of Llama 3 (arXiv 2407.21783)",
        options=KEPT["llama3"],
        has=UNSLICED | UNCAPTURED | {
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
        options=replace(KEPT["torchtitan"], loss_chunks=8),
        has=UNSLICED | {
            "overlap": _numbers(OVERLAPS, "sync", "async"),
            "schedule": _numbers(SCHEDULES, "1f1b", "interleaved", "zb-v", "gpipe"),
            "recompute": _numbers(RECOMPUTES, "none", "full"),
            "recompute_layers": (-1,),
            "ep": (1,),
        },
        rules=(
            Rule(
                "FSDP2 shares out gradients as optimizer states, and parameters so or not at all; under a pipeline "
                "both stay whole until the last micro-batch",
                "strategy.shard", 'Use "fsdp" without a pipeline, "zero1" with one',
                lambda points: np.where(points.pp == 1, _alike(points), _whole(points)),
            ),
            Rule(
                "FSDP2's shards are over the ranks of a sequence, too",
                "strategy.shard", 'Use "fsdp" or "zero1"', lambda points: points.optim % points.cp == 0,
            ),
            Rule(
                "Its context parallelism is a ring",
                "strategy.cp_comm_type", 'Use "ring"', lambda points: points.ring == points.cp,
            ),
            Rule(
                "Its ring gathers behind attention", "strategy.overlap", 'Use "async"',
                lambda points: (points.tp > 1) | (points.cp == 1) | (points.overlap == OVERLAPS.index("async")),
            ),
            Rule(
                "It captures whole steps, without a pipeline", "strategy.cuda_graphs", "Use false, or strategy.pp=1",
                lambda points: (points.graphs == 0) | (points.pp == 1),
            ),
            Rule(
                "Its 1F1B needs a micro-batch for every place", "strategy.schedule",
                'Use "gpipe", a smaller strategy.pp or a larger train.global_batch_size', _filled, True,
            ),
            Rule(
                "Its interleaved rounds take groups of equally many micro-batches, of as many as there are places or a "
                "few more", "strategy.schedule",
                "Use a train.global_batch_size whose micro-batches are a multiple of strategy.pp", _rounded, True,
            ),
        ),
        entry="-m torchtitan.train",
    ),
    "deepspeed": Framework(
        name="deepspeed",
        version="DeepSpeed 0.19.8",
        options=KEPT["deepspeed"],
        has=UNCAPTURED | {
            "p1": (1,), "p2": (1,), "sequence_parallel": (0,),
            "overlap": _numbers(OVERLAPS, "sync", "async"),
            "schedule": _numbers(SCHEDULES, "1f1b"),
            "recompute": _numbers(RECOMPUTES, "none", "full"),
            "recompute_layers": (-1,),
            "ring": (1,),
        },
        rules=(
            Rule(
                "ZeRO shares out over all ranks that hold the same, in stages", "strategy.shard",
                'Use "ddp", "zero1", "zero2" or "zero3"', _zero,
            ),
            Rule(
                "Its pipeline runs with ZeRO-1 at most, and without cp",
                "strategy.pp", "Use pp = 1, or another sharding",
                lambda points: (points.pp == 1) | (_whole(points) & (points.cp == 1)),
            ),
        ),
        entry="pretrain_gpt.py",
    ),
}  # fmt: skip
"""By the name that ``plan.framework`` has."""


def framework_of(name: str) -> Framework | None:
    """By the word of ``plan.framework``; None for Plait's own runtime."""
    return FRAMEWORKS.get(name)
