"""The sections of a job file: each key with its type, default and meaning.

``docs/job.md`` and the help of keys are written from the docstrings in this file. Values are
strict: no text for a number, no number for a truth value, no number that is not finite. Rules about
several values at once are in ``Job.check``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt
from pydantic import BeforeValidator, Field, field_validator

from plait.core.base.codec.data import (
    Count,
    Example,
    ExtraValue,
    Natural,
    NotNegative,
    OrAuto,
    Positive,
    Section,
    Texts,
)
from plait.core.base.errors import JobError
from plait.core.base.files import check_path
from plait.core.base.numbers import MOST_SECONDS
from plait.core.job.constraint import MARGINS
from plait.core.job.data_settings import BYTES, STDLIB, DataSection, Seed, SourceSection
from plait.core.job.texts import check_single_line
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
    """Slices into which each micro-batch is cut."""
    columns: Count = 1
    """Column slices of the second weight of each sublayer (attention's output projection, the MLP's
    down projection)."""


class Shard(Section):
    """Sharding factors: over how many of the dp x cp ranks each part of the training state is
    sharded."""

    params: Count = 1
    """Ranks over which the parameters are sharded."""
    grads: Count = 1
    """Ranks over which the gradients are sharded."""
    optim: Count = 1
    """Ranks over which the optimizer states are sharded."""
    secondary: Natural = 0
    """Neighbouring ranks over which a second copy of the parameters is sharded, for the gathers of
    the backward (ZeRO++'s hpZ). 0: no second copy."""


class ContextKind(Section):
    """Both kinds of context parallelism at once: rings of Ulysses groups. cp is the product of the
    two sizes."""

    ulysses: Count
    """Ranks of a Ulysses group, which exchange heads."""
    ring: Count
    """Ranks of a ring, which pass keys and values on."""


class RecomputeLayers(Section):
    """Recomputation in the first layers of every stage only."""

    kind: Recompute
    """Kind of recomputation, with the values of ``recompute``."""
    layers: Natural
    """Number of first layers of every stage that are recomputed."""


def _no_overlap(word: object) -> object:
    return "sync" if word == "off" else word


OverlapWord = Annotated[Overlap, ExtraValue("off"), BeforeValidator(_no_overlap)]


class OverlapKinds(Section):
    """Overlap of tensor parallelism, of sharded data parallelism and of experts, set separately."""

    tp: OverlapWord = "domino"
    """Overlap of tensor parallelism's collectives, with the values of ``overlap``."""
    shard: ShardOverlap | Literal["auto"] = "both"
    """Communication of sharded data parallelism that overlaps computation: of the forward, of the
    backward, of both or of none. ``auto``: the fastest in timed steps."""
    ep: Literal["on", "off"] = "on"
    """Exchanges of tokens with their experts: ``on`` overlaps them as ``tp`` says; ``off`` awaits
    each."""


Degrees = Count | Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]


