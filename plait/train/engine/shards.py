"""Runtime of sharded data parallelism: gather units before they are read, reduce their gradients,
publish updated parameters.

The instruction lists decide when each happens (``core.step.traffic.with_units``). One background
thread communicates, in the order of those lists, which is the same on every rank. Gathered units
and open gradients live in buffers that are allocated once, before any activation
(``core.parallel.sharding.buffer_counts``).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from plait.core.model.precision import SmallType
from plait.core.parallel.sharding import VECTORS, Level, Unit, buffer_counts
from plait.core.record.ring import RecordKind
from plait.core.step.segments import Collective
from plait.core.step.traffic import UnitOp, UnitVerb
from plait.train.comm.background import Background, BackgroundHandle
from plait.train.comm.wire import Wire, wire_bytes
from plait.train.engine.gradients import Gradients
from plait.train.machine.device import RankDevice
from plait.train.model.transformer import Share
from plait.train.model.units import UnitStore
from plait.train.record.recorder import Recorder

Axis = Level | Literal["secondary"]


class Shards:
    """One rank's shards of all units. wires: the process group of every sharding level, by kind of
    unit (``experts``; "" for all others).
    reduce_dtype: the type in which gradients are summed over ranks; over micro-batches they are
    accumulated in their own type.

    sent: bytes that this rank has sent so far, by axis, counted as in a ring.
    """

    def __init__(
        self,
        model: Share,
        gradients: Gradients,
        wires: Mapping[str, Mapping[Axis, Wire]],
        device: RankDevice,
        recorder: Recorder | None,
        reduce_dtype: SmallType = "master",
    ) -> None:
        self.units, self.gradients, self.recorder = model.units, gradients, recorder
        self.device = device
        self.wires = wires
        self.sent: Counter[str] = Counter()
        self.watch: Callable[[UnitStore, Tensor], None] | None = None
        """Callback that receives every unit's gradient of this rank alone, before it is reduced."""
        self.pool = 0
        """Bytes of buffers, all of them allocated by the end of the first step."""
        self._background = Background(device, "shards")
        self._gathered: dict[Unit, tuple[Tensor, BackgroundHandle]] = {}
        self._published: dict[Unit, BackgroundHandle] = {}
        self._unread: set[Unit] = set()  # units that no op of this step has read yet
        self._open: dict[Unit, Tensor] = {}
        self._reducing: deque[tuple[BackgroundHandle, Tensor | None]] = deque()
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._rounds = reduce_dtype == "bf16"
        self._rounded: dict[str, Tensor] = {}
        self._reserve()
        self.acts: dict[UnitVerb, Callable[[UnitOp], None]] = {
            "gather": self.gather,
            "need": self.need,
            "drop": self.drop,
            "open": self.open,
            "settle": self._settle,
        }
        """Functions of the verbs that need no argument but the unit."""

    def _reserve(self) -> None:
        """Allocate the buffers of gathered units and of sharded gradients."""
        stores = self.units.values()
        sizes = buffer_counts((store.unit[0], store.numel) for store in stores if store.params > 1)
        whole = buffer_counts((store.unit[0], store.numel) for store in stores if store.grads > 1)
        model = next(iter(stores)).kept.dtype
        for found, dtype in ((sizes, model), (whole, self.gradients.dtype)):
            for numel, count in found.items():
                self._free[numel, dtype] += [self._new(numel, dtype) for _ in range(count)]
        if self._rounds:
            self._reserve_rounded()

    def _reserve_rounded(self) -> None:
        """Allocate room for the largest rounded gradient and for the largest sum of rounded
        gradients. One is enough, because one thread runs reductions one after the other."""
        given, come = [0], [0]
        for store in self.units.values():
            numel, sharding = store.numel, store.sharding
            levels: dict[Axis, int] = {"optim": numel // sharding.grads, "replicas": numel // sharding.optim}
            if store.whole or store.grads > 1:
                levels |= {"params": numel, "grads": numel // sharding.params}
            for axis, size in levels.items():
                if (ranks := self._wire(store, axis).size) > 1:
                    given.append(size)
                    come += [size // ranks] if axis != "replicas" else []
        self._rounded = {"given": self._new(max(given), torch.bfloat16), "come": self._new(max(come), torch.bfloat16)}

    # ---- parameters ----

    def gather(self, op: UnitOp) -> None:
        """Start to gather a unit, unless it is gathered or being gathered."""
        store = self.units[op.unit]
        if store.params == 1 or op.unit in self._gathered:
            return
        slot = self._take(store.numel, store.kept.dtype)
        self._gathered[op.unit] = (
            slot,
            self._start(UnitOp("gather", op.unit, op.forward), lambda: self._gather(store, slot, op.forward)),
        )

    def need(self, op: UnitOp) -> None:
        """Wait until a unit can be read. The wait is recorded for every gathered unit, and once a
        step for units that optimizers change, even if it takes no time."""
        store, first = self.units[op.unit], op.unit in self._unread
        self._unread.discard(op.unit)
        if not first and store.params == 1 and op.unit not in self._published:
            return
        waits = self._waits(op)
        if published := self._published.pop(op.unit, None):
            published.wait()
        if store.params > 1:
            self.gather(op)
            slot, handle = self._gathered[op.unit]
            handle.wait()
            store.point(slot)
        self._waited(waits)

    def drop(self, op: UnitOp) -> None:
        """Release a sharded unit's gathered parameters, which no later op of the list reads."""
        if op.unit in self._gathered:
            slot, handle = self._gathered.pop(op.unit)
            handle.wait()  # an unread unit may still be being gathered into the buffer that is given back
            self.units[op.unit].point(None)
            self._give(slot)

    def _gather(self, store: UnitStore, slot: Tensor, forward: bool) -> None:
        if store.second is None:
            self._run(store, "params", "all_gather", slot, store.kept)
        elif forward:
            self._run(store, "params", "all_gather", slot, store.kept)
            k = store.sharding.secondary
            store.second.copy_(slot.view(k, -1)[store.rank % k])
        else:
            self._run(store, "secondary", "all_gather", slot, store.second)

    # ---- gradients ----

    def open(self, op: UnitOp) -> None:
        """Provide a buffer for a unit's whole gradient, if this rank accumulates only a part of
        it."""
        store = self.units[op.unit]
        if store.grads > 1 and op.unit not in self._open:
            whole = self._open[op.unit] = self._take(store.numel, self.gradients.dtype)
            whole.zero_()
            self.gradients.open(store, whole)

    def close(self, op: UnitOp, *, last: bool) -> None:
        """Start to reduce a unit's gradient: into this rank's part for the micro-batch, and if
        ``last``, into the optimizer's part for the step."""
        whole = self._open.pop(op.unit, None)
        if whole is not None or last:
            self._begin_reduce(self.units[op.unit], whole, last=last)

    def complete(self) -> None:
        """Reduce the gradients of units that are whole (vectors, for example), and wait until this
        rank's optimizer has all its gradients."""
        for store in self.units.values():
            if store.whole:
                self._begin_reduce(store, None, last=True)
        self._settle()

    def _settle(self, _op: UnitOp | None = None) -> None:
        """Wait for every reduction; recorded even if there is none, because a plan cannot know."""
        waits = self._waits(UnitOp("settle", VECTORS, False))
        while self._reducing:
            self._retire()
        self._waited(waits)

    def _begin_reduce(self, store: UnitStore, whole: Tensor | None, *, last: bool) -> None:
        handle = self._start(UnitOp("reduce", store.unit, False), lambda: self._reduce(store, whole, last))
        self._reducing.append((handle, whole))

    def _retire(self) -> None:
        """Wait for the oldest gradient reduction, and free its buffer."""
        handle, whole = self._reducing.popleft()
        handle.wait()
        if whole is not None:
            self._give(whole)

    def _reduce(self, store: UnitStore, whole: Tensor | None, last: bool) -> None:
        shard = self.gradients.shards[store.unit]
        full = shard if store.whole else whole
        if self.watch:
            self.watch(store, shard if full is None else full)
        if full is not None:
            own, mine = full[store.part("params")], full[store.part("grads")]
            self._sum(store, "params", "reduce_scatter", own, full)
            self._sum(store, "grads", "reduce_scatter", mine, own)
            shard = mine if store.whole else shard.add_(mine)
        if last:
            final = self.gradients.final[store.unit]
            self._sum(store, "optim", "reduce_scatter", final, shard)
            self._sum(store, "replicas", "all_reduce", final, final)

    # ---- after the optimizer ----

    def publish(self, *, later: bool = False) -> None:
        """Start to send the parameters that this rank's optimizer has updated to all ranks, in the
        order in which units will be read: whole units first. later: recorded with the next step,
        which waits for it."""
        for unit, store in sorted(self.units.items(), key=lambda one: not one[1].whole):
            if store.sharding.optim > store.params:
                self._published[unit] = self._start(
                    UnitOp("publish", unit, True), lambda store=store: self._publish(store), later=later
                )

    def begin(self) -> None:
        """Prepare a step or an evaluation before its first instruction list: wait for the units
        that every list reads."""
        changed = [unit for unit, store in self.units.items() if store.sharding.optim > store.params]
        self._unread = {unit for unit in changed if not self.units[unit].whole}
        for unit in changed:
            if self.units[unit].whole:
                waits = self._waits(UnitOp("need", unit, True))
                if published := self._published.pop(unit, None):
                    published.wait()
                self._waited(waits)

    def settle(self) -> None:
        """Wait for all published parameters."""
        while self._published:
            self._published.popitem()[1].wait()

    def _publish(self, store: UnitStore) -> None:
        kept = store.kept
        own, held = kept[store.part("params", "params")], kept[store.part("grads", "params")]
        self._run(store, "optim", "all_gather", held, kept[store.part("optim", "params")])
        self._run(store, "grads", "all_gather", own, held)
        if store.whole:
            self._run(store, "params", "all_gather", kept, own)

    # ---- the background ----

    def _start(self, op: UnitOp, job: Callable[[], object], *, later: bool = False) -> BackgroundHandle:
        recorder = self.recorder
        if recorder is None:
            return self._background.start(job)
        step, name = recorder.current_step(later=later), recorder.name_of(op)

        def counted() -> int:
            before = sum(self.sent.values())
            job()
            return sum(self.sent.values()) - before

        return self._background.start(recorder.recorded_job(name, counted, step=step))

    def _waits(self, op: UnitOp) -> int:
        """Begin the record of a wait and return its number."""
        return self.recorder.begin(RecordKind.WAIT, self.recorder.name_of(op)) if self.recorder else 0

    def _waited(self, number: int) -> None:
        if self.recorder:
            self.recorder.end(number)

    def _wire(self, store: UnitStore, axis: Axis) -> Wire:
        return self.wires.get(store.unit[0], self.wires[""])[axis]

    def _sum(self, store: UnitStore, axis: Axis, kind: Collective, result: Tensor, source: Tensor) -> None:
        """Sum gradients over ranks, rounded to bf16 if the job asks for it."""
        if not self._rounds or self._wire(store, axis).size == 1:
            self._run(store, axis, kind, result, source)
            return
        given = self._rounded["given"][: source.numel()].copy_(source)
        come = given if kind == "all_reduce" else self._rounded["come"][: result.numel()]
        self._run(store, axis, kind, come, given)
        result.copy_(come)

    def _run(self, store: UnitStore, axis: Axis, kind: Collective, result: Tensor, source: Tensor) -> None:
        """Run one collective in the background thread. In a group of one rank, result and source
        are the same memory."""
        wire = self._wire(store, axis)
        if wire.size > 1:
            self.sent[axis] += wire_bytes(kind, result, source, wire.size)
            wire.start(kind, result, source).wait()

    def _take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a free buffer of ``numel`` numbers; if there is none, wait for the oldest
        reduction's, or allocate a new one."""
        free = self._free[numel, dtype]
        while not free and any(
            whole is not None and (whole.numel(), whole.dtype) == (numel, dtype) for _, whole in self._reducing
        ):
            self._retire()
        return free.pop() if free else self._new(numel, dtype)

    def _new(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.pool += numel * dtype.itemsize
        return torch.empty(numel, dtype=dtype, device=self.device.torch_device)

    def _give(self, buffer: Tensor) -> None:
        self._free[buffer.numel(), buffer.dtype].append(buffer)

    def stop(self) -> None:
        """End the thread after all started work; published parameters may be read afterwards."""
        self.settle()
        self._background.close()
