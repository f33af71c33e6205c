"""Experts in the description of a model: counts against published ones, rules, and who refuses
what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.job.spec import Job
from plait.core.model.experts import Experts, check_expert_parallel
from plait.core.model.spec import ModelSpec

PRESETS = specs_folder() / "models"
PUBLISHED = {
    "mixtral-8x7b": (46.7e9, 12.9e9),  # mistral.ai/news/mixtral-of-experts
    "mixtral-8x22b": (141e9, 39e9),  # mistral.ai/news/mixtral-8x22b
    "qwen3-30b-a3b": (30.5e9, 3.3e9),  # arXiv 2505.09388, huggingface.co/Qwen/Qwen3-30B-A3B
    "qwen3-235b-a22b": (235e9, 22e9),  # the same
    "olmoe-1b-7b": (6.9e9, 1.3e9),  # arXiv 2409.02060
    "qwen1.5-moe-a2.7b": (14.3e9, 2.7e9),  # qwenlm.github.io/blog/qwen-moe
}
DENSE = ModelSpec(
    family="llama", num_layers=6, hidden=64, num_heads=4, ffn_hidden=160, vocab=96, max_sequence=64
)  # fmt: skip


def with_experts(**values: Any) -> ModelSpec:
    return replace(DENSE, experts=Experts(**{"count": 8, "per_token": 2, **values}))


def active(spec: ModelSpec) -> int:
    """Parameters that a token meets, but for a few of the router's."""
    assert spec.experts
    return replace(spec, experts=replace(spec.experts, count=spec.experts.per_token)).num_parameters


@pytest.mark.parametrize(("name", "counts"), PUBLISHED.items())
def test_presets_have_the_published_counts(name: str, counts: tuple[float, float]) -> None:
    spec = ModelSpec.preset(name, PRESETS)
    assert spec.num_parameters == pytest.approx(counts[0], rel=0.003)
    assert active(spec) == pytest.approx(counts[1], rel=0.02)


def test_mixtral_has_as_many_numbers_as_its_files() -> None:
    """model.safetensors.index.json of mistralai/Mixtral-8x7B-v0.1: total_size 93405585408 bytes of
    bf16."""
    assert 2 * ModelSpec.preset("mixtral-8x7b", PRESETS).num_parameters == 93_405_585_408


def test_grok_1_is_near_what_its_release_says() -> None:
    spec = ModelSpec.preset("grok-1", PRESETS)
    assert spec.num_parameters == pytest.approx(314e9, rel=0.006)
    assert active(spec) == pytest.approx(314e9 / 4, rel=0.08)  # "25% of the weights active"


def test_one_expert_for_all_tokens_is_an_mlp_and_a_router() -> None:
    spec = with_experts(count=1, per_token=1)
    assert spec.num_parameters == active(spec) == DENSE.num_parameters + 6 * DENSE.hidden
    router = 3 * 6 * 2 * 64 * DENSE.hidden * 5
    assert spec.step_flops(64, 5) == DENSE.step_flops(64, 5) + router


def test_only_some_layers_have_experts() -> None:
    spec = with_experts(first_dense=2, every=2, shared=1, ffn_hidden=32, shared_ffn_hidden=48)
    assert [spec.experts.at(layer) for layer in range(6)] == [False, False, True, False, True, False]  # type: ignore[union-attr]
    assert spec.num_expert_layers == 2
    each = 3 * 64 * (8 * 32 + 48) + 8 * 64 - 3 * 64 * 160
    assert spec.num_parameters == DENSE.num_parameters + 2 * each


def test_widths_that_are_left_out_are_the_models() -> None:
    experts = with_experts(shared=2).experts
    assert experts
    assert (experts.ffn_hidden, experts.shared_ffn_hidden, experts.shared_width) == (160, 160, 320)


