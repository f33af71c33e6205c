"""What a loop of one's own may hand to the engine, and what is refused by its name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from plait.core.base.errors import JobError
from plait.train.own_loop import Engine
from plait.train.own_values import check_own, checked_batch, checked_number

TOKENS = torch.arange(10).reshape(2, 5)
NAN = torch.tensor([[float("nan"), 1, 1, 1]] * 2)


def given(tokens: Any = TOKENS, labels: Any = None, weights: Any = None, starts: Any = None) -> Any:
    return checked_batch(tokens, labels, weights, starts, sequence=4, vocab=10)


def test_tokens_alone_are_their_own_labels() -> None:
    found = given(TOKENS.int())
    assert torch.equal(found.tokens, TOKENS[:, :-1]) and torch.equal(found.labels, TOKENS[:, 1:])
    assert found.tokens.dtype == torch.int64 and found.weights is None
    beside = given(TOKENS[:, :-1], torch.full((2, 4), -100), torch.ones(2, 4, dtype=torch.long))
    assert beside.weights is not None and beside.weights.sum() == 8


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tokens": TOKENS.tolist()}, "tokens", "tokens are a list, no tensor"),
    ({"tokens": {"input_ids": TOKENS}}, "tokens", "tokens are a dict.*separately"),
    ({"tokens": (TOKENS, TOKENS)}, "tokens", "tokens are a tuple.*separately"),
    ({"tokens": TOKENS.numpy()}, "tokens", "tokens are a ndarray"),
    ({"tokens": None}, "tokens", "tokens are a NoneType"),
    ({"tokens": TOKENS.double()}, "tokens", "are torch.float64, and ids are whole numbers"),
    ({"tokens": TOKENS > 3}, "tokens", "are torch.bool"),
    ({"tokens": TOKENS[0]}, "tokens", r"have shape \(5,\)"),
    ({"tokens": TOKENS[:0]}, "data.sequence_length", r"\(0, 5\)"),
    ({"tokens": TOKENS[:, :4]}, "data.sequence_length", r"\(2, 4\), and not \[B, 5\], without labels"),
    ({"tokens": TOKENS, "labels": TOKENS}, "data.sequence_length", r"not \[B, 4\], beside labels"),
    ({"tokens": TOKENS[:, 1:], "labels": TOKENS}, "data.sequence_length", r"labels have shape \(2, 5\)"),
    ({"weights": torch.ones(4)}, "weights", r"have shape \(4,\)"),
    ({"weights": torch.ones(1, 4)}, "data.sequence_length", r"weights have shape \(1, 4\)"),
    ({"weights": NAN}, "weights", "not all finite"),
    ({"tokens": TOKENS + 1}, "model.vocab", "tokens from 1 to 10 are not all of the model's 10"),
    ({"tokens": TOKENS - 1}, "model.vocab", "tokens from -1"),
    ({"tokens": TOKENS[:, 1:], "labels": TOKENS[:, 1:] - 4}, "model.vocab", "labels from -3 to 5.* and -100"),
    ({"starts": torch.ones(2, 4).long()}, "starts", "document's first"),
    ({"starts": torch.zeros(2, 4)}, "starts", "are torch.float32"),
]


@pytest.mark.parametrize(("values", "key", "said"), REFUSED)
def test_other_tensors_are_refused_by_name(values: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(JobError, match=said) as refused:
        given(**values)
    assert refused.value.key == key and refused.value.fix


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "1e-3", None, True, [1.0]])
def test_numbers_that_are_none(value: Any) -> None:
    with pytest.raises(JobError, match="is not allowed") as refused:
        checked_number("learning_rate", value, zero=True)
    assert refused.value.key == "learning_rate"


def test_numbers_of_other_libraries_are_numbers() -> None:
    assert checked_number("divisor", np.float32(0.5), zero=False) == checked_number(
        "divisor", torch.tensor(0.5), zero=False
    )
    assert checked_number("learning_rate", 0, zero=True) == 0.0
    with pytest.raises(JobError, match="above 0"):
        checked_number("divisor", 0.0, zero=False)


@pytest.mark.parametrize(
    ("own", "said"),
    [({"a": torch.ones(2)}, "'a' cannot be saved"), ({"b": object()}, "'b' cannot"), ("x", "a str is no dict")],
)
def test_what_cannot_be_saved_is_refused_before_it_is_written(own: Any, said: str) -> None:
    with pytest.raises(JobError, match=said):
        check_own(own)


def test_plain_values_can_be_saved() -> None:
    check_own(None)
    check_own({"seen": [1, 2.5, None], "best": {"loss": 0.1}, "name": "x"})


class Epochs:
    """A loader that says where it is: at the end of an epoch of three batches, nothing is left of
    it."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def __iter__(self) -> Any:
        while self.at < 3:
            self.at += 1
            yield self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}


def taken(loader: Any, done: int = 0, steps: int = 8) -> list[Any]:
    """What a loop of so many steps gets of a loader, a batch a step."""
    engine: Any = SimpleNamespace(
        done=done,
        stopping=False,
        run=SimpleNamespace(settings=SimpleNamespace(train=SimpleNamespace(steps=steps))),
        _passed_over=0,
    )
    found = list[Any]()
    for batch in Engine.batches(engine, loader):
        found.append(batch)
        engine.done += 1
    return found


def test_a_loader_that_was_saved_at_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    assert taken(Epochs()) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert taken(Epochs(3), done=3) == [1, 2, 3, 1, 2]
    assert taken([1, 2, 3], done=4) == [2, 3, 1, 2]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("done", [0, 2, 5])
def test_a_loader_that_gives_no_more_is_refused_and_not_asked_for_ever(done: int) -> None:
    """Also while batches of earlier steps are passed over."""
    for loader in ([], iter([1, 2, 3]), Stubborn()):
        with pytest.raises(JobError, match=r"loader: gives nothing, and [0-5] of 8 steps are done"):
            taken(loader, done)


class Stubborn(Epochs):
    """Says where it is, and gives nothing."""

    def __iter__(self) -> Any:
        return iter(())


def test_what_nothing_can_be_taken_from_is_refused_by_name() -> None:
    with pytest.raises(JobError, match="loader: None is no iterable"):
        taken(None)
    with pytest.raises(JobError, match=r"loader\.state_dict\(\): 'x' cannot be saved"):
        check_own({"x": object()}, "loader.state_dict()")
