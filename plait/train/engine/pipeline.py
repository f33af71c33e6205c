"""The interpreter of a pipeline schedule: one for every schedule, over the segment executors of this rank's
stages.

It walks the rank's list. Sends and receives are handed to the courier and never block; a computation waits
for what it reads, which is the only place where a rank can stand still. So the order of everything is the
validated schedule's, whatever the network does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from plait.core.schedule import Edge, Op, Schedule, Transfer, ends
from plait.train.engine.executor import SegmentExecutor
from plait.train.engine.inflight import InFlight, MicroBatch
from plait.train.engine.shards import Shards
from plait.train.record.recorder import Recorder


class Delivery(Protocol):
    """A transfer under way; ``span`` is in seconds of the host's clock, and known once it is done."""

    @property
    def span(self) -> tuple[float, float]:
        """When it moved."""
        ...

    def done(self) -> bool:
        """Whether this rank's part is over."""
        ...

    def wait(self) -> None:
        """Return when it is; on a device, when work submitted from now on may use the tensor."""
        ...


class Courier(Protocol):
    """Moves tensors between stages; each channel in the order of the calls."""

    def send(self, transfer: Transfer, tensors: Mapping[str, Tensor]) -> Delivery:
        """Start to send. The tensors must not change until the delivery is done."""
        ...

    def receive(self, transfer: Transfer) -> tuple[Mapping[str, Tensor], Delivery]:
        """Post a receive; the tensors hold what was sent once the delivery is done."""
        ...


