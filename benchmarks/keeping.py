"""What all benchmarks do alike: ranks on a lab, one line for programs, a file that says where and how it was
measured."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, Any, NoReturn

from rich.console import Console
from rich.table import Table

from plait.core.base.errors import PlaitError
from plait.core.runs.channel import ENDINGS
from plait.lab import Lab, LabSpec
from plait.launch.local.local import RankStarter, run_ranks

SEGMENT = (
    1 << 18
)  # bytes: as few and as large pieces as can be, since each costs the emulation CPU time that computation wants too
HERE = Path(__file__).resolve().parent


def ranks_on_lab(
    spec: LabSpec, script: str, *args: str, prepare: Callable[[Lab], object] | None = None
) -> dict[str, Any]:
    """Run a script of this folder on every rank of a lab; what rank 0 wrote to the file it is given first.
    prepare: changes to the lab.

    If a rank fails, what all of them wrote goes to stderr first: their logs go with the lab.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, logs = Path(folder) / "times.json", Path(folder) / "logs"
        argv = [sys.executable, "-W", "ignore", str(HERE / script), str(out), *args]
        with Lab(spec, command=argv[:4]) as lab:
            if prepare:
                prepare(lab)
            try:
                run_to_the_end(partial(lab.popen, argv=argv), spec.world_size, logs)
            except PlaitError:
                for log in sorted(logs.iterdir()):
                    print(f"{log.name}:\n{log.read_text()[-3000:]}", file=sys.stderr)
                raise
        return json.loads(out.read_text())


Times = Mapping[str, Sequence[float]]
"""Seconds of every variant, a round after the other."""


def ratio(times: Times, above: str, below: str) -> float:
    """The median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(times[above], times[below], strict=True))


def rate_for(share: float, first: float, rounds: Sequence[int], run: Callable[[str, int], Times], *ends: str) -> str:
    """The link rate at which communication is about ``share`` of the step that waits for it: what it adds is
    inverse to the rate. run: seconds at a rate, in so many rounds; the second time near the rate that is
    looked for, since waiting costs a little that is no communication. ends: the variant that waits, and one
    that sends nothing."""
    rate = first
    for count in rounds:
        added = ratio(run(f"{round(rate)}mbit", count), *ends) - 1
        rate *= max(0.05, added * (1 - share) / share)
    return f"{max(1, round(rate))}mbit"


def run_to_the_end(start: RankStarter, world: int, logs: Path) -> None:
    """Run all ranks; a signal that ends them ends this process, too."""
    if status := run_ranks(start, world, logs, timeout=LONGEST):
        sys.exit(status)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A process that has ended: what it wrote, seconds by the clock and of processors, its largest resident
    size."""

    output: str
    seconds: float
    processor_seconds: float
    largest_mib: int


def timed(argv: Sequence[str]) -> Ran:
    """Run a command to its end. Raises CalledProcessError, with what it wrote to stderr.

    The kernel counts for this process alone, with those it waited for: RUSAGE_CHILDREN has the largest size
    of all children so far. A size begins with that of the process which starts it (getrusage(2)).
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(argv, stdout=out, stderr=errors)
        try:
            _, status, used = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        seconds, process.returncode = time.perf_counter() - start, os.waitstatus_to_exitcode(status)
        output, complaint = (_whole(file) for file in (out, errors))
    if process.returncode:
        print(complaint, file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, argv, output, complaint)
    return Ran(
        output=output,
        seconds=seconds,
        processor_seconds=used.ru_utime + used.ru_stime,
        largest_mib=used.ru_maxrss >> 10,
    )


def _whole(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


LONGEST = 3600.0
"""Seconds that a rank of a benchmark may be stopped."""


def make_parser(doc: str | None, *, rounds: int, quick: int = 2, cases: Iterable[str] = ()) -> argparse.ArgumentParser:
    """A parser of the options that all benchmarks have; ``case`` is None for all of them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument(
        "--rounds", type=int, default=rounds, help="interleaved rounds after one to warm up (default %(default)s)"
    )
    parser.add_argument("--quick", action="store_const", dest="rounds", const=quick, help=f"{quick} rounds")
    if names := tuple(cases):
        parser.add_argument("--case", action="append", choices=names, help="only this one; may be repeated")
    parser.add_argument("--save", help="also write the result, with machine and command, to this file")
    return parser


