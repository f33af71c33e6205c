"""What the recorder costs: the same job's steps with it and its agent, and without either, in turns within
one run.

Every round runs a step of both, in alternating order, over the same weights, wires and threads; the agent,
which runs beside the ranks as in training and collects their records, is stopped (SIGSTOP) while steps are
not recorded. So whatever it does falls into steps that are recorded, also what it had put off.

*cost* is what recording takes of a step: the median of the rounds' own differences, which is what ranks do in
every step, and the agent's share of the host's processors, on average, which is what it does every few
seconds. Beside it the standard error of the median. As a check *wall*, the mean of all differences, with its
own error, which is larger: these machines differ from one second to the next by more than what is looked for.
*processor*: as *cost*, of the processor time of both ranks, with all their threads, and of the agent. Rounds
count from when the agent has written its first files; what it took until then, most of it imports, is
*start*, in seconds, once a run. *alone*: what as many records take in a loop that does nothing else. *MiB*:
the agent's largest resident size, after its first files and in the end.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keeping import HERE, finish, keep, make_parser, run_to_the_end

from plait.core.base.process import reserved_port
from plait.core.base.text import table
from plait.core.cluster.hardware import Hosts
from plait.core.job.collecting import CollectorSettings, start_agent
from plait.core.job.spec import Job
from plait.launch.local.local import local_start
from plait.launch.run_folder import write_run
from plait.plan.make import make_plan

MODEL = {"family": "gpt", "num_layers": 4, "hidden": 256, "num_heads": 4, "vocab": 256, "max_sequence": 256}
VOCAB = 256
JOBS: dict[str, dict[str, Any]] = {
    "tp 2, domino": {"tp": 2, "slices": {"batch": 2}},
    "dp 2, fsdp": {"dp": 2, "shard": "fsdp"},
    "pp 2, eager-1f1b": {"pp": 2},
}
BOUND = 0.005
"""Of a step's time, that recording may take."""
CORES = 2
"""Of the host, one for each rank."""


def job(strategy: dict[str, Any]) -> dict[str, Any]:
    """Eight sequences of 256 tokens a step."""
    micro = 2 if "pp" in strategy else 4
    return {
        "model": MODEL,
        "data": {"sequence_length": 256},
        "train": {"global_batch_size": 8, "micro_batch_size": micro},
        "strategy": strategy,
    }


def main() -> int:
    """Measure every job; the exit status is 1 where recording costs more than it may."""
    parser = make_parser(__doc__, rounds=300, quick=10, cases=JOBS)
    options = parser.parse_args()
    found = {name: measured(JOBS[name], options.rounds) for name in options.case or JOBS}
    header = ("job", "ms a step", "cost", "error", "of it agent", "wall", "error", "processor", "error", "alone",
              "start", "records", "MiB", "disk, bytes a step")  # fmt: skip
    print("\n".join(table(header, [(name, *_row(one)) for name, one in found.items()], None)))
    keep({"bound": BOUND, "jobs": found}, options)
    return int(any(one["cost"] > BOUND for one in found.values()))


def measured(strategy: dict[str, Any], rounds: int) -> dict[str, Any]:
    """One job's figures."""
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name) / "run", Path(name) / "times.json"
        plan = make_plan(Job.from_dict(job(strategy)), Hosts(ranks_per_host=1, rate=1e9), vocab=VOCAB)
        write_run(plan, folder)
        assert plan.job is not None
        agent = start_agent(folder, 0, 2, CollectorSettings.of(plan.job.run))
        script = str(HERE / "recorder_ranks.py")
        argv = [sys.executable, "-W", "ignore", script, str(out), str(rounds), str(folder), str(agent.pid)]
        try:
            with reserved_port() as port:
                run_to_the_end(local_start(argv, 2, port=port), 2, Path(name) / "logs")
        except BaseException:  # what it would still write nobody reads
            agent.kill()
            raise
        finally:
            largest = _end_agent(agent)
        result = json.loads(out.read_text())
        disk = sum(path.stat().st_size for path in (folder / "timeline").rglob("*.parquet"))
    wall, cpu, spent = (result.pop(name) for name in ("wall", "cpu", "agent_seconds"))
    step, processor = (statistics.median(off for _, off in pairs) for pairs in (wall, cpu))
    agent = statistics.mean(spent)
    return {
        "step_seconds": step, "processor_seconds": processor, "cost": added(wall)["median"] + agent / step / CORES,
        "agent": agent / step / CORES, "wall": added(wall), "processor": added(cpu),
        "processor_cost": added(cpu)["median"] + agent / processor, "agent_largest_mib": largest,
        "file_bytes_per_step": disk / result["steps"], **result,
    }  # fmt: skip


def added(pairs: Sequence[Sequence[float]]) -> dict[str, float]:
    """What recording adds in a round, relative to the median without: mean, median, and their standard errors
    (of the median by drawing rounds anew). pairs: on, off."""
    usual = statistics.median(off for _, off in pairs)
    found = [(on - off) / usual for on, off in pairs]
    draw = random.Random(0)
    medians = [statistics.median(draw.choices(found, k=len(found))) for _ in range(400)]
    return {
        "mean": statistics.mean(found), "mean_error": statistics.stdev(found) / math.sqrt(len(found)),
        "median": statistics.median(found), "median_error": statistics.stdev(medians), "of": len(found),
    }  # fmt: skip


def _end_agent(agent: subprocess.Popen[bytes]) -> float:
    """Its largest resident size, MiB."""
    assert agent.stdin is not None
    agent.send_signal(signal.SIGCONT)  # ranks that failed may have left it stopped
    agent.stdin.close()
    _, status, used = os.wait4(agent.pid, 0)
    agent.returncode = os.waitstatus_to_exitcode(status)
    return used.ru_maxrss / 1024


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    alone = one["alone_seconds_per_step"] / one["step_seconds"]
    wall, processor = one["wall"], one["processor"]
    return (
        f"{one['step_seconds'] * 1e3:.0f}", f"{one['cost']:+.2%}", f"{wall['median_error']:.2%}",
        f"{one['agent']:.2%}", f"{wall['mean']:+.2%}", f"{wall['mean_error']:.2%}",
        f"{one['processor_cost']:+.2%}", f"{processor['median_error']:.2%}", f"{alone:.2%}",
        f"{one['agent_start_seconds']:.2f}", str(one["records_per_step"]),
        f"{one['agent_first_mib']:.0f}, {one['agent_largest_mib']:.0f}", f"{one['file_bytes_per_step']:.0f}",
    )  # fmt: skip


if __name__ == "__main__":
    finish(main)
