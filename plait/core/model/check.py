"""Checks of a model's sizes, and of the parts that its family has. An error names the key and valid
values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.core.base.codec.data import check_limits
from plait.core.base.errors import JobError
from plait.core.base.numbers import divisors, multiples
from plait.core.model.experts import Experts

if TYPE_CHECKING:
    from plait.core.model.spec import ModelSpec

ROPE_THETA = 10000.0
"""Base of rotary positions, unless a model sets another."""


def check_sizes(model: ModelSpec) -> None:
    """Raise JobError for sizes that contradict each other. model: before its defaults are filled
    in."""
    check_limits(model, "model")
    heads, groups = model.num_heads, model.num_kv_heads or model.num_heads
    if not model.head_size and model.hidden % heads:
        problem = f"{heads} heads do not divide hidden = {model.hidden}"
        changes = [{"model.num_heads": one} for one in divisors(model.hidden, heads)]
        raise JobError(problem, key="model.num_heads", changes=changes)
    if heads % groups:
        problem = f"{groups} key/value heads do not divide num_heads = {heads}"
        changes = [{"model.num_kv_heads": one} for one in divisors(heads, groups)]
        raise JobError(problem, key="model.num_kv_heads", changes=changes)
    if not model.ffn_hidden and model.family == "llama":
        changes = [{"model.ffn_hidden": _usual_ffn(model.hidden, heads)}]
        raise JobError("a llama model needs its feed-forward size", key="model.ffn_hidden", changes=changes)


def check_parts(model: ModelSpec) -> None:
    """Raise JobError for parts that the family does not have, or that exclude each other."""
    _check_family(model)
    _check_numbers(model)
    _check_latent(model)
    if model.experts:
        _check_experts(model, model.experts)


def _check_family(model: ModelSpec) -> None:
    family = model.family
    if model.has_bias and model.num_kv_heads != model.num_heads:
        raise JobError(f"the {family} family has no grouped-query heads", key="model.num_kv_heads",
                       changes=[{"model.num_kv_heads": None}, {"model.family": "llama"}])  # fmt: skip
    if (family == "utransformer") != (model.levels > 0):
        raise JobError(f"{model.levels} levels in the {family} family", key="model.levels",
                       changes=[{"model.levels": 1 if family == "utransformer" else None}])  # fmt: skip
    parts = 2 * model.levels + 1
    if model.num_layers % parts:
        problem = f"{model.num_layers} layers over {parts} parts of a U"
        changes = [{"model.num_layers": one} for one in multiples(parts, model.num_layers)]
        raise JobError(problem, key="model.num_layers", changes=changes)
    if model.learned_positions and (model.rope_scaling or model.rope_theta != ROPE_THETA):
        key = "rope_scaling" if model.rope_scaling else "rope_theta"
        raise JobError(f"the {family} family has no rotary positions", key=f"model.{key}",
                       changes=[{f"model.{key}": None}])  # fmt: skip
    for name, what in (("qk_norm", "norms of queries and keys"), ("window", "sliding window"),
                       ("qkv_bias", "biases of queries, keys and values alone")):  # fmt: skip
        if getattr(model, name) and model.has_bias:
            raise JobError(f"the {family} family has no {what}", key=f"model.{name}",
                           changes=[{f"model.{name}": None}, {"model.family": "llama"}])  # fmt: skip


def _check_numbers(model: ModelSpec) -> None:
    if model.family == "llama" and model.head_size % 2:
        raise JobError(f"rotary positions need an even head size, not {model.head_size}", key="model.head_size",
                       changes=[{"model.head_size": one} for one in multiples(2, model.head_size)])  # fmt: skip
    if model.window and model.attention_dropout:
        raise JobError("attention with a sliding window cannot drop weights", key="model.attention_dropout",
                       changes=[{"model.attention_dropout": 0.0}, {"model.window": 0}])  # fmt: skip


def _check_latent(model: ModelSpec) -> None:
    sizes = {name: getattr(model, name) for name in ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim")}
    missing = [name for name, size in sizes.items() if size < 1]
    if not any(sizes.values()):
        return
    if missing:
        raise JobError("latent attention needs it", key=f"model.{missing[0]}", fix="Give it, or none of the three")
    for key, wrong in (("family", model.has_bias), ("num_kv_heads", model.num_kv_heads != model.num_heads),
                       ("qk_norm", model.qk_norm), ("qkv_bias", model.qkv_bias), ("window", model.window)):  # fmt: skip
        if wrong:
            raise JobError(f"{getattr(model, key)!r} is not supported beside latent attention", key=f"model.{key}",
                           changes=[{f"model.{key}": "llama" if key == "family" else None}])  # fmt: skip


def _check_experts(model: ModelSpec, experts: Experts) -> None:
    if model.levels:
        raise JobError("a utransformer has no experts", key="model.experts", changes=[{"model.experts": None}])
    if not any(map(experts.at, range(model.num_layers))):
        problem = f"none of {model.num_layers} layers has experts after {experts.first_dense} without"
        raise JobError(problem, key="model.experts.first_dense",
                       changes=[{"model.experts.first_dense": 0}])  # fmt: skip


def _usual_ffn(hidden: int, heads: int) -> int:
    """Return the usual MLP width of llama models: 8/3 of hidden, as a multiple of the heads."""
    return max(heads, 8 * hidden // 3 // heads * heads)
