"""States of a place in columns: as counted unit by unit, and what other frameworks have otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from plait.core.model.experts import Experts
from plait.core.model.precision import master_size
from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.memory import closed_states
from plait.core.step.memory.closed_states import Factors, HeldStates, StateTables, held_by, place_states
from plait.core.step.memory.experts_memory import expert_factors, held_experts
from plait.core.step.memory.memory_options import PLAIT, MatrixBytes, MemoryOptions
from plait.core.step.memory.states import WORKSPACE, position_tables, reduction_buffers, states
from plait.core.step.stages import Stage
from plait.core.step.traffic import replicated_numbers
from plait.core.step.unit_traffic import unit_sizes

GPT = ModelSpec(family="gpt", num_layers=4, hidden=32, num_heads=8, vocab=48, max_sequence=64, ffn_hidden=96)
LLAMA = ModelSpec(
    family="llama", num_layers=4, hidden=32, num_heads=8, num_kv_heads=2, vocab=47, max_sequence=64, ffn_hidden=96
)
WHOLE, FIRST, INNER, LAST = Stage(0, 1, 0, 4), Stage(0, 3, 0, 1), Stage(1, 3, 1, 2), Stage(2, 3, 3, 1)
SHARDINGS = [
    Sharding(), Sharding(optim=4), Sharding(grads=4, optim=8), Sharding(params=2, grads=4, optim=8),
    Sharding(params=8, grads=8, optim=8, secondary=2), Sharding(params=2, grads=2, optim=2),
]  # fmt: skip
ALONE = [Sharding()]


def factors(shardings: list[Sharding]) -> Factors:
    columns = ([getattr(one, name) for one in shardings] for name in ("params", "grads", "optim", "secondary"))
    return Factors(*(np.array(column) for column in columns))


def found(
    model: ModelSpec, stages: tuple[Stage, ...], shardings: list[Sharding], strategy: Strategy | None = None,
    *, itemsize: int = 2, options: MemoryOptions = PLAIT,
) -> np.ndarray:  # fmt: skip
    strategy = strategy or Strategy()
    held = held_by(model, strategy, stages, sequence=32, itemsize=itemsize)
    return place_states(held, factors(shardings), itemsize=itemsize, options=options)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("model", "stages", "strategy"),
    [
        (GPT, (WHOLE,), Strategy()),
        (LLAMA, (FIRST, INNER), Strategy(tp=2)),
        (LLAMA, (INNER,), Strategy(tp=4, cp=2, sequence_parallel=True)),
        (GPT, (LAST,), Strategy(tp=2, sequence_parallel=True)),
    ],
)
def test_columns_are_what_is_counted_unit_by_unit(
    model: ModelSpec, stages: tuple[Stage, ...], strategy: Strategy, gpu: bool, itemsize: int
) -> None:
    columns = found(model, stages, SHARDINGS, strategy, itemsize=itemsize, options=MemoryOptions(gpu=gpu))
    for at, sharding in enumerate(SHARDINGS):
        units: dict[Any, int] = {}
        for stage in stages:
            units |= unit_sizes(model, strategy, stage, sharding)
        lasting = states(units, sharding, itemsize=itemsize)
        tables = len(stages) * position_tables(model, strategy, sequence=32, itemsize=itemsize)
        kept = WORKSPACE if gpu else reduction_buffers(units, sharding, itemsize=master_size(itemsize))
        assert columns[:4, at].tolist() == [
            lasting.parameters, lasting.gradients, lasting.optimizer, lasting.buffers + tables + kept,
        ]  # fmt: skip


def test_sums_at_a_steps_end() -> None:
    """Copies twice; tied embeddings once, or the part of an optimizer, if several stages have them."""
    flat = Strategy(tp=2, sequence_parallel=True)
    numbers = replicated_numbers(GPT, flat, LAST)
    copies = np.array([-(-numbers // one.optim) * 4 * 2 for one in SHARDINGS])
    words = 24 * 32
    tied = np.array([words // one.optim * 4 for one in SHARDINGS])
    assert np.array_equal(found(GPT, (LAST,), SHARDINGS, flat)[4], np.maximum(copies, tied))
    assert np.array_equal(found(GPT, (INNER,), SHARDINGS, flat)[4][:1], [replicated_numbers(GPT, flat, INNER) * 8])
    assert found(GPT, (WHOLE,), ALONE)[4].tolist() == [0]
    assert found(GPT, (FIRST,), ALONE)[4].tolist() == [48 * 32 * 4]
    assert found(GPT, (FIRST,), ALONE, itemsize=8)[4].tolist() == [48 * 32 * 8]
    assert found(GPT, (FIRST,), [Sharding(optim=5)])[4].tolist() == [-(-48 * 32 // 5) * 4]
    assert found(GPT, (INNER,), ALONE)[4].tolist() == [0]
    assert found(replace(GPT, tied_embeddings=False), (FIRST,), ALONE)[4].tolist() == [0]
    assert found(GPT, (FIRST,), ALONE, options=MemoryOptions(sums_in_place=True))[4].tolist() == [0]


def test_bytes_of_numbers_in_other_frameworks() -> None:
    told = MemoryOptions(parameter_bytes=3.0, main_gradient_bytes=5.0, optimizer_bytes=7.0, gathered_bytes=11.0,
                         fixed_bytes=1e6)  # fmt: skip
    sharding = [Sharding(params=2, grads=4, optim=8)]
    plait, other = (found(LLAMA, (INNER,), sharding, options=one)[:, 0] for one in (PLAIT, told))
    assert other[0] == plait[0] / 2 * 3
    assert other[1] == plait[1] / 4 * 5
    assert other[2] == plait[2] / 12 * 7
    tables = WORKSPACE + position_tables(LLAMA, Strategy(), sequence=32, itemsize=2)
    assert other[3] - 1e6 - tables == (plait[3] - tables) / 6 * 16


def test_an_optimizer_may_work_with_more_while_it_runs() -> None:
    owned = sum(unit_sizes(LLAMA, Strategy(), INNER, Sharding()).values())
    told = MemoryOptions(update_bytes=14.0)
    columns = found(LLAMA, (INNER,), [Sharding(), Sharding(optim=4)], options=told)
    assert columns[4].tolist() == [owned * 14, owned * 14 / 4]
    flat = Strategy(tp=2, sequence_parallel=True)
    small = MemoryOptions(update_bytes=1e-6)
    assert found(GPT, (LAST,), ALONE, flat, options=small)[4] == found(GPT, (LAST,), ALONE, flat)[4]


def test_quantised_matrices_are_layers_only() -> None:
    """Whole where a rank keeps parameters whole, in shares else, and gathered two of a size."""
    attn, mlp = 32 * 32 + 2 * 8 * 32 + 32 * 32, 3 * 32 * 96
    shardings = [Sharding(), Sharding(optim=4), Sharding(params=4, grads=4, optim=4)]
    told = MemoryOptions(matrices=MatrixBytes(whole=5.0, share=0.5, gathered=3.0))
    plain, own = found(LLAMA, (WHOLE,), shardings), found(LLAMA, (WHOLE,), shardings, options=told)
    numbers = 4 * (attn + mlp)
    assert (own - plain)[0].tolist() == [numbers * 3, numbers * 3, numbers / 4 * -1.5]
    assert (own - plain)[3].tolist() == [0, 0, 2 * (attn + mlp) * 1.0]
    assert not (own - plain)[[1, 2, 4]].any()
    near = [Sharding(params=8, grads=8, optim=8, secondary=2)]
    plain, own = found(LLAMA, (WHOLE,), near), found(LLAMA, (WHOLE,), near, options=told)
    assert (own - plain)[0].tolist() == [numbers * (1 / 8 + 1 / 2) * -1.5]
    experts = states_of_experts(ALONE, options=told) - states_of_experts(ALONE)
    assert experts[0].tolist() == [2 * 8 * EACH // 8 * 3]


@pytest.mark.parametrize(("whole", "more"), [(1.0, -1.0), (2.0, 0.0), (4.0, 2.0)])
def test_shards_that_are_masters_keep_their_type_beside_quantised_matrices(whole: float, more: float) -> None:
    """FSDP2: what stays gathered has the format, not two bytes; nothing takes less than masters do."""
    numbers = 4 * (32 * 32 + 2 * 8 * 32 + 32 * 32 + 3 * 32 * 96)
    fsdp: dict[str, Any] = {"parameter_bytes": 4.0, "gathered_bytes": 2.0, "optimizer_bytes": 8.0, "gathers_stay": True}
    shardings = [Sharding(), Sharding(optim=4), Sharding(params=4, grads=4, optim=4)]
    matrices = MatrixBytes(whole=whole, share=1.0, gathered=whole)
    plain = found(LLAMA, (WHOLE,), shardings, options=MemoryOptions(**fsdp))
    own = found(LLAMA, (WHOLE,), shardings, options=MemoryOptions(**fsdp, matrices=matrices))
    assert (own - plain)[0].tolist() == [0, numbers * more, 0]
    assert (own[0] > 0).all()


def test_units_of_several_kinds_and_one_size_have_buffers_of_their_own() -> None:
    """A layer's attention and MLP are there at once; of GPT both have 4 H^2 numbers where F is 2 H."""
    equal = replace(GPT, ffn_hidden=64)
    sharding = Sharding(params=4, grads=4, optim=4)
    numbers = 2 * 4 * 32 * 32 * 2 + 48 * 32 + 64 * 32  # two of attention, two of MLPs, embedding, positions
    assert states(unit_sizes(equal, Strategy(), WHOLE, sharding), sharding, itemsize=2).buffers == numbers * (2 + 4)
    assert found(equal, (WHOLE,), [sharding])[3].tolist() == [numbers * (2 + 4) + WORKSPACE]
    told = MemoryOptions(matrices=MatrixBytes(whole=2.0, share=2.0, gathered=3.0))
    more = found(equal, (WHOLE,), [sharding], options=told) - found(equal, (WHOLE,), [sharding])
    assert more[3].tolist() == [2 * 4 * 32 * 32 * 2]


