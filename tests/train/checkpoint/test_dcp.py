"""Folders of torch.distributed.checkpoint in Hugging Face's names, as torch's own writer makes
them; pickles are values, and never run."""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from plait.core.base.codec.pickles import Named, PickledObject, read
from plait.core.base.errors import CheckpointError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.reshard.layouts import Box
from plait.train.checkpoint.dcp import METADATA, read_box, tensors_in
from plait.train.checkpoint.initial import check_initial, load_initial
from plait.train.model.transformer import ModelCut, Transformer
from tests.train.checkpoint.weights import EMBEDDING, GPT, HEAD, LLAMA, TIED, Q, numbers


def saved(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=folder, no_dist=True)
    return folder


def state_of(spec: ModelSpec) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in numbers(spec).items()}


def cut(spec: ModelSpec, rank: int) -> Transformer:
    """What one of four ranks holds, under tensor parallelism and sharding of parameters."""
    sharding = Sharding(params=2, grads=2, optim=2)
    return Transformer(
        spec, Strategy(tp=2), ModelCut(tp_rank=rank % 2, sharding=sharding, shard_rank=rank // 2), seed=0
    )


@pytest.mark.parametrize("spec", [LLAMA, TIED, GPT], ids=["llama", "tied", "gpt"])
@pytest.mark.parametrize("key", [None, "model"])
def test_weights_are_those_of_the_same_safetensors_folder(tmp_path: Path, spec: ModelSpec, key: str | None) -> None:
    from safetensors.torch import save_file

    state = state_of(spec)
    (tmp_path / "safetensors").mkdir()
    save_file(state, tmp_path / "safetensors" / "model.safetensors")
    if spec.tied_embeddings:
        state[HEAD] = state["transformer.wte.weight" if spec is GPT else EMBEDDING]
    whole = {key: state, "optimizer": {"exp_avg": state}, "step": 3} if key else state
    folder = saved(tmp_path / "dcp", whole)
    assert bool(check_initial(folder, spec)) == spec.tied_embeddings
    for rank in range(4):
        found, expected = cut(spec, rank), cut(spec, rank)
        load_initial(found, folder)
        load_initial(expected, tmp_path / "safetensors")
        assert all(torch.equal(found.units[unit].kept, store.kept) for unit, store in expected.units.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_parts_of_any_type(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.randn(7, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    folder = saved(tmp_path / "dcp", {"a": whole, "b": whole.t(), "c": whole[2:, 1:], "d": whole[0, 0], "e": whole[:0]})
    found = tensors_in(folder)
    assert torch.equal(read_box(found["a"], Box((2, 1), (6, 4))), whole[2:6, 1:4])
    assert torch.equal(read_box(found["c"], Box((1, 0), (3, 4))), whole[3:5, 1:])
    assert torch.equal(read_box(found["d"], Box((), ())), whole[0, 0])
    assert read_box(found["e"], Box((0, 0), (0, 5))).shape == (0, 5)


@pytest.mark.parametrize(
    ("change", "spec", "says"),
    [
        ({Q: None}, LLAMA, r"tensor 'layers.0.self_attn.q_proj.weight' is missing"),
        ({Q: torch.ones(3)}, LLAMA, r"q_proj.weight' has shape \[3\], expected \[8, 8\]"),
        ({"model.router.weight": torch.ones(2, 2)}, LLAMA, "'model.router.weight' has no place in this model"),
        ({EMBEDDING: None, "tok_embeddings.weight": torch.ones(2, 2)}, LLAMA, "last_save_in_hf"),
        ({HEAD: torch.zeros(11, 8)}, TIED, "'lm_head.weight' differs from 'model.embed_tokens.weight'"),
        ({Q: torch.full((8, 8), float("nan"))}, LLAMA, "NaN or infinite"),
    ],
)
def test_another_models_folder_is_refused_by_the_name_of_a_tensor(
    tmp_path: Path, change: dict[str, Tensor | None], spec: ModelSpec, says: str
) -> None:
    state = {name: value for name, value in (state_of(spec) | change).items() if value is not None}
    folder = saved(tmp_path / "dcp", state)
    act = (lambda: load_initial(cut(spec, 0), folder)) if "NaN" in says else (lambda: check_initial(folder, spec))
    with pytest.raises(CheckpointError, match=says):
        act()


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
    folder = saved(tmp_path / "dcp", {"a": torch.ones(2)})
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
                read_box(found["a"], Box((0, 0), (8, 8)))
        except CheckpointError:
            pass
    (whole / METADATA).write_bytes(metadata)
    (data,) = whole.glob("*.distcp")
    content, found = data.read_bytes(), tensors_in(whole)
    for cut in (0, 40, len(content) // 2, len(content) - 30):
        data.write_bytes(content[:cut])
        with pytest.raises(CheckpointError):
            read_box(found["a"], Box((0, 0), (8, 8)))
    shutil.rmtree(whole)
    with pytest.raises(CheckpointError):
        tensors_in(whole)


def test_keys_that_take_for_ever_to_hash_take_none() -> None:
    nested: Any = ()
    for _ in range(60):
        nested = (nested, nested)
    assert isinstance(read(pickle.dumps({Named("a", "b"): 1}, protocol=4)).items, list)
    assert read(pickle.dumps([nested], protocol=4))
