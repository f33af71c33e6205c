"""How long tensors live by the table: what is made has readers, and what single ops take and leave."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory.activations import Walk
from plait.core.step.memory.lifetimes import StageTensors
from plait.core.step.memory.sizes import RankLoad, Sizes
from plait.core.step.orders.segment_lists import sync_order
from plait.core.step.segments import SegmentGraph
from plait.core.step.stages import Stage
from plait.core.step.tensors import TENSORS, Word

LLAMA = ModelSpec(
    family="llama", num_layers=6, hidden=32, num_heads=8, num_kv_heads=4, vocab=101, max_sequence=64, ffn_hidden=96
)
GPT = ModelSpec(family="gpt", num_layers=6, hidden=32, num_heads=8, vocab=101, max_sequence=64, ffn_hidden=96)
U = ModelSpec(family="utransformer", levels=1, num_layers=6, hidden=32, num_heads=8, vocab=101, max_sequence=64)
DROPS = {"dropout": 0.1}
INNER = Stage(1, 3, 1, 2)


def walk(model: ModelSpec, strategy: Strategy, stage: Stage, itemsize: int = 2) -> Walk:
    sizes = Sizes(model, RankLoad.of(strategy, batch=4, sequence=32), itemsize, gpu=True)
    return Walk(sizes, SegmentGraph.of(model, strategy, stage))


def ops(model: ModelSpec, stage: Stage = INNER, itemsize: int = 2, **strategy: Any) -> dict[str, tuple[int, int]]:
    """By action of a whole step: the most beyond what was there before, and what it leaves beyond that."""
    one, found = walk(model, Strategy(**strategy), stage, itemsize), dict[str, tuple[int, int]]()
    for phase in ("F", "B"):
        for action in sync_order(replace(one.graph, phase=phase)):
            before, most = one.now, one.run([action])
            found[str(action)] = most - before, one.now - before
    return found


def test_words_of_rows_are_known() -> None:
    words = {word.removeprefix("-") for row in TENSORS for word in row.when.split()}
    assert words == set(get_args(Word))


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


def made(site: str, kind: str, **strategy: Any) -> dict[str, int]:
    """What an op of the stage's first layer makes, and how many steps read it."""
    graph = SegmentGraph.of(LLAMA, Strategy(**strategy), INNER)
    tensors = StageTensors(graph, dropped=False, within=False)
    steps = tensors.program(graph.places[site, 1])[kind, 0, False]  # type: ignore[index]
    return {one.name[1]: one.readers for step in steps for one in step.makes}


def test_what_runs_again_is_made_anew_and_what_nobody_reads_is_not_made() -> None:
    assert made("mlp", "N") == {"h": 1, "n_saved": 1, "n": 3}
    assert made("mlp", "F") == {"z0": 2, "saved0": 1, "o0": 2}
    # An activation alone runs again: it reads what the first weight gave.
    assert made("mlp", "F", recompute="selective") == {"z0": 3, "o0": 1}
    assert made("mlp", "A", recompute="selective") == {"saved0": 1, "o0": 1}
    assert made("attn", "F", recompute="selective") == made("attn", "F") == {"z0": 2, "saved0": 1, "o0": 2}
    assert made("mlp", "N", recompute="full") == {"h": 1, "n": 1}
    assert made("mlp", "F", recompute="full") == {"z0": 1, "o0": 1}
    assert made("mlp", "M", recompute="full") == {"n_saved": 1, "n": 3}
    assert made("mlp", "A", recompute="full") == {"z0": 2, "saved0": 1, "o0": 1}


def test_a_slice_reads_its_own_tensors() -> None:
    found = ops(GPT, tp=2, p1=2)
    assert found["mlp1.F0"] == found["mlp1.F1"]
    assert found["mlp1.D0"] == found["mlp1.D1"]


# ---- attention that ranks share ----


@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_attention_round_a_ring_of_four(ulysses: int, itemsize: int, recompute: Any) -> None:
    """A block is there until the next but one has come; heads that go and come are there twice."""
    again, strategy = recompute == "full", {"cp": 4 * ulysses, "ring": 4, "recompute": recompute}
    found = {name.replace("attn1.", ""): told for name, told in ops(LLAMA, itemsize=itemsize, **strategy).items()}
    s: Any = walk(LLAMA, Strategy(**strategy), INNER, itemsize).sizes.of("attn", "attn", 0, 0)
    q, b, there, lse, exchanged = s.query, s.block, s.there, s.lse, ulysses > 1
    wide, leaves = q * 4 // itemsize, there if exchanged else q + b
    dropped = s.full if again else 0  # what was normalised
    told: dict[str, tuple[int, int]] = {
        "F0": (s.z + s.leaving, leaves - dropped),
        "T0": (there, q + b - 2 * there) if exchanged else (0, 0),
        "T0.1": (0, 0), "T0.2": (0, -b),
        "K0": (s.first_block, wide + lse), "K0.1": (s.next_block, 0), "K0.2": (s.next_block, 0),
        "K0.3": (max(s.next_block, q) - b, 2 * q - wide - 2 * b - (q + b if again else 0)),
        "S0": (0, 0), "S0.1": (0, 0), "S0.2": (0, -b),
        "G0": (wide + b + s.block_back - q * exchanged, wide + b - q * exchanged),
        "G0.1": (b + s.block_back, b), "G0.2": (s.block_back, -b),
        "G0.3": (wide * b // q + s.own_back, wide * b // q - b - 3 * q - lse),
        "H0": (0, 0), "H0.1": (0, -2 * b), "H0.2": (0, -2 * b),
        **{f">{sent}0{part}": (b, b) for sent in "TSH" for part in ("", ".1", ".2")},
    }  # fmt: skip
    for name, sizes in told.items():
        assert found[name] == sizes, name
    if exchanged:
        assert found["E0"][1] == there - wide - wide * b // q - 2 * b
        assert found["Z0"] == (max(there, s.turning_back - 2 * there), s.z - 2 * there)
        assert {found[f">{kind}0"] for kind in "FE"} == {(there, there)}
        assert found[">K0.3"] == found[">D0"] == (q, q)
    else:
        assert found["Z0"][1] == s.z - wide - wide * b // q - 2 * b


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_one_kernel_over_all_tokens(recompute: Any) -> None:
    """It keeps what it was given unless it runs again; what it gives is sent from where autograd has it."""
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
