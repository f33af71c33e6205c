"""Whether a job can run where it is to run, before any rank starts: enough memory, and a plan that can be
made.

Sizes that are out of all proportion are refused by closed forms, which take no longer for a trillion layers
than for ten; only then is anything walked layer by layer.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from plait.core.base.errors import InfeasiblePlan, JobError
from plait.core.base.text import in_bytes
from plait.core.job.spec import Job
from plait.core.model.precision import ITEMSIZE, master_size
from plait.core.step.memory.estimate import Estimate, estimate
from plait.core.step.step import Step
from plait.plan.make import job_step
from plait.plan.nearest import changes, more_ranks, nearest_change, would_fit

MOST_LAYERS = 1_000
"""More are no model that anybody trains; every list would be as long."""
MOST_SEGMENTS = 200_000
"""Layers times slices: how long one micro-batch's list gets."""
MOST_OPS = 1_000_000
"""Computations of a schedule, which is written out and checked op by op."""
KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations")


@dataclass(frozen=True)
class Room:
    """Memory that is there. each: bytes of every rank's own device; 0 where ``ranks`` ranks share ``shared``
    bytes of this host. what: whose memory it is."""

    each: int = 0
    shared: int = 0
    what: str = "this machine"

    def total(self, ranks: int) -> int:
        """For so many ranks together."""
        return self.each * ranks if self.each else self.shared

    def holds(self, found: Estimate) -> bool:
        """Whether every rank's memory is there."""
        if self.each:
            return found.most.memory.total <= self.each
        return found.bytes <= self.shared


