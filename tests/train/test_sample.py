"""The forward pass that samples is the one that was trained, and text comes in whole characters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from plait.core.base.errors import DataError, JobError
from plait.core.model.spec import ModelSpec
from plait.core.parallel.strategy import Strategy
from plait.core.step.orders.overlap import Load
from plait.train.comm.wire import NullWire
from plait.train.data.tokenizer import ByteTokenizer
from plait.train.engine.executor import RankContext, make_executor
from plait.train.engine.inflight import MicroBatch
from plait.train.machine.device import RankDevice
from plait.train.model.transformer import Transformer
from plait.train.sample import Sampler, next_logits

SHAPES: dict[str, Any] = {"num_layers": 5, "hidden": 16, "num_heads": 4, "vocab": 37, "max_sequence": 16}
MODELS = {
    "gpt": ModelSpec(family="gpt", **SHAPES),
    "untied": ModelSpec(family="gpt", tied_embeddings=False, **SHAPES),
    "parallel": ModelSpec(family="gpt", parallel_block=True, **SHAPES),
    "llama": ModelSpec(family="llama", num_kv_heads=2, ffn_hidden=24, **SHAPES),
    "u": ModelSpec(family="utransformer", levels=2, **SHAPES),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_token_is_predicted_as_in_training(name: str) -> None:
    """The trained loss of a sequence is the mean of what each of its beginnings gives the next
    token."""
    spec = MODELS[name]
    model = Transformer(spec, Strategy(), dtype=torch.float64)
    for parameter in model.named.values():  # no weight of ones, no bias of zeros
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    executor = make_executor(
        model, Strategy(), NullWire(), Load(1, 16), RankContext(RankDevice(torch.device("cpu"))), gradients=None
    )
    tokens = torch.randint(0, spec.vocab, (1, 17))
    want = executor.run(MicroBatch(tokens[:, :-1], tokens[:, 1:], torch.zeros(1), 1 / 16, 0))
    ids: list[int] = tokens[0].tolist()
    each = [F.cross_entropy(next_logits(model, ids[:end]), tokens[0, end]) for end in range(1, 17)]
    torch.testing.assert_close(torch.stack(each).mean(), want, rtol=1e-9, atol=1e-9)


def told(monkeypatch: pytest.MonkeyPatch, text: bytes, longest: int = 8) -> tuple[Sampler, list[int]]:
    """A sampler whose model says what it is told to say, and how many tokens it is shown each
    time."""
    left, seen = [*text, 256], list[int]()

    def logits(_: Transformer, tokens: Sequence[int]) -> torch.Tensor:
        seen.append(len(tokens))
        scores = F.one_hot(torch.tensor(left.pop(0)), 260).float()
        scores[259] = 9.0  # a number that the tokenizer does not have
        return scores

    monkeypatch.setattr("plait.train.sample.next_logits", logits)
    spec = ModelSpec(family="gpt", num_layers=1, hidden=4, num_heads=1, vocab=260, max_sequence=longest)
    return Sampler(Transformer(spec, Strategy()), ByteTokenizer()), seen


def test_text_comes_in_whole_characters_and_ends_at_the_end_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, seen = told(monkeypatch, "aé€.".encode())
    pieces = list(sampler.generate("x", tokens=50))
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "."]
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8]  # the end of text is asked for, and ends it


def test_no_more_tokens_than_asked_for_and_a_broken_character_is_shown_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampler, _ = told(monkeypatch, "a€b".encode())
    assert "".join(sampler.generate("x", tokens=3)) == "a\N{REPLACEMENT CHARACTER}"


def test_the_model_never_sees_more_than_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, seen = told(monkeypatch, b"abcdefghijkl", longest=4)
    assert "".join(sampler.generate("xyz", tokens=50)) == "abcdefghijkl"
    assert seen == [3] + [4] * 12


def test_temperature_and_seed() -> None:
    shapes: dict[str, Any] = SHAPES | {"vocab": 257}
    sampler = Sampler(Transformer(ModelSpec(family="gpt", **shapes), Strategy()), ByteTokenizer())

    def text(temperature: float, seed: int) -> str:
        return "".join(sampler.generate("ab", tokens=12, temperature=temperature, seed=seed))

    assert text(1.0, 1) == text(1.0, 1) != text(1.0, 2)
    assert text(0.0, 1) == text(0.0, 2) == text(1e-9, 3)


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1, 0])
def test_every_seed_that_a_job_may_have_is_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, _ = told(monkeypatch, b"a")
    assert "".join(sampler.generate("x", tokens=1, seed=seed)) == "a"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"seed": 2**63}, r"--seed: 9223372036854775808 is no seed.*-9223372036854775808 to 9223372036854775807"),
        ({"seed": -(2**63) - 1}, r"--seed: -9223372036854775809 is no seed"),
        ({"tokens": 0}, "--tokens: 0 tokens are no text"),
        ({"temperature": -0.1}, "--temperature: -0.1 is no temperature"),
        ({"temperature": float("inf")}, "--temperature: inf is no temperature"),
        ({"temperature": float("nan")}, "--temperature: nan is no temperature"),
        ({"prompt": ""}, "--prompt: is empty"),
        ({"prompt": "abcde"}, "--prompt: has 5 tokens, and the model sees at most 4"),
    ],
)
def test_what_cannot_be_continued_is_said_before_anything_is_computed(
    more: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, seen = told(monkeypatch, b"a", longest=4)
    with pytest.raises(JobError, match=says):
        sampler.generate(**{"prompt": "x", "tokens": 1, **more})
    assert not seen
    assert "".join(sampler.generate("abcd", tokens=1)) == "a", "as much as it sees"


def test_a_temperature_of_one_draws_tokens_as_often_as_they_are_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, _ = told(monkeypatch, b"")
    logits = torch.full((260,), -1000.0)
    logits[[65, 66]] = torch.tensor([0.75, 0.25]).log() + 500  # however large they are
    monkeypatch.setattr("plait.train.sample.next_logits", lambda *_: logits)

    def share(temperature: float) -> float:
        text = "".join(sampler.generate("x", tokens=2000, temperature=temperature))
        assert len(text) == 2000 and set(text) == {"A", "B"}
        return text.count("A") / 2000

    assert share(1.0) == pytest.approx(0.75, abs=0.04)
    assert share(0.5) == pytest.approx(0.9, abs=0.03)  # 9 to 1
    assert share(2.0) == pytest.approx(3**0.5 / (1 + 3**0.5), abs=0.04)


def test_a_folder_that_holds_no_run_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no run that has started"):
        Sampler.of_run(tmp_path)
    with pytest.raises(DataError, match="no such run folder"):
        Sampler.of_run(tmp_path / "absent")
