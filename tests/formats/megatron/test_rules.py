"""Megatron-LM's rules on its flags: what breaks one is refused by its line, and never emitted."""

from __future__ import annotations

import re
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.core.job.spec import Job
from plait.formats.base.parsed_config import ParsedConfig
from plait.formats.base.shell import arguments
from plait.formats.megatron.read import parse_megatron
from plait.formats.megatron.rules import RECIPE_RULES, RULES
from plait.plan.answer import Planner
from plait.plan.search.space import enumerate_space

PLAIN = """
--num-layers 8 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048
--micro-batch-size 1 --global-batch-size 32 --bf16 --vocab-size 32000 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0
--hidden-dropout 0
"""
BLOCK = "--recompute-granularity full --recompute-method block"
EXPERTS = "--num-experts 8 --expert-model-parallel-size 4 --overlap-moe-expert-parallel-comm"
OFFLOADED = "--use-distributed-optimizer --use-precision-aware-optimizer --optimizer-cpu-offload"
BROKEN = {
    "--fp8-format hybrid --fp8-param-gather": "--use-distributed-optimizer",
    "--use-distributed-optimizer --optimizer-cpu-offload": "--use-precision-aware-optimizer",
    f"{OFFLOADED} --fp8-format e4m3 --fp8-param-gather --fp8-recipe mxfp8": "--fp8-recipe delayed",
    "--use-precision-aware-optimizer --exp-avg-dtype bf16": "--use-distributed-optimizer",
    "--tensor-model-parallel-size 2 --tp-comm-overlap": "--sequence-parallel",
    "--multi-latent-attention --q-lora-rank 64 --group-query-attention --num-query-groups 4": None,
    "--fp8-format e5m2": "--fp8-format hybrid",
    BLOCK: "--recompute-num-layers 1",
    "--recompute-granularity selective --recompute-num-layers 1": BLOCK,
    "--num-experts 8 --tensor-model-parallel-size 2": "--sequence-parallel",
    f"{EXPERTS} --pipeline-model-parallel-size 2": "--num-virtual-stages-per-pipeline-rank 2",
    "--num-experts 8 --overlap-moe-expert-parallel-comm": "--expert-model-parallel-size 8",
    f"{EXPERTS} {BLOCK} --recompute-num-layers 1": None,
    "--window-size '(1023,0)' --context-parallel-size 2": "--cp-comm-type a2a",
}  # fmt: skip
"""Flags that break a rule each, and others with which they keep it; None where only leaving one out
helps."""


def read(more: str, **how: Any) -> ParsedConfig:
    return parse_megatron("a.sh", arguments(f"{PLAIN} {more}"), **how)


@pytest.mark.parametrize("flags", BROKEN)
def test_what_megatron_refuses_is_refused_with_its_line(flags: str) -> None:
    with pytest.raises(
        JobError, match=r"\(Megatron-LM d98e8a64 \(August 2026\), ([\w/]+\.py:\d+|attention of .*)\)"
    ) as error:
        read(flags)
    assert error.value.key and error.value.key.removeprefix("--") in flags and error.value.fix
    read(flags, rules=())  # a log of a run that ran
    if more := BROKEN[flags]:
        read(f"{flags} {more}")


def test_every_rule_is_tried() -> None:
    def flags_of(text: str) -> dict[str, tuple[str, ...]]:
        return {one.name: one.values for one in arguments(text)}

    tried = [rule for text in BROKEN for rule in RULES if rule.broken(flags_of(text))]
    assert {id(rule) for rule in tried} == {id(rule) for rule in RULES if not rule.older}
    assert [rule.flag for rule in RULES if rule.broken(flags_of(PLAIN))] == []


def test_what_older_versions_take_is_remarked_on() -> None:
    told = read("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te")
    assert any(re.search(r"te is refused .* Use native", note) for note in told.notes)
    assert told.options["logit_bytes"] == 4.0


def test_recipes_are_held_to_the_core_alone() -> None:
    read("--use-distributed-optimizer --optimizer-cpu-offload", rules=RECIPE_RULES)
    with pytest.raises(JobError, match="without --sequence-parallel"):
        read("--num-experts 8 --tensor-model-parallel-size 2", rules=RECIPE_RULES)


@pytest.mark.parametrize(("kind", "ways"), [("all_gather", "ring"), ("a2a", "ulysses"), ("p2p", "ring")])
def test_ways_of_attention_are_read_as_either_spells_them(kind: str, ways: str) -> None:
    told = read(f"--context-parallel-size 2 --cp-comm-type {kind}")
    assert told.get("strategy.cp_comm_type") == ways
    assert any("allgather is counted as a ring" in note for note in told.notes) == (kind == "all_gather")


def test_other_ways_of_attention_are_named() -> None:
    with pytest.raises(JobError, match=r"'ring' is unknown\. Use p2p, a2a, allgather, a2a"):
        read("--context-parallel-size 2 --cp-comm-type ring")
    told = read("--context-parallel-size 2 --cp-comm-type p2p a2a")
    assert told.unmodelled == ["--cp-comm-type p2p a2a (all layers are counted as p2p)"]


def test_group_query_attention_has_one_group_unless_it_says_more() -> None:
    told = read("--group-query-attention")
    assert told.get("model.num_kv_heads") == 1 and any("has 1 group" in note for note in told.notes)
    assert read("--group-query-attention --num-query-groups 4").get("model.num_kv_heads") == 4


@pytest.mark.parametrize("preset", ["mistral-7b", "mixtral-8x7b", "llama3-8b"])
def test_a_search_has_what_is_emitted_as_it_is(preset: str) -> None:
    """No ring beside windows, no experts over tensor-parallel ranks without sequence
    parallelism."""
    train = {"global_batch_size": 64, "precision": "bf16-mixed"}
    values = {"model": {"preset": preset}, "data": {"sequence_length": 4096}, "plan": {"framework": "megatron"}}
    job = Job.from_dict(values | {"train": train, "cluster": {"preset": "h100", "ranks": 16}})
    space = enumerate_space(Planner(job, Cluster.preset("h100"), 256).request, most=20_000)
    rings, apart = space.ring > 1, (space.tp > 1) & (space.sequence_parallel == 0)
    assert (space.cp > 1).any() and (space.tp > 1).any()
    assert rings.any() == (preset != "mistral-7b") and apart.any() == (preset != "mixtral-8x7b")
