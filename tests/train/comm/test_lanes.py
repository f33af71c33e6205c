"""Plans of resharding, carried out by ranks that are threads: every tile is its part of the tensor,
whatever the layouts. More in ``tests/dist``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from plait.core.reshard.layouts import Reshard, TensorLayout
from plait.core.reshard.plan import WAYS
from plait.plan.reshard.boundary import Fabric, even_hosts, plan_reshard
from plait.train.comm import lanes as lanes_module
from plait.train.comm.lanes import Lane
from plait.train.machine.device import RankDevice
from tests.dist import resharding
from tests.dist.equality import DEVICE
from tests.dist.test_reshard import problems
from tests.support.threads import threads


@pytest.fixture(autouse=True)
def lanes() -> Iterator[None]:
    """Of each rank its own, by name, and closed in the end."""
    own, opened = threading.local(), list[Lane]()

    def lane(name: str) -> Lane:
        if not hasattr(own, name):
            setattr(own, name, Lane(DEVICE))
            opened.append(getattr(own, name))
        return getattr(own, name)

    with mock.patch.object(resharding, "lane", lane):
        yield
    with mock.patch("torch.distributed.destroy_process_group"):
        for one in opened:
            one.close()


@pytest.mark.parametrize("seed", range(2))
def test_random_layouts_types_and_ways(seed: int) -> None:
    assert problems(threads(4).run(resharding.carry_out, seed, 20, 4, "plain")) == []


def test_both_directions_at_once() -> None:
    assert problems(threads(4).run(resharding.both_ways, 5, 3)) == []


@pytest.mark.parametrize("way", WAYS)
def test_many_chunks_that_are_passed_on(way: str) -> None:
    assert problems(threads(4).run(resharding.large, way)) == []


def test_what_is_not_the_plan_is_refused() -> None:
    resharding.check_refusals(threads(4).run(resharding.refusals))


def test_ranks_with_different_plans_are_told() -> None:
    assert set(threads(4).run(resharding.disagree)) == {
        "Ranks [1] have a different reshard plan than rank 0. Use equal arguments on all ranks."
    }


class Twofold(RankDevice):
    """Of a backend on which messages of two ranks share one order whatever their tags."""

    backend = "twofold"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))


@pytest.mark.parametrize("seed", range(2))
def test_two_groups_carry_what_one_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.train.comm.test_lanes.DEVICE", Twofold())
    assert problems(threads(4).run(resharding.carry_out, seed, 20, 4, "plain")) == []


@pytest.mark.parametrize(("device", "groups"), [(DEVICE, 1), (Twofold(), 2)])
def test_a_lane_leaves_every_group_that_it_has_opened(
    device: RankDevice, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, left = list[tuple[object, ...]](), list[object]()

    def new(ranks: list[int], backend: str, *, few: bool) -> object:
        opened.append((tuple(ranks), backend, few))
        return object()

    def work(rank: int) -> None:
        if rank == 2:
            with mock.patch.object(dist, "destroy_process_group", left.append):
                monkeypatch.setattr(lanes_module, "new_group", new)
                lane = Lane(device, [2, 0])
                assert (lane.rank, lane.ranks) == (2, [0, 2])
                lane.close()

    threads(3).run(work)
    assert opened == [((0, 2), device.backend, True)] * groups
    assert len(set(left)) == len(left) == groups


class Noted:
    """What a lane leaves in the ring: messages by number."""

    def __init__(self) -> None:
        self.log = list[tuple[object, ...]]()

    def move(self, size: int, job: Callable[[], object]) -> Callable[[], object]:
        self.log.append(("move", size))
        return job

    def post(self, peer: int, *, sends: bool, size: int) -> int:
        self.log.append(("post", peer, sends, size))
        return sum(entry[0] == "post" for entry in self.log)

    def settled(self, record: int) -> None:
        self.log.append(("settled", record))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_moves_is_noted_with_its_size_and_whom_it_goes_to(dtype: torch.dtype) -> None:
    """Ranks 0 and 1 have halves of 8 numbers, rank 2 needs all of them."""
    source, destination = TensorLayout.parse("(2) S0"), TensorLayout.parse("(1)@2 R")
    fabric = Fabric(hosts=even_hosts(3, 3), rate=1.0)
    plan = plan_reshard(Reshard(source, destination, (8,), dtype.itemsize), fabric)

    def work(rank: int) -> tuple[list[tuple[object, ...]], list[float]]:
        noted = Noted()
        lane = Lane(DEVICE, messages=noted)  # type: ignore[arg-type]
        lane.prepare(plan)
        assert noted.log == [], "a rendezvous is no message of the run's"
        tile = torch.arange(4.0 * rank, 4.0 * rank + 4).to(dtype) if rank < 2 else None
        found = torch.zeros(8, dtype=dtype) if rank == 2 else None
        lane.start(plan, tile, found).wait()
        lane.close()
        return noted.log, [] if found is None else found.tolist()

    half = 4 * dtype.itemsize
    *senders, (log, found) = threads(3).run(work)
    assert found == list(range(8))
    assert senders == [([("move", half), ("post", 2, True, half), ("settled", 1)], [])] * 2
    assert log[0] == ("move", 2 * half)
    assert sorted(entry for entry in log if entry[0] == "post") == [("post", 0, False, half), ("post", 1, False, half)]
    assert [entry for entry in log if entry[0] == "settled"] == [("settled", 1), ("settled", 2)]


def test_who_needs_nothing_of_a_plan_moves_nothing() -> None:
    plan = plan_reshard(
        Reshard(TensorLayout.parse("(1) R"), TensorLayout.parse("(1)@1 R"), (4,), 4),
        Fabric(hosts=even_hosts(3, 3), rate=1.0),
    )

    def work(rank: int) -> list[tuple[object, ...]]:
        noted = Noted()
        lane = Lane(DEVICE, messages=noted)  # type: ignore[arg-type]
        tiles = [torch.ones(4) if rank == place else None for place in range(2)]
        lane.start(plan, *tiles).wait()
        lane.close()
        return noted.log

    assert threads(3).run(work)[2] == [("move", 0)]
