"""The sections of a job file, each key with its type, default and meaning.

``docs/job.md`` is made from these. Values are taken as they are: no text for a number, no number for a truth
value, nothing that is not finite. Rules about several values at once stand in ``Job.check``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import BeforeValidator, Field, field_validator

from plait.core.base.codec.data import Also, Count, Natural, NotNegative, OrAuto, Positive, Section, Such, Texts
from plait.core.base.errors import JobError
from plait.core.base.files import check_path
from plait.core.base.numbers import MOST_SECONDS
from plait.core.job.constraint import MARGINS
from plait.core.job.data_settings import BYTES, STDLIB, DataSection, Seed, SourceSection
from plait.core.job.one_line import one_line
from plait.core.job.train_settings import MuonSection, OnNan, SgdSection, TrainSection
from plait.core.model.precision import SmallType
from plait.core.parallel.strategy import Overlap, Recompute, ShardOverlap
from plait.core.runs.evidence import FIRST, LAST

__all__ = [
    "BYTES",
    "PLANNABLE",
    "STDLIB",
    "ClusterSection",
    "ContextKind",
    "DataSection",
    "MuonSection",
    "OnNan",
    "OverlapKinds",
    "PlanSection",
    "RecomputeLayers",
    "RunSection",
    "Seed",
    "SgdSection",
    "Shard",
    "Slices",
    "SourceSection",
    "StrategySection",
    "TrainSection",
]


class Slices(Section):
    """Domino's slices."""

    batch: Count = 1
    """Slices of the batch."""
    columns: Count = 1
    """Column slices of every second weight."""


class Shard(Section):
    """How many of the dp x cp ranks that hold the same weights share out what."""

    params: Count = 1
    """Ranks that share out the parameters."""
    grads: Count = 1
    """Ranks that share out the gradients."""
    optim: Count = 1
    """Ranks that share out the optimizer states."""
    secondary: Natural = 0
    """Neighbours that keep a second copy of the parameters for backward gathers (ZeRO++'s hpZ). 0: none."""


class ContextKind(Section):
    """Both at once: rings, each of Ulysses groups; cp is their product."""

    ulysses: Count
    """Ranks that exchange heads."""
    ring: Count
    """Ranks that pass keys and values on."""


class RecomputeLayers(Section):
    """Recomputation of some layers."""

    kind: Recompute
    """What is computed again, as ``recompute``."""
    layers: Natural
    """So many first layers of every stage."""


def _no_overlap(word: object) -> object:
    return "sync" if word == "off" else word


OverlapWord = Annotated[Overlap, Also("off"), BeforeValidator(_no_overlap)]


class OverlapKinds(Section):
    """Tensor parallelism and sharding apart."""

    tp: OverlapWord = "domino"
    """Tensor parallelism's, as ``overlap``."""
    shard: ShardOverlap | Literal["auto"] = "both"
    """Which of sharding's communication overlaps computation: of the forward, the backward, both or none;
    ``auto``: the fastest of timed steps."""


Degrees = Count | Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]


class StrategySection(Section):
    """How the model is split, and how its communication is hidden. A key that takes ``auto`` may be left to
    the planner. A job without this table is planned whole, and a setting on the command line changes its own
    key alone: the others stay the planner's. A table that is there is not searched beyond its ``auto``: what
    it leaves out has its default. Where the keys without which no rank can start are given, ``slices`` and
    ``sequence_parallel`` are not predicted but timed before training, as many candidates as can pay in the
    steps of the run."""

    tp: OrAuto[Degrees] = 1
    """Tensor-parallel degree; a list gives every pipeline stage's ranks their own."""
    dp: OrAuto[Degrees] = 1
    """Data-parallel degree; a list likewise."""
    pp: OrAuto[Count] = 1
    """Pipeline-parallel degree."""
    schedule: OrAuto[str] = "eager-1f1b"
    """A name that ``plait schedule`` knows, or a file with a schedule."""
    virtual_stages: OrAuto[Count] = 1
    """Stages that every pipeline rank holds."""
    slack: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Slack of slack-1f1b at every boundary between stages; measured before training if empty."""
    stage_layers: OrAuto[Annotated[tuple[Count, ...], Field(strict=False)]] = ()
    """Layers of every stage; as equal as can be if empty."""
    shard: OrAuto[str | Shard] = "ddp"
    """Sharded data parallelism over dp x cp: ``ddp``, ``zero1``, ``zero2``, ``zero3`` (``fsdp``), or
    factors."""
    cp: OrAuto[Count] = 1
    """Context-parallel degree: ranks that share every sequence."""
    ep: OrAuto[Count] = 1
    """Expert-parallel degree: neighbours of dp x cp that share out the experts of every layer. Of models with
    experts, which can be planned for and not trained yet."""
    cp_comm_type: OrAuto[Literal["ulysses", "ring"] | ContextKind] = "ulysses"
    """How attention gets the whole sequence: heads are exchanged, keys and values go round a ring, both."""
    overlap: OrAuto[OverlapWord | OverlapKinds] = "domino"
    """``domino``: slices hide each other's collectives, in an order that is searched; ``fixed``: in the order
    of Domino's authors; ``async``: Megatron-LM's overlap; ``off``, ``sync``: none; ``no-communication`` plans
    a step without any, and is never trained. ``auto`` chooses ``domino``. A word alone is tensor
    parallelism's; sharding's communication then overlaps computation unless it is ``off``."""
    slices: Literal["auto"] | Slices = "auto"
    """Domino's slices, such as ``{ batch = 2, columns = 1 }``."""
    sequence_parallel: bool | Literal["auto"] = False
    """Megatron's, inside tensor parallelism: all-gather and reduce-scatter instead of all-reduce."""
    recompute: OrAuto[Recompute | RecomputeLayers] = "none"
    """What the backward computes again instead of keeping it: what is cheap, all but two streams a layer, or
    all but one (which repeats a reduction)."""
    compile: bool | Literal["auto"] = False
    """Compile what lies between matrix products (norms, dropout, activations, positions, loss) with
    torch.compile. ``auto``: if timed steps are faster so, and the run is long enough for it to pay. Not
    predicted: on one H200 a step of a model of 1.2B parameters takes 12 % less."""
    reduce_dtype: SmallType = "master"
    """What gradients are rounded to while sharded data parallelism sums them over ranks: ``master``, the type
    that they are added up in (fp32, or fp64), or ``bf16``, half the bytes."""
    cuda_graphs: bool | Literal["auto"] = False
    """On a GPU, capture the computation between collectives once and replay it: small kernels then do not
    wait for the host. Takes more memory. ``auto``: if timed steps are faster so. Not searched unless said; a
    plan without says what they would gain."""

    streams: Count = 1
    """Compute streams over which the batch's slices are spread, so that a GPU may run several small kernels
    at once; at most as many as slices. Not predicted, and never run on a GPU."""


