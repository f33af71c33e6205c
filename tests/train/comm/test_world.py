"""How ranks find out what each of them cannot know alone."""

from __future__ import annotations

import errno
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import local
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from plait.core.base.env import RankEnv
from plait.core.base.errors import JobError, LaunchError, RankFailure
from plait.core.job.settings import RunSection
from plait.train.comm import tree, world
from plait.train.machine.control import Control
from tests.support.lab import wait_until
from tests.support.ports import own_port


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
            pool.map(lambda one: world.each_has_own_gpu(one[0], len(gpus), one[1]), zip(stores, gpus, strict=True))
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
    """With ``device_id`` NCCL's messages share one communicator, on which lanes of both directions
    would wait for each other."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: given.update(more, backend=backend))
    monkeypatch.setattr(world, "Tree", lambda: SimpleNamespace(barrier=lambda: None))
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
    names = [tree.group_name([2, 3]), tree.group_name([5]), tree.group_name([2, 3])]
    assert len(set(names)) == 3
    assert names[0].rpartition("/")[0] == names[2].rpartition("/")[0]
    assert len(tree.group_name(range(16384))) < 40


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
        world.run_on_rank_zero(prepare, "corpus")
        return list(told)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [["prepared"]] * 3
    assert told == ["prepared"]


class Joining:
    """What a rank that joins asks of its machine and of others. gpu: its own; agree: whether every
    rank has one; granted: whether a cluster manager gave it GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu: int | None = None
        self.agree = self.granted = True
        self.cores, self.threads = list[tuple[int, int, int]](), list[int]()
        self.asked, self.joined, self.devices = list[tuple[Any, ...]](), list[tuple[Any, ...]](), list[Any]()
        self.initialised, self.ended, self.control = True, 0, Control()
        one = SimpleNamespace(backend="gloo", torch_device=torch.device("cpu"))

        def own_gpu(device: str, number: int, *, alone: bool) -> int | None:
            self.asked.append(("own", device, number, alone))
            return self.gpu

        def device_of(gpu: int | None, *, shared: bool) -> Any:
            self.devices.append((gpu, shared))
            return one

        def all_have_one(store: object, size: int, name: str | None) -> bool:
            self.asked.append(("all", store, size, name))
            return self.agree

        def end() -> None:
            self.ended += 1

        monkeypatch.setattr(torch, "set_num_threads", self.threads.append)
        monkeypatch.setattr(world, "own_gpu", own_gpu)
        monkeypatch.setattr(world, "gpu_name", lambda gpu: f"gpu {gpu}")
        monkeypatch.setattr(world, "gpu_address", lambda gpu: "")
        monkeypatch.setattr(world, "device_of", device_of)
        monkeypatch.setattr(world, "each_has_own_gpu", all_have_one)
        monkeypatch.setattr(world, "granted_gpus", lambda: self.granted)
        monkeypatch.setattr(
            world, "pin_cores", lambda local_rank, ranks, threads: self.cores.append((local_rank, ranks, threads))
        )
        monkeypatch.setattr(world, "open_store", lambda rank, timeout: ("store", timeout))
        monkeypatch.setattr(world, "LineStore", lambda control, seconds: ("line", control, seconds))
        monkeypatch.setattr(world, "join_world", lambda *asked: self.joined.append(asked))
        monkeypatch.setattr(dist, "is_initialized", lambda: self.initialised)
        monkeypatch.setattr(dist, "destroy_process_group", end)

    def join(self, device: Any = "auto", *, rank: RankEnv | None = None, store: Any = None) -> Any:
        run = RunSection(device=device, threads=3, timeout=7.0)
        with world.joined(rank or TWO, run, self.control, store) as found:
            return found


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Joining:
    return Joining(monkeypatch)


TWO = RankEnv(rank=1, world_size=2, local_rank=1, local_world_size=2)


