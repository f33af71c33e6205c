"""The sections of a job file, each key with its type, default and meaning.

``docs/job.md`` is made from these. Values are taken as they are: no text for a number, no number for a truth
value, nothing that is not finite. Rules about several values at once stand in ``Job.check``.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from plait.core.base.codec.data import Count, Natural, NotNegative, Positive, Section, Texts
from plait.core.base.errors import JobError
from plait.core.base.files import check_path
from plait.core.base.numbers import MOST_SECONDS, MOST_SEED, shown
from plait.core.job.one_line import one_line
from plait.core.model.precision import Precision
from plait.core.parallel.optimizers import OptimizerName
from plait.core.parallel.strategy import Overlap, Recompute, ShardOverlap
from plait.core.runs.evidence import FIRST, LAST

Seed = Annotated[int, Field(ge=-MOST_SEED - 1, le=MOST_SEED)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
OnNan = Literal["stop", "skip"]

STDLIB, BYTES = "python-stdlib", "bytes"
_NAME = re.compile(r"\w[\w.+ -]{0,100}")


TokenType = Literal["", "uint8", "uint16", "uint32", "int32", "int64"]
Paths = Annotated[str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)], Field()]


class SourceSection(Section):
    """One source of a mixture, or of an evaluation."""

    path: Paths
    """Files and folders, as in ``data.text``; or a folder that ``plait data prepare`` has made."""
    name: str = ""
    """What tables and metrics call it. Empty: the last part of its path."""
    weight: Positive | None = None
    """Its share of the sequences, beside the other weights. Left out everywhere: as many as it has, times
    ``epochs``."""
    epochs: Positive | None = None
    """How often it may be read. Without ``weight``: how often it is read while the others are read as often
    as they say (1 if left out). With it: a run that would read it more often is refused."""
    text_key: str = ""
    """Empty: ``data.text_key``."""
    pattern: str = ""
    """Empty: ``data.pattern``."""
    dtype: TokenType = ""
    """The type of bare token ids without a header (``.bin``)."""

    @property
    def paths(self) -> tuple[str, ...]:
        """``path`` as a list."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def called(self) -> str:
        """Its name."""
        return self.name or self.paths[0].rstrip("/").rpartition("/")[2]


Sources = Annotated[tuple[SourceSection, ...], Field(strict=False)]


