"""Job: what the user writes, in TOML. Every mistake is one paragraph: file, key, value, what is allowed, what to change.

[model]      preset or huggingface or the fields of ModelSpec; fields given beside a preset override it
[data]       text, pattern, tokenizer, sequence, eval_fraction, seed
[train]      steps, batch, micro_batch, learning rate and its schedule, AdamW, clipping, dtype, evaluation, checkpoints
[strategy]   tp, overlap, slices ("auto" or { p1 =, p2 = }), sequence_parallel (true, false, "auto")
[run]        name, folder, device, threads, peak_flops, timeline_steps
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from plait.core.errors import JobError, nearest
from plait.core.model import ModelSpec
from plait.core.strategy import Overlap, Strategy

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


class DataSection(_Section):
    """What to train on. text: files, folders or ``python-stdlib``. tokenizer: ``bytes`` or a Hugging Face tokenizer file."""

    text: str | tuple[str, ...] = "python-stdlib"
    pattern: str = "*"
    tokenizer: str = "bytes"
    sequence: Count = 128
    eval_fraction: Fraction = 0.02
    seed: int = 0

    @property
    def sources(self) -> tuple[str, ...]:
        """``text`` as a list."""
        return (self.text,) if isinstance(self.text, str) else self.text


class TrainSection(_Section):
    """Sizes are in sequences; ``batch`` is one optimizer step, cut into micro-batches of ``micro_batch`` (0: not cut)."""

    steps: Count = 300
    batch: Count = 8
    micro_batch: Natural = 0
    learning_rate: Positive = 3e-4
    min_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    warmup_steps: Natural = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Positive = 1e-8
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"
    seed: int = 0
    eval_every: Natural = 100
    eval_batches: Count = 8
    checkpoint_every: Natural = 100
    keep_checkpoints: Count = 2
    log_every: Count = 10
    init_from: str | None = None


class StrategySection(_Section):
    """How the model is split and its communication hidden; see ``Strategy``."""

    tp: Count = 1
    overlap: Overlap = "domino"
    slices: Literal["auto"] | dict[Literal["p1", "p2"], Count] = "auto"
    sequence_parallel: bool | Literal["auto"] = False


class RunSection(_Section):
    """Where and on what. peak_flops: a device's peak, for MFU; otherwise the matrix rate measured at the start is used."""

    name: str = ""
    folder: str = "runs"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count = 1
    peak_flops: Positive | None = None
    timeline_steps: Natural = 200


