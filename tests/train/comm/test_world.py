"""How ranks find out what each of them cannot know alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import local
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from plait.core.env import RankEnv
from plait.train.comm import world
from tests.support.lab import wait_until


class Counted:
    """A store that counts what is asked of it."""

    def __init__(self, store: Store) -> None:
        self.store, self.asked = store, 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self.store, name)


def agreed(gpus: list[str | None]) -> tuple[list[bool], int]:
    """What every rank finds, and the most that one asks of the store."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    stores = [Counted(store) for _ in gpus]
    with ThreadPoolExecutor(len(gpus)) as pool:
        found = list(
            pool.map(lambda one: world.all_have_one(one[0], len(gpus), one[1]), zip(stores, gpus, strict=True))
        )  # type: ignore[arg-type]
    return found, max(one.asked for one in stores)


@pytest.mark.parametrize(
    ("gpus", "all_have"),
    [
        (["a", "b"], True),
        (["a", None], False),  # one GPU, two ranks: the second sees none of its own
        (["a", "a"], False),  # or sees the first one's
        ([None, None], False),
        (["a", "b", "c", "b"], False),
    ],
)
def test_ranks_use_gpus_together_or_not_at_all(gpus: list[str | None], all_have: bool) -> None:
    assert agreed(gpus)[0] == [all_have] * len(gpus)


def test_the_store_is_asked_as_little_by_many_ranks_as_by_two() -> None:
    few, many = (agreed([str(rank) for rank in range(count)])[1] for count in (2, 16))
    assert few == many


def test_the_world_is_not_bound_to_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``device_id`` NCCL's messages share one communicator, on which lanes of both directions would wait
    for each other."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: given.update(more, backend=backend))
    monkeypatch.setattr(world, "Tree", lambda: SimpleNamespace(meet=lambda: None))
    store = SimpleNamespace(set_timeout=lambda limit: None)
    world.join_world(RankEnv(rank=1, world_size=2, local_world_size=1), store, "cpu:gloo,cuda:nccl", 5.0)  # type: ignore[arg-type]
    assert given["backend"] == "cpu:gloo,cuda:nccl" and "device_id" not in given


class Options:
    """As ``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config, self._timeout = SimpleNamespace(max_ctas=-1), timedelta(minutes=10)


def test_what_computation_waits_for_goes_first_and_lanes_take_little(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = SimpleNamespace(Options=Options)
    monkeypatch.setattr(dist.distributed_c10d, "ProcessGroupNCCL", nccl, raising=False)
    limit = timedelta(seconds=5)
    tp, lane = (world._nccl_options(limit, urgent=one, few=not one) for one in (True, False))
    assert tp._timeout == lane._timeout == limit
    assert tp.is_high_priority_stream and tp.config.max_ctas == -1
    assert not lane.is_high_priority_stream and lane.config.max_ctas == world.FEW


def test_groups_of_equal_ranks_have_names_of_their_own() -> None:
    """The same on all of their ranks, however many other groups each of them has opened."""
    names = [world.group_name([2, 3]), world.group_name([5]), world.group_name([2, 3])]
    assert len(set(names)) == 3
    assert names[0].rpartition("/")[0] == names[2].rpartition("/")[0]
    assert len(world.group_name(range(16384))) < 40


def test_what_the_first_rank_does_may_take_longer_than_any_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    store, told = Counted(HashStore()), list[str]()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(world, "LOOK", timedelta(milliseconds=20))
    ranks = local()
    monkeypatch.setattr(dist, "get_rank", lambda: ranks.rank)

    def prepare() -> None:
        wait_until(lambda: store.asked > 8, "the others do not look")
        told.append("prepared")

    def run(rank: int) -> list[str]:
        ranks.rank = rank
        world.first_does(prepare, "corpus")
        return list(told)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [["prepared"]] * 3
    assert told == ["prepared"]
