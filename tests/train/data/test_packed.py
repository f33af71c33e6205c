"""Chats packed into sequences: every answer once, none across two chats, and the count of targets
that is said without reading."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.errors import DataError
from plait.core.base.ignored_input import IgnoredInput
from plait.train.data.chats import MARK, AnswerTokenizer, Chats, ChatSettings, unmarked
from plait.train.data.prepare import CorpusSettings, prepare
from plait.train.data.sequences import IGNORED, Packed, pack, view_of
from plait.train.data.tokenizer import load_tokenizer
from tests.support.chats import CHATML, say, tokenizer_folder


@given(st.lists(st.integers(1, 40), max_size=120))
def test_every_document_is_packed_once_and_nothing_overflows(lengths: list[int]) -> None:
    sizes = np.array(lengths, np.int64)
    found = pack(sizes, 40)
    assert sorted(found.documents.tolist()) == list(range(len(lengths)))
    filled = [int(sizes[found.of(number)].sum()) for number in range(len(found))]
    assert all(0 < one <= 40 for one in filled)
    assert all(one + other > 40 for one, other in combinations(filled, 2))  # else the second need not have begun


def corpus_of(folder: Path, chats: list[Any], **settings: Any) -> tuple[Any, list[np.ndarray]]:
    """A corpus of chats, and the tokens of each."""
    tokenizer = load_tokenizer(tokenizer_folder(folder / "tokenizer", CHATML))
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    reading, encoder = Chats.of(ChatSettings(rows="chats", **settings), tokenizer), AnswerTokenizer(tokenizer)
    corpus = prepare([folder / "chats.jsonl"], encoder, folder / "corpus",
                     CorpusSettings(eval_fraction=0, chats=reading), say=lambda _: None)  # fmt: skip
    return corpus, [encoder.encode_many(list(reading.texts({"messages": one}, "", IgnoredInput())))[0] for one in chats]


@pytest.mark.parametrize("masks", [True, False])
@pytest.mark.parametrize("sequence", [24, 40, 64, 300])
def test_sequences_are_whole_chats(tmp_path: Path, sequence: int, masks: bool) -> None:
    chats = [say(f"q{number}", "yes " * (number % 7), *(["more"] * (2 * (number % 2)))) for number in range(20)]
    corpus, ids = corpus_of(tmp_path, chats)
    view = view_of(corpus, "train", sequence, masks=masks)
    assert isinstance(view, Packed)
    seen = []
    for number in range(view.count):
        tokens, targets, starts = view.row(number)
        for start in dict.fromkeys(starts.tolist()):
            own = starts == start
            seen.append((tuple(tokens[own].tolist()), tuple(targets[own].tolist())))
        assert view.targets(np.array([number])) == (targets != IGNORED).sum()
    want = []
    for one in ids:
        plain, kept = unmarked(one), min(len(one) - 1, sequence)
        targets = np.where(one[1:] >= MARK, plain[1:], IGNORED)[:kept]
        if (targets != IGNORED).any():
            want.append((tuple(plain[:kept].tolist()), tuple(targets.tolist())))
    padding = [one for one in seen if set(one[1]) == {IGNORED}]
    assert all(set(tokens) == {corpus.index.end_of_text} for tokens, _ in padding)
    assert sorted(one for one in seen if one not in padding) == sorted(want)
    longer = [one for one in ids if len(one) - 1 > sequence]
    assert (view.cut, view.dropped) == (len(longer), len(ids) - len(want))


def test_chats_that_are_too_long_for_any_answer_are_refused(tmp_path: Path) -> None:
    corpus, _ = corpus_of(tmp_path, [say("a question that is long " * 20, "yes")])
    with pytest.raises(
        DataError, match=r"no answer begins within the first 16 tokens of its text; use a larger data\.seq"
    ):
        view_of(corpus, "train", 16, masks=True)
