"""One thread that communicates while computation goes on: jobs one after the other, in the order in which
they were handed over.

Ranks that hand over equal jobs in equal order communicate in equal order, whatever their timing; that is the
whole trick. On a GPU what a job submits runs on a stream of the thread's own, beside computation; waiting
makes the waiting stream wait, not the host.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from plait.train.machine.device import Fork, Mark, RankDevice


class BackgroundHandle:
    """A job under way. Until ``wait`` returns nobody may touch what it reads or writes."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._mark: Fork = None
        self._device: RankDevice | None = None
        self.span: tuple[Mark, Mark] = (0, 0)
        """When it was under way, if it ended well."""

    def done(self) -> bool:
        """Whether it has ended, well or not; on a device, whether that has come so far."""
        return self._done.is_set() and (self._device is None or self._device.reached(self._mark))

    def wait(self) -> None:
        """Return when it has ended. Raises what went wrong in the background."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._device is not None:
            self._device.join(self._mark)

    def finish(self, error: BaseException | None, device: RankDevice | None = None, mark: Fork = None) -> None:
        """The thread's last word."""
        self._error, self._device, self._mark = error, device, mark
        self._done.set()


class Background:
    """The thread; ``name`` is its name."""

    def __init__(self, device: RankDevice, name: str) -> None:
        self.device = device
        self._jobs: queue.SimpleQueue[tuple[BackgroundHandle, Callable[[], object], Fork] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, job: Callable[[], object]) -> BackgroundHandle:
        """Run ``job`` after the jobs before it, and after what this thread has submitted to the device so
        far."""
        handle = BackgroundHandle()
        self._jobs.put((handle, job, self.device.fork()))
        return handle

    def close(self) -> None:
        """End when everything started is done."""
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        self.device.enter_thread()
        while self._serve_one():
            pass

    def _serve_one(self) -> bool:
        """Run the next job; a call of its own, so that what a job holds is let go before the next comes."""
        entry = self._jobs.get()
        if entry is None:
            return False
        handle, job, fork = entry
        try:
            with torch.no_grad(), self.device.aside(fork):
                start = self.device.mark()
                job()
                end, mark = self.device.mark(), self.device.fork()
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            handle.finish(error)
        else:
            handle.span = (start, end)
            handle.finish(None, self.device, mark)
        return True