def room(device: str, ranks: int, files: Path = Path("/")) -> Room | None:
    """What this machine has free for ``ranks`` on ``device`` (as ``run.device``); None where nothing tells.

    files: where /proc and /sys are. GPUs are asked through nvidia-smi, since this runs without torch.
    """
    found = gpus() if device != "cpu" else []
    if found and device == "shared":
        return Room(each=min(found) // -(-ranks // len(found)), what=f"each rank's part of {len(found)} GPUs")
    if found and (device == "cuda" or len(found) >= ranks):
        return Room(each=min(found), what=f"each of {len(found)} GPUs")
    if device in ("cuda", "shared"):
        return None
    free = _available(files / "proc/meminfo")
    limits = [free, *_left_of_groups(files / "sys/fs/cgroup", files / "proc/self/cgroup")]
    known = [limit for limit in limits if limit is not None]
    return Room(shared=min(known)) if known else None


def gpus() -> list[int]:
    """Bytes of every GPU's memory; this runs without torch, so nvidia-smi is asked."""
    if not (tool := shutil.which("nvidia-smi")):
        return []
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        return [int(line) << 20 for line in answer.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def check_device(device: str, ranks: int, devices: Path = Path("/dev")) -> None:
    """Raise JobError if ``ranks`` on this machine are to have GPUs (``run.device``) that it has not. devices:
    where drivers list them; GPUs that are there and that nobody counts are left to the ranks."""
    if device not in ("cuda", "shared"):
        return
    found = len(gpus())
    if not found and not any(next(devices.glob(name), None) for name in ("nvidia[0-9]*", "kfd", "dxg")):
        raise JobError(f"{device}, and this machine has no GPU", key="run.device", fix='Use "cpu" or "auto"')
    if device == "cuda" and 0 < found < ranks:
        problem = f"cuda, and this machine has {found} GPU{'s' * (found > 1)} for {ranks} ranks"
        raise JobError(problem, key="run.device", fix='Use fewer ranks, "shared" or "cpu"')


def _available(meminfo: Path) -> int | None:
    """MemAvailable."""
    for line in _text(meminfo).splitlines():
        key, _, rest = line.partition(":")
        if key == "MemAvailable":
            return int(rest.split()[0]) << 10
    return None


def _left_of_groups(mount: Path, own: Path) -> Iterator[int]:
    """What is left of the limits of this process's control groups, its own and those around it; v2 and v1."""
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        v1 = bool(controllers)
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
        base = mount / "memory" if v1 else mount
        inside = base / path.lstrip("/")
        for folder in {base, inside, *inside.parents}:
            if folder == base or base in folder.parents:
                limit, used = (_text(folder / name).strip() for name in names)
                if limit.isdigit() and used.isdigit():
                    yield max(0, int(limit) - int(used) + _cached(folder / "memory.stat"))


def _cached(stat: Path) -> int:
    """Bytes of files that a group's kernel may drop."""
    found = dict(line.split(maxsplit=1) for line in _text(stat).splitlines() if " " in line)
    return int(found.get("inactive_file", found.get("total_inactive_file", 0)))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def estimate_in(step: Step, there: Room | None, *, traffic: bool = True) -> Estimate:
    """Memory and traffic of a step whose ranks have a room. there: None where it is not known; ranks then
    compute as on processors. traffic: as of ``estimate``."""
    return estimate(step, gpu=bool(there and there.each), traffic=traffic)


def least_bytes(job: Job, vocab: int) -> int:
    """No strategy needs less of all ranks together: the states once, the residual stream of one micro-batch
    once. In closed form."""
    model, itemsize = job.model_spec(vocab), ITEMSIZE[job.train.precision]
    master = master_size(itemsize)
    states = model.num_parameters * (itemsize + master * (3 + (master != itemsize)))
    tokens = job.micro_batch * job.data.sequence_length
    return states + (tokens * model.hidden * itemsize * model.num_layers >> model.levels)


def check_size(job: Job, vocab: int, there: Room | None) -> None:
    """Raise InfeasiblePlan or JobError for sizes that are out of all proportion."""
    model, needed = job.model_spec(vocab), least_bytes(job, vocab)
    if model.num_layers > MOST_LAYERS and there and needed > there.total(job.world_size):
        raise InfeasiblePlan(
            f"The job cannot fit: parameters, gradients, optimizer states and one micro-batch of a model of "
            f"{_count(model.num_parameters)} parameters need at least {in_bytes(needed)} over all ranks, and there are "
            f"{in_bytes(there.total(job.world_size))} ({there.what}). Use a smaller model"
            f"{' or more ranks' if there.each else ''}."
        )
    step = job.train.global_batch_size * job.data.sequence_length * 16  # tokens and targets, which every rank draws
    if there and not there.each and step * job.world_size > there.shared:
        raise InfeasiblePlan(
            f"The job cannot fit: the tokens of a step of {job.train.global_batch_size} sequences of "
            f"{job.data.sequence_length} take {in_bytes(step)} on each of {job.world_size} ranks, and there are "
            f"{in_bytes(there.shared)} ({there.what}). Use a smaller train.global_batch_size."
        )
    if model.num_layers > MOST_LAYERS:
        problem = f"{model.num_layers} layers are more than {MOST_LAYERS}"
        raise JobError(problem, key="model.num_layers", fix=f"Use at most {MOST_LAYERS}")
    strategy = job.base_strategy
    if model.num_layers * strategy.p1 * strategy.p2 > MOST_SEGMENTS:
        raise JobError(
            f"{model.num_layers} layers of {strategy.p1} x {strategy.p2} slices are more than {MOST_SEGMENTS}",
            key="strategy.slices",
            fix="Use fewer slices",
        )
    stages = job.strategy.pp * job.strategy.virtual_stages
    if job.num_micro_batches * stages > MOST_OPS:
        raise JobError(
            f"{job.num_micro_batches} micro-batches on {stages} stages: a schedule has at most {MOST_OPS} forwards",
            key="train.micro_batch_size",
            fix="Use larger micro-batches or a smaller train.global_batch_size",
        )


def check_fits(job: Job, found: Estimate, vocab: int, there: Room) -> None:
    """Raise InfeasiblePlan if the job's ranks need more than is there: how much, of what, and what would
    fit."""
    if there.holds(found):
        return
    most = found.most
    if there.each:
        has = f"{there.what} has {in_bytes(there.each)}"
    else:
        has = f"{in_bytes(there.shared)} are available on {there.what}, where all {found.world_size} ranks would need "
        has += in_bytes(found.bytes)

    def fits(other: Job) -> bool:
        return there.holds(estimate_in(job_step(other, vocab), there))

    raise InfeasiblePlan(
        f"The job cannot fit: a rank of place {most.index} of the pipeline needs {in_bytes(most.memory.total)} "
        f"({by_kind(asdict(most.memory))}); {has}. {advice(job, vocab, fits, own_devices=bool(there.each))}"
    )


def by_kind(memory: Mapping[str, int]) -> str:
    """Bytes of ``KINDS`` as words, the largest first.

    >>> by_kind({"parameters": 1 << 30, "gradients": 2 << 30, "buffers": 0})
    'gradients 2 GiB, parameters 1 GiB'
    """
    kinds = sorted((kind for kind in KINDS if memory.get(kind)), key=lambda kind: -memory[kind])
    return ", ".join(f"{kind} {in_bytes(memory[kind])}" for kind in kinds)


def advice(job: Job, vocab: int, fits: Callable[[Job], bool], *, own_devices: bool) -> str:
    """Return the nearest of a few changes with which the job fits, as a sentence.

    own_devices: whether ranks have a device each, so that more of them have more memory.
    """

    def tried_fits(other: Job) -> bool:
        check_size(other, vocab, None)  # of millions of micro-batches no schedule is written out
        return fits(other)

    tried = chain(changes(job), more_ranks(job) if own_devices else ())
    if change := nearest_change(job, tried, tried_fits):
        return would_fit(change)
    smaller = "a smaller model, shorter sequences or smaller micro-batches"
    return f"Use {smaller}{', or many more ranks' if own_devices else ', or more machines'}."


def _count(number: int) -> str:
    if number >= 1e15:
        return f"{number:.3g}"
    return f"{number / 1e9:.4g} billion" if number >= 1e9 else f"{number / 1e6:.4g} million"
