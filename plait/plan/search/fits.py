"""Checks before any rank starts that a job can run on its machine: enough memory, and a plan that
can be made.

Closed forms refuse sizes out of all proportion, in the same time for a trillion layers as for ten.
Only then is anything traced layer by layer.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from plait.core.base.errors import InfeasiblePlan, JobError
from plait.core.base.text import in_bytes
from plait.core.job.spec import Job
from plait.core.model.precision import ITEMSIZE, master_size
from plait.core.step.memory.estimate import Estimate, estimate
from plait.core.step.step import Step
from plait.plan.explain.moves import moves_together, nearest_change, would_fit
from plait.plan.make import job_step

MOST_LAYERS = 1_000
"""Largest number of layers: no real model has more, and every instruction list would be as long."""
MOST_SEGMENTS = 200_000
"""Largest number of layers times slices: the length of one micro-batch's instruction list."""
MOST_OPS = 1_000_000
"""Largest number of computations in a schedule, which is generated and checked op by op."""
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations")


@dataclass(frozen=True)
class AvailableMemory:
    """Memory available to ranks, in bytes. each: of every rank's own device; 0 if all ranks of this
    host share ``shared`` bytes. what: description of the memory's owner."""

    each: int = 0
    shared: int = 0
    what: str = "this machine"

    def total(self, ranks: int) -> int:
        """Return the bytes for ``ranks`` ranks together."""
        return self.each * ranks if self.each else self.shared

    def holds(self, predicted: Estimate) -> bool:
        """Return True if the memory suffices for every rank."""
        if self.each:
            return predicted.most.memory.total <= self.each
        return predicted.bytes <= self.shared


def room(device: str, ranks: int, files: Path = Path("/")) -> AvailableMemory | None:
    """Return the free memory of this machine for ``ranks`` ranks on ``device`` (as ``run.device``);
    None if unknown.

    files: the folder with /proc and /sys. nvidia-smi reports the GPUs, since this code runs without
    torch.
    """
    found = gpus() if device != "cpu" else []
    if found and device == "shared":
        return AvailableMemory(
            each=min(found) // -(-ranks // len(found)), what=f"each rank's part of {len(found)} GPUs"
        )
    if found and (device == "cuda" or len(found) >= ranks):
        return AvailableMemory(each=min(found), what=f"each of {len(found)} GPUs")
    if device in ("cuda", "shared"):
        return None
    free = _available(files / "proc/meminfo")
    limits = [free, *_left_of_groups(files / "sys/fs/cgroup", files / "proc/self/cgroup")]
    known = [limit for limit in limits if limit is not None]
    return AvailableMemory(shared=min(known)) if known else None


