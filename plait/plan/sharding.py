"""What sharded data parallelism sends, in closed form: the counterpart of what the runtime counts."""

from __future__ import annotations

from collections.abc import Mapping

from plait.core.model import ModelSpec
from plait.core.sharding import WHOLE, Sharding, Unit
from plait.core.stages import Stage
from plait.core.strategy import Strategy


def unit_sizes(model: ModelSpec, strategy: Strategy, stage: Stage, sharding: Sharding) -> dict[Unit, int]:
    """Numbers in every unit of one rank's share of a stage, padding included."""
    tp, hidden = strategy.tp, model.hidden
    query, kv = (
        model.num_heads * model.head_size // tp,
        model.num_kv_heads * model.head_size * strategy.kv_replicas(model) // tp,
    )
    inner, biased = model.ffn_hidden // tp, model.has_bias
    norm, block = hidden * (1 + biased), model.parallel_block
    sizes: dict[Unit, int] = {}
    if stage.embeds:
        sizes["embedding", 0] = strategy.padded_vocab(model) // tp * hidden
    if stage.embeds and model.learned_positions:
        sizes["positions", 0] = model.max_sequence * hidden
    vectors = norm if stage.heads else 0
    for layer in stage.layers:
        for _, way, level in (change for change in model.resampling if change[0] == layer):
            sizes[way, level] = hidden * hidden * (2 if way == "down" else 1)
            vectors += hidden
        sizes["attn", layer] = hidden * (2 * query + 2 * kv)
        sizes["mlp", layer] = hidden * inner * (2 + model.gated)
        vectors += norm * (1 if block else 2) + (query + 2 * kv + inner + hidden * (1 if block else 2)) * biased
    if stage.heads and not (model.tied_embeddings and stage.embeds):
        sizes["head", 0] = strategy.padded_vocab(model) // tp * hidden
    sizes["vectors", stage.index] = vectors
    return {unit: sharding.padded(numel) for unit, numel in sizes.items() if numel}


def step_bytes(
    units: Mapping[Unit, int],
    sharding: Sharding,
    ranks: int,
    *,
    micro_batches: int,
    itemsize: int,
    gradient_itemsize: int = 4,
    tied: bool = False,
) -> dict[str, int]:
    """Bytes that one rank sends in a step, by axis, as rings would (over s ranks (s-1)/s of the whole, an
    all-reduce twice that).

    units: numbers in each, padding included, on one rank's share of the model. tied: the embedding is also
    the head of the same stage. For every micro-batch a unit is gathered forward and backward and its gradient
    reduced to the accumulated part; after the last one the sum is reduced to what an optimizer owns and
    summed over replicas, and the new parameters go the same way back.
    """
    sent: dict[str, int] = dict.fromkeys(("params", "grads", "optim", "replicas", "secondary"), 0)
    for unit, numel in units.items():
        (p, g, o), k = (sharding.params, sharding.grads, sharding.optim), sharding.secondary
        reduced = micro_batches
        forward = 2 if unit[0] == "embedding" and tied else 1
        # Nobody reads rows of an embedding backward, except as the head's weight.
        backward = int(unit[0] not in ("embedding", "positions") or (unit[0] == "embedding" and tied))
        if unit[0] in WHOLE:  # whole on every rank until the step's end
            forward, backward, reduced = 0, 0, 1
            sent["params"] += _cut(numel * itemsize, p)
        sent["params"] += micro_batches * (forward + (0 if k else backward)) * _cut(numel * itemsize, p)
        sent["secondary"] += micro_batches * backward * _cut(numel * itemsize, k) if k else 0
        sent["params"] += reduced * _cut(numel * gradient_itemsize, p)
        sent["grads"] += reduced * _cut(numel // p * gradient_itemsize, g // p) + _cut(numel // p * itemsize, g // p)
        sent["optim"] += _cut(numel // g * gradient_itemsize, o // g) + _cut(numel // g * itemsize, o // g)
        sent["replicas"] += 2 * _cut(numel // o * gradient_itemsize, ranks // o)
    return sent


def _cut(whole: int, ranks: int) -> int:
    """What each of ``ranks`` sends where ``whole`` bytes are gathered or reduced among them."""
    return whole * (ranks - 1) // ranks
