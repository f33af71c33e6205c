"""Time of experts: what is sent and reduced, and published steps that nothing was fitted to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from plait.core.base.env import specs_folder
from plait.core.cluster.hardware import Cluster
from plait.core.model.experts import Experts
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import OVERLAPS, RECOMPUTES, SCHEDULES, Points
from plait.core.step.columns.shapes import Shapes
from plait.core.step.seconds import rates
from plait.core.step.seconds.closed_form import Options, Seconds, step_seconds
from plait.core.step.seconds.dispatch_time import INSIDE, reached
from plait.core.step.seconds.experts_time import cut_by, of_experts
from plait.core.step.seconds.layer_time import Layer
from plait.core.step.seconds.owners import Owners

H100 = Cluster.preset("h100")
MIXTRAL = ModelSpec.preset("mixtral-8x7b", specs_folder() / "models")
GROK = ModelSpec.preset("grok-1", specs_folder() / "models")
LLAMA = ModelSpec.preset("llama3-8b", specs_folder() / "models")
ROW = {"dp": 16, "micro": 1, "num_micro": 8, "optim": 16}


def step(model: ModelSpec | Shapes, *rows: dict[str, int], **more: Any) -> Seconds:
    return step_seconds(model, Points.of(rows), H100, sequence=4096, **more)


@given(st.integers(0, 6), st.integers(0, 6), st.integers(0, 6))
def test_factors_stay_a_chain_that_divides_the_ranks_with_the_same_experts(a: int, b: int, c: int) -> None:
    small, large, replicas = np.sort([2**a, 3 * 2**b, 3 * 2 ** max(a, b, c)])
    assume(large % small == replicas % large == 0)
    for ep in (d for d in range(1, replicas + 1) if replicas % d == 0):
        assert cut_by(large, ep) % cut_by(small, ep) == 0
        assert (replicas // ep) % cut_by(large, ep) == 0
        assert cut_by(replicas, ep) == replicas // ep


def test_replicas_of_experts_are_fewer_and_further_apart() -> None:
    own = of_experts(Points.of([{"dp": 8, "cp": 2, "tp": 4, "ep": 8, "params": 4, "optim": 16}]))
    assert (int(own.replicas[0]), int(own.tp[0]), int(own.params[0]), int(own.optim[0])) == (2, 32, 1, 2)


def test_a_model_without_experts_has_no_such_time() -> None:
    found = step(LLAMA, ROW)
    assert found.ep.tolist() == [0.0]


def test_columns_may_mix_models_with_experts_and_without() -> None:
    both = step(Shapes.stack([Shapes.of(LLAMA), Shapes.of(MIXTRAL)]), ROW, ROW | {"ep": 8})
    assert both.total[0] == pytest.approx(step(LLAMA, ROW).total[0])
    assert both.total[1] == pytest.approx(step(MIXTRAL, ROW | {"ep": 8}).total[0])


def test_one_expert_for_all_tokens_is_nearly_the_dense_model() -> None:
    one = replace(LLAMA, experts=Experts(count=1, per_token=1))
    found, dense = step(one, ROW), step(LLAMA, ROW)
    assert found.ep[0] == 0
    assert dense.linear[0] < found.linear[0] < 1.05 * dense.linear[0]
    assert found.sync[0] == pytest.approx(dense.sync[0], rel=0.1)


def test_tokens_travel_where_experts_are_shared_out_only() -> None:
    found = step(MIXTRAL, *(ROW | {"ep": ep} for ep in (1, 2, 8)))
    assert found.ep[0] == 0
    # What stays with its expert is 1/2 and 1/8; both within a node.
    assert (7 / 8) / (1 / 2) <= found.ep[2] / found.ep[1] < 2.2  # and more hops
    assert step(MIXTRAL, {**ROW, "dp": 16, "tp": 1, "ep": 8, "pp": 2}).ep[0] > 0


def test_more_tokens_of_an_expert_are_as_many_more_bytes() -> None:
    wide = replace(MIXTRAL, experts=replace(MIXTRAL.experts, per_token=4))  # type: ignore[type-var]
    few = replace(MIXTRAL, experts=replace(MIXTRAL.experts, capacity=0.5))  # type: ignore[type-var]
    row = ROW | {"ep": 8, "micro": 4}
    whole = step(MIXTRAL, row).ep[0]
    assert step(wide, row).ep[0] / whole == pytest.approx(2, rel=0.1)
    assert step(few, row).ep[0] / whole == pytest.approx(0.5, rel=0.1)


def test_gradients_of_experts_are_reduced_over_those_with_the_same_experts() -> None:
    alone = ROW | {"shard_overlap": 0}
    found = step(MIXTRAL, *(alone | {"ep": ep} for ep in (1, 4, 8)))
    assert found.sync[0] > found.sync[1] > found.sync[2]
    assert found.optimizer[0] == pytest.approx(found.optimizer[2], rel=1e-9)  # of each number one owner


def test_experts_with_few_tokens_cost_more_of_the_same_products() -> None:
    many = replace(MIXTRAL, experts=Experts(count=64, per_token=2))
    assert many.step_flops(4096, 1) == pytest.approx(MIXTRAL.step_flops(4096, 1), rel=0.001)
    assert step(many, ROW).linear[0] > 1.15 * step(MIXTRAL, ROW).linear[0]


@pytest.mark.parametrize(("precision", "nodes", "pp", "layers", "measured"), [
    ("bf16-mixed", 16, 2, 16, 20.64), ("bf16-mixed", 64, 8, 64, 20.83), ("fp8", 64, 8, 64, 16.69),
])  # fmt: skip
def test_published_steps_of_grok_are_met(precision: Any, nodes: int, pp: int, layers: int, measured: float) -> None:
    """NVIDIA dgxc-benchmarking, Grok-1 on H100: tp 4, cp 2, ep 8, 8 virtual stages, 1,024 x 8,192 tokens."""
    dp = nodes * 8 // (4 * pp * 2)
    row = {
        "tp": 4, "pp": pp, "cp": 2, "ring": 2, "dp": dp, "ep": 8, "micro": 1, "num_micro": 1024 // dp,
        "optim": 2 * dp, "virtual": 8, "schedule": SCHEDULES.index("interleaved"), "sequence_parallel": 1,
        "overlap": OVERLAPS.index("async"),
    }  # fmt: skip
    found = step_seconds(
        replace(GROK, num_layers=layers), Points.of([row]), H100, sequence=8192, precision=precision,
        options=Options(gradient_bytes=2.0),
    )  # fmt: skip
    assert found.total[0] == pytest.approx(measured, rel=0.12)


MODEL_ZOO = {
    "DeepEP": ({"tp": 2, "pp": 8, "virtual": 4, "dp": 16, "ep": 32}, {"dispatch_once": True}, 19.7),
    "and overlap": (
        {"tp": 2, "pp": 8, "virtual": 4, "dp": 16, "ep": 32}, {"dispatch_once": True, "exchange_hidden": True}, 17.6,
    ),
    "NCCL": ({"tp": 2, "pp": 32, "virtual": 3, "dp": 4, "ep": 8}, {}, 24.2),
    "tp 4": ({"tp": 4, "pp": 8, "virtual": 4, "dp": 8, "ep": 8}, {"dispatch_once": True}, 29.0),
}  # fmt: skip


@pytest.mark.parametrize("name", MODEL_ZOO)
def test_published_steps_of_qwen3_with_whole_experts_are_met(name: str) -> None:
    """github.com/yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3 (2025): 235B-A22B, bf16, 256 H100, 2,048
    x 4,096 tokens, expert-tensor-parallel 1, norms and activations recomputed. Nothing was fitted to them.
    Transfers count, though Megatron-LM overlaps them: without them the longest pipeline is 18 % too fast."""
    row, options, measured = MODEL_ZOO[name]
    given = {
        "micro": 1, "num_micro": 2048 // row["dp"], "optim": row["dp"], "sequence_parallel": 1,
        "schedule": SCHEDULES.index("interleaved"), "recompute": RECOMPUTES.index("selective"),
        "overlap": OVERLAPS.index("async"),
    }  # fmt: skip
    model = ModelSpec.preset("qwen3-235b-a22b", specs_folder() / "models")
    told: Any = {"experts_whole": True, "in_lists": False, "rounds_hide_transfers": False, **options}
    found = step_seconds(model, Points.of([row | given]), H100, sequence=4096, options=Options(**told))
    assert found.total[0] == pytest.approx(measured, rel=0.15)


SPREAD = {"tp": 2, "dp": 4, "micro": 1, "num_micro": 8, "sequence_parallel": 1, "optim": 4}
EXPERTS = ({"ep": 4}, False), ({"ep": 8}, True)
"""Of 8 experts on 8 ranks in pairs: each rank has one whole in place of two halves."""


@pytest.mark.parametrize("lists", [False, True])
def test_whole_experts_are_shared_out_over_tensor_parallel_ranks(lists: bool) -> None:
    """Each rank has no rows of its neighbour."""
    options = [Options(experts_whole=one, in_lists=lists) for _, one in EXPERTS]
    cut, whole = (step(MIXTRAL, SPREAD | ep, options=told) for (ep, _), told in zip(EXPERTS, options, strict=True))
    assert whole.tp[0] < 0.6 * cut.tp[0]
    assert whole.optimizer[0] == pytest.approx(cut.optimizer[0], rel=1e-9)
    assert whole.ep[0] > cut.ep[0]
    more = [collisions(ep, told) if lists else 0.0 for (ep, _), told in zip(EXPERTS, options, strict=True)]
    # Nobody else has the same experts: sums differ by what they meet on their way.
    assert whole.sync[0] - more[1] == pytest.approx(cut.sync[0] - more[0], rel=1e-9)


def collisions(ep: dict[str, int], options: Options) -> float:
    """Seconds that the last backward waits longer for tensor parallelism, whose links sums have meanwhile."""
    points = Points.of([SPREAD | ep])
    layer = Layer(Shapes.of(MIXTRAL), points, H100, 4096, "bf16-mixed", options)
    late = np.maximum(0, layer.late_backward)
    down = Owners.of(Shapes.of(MIXTRAL), points, H100, options).down
    reductions = layer.tp_forward + layer.tp_backward
    part = reductions / (reductions + layer.ep_forward)  # of both directions, taken for the backward's
    found = 32 * part * (layer.back - layer.backward) * np.minimum(1, down / (32 * (layer.back + late)))
    return float(found[0])


def test_a_token_that_is_sent_once_travels_less() -> None:
    """Of 128 experts on 8 ranks a token goes to eight, on 5.4 ranks."""
    fine = replace(MIXTRAL, experts=Experts(count=128, per_token=8, ffn_hidden=1024))
    row = ROW | {"tp": 1, "dp": 32, "ep": 8}
    every, once = (
        step_seconds(fine, Points.of([row]), H100, sequence=4096, options=Options(dispatch_once=one)).ep[0]
        for one in (False, True)
    )
    share = H100.efficiency.inside.share.value / INSIDE
    assert once / every == pytest.approx(float(reached(8, 128, 8)) / 8 * share, rel=0.15)
    hidden = Options(dispatch_once=True, exchange_hidden=True)
    assert step_seconds(fine, Points.of([row]), H100, sequence=4096, options=hidden).ep[0] < once / 2


def test_parts_that_a_token_reaches() -> None:
    """Of 4 experts in 2 parts, one pair in three lies in one of them."""
    assert float(reached(2, 4, 2)) == pytest.approx(2 * 2 / 3 + 1 / 3)
    assert float(reached(8, 8, 8)) == 8
    assert float(reached(8, 8, 1)) == 1
    assert float(reached(4, 64, 0.5)) == pytest.approx(0.5)
    both = reached(np.array([2, 8]), 64, np.array([2, 8]))
    assert both == pytest.approx([float(reached(2, 64, 2)), float(reached(8, 64, 8))])


def test_the_host_waits_for_counts_of_tokens_unless_experts_drop_some() -> None:
    drops = replace(MIXTRAL, experts=replace(MIXTRAL.experts, capacity=1.0))  # type: ignore[type-var]
    row = ROW | {"tp": 8, "dp": 1, "micro": 1, "sequence_parallel": 1}
    assert step(drops, row).total[0] < step(MIXTRAL, row).total[0]


def test_deepseek_v3_as_it_was_trained() -> None:
    """arXiv 2412.19437: 180,000 hours of an H800 for 1e12 tokens, in batches of 15,360 x 4,096 on 2,048 of
    them: 19.9 s a step; pp 16, ep 64, a bidirectional pipeline, exchanges beside other micro-batches. Nothing
    was fitted to it."""
    inside = H100.tiers[0].model_copy(update={"rate": H100.tiers[0].rate.model_copy(update={"value": 200e9})})
    h800 = H100.model_copy(update={"tiers": (inside, *H100.tiers[1:])})
    model = ModelSpec.preset("deepseek-v3", specs_folder() / "models")
    row = {
        "pp": 16, "dp": 128, "ep": 64, "micro": 1, "num_micro": 120, "optim": 128, "virtual": 2,
        "schedule": SCHEDULES.index("zb-v"), "recompute": RECOMPUTES.index("selective"),
    }  # fmt: skip
    found = step_seconds(
        model, Points.of([row]), h800, sequence=4096, precision="fp8",
        options=Options(dispatch_once=True, exchange_hidden=True, quantised=0.5),
    )  # fmt: skip
    assert found.total[0] == pytest.approx(180_000 * 3600 / 1e12 * 15_360 * 4096 / 2048, rel=0.12)


def test_latent_attentions_products_are_its_four_and_the_second() -> None:
    model = ModelSpec.preset("deepseek-v3", specs_folder() / "models")
    plain = replace(model, experts=None, q_lora_rank=0, kv_lora_rank=0, qk_rope_head_dim=0)
    latent = replace(model, experts=None)
    row = {"tp": 4, "dp": 2, "micro": 2, "num_micro": 2, "sequence_parallel": 1, "overlap": OVERLAPS.index("sync")}
    layers, tokens = model.num_layers, 2 * 2 * 4096

    def products(*shapes: tuple[float, float, float]) -> float:
        return sum(float(rates.three_products(H100, "bf16-mixed", *shape)) for shape in shapes) * layers * 2

    of_latent = products((2048, 7168, 1536), (2048, 7168, 576), (8192, 1536, 24576 / 4), (8192, 512, 32768 / 4))
    of_plain = products((8192, 7168, 3 * 16384 / 4))
    found = step(latent, row).linear[0] - step(plain, row).linear[0]
    assert tokens == 16384 and found == pytest.approx(of_latent - of_plain, rel=1e-9)


@pytest.mark.parametrize("ring", [1, 4])
def test_latent_heads_are_exchanged_with_their_rotated_part(ring: int) -> None:
    """Queries and keys of 192 and values of 128 numbers a head, against 128 of each."""
    model = replace(ModelSpec.preset("deepseek-v3", specs_folder() / "models"), experts=None)
    plain = replace(model, q_lora_rank=0, kv_lora_rank=0, qk_rope_head_dim=0)
    row = {"cp": 4, "ring": ring, "dp": 4, "micro": 8, "num_micro": 2, "overlap": OVERLAPS.index("sync")}
    layers = [Layer(Shapes.of(one), Points.of([row]), H100, 4096, "bf16-mixed", Options()) for one in (model, plain)]
    sent = [one.sums.forward.ring if ring > 1 else one.sums.forward.heads for one in layers]
    assert float(sent[0][0] / sent[1][0]) == pytest.approx(160 / 128, rel=0.02)