def _end(number: int, _frame: object) -> NoReturn:
    """End what this process has started, and itself: by default its children would go on."""
    for file in Path("/proc/self/task").glob("*/children"):
        for pid in file.read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    sys.exit(128 + number)


def finish(main: Callable[[], int]) -> NoReturn:
    """Exit with the status of ``main``, soon after SIGINT, SIGTERM or SIGHUP; a mistake is one paragraph."""
    for number in ENDINGS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        sys.exit(main())
    except PlaitError as error:
        print(f"{error}", file=sys.stderr)
        sys.exit(error.exit_status)


def machine() -> str:
    """What the figures were measured on."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "cpu",
    )
    cores = len(os.sched_getaffinity(0))  # nproc tells what OMP_NUM_THREADS says
    return f"{cores} cores of {model}, {platform.system()} {platform.release()}, Python {platform.python_version()}"


def _processor_time() -> tuple[float, float]:
    """Of all processors since the machine started: what its host gave to other machines instead, and all
    (proc(5), /proc/stat)."""
    ticks = [float(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[7], sum(ticks)


BEGUN, LOAD = _processor_time(), os.getloadavg()[0]
"""Processor time, and processes that wanted a processor in the minute before, when this benchmark began."""


def commit() -> str:
    """The commit that is checked out, with "+" if code or data were changed; "unknown" outside a clone."""

    def told(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(HERE), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        places = (str(HERE), str(HERE.parent / "plait"), str(HERE.parent / "specs"), f":(exclude){HERE / 'results'}")
        changed = told("status", "--porcelain", "--untracked-files=no", "--", *places)
        return told("rev-parse", "--short=12", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def stolen() -> float:
    """The share of the processors that other virtual machines on the same host took since this benchmark
    began."""
    taken, whole = (now - begun for now, begun in zip(_processor_time(), BEGUN, strict=True))
    return taken / max(1.0, whole)


def tell(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Show figures as they are, a row each, unless a program reads them; and ``keep`` them."""
    table = Table("what", "found")
    for key, value in result.items():
        table.add_row(key, str(value))
    if not options.json:
        Console().print(table)
    keep(result, options)


def _portable(word: str) -> str:
    """A word of a command without where this machine has the project, or what lies beside it."""
    path = Path(word)
    if not path.is_absolute():
        return word
    return str(path.relative_to(HERE.parent)) if path.is_relative_to(HERE.parent) else path.name


def keep_as(name: str, result: dict[str, Any]) -> None:
    """Print ``result``, and keep it as ``results/NAME.json``."""
    keep(result, argparse.Namespace(json=True, save=str(HERE / "results" / f"{name}.json")))


def keep(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Write ``result`` to the file that ``--save`` names, with date, machine, load, commit and command; with
    ``--json`` print it as one line."""
    share = stolen()
    if share > 0.01:
        print(
            f"other machines on this host took {share:.1%} of the processors meanwhile: expect noise", file=sys.stderr
        )
    if options.save:
        where = {
            "machine": machine(), "load_before": round(LOAD, 2), "stolen": round(share, 4), "commit": commit(),
            "command": " ".join(["python", *map(_portable, sys.argv)]),
        }  # fmt: skip
        kept = {"date": datetime.now(UTC).date().isoformat(), **where, **result}
        Path(options.save).parent.mkdir(parents=True, exist_ok=True)
        Path(options.save).write_text(json.dumps(kept, indent=2) + "\n")
    if options.json:
        print(json.dumps(result))
