"""Job: what the user writes, in TOML. Every mistake is one paragraph: file, key, value, what is allowed, what
to change.

[model]      preset or huggingface or the fields of ModelSpec; fields given beside a preset override it
[data]       text, pattern, tokenizer, sequence, eval_fraction, seed
[train]      steps, batch, micro_batch, learning rate and its schedule, AdamW, clipping, dtype, evaluation, checkpoints
[strategy]   tp, overlap, slices ("auto" or { p1 =, p2 = }; also p1 and p2 alone), sequence_parallel (true, false, "auto"); for a pipeline
             pp, schedule, interleave, slack, stage_layers; dp, sp, sp_kind, and shard over both; recompute;
             tp and dp may be lists, a number for every place
[run]        name, folder, device, threads, peak_flops, timeline_steps

A relative path in a file is meant from that file's folder, one on the command line from the current folder;
``run.folder``, where results go, always from the current folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from plait.core.env import specs_folder
from plait.core.errors import JobError, nearest
from plait.core.explain import explain
from plait.core.layout import Layout, SequenceCut
from plait.core.model import ModelSpec
from plait.core.sharding import Sharding
from plait.core.strategy import Overlap, Recompute, ShardOverlap, Strategy
from plait.core.toml import COMMAND_LINE, override, read_toml, to_toml

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]

STDLIB, BYTES = "python-stdlib", "bytes"
MODEL_KEYS = frozenset({"preset", "huggingface"} | {field.name for field in fields(ModelSpec)})
_PATHS = (("model", "huggingface"), ("data", "text"), ("data", "tokenizer"), ("train", "init_from"))


class Section(BaseModel):
    """A table of the file. Values are taken as they are: no text for a number, no number for a truth
    value."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class DataSection(Section):
    """What to train on. text: files, folders or ``python-stdlib``. tokenizer: ``bytes`` or a Hugging Face
    tokenizer file."""

    text: str | Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = STDLIB
    pattern: str = "*"
    tokenizer: str = BYTES
    sequence: Count = 128
    eval_fraction: Fraction = 0.02
    seed: int = 0

    @property
    def sources(self) -> tuple[str, ...]:
        """``text`` as a list."""
        return (self.text,) if isinstance(self.text, str) else self.text


class TrainSection(Section):
    """Sizes are in sequences; ``batch`` is one optimizer step, cut into micro-batches of ``micro_batch`` (0:
    not cut)."""

    steps: Count = 300
    batch: Count = 8
    micro_batch: Natural = 0
    learning_rate: Positive = 3e-4
    min_learning_rate: NotNegative = 0.0
    warmup_steps: Natural = 0
    weight_decay: NotNegative = 0.1
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    eps: Positive = 1e-8
    clip_norm: NotNegative = 1.0
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    seed: int = 0
    eval_every: Natural = 100
    eval_batches: Count = 8
    checkpoint_every: Natural = 100
    keep_checkpoints: Count = 2
    log_every: Count = 10
    init_from: str | None = None


class Slices(Section):
    """p1: slices of the batch; p2: column slices of every second weight."""

    p1: Count = 1
    p2: Count = 1


class Shard(Section):
    """How many ranks share out parameters, gradients and optimizer states, of those that hold the same
    weights; see ``Sharding``."""

    params: Count = 1
    grads: Count = 1
    optim: Count = 1
    secondary: Natural = 0


class SequenceKind(Section):
    """Both at once: rings of ``ring`` ranks, each of groups of ``ulysses`` that exchange heads; sp is their
    product."""

    ulysses: Count
    ring: Count


class RecomputeLayers(Section):
    """Of every stage, the first ``layers`` only."""

    kind: Recompute
    layers: Natural


class OverlapKinds(Section):
    """Of tensor parallelism, and of sharded data parallelism (``auto``: the fastest of timed steps)."""

    tp: Overlap = "domino"
    shard: ShardOverlap | Literal["auto"] = "both"


Degrees = Count | Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]


