"""Ranges written under some degrees and read under any others, every rank of both worlds in this
process."""

from __future__ import annotations

import json
import zlib
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from plait.core.base.errors import CheckpointError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy
from plait.core.step.stages import split_layers
from plait.train.checkpoint.folder import Manifest, Stored, file_of
from plait.train.checkpoint.ranges import Range, assign_writers, describe_held, ranges_of, read_ranges, write_ranges
from plait.train.model.transformer import ModelCut, Transformer
from plait.train.model.units import ShardBox

LLAMA = ModelSpec(
    family="llama", num_layers=3, hidden=12, num_heads=6, num_kv_heads=2, ffn_hidden=30, vocab=37, max_sequence=8
)
GPT = ModelSpec(family="gpt", num_layers=2, hidden=12, num_heads=6, vocab=5, max_sequence=4)


class World(NamedTuple):
    """pp stages of tp ranks; ``replicas`` ranks hold each share, and its optimizer is cut over
    ``optim``."""

    pp: int
    tp: int
    replicas: int
    optim: int

    def held(self, spec: ModelSpec) -> list[dict[str, list[ShardBox]]]:
        """What every rank's optimizer holds."""
        stages = split_layers(spec.num_layers, self.pp)
        found: list[dict[str, list[ShardBox]]] = []
        for stage, tp_rank, rank in product(stages, range(self.tp), range(self.replicas)):
            model = Transformer(
                spec,
                Strategy(tp=self.tp),
                ModelCut(tp_rank=tp_rank, stage=stage, sharding=Sharding(optim=self.optim), shard_rank=rank),
            )
            found.append({f"{store.key}": store.held("optim") for store in model.units.values()})
        return found


def ranges(held: dict[str, list[ShardBox]], salt: int | None) -> list[Range]:
    """A rank's ranges: of the logical tensors' numbers, NaN without ``salt``."""
    locals_ = {
        name: torch.full((max(one.start + one.box.elements for one in ones),), float("nan"))
        for name, ones in held.items()
        if ones
    }
    found = ranges_of({"master": locals_}, held)
    for one in found if salt is not None else ():
        one.tensor.copy_(logical(one.key, one.shape, salt)[one.box.slices])
    return found


def logical(key: str, shape: tuple[int, ...], salt: int | None) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{key} {salt}".encode()))
    return torch.randn(shape, generator=generator)


def write(folder: Path, world: list[list[Range]]) -> dict[str, Stored]:
    """Every rank's share; the entries as a manifest gives them back."""
    folder.mkdir()
    plans = [assign_writers(json.loads(json.dumps([describe_held(one) for one in world]))) for _ in world]
    assert all(plan == plans[0] for plan in plans)
    names = [write_ranges(folder, rank, one, plans[0].tensors) for rank, one in enumerate(world)]
    files = {name: ((folder / name).stat().st_size, 0) for name in names if name}
    text = Manifest(1, 1, {}, files, plans[0].tensors).to_text()
    assert sum(size for size, _ in files.values()) + len(text) <= plans[0].needed
    return Manifest.from_text(text).tensors


def drawn(tp: list[int]) -> st.SearchStrategy[World]:
    cut = st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 6)])
    worlds = st.tuples(st.integers(1, 2), st.sampled_from(tp), cut)
    return worlds.map(lambda one: World(one[0], one[1], *one[2]))


@settings(max_examples=10)
@given(st.data())
@pytest.mark.parametrize("spec", [LLAMA, GPT], ids=["llama", "gpt"])
def test_any_degrees_to_any_others(
    tmp_path_factory: pytest.TempPathFactory, spec: ModelSpec, data: st.DataObject
) -> None:
    tp = [1, 2, 6] if spec is LLAMA else [1, 2, 3, 6]  # at 6 key/value heads are held three times
    source, target = data.draw(drawn(tp)), data.draw(drawn(tp))
    folder = tmp_path_factory.mktemp("ranges") / "step"
    world = [ranges(held, salt=1) for held in source.held(spec)]
    tensors = write(folder, world)
    elements = sum(torch.Size(stored.shape).numel() for stored in tensors.values())
    assert elements == spec.num_parameters, "each number once"
    assert sum(box.elements for stored in tensors.values() for _, box in stored.parts) == elements
    for held in target.held(spec):
        found = ranges(held, salt=None)
        read_ranges(folder, found, tensors)
        assert all(torch.equal(one.tensor, logical(one.key, one.shape, 1)[one.box.slices]) for one in found)


def test_only_files_that_hold_something_needed_are_opened(tmp_path: Path) -> None:
    world = World(2, 2, 1, 1).held(LLAMA)
    tensors = write(tmp_path / "step", [ranges(held, salt=1) for held in world])
    mine = ranges(world[0], salt=None)
    for rank in (2, 3):  # of the other stage
        (tmp_path / "step" / file_of(rank)).unlink()
    read_ranges(tmp_path / "step", mine, tensors)
    (tmp_path / "step" / file_of(1)).unlink()
    read_ranges(tmp_path / "step", [one for one in mine if "norm" not in one.key], tensors)


def test_replicas_share_the_writing(tmp_path: Path) -> None:
    world = [ranges(held, salt=1) for held in World(1, 1, 4, 1).held(LLAMA)]
    write(tmp_path / "step", world)
    sizes = [(tmp_path / "step" / file_of(rank)).stat().st_size for rank in range(4)]
    assert max(sizes) < 1.3 * min(sizes)


def test_ranges_that_leave_a_gap_are_a_bug() -> None:
    world = [describe_held(ranges(held, salt=1)) for held in World(1, 2, 1, 1).held(LLAMA)]
    with pytest.raises(AssertionError, match="leave gaps, or overlap"):
        assign_writers(world[:1])


def test_a_file_that_another_has_cut_short(tmp_path: Path) -> None:
    world = World(1, 1, 1, 1).held(GPT)
    tensors = write(tmp_path / "step", [ranges(held, salt=1) for held in world])
    file = tmp_path / "step" / file_of(0)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors: cannot be read as safetensors"):
        read_ranges(tmp_path / "step", ranges(world[0], salt=None), tensors)
