"""The launcher's store: who waits for what, and what no call of the store is."""

from __future__ import annotations

import base64

import pytest

from plait.core.runs.channel import StoreAnswer, StoreCall, StoreVerb
from plait.launch.run_store import RunStore

TIER = "unit"


class Ranks:
    """Ranks that call a store, and the answers that each has got."""

    def __init__(self) -> None:
        self.store, self.answers = RunStore(), dict[int, list[StoreAnswer]]()

    def call(self, rank: int, number: int, verb: StoreVerb, *keys: str, values: tuple[str, ...] = ()) -> None:
        answers = self.answers.setdefault(rank, [])
        self.store.take(rank, StoreCall(number, verb, keys, values, 1), answers.append)


def text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()


def test_who_waits_is_answered_once_all_is_there() -> None:
    ranks = Ranks()
    ranks.call(0, 7, "wait", "a", "b")
    ranks.call(1, 3, "wait", "b")
    ranks.call(2, 1, "set", "a", values=(text("one"),))
    assert ranks.store.waiting == {0, 1} and not any(ranks.answers.values())
    ranks.call(2, 2, "set", "b", values=(text("two"),))
    both, second = StoreAnswer(7, (text("one"), text("two"))), StoreAnswer(3, (text("two"),))
    assert ranks.answers == {0: [both], 1: [second], 2: []}
    ranks.call(1, 4, "wait", "a")
    assert ranks.answers[1][1:] == [StoreAnswer(4, (text("one"),))] and not ranks.store.waiting


def test_who_has_waited_in_vain_is_forgotten() -> None:
    ranks = Ranks()
    ranks.call(0, 7, "wait", "a")
    ranks.call(1, 7, "wait", "a")
    ranks.call(0, 7, "forget")
    ranks.call(0, 8, "forget")  # of which nothing is known
    assert ranks.store.waiting == {1}
    ranks.call(2, 1, "append", "a", values=(text("x"),))
    assert ranks.answers == {0: [], 1: [StoreAnswer(7, (text("x"),))], 2: []}


@pytest.mark.parametrize(
    ("verb", "keys", "values"),
    [
        ("set", ("a", "b"), (text("x"),)), ("set", ("a",), ("no base64",)), ("append", ("a", "b"), (text("x"),)),
        ("add", ("text",), ()), ("add", (), ()), ("compare_set", ("a",), (text("x"),)),
        ("compare_set", (), (text("x"), text("y"))),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_and_nothing_else_happens(
    verb: StoreVerb, keys: tuple[str, ...], values: tuple[str, ...]
) -> None:
    ranks = Ranks()
    ranks.call(0, 1, "set", "text", values=(text("abc"),))
    ranks.call(0, 2, verb, *keys, values=values)
    (answer,) = ranks.answers[0]
    assert answer.number == 2 and answer.error and not answer.values
    ranks.call(0, 3, "wait", "text")
    assert ranks.answers[0][1] == StoreAnswer(3, (text("abc"),))
