"""A planned reshard as data, and the point-to-point messages that it is made of.

`ReshardPlan` holds the unit tasks in the order in which they start, each with its senders, the way in which
it reaches its receivers, and the number of chunks. `messages` lowers it to one list, the same on every rank;
a rank works through those that it sends or receives, in that order. All ways are messages, so none needs a
communicator of its own (A receiver hosts, t = bytes / bandwidth of a NIC):

    send_recv          A B t for B receivers a host: a full copy to every receiver
    local_all_gather   A t: every host's receivers get a share each and exchange within the host
    global_all_gather  about 2 t: all receivers get a share each, then pass shares on in a ring
    broadcast          (K + A - 1) t / K: K chunks from host to host and within each, forwarded as they come

The list cannot deadlock. What each rank does follows from it (`script`): every wait is for a message that is
posted and that stands no later in the list than what the wait holds up. So the first unfinished message of
the list is posted on both sides and what it forwards has arrived: it ends. `check` proves it for a list by
running all scripts with rendezvous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal, NamedTuple, get_args

from plait.core.base.codec.data import Count, Nanoseconds, Natural, decode
from plait.core.base.codec.stamped import digest
from plait.core.parallel.strategy import slice_sizes
from plait.core.reshard.layouts import Box, TensorLayout, UnitTask

Way = Literal["send_recv", "local_all_gather", "global_all_gather", "broadcast"]
WAYS: tuple[Way, ...] = get_args(Way)


class Chain(NamedTuple):
    """A sender and its receivers, those of one host next to each other."""

    sender: Natural
    receivers: tuple[Natural, ...]


class Message(NamedTuple):
    """Elements ``start <= i < stop`` of the packed (row-major) box of ``steps[step].task``, from ``src`` to
    ``dst``."""

    src: int
    dst: int
    step: int
    start: int
    stop: int


@dataclass(frozen=True)
class ReshardStep:
    """One unit task as planned.

    chains: one for each rail (NIC of the hosts) that the box is striped over, with equal shares of its
    elements. chunks: pieces that a share is cut into. start, duration: as predicted, in nanoseconds
    (integers, so that every rank computes the same).
    """

    task: UnitTask
    way: Way
    chains: tuple[Chain, ...]
    chunks: int
    start: int
    duration: int


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """Moves a tensor of ``shape`` from one layout to another.

    itemsize: bytes of an element. hosts: the host of every rank. order: the name of the search that found it.
    lower_bound: nanoseconds that no plan can beat on the fabric it was made for.
    """

    source: TensorLayout
    destination: TensorLayout
    shape: tuple[int, ...]
    itemsize: int
    hosts: tuple[int, ...]
    steps: tuple[ReshardStep, ...]
    order: str
    lower_bound: int

    @property
    def predicted(self) -> int:
        """Nanoseconds from the first start to the last end."""
        return max((step.start + step.duration for step in self.steps), default=0)

    def moved(self, ranks: int) -> ReshardPlan:
        """The same between meshes whose ranks are so much higher, where these lie on hosts as those do."""
        if not ranks:
            return self
        return replace(
            self,
            source=self.source.moved(ranks),
            destination=self.destination.moved(ranks),
            steps=tuple(_moved(step, ranks) for step in self.steps),
        )

    @cached_property
    def key(self) -> str:
        """A hash of everything: ranks that agree on it have the same plan."""
        return digest(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; ``from_dict`` reads them back."""
        return {
            "source": str(self.source),
            "destination": str(self.destination),
            "shape": list(self.shape),
            "itemsize": self.itemsize,
            "hosts": list(self.hosts),
            "order": self.order,
            "lower_bound": self.lower_bound,
            "steps": [_step_to_dict(step) for step in self.steps],
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> ReshardPlan:
        """A plan from plain values, of which others are passed over. Raises JobError naming the key."""
        return decode(Written, values, others=True).read()


@dataclass(frozen=True)
class _Move:
    """A step in a file."""

    box: Box
    holders: tuple[Natural, ...]
    receivers: tuple[Natural, ...]
    way: Way
    chains: tuple[Chain, ...]
    chunks: Count
    start: Nanoseconds
    duration: Nanoseconds


@dataclass(frozen=True)
class Written:
    """A plan in a file."""

    source: str
    destination: str
    shape: tuple[Natural, ...]
    itemsize: Count
    hosts: tuple[Natural, ...]
    order: str
    lower_bound: Nanoseconds
    steps: tuple[_Move, ...]

    def read(self) -> ReshardPlan:
        """The plan. Raises ReshardError for a layout that is none."""
        tasks = [UnitTask(one.box, one.holders, one.receivers) for one in self.steps]
        steps = tuple(
            ReshardStep(task, one.way, one.chains, one.chunks, one.start, one.duration)
            for task, one in zip(tasks, self.steps, strict=True)
        )
        return ReshardPlan(
            source=TensorLayout.parse(self.source), destination=TensorLayout.parse(self.destination),
            shape=self.shape, itemsize=self.itemsize, hosts=self.hosts, steps=steps, order=self.order,
            lower_bound=self.lower_bound,
        )  # fmt: skip


def _moved(step: ReshardStep, ranks: int) -> ReshardStep:
    task = step.task
    chains = tuple(Chain(one.sender + ranks, tuple(at + ranks for at in one.receivers)) for one in step.chains)
    holders, receivers = (tuple(at + ranks for at in each) for each in (task.holders, task.receivers))
    return replace(step, task=UnitTask(task.box, holders, receivers), chains=chains)


def _step_to_dict(step: ReshardStep) -> dict[str, Any]:
    task = step.task
    return {
        "box": [list(task.box.start), list(task.box.stop)],
        "holders": list(task.holders),
        "receivers": list(task.receivers),
        "way": step.way,
        "chains": [[chain.sender, list(chain.receivers)] for chain in step.chains],
        "chunks": step.chunks,
        "start": step.start,
        "duration": step.duration,
    }


def messages(plan: ReshardPlan) -> list[Message]:
    """Every message, in the order that all ranks follow: by the time at which the plan has it start.

    Sorted by time rather than task by task, so that a rank that serves two tasks at once takes them chunk
    about.
    """
    timed: list[tuple[int, int, int, int, Message]] = []
    for number, step in enumerate(plan.steps):
        for stripe, (chain, (lo, hi)) in enumerate(
            zip(step.chains, _ranges(0, step.task.box.elements, len(step.chains)), strict=True)
        ):
            for at, hop in enumerate(_LOWER[step.way](chain, lo, hi, step.chunks, plan.hosts)):
                if hop.start < hop.stop:
                    when = step.start + step.duration * hop.at // hop.of
                    timed.append((when, number, stripe, at, Message(hop.src, hop.dst, number, hop.start, hop.stop)))
    return [message for *_, message in sorted(timed)]


class _Hop(NamedTuple):
    """A message within a task, and when it starts: at the ``at``-th of ``of`` parts of the task's time."""

    at: int
    of: int
    src: int
    dst: int
    start: int
    stop: int


def broadcast_hops(chain: Chain, hosts: Sequence[int]) -> list[tuple[int, int]]:
    """Who sends to whom: the first receiver of each host to the first of the next, and within each host from
    one to the next.

    Not one line through all receivers: a chunk reaches the last host after one hop a host, and leaves each by
    the NIC by which it came.

    >>> broadcast_hops(Chain(0, (2, 3, 4, 5)), (0, 0, 1, 1, 2, 2))
    [(0, 2), (2, 4), (2, 3), (4, 5)]
    """
    groups = [list(group) for _, group in groupby(chain.receivers, key=lambda rank: hosts[rank])]
    near = [group for group in groups if hosts[group[0]] == hosts[chain.sender]]
    far = [group for group in groups if hosts[group[0]] != hosts[chain.sender]]
    across = list(pairwise((chain.sender, *(group[0] for group in far))))
    return [
        *across,
        *(pair for group in near for pair in pairwise((chain.sender, *group))),
        *(pair for group in far for pair in pairwise(group)),
    ]


def _broadcast(chain: Chain, lo: int, hi: int, chunks: int, hosts: tuple[int, ...]) -> Iterator[_Hop]:
    """A chunk needs the time of one NIC for every host that it enters; hops inside a host count as none."""
    entered: dict[int, int] = {hosts[chain.sender]: 0}  # how many hosts a chunk has entered when it is in this one
    hops: list[tuple[int, int, int]] = []
    for src, dst in broadcast_hops(chain, hosts):
        hops.append((entered[hosts[src]], src, dst))
        entered.setdefault(hosts[dst], entered[hosts[src]] + 1)
    for chunk, (start, stop) in enumerate(_ranges(lo, hi, chunks)):
        for before, src, dst in hops:
            yield _Hop(chunk + before, chunks + len(entered) - 1, src, dst, start, stop)


def _send_recv(chain: Chain, lo: int, hi: int, chunks: int, hosts: tuple[int, ...]) -> Iterator[_Hop]:
    """One full copy after the other."""
    for number, receiver in enumerate(chain.receivers):
        for chunk, (start, stop) in enumerate(_ranges(lo, hi, chunks)):
            yield _Hop(number * chunks + chunk, len(chain.receivers) * chunks, chain.sender, receiver, start, stop)


def _local_all_gather(chain: Chain, lo: int, hi: int, chunks: int, hosts: tuple[int, ...]) -> Iterator[_Hop]:
    """Host after host: a share to each receiver of the host, which passes it on to the host's others as it
    comes."""
    groups = [list(group) for _, group in groupby(chain.receivers, key=lambda rank: hosts[rank])]
    for turn, group in enumerate(groups):
        parts = -(-chunks // len(group))
        length = parts * len(group)
        pieces = [_ranges(start, stop, parts) for start, stop in _ranges(lo, hi, len(group))]
        for part in range(parts):
            for member, receiver in enumerate(group):
                start, stop = pieces[member][part]
                at = turn * length + part * len(group) + member
                yield _Hop(at, len(groups) * length, chain.sender, receiver, start, stop)
                for other in group:
                    if other != receiver:
                        yield _Hop(at + 1, len(groups) * length, receiver, other, start, stop)


def _global_all_gather(chain: Chain, lo: int, hi: int, chunks: int, hosts: tuple[int, ...]) -> Iterator[_Hop]:
    """A share to every receiver, then a ring: in every round each hands its neighbour the share it got
    last."""
    ring, size = chain.receivers, len(chain.receivers)
    parts = -(-chunks // size)
    pieces = [_ranges(start, stop, parts) for start, stop in _ranges(lo, hi, size)]
    half = parts * size
    for part in range(parts):
        for member, receiver in enumerate(ring):
            yield _Hop(part * size + member, 2 * half, chain.sender, receiver, *pieces[member][part])
    for turn in range(size - 1):
        for part in range(parts):
            for member, receiver in enumerate(ring):
                at = half + (turn * parts + part) * size // (size - 1)
                yield _Hop(at, 2 * half, receiver, ring[(member + 1) % size], *pieces[(member - turn) % size][part])


_LOWER = {
    "broadcast": _broadcast,
    "send_recv": _send_recv,
    "local_all_gather": _local_all_gather,
    "global_all_gather": _global_all_gather,
}


def _ranges(lo: int, hi: int, parts: int) -> list[tuple[int, int]]:
    """``parts`` neighbouring ranges of lo..hi, as equal as can be, the last ones empty if there are too
    many."""
    return list(pairwise(accumulate(slice_sizes(hi - lo, parts), initial=lo)))
