"""Megatron-LM's rules on its arguments, as data: what is emitted for any strategy of a space keeps them.

Read off ``megatron/training/arguments.py`` and ``megatron/core/transformer/transformer_config.py`` at commit
d98e8a64 (22 August 2026).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.job.spec import Job
from plait.plan import megatron_rules
from plait.plan.asking import asked_of, job_at
from plait.plan.emit import emit
from plait.plan.megatron_layout import layout
from plait.plan.space import enumerate_space
from tests.plan.test_asking import H100
from tests.plan.test_asking import job as open_job

Flags = Mapping[str, str]
SWITCHES = {
    "sequence-parallel", "overlap-grad-reduce", "use-distributed-optimizer", "overlap-param-gather",
    "use-megatron-fsdp", "bf16", "group-query-attention", "swiglu", "disable-bias-linear", "use-rope-scaling",
    "untie-embeddings-and-output-weights", "qk-layernorm",
}  # fmt: skip
VALUES = {
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size", "micro-batch-size",
    "global-batch-size", "seq-length", "cp-comm-type", "hierarchical-context-parallel-sizes",
    "num-distributed-optimizer-instances", "data-parallel-sharding-strategy", "ckpt-format",
    "num-virtual-stages-per-pipeline-rank", "pipeline-model-parallel-layout", "recompute-granularity",
    "recompute-method", "recompute-num-layers", "recompute-modules", "num-layers", "hidden-size", "ffn-hidden-size",
    "num-attention-heads", "num-query-groups", "kv-channels", "max-position-embeddings", "position-embedding-type",
    "normalization", "norm-epsilon", "rotary-base", "rope-scaling-factor", "hidden-dropout", "attention-dropout",
    "window-size", "window-attn-skip-freq",
}  # fmt: skip
"""Flags that there are at that commit, of those that are emitted."""


def flags_of(one: Job) -> dict[str, str]:
    """By name; a switch has the value nothing."""
    found = dict[str, str]()
    for line in emit(one, "megatron").text.splitlines():
        if not line.startswith("#"):
            name, *values = shlex.split(line.removesuffix(" \\"))
            found[name.removeprefix("--")] = " ".join(values)
    return found


def number(flags: Flags, name: str, default: int = 1) -> int:
    return int(flags.get(name, default))


def replicas(flags: Flags, world: int) -> int:
    degrees = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    return world // prod(number(flags, name) for name in degrees)


def stages(flags: Flags) -> int:
    rounds = number(flags, "num-virtual-stages-per-pipeline-rank")
    return number(flags, "pipeline-model-parallel-size") * rounds


RULES: dict[str, Callable[[Flags, int], bool]] = {
    "ranks are tp x pp x cp times whole replicas": lambda flags, world: replicas(flags, world) >= 1,
    "the batch is whole micro-batches of every replica": lambda flags, world: (
        number(flags, "global-batch-size") % (number(flags, "micro-batch-size") * replicas(flags, world)) == 0
    ),
    "layers divide over stages, or a layout says what each holds": lambda flags, world: (
        "pipeline-model-parallel-layout" in flags or number(flags, "num-layers") % stages(flags) == 0
    ),
    "rounds and a layout are not given both": lambda flags, world: (
        len({"num-virtual-stages-per-pipeline-rank", "pipeline-model-parallel-layout"} & set(flags)) <= 1
    ),
    "rounds need a pipeline": lambda flags, world: (
        number(flags, "num-virtual-stages-per-pipeline-rank") == 1 or number(flags, "pipeline-model-parallel-size") > 1
    ),
    "sequence parallelism needs tensor parallelism": lambda flags, world: (
        "sequence-parallel" not in flags or number(flags, "tensor-model-parallel-size") > 1
    ),
    "heads divide over tensor-parallel ranks": lambda flags, world: (
        number(flags, "num-attention-heads") % number(flags, "tensor-model-parallel-size") == 0
    ),
    "gathering parameters beside computation needs both others": lambda flags, world: (
        "overlap-param-gather" not in flags or {"overlap-grad-reduce", "use-distributed-optimizer"} <= set(flags)
    ),
    "optimizer instances divide the replicas": lambda flags, world: (
        replicas(flags, world) * number(flags, "context-parallel-size")
        % number(flags, "num-distributed-optimizer-instances") == 0
    ),
    "Megatron-FSDP has its own checkpoints and the distributed optimizer": lambda flags, world: (
        "use-megatron-fsdp" not in flags
        or (flags.get("ckpt-format") == "fsdp_dtensor" and "use-distributed-optimizer" in flags)
    ),
    "a sharding strategy is Megatron-FSDP's": lambda flags, world: (
        ("data-parallel-sharding-strategy" in flags) == ("use-megatron-fsdp" in flags)
    ),
    "two kinds of context parallelism multiply": lambda flags, world: (
        ("hierarchical-context-parallel-sizes" in flags) == (flags.get("cp-comm-type") == "a2a+p2p")
        and prod(map(int, flags.get("hierarchical-context-parallel-sizes", "1").split()))
        in (1, number(flags, "context-parallel-size"))
    ),
    "a method of recomputation is full recomputation's": lambda flags, world: (
        ("recompute-method" in flags) == (flags.get("recompute-granularity") == "full")
        and ("recompute-num-layers" in flags) == ("recompute-method" in flags)
    ),
    "modules are recomputed selectively": lambda flags, world: (
        ("recompute-modules" in flags) == (flags.get("recompute-granularity") == "selective")
    ),
}  # fmt: skip


def broken(one: Job) -> list[str]:
    """Rules that are not kept, and flags that do not exist."""
    flags = flags_of(one)
    unknown = [name for name, value in flags.items() if name not in (VALUES if value else SWITCHES)]
    listed = {name: tuple(value.split()) for name, value in flags.items()}
    own = (f"--{rule.flag} {rule.problem}" for rule in megatron_rules.RULES if rule.broken(listed))
    return [*unknown, *own, *(rule for rule, holds in RULES.items() if not holds(flags, one.world_size))]


def of(model: dict[str, Any], **strategy: Any) -> Job:
    train = {"global_batch_size": 64, "micro_batch_size": 2, "precision": "bf16-mixed"}
    return Job.from_dict({"model": model, "data": {"sequence_length": 4096}, "train": train, "strategy": strategy})


ONE = open_job()
SPACE = enumerate_space(asked_of(ONE, ONE.model_spec(vocab=257), H100), most=20_000)


@given(st.integers(0, len(SPACE) - 1))
def test_every_strategy_of_a_space_keeps_the_rules(at: int) -> None:
    assert broken(job_at(ONE, SPACE.row(at))) == []


@pytest.mark.parametrize(
    "strategy",
    [
        {"tp": 8, "pp": 8, "schedule": "interleaved", "virtual_stages": 15}, {"pp": 3, "stage_layers": [40, 40, 46]},
        {"pp": 4, "schedule": "zb-v", "dp": 2, "shard": "fsdp"}, {"dp": 4, "shard": "zero2", "cp": 2},
        {"cp": 4, "cp_comm_type": {"ulysses": 2, "ring": 2}, "recompute": "full"}, {"recompute": "selective", "tp": 2},
        {"dp": 8, "shard": {"params": 1, "grads": 1, "optim": 4}},
    ],
)  # fmt: skip
def test_named_strategies_keep_the_rules(strategy: dict[str, Any]) -> None:
    assert broken(of({"preset": "llama3-405b"}, **strategy)) == []


@pytest.mark.parametrize(
    ("preset", "wanted"),
    [
        ("llama3-405b", {"num-layers": "126", "num-query-groups": "8", "rotary-base": "500000", "swiglu": "",
                         "use-rope-scaling": "", "rope-scaling-factor": "8.0", "normalization": "RMSNorm"}),
        ("qwen3-8b", {"qk-layernorm": "", "rotary-base": "1000000", "untie-embeddings-and-output-weights": ""}),
        ("mistral-7b", {"window-size": "4095,0"}),
        ("gpt3-1.3b", {"num-layers": "24", "hidden-size": "2048", "ffn-hidden-size": "8192"}),
    ],
)  # fmt: skip
def test_the_model_s_shapes_are_said(preset: str, wanted: dict[str, str]) -> None:
    one = (
        of({"preset": preset}, slices={"batch": 1})
        if preset != "gpt3-1.3b"
        else of({"preset": preset, "max_sequence": 4096})
    )
    flags = flags_of(one)
    assert {name: flags.get(name) for name in wanted} == wanted
    gpt = preset.startswith("gpt3")
    assert gpt != ("swiglu" in flags) and gpt != ("untie-embeddings-and-output-weights" in flags)
    assert broken(one) == []


def test_windows_of_some_layers() -> None:
    shape = {"family": "llama", "num_layers": 6, "hidden": 64, "num_heads": 4, "ffn_hidden": 96, "max_sequence": 4096}
    every = flags_of(of({**shape, "window": 128, "full_every": 3}))
    assert (every["window-size"], every["window-attn-skip-freq"]) == ("127,0", "3")
    first = flags_of(of({**shape, "window": 128, "full_first": 2}))
    assert first["window-attn-skip-freq"] == "[0,0,1,1,1,1]"


def test_a_layout_groups_equal_stages() -> None:
    assert layout([1, 1]) == "Et*1|t*1L"
    assert layout([2, 2, 2, 1, 1, 3]) == "Et*2|(t*2|)*2(t*1|)*2t*3L"
