"""Collectives and messages that go over the host's memory; ranks as threads. On a GPU:
``tests/gpu``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from plait.train.comm import staged, wire
from plait.train.comm.staged import StagedGroup, StagedWork, register
from plait.train.machine.device import STAGED, RankDevice
from tests.support.threads import threads


class Host:
    """What gloo does of it. ranks: of the world's."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks, self.shared = ranks, wire.GlooWire(ranks)  # type: ignore[arg-type]

    def start(self, kind: Any, result: Tensor, source: Tensor) -> Any:
        return self.shared.start(kind, result, source)

    def send(self, tensor: Tensor, to: int) -> Any:
        return dist.isend(tensor, self.ranks[to])

    def receive(self, tensor: Tensor, of: int) -> Any:
        return dist.irecv(tensor, self.ranks[of])


def staged_ranks(work: Callable[[StagedGroup], Any], ranks: list[int]) -> list[Any]:
    """What the work finds on every rank of a group."""

    def on(rank: int) -> Any:
        if rank not in ranks:
            return None
        group = StagedGroup(RankDevice(torch.device("cpu")), ranks, ranks.index(rank), "some")
        try:
            return work(group)
        finally:
            group.shutdown()

    found = threads(max(ranks) + 1).run(on)
    return [found[rank] for rank in ranks]


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "GlooWire", Host)


def numbers(rank: int) -> Tensor:
    return torch.arange(4.0) + 10 * rank


def one(group: StagedGroup, name: str, count: int, *more: object) -> list[float]:
    found = torch.full((count,), -1.0)
    getattr(group, name)(found, numbers(group.rank()), *more).wait()
    return found.tolist()


def test_collectives_are_those_that_torch_asks_for() -> None:
    def work(group: StagedGroup) -> list[list[float]]:
        summed = numbers(group.rank())
        group.allreduce([summed]).wait()
        return [
            summed.tolist(),
            one(group, "all_gather_single", 8),
            one(group, "reduce_scatter_single", 2),
            one(group, "all_to_all_single", 4, [], []),
            one(group, "all_to_all_single", 4, *2 * [[0, 4] if group.rank() == 0 else [4, 0]]),
        ]

    first, other = staged_ranks(work, [0, 2])
    assert first == [[10, 12, 14, 16], [0, 1, 2, 3, 10, 11, 12, 13], [10, 12], [0, 1, 10, 11], [10, 11, 12, 13]]
    assert other == [[10, 12, 14, 16], [0, 1, 2, 3, 10, 11, 12, 13], [14, 16], [2, 3, 12, 13], [0, 1, 2, 3]]


def test_a_group_is_what_torch_is_told() -> None:
    def work(group: StagedGroup) -> tuple[object, ...]:
        return group.rank(), group.size(), group.group_name, group.getBackendName()

    assert staged_ranks(work, [0, 1]) == [(rank, 2, "some", STAGED) for rank in range(2)]


def test_messages_of_two_ranks_come_in_one_order_whatever_their_tags() -> None:
    def work(group: StagedGroup) -> list[float]:
        me, other = group.rank(), 1 - group.rank()
        sent = [group.send([numbers(me) + at], other, tag=5 - at) for at in range(3)]
        came = [torch.zeros(4) for _ in range(3)]
        received = [group.recv([tensor], other, tag=at) for at, tensor in enumerate(came)]
        for each in (*sent, *received):
            each.wait()
        return [tensor[0].item() for tensor in came]

    assert staged_ranks(work, [1, 2]) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


def test_messages_of_other_ranks_wait_for_nobody_else() -> None:
    """Rank 0 speaks with rank 2 while it waits for rank 1, which waits for what rank 2 says
    afterwards."""

    def come(group: StagedGroup, of: int) -> Tensor:
        found = torch.zeros(4)
        group.recv([found], of).wait()
        return found

    def work(group: StagedGroup) -> float:
        if group.rank() == 0:
            late = torch.zeros(4)
            waiting = group.recv([late], 1)
            group.send([come(group, 2) + 1], 2).wait()
            waiting.wait()
            return late[0].item()
        if group.rank() == 1:
            group.send([come(group, 2) + 1], 0).wait()
            return 0.0
        group.send([numbers(2)], 0).wait()
        group.send([come(group, 0) + 1], 1).wait()
        return 0.0

    assert staged_ranks(work, [0, 1, 2]) == [23.0, 0.0, 0.0]


def test_a_group_that_is_shut_down_has_no_threads() -> None:
    def work(group: StagedGroup) -> list[str]:
        group.allreduce([numbers(0)]).wait()
        peer = 1 - group.rank()
        group.send([numbers(0)], peer).wait()
        group.recv([torch.zeros(4)], peer).wait()
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("staged ")]

    found = staged_ranks(work, [0, 1])
    assert set(found[0]) >= {"staged collectives", "staged messages 1"}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staged ")]
    assert staged_ranks(lambda group: None, [0, 1]) == [None, None], "nothing was started"


class Later:
    """A background that runs a job when it is told to."""

    def __init__(self) -> None:
        self.over, self.error = False, None

    def start(self, job: Callable[[], object]) -> Later:
        self.job = job
        return self

    def run(self) -> None:
        try:
            self.job()
        except Exception as error:
            self.error = error
        self.over = True

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        if self.error:
            raise self.error


def test_work_is_over_when_it_is_done_and_raises_what_went_wrong() -> None:
    def fail() -> None:
        raise ValueError("torn")

    for job in (lambda: None, fail):
        background = Later()
        work = StagedWork(background, job)  # type: ignore[arg-type]
        future = work.get_future()
        assert not work.is_completed() and not future.done()
        background.run()
        assert work.is_completed() and future.done()
        if job is fail:
            for wait in (work.wait, future.wait):
                with pytest.raises(ValueError, match="torn"):
                    wait()
        else:
            assert work.wait() is True and future.wait() is None


def test_groups_are_made_for_a_process_s_device(monkeypatch: pytest.MonkeyPatch) -> None:
    told = dict[str, Any]()

    def note(name: str, create: Any, **more: Any) -> None:
        told.update(more, name=name, create=create)

    monkeypatch.setattr(dist.Backend, "register_backend", note)
    device = RankDevice(torch.device("cpu"))
    register(device)

    class Options:
        global_ranks_in_group, group_rank, group_id = (3, 1), 1, "name"

    class Quiet:
        def __init__(self, ranks: list[int]) -> None:
            told["ranks"] = ranks

    monkeypatch.setattr(staged, "GlooWire", Quiet)
    group = told.pop("create")(Options, None)
    assert told == {"name": STAGED, "extended_api": True, "devices": ["cpu"], "ranks": [3, 1]}
    assert (group.device, group.rank(), group.size(), group.group_name) == (device, 1, 2, "name")
