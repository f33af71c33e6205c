"""Parts of weights that ranks hold, and what these begin with."""

from __future__ import annotations

import pytest
import torch

from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.stages import split_layers
from plait.train.model.pieces import Piece, initialise, pieces
from tests.support.models import gpt, llama, utransformer

U = utransformer()


def whole(spec: ModelSpec, name: str) -> Piece:
    return next(piece for piece in pieces(spec, Strategy(), 0) if piece.name == name)


@pytest.mark.parametrize(
    ("seed", "name", "first"),
    [
        (0, "embedding.weight", (-0.008884, -0.006663, -0.004427)),
        (0, "positions.weight", (0.002402, 0.03566, 0.019069)),
        (0, "layers.0.attn.q.weight", (0.035719, 0.011129, 0.001685)),
        (0, "layers.0.attn.o.weight", (0.003406, 0.006764, 0.001919)),
        (0, "down.0.weight", (-0.027395, -0.018403, 0.00502)),
        (0, "up.1.weight", (0.013535, -0.023767, 0.02162)),
        (0, "layers.4.mlp.down.weight", (-0.001191, -0.014831, -0.004169)),
        (7, "layers.0.attn.q.weight", (-0.01106, -0.029742, -0.019993)),
        (7, "layers.4.mlp.down.weight", (0.003892, -1.6e-05, -0.003301)),
    ],
)
def test_equal_seeds_begin_with_equal_weights_in_every_version(
    seed: int, name: str, first: tuple[float, float, float]
) -> None:
    """A run that is done again elsewhere, or later, is the same run."""
    value = initialise(U, whole(U, name), seed)
    assert value.dtype == torch.float32 and value.shape == whole(U, name).shape
    assert value.flatten()[:3].tolist() == pytest.approx(first, abs=2e-6)


def test_norms_begin_as_ones_and_biases_as_zeros() -> None:
    for piece in pieces(U, Strategy(), 0):
        value = initialise(U, piece, 3)
        if piece.name.endswith("bias"):
            assert not value.any(), piece.name
        elif piece.name.endswith("norm.weight"):
            assert (value == 1).all(), piece.name
        else:
            small = piece.name.endswith((".o.weight", ".mlp.down.weight"))  # 2 x 5 projections add up there
            assert float(value.std()) == pytest.approx(0.02 / (10**0.5 if small else 1), rel=0.2)


@pytest.mark.parametrize("spec", [gpt(), gpt(parallel_block=True), llama(), U], ids=["gpt", "block", "llama", "u"])
@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_hold_all_of_every_tensor_each_as_often_as_is_said(spec: ModelSpec, tp: int) -> None:
    held = [pieces(spec, Strategy(tp=tp), rank) for rank in range(tp)]
    for parts in zip(*held, strict=True):
        value = initialise(spec, whole(spec, parts[0].name), 5)
        places = [(part.start, part.stop) for part in parts]
        for part in parts:
            own = initialise(spec, part, 5)
            assert torch.equal(own, part.cut(value)) and own.shape == part.local_shape
            assert places.count((part.start, part.stop)) == part.replicas, part.name
        dim = parts[0].dim
        if dim is None:
            assert all(part.replicas == tp for part in parts)
        else:
            assert set().union(*(range(*place) for place in places)) == set(range(parts[0].shape[dim]))


@pytest.mark.parametrize("tp", [1, 2])
def test_pieces_of_a_parameter_follow_one_another(tp: int) -> None:
    for spec in (gpt(), llama()):
        rows: dict[str, int] = {}
        for piece in pieces(spec, Strategy(tp=tp), tp - 1):
            assert piece.offset == rows.get(piece.parameter, 0), piece.name
            rows[piece.parameter] = piece.offset + piece.local_shape[0]
        parameter = torch.arange(float(rows["layers.0.attn.column.weight"] * 16)).view(-1, 16)
        found = [
            piece.view(parameter) for piece in pieces(spec, Strategy(tp=tp), 0)
            if piece.parameter == "layers.0.attn.column.weight"
        ]  # fmt: skip
        assert torch.equal(torch.cat(found), parameter)


def test_a_rank_that_has_only_rows_beyond_the_vocabulary_holds_none_of_it() -> None:
    spec = gpt(vocab=3)
    held = [pieces(spec, Strategy(tp=4), rank)[0] for rank in range(4)]
    rows = Strategy(tp=4).padded_vocab(spec) // 4
    assert [(piece.start, piece.stop) for piece in held] == [
        (min(rank * rows, 3), min((rank + 1) * rows, 3)) for rank in range(4)
    ]


@pytest.mark.parametrize(("spec", "tied"), [(gpt(num_layers=3), True), (llama(num_layers=3), False)])
def test_stages_hold_the_model_and_the_last_a_copy_of_what_is_tied(spec: ModelSpec, tied: bool) -> None:
    stages = [pieces(spec, Strategy(), 0, stage) for stage in split_layers(3, 3)]
    own = [piece.name for stage in stages for piece in stage if not piece.copy]
    assert sorted(own) == sorted(piece.name for piece in pieces(spec, Strategy(), 0)) and len(own) == len(set(own))
    copies = [(number, piece) for number, stage in enumerate(stages) for piece in stage if piece.copy]
    assert [(number, piece.name, piece.parameter) for number, piece in copies] == (
        [(2, "embedding.weight", "head.weight")] if tied else []
    )


def test_a_parallel_block_has_one_norm_and_one_bias_of_what_both_add() -> None:
    """Attention and the feed-forward network read one norm, and their sum needs no two biases."""
    own, plain = ({piece.name for piece in pieces(gpt(parallel_block=block), Strategy(), 0)} for block in (True, False))
    assert own < plain
    assert plain - own == {
        f"layers.{layer}.{name}" for layer in range(2) for name in ("attn.o.bias", "mlp.norm.weight", "mlp.norm.bias")
    }
