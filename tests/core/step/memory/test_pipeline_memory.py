"""Activations of a pp rank over a step: stages of any length as if walked layer by layer, and lists
of ops."""

from __future__ import annotations

from typing import Any

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.activations import Activations, TracedBatch, activations
from plait.core.step.memory.pipeline_memory import Peak, PipelineMemoryTrace, stage_activations
from plait.core.step.schedule import Schedule, parse_op
from plait.core.step.segments import Phase
from plait.core.step.stages import Stage

LLAMA = ModelSpec(
    family="llama", num_layers=64, hidden=32, num_heads=4, num_kv_heads=2, ffn_hidden=80, vocab=96, max_sequence=64
)
SOME = "recompute_layers"


@pytest.mark.parametrize("phases", [("step",), ("F", "B"), ("F", "I", "W")])
@pytest.mark.parametrize("changes", [
    {}, {"sequence_parallel": True}, {"recompute": "full"}, {"recompute": "full", SOME: 7},
    {"recompute": "full", SOME: 2}, {"recompute": "full", SOME: 20}, {"recompute": "full", SOME: 0},
    {"recompute": "full", SOME: 40},
    {"recompute": "selective", "sequence_parallel": True, SOME: 7},
], ids=str)  # fmt: skip
def test_equal_layers_more_add_equally_much(changes: dict[str, Any], phases: tuple[Phase, ...]) -> None:
    """Exactly so where no list waits for anything."""
    strategy = Strategy(tp=2, overlap="sync", **changes)
    stage = Stage(0, 1, 0, 22) if phases == ("step",) else Stage(1, 3, 1, 22)
    micro = TracedBatch(batch=1, sequence=32, itemsize=2, phases=phases)
    assert stage_activations(LLAMA, strategy, stage, micro) == activations(LLAMA, strategy, stage, micro)


def walk(ops: str, size: Activations, *, stages: int = 3, at: int = 1) -> tuple[Peak, int, int]:
    """The peak, and what is live and how many micro-batches are alive at the end. 100 bytes go from
    stage 0 to 1, 10 from there to stage 2."""
    one = PipelineMemoryTrace(Schedule("chain", stages, ()), {at: size}, {(0, 1): 100, (1, 2): 10})
    return one.run([parse_op(word) for word in ops.split()]), one.live, one.alive


FORWARDS = "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1"


@pytest.mark.parametrize(
    ("ops", "told", "live", "alive"),
    [
        # What has arrived is among what a forward counts; what goes lives until the next send.
        ("1RECV_F0", Peak(100, "receive on stage 1", 0), 100, 0),
        ("1RECV_F0 1F0", Peak(1300, "forward of stage 1", 1), 710, 1),
        ("1RECV_F0 1F0 1SEND_F0 1RECV_F1", Peak(1300, "forward of stage 1", 1), 810, 1),
        (FORWARDS, Peak(2010, "forward of stage 1", 2), 1410, 2),
        (f"{FORWARDS} 1RECV_B0 1B0", Peak(3210, "backward of stage 1", 2), 810, 1),
        (f"{FORWARDS} 1RECV_B0 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1", Peak(3210, "backward of stage 1", 2), 100, 0),
        (f"{FORWARDS} 1RECV_B0 1I0", Peak(3210, "input gradients of stage 1", 2), 1210, 2),
        (f"{FORWARDS} 1RECV_B0 1I0 1SEND_B0 1W0", Peak(3210, "input gradients of stage 1", 2), 800, 1),
    ],
)
def test_a_middle_stage(ops: str, told: Peak, live: int, alive: int) -> None:
    assert walk(ops, Activations(700, 1300, 2500, 400, 600)) == (told, live, alive)


def test_weight_gradients_may_be_the_fullest_moment() -> None:
    found, live, alive = walk(f"{FORWARDS} 1RECV_B0 1I0 1SEND_B0 1W0", Activations(700, 1300, 2500, 400, 2600))
    assert (found, live, alive) == (Peak(1200 + 2200, "weight gradients of stage 1", 2), 800, 1)


def test_a_whole_model_is_done_with_each_micro_batch() -> None:
    found = walk("0S0 0S1", Activations(0, 1300, 0), stages=1, at=0)
    assert found == (Peak(1300, "step of stage 0", 1), 0, 0)


def test_the_least_that_is_taken_is_a_moment() -> None:
    assert walk("0F0", Activations(0, 1, 0), stages=1, at=0)[0] == Peak(1, "forward of stage 0", 1)
    assert walk("0F0", Activations(0, 0, 0), stages=1, at=0)[0] == Peak(0, "", 0)


def test_a_moment_as_full_as_another_is_told_by_the_first() -> None:
    found, _, alive = walk("0F0 0F1", Activations(0, 300, 0), stages=1, at=0)
    assert (found, alive) == (Peak(300, "forward of stage 0", 1), 2)