class StrategySection(Section):
    """How the model is split and its communication hidden; see ``Strategy``. ``auto``: candidates are timed
    before training.

    pp: places of the pipeline. schedule: a name of ``plait schedule show``, or a file with a schedule.
    interleave: stages that every place holds. slack: slack-1f1b's, of every boundary; measured before
    training if empty. stage_layers: layers of every stage, as equal as can be if empty. shard: factors, or a
    named point such as "zero1" or "fsdp", over
    dp x sp. sp: ranks that share every sequence. sp_kind: how attention gets all of it. recompute: what is
    computed again in the backward instead of being kept. overlap: a word alone is tensor parallelism's;
    sharding then waits for everything if that is "sync", for nothing otherwise.
    """

    tp: Degrees = 1
    dp: Degrees = 1
    pp: Count = 1
    schedule: str = "eager-1f1b"
    interleave: Count = 1
    slack: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    stage_layers: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    shard: str | Shard = "ddp"
    sp: Count = 1
    sp_kind: Literal["ulysses", "ring"] | SequenceKind = "ulysses"
    overlap: Overlap | OverlapKinds = "domino"
    slices: Literal["auto"] | Slices = "auto"
    sequence_parallel: bool | Literal["auto"] = False
    recompute: Recompute | RecomputeLayers = "none"

    @model_validator(mode="before")
    @classmethod
    def _lone_slices(cls, values: Any) -> Any:
        """Accept ``p1`` and ``p2`` beside the other keys, which is what the command line finds easiest."""
        if not isinstance(values, dict):
            return values
        table = dict(cast("dict[str, Any]", values))
        lone = {key: table.pop(key) for key in ("p1", "p2") if key in table}
        if lone and table.get("slices", "auto") != "auto":
            raise JobError(
                "stands beside strategy.slices", key=f"strategy.{next(iter(lone))}", fix="Keep one of the two"
            )
        return {**table, "slices": lone} if lone else table


class RunSection(Section):
    """Where and on what. peak_flops: a device's peak, for MFU; otherwise the matrix rate measured at the
    start is used."""

    name: str = ""
    folder: str = "runs"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count = 1
    peak_flops: Positive | None = None
    timeline_steps: Natural = 200

    @field_validator("name")
    @classmethod
    def _one_folder(cls, name: str) -> str:
        if name in (".", "..") or "/" in name or "\0" in name:
            raise JobError(
                f"'{name}' is no name for a folder",
                key="run.name",
                fix="Leave out slashes; run.folder says where it goes",
            )
        return name


