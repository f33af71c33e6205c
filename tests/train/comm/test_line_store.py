"""The launcher's store as torch has it: compared with one of torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from queue import Empty, SimpleQueue
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from plait.core.runs.channel import StoreAnswer, StoreCall, StoreVerb
from plait.launch.run_store import RunStore
from plait.train.comm.line_store import LineStore
from plait.train.machine.control import Control


class Line:
    """A rank's line to a store."""

    def __init__(self) -> None:
        self.store, self.numbers, self.given = RunStore(), count(1), list[float | None]()

    def call_store(
        self, verb: StoreVerb, keys: Sequence[str], values: Sequence[str] = (), *, amount: int = 0,
        seconds: float | None = None,
    ) -> StoreAnswer | None:  # fmt: skip
        self.given.append(seconds)
        answers = SimpleQueue[StoreAnswer]()
        call = StoreCall(next(self.numbers), verb, tuple(keys), tuple(values), amount)
        self.store.take(0, call, answers.put)
        try:
            return None if seconds is None else answers.get_nowait()
        except Empty:
            return None


@pytest.fixture
def line() -> Line:
    return Line()


def made(line: Line) -> LineStore:
    return LineStore(cast("Control", line), 7.0)


CALLS: list[Callable[[Any], Any]] = [
    lambda store: store.set("a", "text"),
    lambda store: store.get("a"),
    lambda store: store.set("b", bytes(range(256))),
    lambda store: store.get("b"),
    lambda store: [store.add("n", 3), store.add("n", -1), store.add("n", 0), store.get("n")],
    lambda store: store.set("m", "4") or store.add("m", 1),
    lambda store: [store.check(["a", "b"]), store.check(["a", "none"]), store.check([])],
    lambda store: store.wait(["a", "b"]),
    lambda store: store.wait(["a"], timedelta(seconds=3)),
    lambda store: store.multi_set(["x", "y"], ["1", "2"]),
    lambda store: store.multi_get(["y", "x"]),
    lambda store: [store.append("l", "1"), store.append("l", "2"), store.get("l")],
    lambda store: [store.compare_set("c", "", "first"), store.get("c")],
    lambda store: [store.compare_set("c", "other", "second"), store.get("c")],
    lambda store: [store.compare_set("c", "first", "second"), store.get("c")],
    lambda store: store.compare_set("d", "expected", "x"),
    lambda store: [store.delete_key("a"), store.delete_key("a"), store.check(["a"])],
    lambda store: store.num_keys(),
]


@pytest.mark.parametrize("prefix", ["", "plait/0"])
def test_every_call_comes_to_what_it_does_with_a_store_of_torchs(line: Line, prefix: str) -> None:
    stores: list[Store] = [made(line), HashStore()]
    if prefix:  # which torch makes of it for every group
        stores = [PrefixStore(prefix, store) for store in stores]
    for number, call in enumerate(CALLS):
        ours, theirs = (call(store) for store in stores)
        assert ours == theirs, number


def test_who_waits_in_vain_says_for_what(line: Line) -> None:
    store = made(line)
    with pytest.raises(dist.DistStoreError, match="wait timeout after 7000ms, keys: plait/none"):
        PrefixStore("plait", store).get("none")
    with pytest.raises(dist.DistStoreError, match="wait timeout after 50ms, keys: a, b"):
        store.wait(["a", "b"], timedelta(milliseconds=50))
    store.set_timeout(timedelta(seconds=9))
    with pytest.raises(dist.DistStoreError, match="9000ms"):
        store.get("none")
    assert line.given == [7.0, 0.05, 9.0]


def test_what_cannot_be_done_is_an_error(line: Line) -> None:
    store = made(line)
    store.set("text", "abc")
    with pytest.raises(dist.DistStoreError, match="add text: invalid literal"):
        store.add("text", 1)