@pytest.mark.parametrize(("values", "key"), [
    ({"count": 0}, "count"),
    ({"per_token": 9}, "per_token"),
    ({"every": 0}, "every"),
    ({"capacity": -1.0}, "capacity"),
    ({"capacity": float("nan")}, "capacity"),
    ({"count": 2.5}, "count"),
    ({"count": True}, "count"),
    ({"shared_ffn_hidden": 8}, "shared_ffn_hidden"),
    ({"first_dense": 6}, "first_dense"),
    ({"topk": 2}, "topk"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_its_key(values: dict[str, Any], key: str) -> None:
    model = DENSE.to_dict() | {"experts": {"count": 8, "per_token": 2} | values}
    with pytest.raises(JobError) as refused:
        ModelSpec.from_dict(model)
    assert refused.value.key == f"model.experts.{key}"


def test_a_u_has_no_experts() -> None:
    shape = DENSE.to_dict() | {"family": "utransformer", "levels": 1, "experts": {"count": 2, "per_token": 1}}
    with pytest.raises(JobError, match="has no experts"):
        ModelSpec.from_dict(shape)


def test_ranks_that_share_experts_divide_them_and_the_replicas() -> None:
    check_expert_parallel(with_experts(), 4, 16)
    check_expert_parallel(DENSE, 1, 16)
    for model, ep, replicas in ((with_experts(), 3, 9), (with_experts(), 8, 12), (DENSE, 2, 4)):
        with pytest.raises(JobError) as refused:
            check_expert_parallel(model, ep, replicas)
        assert refused.value.key == "strategy.ep"


@pytest.mark.parametrize("left_open", ["dp", "cp"])
def test_ranks_that_the_planner_chooses_are_not_held_to_it(left_open: str) -> None:
    model = DENSE.to_dict() | {"experts": {"count": 8, "per_token": 2}}
    values: dict[str, Any] = {"model": model, "data": {"sequence_length": 64}, "train": {"global_batch_size": 16}}
    shard = {"params": 1, "grads": 1, "optim": 8}
    found = Job.from_dict(values | {"strategy": {left_open: "auto", "ep": 4, "shard": shard}})
    assert found.strategy.ep == 4
    for key, wrong in (("strategy.ep", {"ep": 3}), ("strategy.shard.grads", {"shard": {**shard, "grads": 3}})):
        with pytest.raises(JobError, match="does not divide") as error:
            Job.from_dict(values | {"strategy": {left_open: "auto", **wrong}})
        assert error.value.key == key


@pytest.mark.parametrize(("capacity", "load"), [(0.0, 2.0), (0.5, 1.0), (1.0, 2.0), (1.25, 2.0)])
def test_experts_compute_no_more_rows_than_there_are(capacity: float, load: float) -> None:
    assert Experts(count=8, per_token=2, capacity=capacity).load == load


@pytest.mark.parametrize(("family", "products", "biases"), [("gpt", 2, 10 + 64), ("llama", 3, 0)])
def test_an_expert_is_an_mlp_without_a_norm(family: Any, products: int, biases: int) -> None:
    spec = ModelSpec(family=family, num_layers=2, hidden=64, num_heads=4, ffn_hidden=160, vocab=99, max_sequence=64)
    assert spec.expert_parameters(10) == products * 64 * 10 + biases
    assert spec.parameters_of("mlp") == spec.expert_parameters(160) + (2 * 64 if family == "gpt" else 64)


def test_a_job_changes_one_key_of_its_preset_s_experts() -> None:
    job = Job.from_dict({"model": {"preset": "qwen1.5-moe-a2.7b", "experts": {"balance_loss": 0.01}},
                         "data": {"sequence_length": 64}})  # fmt: skip
    preset = ModelSpec.preset("qwen1.5-moe-a2.7b", PRESETS)
    assert preset.experts
    assert job.model_spec(256) == replace(preset, experts=replace(preset.experts, balance_loss=0.01))


def test_a_gate_needs_a_shared_expert() -> None:
    with pytest.raises(JobError, match="shared_gate: there is no shared expert"):
        with_experts(shared_gate=True)
    assert with_experts(shared=1, shared_gate=True).num_parameters - with_experts(shared=1).num_parameters == 6 * 64
