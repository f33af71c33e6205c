"""What every wire asks of its buffers, and of the libraries that it leads to."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.futures import Future

from plait.train.comm import wire as module
from plait.train.comm.wire import (
    GlooWire,
    GroupWire,
    NullWire,
    _ScatteredSum,
    _Several,
    empty_like_gathered,
    open_wire,
    sum_over,
    wire_bytes,
)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "rotate"])
def test_a_strided_buffer_is_refused_before_it_travels(kind: str) -> None:
    wire, whole = GroupWire.__new__(GroupWire), torch.zeros(4, 4)
    with pytest.raises(ValueError, match=r"the source of an .* has shape \(4, 2\) and strides \(4, 1\)"):
        wire.start(kind, whole, whole[:, :2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the result"):
        wire.start(kind, whole[:, :2], whole)  # type: ignore[arg-type]


class Work:
    """A transfer under way."""

    def __init__(self, done: bool = True) -> None:
        self.waited, self.done, self.future = 0, done, Future[object]()

    def wait(self) -> None:
        self.waited += 1

    def get_future(self) -> Future[object]:
        return self.future

    def is_completed(self) -> bool:
        return self.done


class Gloo:
    """As much of torch's as a wire asks of it. A transfer fills its result with 7."""

    made: ClassVar[list[Any]] = []

    class _Options:
        pass

    @staticmethod
    def create_device(interface: str, lazy_init: bool) -> tuple[str, bool]:
        return interface, lazy_init

    @staticmethod
    def create_default_device(lazy_init: bool) -> tuple[str, bool]:
        return "default", lazy_init

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.rank, self.size, self.options, self.asked = rank, size, options, list[tuple[Any, ...]]()
        Gloo.made.append(self)

    def allreduce(self, tensors: list[torch.Tensor], options: object) -> Work:
        self.asked.append(("allreduce", tensors))
        return Work()

    def alltoall_base(
        self, result: torch.Tensor, source: torch.Tensor, into: list[int], out: list[int], options: object
    ) -> Work:
        self.asked.append(("alltoall", result.clone(), source.clone(), into, out))
        result.fill_(7.0)
        return Work()

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> Work:
        self.asked.append(("send", tensors, to, tag))
        return Work()

    def recv(self, tensors: list[torch.Tensor], of: int, tag: int) -> Work:
        self.asked.append(("recv", tensors, of, tag))
        return Work()


@pytest.fixture
def gloo(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """gloo over ranks 3, 5 and 9, of which this is 5; the threads that were let go first."""
    first, threads = list[set[int]](), iter([{1, 2}, {1, 2, 8}] * 9)
    Gloo.made.clear()
    monkeypatch.setattr(dist, "ProcessGroupGloo", Gloo, raising=False)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 6)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", HashStore)
    monkeypatch.setattr(module, "gloo_interface", lambda: "eth7")
    monkeypatch.setattr(module, "world_timeout", lambda: timedelta(seconds=9))
    monkeypatch.setattr(module, "running", lambda: next(threads))
    monkeypatch.setattr(module, "prioritize", first.append)
    return first


def wire() -> tuple[GlooWire, Gloo]:
    return GlooWire((3, 5, 9)), Gloo.made[-1]


def test_a_wire_has_one_thread_that_goes_first_and_one_interface(
    gloo: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, made = wire()
    assert (one.size, one.rank, made.size, made.rank) == (3, 1, 3, 1)
    options = made.options
    assert (options._devices, options._threads, options._timeout) == ([("eth7", False)], 1, timedelta(seconds=9))
    assert gloo == [{8}]
    monkeypatch.setattr(module, "gloo_interface", lambda: None)
    assert wire()[1].options._devices == [("default", False)]
    assert (GlooWire().size, GlooWire().rank) == (6, 5)  # of all ranks


def test_a_gather_goes_round_and_copies_no_more_than_its_own_share(gloo: list[set[int]]) -> None:
    one, made = wire()
    result, source = torch.zeros(3, 2), torch.tensor([1.0, 2.0])
    work = one.start("all_gather", result, source)
    sizes = [(into, out) for _, _, _, into, out in made.asked]
    assert sizes == [([2, 0, 0], [0, 0, 2])] * 2  # from the one before, to the one after
    assert [gone.tolist() for _, _, gone, *_ in made.asked] == [[1.0, 2.0], [7.0, 7.0]]
    assert result.tolist() == [[7.0, 7.0], [1.0, 2.0], [7.0, 7.0]]
    assert isinstance(work, _Several) and len(work.works) == 2


def test_a_share_that_lies_where_it_stays_is_not_copied(gloo: list[set[int]]) -> None:
    one, _ = wire()
    result = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]])
    one.start("all_gather", result, result[1])
    assert result[1].tolist() == [1.0, 2.0]


def test_a_scattered_sum_adds_up_what_came_and_uses_its_memory_again(gloo: list[set[int]]) -> None:
    one, made = wire()
    result, source = torch.zeros(2), torch.arange(6.0)
    works = [one.start("reduce_scatter", result, source) for _ in range(2)]
    assert [asked[3:] for asked in made.asked] == [([], [])] * 2
    assert made.asked[0][1].shape == (3, 2)
    memory = set[int]()
    for work in works:
        assert isinstance(work, _ScatteredSum)
        work.wait()
        assert result.tolist() == [21.0, 21.0]
        assert work.is_completed() is True and not work.get_future().done()
        memory.add(work.received.data_ptr())
    assert len(memory) == 2
    again, other = one.start("reduce_scatter", result, source), one.start("reduce_scatter", result[:1], source[:3])
    assert isinstance(again, _ScatteredSum) and again.received.data_ptr() in memory
    assert isinstance(other, _ScatteredSum) and other.received.data_ptr() not in memory