_NOT_PLANNED = ("slack", "reduce_dtype", "compile", "cuda_graphs", "streams")
PLANNABLE = tuple(key for key in StrategySection.model_fields if key not in _NOT_PLANNED)
"""Keys of ``[strategy]`` that do not have to be timed."""


class ClusterSection(Section):
    """What to plan for."""

    preset: str = "here"
    """``here``: this machine; or a cluster that ``plait plan`` lists."""
    file: str | None = None
    """A file that describes a cluster, in place of a preset."""
    profile: str | None = None
    """What ``plait measure machine`` measured there: its figures take the place of the cluster's."""
    ranks: Natural = 0
    """How many ranks to plan for. 0: as many as the strategy says; where it leaves that open, all that the
    cluster has."""


class PlanSection(Section):
    """What the planner may choose."""

    framework: Literal["plait", "megatron", "torchtitan", "deepspeed", "llama3"] = "plait"
    """Which framework is to run the job: only what it can do is searched, and time and memory are those of
    its runs. ``llama3``: what Meta tells of its own, to compare with. Plait's own runs obey plans for
    ``plait`` alone."""

    constraints: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Conditions on every strategy, such as ``"tp <= 8"``, ``"schedule in 1f1b, zb-h1"`` or
    ``"memory <= 70 GiB"``."""
    memory_margin: Annotated[float, Ge(0), Lt(1)] | Annotated[str, Such(f"{', '.join(MARGINS)} or 4 GiB")] = "auto"
    """Memory of a device that a plan leaves free: a share such as ``0.05``, or bytes such as ``"4 GiB"``.
    ``auto``: so much that it is 90 % sure to fit. ``safest``: of the plans that take at most 5 % longer than
    the fastest, the one that is most sure to fit (99.9 % is enough). ``fastest``: nothing, as 0."""
    tokens: Annotated[int, Ge(0)] | NotNegative | Annotated[str, Such("15T")] = 0
    """Tokens that the model is to be trained on, as in ``15e12`` or ``"15T"`` (K, M, B, T): the answer says
    how many days, GPU hours and, where the cluster's devices have a power, how much energy they take. 0: of a
    day."""
    gpu_hour_price: Annotated[float, Field(ge=0)] = 0.0
    """Price of an hour of a rank, in any currency: the answer says what the tokens cost. 0: not known."""
    top: Count = 10
    """How many strategies are shown."""
    points: Count = 250_000
    """How many strategies are compared at first, at most: a larger space is made coarser, as far as that
    goes. Then about as many around its best arrangements of ranks are."""


class RunSection(Section):
    """Where and on what."""

    name: str = ""
    """Name of the run's folder; the job file's if empty."""
    folder: str = "runs"
    """Where runs go, from the current folder."""
    device: Literal["auto", "cpu", "cuda", "shared"] = "auto"
    """``auto``: a GPU where there is one for every rank. ``shared``: ranks of a host share its GPUs, and
    speak through its memory: to try a job where there are fewer GPUs than ranks, not for its speed."""
    threads: Count = 1
    """Threads of a rank's computation, on a CPU."""
    peak_flops: Positive | None = None
    """FLOP/s of a device's dense matrix products in ``train.precision``, for MFU. Left out: by the device's
    name from ``cluster.file`` and the clusters that ship; where none has it, as of a processor, no MFU is
    shown."""
    timeline_steps: Natural = 200
    """Last steps whose timeline is kept. 0: none."""
    timeline_sample: Natural = 100
    """Of the steps before these, one in so many keeps its timeline, and so do those around a step that took
    unusually long. 0: none. Sums of every step are kept in any case, unless ``timeline_steps`` is 0."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on every host where Prometheus finds live metrics of the host's ranks. 0: none."""
    metrics_address: str = "127.0.0.1"
    """Address of the host at which it listens; its own alone unless told otherwise."""
    loggers: Annotated[tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False)] = ()
    """Where metrics go beside ``metrics.jsonl``: ``tensorboard`` (into the run's folder; needs the package
    tensorboardX), ``wandb`` (Weights & Biases, offline where it has no login; needs the package wandb)."""
    timeout: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = 600.0
    """Seconds that a rank waits for another before the run is ended and the silent rank named."""
    restarts: Natural = 3
    """Restarts in a row that may save no new checkpoint before a run that fails is given up; of ranks on this
    machine or in a lab. 0: it is never restarted. A mistake in the job, or numbers that are not finite, are
    no reason to restart in any case."""
    spares: Natural = 0
    """Hosts of a lab that are kept free, to take the place of others that fail, where the planner chooses how
    many ranks there are. A job that says so itself keeps all hosts that it does not need."""
    shrink: bool = True
    """When hosts fail and no spare is left, go on with fewer data-parallel ranks, planned anew; if not, the
    run waits for hosts to come back, as long as ``restarts`` allows."""
    memory_every: Natural = 0
    """Steps between copies of the state in the memory of hosts, from which a restarted run goes on if they
    are newer than the checkpoints on disk. They live as long as the launcher. 0: none."""
    memory_neighbour: bool = True
    """Each host keeps the copies of another one too, so that they outlive its loss."""
    on_save_failure: Literal["continue", "stop"] = "continue"
    """When a checkpoint could not be written (a full disk): ``continue`` says so, trains on and tries again
    after the next interval; ``stop`` ends the run."""
    selfcheck: Literal["off", "warn", "stop"] = "warn"
    """Before the first step of a run on several machines the links between neighbours, and across, are tried:
    what to do about one that has less than a third of the median rate."""
    network_interface: str = ""
    """Interface over which ranks of several machines speak (``NCCL_SOCKET_IFNAME``, ``GLOO_SOCKET_IFNAME``).
    Empty: the one that a machine's name leads to, and NCCL's own choice. Variables that are set already
    win."""
    rdma_devices: Texts = ()
    """RDMA devices that NCCL may use, such as ``"mlx5_0"`` (``NCCL_IB_HCA``). Empty: NCCL's own choice."""
    hang_deadline: Annotated[float, Field(ge=0, le=MOST_SECONDS)] = 0.0
    """Seconds after which a collective or a transfer that has not ended makes Plait look for the rank that
    the others wait for, name it and end the run. What a rank does for the first time (a step, an evaluation)
    may take four times as long. 0: half of ``run.timeout``."""

    @property
    def network_variables(self) -> dict[str, str]:
        """Variables by which NCCL and gloo know which network to use."""
        interface = self.network_interface
        found = {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface,
                 "NCCL_IB_HCA": ",".join(self.rdma_devices)}  # fmt: skip
        return {name: value for name, value in found.items() if value}

    @property
    def call_deadline(self) -> float:
        """Seconds that a collective or a transfer may take."""
        return self.hang_deadline or self.timeout / 2

    @property
    def first_deadline(self) -> float:
        """Seconds that a rank may take for one piece of what it does for the first time: before the others
        give up waiting for it."""
        return max(self.call_deadline, min(FIRST * self.call_deadline, LAST * self.timeout))

    @property
    def path(self) -> Path:
        """The run's own folder."""
        return Path(self.folder) / self.name

    @field_validator("network_interface", "rdma_devices")
    @classmethod
    def _devices(cls, value: str | tuple[str, ...], info: Any) -> str | tuple[str, ...]:
        for one in (value,) if isinstance(value, str) else value:
            if not re.fullmatch(r"[\w.,:=^-]*", one, re.ASCII):
                fix = "Write names as in eth0, =ib0, mlx5_0:1"
                raise JobError(f"'{one}' is no name of a device", key=f"run.{info.field_name}", fix=fix)
        return value

    @field_validator("name")
    @classmethod
    def _one_folder(cls, name: str) -> str:
        if name in (".", "..") or "/" in name or (name and not name.strip()):
            fix = "Leave out slashes; run.folder says where it goes"
            raise JobError(f"'{name}' is no name for a folder", key="run.name", fix=fix)
        one_line(name, "run.name")
        if name:
            check_path(name, "run.name")
        return name

    @field_validator("folder")
    @classmethod
    def _a_folder(cls, folder: str) -> str:
        check_path(folder, "run.folder")
        return folder

    def named(self, name: str) -> RunSection:
        """The same, called ``name`` unless it says so itself. Raises JobError for a name that no folder can
        have."""
        return self if self.name else self.model_copy(update={"name": self._one_folder(name)})
