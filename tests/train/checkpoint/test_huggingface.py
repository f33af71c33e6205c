"""Hugging Face folders: transformers is the reference that is not ours, both ways."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from plait.core.base.errors import CheckpointError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import SegmentLists, sync_order
from plait.core.step.segments import Action, Kind, SegmentGraph, SegmentOp
from plait.train.checkpoint import huggingface
from plait.train.checkpoint.weight_files import stored_piece
from plait.train.comm.wire import NullWire, Wire, open_wire
from plait.train.engine.executor import RankContext, RunningPhase, SegmentExecutor
from plait.train.engine.gradients import Gradients
from plait.train.engine.inflight import MicroBatch
from plait.train.engine.vocabulary import Head
from plait.train.machine.device import RankDevice
from plait.train.model.transformer import ModelCut, Transformer
from tests.support.threads import threads

GPT = {
    "vocab_size": 53,
    "n_positions": 16,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA = {
    "vocab_size": 53,
    "max_position_embeddings": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt2", GPT),
    "gpt untied": ("gpt2", {**GPT, "tie_word_embeddings": False, "n_inner": 40}),
    "llama": ("llama", LLAMA),
    "llama tied": (
        "llama",
        {**LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 6, "rms_norm_eps": 1e-5},
    ),
    "qwen3": ("qwen3", {**LLAMA, "head_dim": 6, "tie_word_embeddings": True}),
    "mistral": ("mistral", {**LLAMA, "sliding_window": 5}),
    "qwen3 with a window": (
        "qwen3",
        {**LLAMA, "head_dim": 6, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "llama scaled": ("llama", {**LLAMA, "rope_parameters": LLAMA3, "num_key_value_heads": 4}),
}
TOKENS = torch.randint(0, 53, (2, 12), generator=torch.Generator().manual_seed(1))


PAIR = threads(2)


@pytest.fixture(scope="module", params=list(CASES))
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of transformers with no trivial weight, and the folder it was saved to."""
    kind, config = CASES[request.param]
    return make(kind, config, tmp_path_factory.mktemp("theirs"))


def make(kind: str, config: dict[str, Any], folder: Path) -> tuple[Any, Path]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder)
    return model, folder


def run(model: Transformer, wire: Wire, tokens: Tensor) -> tuple[Tensor, float, Gradients]:
    """This rank's logits, the mean next-token loss and the gradients."""
    gradients = Gradients(model)
    graph = SegmentGraph(num_layers=model.spec.num_layers, communicates=wire.size > 1)
    executor = SegmentExecutor(
        model,
        SegmentLists(graph, {"step": sync_order(graph)}),
        wire,
        model.strategy,
        RankContext(RankDevice(torch.device("cpu"))),
        gradients=gradients,
    )
    targets = torch.cat((tokens[:, 1:], torch.full((len(tokens), 1), -100)), dim=1)
    model.eval()
    scale = 1 / int((targets != -100).sum())
    state = executor.begin(MicroBatch(tokens, targets, torch.arange(len(tokens)), scale, 0))
    head, turn, logits = state.segments["head", 0, 0], RunningPhase(state.segments), torch.empty(0)
    assert isinstance(head, Head)
    with torch.no_grad():
        for action, step in executor.programmes["step"]:
            if action == Action("run", SegmentOp("head", 0, Kind.COLUMN_FORWARD, 0)):  # the loss consumes the logits
                logits = (head.full @ model.head.weight.t()).transpose(0, 1)  # [B, S, V / tp]
            step(turn)
    return logits, executor.loss(state).item(), gradients