class StrategySection(Section):
    """How the model is split over ranks, and which communication overlaps computation. A key that
    takes ``auto`` may be left to the planner. Without this table the planner chooses every key, and
    a setting on the command line fixes its own key alone. With this table the planner searches only
    keys that are ``auto``: a key that is left out has its default. Where no other key is left to
    the planner, ``slices`` and ``sequence_parallel`` are timed before training instead of
    predicted: as many candidates as can pay in the steps of the run."""

    tp: OrAuto[Degrees] = 1
    """Tensor-parallel degree. A list gives the degree of each pipeline rank."""
    dp: OrAuto[Degrees] = 1
    """Data-parallel degree. A list gives the degree of each pipeline rank."""
    pp: OrAuto[Count] = 1
    """Pipeline-parallel degree."""
    schedule: OrAuto[str] = "eager-1f1b"
    """Pipeline schedule: a name that ``plait schedule`` knows, or a file with a schedule."""
    virtual_stages: OrAuto[Count] = 1
    """Stages on each pipeline rank (virtual pipeline stages)."""
    slack: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Slack of the schedule slack-1f1b at each boundary between stages. Empty: derived from times
    that are measured before training."""
    stage_layers: OrAuto[Annotated[tuple[Count, ...], Field(strict=False)]] = ()
    """Number of layers of each stage. Empty: as equal as possible."""
    shard: OrAuto[Annotated[str, Example('"ddp", "zero1", "zero2", "zero3" or "fsdp"')] | Shard] = "ddp"
    """Sharded data parallelism over the dp x cp ranks: ``ddp``, ``zero1``, ``zero2``, ``zero3``
    (``fsdp``), or sharding factors."""
    cp: OrAuto[Count] = 1
    """Context-parallel degree: ranks that share the tokens of every sequence."""
    ep: OrAuto[Count] = 1
    """Expert-parallel degree: neighbouring ranks of dp x cp that share out the experts of every
    layer. Only for models with experts."""
    etp: Literal[0, 1] = 0
    """1: tensor parallelism does not cut experts, and ``ep`` shares out experts over neighbours of
    dp x cp x tp, with sequence parallelism. 0: tensor parallelism cuts each expert."""
    cp_comm_type: OrAuto[Literal["ulysses", "ring"] | ContextKind] = "ulysses"
    """How attention sees the whole sequence: ``ulysses`` exchanges heads, ``ring`` passes keys and
    values round a ring, and a table does both."""
    overlap: OrAuto[OverlapWord | OverlapKinds] = "domino"
    """Overlap of communication and computation. ``domino``: slices of a micro-batch hide each
    other's collectives, in an order that is searched. ``fixed``: the same, in the order of Domino's
    authors. ``async``: Megatron-LM's overlap. ``off``, ``sync``: no overlap. ``no-communication``:
    a step without any communication, which can be planned and never trained. ``auto``: ``domino``.
    A single word sets tensor parallelism's overlap; sharding's communication then overlaps
    computation unless the word is ``off`` or ``sync``."""
    slices: Literal["auto"] | Slices = "auto"
    """Numbers of Domino's slices, such as ``{ batch = 2, columns = 1 }``."""
    sequence_parallel: bool | Literal["auto"] = False
    """Megatron-LM's sequence parallelism within tensor parallelism: all-gather and reduce-scatter
    instead of all-reduce."""
    recompute: OrAuto[Recompute | RecomputeLayers] = "none"
    """Activations that the backward recomputes instead of keeping them. ``selective``: normalised
    inputs and activations, which are cheap. ``full``: all but two residual streams a layer.
    ``layer``: all but one residual stream a layer, which repeats a reduction."""
    compile: bool | Literal["auto"] = False
    """Compile what lies between matrix products (norms, dropout, activations, positions, loss) with
    torch.compile. ``auto``: compile if timed steps are faster so and the run is long enough for
    compiling to pay. The gain is not predicted: on one H200 a step of a model of 1.2B parameters
    takes 12 % less time."""
    reduce_dtype: SmallType = "master"
    """Type to which gradients are rounded while sharded data parallelism sums them over ranks.
    ``master``: the type in which they are accumulated (fp32 or fp64). ``bf16``: half the bytes."""
    cuda_graphs: bool | Literal["auto"] = False
    """On a GPU, capture the computation between collectives once as CUDA graphs and replay it, so
    that small kernels do not wait for the host. Takes more memory. ``auto``: capture if timed steps
    are faster so. Off unless the job sets it; a plan without CUDA graphs reports what they would
    gain."""

    streams: Count = 1
    """Compute streams over which the slices of a batch are spread, so that a GPU may run several
    small kernels at once; at most as many as slices. The gain is not predicted, and has never been
    tried on a GPU."""


_NOT_PLANNED = ("etp", "slack", "reduce_dtype", "compile", "cuda_graphs", "streams")
PLANNABLE = tuple(key for key in StrategySection.model_fields if key not in _NOT_PLANNED)
"""Keys of ``[strategy]`` that the planner can choose without timed steps."""


class ClusterSection(Section):
    """The cluster to plan for."""

    preset: str = "here"
    """``here``: this machine. Otherwise the name of a cluster that ``plait plan`` lists."""
    file: str | None = None
    """File that describes a cluster, in place of a preset."""
    profile: str | None = None
    """File that ``plait measure machine`` wrote on the cluster: its measurements replace the
    cluster's figures."""
    ranks: Natural = 0
    """Number of ranks to plan for. 0: as many as the strategy needs; if the strategy leaves that
    open, all ranks of the cluster."""


class PlanSection(Section):
    """Limits of the planner's search, and what the planner reports."""

    framework: Literal["plait", "megatron", "torchtitan", "deepspeed", "llama3"] = "plait"
    """Framework that is to run the job: the planner searches only what this framework can do, and
    predicts time and memory of its runs. ``llama3``: Meta's own framework as far as Meta has
    described it, to compare with. Plait's own runs take plans for ``plait`` only."""

    constraints: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Conditions that every strategy must meet, such as ``"tp <= 8"``, ``"schedule in 1f1b,
    zb-h1"`` or ``"memory <= 70 GiB"``."""
    memory_margin: Annotated[float, Ge(0), Lt(1)] | Annotated[str, Example(f"{', '.join(MARGINS)} or 4 GiB")] = "auto"
    """Device memory that a plan leaves free: a share such as ``0.05``, or bytes such as ``"4
    GiB"``. ``auto``: enough that the plan fits with a probability of 90 %. ``safest``: of the plans
    that take at most 5 % longer than the fastest, the one that is most likely to fit (99.9 % is
    enough). ``fastest``: nothing, as 0."""
    tokens: Annotated[int, Ge(0)] | NotNegative | Annotated[str, Example("15T")] = 0
    """Tokens that the model is to be trained on, as in ``15e12`` or ``"15T"`` (K, M, B, T): the
    plan then reports days, GPU hours and, if the power of the cluster's devices is known, energy.
    0: it reports one day of training."""
    gpu_hour_price: Annotated[float, Field(ge=0)] = 0.0
    """Price of one hour of one rank, in any currency: the plan then reports the cost of the
    training. 0: unknown."""
    top: Count = 10
    """Number of strategies to show."""
    points: Count = 250_000
    """Most strategies to compare in a first pass; a larger space is searched more coarsely, as far
    as that is possible. A second pass compares about as many around the best arrangements of
    ranks."""


