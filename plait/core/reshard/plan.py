"""A planned reshard as data, its point-to-point messages, and the actions of every rank that carry
them out.

`ReshardPlan` holds the unit tasks in the order of their starts, each with its senders, its
communication method and the number of chunks. `messages` lowers it to one list, the same on every
rank. A rank executes the messages that it sends or receives, in list order. All methods consist of
messages, so none needs its own communicator (A receiver hosts, t = bytes / bandwidth of a NIC):

    send_recv          A B t for B receivers per host: a full copy to every receiver
    local_all_gather   A t: every host's receivers get a share each and exchange within the host
    global_all_gather  about 2 t: all receivers get a share each, then pass shares on in a ring
    broadcast          (K + A - 1) t / K: K chunks from host to host and within each, forwarded on arrival

The list cannot deadlock. Each rank's actions follow from it (`script`): a rank only waits for a
message that is posted and that is not after the delayed action in the list. So the first unfinished
message of the list is posted on both sides and the data that it forwards has arrived: it ends.
`check` proves this for a list by running all scripts with rendezvous.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from typing import Any, Literal, NamedTuple, get_args

from plait.core.base.codec.data import Count, Nanoseconds, Natural, decode
from plait.core.base.codec.stamped import digest
from plait.core.parallel.strategy import slice_sizes
from plait.core.reshard.layouts import Box, TensorLayout, UnitTask

TransferMethod = Literal["send_recv", "local_all_gather", "global_all_gather", "broadcast"]
WAYS: tuple[TransferMethod, ...] = get_args(TransferMethod)


class Chain(NamedTuple):
    """A sender and its receivers; receivers on one host are adjacent."""

    sender: Natural
    receivers: tuple[Natural, ...]


class Message(NamedTuple):
    """Elements ``start <= i < stop`` of the packed (row-major) box of ``steps[step].task``, sent
    from ``src`` to ``dst``."""

    src: int
    dst: int
    step: int
    start: int
    stop: int


@dataclass(frozen=True)
class ReshardStep:
    """A planned unit task.

    chains: one for each rail (NIC of the hosts) that the box is striped over, with equal shares of
    its elements. chunks: number of chunks of a share. start, duration: predicted nanoseconds
    (integers, so that every rank computes the same values).
    """

    task: UnitTask
    way: TransferMethod
    chains: tuple[Chain, ...]
    chunks: int
    start: int
    duration: int


@dataclass(frozen=True, kw_only=True)
class ReshardPlan:
    """The plan that moves a tensor of ``shape`` from one layout to another.

    itemsize: bytes per element. hosts: the host of every rank. order: the name of the search that
    produced the plan. lower_bound: nanoseconds that no plan can beat on the fabric of this plan.
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
        """The predicted nanoseconds from the first start to the last end."""
        return max((step.start + step.duration for step in self.steps), default=0)

    def shifted(self, ranks: int) -> ReshardPlan:
        """Return the same plan with all ranks increased by ``ranks``, which must be distributed
        over hosts in the same way."""
        if not ranks:
            return self
        return replace(
            self,
            source=self.source.shifted(ranks),
            destination=self.destination.shifted(ranks),
            steps=tuple(_moved(step, ranks) for step in self.steps),
        )

    @cached_property
    def key(self) -> str:
        """The hash of the whole plan: ranks with equal keys have the same plan."""
        return digest(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON; ``from_dict`` reads them back."""
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
        """Return a plan from plain values; unknown keys are ignored. Raises JobError naming the
        key."""
        return decode(Written, values, ignore_unknown=True).read()


@dataclass(frozen=True)
class _Move:
    """A step of a plan, as written to a file."""

    box: Box
    holders: tuple[Natural, ...]
    receivers: tuple[Natural, ...]
    way: TransferMethod
    chains: tuple[Chain, ...]
    chunks: Count
    start: Nanoseconds
    duration: Nanoseconds


@dataclass(frozen=True)
class Written:
    """A plan, as written to a file."""

    source: str
    destination: str
    shape: tuple[Natural, ...]
    itemsize: Count
    hosts: tuple[Natural, ...]
    order: str
    lower_bound: Nanoseconds
    steps: tuple[_Move, ...]

    def read(self) -> ReshardPlan:
        """Return the plan. Raises ReshardError for an invalid layout."""
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
    """Return all messages in the order that all ranks follow: by planned start time.

    The sort is by time, not by task, so that a rank that serves two tasks at once alternates
    between their chunks.
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
    """A message within a task. It starts at part ``at`` of ``of`` equal parts of the task's
    duration."""

    at: int
    of: int
    src: int
    dst: int
    start: int
    stop: int


def broadcast_hops(chain: Chain, hosts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the (sender, receiver) pairs: from the first receiver of each host to the first of the
    next host, and within each host from one receiver to the next.

    This is not one line through all receivers. A chunk reaches the last host after one hop per
    host, and leaves each host by the NIC by which it arrived.

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
    """Yield the hops of a pipelined broadcast. A chunk takes one NIC's time for every host that it
    enters; hops inside a host take none."""
    # By host: the number of hosts that a chunk has entered when it arrives there.
    entered: dict[int, int] = {hosts[chain.sender]: 0}
    hops: list[tuple[int, int, int]] = []
    for src, dst in broadcast_hops(chain, hosts):
        hops.append((entered[hosts[src]], src, dst))
        entered.setdefault(hosts[dst], entered[hosts[src]] + 1)
    for chunk, (start, stop) in enumerate(_ranges(lo, hi, chunks)):
        for before, src, dst in hops:
            yield _Hop(chunk + before, chunks + len(entered) - 1, src, dst, start, stop)


def _send_recv(chain: Chain, lo: int, hi: int, chunks: int, hosts: tuple[int, ...]) -> Iterator[_Hop]:
    """Yield the hops of one full copy after the other."""
    for number, receiver in enumerate(chain.receivers):
        for chunk, (start, stop) in enumerate(_ranges(lo, hi, chunks)):
            yield _Hop(number * chunks + chunk, len(chain.receivers) * chunks, chain.sender, receiver, start, stop)


def _local_all_gather(chain: Chain, lo: int, hi: int, chunks: int, hosts: tuple[int, ...]) -> Iterator[_Hop]:
    """Yield the hops host by host: a share to each receiver of the host, which forwards each chunk
    to the host's other receivers on arrival."""
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
    """Yield the hops of a share to every receiver, then of a ring: in every round each receiver
    sends its latest share to its neighbour."""
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
    """Return ``parts`` neighbouring ranges of lo..hi, as equal as possible; the last ones are empty
    if there are more parts than elements."""
    return list(pairwise(accumulate(slice_sizes(hi - lo, parts), initial=lo)))


# ---- actions of one rank ----


# Messages that a rank posts ahead, in each direction: few enough to bound staging memory, enough that a link
# never waits for a rank
WINDOW = 4


class Act(NamedTuple):
    """The next action of a rank with message ``number`` of the list: post its receive, post its
    send, or wait for its end."""

    verb: Literal["receive", "send", "wait"]
    number: int


def script(listed: Sequence[Message], rank: int, window: int = WINDOW, *, in_order: bool = False) -> list[Act]:
    """Return all actions of ``rank``, in order.

    Receives are posted in list order, up to ``window`` of them ahead of the ended ones. Sends are
    posted in list order, each as soon as its data is there and fewer than ``window`` sends are in
    flight. Otherwise the rank waits. If its next send lacks only data, it waits for its next
    receive. Else it waits for its next receive or its oldest send, the earlier in the list.

    in_order: True if sends and receives are posted in one order, that of the list. This is needed
    if a receive is a kernel that blocks operations posted after it: a receive posted ahead could
    block the send that its own sender waits for.
    """
    receives = [number for number, message in enumerate(listed) if message.dst == rank]
    sends = [number for number, message in enumerate(listed) if message.src == rank]
    lacks = _receives_needed(listed, receives, sends)
    acts: list[Act] = []
    sending: deque[int] = deque()
    posted = ended = sent = 0
    while ended < len(receives) or sent < len(sends) or sending:
        ahead = receives[posted : ended + window]
        if in_order and sent < len(sends):
            ahead = [number for number in ahead if number < sends[sent]]
        posted += len(ahead)
        acts += [Act("receive", number) for number in ahead]
        room = sent < len(sends) and len(sending) < window
        if in_order and room and posted < len(receives):
            room = sends[sent] < receives[posted]
        if room and lacks[sent] <= ended:
            sending.append(sends[sent])
            acts.append(Act("send", sends[sent]))
            sent += 1
        elif ended < len(receives) and (room or not sending or receives[ended] < sending[0]):
            acts.append(Act("wait", receives[ended]))
            ended += 1
        else:
            acts.append(Act("wait", sending.popleft()))
    return acts


def _receives_needed(listed: Sequence[Message], receives: list[int], sends: list[int]) -> list[int]:
    """Return for every send the number of the rank's receives that must end first: all up to the
    last one that brings a part of its data."""
    brought: dict[int, list[tuple[int, int]]] = {}
    for count, number in enumerate(receives, 1):
        brought.setdefault(listed[number].step, []).append((count, number))
    exact = {listed[number][2:]: (count, number) for count, number in enumerate(receives, 1)}
    found: list[int] = []
    for number in sends:
        message = listed[number]
        whole = exact.get(message[2:])
        parts = [whole] if whole else brought.get(message.step, ())
        found.append(max((count for count, at in parts if at < number and _overlap(listed[at], message)), default=0))
    return found


def _overlap(first: Message, other: Message) -> bool:
    return first.start < other.stop and other.start < first.stop