def test_a_rank_takes_its_cores_meets_the_others_and_leaves_in_order(joining: Joining) -> None:
    device = joining.join("cpu")
    assert joining.threads == [3] and joining.cores == [(1, 2, 3)]
    assert joining.asked == [("own", "cpu", 1, False)]  # nobody is asked for GPUs
    assert joining.joined == [(TWO, ("store", 7.0), "gloo", 7.0)]
    assert joining.devices == [(None, False)]
    assert joining.ended == 1 and device.backend == "gloo"
    assert (joining.control.activity, joining.control.patient) == ("meeting the other ranks", True)
    joining.join("cpu", store="met")
    assert joining.joined[1][1] == "met"


def test_ranks_of_a_launcher_meet_at_its_store(joining: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Control, "launched", True)
    monkeypatch.setattr(joining.control, "_channel", SimpleNamespace(send=lambda beat: None))
    joining.join("cpu")
    assert joining.joined == [(TWO, ("line", joining.control, 7.0 + world.MARGIN), "gloo", 7.0)]


def test_one_rank_alone_meets_nobody(joining: Joining) -> None:
    joining.initialised = False
    joining.join(rank=RankEnv())
    assert not joining.joined and joining.ended == 0
    assert joining.cores == [(0, 1, 3)] and joining.asked == [("own", "auto", 0, True)]
    assert joining.control.activity == "starting"


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_rank_with_a_gpu_of_its_own_leaves_the_cores_to_the_driver(joining: Joining, device: str) -> None:
    joining.gpu = 4
    joining.join(device)
    assert joining.asked[1] == ("all", ("store", 7.0), 2, "gpu 4")
    assert joining.devices == [(4, False)] and not joining.cores


@pytest.mark.parametrize(
    ("device", "granted", "refused"), [("auto", False, False), ("auto", True, True), ("cuda", False, True)]
)
def test_where_not_every_rank_has_one_none_is_used_unless_they_were_asked_for(
    joining: Joining, device: str, granted: bool, refused: bool
) -> None:
    joining.gpu, joining.agree, joining.granted = 4, False, granted
    if refused:
        with pytest.raises(JobError, match="some ranks have no GPU of their own, or share one"):
            joining.join(device)
        assert not joining.joined
    else:
        joining.join(device)
        assert joining.devices == [(None, False)] and joining.cores == [(1, 2, 3)]
        joining.gpu, joining.cores = None, []
        joining.join(device)
        assert joining.asked[-1] == ("all", ("store", 7.0), 2, None)
        assert joining.cores == [(1, 2, 3)]  # once


def test_a_shared_gpu_is_the_same_for_a_lab(joining: Joining) -> None:
    joining.gpu = 0
    joining.join("shared", rank=RankEnv(rank=3, world_size=4, local_rank=0, local_world_size=1, lab="lab"))
    assert joining.asked == [("own", "shared", 3, False)]
    assert joining.devices == [(0, True)]
    joining.join("auto", rank=RankEnv(rank=3, world_size=4, local_rank=0, local_world_size=1, lab="lab"))
    assert joining.asked[1] == ("own", "auto", 0, False)


@pytest.mark.parametrize("words", world.TIMEOUT_PHRASES)
def test_who_waited_in_vain_says_while_what(joining: Joining, words: str) -> None:
    def train() -> None:
        with world.joined(TWO, RunSection(timeout=7.0), joining.control):
            joining.control.set_activity("step 3")
            raise RuntimeError(f"gloo: {words} 7000ms")

    with pytest.raises(
        RankFailure, match=rf"rank 1 timed out after 7 s \(run.timeout\) waiting .* while step 3: .*{words}"
    ):
        train()
    assert joining.ended == 0  # which would wait


def test_other_errors_are_what_they_are(joining: Joining) -> None:
    with pytest.raises(RuntimeError, match=r"^a shape$"), world.joined(TWO, RunSection(), joining.control):
        raise RuntimeError("a shape")
    assert joining.ended == 0


def test_the_worlds_backends_follow_from_the_device() -> None:
    def of(backend: str, kind: str) -> str:
        return world.backends_for(SimpleNamespace(backend=backend, torch_device=torch.device(kind)))  # type: ignore[arg-type]

    assert of("gloo", "cpu") == "gloo"
    assert of("nccl", "cuda") == "cpu:gloo,cuda:nccl"