class RunSection(Section):
    """Folder and devices of a run, its monitoring and its restarts."""

    name: str = ""
    """Name of the run's folder. Empty: the name of the job file."""
    folder: str = "runs"
    """Folder that holds the folders of runs, relative to the current folder."""
    device: Literal["auto", "cpu", "cuda", "shared"] = "auto"
    """``auto``: one GPU for each rank if there are enough, else the CPU. ``shared``: ranks of a
    host share its GPUs and communicate through the host's memory; it is for trying a job with fewer
    GPUs than ranks, and its speed means nothing."""
    threads: Count = 1
    """CPU threads of one rank's computation, where ranks run on the CPU."""
    peak_flops: Positive | None = None
    """Peak FLOP/s of one device for dense matrix products in ``train.precision``, for MFU. Left
    out: the peak that ``cluster.file`` or the shipped clusters give for the device's name; if none
    gives it, as for a CPU, no MFU is shown."""
    timeline_steps: Natural = 200
    """Number of last steps whose timeline is kept. 0: none."""
    timeline_sample: Natural = 100
    """Steps between earlier steps whose timeline is kept as well; so are steps around one that took
    unusually long. 0: none. Sums of every step are kept in any case, unless ``timeline_steps`` is
    0."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on every host where Prometheus finds live metrics of the host's ranks. 0: no port."""
    metrics_address: str = "127.0.0.1"
    """Address on which ``metrics_port`` listens. The default can be reached from the host itself
    only."""
    loggers: Annotated[tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False)] = ()
    """Destinations of metrics besides ``metrics.jsonl``: ``tensorboard`` (into the run's folder;
    needs the package tensorboardX), ``wandb`` (Weights & Biases, offline if there is no login;
    needs the package wandb)."""
    timeout: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = 600.0
    """Seconds that a rank waits for another rank before the run is ended and the silent rank is
    named."""
    restarts: Natural = 3
    """Consecutive restarts without a new checkpoint before a failing run is given up; of ranks on
    this machine or in a lab. 0: no restart. A mistake in the job, and loss or gradients that are
    not finite, never cause a restart."""
    spares: Natural = 0
    """Hosts of a lab that are kept free to replace failed hosts, where the planner chooses the
    number of ranks. A job that fixes the number of ranks keeps every host that it does not need as
    a spare."""
    shrink: bool = True
    """Go on with fewer data-parallel ranks, planned anew, when hosts fail and no spare is left. If
    false, the run waits for hosts to come back, as long as ``restarts`` allows."""
    memory_every: Natural = 0
    """Steps between copies of the training state in host memory. A restarted run goes on from these
    copies if they are newer than the checkpoints on disk. They live as long as the launcher. 0: no
    copies."""
    memory_neighbour: bool = True
    """Each host also keeps the copies of one other host, so that they survive the loss of a
    host."""
    on_save_failure: Literal["continue", "stop"] = "continue"
    """Reaction to a checkpoint that could not be written (a full disk). ``continue``: report it,
    train on and try again after the next interval. ``stop``: end the run."""
    selfcheck: Literal["off", "warn", "stop"] = "warn"
    """Reaction to a slow link before the first step of a run on several machines: links between
    neighbours, and across, are tested, and a link below a third of the median rate is slow."""
    network_interface: str = ""
    """Network interface over which ranks of several machines communicate (``NCCL_SOCKET_IFNAME``,
    ``GLOO_SOCKET_IFNAME``). Empty: the interface to which a machine's name resolves, and NCCL's own
    choice. Environment variables that are already set take precedence."""
    rdma_devices: Texts = ()
    """RDMA devices that NCCL may use, such as ``"mlx5_0"`` (``NCCL_IB_HCA``). Empty: NCCL's own
    choice."""
    hang_deadline: Annotated[float, Field(ge=0, le=MOST_SECONDS)] = 0.0
    """Seconds after which an unfinished collective or transfer counts as a hang: Plait then finds
    the rank that the other ranks wait for, names it and ends the run. What a rank does for the
    first time (a step, an evaluation) may take four times as long. 0: half of ``run.timeout``."""

    @property
    def network_variables(self) -> dict[str, str]:
        """Environment variables that tell NCCL and gloo which network to use."""
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
        """Seconds that a rank may take for any work that it does for the first time, before the
        other ranks give up waiting."""
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
        check_single_line(name, "run.name")
        if name:
            check_path(name, "run.name")
        return name

    @field_validator("folder")
    @classmethod
    def _a_folder(cls, folder: str) -> str:
        check_path(folder, "run.folder")
        return folder

    def named(self, name: str) -> RunSection:
        """Return the section with ``name`` as the run's name, if it has none yet. Raises JobError
        for a name that no folder can have."""
        return self if self.name else self.model_copy(update={"name": self._one_folder(name)})
