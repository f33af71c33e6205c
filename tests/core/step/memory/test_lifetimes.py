"""How long tensors live by the table: what is made has readers, and what single ops take and
leave."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.activations import MemoryTrace
from plait.core.step.memory.sizes import RankLoad, Sizes
from plait.core.step.orders.overlap import sync_order
from plait.core.step.segments import SegmentGraph
from plait.core.step.stages import Stage
from plait.core.step.tensors import TENSORS, Flag

LLAMA = ModelSpec(
    family="llama", num_layers=6, hidden=32, num_heads=8, num_kv_heads=4, vocab=101, max_sequence=64, ffn_hidden=96
)
GPT = ModelSpec(family="gpt", num_layers=6, hidden=32, num_heads=8, vocab=101, max_sequence=64, ffn_hidden=96)
U = ModelSpec(family="utransformer", levels=1, num_layers=6, hidden=32, num_heads=8, vocab=101, max_sequence=64)
DROPS = {"dropout": 0.1}
INNER = Stage(1, 3, 1, 2)


def walk(model: ModelSpec, strategy: Strategy, stage: Stage, itemsize: int = 2) -> MemoryTrace:
    sizes = Sizes(model, RankLoad.of(strategy, batch=4, sequence=32), itemsize, gpu=True)
    return MemoryTrace(sizes, SegmentGraph.of(model, strategy, stage))


def ops(model: ModelSpec, stage: Stage = INNER, itemsize: int = 2, **strategy: Any) -> dict[str, tuple[int, int]]:
    """By action of a whole step: the most beyond what was there before, and what it leaves beyond
    that."""
    one, found = walk(model, Strategy(**strategy), stage, itemsize), dict[str, tuple[int, int]]()
    for phase in ("F", "B"):
        for action in sync_order(replace(one.graph, phase=phase)):
            before, most = one.now, one.run([action])
            found[str(action)] = most - before, one.now - before
    return found


def test_words_of_rows_are_known() -> None:
    words = {word.removeprefix("-") for row in TENSORS for word in row.when.split()}
    assert words == set(get_args(Flag))


MODELS = {
    "gpt": GPT, "drops": replace(GPT, **DROPS), "llama": LLAMA, "block": replace(GPT, parallel_block=True),
    "normed": replace(LLAMA, qk_norm=True), "u": U,
}  # fmt: skip
WAYS: list[dict[str, Any]] = [
    {}, {"tp": 2, "p1": 2, "p2": 2}, {"tp": 2, "sequence_parallel": True}, {"cp": 2}, {"cp": 2, "ring": 2},
    {"cp": 4, "ring": 2, "p1": 2}, {"tp": 2, "cp": 4, "ring": 4},
]  # fmt: skip


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_left_of_a_step_but_tokens(name: str, recompute: Any) -> None:
    """And no op reads what is not there, which the walk would refuse."""
    model = MODELS[name]
    for way, split in product(WAYS[:3] if model.levels else WAYS, (False, True)):
        for stage in (Stage(0, 1, 0, 6), Stage(0, 3, 0, 2), Stage(1, 3, 2, 2), Stage(2, 3, 4, 2)):
            one = walk(model, Strategy(**way, recompute=recompute, recompute_layers=1), stage)
            begins = one.now
            phases: Any = ("F", "I", "W") if split else ("F", "B")
            (kept, _), *_, (left, _) = one.phases([sync_order(replace(one.graph, phase=phase)) for phase in phases])
            assert kept > begins == left, (way, stage)


# ---- attention that ranks share ----


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_kernel_over_all_tokens(recompute: Any) -> None:
    """It keeps what it was given unless it runs again; what it gives is sent from where autograd
    has it."""
    strategy = {"cp": 2, "recompute": recompute}
    found = {name.replace("attn1.", ""): told for name, told in ops(LLAMA, **strategy).items()}
    s: Any = walk(LLAMA, Strategy(**strategy), INNER).sizes.of("attn", "attn", 0, 0)
    q, there, kernel = s.query, s.there, s.kernel
    attends = max(0, kernel + q + s.core - there, kernel + q - 2 * there + there)
    keeps = (attends, kernel + q - there)
    assert found["K0"] == (keeps if recompute == "none" else (attends, q - 2 * there))
    assert found[">K0"] == (q, q)
    if recompute == "full":
        assert found["X0"] == keeps
    assert found["D0"] == (2 * q, q)
    assert found["G0"] == (s.core_back - q, -3 * q - kernel)