def test_what_a_place_holds() -> None:
    told = {"sequence": 32, "itemsize": 2}
    one = held_by(LLAMA, Strategy(tp=2), (FIRST, INNER), **told)
    assert one.units == {
        ("embedding", 24 * 32): 1, ("attn", 32 * (32 + 8)): 3, ("mlp", 32 * 48 * 3): 3,
        ("vectors", 2 * 32): 1, ("vectors", 4 * 32): 1,
    }  # fmt: skip
    assert (one.copies, one.tied, one.tables) == (0, 0, 2 * 2 * 32 * 4 * 2)
    tied = held_by(GPT, Strategy(tp=2, sequence_parallel=True), (LAST,), **told)
    assert (tied.tied, tied.tables) == (24 * 32, 0)
    assert tied.copies == replicated_numbers(GPT, Strategy(tp=2, sequence_parallel=True), LAST)
    assert held_by(GPT, Strategy(), (WHOLE,), **told).tied == held_by(GPT, Strategy(), (INNER,), **told).tied == 0


# ---- experts ----


SOME = replace(LLAMA, experts=Experts(count=8, per_token=2, ffn_hidden=48, first_dense=2))
EACH = 3 * 32 * 48
"""Numbers of an expert."""


def states_of_experts(
    shardings: list[Sharding], stages: tuple[Stage, ...] = (WHOLE,), ep: int = 4, options: MemoryOptions = PLAIT
) -> np.ndarray:
    held, own = held_experts(SOME, stages, tp=2, ep=ep), expert_factors(factors(shardings), ep)
    return place_states(held, own, itemsize=2, options=options)