class Job(Section):
    """A whole job file, checked.

    >>> Job.from_dict({"model": {"preset": "gpt3-125m"}, "strategy": {"tp": 4}}).base_strategy.tp
    4
    """

    model: dict[str, Any]
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    strategy: StrategySection = StrategySection()
    run: RunSection = RunSection()

    @staticmethod
    def read(path: str | Path, overrides: Sequence[str] = ()) -> Job:
        """The job in a TOML file, with ``section.key=value`` overrides applied. Raises JobError naming file
        and key."""
        values, changed = override(_located(read_toml(path), Path(path).parent), overrides, _is_text)
        try:
            return Job.from_dict(values)
        except JobError as error:
            if error.file:  # an error of a file that the job names
                raise
            typed = any(f"{key}.".startswith(f"{error.key}.") for key in changed)
            raise error.in_file(COMMAND_LINE if typed else str(path)) from None

    @staticmethod
    def from_dict(values: dict[str, Any], base: str | Path = ".") -> Job:
        """A checked job from plain values; relative paths are looked up from ``base``."""
        try:
            job = Job.model_validate(_located(values, Path(base)))
        except ValidationError as error:
            raise explain(error, Job) from None
        job.check()
        return job

    @model_validator(mode="before")
    @classmethod
    def _has_model(cls, values: Any) -> Any:
        if "model" not in values:
            raise JobError(
                "is missing", key="[model]", fix='Name a preset, such as preset = "gpt3-125m", or give the shapes'
            )
        model = values["model"]
        for key in cast("dict[str, Any]", model) if isinstance(model, dict) else ():
            if key not in MODEL_KEYS:
                raise JobError(
                    f"unknown key{nearest(key, MODEL_KEYS)}",
                    key=f"model.{key}",
                    fix=f"Known here: {', '.join(sorted(MODEL_KEYS))}",
                )
        return values

    def check(self) -> None:
        """Raise JobError for values that are fine alone and wrong together."""
        train = self.train
        if train.batch % self.micro_batch:
            raise JobError(f"{train.batch} is not a multiple of micro_batch = {self.micro_batch}", key="train.batch")
        if train.warmup_steps > train.steps:
            raise JobError(f"{train.warmup_steps} exceeds steps = {train.steps}", key="train.warmup_steps")
        if train.min_learning_rate > train.learning_rate:
            raise JobError(
                f"{train.min_learning_rate} exceeds learning_rate = {train.learning_rate}",
                key="train.min_learning_rate",
            )
        spec = self.model_spec(vocab=1)  # the tokenizer's own, not known yet, changes no rule
        for dp, tp in self.degrees:
            if dp > self.micro_batch:
                raise JobError(
                    f"dp = {dp} shares a micro-batch of {self.micro_batch} sequences",
                    key="strategy.dp",
                    fix=f"Use dp <= {self.micro_batch}",
                )
            replace(self.base_strategy, tp=tp).check(spec, batch=self.micro_batch // dp, sequence=self.data.sequence)
            self.sharding(dp * self.strategy.sp).check(dp * self.strategy.sp)
        if self.pipelined and self.strategy.sequence_parallel == "auto":
            raise JobError(
                "'auto' is not timed in a pipeline", key="strategy.sequence_parallel", fix="Use true or false"
            )

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch."""
        return self.train.micro_batch or self.train.batch

    @property
    def degrees(self) -> tuple[tuple[int, int], ...]:
        """(dp, tp) of every place of the pipeline. Raises JobError for a list that is not as long as the
        pipeline."""
        section, found = self.strategy, list[tuple[int, ...]]()
        for key, given in (("dp", section.dp), ("tp", section.tp)):
            each = (given,) * section.pp if isinstance(given, int) else given
            if len(each) != section.pp:
                raise JobError(f"{list(each)} has {len(each)} numbers for pp = {section.pp} places", key=f"strategy.{key}",
                               fix="Give one for every place, or one number for all")  # fmt: skip
            found.append(each)
        return tuple(zip(*found, strict=True))

    @property
    def sequence_cut(self) -> SequenceCut:
        """How sp ranks share sequences. Raises JobError for a product that is not sp."""
        sp, kind = self.strategy.sp, self.strategy.sp_kind
        if isinstance(kind, str):
            return SequenceCut(sp=sp, ring=sp if kind == "ring" else 1)
        if kind.ulysses * kind.ring != sp:
            raise JobError(f"{kind.ulysses} x {kind.ring} is not sp = {sp}", key="strategy.sp_kind")
        return SequenceCut(sp=sp, ring=kind.ring)

    def sharding(self, ranks: int) -> Sharding:
        """How ``ranks`` that hold the same weights share them out."""
        given = self.strategy.shard
        return Sharding.named(given, ranks) if isinstance(given, str) else Sharding(**given.model_dump())

    @property
    def layout(self) -> Layout | None:
        """Rank order as a ``Layout``; None where the places of the pipeline differ, whose order is that of
        ``meshes``."""
        (dp, tp), *others = self.degrees
        return (
            Layout(pp=self.strategy.pp, dp=dp, sp=self.strategy.sp, tp=tp)
            if all(each == (dp, tp) for each in others)
            else None
        )

    @property
    def world_size(self) -> int:
        """How many ranks the job needs."""
        return sum(dp * tp for dp, tp in self.degrees) * self.strategy.sp

    @property
    def pipelined(self) -> bool:
        """Whether a ``PipelinePlan`` is needed: more than one tensor-parallel group."""
        return self.strategy.pp > 1 or self.strategy.interleave > 1 or self.degrees[0][0] > 1 or self.strategy.sp > 1

    @property
    def measures_slack(self) -> bool:
        """Whether slack-1f1b is asked for and its slack is to follow from measured times."""
        return self.strategy.schedule == "slack-1f1b" and not self.strategy.slack

    @property
    def tunes_sharding(self) -> bool:
        """Whether timed steps are to say what of sharding's communication is hidden."""
        return isinstance(self.strategy.overlap, OverlapKinds) and self.strategy.overlap.shard == "auto"

    @property
    def base_strategy(self) -> Strategy:
        """The strategy as written, ``auto`` slices as one slice and ``auto`` sequence parallelism as off."""
        section = self.strategy
        slices = Slices() if section.slices == "auto" else section.slices
        given = section.overlap
        overlap, hidden = (
            (given, "none" if given == "sync" else "both") if isinstance(given, str) else (given.tp, given.shard)
        )
        hidden = "both" if hidden == "auto" else hidden
        again = section.recompute
        kind, layers = (again, None) if isinstance(again, str) else (again.kind, again.layers)
        return Strategy(
            tp=self.degrees[0][1], overlap=overlap, shard_overlap=hidden, p1=slices.p1, p2=slices.p2,
            sequence_parallel=section.sequence_parallel is True, sp=section.sp, ring=self.sequence_cut.ring,
            recompute=kind, recompute_layers=layers,
        )  # fmt: skip

    def allows(self, chosen: Strategy) -> bool:
        """Whether a strategy that an earlier start chose is one that this job may mean."""
        section, free = self.strategy, list[str]()
        free += ["p1", "p2"] if section.slices == "auto" else []
        free += ["sequence_parallel"] if section.sequence_parallel == "auto" else []
        free += ["shard_overlap"] if self.tunes_sharding else []
        return replace(self.base_strategy, **{name: getattr(chosen, name) for name in free}) == chosen

    def model_spec(self, vocab: int) -> ModelSpec:
        """The model; ``vocab``, the tokenizer's, is used where the job does not say (a preset does not count
        as saying)."""
        given = dict(self.model)
        preset, config = given.pop("preset", None), given.pop("huggingface", None)
        if preset is not None and config is not None:
            raise JobError("stands beside model.preset", key="model.huggingface", fix="Keep one of the two")
        for key, value in (("preset", preset), ("huggingface", config)):
            if value is not None and not isinstance(value, str):
                raise JobError(f"{value!r} is not a text", key=f"model.{key}")
        base: dict[str, Any] = {"max_sequence": self.data.sequence, "vocab": vocab}
        if config is not None:
            base = ModelSpec.from_huggingface(config).to_dict()
        elif preset is not None:
            base = ModelSpec.preset_values(preset, specs_folder() / "models") | {"vocab": vocab}
        spec = ModelSpec.from_dict(base | given)
        if spec.vocab < vocab:
            raise JobError(
                f"{spec.vocab} is less than the tokenizer's {vocab} tokens",
                key="model.vocab",
                fix=f"Use at least {vocab}, or leave it out",
            )
        return spec

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which ``from_dict`` makes an equal job; what is not set is left out."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_toml(self) -> str:
        """The job with every default spelled out, as a file that ``read`` turns into an equal job."""
        return to_toml(self.to_dict())

    @property
    def content_hash(self) -> str:
        """sha256 over all values, 64 hex digits; equal for equal jobs, whatever the order or layout of their
        files."""
        return _digest(self.to_dict())

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the numbers a run computes; not of names, logging or how long it
        runs."""
        values = self.to_dict()
        for key in ("steps", "eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints", "log_every"):
            values["train"].pop(key)
        return _digest([values["model"], values["data"], values["train"]])

    def __hash__(self) -> int:
        return hash(self.content_hash)


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _located(values: dict[str, Any], base: Path) -> dict[str, Any]:
    """``values`` with relative paths made absolute from ``base``; what is no path, or of the wrong type,
    stays as it is."""

    def locate(text: Any) -> Any:
        if not isinstance(text, str) or text in (STDLIB, BYTES):
            return text
        return os.path.abspath(os.path.join(base, os.path.expanduser(text)))

    result = dict(values)
    for section, key in _PATHS:
        table = result.get(section)
        if isinstance(table, dict) and key in table:
            value = cast("dict[str, Any]", table)[key]
            many = isinstance(value, (list, tuple))
            result[section] = table | {
                key: [locate(text) for text in cast("Sequence[Any]", value)] if many else locate(value)
            }
    return result


def _is_text(key: str) -> bool:
    """Whether ``section.name`` takes text only, so that ``run.name=7`` needs no quotes."""
    section, _, name = key.partition(".")
    field = Job.model_fields.get(section)
    names = getattr(field.annotation, "model_fields", {}) if field else {}
    return name in names and names[name].annotation in (str, str | None)
