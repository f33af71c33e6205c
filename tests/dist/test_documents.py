"""Documents that share a sequence, and losses with weights, are what documents trained apart are: by the
plain reference, and by transformers' own models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import SequenceCut
from plait.core.parallel.sharding import Sharding
from tests.dist import pipelining
from tests.dist.equality import batch_of, details_of
from tests.dist.test_pipeline import GPT, LLAMA, TOLERANCE
from tests.support.models import mistral, qwen3
from tests.support.peers import Peer
from tests.support.ranks import Ranks
from tests.support.reference import Reference, mean_loss

Pool = Callable[[int], Ranks]

SMALL_GPT = replace(GPT, num_layers=2)
SMALL_LLAMA = replace(LLAMA, num_layers=2)
NO_CORE_DROPOUT = replace(SMALL_GPT, attention_dropout=0.0)
MODELS = {"gpt": SMALL_GPT, "llama": SMALL_LLAMA, "qwen3": qwen3(window=2, full_first=1), "mistral": mistral()}
ONE = SequenceCut()


def assert_equal(
    pool: Pool, spec: ModelSpec, degrees: Sequence[tuple[int, int]], cut: SequenceCut = ONE,
    shardings: Sequence[Sharding] = (), p1: int = 1, sequence_parallel: bool = False, **more: Any,
) -> None:  # fmt: skip
    """One strategy, with documents and weights that ``details_of`` draws."""
    spec = replace(spec, attention_dropout=0.0) if cut.ring > 1 else spec
    size = cut.cp * sum(dp * tp for dp, tp in degrees)
    args = (spec, degrees, "1f1b", p1, sequence_parallel, None, (), shardings, cut, more, True)
    for error, what in pool(size).run(pipelining.worst_error, *args):
        assert error < TOLERANCE, f"{degrees}, {cut}: {what} is off by {error:.1e}"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cut", [SequenceCut(cp=2), SequenceCut(cp=2, ring=2), SequenceCut(cp=4, ring=2)], ids=str)
def test_every_kind_of_shared_sequence(pool: Pool, name: str, cut: SequenceCut) -> None:
    again = "selective" if name in ("gpt", "mistral") else "full"
    assert_equal(pool, MODELS[name], [(1, 1)], cut, p1=2, recompute=again)


@pytest.mark.parametrize("name", MODELS)
def test_every_axis(pool: Pool, name: str) -> None:
    spec = MODELS[name]
    assert_equal(pool, spec, [(1, 2)], p1=2, p2=2, recompute="full")
    assert_equal(pool, spec, [(1, 2)], sequence_parallel=True)
    assert_equal(pool, spec, [(1, 1), (1, 1)], p1=2)
    assert_equal(pool, spec, [(3, 1)], shardings=[Sharding(params=3, grads=3, optim=3)])


def test_everything_at_once(pool: Pool) -> None:
    cut, sharding = SequenceCut(cp=2, ring=2), Sharding(optim=2)
    assert_equal(pool, SMALL_LLAMA, [(1, 2)], cut, [sharding], p1=2, sequence_parallel=True, recompute="full")
    assert_equal(pool, NO_CORE_DROPOUT, [(1, 1), (1, 1)], cut, p1=2)


@pytest.mark.unit
@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_the_reference_with_masks_is_documents_apart(name: str) -> None:
    spec = replace(MODELS[name], dropout=0.0, attention_dropout=0.0)
    reference, (tokens, targets, _), details = Reference(spec), batch_of(spec, 0), details_of(0)
    reference.perturb()
    rows = []
    for row, starts in zip(tokens, details["starts"], strict=True):
        _, lengths = starts.unique_consecutive(return_counts=True)
        rows.append(torch.cat([reference.logits(each[None])[0] for each in row.split(lengths.tolist())]))
    apart = mean_loss(torch.stack(rows), targets, details["weights"])
    torch.testing.assert_close(reference.loss(tokens, targets, **details), apart, rtol=1e-12, atol=0)


@pytest.mark.unit
def test_the_reference_is_transformers() -> None:
    spec, (tokens, targets, _), details = replace(SMALL_LLAMA, dropout=0.0), batch_of(SMALL_LLAMA, 0), details_of(0)
    ours, theirs = (one.loss(tokens, targets, **details) for one in (Reference(spec), Peer(spec)))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=0)
