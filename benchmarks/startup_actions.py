"""What an action of a rank's lists costs the host: ours and torch's own apart.

A model so narrow (32 layers of hidden 16) that computation is nothing beside what it takes to ask for it. A
step's calls of torch's operators are noted, each with its arguments, and made again one after the other in a
bare loop: that is *torch's* own. Of the rest, *lists* is what it takes to go through the lists and to record
them, ops doing nothing; what is left is *calls*: Python that calls torch, and autograd, which makes and walks
a graph for every op that it differentiates.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plait.core.cluster.hardware import HERE
from plait.core.job.spec import Job
from plait.plan.make import make_plan
from plait.train.engine.assembly import RankPart, assemble
from plait.train.engine.executor import RunningPhase
from plait.train.engine.feed import micro_batches
from plait.train.machine.gpu import device_of
from plait.train.record.recorder import Recorder

JOB: dict[str, Any] = {
    "model": {"family": "gpt", "num_layers": 32, "hidden": 16, "num_heads": 1, "vocab": 64, "max_sequence": 16},
    "data": {"sequence_length": 16},
    "train": {"global_batch_size": 1, "micro_batch_size": 1},
    "strategy": {"slices": {}},
}


class Noted(TorchDispatchMode):
    """Notes every call of an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def cost(rounds: int) -> dict[str, Any]:
    """Microseconds per action, with what is recorded and without."""
    torch.set_num_threads(1)
    device = device_of(None)
    plan = make_plan(Job.from_dict(JOB), HERE, vocab=64)
    found: dict[str, Any] = {}
    for recorded in (True, False):
        part = assemble(plan, 0, device, recorder=Recorder(device) if recorded else None)
        tokens = torch.randint(0, 64, (1, 16))
        batches = part.own(micro_batches(tokens, tokens, torch.arange(1), 1, 0))

        def run(part: RankPart = part, batches: Any = batches) -> None:
            part.pipeline.run(batches)

        for _ in range(5):
            run()
        with Noted() as noted:
            run()
        actions = sum(len(acts) for executor in part.pipeline.executors.values() for acts in _lists(executor))

        def bare(calls: Any = noted.calls) -> None:
            for func, args, named in calls:
                func(*args, **named)

        listed = [(executor, _idle(acts)) for executor in part.pipeline.executors.values() for acts in _lists(executor)]

        def walk(listed: Any = listed) -> None:
            for executor, acts in listed:
                executor._do(acts, RunningPhase({}))

        whole, torch_own, lists = _least([run, bare, walk], rounds)
        found["recorded" if recorded else "bare"] = {
            "actions": actions, "torch_calls": len(noted.calls), "us_per_action": whole / actions * 1e6,
            "torch_us_per_action": torch_own / actions * 1e6, "lists_us_per_action": lists / actions * 1e6,
            "calls_us_per_action": (whole - torch_own - lists) / actions * 1e6,
        }  # fmt: skip
    return found


def _lists(executor: Any) -> list[Any]:
    """The lists of the phases of which a step is made, as they run."""
    return list(executor._acts.values())


def _idle(acts: Any) -> Any:
    """The same, without doing anything."""
    return tuple((lambda _: None, kind, name) for _, kind, name in acts)


def _least(runs: list[Callable[[], None]], rounds: int) -> list[float]:
    """Processor seconds of each, in turns: the mean of the quickest quarter."""
    times: list[list[float]] = [[] for _ in runs]
    with torch.no_grad():
        for _ in range(rounds):
            for run, taken in zip(runs, times, strict=True):
                start = time.thread_time()
                run()
                taken.append(time.thread_time() - start)
    return [statistics.fmean(sorted(taken)[: max(1, len(taken) // 4)]) for taken in times]