def test_experts_of_a_place_are_a_unit_a_layer() -> None:
    """Two layers of eight experts, of which a rank has a quarter, halved by tensor parallelism."""
    numbers = 2 * 8 * EACH // 8
    assert states_of_experts(ALONE)[:, 0].tolist() == [numbers * 2, numbers * 4, numbers * 12, 0, 0]
    assert states_of_experts(ALONE, (Stage(1, 3, 1, 2),))[0, 0] == numbers
    assert states_of_experts(ALONE, (Stage(0, 2, 0, 2),))[:, 0].tolist() == [0] * 5
    assert states_of_experts(ALONE, (Stage(0, 2, 0, 2), Stage(1, 2, 2, 2)))[0, 0] == numbers * 2
    assert held_experts(LLAMA, (WHOLE,), tp=1, ep=1).units == {}


def test_factors_are_of_replicas_that_have_the_same_experts() -> None:
    """Every fourth: of eight that share out parameters two, of sixteen four."""
    numbers = 2 * 8 * EACH // 8
    found = states_of_experts([Sharding(params=8, grads=8, optim=16), Sharding(params=4, grads=4, optim=4)])
    assert found[0].tolist() == [numbers * 2 / 2, numbers * 2]
    assert found[1].tolist() == [numbers * 4 / 2, numbers * 4]
    assert found[2].tolist() == [numbers * 12 / 4, numbers * 12]
    assert found[3].tolist() == [numbers * 6, 0]  # two gathered, two open
    near = states_of_experts([Sharding(params=16, grads=16, optim=16, secondary=8)])
    assert near[0].tolist() == [numbers * 2 / 4 + numbers * 2 / 2]
    fixed = states_of_experts(ALONE, options=MemoryOptions(fixed_bytes=1e9))
    assert fixed[3].tolist() == [0]  # which the rest of the place has


def test_a_place_without_units_holds_what_libraries_keep() -> None:
    assert not place_states(HeldStates({}), factors(SHARDINGS), itemsize=2, options=MemoryOptions(gpu=False)).any()
    found = place_states(HeldStates({}), factors(SHARDINGS), itemsize=2, options=PLAIT)
    assert (found == np.array([0, 0, 0, WORKSPACE, 0])[:, None]).all()


def test_tables_hold_what_places_hold_in_whatever_order_it_is_asked() -> None:
    tables = StateTables(2, PLAIT)
    first, last = (held_by(GPT, Strategy(), (stage,), sequence=64, itemsize=2) for stage in (FIRST, LAST))
    for asked in ([2, 0], [5], [1, 1, 4], [0, 1, 2, 3, 4, 5]):
        some = factors([SHARDINGS[at] for at in asked])
        which = tables.numbered(some)
        for place in (first, last, replace(first)):  # equal places have one table
            assert np.array_equal(tables.states(place, which), place_states(place, some, itemsize=2, options=PLAIT))


def test_a_table_grows_only_by_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, own = list[int](), closed_states.place_states

    def told(place: HeldStates, some: Factors, **how: Any) -> np.ndarray:
        counted.append(len(some.params))
        return own(place, some, **how)

    monkeypatch.setattr(closed_states, "place_states", told)
    tables, place = StateTables(2, PLAIT), held_by(GPT, Strategy(), (INNER,), sequence=64, itemsize=2)
    for asked in ([0, 1], [1], [0, 2, 3], [3]):
        tables.states(place, tables.numbered(factors([SHARDINGS[at] for at in asked])))
    assert counted == [2, 2]
