"""Interpreter of pipeline schedules: one for every schedule, over the segment executors of this
rank's stages.

It executes the rank's list in order. Sends and receives are handed to the courier and never block;
a computation waits for the tensors that it reads, the only place where a rank can block. So the
order of all work is that of the validated schedule, whatever the network does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from plait.core.record.ring import RecordKind
from plait.core.step.schedule import Edge, Op, OpKind, Schedule, Transfer, ends
from plait.train.engine.executor import SegmentExecutor
from plait.train.engine.inflight import InFlight, MicroBatch
from plait.train.machine.device import Mark


class Delivery(Protocol):
    """A transfer in flight; ``span`` is known once it is done."""

    @property
    def span(self) -> tuple[Mark, Mark]:
        """Return (start, end) of the transfer."""
        ...

    def done(self) -> bool:
        """Return True if this rank's part of the transfer is complete."""
        ...

    def wait(self) -> None:
        """Wait until the transfer is complete; on a device, until work submitted from now on may
        use the tensor."""
        ...


class Courier(Protocol):
    """Moves tensors between stages; in each channel in the order of the calls."""

    def send(self, transfer: Transfer, tensors: Mapping[str, Tensor]) -> Delivery:
        """Start to send. The tensors must not change until the delivery is done."""
        ...

    def receive(self, transfer: Transfer) -> tuple[Mapping[str, Tensor], Delivery]:
        """Post a receive; the tensors hold what was sent once the delivery is done."""
        ...


class _ScheduleEntry(NamedTuple):
    """One entry of a rank's list. last: whether it is the step's last of its stage and phase.
    following: the next computation, for which units are gathered."""

    op: Op
    run: Callable[[_PipelineStep, _ScheduleEntry], None]
    last: bool
    following: Op | None