def load(folder: Path, tp: int = 1, rank: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(
        ModelSpec.from_huggingface(folder), Strategy(tp=tp), ModelCut(tp_rank=rank), dtype=dtype, seed=9
    )
    huggingface.load(model, folder)
    return model


def load_and_run(rank: int, folder: Path) -> tuple[Tensor, float]:
    return run(load(folder, 2, rank), open_wire("gloo"), TOKENS)[:2]


def try_to_load(rank: int, folder: Path) -> str:
    try:
        load(folder, 2, rank)
    except CheckpointError as error:
        return str(error)
    return ""


def bits(model: Transformer) -> dict[str, bytes]:
    return {name: parameter.detach().view(torch.uint8).numpy().tobytes() for name, parameter in model.named.items()}


# ---- equal numbers ----


def test_logits_loss_and_gradients(theirs: tuple[Any, Path]) -> None:
    reference, folder = theirs
    reference.zero_grad()
    expected = reference(TOKENS, labels=TOKENS)
    expected.loss.backward()
    model = load(folder)
    logits, loss, gradients = run(model, NullWire(), TOKENS)
    torch.testing.assert_close(logits, expected.logits, atol=1e-5, rtol=1e-5)
    assert loss == pytest.approx(expected.loss.item(), rel=1e-5)
    prefix = {"gpt": "transformer.", "llama": "model."}[model.spec.family]
    named = {name.removeprefix(prefix): parameter.grad for name, parameter in reference.named_parameters()}
    for piece in model.pieces:
        at = stored_piece(model.spec, piece)
        gradient = named[at.name][at.ranges(piece)]
        gradient = gradient.t() if at.transposed else gradient
        found = piece.view(gradients.named[piece.parameter])
        torch.testing.assert_close(found, gradient, atol=1e-5, rtol=1e-4, msg=lambda m, p=piece: f"{p.name}: {m}")


def test_two_ranks_agree(theirs: tuple[Any, Path]) -> None:
    reference, folder = theirs
    with torch.no_grad():
        expected = reference(TOKENS, labels=TOKENS)
    shares, losses = zip(*PAIR.run(load_and_run, folder), strict=True)
    torch.testing.assert_close(torch.cat(shares, dim=2)[..., :53], expected.logits, atol=1e-5, rtol=1e-5)
    assert losses == pytest.approx([expected.loss.item()] * 2, rel=1e-5)


@pytest.mark.parametrize("shard_bytes", [huggingface.SHARD_BYTES, 5000], ids=["one file", "sharded"])
def test_an_export_is_the_same_model(theirs: tuple[Any, Path], tmp_path: Path, shard_bytes: int) -> None:
    reference, folder = theirs
    huggingface.save(load(folder), tmp_path, shard_bytes=shard_bytes, extra={"eos_token_id": 52})
    assert (tmp_path / "model.safetensors").exists() == (shard_bytes > 5000)
    assert not list(tmp_path.glob("*.partial"))
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert ours.dtype == torch.float32 and ours.config.eos_token_id == 52
    with torch.no_grad():
        assert torch.equal(ours.eval()(TOKENS).logits, reference(TOKENS).logits)
    assert ModelSpec.from_huggingface(tmp_path) == ModelSpec.from_huggingface(folder)
    assert bits(load(tmp_path)) == bits(load(folder)), "import of export"


def test_bfloat16_keeps_its_bits(tmp_path: Path) -> None:
    _, folder = make("llama", LLAMA, tmp_path / "theirs")
    model = load(folder, dtype=torch.bfloat16)
    huggingface.save(model, tmp_path / "export")
    assert bits(load(tmp_path / "export", dtype=torch.bfloat16)) == bits(model)


@pytest.mark.parametrize("case", ["gpt", "llama"])
def test_base_models_and_their_own_shards(tmp_path: Path, case: str) -> None:
    kind, config = CASES[case]
    model, folder = make(kind, {**config, "tie_word_embeddings": True}, tmp_path / "whole")
    base = model.transformer if case == "gpt" else model.model  # saved without the prefix, and without a head
    base.save_pretrained(tmp_path / "base", max_shard_size="4KB")
    assert len(list((tmp_path / "base").glob("model-*.safetensors"))) > 1
    assert bits(load(tmp_path / "base")) == bits(load(folder))


# ---- what goes wrong ----


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    "value, stored, dtype, says",
    [
        (float("nan"), torch.float32, torch.float32, "infinite. Training"),
        (float("-inf"), torch.bfloat16, torch.float32, r"infinite, as BF16 or once converted to F32\."),
        (1e300, torch.float64, torch.float32, r"infinite, as F64 or once converted to F32\."),
    ],
    ids=["nan", "infinite", "too large"],
)
@pytest.mark.parametrize("name", [UP, NORM])
def test_numbers_that_are_not_finite(
    tmp_path: Path, name: str, value: float, stored: torch.dtype, dtype: torch.dtype, says: str
) -> None:
    make("llama", LLAMA, tmp_path)

    def spoil(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(stored)
        tensors[name].view(-1)[-1] = value

    rewrite(tmp_path, spoil)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{name}' has numbers .* NaN or {says}"):
        load(tmp_path, dtype=dtype)


def test_numbers_that_are_not_finite_on_another_rank(tmp_path: Path) -> None:
    make("llama", LLAMA, tmp_path)
    rewrite(tmp_path, lambda tensors: tensors[UP].__setitem__((-1, -1), float("nan")))
    told = PAIR.run(try_to_load, tmp_path)
    assert told[0] == ""
    assert UP in told[1]


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    _, folder = make("llama", LLAMA, tmp_path)
    before = (folder / "model.safetensors").read_bytes(), (folder / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match="holds a model already"):
        huggingface.save(load(folder), folder)
    assert ((folder / "model.safetensors").read_bytes(), (folder / "config.json").read_bytes()) == before
    assert not list(folder.glob("*.partial"))


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = make("llama", LLAMA, tmp_path / "theirs")
    written: list[int] = []

    def sync(descriptor: int) -> None:
        written.append(descriptor)
        if len(written) > 1:  # the weights
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", sync)
    with pytest.raises(CheckpointError, match=r"export: cannot be written: .*No space left on device"):
        huggingface.save(load(folder), tmp_path / "export")
    assert list((tmp_path / "export").iterdir()) == []


def test_a_model_hugging_face_has_not(tmp_path: Path) -> None:
    spec = ModelSpec(family="gpt", num_layers=1, hidden=16, num_heads=2, head_size=6, vocab=5, max_sequence=4)
    with pytest.raises(CheckpointError, match="no GPT-2 of 2 heads of size 6 with hidden = 16"):
        huggingface.save(Transformer(spec, Strategy()), tmp_path)