class DataSection(Section):
    """What to train on."""

    text: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = STDLIB
    """Files and folders: text and source files, ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` (each also in gzip,
    xz, zstd or bzip2), ``.parquet``, ``.arrow``. Or ``python-stdlib``, the source of Python's standard
    library, which is always there."""
    sources: Sources = ()
    """A mixture, in place of ``text``: tables ``{ path, weight, epochs }``, of which the order of sequences
    takes its shares exactly."""
    eval: Sources = ()
    """What to evaluate on, each with a loss of its own: tables ``{ path, name }``. Empty: ``eval_fraction``
    of the documents of each source."""
    text_key: str = "text"
    """The key or column that holds the text of a row, in JSON, CSV, Parquet and Arrow."""
    pattern: str = "*"
    """Which files of a folder."""
    tokenizer: str = BYTES
    """``bytes``, or a Hugging Face ``tokenizer.json``."""
    sequence_length: Count = 128
    """Tokens of a training sequence."""
    eval_fraction: Fraction = 0.02
    """Share of the documents that is kept for evaluation."""
    vocab_multiple: Count = 1
    """The model's vocabulary is the tokenizer's, rounded up to a multiple of this (50,257 to 50,304 with
    64). No id that was added is ever sampled. Where ``model.vocab`` says its size: 1."""
    seed: Seed = 0
    """Seed of the order of sequences."""
    documents: Literal["join", "mask"] | None = None
    """``mask``: attention stops at document ends, and positions begin anew there. ``join``: it crosses them.
    Left out: ``mask`` for chats and pairs, ``join`` for texts."""
    rows: Literal["text", "chats", "pairs"] = "text"
    """What a row of JSON lines, JSON, CSV, Parquet or Arrow is: a text; a chat, rendered by the tokenizer's
    chat template; or a prompt with its answer. Chats and pairs are packed whole into sequences."""
    messages_key: str = "messages"
    """The key of a chat's messages, a list of tables with ``role`` and ``content`` (or ``from``, ``value``).
    Messages of the role ``assistant`` are answers, unless they say ``weight = 0``."""
    prompt_key: str = "prompt"
    """The key of a pair's prompt: a text, or a list of messages."""
    answer_key: str = "completion"
    """The key of a pair's answer: a text, or a list of messages."""
    chat_template: str | None = None
    """A file with a chat template (Jinja) to use instead of the tokenizer's own."""
    loss: Literal["answers", "all"] = "answers"
    """Of chats and pairs: the loss is a mean over the tokens of answers, or over all."""

    @property
    def masks(self) -> bool:
        """Whether attention stops at document ends."""
        return self.documents == "mask" or (self.documents is None and self.rows != "text")

    @property
    def train(self) -> tuple[SourceSection, ...]:
        """The sources of training; ``text`` is one."""
        return self.sources or (SourceSection(path=self.text, name="text"),)

    @property
    def told(self) -> str:
        """The paths of the sources, for people."""
        return ", ".join(path for source in self.train for path in source.paths)

    @property
    def held_out(self) -> float:
        """Share of the documents of each source that is kept for evaluation."""
        return 0.0 if self.eval else self.eval_fraction

    @model_validator(mode="after")
    def _agree(self) -> DataSection:
        if self.sources and self.text != STDLIB:
            raise JobError("stands beside data.text", key="data.sources",
                           changes=[{"data.text": None}, {"data.sources": None}])  # fmt: skip
        for key, sources in (("data.sources", self.sources), ("data.eval", self.eval)):
            names = [source.called for source in sources]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise JobError(f"two sources are called {shown(twice)}", key=key, fix='Give one of them a name = "..."')
            for name in names:
                if not _NAME.fullmatch(name):
                    fix = 'Give the source a name = "..." of letters, digits, dots and dashes'
                    raise JobError(f"{shown(name)} is no name of a folder", key=key, fix=fix)
        given = [source.weight is not None for source in self.sources]
        if any(given) and not all(given):
            raise JobError("some sources have a weight and others have none", key="data.sources",
                           fix="Give each a weight, or none")  # fmt: skip
        if any(source.weight or source.epochs for source in self.eval):
            raise JobError("what is evaluated on has no weight and no epochs", key="data.eval", fix="Leave them out")
        return self


class MuonSection(Section):
    """Muon (Jordan 2024, https://kellerjordan.github.io/posts/muon/), as torch.optim.Muon has it: of the
    matrices of layers, each a matrix of its own (queries, keys, values, gate, up, ...). Embedding, positions,
    head, norms and biases are AdamW's, with its settings."""

    momentum: Fraction = 0.95
    """Share of the average of gradients that a step keeps."""
    nesterov: bool = True
    """Look ahead by the momentum (Nesterov)."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """How the learning rate depends on a matrix [A, B]. ``match_rms_adamw``: times 0.2 sqrt(max(A, B)), so
    that AdamW's rate and decay suit both (Liu 2025, arXiv 2502.16982). ``original``: times sqrt(max(1, A /
    B))."""
    precision: Literal["bf16", "master"] = "bf16"
    """What orthogonalises, and travels for it: ``bf16``, as torch does, or the type of master weights, fp32
    or fp64."""
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    """Newton-Schulz iterations."""
    ns_coefficients: Annotated[tuple[float, float, float], Field(strict=False)] = (3.4445, -4.775, 2.0315)
    """Their polynomial's coefficients."""
    eps: Positive = 1e-7
    """A matrix of a smaller norm is not scaled up further."""


class SgdSection(Section):
    """Stochastic gradient descent with momentum, as torch.optim.SGD: decay is added to the gradient."""

    momentum: Fraction = 0.9
    """Share of the sum of gradients that a step keeps."""
    nesterov: bool = False
    """Look ahead by the momentum (Nesterov)."""


