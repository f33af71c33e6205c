"""Models of newer types and their variants: logits, loss and gradients as transformers has them, in
fp64 throughout, and both ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.core.base.errors import CheckpointError
from plait.core.model.experts import Experts
from plait.core.model.families import huggingface_config, usual_name
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.checkpoint import huggingface
from plait.train.checkpoint.weight_files import check_weights, stored_piece
from plait.train.comm.wire import NullWire
from plait.train.engine.inflight import MicroBatch
from plait.train.model.transformer import Transformer
from plait.train.sample import next_logits
from tests.dist.equality import build

BASE: dict[str, Any] = {
    "vocab_size": 53, "max_position_embeddings": 64, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"
MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3 = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "norm_topk_prob": True}
QWEN2 = QWEN3 | {"num_experts_per_tok": 2, "norm_topk_prob": False, "shared_expert_intermediate_size": 12}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 50.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
EQUAL: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "mixtral": (
        MIXTRAL,
        [
            {}, {"num_experts_per_tok": 1}, {"num_experts_per_tok": 4}, {"num_local_experts": 7}, {"head_dim": 6},
            {"sliding_window": 5}, {"rope_theta": 100.0}, {"tie_word_embeddings": True, "rms_norm_eps": 1e-3},
            {"router_aux_loss_coef": 0.5}, {"num_key_value_heads": 4, "rope_parameters": LLAMA3},
            {"router_jitter_noise": 0.0, "output_router_logits": False, "hidden_act": "swish"},
        ],
    ),
    "qwen3_moe": (
        QWEN3,
        [
            {}, {"norm_topk_prob": False}, {"num_experts_per_tok": 1}, {"num_experts": 2, "num_experts_per_tok": 2},
            {"mlp_only_layers": [0]}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 3}, {"mlp_only_layers": [7]},
            {"head_dim": 6}, {"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 1},
            {"rope_theta": 77.0}, {"tie_word_embeddings": True, "moe_intermediate_size": 5},
        ],
    ),
    "qwen2": (
        {},
        [
            {}, {"num_key_value_heads": 1}, {"num_key_value_heads": 4}, {"tie_word_embeddings": True}, {"head_dim": 6},
            {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
            {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 1},
            {"sliding_window": 3, "use_sliding_window": True, "layer_types": [SLIDING, FULL, SLIDING]},
            {"rms_norm_eps": 1e-2, "rope_theta": 77.0}, {"rope_parameters": LLAMA3}, {"sliding_window": 4},
        ],
    ),
    "qwen2_moe": (
        QWEN2,
        [
            {}, {"norm_topk_prob": True}, {"qkv_bias": False}, {"shared_expert_intermediate_size": 40},
            {"mlp_only_layers": [0, 1]}, {"decoder_sparse_step": 2, "num_hidden_layers": 2}, {"num_experts": 3},
            {"moe_intermediate_size": 24}, {"head_dim": 6}, {"tie_word_embeddings": True, "rope_theta": 77.0},
            {"sliding_window": 4, "max_window_layers": 1}, {"layer_types": [FULL] * 3},
        ],
    ),
}  # fmt: skip
CASES = [(kind, base, change) for kind, (base, changes) in EQUAL.items() for change in changes]
TOKENS = torch.randint(0, 53, (2, 12), generator=torch.Generator().manual_seed(1))


@contextmanager
def fp64() -> Iterator[None]:
    """Where transformers asks for fp32 (norms, rotations, routing), it gets fp64."""
    with ExitStack() as stack:
        for of, name, other in (
            (torch, "float32", torch.float64), (torch, "float", torch.float64), (Tensor, "float", Tensor.double)
        ):  # fmt: skip
            stack.enter_context(mock.patch.object(of, name, other))
        yield


def make(folder: Path, values: dict[str, Any]) -> Any:
    """A model of transformers with no trivial weight, saved with this very configuration."""
    torch.manual_seed(0)
    (folder / "config.json").write_text(json.dumps(values))
    config = transformers.AutoConfig.from_pretrained(folder)
    with fp64():
        model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=torch.float64) * 0.1)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))
    return model


def gradient_of(model: Any, name: str) -> Tensor:
    """By the name in files; in memory, weights of experts are one tensor."""
    named = {key: value.grad for key, value in model.named_parameters()}
    before, _, after = name.partition(".experts.")
    if not after:
        return named[name]
    expert, part, _ = after.split(".")
    if part == "down_proj":
        return named[f"{before}.experts.down_proj"][int(expert)]
    return named[f"{before}.experts.gate_up_proj"][int(expert)].chunk(2)[part == "up_proj"]


@pytest.mark.parametrize(("kind", "base", "change"), CASES, ids=lambda one: str(one)[:80])
def test_loss_gradients_and_the_way_back(
    tmp_path: Path, kind: str, base: dict[str, Any], change: dict[str, Any]
) -> None:
    theirs = make(tmp_path, {"model_type": kind, **BASE, **base, **change})
    with fp64():
        expected = theirs(TOKENS, labels=TOKENS)
        expected.loss.backward()
    spec = ModelSpec.from_huggingface(tmp_path)
    executor, optimizer = build(spec, Strategy(), None, over=NullWire(), micro=2)
    model, gradients = executor.model, optimizer.gradients
    assert isinstance(model, Transformer)
    huggingface.load(model, tmp_path)
    gradients.zero()
    targets = torch.cat((TOKENS[:, 1:], torch.full((2, 1), -100)), dim=1)
    loss = executor.run(MicroBatch(TOKENS, targets, torch.arange(2), 1 / int((targets != -100).sum()), 0))
    assert loss.item() == pytest.approx(expected.loss.item(), rel=1e-10)
    for piece in model.pieces:
        at = stored_piece(spec, piece)
        wanted = gradient_of(theirs, at.name if at.name == "lm_head.weight" else f"model.{at.name}")
        found = piece.view(gradients.named[piece.parameter])
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-9, msg=lambda m, p=piece: f"{p.name}: {m}")
    last = theirs(TOKENS[:1]).logits[0, -1]
    torch.testing.assert_close(next_logits(model, TOKENS[0].tolist()), last, atol=1e-5, rtol=1e-5)
    huggingface.save(model, tmp_path / "back")
    with torch.no_grad(), fp64():
        back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", experts_implementation="eager")
        assert torch.equal(back.eval()(TOKENS).logits, theirs(TOKENS).logits)
    assert ModelSpec.from_huggingface(tmp_path / "back") == spec
    assert set(load_file(tmp_path / "back" / "model.safetensors")) == set(load_file(tmp_path / "model.safetensors"))


SPEC = ModelSpec(family="llama", num_layers=3, hidden=16, num_heads=4, ffn_hidden=24, vocab=53, max_sequence=8)
EXPERTS = Experts(count=4, per_token=2)


@pytest.mark.parametrize(
    ("change", "experts", "says"),
    [
        ({}, {"score_function": "sigmoid"}, "no mixtral with experts.score_function = 'sigmoid'"),
        ({}, {"norm_topk_prob": False}, "no mixtral with experts.norm_topk_prob = False"),
        ({}, {"ffn_hidden": 8}, "no mixtral with experts.ffn_hidden = 8"),
        ({}, {"shared": 1}, "no mixtral with experts.shared = 1"),
        ({}, {"first_dense": 1}, "no mixtral with experts.first_dense = 1"),
        ({"qkv_bias": True}, {}, "no mixtral with qkv_bias = True"),
        ({"qk_norm": True}, {"scaling_factor": 2.5}, "no qwen3_moe with experts.scaling_factor = 2.5"),
        ({"qk_norm": True}, {"groups": 2, "groups_per_token": 1}, "no qwen3_moe with experts.groups = 2"),
        ({"qk_norm": True, "window": 4}, {}, "no qwen3_moe with window = 4"),
        ({"qk_norm": True, "qkv_bias": True}, None, "no qwen3 with qkv_bias = True"),
        ({"window": 4, "full_first": 1}, None, "no mistral with full_first = 1"),
    ],
)
def test_models_that_transformers_has_not(change: dict[str, Any], experts: dict[str, Any] | None, says: str) -> None:
    model = replace(SPEC, **change, experts=None if experts is None else replace(EXPERTS, **experts))
    with pytest.raises(CheckpointError, match=says):
        huggingface_config(model, "float32")


def test_a_job_trains_weights_with_losses_of_its_own(tmp_path: Path) -> None:
    make(tmp_path, {"model_type": "mixtral", **BASE, **MIXTRAL})
    spec = ModelSpec.from_huggingface(tmp_path)
    assert spec.experts
    check_weights(tmp_path, replace(spec, experts=replace(spec.experts, balance_loss=0.1, z_loss=0.1, capacity=1.0)))
    for experts, says in ((replace(spec.experts, per_token=1), "per_token is 2 there"), (None, "count is 4 there")):
        with pytest.raises(CheckpointError, match=f"describes another model: experts.{says}"):
            check_weights(tmp_path, replace(spec, experts=experts))


def test_the_names_of_experts_in_files(tmp_path: Path) -> None:
    """Mixtral's own, and those of other types in their place."""
    make(tmp_path, {"model_type": "mixtral", **BASE, **MIXTRAL})
    spec, file = ModelSpec.from_huggingface(tmp_path), tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "model.layers.2.block_sparse_moe.experts.3.w2.weight" in tensors
    save_file({usual_name(name): value for name, value in tensors.items()}, file)
    check_weights(tmp_path, spec)
    save_file(tensors | {"model.layers.2.mlp.gate.weight": torch.zeros(4, 16)}, file)
    with pytest.raises(CheckpointError, match=r"'model\.layers\.2\.mlp\.gate\.weight' occurs twice"):
        check_weights(tmp_path, spec)