def gpus() -> list[int]:
    """Return the bytes of every GPU's memory, as reported by nvidia-smi, since this code runs
    without torch."""
    if not (tool := shutil.which("nvidia-smi")):
        return []
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        return [int(line) << 20 for line in answer.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def check_device(device: str, ranks: int, devices: Path = Path("/dev"), *, fix: str = 'Use "cpu" or "auto"') -> None:
    """Raise JobError if ``ranks`` ranks on this machine need GPUs (``run.device``) that it lacks.
    devices: the folder of device files. fix: advice where there is no GPU. If nvidia-smi lists no
    GPUs although there are some, the ranks check."""
    if device not in ("cuda", "shared"):
        return
    found = len(gpus())
    if not found and not any(next(devices.glob(name), None) for name in ("nvidia[0-9]*", "kfd", "dxg")):
        raise JobError(f"{device}, but this machine has no GPU", key="run.device", fix=fix)
    if device == "cuda" and 0 < found < ranks:
        problem = f"cuda, but this machine has {found} GPU{'s' * (found > 1)} for {ranks} ranks"
        raise JobError(problem, key="run.device", fix='Use fewer ranks, "shared" or "cpu"')


def _available(meminfo: Path) -> int | None:
    """Return MemAvailable in bytes; None if it is missing."""
    for line in _text(meminfo).splitlines():
        key, _, rest = line.partition(":")
        if key == "MemAvailable":
            return int(rest.split()[0]) << 10
    return None


def _left_of_groups(mount: Path, own: Path) -> Iterator[int]:
    """Yield the bytes still free in each control group of this process (cgroups v1 and v2), its own
    and their parents. mount: where control groups are mounted. own: /proc/self/cgroup."""
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
    """Return the bytes of file cache that the kernel may drop from a control group."""
    found = dict(line.split(maxsplit=1) for line in _text(stat).splitlines() if " " in line)
    return int(found.get("inactive_file", found.get("total_inactive_file", 0)))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def estimate_in(step: Step, available: AvailableMemory | None, *, traffic: bool = True) -> Estimate:
    """Return the memory and traffic of a step. available: the available memory; None if unknown,
    which counts as ranks on CPUs. traffic: as in ``estimate``."""
    return estimate(step, gpu=bool(available and available.each), traffic=traffic)


def least_bytes(job: Job, vocab: int) -> int:
    """Return a lower bound on the bytes of all ranks together under any strategy: parameters,
    gradients and optimizer states once, and the residual stream of one micro-batch once."""
    model, itemsize = job.model_spec(vocab), ITEMSIZE[job.train.precision]
    master = master_size(itemsize)
    states = model.num_parameters * (itemsize + master * (3 + (master != itemsize)))
    tokens = job.micro_batch * job.data.sequence_length
    return states + (tokens * model.hidden * itemsize * model.num_layers >> model.levels)


def check_size(job: Job, vocab: int, available: AvailableMemory | None) -> None:
    """Raise InfeasiblePlan if the job cannot fit under any strategy, JobError if it has too many
    layers, slices or micro-batches to be planned. available: None if unknown."""
    model, needed = job.model_spec(vocab), least_bytes(job, vocab)
    if model.num_layers > MOST_LAYERS and available and needed > available.total(job.world_size):
        raise InfeasiblePlan(
            f"The job cannot fit: parameters, gradients, optimizer states and one micro-batch of a model of "
            f"{_count(model.num_parameters)} parameters need at least {in_bytes(needed)} over all ranks, but only "
            f"{in_bytes(available.total(job.world_size))} are available ({available.what}). Use a smaller model"
            f"{' or more ranks' if available.each else ''}."
        )
    step = job.train.global_batch_size * job.data.sequence_length * 16  # tokens and targets, which every rank samples
    if available and not available.each and step * job.world_size > available.shared:
        raise InfeasiblePlan(
            f"The job cannot fit: the tokens of a step of {job.train.global_batch_size} sequences of "
            f"{job.data.sequence_length} take {in_bytes(step)} on each of {job.world_size} ranks, but only "
            f"{in_bytes(available.shared)} are available ({available.what}). Use a smaller train.global_batch_size."
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
            f"{job.num_micro_batches} micro-batches on {stages} stages exceed the {MOST_OPS} forwards of a schedule",
            key="train.micro_batch_size",
            fix="Use larger micro-batches or a smaller train.global_batch_size",
        )


def check_fits(job: Job, needed: Estimate, vocab: int, available: AvailableMemory) -> None:
    """Raise InfeasiblePlan if the job's ranks need more memory than there is. The message says how
    much, of what kind, and which change would fit."""
    if available.holds(needed):
        return
    most = needed.most
    if available.each:
        has = f"{available.what} has {in_bytes(available.each)}"
    else:
        has = (
            f"{in_bytes(available.shared)} are available on {available.what}, where all "
            f"{needed.world_size} ranks would need "
        )
        has += in_bytes(needed.bytes)

    def fits(other: Job) -> bool:
        return available.holds(estimate_in(job_step(other, vocab), available))

    raise InfeasiblePlan(
        f"The job cannot fit: a rank with pp rank {most.index} needs {in_bytes(most.memory.total)} "
        f"({by_kind(asdict(most.memory))}); {has}. {advice(job, vocab, fits, own_devices=bool(available.each))}"
    )


def by_kind(memory: Mapping[str, int]) -> str:
    """Return bytes by kind (``MEMORY_KINDS``) as text, the largest first; kinds with 0 bytes are
    left out.

    >>> by_kind({"parameters": 1 << 30, "gradients": 2 << 30, "buffers": 0})
    'gradients 2 GiB, parameters 1 GiB'
    """
    kinds = sorted((kind for kind in MEMORY_KINDS if memory.get(kind)), key=lambda kind: -memory[kind])
    return ", ".join(f"{kind} {in_bytes(memory[kind])}" for kind in kinds)


def advice(job: Job, vocab: int, fits: Callable[[Job], bool], *, own_devices: bool) -> str:
    """Return the nearest of a few changes with which the job fits, as a sentence.

    own_devices: True if each rank has its own device, so that more ranks have more memory.
    """

    def tried_fits(other: Job) -> bool:
        check_size(other, vocab, None)  # no schedule of millions of micro-batches is generated
        return fits(other)

    if change := nearest_change(job, moves_together(job, more=own_devices), tried_fits):
        return would_fit(change)
    smaller = "a smaller model, shorter sequences or smaller micro-batches"
    return f"Use {smaller}{', or many more ranks' if own_devices else ', or more machines'}."


def _count(number: int) -> str:
    if number >= 1e15:
        return f"{number:.3g}"
    return f"{number / 1e9:.4g} billion" if number >= 1e9 else f"{number / 1e6:.4g} million"