class TrainSection(Section):
    """Batches, the learning rate, the optimizer, evaluation, checkpoints."""

    steps: Count = 300
    """Optimizer steps of the whole run."""
    tokens: int | float | str = 0
    """Tokens of the whole run in place of ``steps``, as in ``15e12`` or ``"15T"`` (K, M, B, T): so many steps
    as are needed for them. 0: as ``steps`` says."""
    global_batch_size: Count = 8
    """Sequences of one optimizer step, over all ranks."""
    micro_batch_size: Natural = 0
    """Sequences that one data-parallel replica (of the first pipeline stage) computes at once; the rest of
    the global batch is gradient accumulation. 0: the whole global batch at once."""
    learning_rate: Positive = 3e-4
    """The learning rate at its peak."""
    min_learning_rate: NotNegative = 0.0
    """The learning rate at its end."""
    warmup_steps: Natural = 0
    """Steps in which the rate rises from nothing to its peak."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "wsd"] = "cosine"
    """After the warm-up. ``constant``: stays at its peak. ``linear``, ``cosine``: falls to
    ``min_learning_rate``. ``inverse-square-root``: falls with the root of the steps, to
    ``min_learning_rate`` at least. ``wsd`` (warm-up, stable, decay): stays at its peak, then falls linearly
    over the last ``lr_wsd_decay_steps``."""
    lr_decay_steps: Natural = 0
    """Steps after which the rate is at its end, so that more ``steps`` need not change the rates before.
    0: ``steps``."""
    lr_wsd_decay_steps: Natural = 0
    """Length of the decay of ``wsd``. 0: a tenth of ``lr_decay_steps``."""
    optimizer: OptimizerName = "adamw"
    """``muon``: of layers' matrices, AdamW of everything else; its settings stand in ``[train.muon]``, those
    of ``sgd`` in ``[train.sgd]``."""
    muon: MuonSection = MuonSection()
    """Settings of Muon."""
    sgd: SgdSection = SgdSection()
    """Settings of SGD."""
    weight_decay: NotNegative = 0.1
    """Weight decay of matrices, embedding and head among them; norms and biases do not decay."""
    weight_decay_of: dict[str, NotNegative] = Field(default_factory=dict)
    """Weight decay of tensors whose names match a pattern, such as ``{ "embedding.*" = 0.0, "*.k.weight" =
    0.2 }``; of several that match the last counts. Names are those of checkpoints:
    ``layers.0.attn.q.weight``."""
    adam_betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """AdamW's two decay rates of its moments."""
    adam_eps: Positive = 1e-8
    """AdamW's epsilon."""
    clip_grad: NotNegative = 1.0
    """Gradients are scaled down to this norm. 0: never."""
    precision: Precision = "fp32"
    """Type of parameters and activations. ``bf16-mixed`` keeps weights, gradients and moments in fp32 too.
    ``fp8``, ``mxfp8`` and ``nvfp4``, layers' products in 8 or 4 bit, can be planned and not trained."""
    on_nan: OnNan = "stop"
    """What to do when loss or gradients are not finite: ``stop`` ends the run with its last good checkpoint;
    ``skip`` leaves this update out and goes on, up to twenty times in a row; meanwhile nothing is saved."""
    seed: Seed = 0
    """Seed of initial weights and dropout."""
    eval_every: Natural = 100
    """Steps between evaluations. 0: none."""
    eval_batches: Count = 8
    """Micro-batches of an evaluation."""
    checkpoint_every: Natural = 100
    """Steps between checkpoints. 0: at the end only."""
    keep_checkpoints: Count = 2
    """How many checkpoints stay on disk. 1: the one before stays as well, until the next is begun."""
    log_every: Count = 10
    """Steps between printed lines; ``metrics.jsonl`` has every step."""
    init_from: str | None = None
    """A folder to take the initial weights from: Hugging Face's, a run's or one of its checkpoints
    (``runs/NAME/checkpoints/step-00000100``), or a torch.distributed.checkpoint in torchtitan's names."""

    def decay_of(self, name: str, dimensions: int) -> float:
        """Weight decay of a tensor, by its name.

        >>> train = TrainSection(weight_decay_of={"embedding.*": 0.0})
        >>> [train.decay_of(*each) for each in (("embedding.weight", 2), ("head.weight", 2), ("bias", 1))]
        [0.0, 0.1, 0.0]
        """
        matching = [decay for pattern, decay in self.weight_decay_of.items() if fnmatchcase(name, pattern)]
        return matching[-1] if matching else self.weight_decay if dimensions > 1 else 0.0


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


class OverlapKinds(Section):
    """Tensor parallelism and sharding apart."""

    tp: Overlap = "domino"
    """Tensor parallelism's, as ``overlap``."""
    shard: ShardOverlap | Literal["auto"] = "both"
    """Which of sharding's communication overlaps computation: of the forward, the backward, both or none;
    ``auto``: the fastest of timed steps."""


