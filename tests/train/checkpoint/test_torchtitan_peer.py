"""Checkpoints between Plait and torchtitan's own code: what its manager writes is loaded, what Plait writes
its manager loads, and both models compute the same. Its packages are installed first, a gigabyte:
``-m contract``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.train.checkpoint import torchtitan
from plait.train.checkpoint.initial import check_initial
from plait.train.model.transformer import ModelCut, Transformer
from tests.support.frameworks import answer, installed
from tests.support.models import llama
from tests.support.reference import Reference

pytestmark = [pytest.mark.contract, pytest.mark.system]

PROGRAM = """
import json, os, sys
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # attention is compiled there; a compiler takes minutes
import torch
import torch.distributed as dist
from torchtitan.components.checkpointer.dcp import CheckpointManager
from torchtitan.models import llama3
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm

asked = json.load(sys.stdin)
dist.init_process_group("gloo", store=dist.FileStore(asked["folder"] + "/store", 1), rank=0, world_size=1)
torch.set_default_dtype(torch.float64)
dim, vocab, heads = asked["hidden"], asked["vocab"], asked["heads"]

class Absent:
    state_dict, load_state_dict = (lambda self: {}), (lambda self, state: None)

def model():
    built = llama3.Llama3Model.Config(
        dim=dim, vocab_size=vocab, enable_weight_tying=asked["tied"],
        tok_embeddings=Embedding.Config(
            num_embeddings=vocab, embedding_dim=dim,
            param_init=llama3._EMBEDDING_SKIP_INIT if asked["tied"] else llama3._EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=llama3._output_linear_init(dim)),
        layers=llama3._build_llama3_layers(
            n_layers=asked["layers"], dim=dim, n_heads=heads, n_kv_heads=asked["kv_heads"],
            hidden_dim=asked["ffn"], fuse_qkv=asked["fused"], attn_backend="flex",
            rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=64, theta=asked["theta"], scaling="none")),
    ).build()
    built.init_states()
    for parameter in built.parameters():  # norms, too, are no ones
        moved = parameter + 0.05 * torch.randn_like(parameter)
        parameter.data = moved.to(torch.float32).to(torch.float64)  # what is saved last is fp32
    return built

def manager(model, name, start=""):
    config = CheckpointManager.Config(
        enable=True, folder=name, initial_load_path=start or None, export_dtype="float32", keep_latest_k=0)
    return CheckpointManager(
        config, dataloader=Absent(), model_parts=[model], optimizers=Absent(), lr_schedulers=Absent(),
        states={"train_state": Absent()}, sd_adapter=None, base_folder=asked["folder"])

def logits(model):
    tokens = torch.tensor(asked["tokens"])
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    with torch.no_grad():
        return model(tokens, positions, model.get_attention_masks(positions)).tolist()

torch.manual_seed(asked["seed"])
here = model()
if start := asked.get("start"):
    assert manager(here, "none", start).load()
else:
    manager(here, "titan").save(1, last_step=True)
print(json.dumps({"logits": logits(here), "eps": RMSNorm.Config(normalized_shape=dim).eps}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed("torchtitan", tmp_path_factory.mktemp("frameworks"))


NEAR = 1e-7
"""Weights are exact; torchtitan turns queries and keys in fp32."""
TOKENS = torch.randint(0, 37, (2, 8), generator=torch.Generator().manual_seed(3))


def asked(spec: ModelSpec, folder: Path, *, fused: bool, start: str = "") -> dict[str, object]:
    folder.mkdir()
    return {
        "folder": str(folder), "hidden": spec.hidden, "vocab": spec.vocab, "heads": spec.num_heads,
        "layers": spec.num_layers, "kv_heads": spec.num_kv_heads, "ffn": spec.ffn_hidden, "theta": spec.rope_theta,
        "tied": spec.tied_embeddings, "fused": fused, "tokens": TOKENS.tolist(), "seed": 5, "start": start,
    }  # fmt: skip


def ours(model: Transformer, eps: float | None) -> torch.Tensor:
    """What these weights compute. eps: torchtitan's of norms; None is that of the numbers."""
    spec = replace(model.spec, norm_eps=torch.finfo(torch.float64).eps if eps is None else eps)
    reference = Reference(spec)
    for piece in model.pieces:
        value = piece.view(model.named[piece.parameter].detach())
        reference.weights[piece.name] = value.to(torch.float64)
    return reference.logits(TOKENS)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_torchtitan_and_plait_compute_the_same_of_each_others_checkpoints(
    site: Path, tmp_path: Path, tied: bool, fused: bool
) -> None:
    spec = llama(tied_embeddings=tied, num_layers=3)
    theirs = answer(site, PROGRAM, asked(spec, tmp_path / "there", fused=fused))
    (folder,) = (tmp_path / "there" / "titan").iterdir()
    assert not check_initial(folder, spec)
    model = Transformer(spec, Strategy(), ModelCut(), seed=1)
    torchtitan.load(model, folder)
    expected = torch.tensor(theirs["logits"], dtype=torch.float64)
    assert (ours(model, theirs["eps"]) - expected).abs().max() < NEAR

    other = Transformer(spec, Strategy(), ModelCut(), seed=2)
    torchtitan.save(other, tmp_path / "ours")
    back = answer(site, PROGRAM, asked(spec, tmp_path / "back", fused=fused, start=str(tmp_path / "ours")))
    found = torch.tensor(back["logits"], dtype=torch.float64)
    assert (ours(other, back["eps"]) - found).abs().max() < NEAR