class Pipeline:
    """One rank's part of a pipeline.

    schedule: with transfers. names: what crosses each of its edges (the residual stream ``h``, skip
    connections). executors: of this rank's stages, with the phases that the schedule names. ``peak``, after a
    step: by stage, the most micro-batches that were alive at once.
    """

    def __init__(
        self,
        schedule: Schedule,
        names: Mapping[Edge, Sequence[str]],
        place: int,
        executors: Mapping[int, SegmentExecutor],
        courier: Courier,
        recorder: Recorder | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.names, self.shards = names, shards
        self.schedule, self.executors, self.courier, self.recorder = schedule, dict(executors), courier, recorder
        runs: dict[str, Callable[[Op], None]] = {
            "S": self._whole, "F": self._forward, "B": self._backward, "I": self._backward, "W": self._weights,
            "SEND_F": self._send, "SEND_B": self._send, "RECV_F": self._receive, "RECV_B": self._receive,
        }  # fmt: skip
        self.device = next(iter(self.executors.values())).device
        self._no_loss = torch.zeros((), dtype=torch.float64, device=self.device.torch_device)
        self._programme = [(op, runs[op.kind]) for op in schedule.ranks[place]]
        computing = [op for op in schedule.ranks[place] if op.computes]
        self._first = computing[0]
        self._following = dict(pairwise(computing))
        self._last = set({(op.stage, op.kind): op for op in computing}.values())
        """Of every stage and phase, the step's last: afterwards its gradients are complete."""

    @torch.no_grad()
    def run(self, batches: Sequence[MicroBatch]) -> Tensor:
        """One step: forward and backward of every micro-batch, gradients added up; the loss of the heads that
        are here. 0-d."""
        assert len(batches) == self.schedule.num_micro_batches, (
            f"{len(batches)} micro-batches, the schedule has another number"
        )
        self._batches = batches
        self._alive: dict[tuple[int, int], InFlight] = {}
        self._incoming: dict[Transfer, tuple[Mapping[str, Tensor], Delivery]] = {}
        self._results: dict[Transfer, Mapping[str, Tensor]] = {}
        self._sending: deque[tuple[Op, Delivery, Mapping[str, Tensor]]] = deque()
        self.peak: Counter[int] = Counter()
        self._losses: list[Tensor] = []
        try:
            if self.shards:
                self.shards.begin()
                if not self.executors[self._first.stage].strategy.hides_shards(forward=True):
                    self.shards.settle()
            for op, method in self._programme:
                if self.shards and op.computes:
                    self.shards.last, self.shards.then = op in self._last, partial(self._ahead, self._following.get(op))
                method(op)
            self._sent(all_of_them=True)
            assert not self._alive and not self._incoming and not self._results, "the schedule left something behind"
            return torch.stack(self._losses).sum() if self._losses else self._no_loss.clone()
        finally:
            self._alive, self._incoming, self._results, self._losses = {}, {}, {}, []
            self._sending.clear()

    def ahead(self) -> None:
        """Start to gather what the step reads first: while data are loaded, for example."""
        self._ahead(self._first)

    def _ahead(self, op: Op | None) -> None:
        if op is not None and self.shards:
            self.executors[op.stage].ahead(op.kind)  # type: ignore[arg-type]  (an op that computes)

    def _whole(self, op: Op) -> None:
        executor = self.executors[op.stage]
        state = executor.begin(self._batches[op.micro_batch])
        self.peak[op.stage] = 1
        executor.phase("step", state)
        self._losses.append(executor.loss(state))

    def _forward(self, op: Op) -> None:
        executor, at = self.executors[op.stage], op.micro_batch
        entering: dict[str, Tensor] = {}
        for producer in self.schedule.producers[op.stage]:
            entering |= self._take(Transfer(producer, op.stage, "F", at))
        state = executor.begin(self._batches[at], entering)
        self._alive[op.stage, at] = state
        self.peak[op.stage] = max(self.peak[op.stage], sum(stage == op.stage for stage, _ in self._alive))
        executor.phase("F", state)
        for consumer in self.schedule.consumers[op.stage]:
            self._results[Transfer(op.stage, consumer, "F", at)] = {
                name: state.leaving[name] for name in self.names[op.stage, consumer]
            }
        state.leaving = {}
        if executor.graph.heads:
            self._losses.append(executor.loss(state))
        if not executor.graph.backward:
            del self._alive[op.stage, at]

    def _backward(self, op: Op) -> None:
        executor, at = self.executors[op.stage], op.micro_batch
        state = self._alive[op.stage, at]
        for consumer in self.schedule.consumers[op.stage]:
            state.returning |= self._take(Transfer(consumer, op.stage, "B", at))
        executor.phase("B" if op.kind == "B" else "I", state)
        for producer in self.schedule.producers[op.stage]:
            self._results[Transfer(op.stage, producer, "B", at)] = {
                name: state.gradient[name] for name in self.names[producer, op.stage]
            }
        state.returning, state.gradient, state.entering = {}, {}, {}
        if op.kind == "B":
            del self._alive[op.stage, at]

    def _weights(self, op: Op) -> None:
        self.executors[op.stage].phase("W", self._alive.pop((op.stage, op.micro_batch)))

    def _take(self, transfer: Transfer) -> Mapping[str, Tensor]:
        """What a stage needs from another: of this rank, or as soon as it has arrived."""
        if transfer in self._results:
            return self._results.pop(transfer)
        tensors, delivery = self._incoming.pop(transfer)
        start = self.device.mark()
        delivery.wait()
        if self.recorder:
            self.recorder.stood(ends(transfer)[1], start, self.device.mark())
        return tensors

    def _send(self, op: Op) -> None:
        self._sent(all_of_them=False)
        tensors = self._results.pop(op.transfer)
        self._sending.append((op, self.courier.send(op.transfer, tensors), tensors))

    def _sent(self, *, all_of_them: bool) -> None:
        """Let go of what has been sent; raises what went wrong."""
        while self._sending and (all_of_them or self._sending[0][1].done()):
            op, delivery, tensors = self._sending.popleft()
            delivery.wait()
            if self.recorder:
                self.recorder.moved(
                    op, *delivery.span, sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
                )

    def _receive(self, op: Op) -> None:
        self._incoming[op.transfer] = self.courier.receive(op.transfer)