Degrees = Count | Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]


class StrategySection(Section):
    """How the model is split, and how its communication is hidden. Any key may be ``auto``: the planner
    chooses it. A job without this table is planned whole. Where the keys without which no rank can start are
    given, ``slices`` and ``sequence_parallel`` are not predicted but timed before training, as many
    candidates as can pay in the steps of the run."""

    tp: Degrees = 1
    """Tensor-parallel degree; a list gives every pipeline stage's ranks their own."""
    dp: Degrees = 1
    """Data-parallel degree; a list likewise."""
    pp: Count = 1
    """Pipeline-parallel degree."""
    schedule: str = "eager-1f1b"
    """A name that ``plait schedule`` knows, or a file with a schedule."""
    virtual_stages: Count = 1
    """Stages that every pipeline rank holds."""
    slack: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Slack of slack-1f1b at every boundary between stages; measured before training if empty."""
    stage_layers: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Layers of every stage; as equal as can be if empty."""
    shard: str | Shard = "ddp"
    """Sharded data parallelism over dp x cp: ``ddp``, ``zero1``, ``zero2``, ``zero3`` (``fsdp``), or
    factors."""
    cp: Count = 1
    """Context-parallel degree: ranks that share every sequence."""
    ep: Count = 1
    """Expert-parallel degree: neighbours of dp x cp that share out the experts of every layer. Of models with
    experts, which can be planned for and not trained yet."""
    cp_comm_type: Literal["ulysses", "ring"] | ContextKind = "ulysses"
    """How attention gets the whole sequence: heads are exchanged, keys and values go round a ring, both."""
    overlap: Overlap | OverlapKinds = "domino"
    """``domino``: slices hide each other's collectives; ``async``: Megatron-LM's overlap; ``sync``: none;
    ``no-communication``: none at all, which is planned and never trained. A word alone is tensor
    parallelism's; sharding's communication then overlaps computation unless it is ``sync``."""
    slices: Literal["auto"] | Slices = "auto"
    """Domino's slices, such as ``{ batch = 2, columns = 1 }``."""
    sequence_parallel: bool | Literal["auto"] = False
    """Megatron's, inside tensor parallelism: all-gather and reduce-scatter instead of all-reduce."""
    recompute: Recompute | RecomputeLayers = "none"
    """What the backward computes again instead of keeping it: what is cheap, all but two streams a layer, or
    all but one (which repeats a reduction)."""
    compile: bool | Literal["auto"] = False
    """Compile what lies between matrix products (norms, dropout, activations, positions, loss) with
    torch.compile. ``auto``: if timed steps are faster so, and the run is long enough for it to pay."""
    cuda_graphs: bool | Literal["auto"] = False
    """On a GPU, capture the computation between collectives once and replay it: small kernels then do not
    wait for the host. Takes more memory. ``auto``: if timed steps are faster so."""

    streams: Count = 1
    """Compute streams over which the batch's slices are spread, so that a GPU may run several small kernels
    at once; at most as many as slices. Not predicted, and never run on a GPU."""


PLANNABLE = tuple(
    key for key in StrategySection.model_fields if key not in ("slack", "compile", "cuda_graphs", "streams")
)
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
    memory_margin: float | str = "auto"
    """Memory of a device that a plan leaves free: a share such as ``0.05``, or bytes such as ``"4 GiB"``.
    ``auto``: so much that it is 90 % sure to fit. ``safest``: of the plans that take at most 5 % longer than
    the fastest, the one that is most sure to fit (99.9 % is enough). ``fastest``: nothing, as 0."""
    tokens: int | float | str = 0
    """Tokens that the model is to be trained on, as in ``15e12`` or ``"15T"`` (K, M, B, T): the answer says
    how many days, GPU hours and, where the cluster's devices have a power, how much energy they take. 0: of a
    day."""
    gpu_hour_price: Annotated[float, Field(ge=0)] = 0.0
    """Price of an hour of a rank, in any currency: the answer says what the tokens cost. 0: not known."""
    top: Count = 10
    """How many strategies are shown."""
    points: Count = 250_000
    """How many strategies are compared, at most: of a larger space a coarser one is searched, then its best
    arrangements of ranks in full."""


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
    """A device's peak, for MFU; if not given, the matrix rate measured at the start."""
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
