"""Folders of torch.distributed.checkpoint in torchtitan's names, in and out, against torch's own reader and
writer; pickles are values, and never run."""

from __future__ import annotations

import pickle
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from plait.core.base.errors import CheckpointError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.reshard.layouts import Box
from plait.train.checkpoint import torchtitan
from plait.train.checkpoint.dcp import METADATA, read_box, tensors_in
from plait.train.checkpoint.initial import check_initial, kind_of
from plait.train.checkpoint.symbolic_pickle import Named, PickledObject, read
from plait.train.checkpoint.torchtitan_names import names_of
from plait.train.model.transformer import ModelCut, Transformer
from tests.support.models import llama

LLAMA = llama()
TIED = replace(LLAMA, tied_embeddings=True)


def model(spec: ModelSpec = LLAMA, seed: int = 0, **cut: Any) -> Transformer:
    tp = cut.pop("tp", 1)
    return Transformer(spec, Strategy(tp=tp), ModelCut(**cut), seed=seed)


def state_of(whole: Transformer) -> dict[str, Tensor]:
    """As torchtitan has it, made here by index arithmetic alone."""
    found: dict[str, Tensor] = {}
    head = whole.spec.head_size
    for piece in whole.pieces:
        value = piece.view(whole.named[piece.parameter].detach()).clone()
        if piece.name.endswith(("q.weight", "k.weight")):
            rows = [row // head * head + row % head // 2 + row % 2 * (head // 2) for row in range(len(value))]
            value = value[rows]
        found[names_of(piece.name)[0]] = value
    if whole.spec.tied_embeddings:
        found["lm_head.weight"] = found["tok_embeddings.weight"]
    return found


def saved(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("spec", [LLAMA, TIED], ids=["untied", "tied"])
def test_what_torch_saves_is_read(tmp_path: Path, spec: ModelSpec) -> None:
    there = model(spec, seed=5)
    folder = saved(tmp_path / "dcp", state_of(there) | {"optimizer.state.x.step": torch.ones(()), "train_state": 3})
    assert kind_of(folder) == "torchtitan" and not check_initial(folder, spec)
    for rank in range(4):  # tensor parallelism and sharding of parameters
        here = model(spec, tp=2, tp_rank=rank % 2, sharding=Sharding(params=2, grads=2, optim=2), shard_rank=rank // 2)
        torchtitan.load(here, folder)
        same = model(spec, seed=5, tp=2, tp_rank=rank % 2, sharding=Sharding(params=2, grads=2, optim=2),
                     shard_rank=rank // 2)  # fmt: skip
        assert all(torch.equal(here.units[unit].kept, store.kept) for unit, store in same.units.items())


@pytest.mark.parametrize("spec", [LLAMA, TIED], ids=["untied", "tied"])
def test_what_is_written_torch_reads(tmp_path: Path, spec: ModelSpec) -> None:
    there = model(spec, seed=5)
    torchtitan.save(there, tmp_path / "out")
    expected = state_of(there)
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    again = model(spec)
    torchtitan.load(again, tmp_path / "out")
    assert all(torch.equal(again.named[name], value) for name, value in there.named.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_parts_of_any_type(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    folder = saved(tmp_path / "dcp", {"a": whole, "b": whole.t(), "c": whole[2:, 1:], "d": whole[0, 0], "e": whole[:0]})
    found = tensors_in(folder)
    assert torch.equal(read_box(folder, found["a"], Box((2, 1), (6, 4))), whole[2:6, 1:4])
    assert torch.equal(read_box(folder, found["c"], Box((1, 0), (3, 4))), whole[3:5, 1:])
    assert torch.equal(read_box(folder, found["d"], Box((), ())), whole[0, 0])
    assert read_box(folder, found["e"], Box((0, 0), (0, 5))).shape == (0, 5)


def test_another_models_folder_is_refused_by_the_name_of_a_tensor(tmp_path: Path) -> None:
    state = state_of(model())
    cases: list[tuple[dict[str, Any], ModelSpec, str]] = [
        ({name: t for name, t in state.items() if name != "norm.weight"}, LLAMA, "holds no 'norm.weight'"),
        (state | {"layers.0.moe.router.weight": torch.ones(2, 2)}, LLAMA, "'layers.0.moe.router.weight' is no weight"),
        (state | {"norm.weight": torch.ones(3)}, LLAMA, r"'norm.weight' is \[3\], and the job's model has"),
        (state, replace(LLAMA, qk_norm=True), "with query and key norms"),
    ]
    for number, (content, spec, says) in enumerate(cases):
        folder = saved(tmp_path / str(number), content)
        with pytest.raises(CheckpointError, match=says):
            check_initial(folder, spec)
    folder = saved(tmp_path / "tied", state_of(model(TIED)) | {"lm_head.weight": torch.zeros(TIED.vocab, TIED.hidden)})
    with pytest.raises(CheckpointError, match=r"differs from 'tok_embeddings\.weight'"):
        torchtitan.load(model(TIED), folder)
    folder = saved(tmp_path / "nan", state | {"norm.weight": torch.full_like(state["norm.weight"], float("nan"))})
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        torchtitan.load(model(), folder)


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_nothing_of_a_pickle_runs(tmp_path: Path) -> None:
    target = tmp_path / "ran"
    made = read(pickle.dumps({"a": Evil(target)})).named()["a"]
    assert isinstance(made, PickledObject) and made.args and not target.exists()
    folder = saved(tmp_path / "dcp", state_of(model()))
    (folder / METADATA).write_bytes(pickle.dumps(Evil(target)))
    with pytest.raises(CheckpointError, match="cannot be read as a checkpoint of torch"):
        tensors_in(folder)
    assert not target.exists()


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    whole = saved(tmp_path / "dcp", {"a": torch.arange(64.0).view(8, 8)})
    metadata = (whole / METADATA).read_bytes()
    for at in range(0, len(metadata), 7):
        (whole / METADATA).write_bytes(metadata[:at])
        with pytest.raises(CheckpointError):
            tensors_in(whole)
        flipped = bytearray(metadata)
        flipped[at] ^= 0x15
        (whole / METADATA).write_bytes(flipped)
        try:
            found = tensors_in(whole)
            if "a" in found and found["a"].shape == (8, 8):
                read_box(whole, found["a"], Box((0, 0), (8, 8)))
        except CheckpointError:
            pass
    (whole / METADATA).write_bytes(metadata)
    (data,) = whole.glob("*.distcp")
    content, found = data.read_bytes(), tensors_in(whole)
    for cut in (0, 40, len(content) // 2, len(content) - 30):
        data.write_bytes(content[:cut])
        with pytest.raises(CheckpointError):
            read_box(whole, found["a"], Box((0, 0), (8, 8)))
    shutil.rmtree(whole)
    with pytest.raises(CheckpointError):
        tensors_in(whole)


def test_keys_that_take_for_ever_to_hash_take_none() -> None:
    nested: Any = ()
    for _ in range(60):
        nested = (nested, nested)
    assert isinstance(read(pickle.dumps({Named("a", "b"): 1}, protocol=4)).items, list)
    assert read(pickle.dumps([nested], protocol=4))
