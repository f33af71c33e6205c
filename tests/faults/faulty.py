"""A rank that trains as every other until a step at which a fault happens to it:

    FAULT="KIND RANK STEP" python -m tests.faults.faulty RUN_FOLDER

When it does, the moment is written to ``fault`` in the run's folder; where that is, nothing happens
any more. ``slowN`` makes every piece of computation take N % more of a processor, from that step
on. ``many`` and ``one`` make a step long, and no other: every piece of its computation by a tenth
of a second, or the first by ``LONG``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LONG = 6.0
"""Seconds."""


def _hold_the_lock() -> None:
    """Wait for ever in C, with the interpreter's lock: for a mutex that this thread has."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def _loop(step: Any) -> None:
    while True:
        pass


def _other(step: Any, change: Callable[[Any], Any]) -> None:
    """The next collective of the group over all ranks is begun with another tensor."""
    world = step.groups.world
    start = world.start

    def changed(kind: Any, result: Any, source: Any) -> Any:
        type(world).start, other = original, change(result)
        return start(kind, other, other)

    original = type(world).start
    type(world).start = lambda wire, *rest: changed(*rest) if wire is world else original(wire, *rest)


def _one_more(step: Any) -> None:
    """A collective that no other rank begins, in a group of more than one."""
    import torch

    groups = step.groups
    wire = next(w for w in (groups.tp, *groups.shards.values(), groups.world) if w.size > 1)
    for number in (3, 5):  # of other sizes than all that follow
        wire.start("all_reduce", *[torch.zeros(number)] * 2)


def _first_the_world(step: Any) -> None:
    """The sum over all ranks is begun, and awaited, before those of smaller groups."""
    import torch

    numbers = torch.zeros(3, dtype=torch.float64)
    step.groups.world.start("all_reduce", numbers, numbers).wait()


def _sleep(step: Any) -> None:
    time.sleep(3600)


HARM: dict[str, Callable[[Any], object]] = {
    "kill": lambda step: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda step: os.kill(os.getpid(), signal.SIGSTOP),
    "loop": _loop,
    "sleep": _sleep,
    "hold": lambda step: _hold_the_lock(),
    "size": lambda step: _other(step, lambda tensor: tensor.repeat(3)),
    "dtype": lambda step: _other(step, lambda tensor: tensor.float()),
    "order": _one_more,
    "deadlock": _first_the_world,
}


def main() -> int:
    """Train, with the fault."""
    from plait.train import worker

    if "FAULT" in os.environ and not Path(sys.argv[1], "fault").exists():
        kind, rank, at = os.environ["FAULT"].split()
        if os.environ["RANK"] == rank:
            _plant(kind, int(at))
    return worker.main()


def _plant(kind: str, at: int) -> None:
    if kind.startswith("slow"):
        _slow_down(int(kind[4:]) / 100, at)
        return
    if kind in ("many", "one"):
        _one_long_step(at - 1, 0.1 if kind == "many" else LONG, once=kind == "one")
        return
    from plait.train import rank_run

    train_step, steps = rank_run.train_step, 0

    def harmed(step: Any, *rest: Any, **more: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == at:
            _note()
            HARM[kind](step)
        return train_step(step, *rest, **more)

    rank_run.train_step = harmed


def _note() -> None:
    Path(sys.argv[1], "fault").write_text(str(time.time()))


def _one_long_step(at: int, seconds: float, *, once: bool) -> None:
    """A step, counted from 0, of which every piece of computation takes seconds more; once: the
    first."""
    from plait.core.record.ring import RecordKind
    from plait.train.comm.log import Log

    original, done = Log.run, list[float]()

    def longer(act: Callable[[Any], object]) -> Callable[[Any], None]:
        def acted(of: Any) -> None:
            act(of)
            if not done or not once:
                done.append(end := time.monotonic() + seconds)
                while time.monotonic() < end:  # busy, with what it gets of a processor
                    pass

        return acted

    def run(log: Log, acts: Any, of: Any) -> None:
        if log.step == at:
            acts = tuple((longer(act) if kind == RecordKind.COMPUTE else act, kind, name) for act, kind, name in acts)
        original(log, acts, of)

    Log.run = run  # type: ignore[method-assign]


def _slow_down(by: float, at: int) -> None:
    """Not the clock's time but the processor's: ranks of a lab share processors, and what one
    sleeps through makes the others faster."""
    from plait.core.record.ring import RecordKind
    from plait.train.comm.log import Log

    original, slowed = Log.run, dict[int, tuple[Any, Any]]()

    def longer(act: Callable[[Any], object]) -> Callable[[Any], None]:
        def acted(of: Any) -> None:
            start = time.thread_time()
            act(of)
            end = time.thread_time() + by * (time.thread_time() - start)
            while time.thread_time() < end:
                pass

        return acted

    def run(log: Log, acts: Any, of: Any) -> None:
        if log.step < at:
            original(log, acts, of)
            return
        if not slowed:
            _note()
        if id(acts) not in slowed:  # which live as long as the rank
            made = tuple((longer(act) if kind == RecordKind.COMPUTE else act, kind, name) for act, kind, name in acts)
            slowed[id(acts)] = acts, made
        original(log, slowed[id(acts)][1], of)

    Log.run = run  # type: ignore[method-assign]


if __name__ == "__main__":
    from plait.train.machine.rank_process import run_and_end

    run_and_end(main)