@pytest.mark.parametrize(
    ("rank", "hosts"),
    [
        (RankEnv(rank=0, world_size=2, master_port=7, attempt=3), True),
        (RankEnv(rank=1, world_size=2, master_port=7, attempt=3), False),
        (RankEnv(rank=0, world_size=2, master_port=7, attempt=3, agent_store=True), False),
    ],
)
def test_the_store_is_the_agents_or_rank_0s(monkeypatch: pytest.MonkeyPatch, rank: RankEnv, hosts: bool) -> None:
    made, inner = list[tuple[Any, ...]](), HashStore()
    monkeypatch.setattr(world, "_listener", lambda rank: 55)

    def tcp(*asked: Any, **options: Any) -> Store:
        made.append((*asked, options))
        return inner

    monkeypatch.setattr(world, "TCPStore", tcp)
    store = world.open_store(rank, 5.0)
    limit = {"timeout": timedelta(seconds=5.0 + world.MARGIN), "wait_for_workers": False}
    assert made == [("127.0.0.1", 7, 2, hosts, limit | ({"master_listen_fd": 55} if hosts else {}))]
    store.set("key", "value")
    assert inner.get("plait/3/key") == b"value"


@pytest.mark.parametrize(
    "error", [OSError("in use\nmore"), dist.DistNetworkError("in use"), dist.DistStoreError("in use")]
)
def test_a_port_that_cannot_be_used_is_one_sentence(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def tcp(*asked: Any, **options: Any) -> Store:
        raise error

    monkeypatch.setattr(world, "TCPStore", tcp)
    with pytest.raises(
        LaunchError, match=r"rank 1 cannot open or reach the rendezvous store at 127\.0\.0\.1:7 \(in use\); if"
    ):
        world.open_store(RankEnv(rank=1, world_size=2, master_port=7), 5.0)


def test_rank_0_listens_on_its_own_address_or_lets_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = world._listener(RankEnv(master_port=own_port()))
    assert descriptor is not None
    with socket.socket(fileno=descriptor) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    number = errno.EADDRNOTAVAIL

    def refuse(*asked: Any, **options: Any) -> socket.socket:
        raise OSError(number, "no")

    monkeypatch.setattr(socket, "create_server", refuse)
    assert world._listener(RankEnv()) is None
    number = errno.EADDRINUSE
    with pytest.raises(OSError, match="no"):
        world._listener(RankEnv())


@pytest.mark.parametrize(("local", "loopback"), [(2, True), (1, False)])
def test_the_world_is_joined_with_one_timeout_and_met_at_once(
    monkeypatch: pytest.MonkeyPatch, local: int, loopback: bool
) -> None:
    done, given = list[str](), dict[str, Any]()
    monkeypatch.setattr(world, "stay_on_loopback", lambda: done.append("loopback"))
    monkeypatch.setattr(world, "connect_when_needed", lambda: done.append("when needed"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: done.append("init") or given.update(more))
    monkeypatch.setattr(world, "Tree", lambda: SimpleNamespace(barrier=lambda: done.append("meet")))
    store = SimpleNamespace(set_timeout=lambda limit: done.append(f"{limit.total_seconds():g} s"))
    world.join_world(RankEnv(rank=1, world_size=2, local_rank=0, local_world_size=local), store, "gloo", 5.0)  # type: ignore[arg-type]
    assert done == [*["loopback"] * loopback, "when needed", "8 s", "init", "meet"]
    assert given == {"store": store, "rank": 1, "world_size": 2, "timeout": timedelta(seconds=8.0)}


def test_without_a_world_the_first_rank_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    done = list[int]()
    world.run_on_rank_zero(lambda: done.append(1), "corpus")
    assert done == [1]


def test_a_store_that_is_gone_ends_the_wait_for_the_first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def wait(self, keys: list[str], limit: timedelta) -> None:
            raise dist.DistStoreError("connection reset")

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", Gone)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with pytest.raises(dist.DistStoreError, match="connection reset"):
        world.run_on_rank_zero(lambda: None, "corpus")