def test_other_collectives_and_messages_are_gloos(gloo: list[set[int]]) -> None:
    one, made = wire()
    result, source = torch.zeros(6), torch.arange(6.0)
    one.start("all_reduce", result, source)
    one.start("all_to_all", result, source)
    one.start("rotate", result, source)
    one.send(source, 2)
    one.receive(result, 0, 4)
    names = [name for name, *_ in made.asked]
    assert names == ["allreduce", "alltoall", "alltoall", "send", "recv"]
    assert made.asked[0][1][0] is result
    assert made.asked[1][3:] == ([2, 2, 2], [2, 2, 2])
    assert made.asked[2][3:] == ([6, 0, 0], [0, 0, 6])
    assert made.asked[3][1][0] is source and made.asked[3][2:] == (2, 0)
    assert made.asked[4][2:] == (0, 4)


def test_several_transfers_end_with_the_last() -> None:
    works = [Work(), Work(done=False)]
    several = _Several(works)
    several.wait()
    assert [one.waited for one in works] == [1, 1]
    assert several.is_completed() is False and several.get_future() is works[1].future


def test_a_group_of_another_backend_is_asked_asynchronously(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, group = list[tuple[Any, ...]](), object()
    monkeypatch.setattr(dist, "get_world_size", lambda of: 3)
    monkeypatch.setattr(dist, "get_rank", lambda of: 1)
    for name in ("all_reduce", "all_to_all_single", "all_gather_single", "reduce_scatter_single"):
        monkeypatch.setattr(
            dist, name, lambda *what, name=name, **options: asked.append((name, what, options)) or Work(), raising=False
        )
    one = GroupWire(cast("Any", group))
    assert (one.size, one.rank) == (3, 1)
    result, source = torch.zeros(3, 2), torch.zeros(6)
    for kind in ("all_reduce", "all_to_all", "rotate", "all_gather", "reduce_scatter"):
        assert isinstance(one.start(kind, result, source), Work)
    assert [name for name, *_ in asked] == [
        "all_reduce", "all_to_all_single", "all_to_all_single", "all_gather_single", "reduce_scatter_single",
    ]  # fmt: skip
    assert all(options == {"group": group, "async_op": True} for *_, options in asked)
    assert asked[1][1][0].shape == (6,) and asked[1][1][2:] == ([2, 2, 2], [2, 2, 2])
    assert asked[2][1][2:] == ([6, 0, 0], [0, 0, 6])
    assert asked[3][1][0] is result and asked[3][1][1] is source


@pytest.mark.parametrize(
    ("backend", "ranks", "kind"),
    [
        ("gloo", None, GlooWire),
        ("gloo", (3, 5), GlooWire),
        ("gloo", (5,), NullWire),
        ("gloo", (3, 9), NullWire),
        ("nccl", (3, 5), GroupWire),
        ("nccl", (5,), NullWire),
    ],
)
def test_a_rank_alone_or_outside_has_a_wire_that_goes_nowhere(
    gloo: list[set[int]], monkeypatch: pytest.MonkeyPatch, backend: str, ranks: Any, kind: type
) -> None:
    opened = list[tuple[Any, ...]]()
    monkeypatch.setattr(module, "new_group", lambda *asked, **options: opened.append((*asked, options)))
    assert type(open_wire(backend, ranks, urgent=True)) is kind
    assert opened == ([(ranks, backend, {"urgent": True})] if kind is GroupWire else [])


def test_what_a_wire_that_goes_nowhere_gives() -> None:
    one = NullWire(2, 1)
    result = torch.zeros(4)
    work = one.start("all_gather", result, torch.tensor([1.0, 2.0]))
    work.wait()
    assert work.is_completed() and work.get_future().done()
    assert result.tolist() == [1.0, 2.0, 1.0, 2.0]
    for kind, source, gives in (
        ("reduce_scatter", [1.0, 2.0, 3.0, 4.0], [3.0, 4.0]),
        ("rotate", [5.0, 6.0], [5.0, 6.0]),
        ("all_to_all", [7.0, 8.0], [7.0, 8.0]),
    ):
        result = torch.zeros(2)
        one.start(kind, result, torch.tensor(source))  # type: ignore[arg-type]
        assert result.tolist() == gives
    result = torch.ones(2)
    one.start("all_reduce", result, result)
    assert result.tolist() == [1.0, 1.0]
    assert (NullWire().size, NullWire().rank) == (1, 0)


def test_a_sum_goes_over_a_wire_that_leads_somewhere(gloo: list[set[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    one, made = wire()
    value = torch.ones(1)
    assert sum_over(one, value) is value and len(made.asked) == 1
    assert sum_over(NullWire(4), value) is value
    alone = GlooWire((5,))
    sum_over(alone, value)
    assert not Gloo.made[-1].asked


def test_a_buffer_of_all_shares_has_them_along_the_first_dimension() -> None:
    found = empty_like_gathered(torch.zeros(2, 3, dtype=torch.bfloat16), 4)
    assert found.shape == (8, 3) and found.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "sent"), [("all_reduce", 2 * 3 * 24 / 4), ("all_gather", 3 * 24 / 4), ("reduce_scatter", 3 * 24 / 4)]
)
def test_bytes_of_a_collective_are_of_its_larger_tensor(kind: Any, sent: float) -> None:
    whole, part = torch.zeros(6), torch.zeros(2)
    assert wire_bytes(kind, whole, part, 4) == wire_bytes(kind, part, whole, 4) == sent
