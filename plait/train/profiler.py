"""Run one rank of a measurement, under torchrun's variables, with any launcher:

    python -m plait.train.profiler --out profile.json [--seconds N] [--job JOB.toml]
    python -m plait.train.profiler --placement --nodes-per-minipod 16 --out placement-profile.json

Rank 0 writes the profile and prints what is being measured. Nothing is written before the end, so a
rank may be stopped at any time.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from plait.core.base.env import RankEnv, take_launcher
from plait.core.base.errors import PlaitError, naming_extras
from plait.core.base.files import explained
from plait.core.base.process import die_with_parent, usable_cores
from plait.core.job.settings import RunSection
from plait.core.job.spec import Job
from plait.core.runs.channel import Channel
from plait.train.machine.control import Control
from plait.train.machine.rank_process import ignore_print_errors, run_and_end

IMPORTS = ("plait.train.comm.world", "plait.train.profile.measure", "plait.train.report")
"""Modules that every rank imports before it measures."""


def main() -> int:
    """Run the measurement; return the exit status."""
    started = time.monotonic()
    die_with_parent()
    ignore_print_errors()
    descriptor = take_launcher()
    with Control(Channel.inherited(descriptor) if descriptor is not None else None) as control:
        try:
            with naming_extras("a rank"):
                return _run(RankEnv.read(), control, _arguments(), started)
        except PlaitError as error:
            control.report_failure(error)
            return error.exit_status


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m plait.train.profiler", description="One rank that measures.")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes the profile")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--job", type=Path, help="whose layer, precision and device are measured")
    parser.add_argument("--nodes-per-minipod", type=int, default=0)
    parser.add_argument("--placement", action="store_true", help="measure what spreading over minipods costs")
    parser.add_argument("--quiet", action="store_true")
    return parser.parse_args()


def _run(rank: RankEnv, control: Control, options: argparse.Namespace, started: float) -> int:
    job = Job.read(options.job) if options.job else None
    control.set_activity("importing", patient=True)
    from plait.train.comm.world import joined
    from plait.train.profile.measure import MeasureRequest, measure_profile
    from plait.train.screen import Screen

    cores = usable_cores()  # before this rank takes some for itself
    screen = Screen(sys.stdout)

    def say(what: str) -> None:
        control.set_activity(f"measuring: {what}")
        if rank.rank == 0 and not options.quiet:
            line = f"{time.monotonic() - started:4.0f} s of about {options.seconds:.0f}  {what}"
            screen.live(line[: (screen.width or 80) - 1])

    with joined(rank, job.run if job else RunSection(), control) as device:
        if options.placement:
            from plait.train.profile.measure import measure_spreads

            pod, deadline = options.nodes_per_minipod, time.monotonic() + options.seconds
            profile = measure_spreads(pod, rank, device, deadline=deadline, cores=cores, say=say)
        else:
            deadline = started + options.seconds
            order = MeasureRequest(
                seconds=options.seconds,
                nodes_per_minipod=options.nodes_per_minipod,
                **(_request_fields(job) if job else {}),
            )
            profile = measure_profile(order, rank, device, deadline=deadline, cores=cores, say=say)
        screen.live("")
        if rank.rank == 0:
            with explained(f"{options.out} cannot be written", fix="Choose another with --out"):
                profile.write(options.out)
    return 0


def _request_fields(job: Job) -> dict[str, Any]:
    """Return the parts of a ``MeasureRequest`` that a job decides: its model at its sequence
    length, its precision, and the sequences per micro-batch of one replica."""
    from plait.train.data.tokenizer import load_tokenizer

    vocab = load_tokenizer(job.data.tokenizer).vocab
    model = replace(job.model_spec(vocab), max_sequence=job.data.sequence_length)
    batch = max(1, job.micro_batch // max(dp for dp, _ in job.degrees))
    return {"model": model, "batch": batch, "precision": job.train.precision}


if __name__ == "__main__":
    run_and_end(main)
