"""What experts add to the memory of a device: their states, of which every rank has some experts' only, and
the routed tokens that a layer keeps and works with.

A model with experts is walked as one without (``activated``, ``resident``) whose MLP is as wide as what a
token meets, or as what every rank has, on the mean of all layers; the rest is added here. Tokens are taken to
be spread evenly over experts: what an overloaded rank needs more is not counted. docs/adr/0017.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.core.model.precision import MASTER
from plait.core.model.spec import ModelSpec
from plait.core.step.columns.points import RECOMPUTES, Points
from plait.core.step.columns.shapes import LooseModel, Shapes
from plait.core.step.memory.closed_states import EXPERTS, FACTORS, Factors, HeldStates
from plait.core.step.memory.live import (
    BACKWARD,
    FORWARD,
    KEPT_LAYER,
    PLAIN_BACKWARD,
    PLAIN_FORWARD,
    PLAIN_KEPT_LAYER,
    STREAM,
    TYPES,
)
from plait.core.step.seconds.experts_time import cut_by
from plait.core.step.stages import Stage

STREAMS = [RECOMPUTES.index(name) for name in ("full", "layer")]
SCORE_BYTES = 2 * MASTER
"""Of a token's score for one expert that a layer keeps: logit and probability in fp32."""


@cache
def activated(model: ModelSpec) -> ModelSpec:
    """As wide as what a token meets, and with attention that is not latent; else as it is."""
    shapes = Shapes.of(model)
    plain: dict[str, Any] = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim"), 0)
    return _dense(model, shapes.whole_ffn + shapes.expert_share * shapes.routed * shapes.expert_ffn, plain)


@cache
def resident(model: ModelSpec) -> ModelSpec:
    """As wide as what every rank has, routers included; a dense model as it is."""
    shapes = Shapes.of(model)
    return _dense(model, shapes.whole_ffn + shapes.expert_share * shapes.experts / (2 + shapes.gated))


def _dense(model: ModelSpec, width: float, changed: dict[str, Any] | None = None) -> ModelSpec:
    changed = {name: value for name, value in (changed or {}).items() if getattr(model, name) != value}
    if model.experts is None and not changed:
        return model
    values: dict[str, Any] = {field.name: getattr(model, field.name) for field in fields(ModelSpec)}
    values |= {"experts": None, "ffn_hidden": round(width), **changed}
    return LooseModel(**values, gated_mlp=model.gated, trained_positions=model.learned_positions)


def held_experts(model: ModelSpec, stages: tuple[Stage, ...], *, tp: int, ep: int) -> HeldStates:
    """The routed experts of a place with these stages: every layer's are a unit."""
    layers = sum(model.experts.at(layer) for stage in stages for layer in stage.layers) if model.experts else 0
    each = model.routed_parameters // (ep * tp)
    return HeldStates({(EXPERTS, each): layers} if layers else {}, experts=True)


def expert_factors(factors: Factors, ep: int, among: int = 1) -> Factors:
    """What factors of sharding over dp x cp are over the ranks that have the same experts. among:
    tensor-parallel ranks among which experts are told apart."""
    return Factors(*(cut_by(getattr(factors, name), ep, among) for name in FACTORS))


def latent_sizes(model: ModelSpec, points: Points, *, sequence: int, itemsize: int) -> NDArray[np.float64]:
    """[points, STREAM] bytes, to be added to ``size_rows``: latent queries, keys and values that a layer
    keeps, of its own tokens, and the rotated parts of its heads' queries and keys."""
    tokens = (points.micro * (sequence // points.cp)).astype(np.float64)
    here = tokens / np.where(points.sequence_parallel > 0, points.tp, 1)
    letters = model.letters
    rotated = 2 * model.num_heads * model.qk_rope_head_dim / points.tp
    kept = itemsize * (here * (letters.A + letters.B + letters.R) + tokens * rotated)
    found, again = np.zeros((len(points), STREAM)), np.isin(points.recompute, STREAMS)
    found[:, KEPT_LAYER] = kept * ~again
    for peak in (FORWARD, BACKWARD):
        found[:, peak : peak + len(TYPES)] = (kept * again)[:, None]
    return found


def routed_sizes(
    model: ModelSpec, points: Points, mixed: NDArray[np.bool_], *, sequence: int, itemsize: int, whole: bool = False
) -> NDArray[np.float64]:
    """[points, STREAM] bytes, to be added to ``size_rows``: rows that experts take in and give back, and the
    router's scores. mixed: points with layers that compute again beside layers that do not. whole: no expert
    is cut."""
    shapes = Shapes.of(model)
    tokens = (points.micro * (sequence // points.cp)).astype(np.float64)
    here = tokens / np.where(points.sequence_parallel > 0, points.tp, 1)
    rows = shapes.expert_share * shapes.routed * model.hidden * itemsize
    # Inputs, of all the tensor-parallel group's tokens unless experts are whole; outputs, which the router's
    # gradient needs.
    kept = rows * ((here if whole else tokens) + here) + shapes.expert_share * shapes.experts * here * SCORE_BYTES
    working = rows * 2 * here  # on the way, sent and received
    found, again = np.zeros((len(points), STREAM)), np.isin(points.recompute, STREAMS)
    found[:, KEPT_LAYER] = kept * ~again
    found[:, FORWARD : FORWARD + len(TYPES)] = (working + kept * again)[:, None]
    found[:, BACKWARD : BACKWARD + len(TYPES)] = (working + kept * again)[:, None]
    found[:, PLAIN_KEPT_LAYER] = kept * mixed
    found[:, PLAIN_FORWARD : PLAIN_FORWARD + len(TYPES)] = (working * mixed)[:, None]
    found[:, PLAIN_BACKWARD : PLAIN_BACKWARD + len(TYPES)] = (working * mixed)[:, None]
    return found
