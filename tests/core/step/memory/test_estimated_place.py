"""A place of an estimate: what its memory and its traffic are made of, and what hides communication."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.core.job.spec import Job
from plait.core.model.experts import Experts
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.estimate import Estimate, estimate, hidden_behind
from plait.core.step.memory.states import WORKSPACE, position_tables, reduction_buffers, states
from plait.core.step.segments import SegmentGraph
from plait.core.step.step import Step
from plait.core.step.traffic import SegmentTraffic, micro_batch_bytes, replicated_numbers
from plait.core.step.unit_traffic import step_bytes, unit_sizes, unit_traffic
from plait.plan.make import job_step
from plait.plan.volumes import place_volume

GPT = {"family": "gpt", "num_layers": 4, "hidden": 32, "num_heads": 8, "vocab": 48, "max_sequence": 64}
LLAMA = GPT | {"family": "llama", "ffn_hidden": 96, "num_kv_heads": 2}
TILE = 32 * 2 * 32 * 4
"""Bytes of a stream of two sequences of 32 tokens in fp32."""


def step(model: dict[str, Any] | None = None, *, precision: str = "fp32", **strategy: Any) -> Step:
    values = {
        "model": model or GPT, "data": {"sequence_length": 32}, "strategy": strategy,
        "train": {"global_batch_size": 8, "micro_batch_size": 2, "precision": precision},
    }  # fmt: skip
    return job_step(Job.from_dict(values), vocab=48)


PIPED = {"pp": 2, "schedule": "1f1b"}


@pytest.mark.parametrize(
    ("strategy", "times", "cut"),
    [
        (PIPED, 4, 1),
        (PIPED | {"dp": 2}, 2, 1),
        (PIPED | {"tp": 2, "sequence_parallel": True}, 4, 2),
        (PIPED | {"tp": 2}, 4, 1),
        (PIPED | {"cp": 2, "tp": 4, "sequence_parallel": True}, 4, 8),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 2}, 4 * 3, 1),
    ],
)
def test_every_micro_batch_goes_to_the_next_stage_and_its_gradient_back(
    strategy: dict[str, Any], times: int, cut: int
) -> None:
    """Of two stages a place, the first sends twice forward and once back."""
    assert [place.sent["pp"] for place in estimate(step(**strategy)).places] == [times * TILE // cut] * 2


def test_half_of_a_step_goes_each_way_in_two_bytes() -> None:
    found = estimate(step(**PIPED, precision="bf16-mixed"))
    assert found.places[0].sent["pp"] == 4 * TILE // 2
    # Two micro-batches, of two and of four sequences.
    unequal = estimate(step(pp=2, schedule="1f1b", dp=[2, 1], tp=[1, 2]))
    assert [place.sent["pp"] // TILE for place in unequal.places] == [
        2,
        4,
    ]


def test_what_is_sent_is_that_of_every_micro_batch_and_of_a_steps_end() -> None:
    one = step(
        LLAMA,
        dp=2,
        tp=4,
        cp=2,
        cp_comm_type="ring",
        sequence_parallel=True,
        shard={"params": 2, "grads": 4, "optim": 4},
    )
    (place,) = estimate(one).places
    strategy, sharding = one.strategy, one.shardings[0]
    assert (place.count, place.ranks, place.share) == (16, (0, 15), 2)
    segments = SegmentTraffic(
        model=one.model, strategy=strategy, graph=SegmentGraph.of(one.model, strategy, one.stages[0]), shares=(2,),
        sequence=32 // 2, itemsize=4,
    )  # fmt: skip
    each = micro_batch_bytes(segments)
    units = unit_sizes(one.model, strategy, one.stages[0], sharding)
    told = {axis: 2 * count for axis, count in each.items()}
    told |= step_bytes(unit_traffic(units, sharding, 4, itemsize=4), micro_batches=2)
    numbers = -(-replicated_numbers(one.model, strategy, one.stages[0]) // 4)
    told["copies"] = 2 * numbers * 4 * 3 // 4
    assert place.sent == {axis: count for axis, count in told.items() if count}
    assert {"tp", "rows", "ring", "params", "grads", "copies"} == set(place.sent)
    assert estimate(one, traffic=False).places[0].sent == {}


@pytest.mark.parametrize(("tied", "pp", "times"), [(True, 1, 2), (False, 1, 1), (True, 2, 1)])
def test_an_embedding_that_is_the_head_of_the_same_stage_is_gathered_twice(tied: bool, pp: int, times: int) -> None:
    one = step(pp=pp, dp=2, shard="fsdp", schedule="1f1b")
    one = replace(one, model=replace(one.model, tied_embeddings=tied))
    place = estimate(one).places[0]
    units = unit_sizes(one.model, one.strategy, one.stages[0], one.shardings[0])
    told = step_bytes(unit_traffic(units, one.shardings[0], 2, itemsize=4), micro_batches=2, tied=times == 2)
    assert place.sent["params"] == told["params"]


def test_one_replica_sends_nothing_of_weights() -> None:
    sent = estimate(step(**PIPED)).places[0].sent
    assert set(sent) == {"pp", "tied"}
    assert sent["tied"] == 48 * 32 * 4  # half of the sum each way
    assert "copies" not in estimate(step(tp=2)).places[0].sent


@pytest.mark.parametrize("gpu", [False, True])
def test_memory_is_that_of_states_buffers_and_activations(gpu: bool) -> None:
    one = step(LLAMA, pp=2, schedule="interleaved", virtual_stages=2, tp=2, dp=4, sequence_parallel=True,
               shard={"params": 2, "grads": 2, "optim": 4})  # fmt: skip
    place = estimate(one, gpu=gpu).places[0]
    units: dict[Any, int] = {}
    for at in (0, 2):
        units |= unit_sizes(one.model, one.strategy, one.stages[at], one.shardings[0])
    lasting = states(units, one.shardings[0], itemsize=4)
    memory = place.memory
    assert (memory.parameters, memory.gradients, memory.optimizer) == (
        lasting.parameters, lasting.gradients, lasting.optimizer,
    )  # fmt: skip
    tables = 2 * position_tables(one.model, one.strategy, sequence=32, itemsize=4)
    kept = reduction_buffers(units, one.shardings[0], itemsize=4)
    libraries = WORKSPACE if gpu else kept + TILE  # a reduce-scatter at a time
    assert memory.buffers == lasting.buffers + tables + libraries
    captured = estimate(replace(one, strategy=replace(one.strategy, cuda_graphs=True)), gpu=gpu).places[0].memory
    assert captured.buffers - memory.buffers == (WORKSPACE if gpu else 0)
    assert memory.total == lasting.total - lasting.buffers + memory.buffers + memory.activations
    assert place.layers == {0: 1, 2: 1}
    assert memory.alive > 1


def test_sums_at_a_steps_end_may_take_more_than_any_activation() -> None:
    """Of an embedding of a million numbers, and of copies of key/value heads side by side."""
    wide = estimate(step(GPT | {"vocab": 30_000}, **PIPED))
    assert wide.places[0].memory.when == "sum of tied embeddings"
    assert (wide.places[0].memory.activations, wide.places[0].memory.alive) == (30_000 * 32 * 4, 0)
    narrow = LLAMA | {"hidden": 512, "num_heads": 4, "num_kv_heads": 1, "head_size": 128, "ffn_hidden": 8}
    one = step(narrow, tp=4)
    one = replace(one, workload=replace(one.workload, sequence=1, micro_batch=1))
    copies = replicated_numbers(one.model, one.strategy, one.stages[0]) * 4
    memory = estimate(one).places[0].memory
    assert (memory.when, memory.activations) == ("sum of tensor-parallel copies", 2 * copies)


def test_phases_are_what_the_schedule_asks_for() -> None:
    whole, piped, split = (
        estimate(step(**one)).places[0].memory.when for one in ({}, PIPED, {"pp": 2, "schedule": "zb-h1"})
    )
    assert (whole, piped) == ("step of stage 0", "backward of stage 0")
    assert split.split(" of ")[0] in ("input gradients", "weight gradients")


def test_the_fullest_place_and_all_of_them() -> None:
    found = estimate(step(**PIPED, tp=2, dp=2))
    assert found.world_size == 8
    assert found.bytes == sum(4 * place.memory.total for place in found.places)
    assert found.most.memory.total == max(place.memory.total for place in found.places)
    equal = Estimate(1, "1f1b", 1, 1, (found.places[0], replace(found.places[0], index=1)))
    assert equal.most.index == 0
    assert (found.parameters, found.schedule, found.micro_batches, found.virtual_stages) == (
        step().model.num_parameters, "1f1b", 2, 1,
    )  # fmt: skip
    assert estimate(step(pp=2, schedule="zb-v")).virtual_stages == 2


def test_models_with_experts_are_not_walked_or_counted() -> None:
    one = step()
    one = replace(one, model=replace(one.model, experts=Experts(count=4, per_token=1, ffn_hidden=8)))
    for call in (estimate, lambda each: place_volume(each, 0)):
        with pytest.raises(JobError) as refused:
            call(one)
        assert refused.value.key == "model.experts"


def test_volumes_of_a_place() -> None:
    one = step(**PIPED, dp=2, shard="zero1")
    found, place = place_volume(one, 0), estimate(one).places[0]
    weights = sum(unit_sizes(one.model, one.strategy, one.stages[0], one.shardings[0]).values()) * 4
    assert (found.weights, found.dp, found.pp) == (weights, place.sent["optim"], place.sent["pp"])
    alone = place_volume(step(), 0)
    assert (alone.dp, alone.pp) == (0, 0)


BOTH = "other slices, weight gradients"
BEFORE = "attention to the block before"
WEIGHTS = "backward: weight gradients"


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        ({}, {}),
        ({"tp": 2}, {"tp": WEIGHTS, "rows": "nothing"}),
        ({"tp": 2, "slices": {"batch": 2, "columns": 1}}, {"tp": BOTH, "rows": "other slices"}),
        ({"tp": 2, "slices": {"batch": 1, "columns": 2}}, {"tp": WEIGHTS, "rows": "nothing"}),
        ({"tp": 2, "overlap": "async", "slices": {"batch": 2, "columns": 1}},
         {"tp": f"{WEIGHTS} of the sublayer", "rows": "nothing"}),
        ({"tp": 2, "overlap": "async"}, {"tp": f"{WEIGHTS} of the sublayer", "rows": "nothing"}),
        ({"tp": 2, "overlap": "sync"}, {"tp": "nothing", "rows": "nothing"}),
        ({"tp": 2, "overlap": "no-communication"}, {"tp": "left out", "rows": "nothing"}),
        ({"cp": 2}, {"ulysses": BOTH, "dp": "forward and backward"}),
        ({"cp": 2, "overlap": {"tp": "async", "shard": "forward"}}, {"ulysses": "nothing", "dp": "forward"}),
        ({"cp": 2, "cp_comm_type": "ring"}, {"ring": f"{BEFORE}, {BOTH}", "dp": "forward and backward"}),
        ({"cp": 2, "cp_comm_type": "ring", "overlap": "async"}, {"ring": BEFORE, "dp": "forward and backward"}),
        ({"cp": 2, "cp_comm_type": "ring", "overlap": "sync"}, {"ring": "nothing", "dp": "nothing"}),
        ({"cp": 2, "cp_comm_type": "ring", "overlap": "no-communication"},
         {"ring": "left out", "dp": "forward and backward"}),
        ({"cp": 4, "cp_comm_type": {"ulysses": 2, "ring": 2}},
         {"ulysses": BOTH, "ring": f"{BEFORE}, {BOTH}", "dp": "forward and backward"}),
        ({"dp": 2, "overlap": {"tp": "sync", "shard": "backward"}}, {"dp": "backward"}),
        ({"pp": 2, "schedule": "gpipe"}, {"pp": "the micro-batches after it"}),
        ({"pp": 2, "schedule": "eager-1f1b"}, {"pp": "one forward or backward each way"}),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
         {"pp": "what the schedule leaves between send and use"}),
        ({"pp": 2, "schedule": "1f1b", "dp": [2, 1], "tp": [1, 2]},
         {"tp": WEIGHTS, "rows": "nothing", "dp": "forward and backward", "pp": "nothing in the steady state"}),
    ],
)  # fmt: skip
def test_what_communication_is_hidden_behind(strategy: dict[str, Any], told: dict[str, str]) -> None:
    assert hidden_behind(step(**strategy)) == told


def test_a_place_has_its_own_degree_and_share() -> None:
    one = step(pp=2, schedule="1f1b", dp=[2, 1], tp=[1, 2])
    first, last = estimate(one).places
    assert (first.share, first.tp, first.ranks, last.share, last.tp, last.ranks) == (2, 1, (0, 1), 4, 2, (2, 3))
    units = unit_sizes(one.model, Strategy(tp=2), one.stages[1], Sharding())
    assert last.memory.parameters == sum(units.values()) * 4
