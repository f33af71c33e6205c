"""One thread that communicates while computation continues: jobs run one after the other, in the
order of submission.

Ranks that submit equal jobs in equal order communicate in equal order, whatever their timing. On a
GPU a job's work runs on the thread's own stream, concurrently with computation; waiting makes the
waiting stream wait, not the host.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from plait.train.machine.device import Fork, Mark, RankDevice


class BackgroundHandle:
    """A job in flight. Until ``wait`` returns nobody may touch the tensors that it reads or
    writes."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._mark: Fork = None
        self._device: RankDevice | None = None
        self.span: tuple[Mark, Mark] = (0, 0)
        """Start and end of the job, if it succeeded."""

    def done(self) -> bool:
        """Return True if the job has ended, successfully or not; on a device, if the device has
        reached the job's end."""
        return self._done.is_set() and (self._device is None or self._device.reached(self._mark))

    def wait(self) -> None:
        """Wait until the job has ended. Raises the job's error."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._device is not None:
            self._device.join(self._mark)

    def finish(self, error: BaseException | None, device: RankDevice | None = None, mark: Fork = None) -> None:
        """Mark the job as ended; called by the thread."""
        self._error, self._device, self._mark = error, device, mark
        self._done.set()


class Background:
    """The communication thread. name: the thread's name."""

    def __init__(self, device: RankDevice, name: str) -> None:
        self.device = device
        self._jobs: queue.SimpleQueue[tuple[BackgroundHandle, Callable[[], object], Fork] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def start(self, job: Callable[[], object]) -> BackgroundHandle:
        """Run ``job`` after earlier jobs, and after the work that the calling thread has submitted
        to the device so far."""
        handle = BackgroundHandle()
        self._jobs.put((handle, job, self.device.fork()))
        return handle

    def close(self) -> None:
        """End the thread after all started jobs."""
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        self.device.enter_thread()
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next job and return False if there is none. A separate call, so that a job's
        objects are freed before the next job."""
        entry = self._jobs.get()
        if entry is None:
            return False
        handle, job, fork = entry
        try:
            with torch.no_grad(), self.device.side_stream(fork):
                start = self.device.mark()
                job()
                end, mark = self.device.mark(), self.device.fork()
        except BaseException as error:  # noqa: BLE001 - raised by ``wait``
            handle.finish(error)
        else:
            handle.span = (start, end)
            handle.finish(None, self.device, mark)
        return True
