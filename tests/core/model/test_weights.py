"""The table of weights, held to itself: what is counted, cut and held agrees."""

from __future__ import annotations

import pytest

from plait.core.model.spec import ModelSpec
from plait.core.model.weights import WEIGHTS, count, matrices_of, weights_of, widths
from plait.core.parallel.strategy import Strategy
from plait.core.step.stages import split_layers, stage_weights
from tests.support.models import gpt, llama, utransformer

MODELS = {"gpt": gpt(), "block": gpt(parallel_block=True), "llama": llama(num_kv_heads=2), "u": utransformer()}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_tensors_of_all_stages_are_the_models_parameters(model: ModelSpec) -> None:
    stages = split_layers(model.num_layers, min(2, model.num_layers))
    named = [pair for stage in stages for pair in stage_weights(model, stage)]
    copies = count([row for row in WEIGHTS if row.name == "head.weight"], model.letters) or model.vocab * model.hidden
    tied = copies if model.tied_embeddings and len(stages) > 1 else 0
    assert sum(Strategy().share(model, weight) for _, weight in named) == model.num_parameters + tied


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_widths_are_those_of_the_matrices_that_ranks_hold(model: ModelSpec, tp: int) -> None:
    strategy = Strategy(tp=tp)
    for site in ("attn", "mlp"):
        held = {"column.weight": 0, "row.weight": 0}
        for weight in matrices_of(site):
            if model.letters.has(weight.when):
                held[weight.fused_into] += strategy.share(model, weight)
        assert [numbers / model.hidden for numbers in held.values()] == list(strategy.widths(model, site))


def test_names_of_a_site_are_its_own() -> None:
    for site in ("embed", "attn", "mlp", "down", "up", "head"):
        names = [weight.name for weight in weights_of(site)]
        assert len(set(names)) == len(names)
    assert widths("attn", llama().letters) == (16 + 2 * 8, 16)  # two key/value heads of four