class Job(_Section):
    """A whole job file. ``source`` is the file it came from, for messages."""

    model: dict[str, Any]
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    strategy: StrategySection = StrategySection()
    run: RunSection = RunSection()

    @model_validator(mode="before")
    @classmethod
    def _needs_model(cls, values: Any) -> Any:
        if isinstance(values, dict) and "model" not in values:
            raise JobError("is missing", key="[model]", fix='Name a preset, such as preset = "gpt3-125m", or give the shapes')
        return values

    @staticmethod
    def read(path: str | Path, overrides: list[str] | None = None) -> Job:
        """The job in a TOML file, with ``section.key=value`` overrides applied. Raises JobError naming file and key."""
        file = Path(path)
        try:
            values = tomllib.loads(file.read_text())
        except FileNotFoundError:
            raise JobError("no such job file", file=str(file), fix="Check the path") from None
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"cannot be read: {error}", file=str(file)) from None
        except tomllib.TOMLDecodeError as error:
            raise JobError(f"is not valid TOML: {error}", file=str(file)) from None
        for override in overrides or []:
            _override(values, override)
        base = file.parent
        try:
            return Job.from_dict(values, base)
        except JobError as error:
            raise error.in_file(str(file)) from None

    @staticmethod
    def from_dict(values: dict[str, Any], base: Path = Path()) -> Job:
        """A checked job from plain values; a relative ``model.huggingface`` is looked up from ``base``."""
        try:
            job = Job.model_validate(values)
        except ValidationError as error:
            raise _explain(error) from None
        if "huggingface" in job.model:
            found = (base / cast(str, job.model["huggingface"])).resolve()
            job = job.model_copy(update={"model": {**job.model, "huggingface": str(found)}})
        job.check()
        return job

    def check(self) -> None:
        """Raise JobError for values that are fine alone and wrong together."""
        train = self.train
        if train.batch % self.micro_batch:
            raise JobError(f"{train.batch} is not a multiple of micro_batch = {self.micro_batch}", key="train.batch")
        if train.warmup_steps > train.steps:
            raise JobError(f"{train.warmup_steps} exceeds steps = {train.steps}", key="train.warmup_steps")
        if train.min_learning_rate > train.learning_rate:
            raise JobError(f"{train.min_learning_rate} exceeds learning_rate = {train.learning_rate}", key="train.min_learning_rate")
        spec = self.model_spec(vocab=1)
        self.base_strategy.check(spec, batch=self.micro_batch, sequence=self.data.sequence)

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch."""
        return self.train.micro_batch or self.train.batch

    @property
    def base_strategy(self) -> Strategy:
        """The strategy as written, ``auto`` slices as one slice."""
        slices = {} if self.strategy.slices == "auto" else self.strategy.slices
        return Strategy(tp=self.strategy.tp, overlap=self.strategy.overlap, **cast("dict[str, int]", slices),
                        sequence_parallel=self.strategy.sequence_parallel is True)  # fmt: skip

    def model_spec(self, vocab: int) -> ModelSpec:
        """The model; ``vocab``, the tokenizer's, is used where the job does not say."""
        values = dict(self.model)
        preset, config = values.pop("preset", None), values.pop("huggingface", None)
        if preset and config:
            raise JobError("stands beside model.preset", key="model.huggingface", fix="Keep one of the two")
        base: dict[str, Any] = {"vocab": vocab, "max_sequence": self.data.sequence}
        if config:
            base = ModelSpec.from_huggingface(config).to_dict()
        elif preset:
            base = ModelSpec.preset(str(preset), specs_folder() / "models").to_dict()
        if preset and "vocab" not in values and vocab > 1:
            values["vocab"] = vocab
        return ModelSpec.from_dict({**base, **values})

    def to_dict(self) -> dict[str, Any]:
        """Plain values from which ``from_dict`` makes an equal job."""
        return self.model_dump(mode="json")

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the numbers a run computes; not of names, logging or how long it runs."""
        values = self.to_dict()
        for key in ("steps", "eval_every", "eval_batches", "checkpoint_every", "keep_checkpoints", "log_every"):
            values["train"].pop(key)
        return hashlib.sha256(json.dumps([values["model"], values["data"], values["train"]], sort_keys=True).encode()).hexdigest()


def specs_folder() -> Path:
    """Where the shipped presets lie: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).resolve().parent.parent
    return next(f for f in (package / "specs", package.parent / "specs") if f.is_dir() or f.parent == package.parent)


def _override(values: dict[str, Any], override: str) -> None:
    path, sign, text = override.partition("=")
    keys = path.strip().split(".")
    if not sign or len(keys) < 2 or not all(keys):
        raise JobError(f"'{override}' is not an override", fix="Write section.key=value, such as train.steps=100")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = values
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise JobError(f"'{key}' is not a table", key=path)
    table[keys[-1]] = value


def _explain(error: ValidationError) -> JobError:
    """The first problem pydantic found, in our words."""
    first = error.errors(include_url=False)[0]
    path = [
        str(part) for part in first["loc"] if part not in ("tuple[str, ...]", "str", "bool", "literal['auto']") and "dict[" not in str(part)
    ]
    key = ".".join(path)
    if first["type"] == "extra_forbidden":
        known = _known(path[:-1])
        return JobError(f"unknown key{nearest(path[-1], known)}", key=key, fix=f"Known here: {', '.join(sorted(known))}")
    message = first["msg"].replace("Input should be", "should be").replace("Value error, ", "")
    return JobError(f"{first.get('input')!r} {message}", key=key)


def _known(path: list[str]) -> list[str]:
    fields: Any = Job.model_fields
    for part in path:
        annotation = fields[part].annotation if part in fields else None
        fields = getattr(annotation, "model_fields", {})
    return list(fields)
