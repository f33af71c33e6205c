"""What the order of virtual streams says of small programmes whose order is known."""

from __future__ import annotations

from collections.abc import Callable, Generator

import pytest
import torch

from plait.train.comm.background import Background
from tests.support.streams.device import VirtualDevice
from tests.support.streams.nccl import Call
from tests.support.streams.rules import broken


@pytest.fixture
def device() -> Generator[VirtualDevice]:
    found = VirtualDevice()
    with found.watching():
        yield found


def aside(device: VirtualDevice, job: Callable[[], object]) -> None:
    """Another stream does it, and waits for nothing."""
    with device.order.on(device.order.stream("other")):
        job()


def test_streams_that_wait_for_each_other_are_in_order(device: VirtualDevice) -> None:
    tensor, background = torch.zeros(4), Background(device, "other")
    for _ in range(3):
        tensor.add_(1)
        background.start(lambda: tensor.mul_(2)).wait()
    background.close()
    assert not device.problems and tensor.tolist() == [14.0] * 4


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        ("read", "write", True),
        ("write", "read", True),
        ("write", "write", True),
        ("read", "read", False),
    ],
)
def test_two_accesses_race_if_one_writes(device: VirtualDevice, first: str, second: str, found: bool) -> None:
    tensor = torch.zeros(4)
    device.synchronize()  # allocating it is over, as the host knows
    run = {"read": tensor.sum, "write": lambda: tensor.add_(1)}
    run[first]()
    aside(device, run[second])
    [race] = device.problems if found else [""]
    if found:
        op = {"read": "aten.sum", "write": "aten.add_.Tensor"}
        assert f"{op[first]} on stream main {first}s what {op[second]} on stream other {second}s" in race
    assert bool(device.problems) == found


def test_parts_of_one_buffer_are_apart(device: VirtualDevice) -> None:
    whole = torch.zeros(8)
    device.synchronize()
    whole[:4].add_(1)
    aside(device, lambda: whole[4:].add_(1))
    assert not device.problems
    aside(device, lambda: whole[3:5].add_(1))
    assert len(device.problems) == 2


def test_a_view_is_no_access_and_out_is_one(device: VirtualDevice) -> None:
    a, out = torch.ones(2, 2), torch.zeros(2, 2)
    device.synchronize()
    torch.mm(a, a, out=out)
    aside(device, lambda: [out.view(4)[:2].t()])
    assert not device.problems
    aside(device, lambda: torch.mm(a, a, out=out))
    assert "aten.mm.out on stream main writes what aten.mm.out on stream other writes" in device.problems[0]


def test_lists_of_tensors_are_written_too(device: VirtualDevice) -> None:
    one = torch.zeros(2)
    device.synchronize()
    torch._foreach_add_([one], 1.0)  # type: ignore[attr-defined]
    aside(device, one.sum)
    assert len(device.problems) == 1


def test_what_the_host_has_waited_for_is_over(device: VirtualDevice) -> None:
    tensor = torch.zeros(4)
    assert tensor.add_(1).sum().item() == 4
    aside(device, lambda: tensor.add_(1))
    assert not device.problems
    assert device.order.waits == ["aten._local_scalar_dense"]


def test_memory_belongs_to_the_stream_that_allocated_it(device: VirtualDevice) -> None:
    tensor = torch.zeros(4)
    fork = device.fork()
    other = device.order.stream("other")
    with device.order.on(other):
        device.order.wait(fork.over)  # type: ignore[union-attr]
        tensor.sum()
        done = device.fork()
    device.order.wait(done.over)  # type: ignore[union-attr]
    del tensor
    assert not device.problems
    tensor = torch.zeros(4)
    with device.order.on(other):
        device.order.wait(device.order.event(0))
        tensor.sum()
    del tensor
    assert not device.problems, "nobody has the memory yet"
    torch.zeros(4)
    [problem] = device.problems
    assert "aten.sum on stream other uses memory that was allocated on stream main and is freed" in problem


def test_freed_memory_has_no_new_owner_before_its_stream_allocates(device: VirtualDevice) -> None:
    tensor, other = torch.zeros(4), device.order.stream("other")
    with device.order.on(other):
        device.order.wait(device.order.event(0))
        tensor.sum()
        done = device.fork()
    del tensor
    device.order.wait(done.over)  # type: ignore[union-attr]
    torch.zeros(4)
    assert not device.problems


def test_recorded_streams_keep_memory(device: VirtualDevice) -> None:
    tensor, other = torch.zeros(4), device.order.stream("other")
    with device.order.on(other):
        device.order.wait(device.order.event(0))
        tensor.sum()
    device.order.record_stream(tensor, other)
    del tensor
    assert not device.problems


def test_memory_that_only_autograd_holds_is_not_free(device: VirtualDevice) -> None:
    weight = torch.ones(4, requires_grad=True)
    other = device.order.stream("other")
    squares = weight.detach() * 2
    result = (weight * squares).sum()  # keeps ``squares``
    with device.order.on(other):
        device.order.wait(device.order.event(0))
        squares.sum()
    del squares
    assert not device.problems, "autograd still has it"
    result.backward()
    del result
    torch.zeros(4)
    assert len(device.problems) == 1


def test_a_new_stream_does_not_know_that_memory_was_allocated(device: VirtualDevice) -> None:
    tensor = torch.empty(4)
    aside(device, tensor.zero_)
    assert "aten.empty" in device.problems[0]


def calls(*asked: tuple[str, str]) -> list[Call]:
    """What one thread of a rank asks for, nothing of which waits for anything."""
    return [Call(communicator, what, hash(communicator), at, {}, 0) for at, (communicator, what) in enumerate(asked, 1)]


def test_ranks_of_a_communicator_ask_for_the_same() -> None:
    one, other = ("a", "all_reduce of 4"), ("a", "all_gather of 4")
    assert not broken([calls(one, other)] * 2)
    [said] = broken([calls(one, other), calls(other, one)])
    assert "rank 0 asks for all_reduce of 4 where rank 1 asks for all_gather of 4, as number 0" in said
    assert "where rank 1 asks for None, as number 1" in broken([calls(one, other), calls(one)])[0]


def test_two_communicators_in_two_orders_are_a_circle() -> None:
    a, b, c = ("a", "x"), ("b", "x"), ("c", "x")
    assert not broken([calls(a, b), calls(a, b)])
    assert broken([calls(a, b), calls(b, a)])[0].startswith("a circle")
    assert broken([calls(a, b), calls(b, c), calls(c, a)])[0].startswith("a circle")
    apart = [calls(a, b), [call._replace(thread=number) for number, call in enumerate(calls(b, a))]]
    assert not broken(apart), "two threads, and no stream waits for the other"
    waits = [apart[0], [apart[1][0], apart[1][1]._replace(before={hash("b"): 1})]]
    assert broken(waits)[0].startswith("a circle")
