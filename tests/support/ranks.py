"""Persistent gloo ranks for tests: processes start once per session and run any module-level
function on demand.

They are forked from one process that has imported what they need: five seconds of imports once, not
in each of them. Between two functions they are stopped (SIGSTOP): gloo's threads poll even when
nothing happens, beside other tests' measurements.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing as mp
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from plait.core.base.process import die_with_parent

GRACE = 5.0  # seconds that the other ranks have left once one has failed: they may wait for it for ever
CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["plait.train.session", "tests.dist.pipelining"])


class Ranks:
    """``size`` processes in one gloo world; ``run(function, *args)`` calls ``function(rank,
    *args)`` on each and returns all results."""

    def __init__(self, size: int) -> None:
        self.size, self.broken = size, False
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_serve, args=(rank, size, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        atexit.register(self.kill)  # multiprocessing would ask them to end and wait, and one that is stopped cannot
        port = self._pipes[0].recv()
        for pipe in self._pipes[1:]:
            pipe.send(port)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 300.0) -> list[Any]:
        self._send(signal.SIGCONT)
        called = pickle.dumps((function, args))  # not torch's own way, which keeps a file open for every tensor
        for pipe in self._pipes:
            pipe.send_bytes(called)
        results: list[Any] = [None] * self.size
        failures: list[str] = []
        waiting, deadline = dict(zip(self._pipes, range(self.size), strict=True)), time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            for pipe in wait(list(waiting), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(pipe, Connection)
                ok, value = pickle.loads(pipe.recv_bytes())
                results[waiting.pop(pipe)] = value
                if not ok:
                    failures.append(value)
                    deadline = min(deadline, time.monotonic() + GRACE)
        self.broken = bool(failures or waiting)
        if waiting:
            failures.append(f"ranks {sorted(waiting.values())} gave no answer to {function.__name__}")
        if failures:
            raise AssertionError("\n".join(failures))
        self._send(signal.SIGSTOP)
        return results

    def kill(self) -> None:
        """End ranks that no longer answer."""
        for process in self._processes:
            process.kill()
            process.join()

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def close(self) -> None:
        self._send(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + GRACE
        for process in self._processes:
            process.join(timeout=max(0.1, deadline - time.monotonic()))
        self.kill()


@contextmanager
def worlds() -> Iterator[Callable[[int], Ranks]]:
    """Makes worlds of so many ranks, and keeps them for who asks again, until the block ends."""
    pools: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        if size in pools and pools[size].broken:  # what one rank did not do, the others still wait for
            pools.pop(size).kill()
        if size not in pools:
            pools[size] = Ranks(size)
        return pools[size]

    yield of
    for one in pools.values():
        one.close()


def _serve(rank: int, size: int, pipe: Connection) -> None:
    die_with_parent()  # one that is stopped would not see its pipe close
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    torch.set_num_threads(1)
    # Rank 0 takes any port that is free and tells it: one that was chosen before could be another's by now.
    port = pipe.recv() if rank else 0
    store = TCPStore("127.0.0.1", port, size, is_master=rank == 0, wait_for_workers=False)
    if rank == 0:
        pipe.send(store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        while True:
            function, args = pickle.loads(pipe.recv_bytes())
            gc.freeze()  # what its import has made need not be looked at again
            try:
                pipe.send_bytes(pickle.dumps((True, function(rank, *args))))
            except BaseException:
                pipe.send_bytes(pickle.dumps((False, f"rank {rank}:\n{traceback.format_exc()}")))
            gc.collect()  # wires live in cycles, and every one has threads that poll
    except EOFError:
        dist.destroy_process_group()