class PipelineExecutor:
    """Executes one rank's part of a pipeline schedule.

    schedule: with transfers. names: the tensors that cross each of its edges (the residual stream
    ``h``, skip connections). executors: of this rank's stages, with the phases that the schedule
    names. ``peak``, after a step: by stage, the most micro-batches that were in flight at once.
    """

    def __init__(
        self,
        schedule: Schedule,
        names: Mapping[Edge, Sequence[str]],
        pp_rank: int,
        executors: Mapping[int, SegmentExecutor],
        courier: Courier,
    ) -> None:
        self.schedule, self.names, self.executors, self.courier = schedule, names, dict(executors), courier
        self.pp_rank = pp_rank
        any_of_them = next(iter(self.executors.values()))
        self.device, self.recorder, self.shards = any_of_them.device, any_of_them.recorder, any_of_them.shards
        self.peak: Counter[int] = Counter()
        self._tokens: dict[int, Tensor] | None = None
        computing = [op for op in schedule.ranks[pp_rank] if op.computes]
        self._first = computing[0]
        following = dict(pairwise(computing))
        last = set({(op.stage, op.kind): op for op in computing}.values())
        self._turns = [
            _ScheduleEntry(op, _RUNS[op.kind], op in last, following.get(op)) for op in schedule.ranks[pp_rank]
        ]

    @torch.no_grad()
    def run(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Run one step: forward and backward of every micro-batch, gradients accumulated. Return
        the loss of this rank's heads, 0-d."""
        assert len(batches) == self.schedule.num_micro_batches, (
            f"{len(batches)} micro-batches, but the schedule has {self.schedule.num_micro_batches}"
        )
        if self.shards:
            self.shards.begin()
            if not self.executors[self._first.stage].strategy.hides_shards(forward=True):
                self.shards.settle()
        step = _PipelineStep(self, batches)
        for turn in self._turns:
            turn.run(step, turn)
        self.peak = step.peak
        return step.finish()

    def token_losses(self, batches: Sequence[MicroBatch]) -> dict[int, Tensor]:
        """Return the loss of each token [B, S] of this rank's heads, by number of the micro-batch.
        The schedule must have forward passes only."""
        self._tokens = {}
        try:
            self.run(batches)
            return self._tokens
        finally:
            self._tokens = None

    def take_losses(self, executor: SegmentExecutor, state: InFlight, micro_batch: int) -> Tensor:
        """Return the loss of a micro-batch whose forward pass has just run."""
        if self._tokens is not None:
            self._tokens[micro_batch] = executor.token_losses(state)
        return executor.loss(state)

    def under(self, schedule: Schedule) -> PipelineExecutor:
        """Return an interpreter of another schedule with the same stages and process groups. Its
        computations must be among those of this schedule."""
        return PipelineExecutor(schedule, self.names, self.pp_rank, self.executors, self.courier)

    def prefetch(self) -> None:
        """Start to gather the units that the step reads first: while data are loaded, for
        example."""
        self.gather(self._first)

    def gather(self, op: Op | None) -> None:
        """Start to gather the sharded units whose parameters computation ``op`` reads first;
        nothing for None."""
        if op is not None and self.shards:
            self.executors[op.stage].prefetch(op.work.phase)


class _PipelineStep:
    """One step while it runs: micro-batches in flight, received tensors and tensors to be sent."""

    def __init__(self, pipeline: PipelineExecutor, batches: Sequence[MicroBatch]) -> None:
        self.of, self.schedule, self.batches = pipeline, pipeline.schedule, batches
        self.alive: dict[tuple[int, int], InFlight] = {}
        self.incoming: dict[Transfer, tuple[Mapping[str, Tensor], Delivery]] = {}
        self.results: dict[Transfer, Mapping[str, Tensor]] = {}
        self.sending: deque[tuple[int, Delivery, Mapping[str, Tensor]]] = deque()
        self.peak: Counter[int] = Counter()
        self.losses: list[Tensor] = []

    def whole(self, turn: _ScheduleEntry) -> None:
        op, executor = turn.op, self.of.executors[turn.op.stage]
        state = executor.begin(self.batches[op.micro_batch])
        self.peak[op.stage] = 1
        self._compute(turn, state)
        self.losses.append(self.of.take_losses(executor, state, op.micro_batch))

    def forward(self, turn: _ScheduleEntry) -> None:
        op, executor = turn.op, self.of.executors[turn.op.stage]
        entering: dict[str, Tensor] = {}
        for producer in self.schedule.producers[op.stage]:
            entering |= self._take(Transfer(producer, op.stage, "F", op.micro_batch))
        state = executor.begin(self.batches[op.micro_batch], entering)
        self.alive[op.stage, op.micro_batch] = state
        self.peak[op.stage] = max(self.peak[op.stage], sum(stage == op.stage for stage, _ in self.alive))
        self._compute(turn, state)
        for consumer in self.schedule.consumers[op.stage]:
            self.results[Transfer(op.stage, consumer, "F", op.micro_batch)] = {
                name: state.crossing.leaving[name] for name in self.of.names[op.stage, consumer]
            }
        state.crossing.leaving = {}
        if executor.graph.heads:
            self.losses.append(self.of.take_losses(executor, state, op.micro_batch))
        if not executor.graph.backward:
            del self.alive[op.stage, op.micro_batch]

    def backward(self, turn: _ScheduleEntry) -> None:
        op, state = turn.op, self.alive[turn.op.stage, turn.op.micro_batch]
        crossing = state.crossing
        for consumer in self.schedule.consumers[op.stage]:
            crossing.returning |= self._take(Transfer(consumer, op.stage, "B", op.micro_batch))
        self._compute(turn, state)
        for producer in self.schedule.producers[op.stage]:
            self.results[Transfer(op.stage, producer, "B", op.micro_batch)] = {
                name: crossing.gradient[name] for name in self.of.names[producer, op.stage]
            }
        crossing.returning, crossing.gradient, crossing.entering = {}, {}, {}
        if op.work.weight_gradient:
            del self.alive[op.stage, op.micro_batch]

    def weights(self, turn: _ScheduleEntry) -> None:
        self._compute(turn, self.alive.pop((turn.op.stage, turn.op.micro_batch)))

    def _compute(self, turn: _ScheduleEntry, state: InFlight) -> None:
        self.of.executors[turn.op.stage].phase(
            turn.op.work.phase, state, last=turn.last, then=partial(self.of.gather, turn.following)
        )

    def _take(self, transfer: Transfer) -> Mapping[str, Tensor]:
        """Return the tensors that another stage sends: of this rank at once, else after waiting for
        the transfer."""
        if transfer in self.results:
            return self.results.pop(transfer)
        tensors, delivery = self.incoming.pop(transfer)
        recorder = self.of.recorder
        number = recorder.begin(RecordKind.IDLE, recorder.name_of(ends(transfer)[1])) if recorder else 0
        delivery.wait()
        if recorder:
            recorder.end(number)
        return tensors

    def send(self, turn: _ScheduleEntry) -> None:
        self._sent(all_of_them=False)
        tensors, number = self.results.pop(turn.op.transfer), 0
        if recorder := self.of.recorder:
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            number = recorder.enqueue(RecordKind.TRANSFER, recorder.name_of(turn.op), size=size)
        self.sending.append((number, self.of.courier.send(turn.op.transfer, tensors), tensors))

    def _sent(self, *, all_of_them: bool) -> None:
        """Release tensors that were sent; raise the errors of failed sends."""
        while self.sending and (all_of_them or self.sending[0][1].done()):
            number, delivery, _ = self.sending.popleft()
            delivery.wait()
            if self.of.recorder:
                self.of.recorder.moved(number, *delivery.span)

    def receive(self, turn: _ScheduleEntry) -> None:
        self.incoming[turn.op.transfer] = self.of.courier.receive(turn.op.transfer)

    def finish(self) -> Tensor:
        """Wait until all sends are complete; return the loss of this rank's heads."""
        self._sent(all_of_them=True)
        assert not self.alive and not self.incoming and not self.results, (
            "the schedule ended with micro-batches or tensors in flight"
        )
        for executor in self.of.executors.values():
            executor.step_ended()
        if self.losses:
            return torch.stack(self.losses).sum()
        return torch.zeros((), dtype=torch.float64, device=self.of.device.torch_device)


_RUNS: Mapping[OpKind, Callable[[_PipelineStep, _ScheduleEntry], None]] = {
    "S": _PipelineStep.whole,
    "F": _PipelineStep.forward,
    "B": _PipelineStep.backward,
    "I": _PipelineStep.backward,
    "W": _PipelineStep.weights,
    "SEND_F": _PipelineStep.send,
    "SEND_B": _PipelineStep.send,
    "RECV_F": _PipelineStep.receive,
    "RECV_B": _PipelineStep.receive,
}
