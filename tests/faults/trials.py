"""Trials: a fault at a random step of a job of pipelines, replicas and tensor parallelism on a lab
of four hosts with two ranks each, and whether it was named, in time, and the run then ended as if
nothing had happened."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from plait.api.places.lab import LabTarget
from plait.api.ranks import RankSet
from plait.core.job.plan import Plan
from plait.core.runs.attempts import Attempt, read_attempts
from plait.core.runs.evidence import FILE, FIRST, Verdict, read_hang
from plait.diagnose.measured.reading import read_run
from plait.diagnose.report import explain
from plait.diagnose.verdicts.stragglers import Straggler
from plait.lab import running
from plait.lab.network import LabNetwork
from tests.faults.runs import ALLOWED, DEADLINE, MIXED, ROOT, environment, plan, until

STEPS, EVERY = 40, 5
LARGER = ("model.hidden=128", "data.sequence_length=64")
"""For what is told by how long things take: of the tiny job's all is shorter than the machine's
whims."""
LARGER_MESSAGES = ("model.hidden=128", "data.sequence_length=256")
"""Of 128 KiB: what TCP hands a link at once, 64 KiB, passes a slow one of the lab without a
delay."""
CAUSES = {
    "kill": {"killed"}, "stop": {"stopped"}, "loop": {"host code"}, "sleep": {"host code"}, "hold": {"host code"},
    "size": {"mismatch"}, "dtype": {"mismatch"}, "order": {"mismatch"}, "deadlock": {"deadlock"}, "cut": {"cut off"},
}  # fmt: skip
"""Faults that end an attempt, and as what they are to be named."""
HOST = tuple(kind for kind, causes in CAUSES.items() if "host code" in causes)
KINDS = (*CAUSES, "slow link", "slow10", "slow30", "full disk", "corrupt")
TIES = ("no majority", "Nothing tells which")
"""How a verdict says that it may be any of those that it names."""
ROOM = 256 << 20
"""Bytes of the disk that fills."""


class Trial(NamedTuple):
    """named: by what was found, as it should. seconds: until the failed attempt was over, None
    where none failed, within: and in how many it had to be. lost: steps that were done again; late:
    those of them that were done while the checkpoint after the last whole one was still being
    written. same: whether the last loss is that of an undisturbed run. said: what was found. tie:
    not named alone, but told as one of two ends of a path."""

    kind: str
    where: str
    named: bool
    seconds: float | None
    within: float
    lost: int
    late: int
    same: bool
    said: str
    tie: bool = False

    @property
    def right(self) -> bool:
        """Whether all is as it should be: no more than an interval lost, and what was done while
        the checkpoint at its end was written."""
        return self.named and self.harmless

    @property
    def harmless(self) -> bool:
        """Whether the run got over it as it should."""
        soon = (self.seconds or 0) <= self.within
        return self.same and soon and self.lost - self.late <= self.every

    @property
    def every(self) -> int:
        """Steps that may be lost: those of an interval, of two where the newest checkpoint was
        damaged."""
        return 2 * EVERY if self.kind == "corrupt" else EVERY


@dataclass
class Run:
    """A run on the lab. hosts: with spares. every: steps between checkpoints."""

    folder: Path
    hosts: int = MIXED.hosts
    steps: int = STEPS
    every: int = EVERY
    settings: tuple[str, ...] = ()
    fault: str = ""

    def train(self, harm: Callable[[Run, LabNetwork], object] | None = None, after: int = 0, disk: int = 0) -> None:
        """To the end. harm: what happens once ``after`` steps are done. disk: bytes of the run's,
        if it has one of its own."""
        self.folder.mkdir(parents=True)
        settings = (f"train.checkpoint_every={self.every}", "train.log_every=1", *self.settings)
        with own_disk(self.folder / "runs", disk):
            home = plan(self.folder, MIXED, steps=self.steps, settings=settings)
            ranks = RankSet(
                module="tests.faults.faulty", arguments=[str(home)], world=MIXED.spec.world_size, logs=home / "logs",
                timeout=60, silent=True, folder=home, deadline=DEADLINE, first_deadline=FIRST * DEADLINE, restarts=3,
                plan=Plan.read(home / "plan.json"),
            )  # fmt: skip
            if harm:
                threading.Thread(target=self._later, args=(harm, after), daemon=True).start()
            more = {"FAULT": self.fault} if self.fault else {}
            with environment(PYTHONPATH=str(ROOT), XDG_RUNTIME_DIR=str(self.folder), **more):
                self.status = LabTarget(replace(MIXED.spec, hosts=self.hosts)).run(ranks)
            self.read()

    def _later(self, harm: Callable[[Run, LabNetwork], object], after: int) -> None:
        until(self.home, after)
        (self.home / "fault").write_text(str(time.time()))
        harm(self, next(entry for entry in running() if entry.pid == os.getpid()).network)

    def read(self) -> None:
        """What it left, as long as its disk is there."""
        lines = (self.home / "metrics.jsonl").read_text().splitlines()
        self.loss = lines[-1].partition('"loss"')[2].partition(",")[0]
        self.attempts = read_attempts(self.home)
        self.logs = "".join(log.read_text(errors="replace") for log in (self.home / "logs").rglob("rank-*.log"))
        self.began = float((self.home / "fault").read_text()) if (self.home / "fault").exists() else 0.0

    @property
    def home(self) -> Path:
        return self.folder / "runs" / "job"

    @property
    def verdict(self) -> Verdict | None:
        """Of the first attempt, why it hung."""
        path = self.home / "logs" / "attempt-1" / FILE
        return read_hang(path)[0] if path.exists() else None


@contextmanager
def own_disk(folder: Path, size: int) -> Generator[None]:
    """A file system of so many bytes for a folder; 0: none."""
    folder.mkdir()
    if size:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        if size:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def trial(kind: str, seed: int, folder: Path, undisturbed: Callable[[tuple[str, ...]], str]) -> Trial:
    """undisturbed: the last loss of a run with these settings to which nothing happens."""
    draw = random.Random(f"{kind}/{seed}")
    rank, host, step = draw.randrange(8), draw.randrange(4), draw.randint(1, 15)
    settings = LARGER_MESSAGES if kind == "slow link" else LARGER if kind.startswith("slow") else ()
    run, tie = Run(folder, settings=settings), False
    if kind == "cut":
        run = Run(folder, hosts=MIXED.hosts + 1)
        run.train(lambda _, network: network.cut(host), after=step)
        named, said = _cut(run, host)
    elif kind == "slow link":
        run.train(lambda _, network: network.slow(host, "20mbit"), after=step)
        named, said = _straggler(run, lambda one: one.what == "slow link" and one.hosts == (f"host{host}",))
        both = _straggler(run, lambda one: one.where.startswith("between ") and f"host{host}" in one.hosts)
        tie = both[0]
    elif kind == "full disk":
        run.train(_fill, after=step, disk=ROOM)
        named, said = "no room for the checkpoint" in run.logs, _line(run.logs, "no room")
    elif kind == "corrupt":
        # Late enough that there are two: of a run whose only one is damaged none is left.
        run = Run(folder, fault=f"kill {rank} {step + 3 * EVERY}")
        run.train(_corrupt)
        named, said = "is used instead" in run.logs, _line(run.logs, "is used instead")
    else:
        run = Run(folder, settings=settings, fault=f"{kind} {rank} {step}")
        run.train()
        slow = kind.startswith("slow")
        named, said = _straggler(run, lambda one: one.ranks == (rank,)) if slow else _hang(run, kind, rank)
    first, *others = run.attempts
    lost, late = lost_by(first, others[0]) if others else (0, 0)
    # What a rank does for the first time may take longer: a step, and a step after a checkpoint.
    new = kind in HOST and step in (1, EVERY + 1)
    within = (FIRST if new else 1) * DEADLINE + ALLOWED
    seconds = (first.ended or 0.0) - run.began if others else None
    where = f"host {host}" if kind in ("cut", "slow link") else f"rank {rank}"
    same = run.status == 0 and run.loss == undisturbed(settings)
    named = named and _outcomes(kind, run.attempts)
    return Trial(kind, f"{where} step {step}", named, seconds, within, lost, late, same, said, tie)


def lost_by(failed: Attempt, after: Attempt) -> tuple[int, int]:
    """Steps that are done again after a failure, and how many of them were done while a checkpoint
    that was not whole in the end was being written."""
    late = failed.step - failed.writing if failed.writing > after.resumed else 0
    return failed.step - after.resumed, late


def _outcomes(kind: str, attempts: list[Attempt]) -> bool:
    """Whether the run was started again where it had to be, once, and nowhere else."""
    fails = kind in CAUSES or kind == "corrupt"
    return [one.outcome for one in attempts] == (["failed", "finished"] if fails else ["finished"])


# ---- what happens to it ----


def _fill(run: Run, network: LabNetwork) -> None:
    """The disk is full until somebody has said so."""
    ballast = run.home / "ballast"
    with ballast.open("wb") as file:
        for size in (1 << 22, 1 << 12):  # at once, and then to the last page
            with suppress(OSError):
                while True:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)
    end, log = time.monotonic() + 60, run.home / "logs" / "rank-0.log"
    while time.monotonic() < end and log.exists() and "no room" not in log.read_text(errors="replace"):
        time.sleep(0.1)
    ballast.unlink()


def _corrupt(run: Run, network: LabNetwork) -> None:
    """Of the newest checkpoint a bit is turned round, as soon as a rank was killed."""
    while not (run.home / "logs" / "attempt-1").exists():  # its ranks have ended, others start in a second
        time.sleep(0.02)
    newest = max(path.parent for path in run.home.glob("checkpoints/step-*/manifest.json"))
    file = random.Random(run.fault).choice(sorted(newest.glob("*.safetensors")))
    whole = bytearray(file.read_bytes())
    whole[-len(whole) // 3] ^= 4
    file.write_bytes(whole)


# ---- what was found ----


def _hang(run: Run, kind: str, rank: int) -> tuple[bool, str]:
    first = run.attempts[0]
    tie = any(said in first.why for said in TIES)
    named = first.ranks == (rank,) or (rank in first.ranks and tie)
    return named and first.cause in CAUSES[kind], f"{first.cause} {first.ranks}{' tie' if tie else ''}"


def _cut(run: Run, host: int) -> tuple[bool, str]:
    first, verdict = run.attempts[0], run.verdict
    hosts = verdict.hosts if verdict else ()
    return first.cause in CAUSES["cut"] and hosts == (f"host {host}",), f"{first.cause} {hosts}"


def _straggler(run: Run, right: Callable[[Straggler], bool]) -> tuple[bool, str]:
    """Whether one was named, and nobody else."""
    found = explain(read_run(run.home).recording, "run")
    told = [f"{one.what} {one.ranks} {one.effect:+.0%} z {one.z:.1f}" for one in found.stragglers]
    spread = found.verdicts.spread
    return [right(one) for one in found.stragglers] == [True], "; ".join(told) or (
        f"nobody: rank {spread.peer} {spread.effect:+.1%} z {spread.z:.1f} of {spread.named_from:.1f}"
    )


def _line(text: str, words: str) -> str:
    return next((line.strip()[:120] for line in text.splitlines() if words in line), "nothing said")


def undisturbed_in(folder: Path) -> Callable[[tuple[str, ...]], str]:
    """Last losses of runs to which nothing happens; each is run once."""
    known: dict[tuple[str, ...], Any] = {}

    def loss(settings: tuple[str, ...]) -> str:
        if settings not in known:
            run = Run(folder / f"undisturbed-{len(known)}", settings=settings)
            run.train()
            known[settings] = run.loss
        return known[settings]

    return loss
