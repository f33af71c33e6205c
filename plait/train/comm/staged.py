"""Backend of torch.distributed for ranks that share a GPU, which NCCL refuses: it moves device
tensors over gloo, through host memory.

The semantics are NCCL's: `GroupWire`, both groups of a lane, ordered messages between two ranks
whatever their tags, streams that wait. A collective begins after the work that its caller has
submitted, on a stream of its group's thread; messages between two ranks have their own thread.
``wait`` blocks the host until the data are on their way back, and the stream until they are there.
The backend serves to try a job on fewer GPUs than ranks; it is not fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from plait.core.step.segments import Collective
from plait.train.comm.background import Background, BackgroundHandle
from plait.train.comm.wire import GlooWire, Splits, equal_splits, started
from plait.train.machine.device import STAGED, RankDevice


class StagedWork:
    """A collective or a message in flight."""

    def __init__(self, background: Background, job: Callable[[], object]) -> None:
        self._future: Future[object] = Future()
        self._handle: BackgroundHandle = background.start(partial(_done, job, self._future))

    def wait(self) -> bool:
        """Wait until work that the calling thread submits from now on finds the data. Raises the
        error of the transfer."""
        self._handle.wait()
        return True

    def is_completed(self) -> bool:
        """Return True if the work has ended, successfully or not."""
        return self._handle.done()

    def get_future(self) -> Future[object]:
        """Return the future that is done when all work is submitted, in the thread that submitted
        it and on its stream."""
        return self._future


class PythonGroup(dist.ProcessGroup):
    """A process group of a backend in Python, with the calls that torch makes for a wire's
    collectives.

    backend: its name. ranks: the group's ranks in the world. rank: this rank's index among them.
    """

    def __init__(self, backend: str, ranks: Sequence[int], rank: int, name: str) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg]
        self._backend, self._name = backend, name

    def begin(self, kind: Collective | Splits, result: Tensor, source: Tensor) -> Any:
        """Start a collective or an exchange, as ``comm.wire.started``; return a torch work
        object."""
        raise NotImplementedError

    @property
    def group_name(self) -> str:  # type: ignore[override]
        """The name under which the group is registered; torch's property exists only for torch's
        own backends."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802 - torch's
        """Return the backend's name (called by torch)."""
        return self._backend

    def shutdown(self) -> None:
        """Called by torch when the group is destroyed; nothing is in flight then."""

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Start a sum all-reduce."""
        return self.begin("all_reduce", tensors[0], tensors[0])

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """Start an all-gather along dim 0."""
        return self.begin("all_gather", output, source)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> Any:
        """Start a sum reduce-scatter along dim 0."""
        return self.begin("reduce_scatter", output, source)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, into: list[int], out: list[int], opts: Any = None
    ) -> Any:
        """Start an all-to-all of equal parts, a rotation (all data to the next rank), or an
        exchange of unequal parts."""
        if len({*out, *into}) <= 1:
            return self.begin("all_to_all", output, source)
        if (out, into) == equal_splits("rotate", source, self.rank(), self.size()):
            return self.begin("rotate", output, source)
        return self.begin(Splits(into, out, 0), output, source)

    # Names of torch before 2.13.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]


class StagedGroup(PythonGroup):
    """One process group of a device that ranks share."""

    def __init__(self, device: RankDevice, ranks: Sequence[int], rank: int, name: str) -> None:
        super().__init__(STAGED, ranks, rank, name)
        self.device, self._wire = device, GlooWire(ranks)
        self._collectives: Background | None = None
        self._messages: dict[int, Background] = {}

    def shutdown(self) -> None:
        """End the group's threads."""
        for background in (self._collectives, *self._messages.values()):
            if background is not None:
                background.close()

    # ---- collectives ----

    def begin(self, kind: Collective | Splits, result: Tensor, source: Tensor) -> StagedWork:
        """Start the collective after the work that the calling thread has submitted."""
        if self._collectives is None:
            self._collectives = Background(self.device, "staged collectives")
        return StagedWork(self._collectives, lambda: self._exchange(kind, result, source))

    def _exchange(self, kind: Collective | Splits, result: Tensor, source: Tensor) -> None:
        given = self.device.download(source)
        found = given if kind == "all_reduce" else self.device.host_buffer(result)
        started(self._wire, kind, found, given).wait()
        self._return(found, result)

    # ---- messages ----

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> StagedWork:
        """Send to a rank, by its index in the group."""
        return StagedWork(self._pair(to), lambda: self._send(tensors[0], to))

    def recv(self, tensors: list[Tensor], of: int, tag: int = 0) -> StagedWork:
        """Receive from a rank, by its index in the group."""
        return StagedWork(self._pair(of), lambda: self._receive(tensors[0], of))

    def _pair(self, peer: int) -> Background:
        if peer not in self._messages:
            self._messages[peer] = Background(self.device, f"staged messages {peer}")
        return self._messages[peer]

    def _send(self, tensor: Tensor, to: int) -> None:
        self._wire.send(self.device.download(tensor), to).wait()

    def _receive(self, tensor: Tensor, of: int) -> None:
        found = self.device.host_buffer(tensor)
        self._wire.receive(found, of).wait()
        self._return(found, tensor)

    def _return(self, host: Tensor, result: Tensor) -> None:
        """Copy from host memory to the result on the device."""
        (there,) = self.device.upload([host])
        result.copy_(there)


def _done(job: Callable[[], object], future: Future[object]) -> None:
    try:
        job()
    except Exception as error:
        future.set_exception(error)
        raise
    future.set_result(None)


def register(device: RankDevice) -> None:
    """Register the backend with torch.distributed, for groups of this process's device."""

    def create(options: Any, _: Any) -> StagedGroup:
        return StagedGroup(device, list(options.global_ranks_in_group), options.group_rank, options.group_id)

    dist.Backend.register_backend(STAGED, create, extended_api=True, devices=[device.torch_device.type])
