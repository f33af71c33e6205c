"""Persistent gloo ranks for tests: processes start once per session and run any module-level function on demand."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Ranks:
    """``size`` processes in one gloo world; ``run(function, *args)`` calls ``function(rank, *args)`` on each and returns all results."""

    def __init__(self, size: int) -> None:
        self.size, self.broken = size, False
        context = mp.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        results: list[Any] = []
        failures: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout):
                self.broken = True
                raise TimeoutError(f"rank {rank} gave no answer to {function.__name__} in {timeout:.0f} s")
            ok, value = pipe.recv()
            (results if ok else failures).append(value)
        if failures:
            self.broken = True
            raise AssertionError("\n".join(failures))
        return results

    def kill(self) -> None:
        """End ranks that no longer answer."""
        for process in self._processes:
            process.kill()
            process.join()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size), GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        while True:
            function, args = pipe.recv()
            try:
                pipe.send((True, function(rank, *args)))
            except BaseException:
                pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
    except EOFError:
        dist.destroy_process_group()
