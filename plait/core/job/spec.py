"""Job: the settings that the user writes, in TOML. Every mistake is one paragraph: file, key,
value, allowed values, what to change.

Sections and keys are in ``core.job.settings``; this file has what they mean together.

A relative path in a file is relative to that file's folder, a path on the command line to the
current folder; ``run.folder``, where results go, is always relative to the current folder.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, model_validator

from plait.core.base.codec.data import Section, decode
from plait.core.base.codec.stamped import digest
from plait.core.base.codec.toml_text import COMMAND_LINE, override, read_toml, to_toml
from plait.core.base.env import specs_folder
from plait.core.base.errors import CheckpointError, DataError, JobError, PlaitError, ScheduleError, nearest
from plait.core.base.numbers import shown
from plait.core.job.advice import overlapping_keys, with_valid_changes
from plait.core.job.cluster_settings import KubernetesSection, PlaceSection, SlurmSection
from plait.core.job.framework_names import refuse_peers_names
from plait.core.job.open_keys import with_open_keys, with_open_strategy, with_steps_of_tokens
from plait.core.job.recipe import RecipeSection, planning_only_keys, refuse_untrained
from plait.core.job.resuming import Change, effect_of, flatten
from plait.core.job.rules import check_job
from plait.core.job.settings import (
    BYTES,
    ClusterSection,
    DataSection,
    OverlapKinds,
    PlanSection,
    RunSection,
    Slices,
    StrategySection,
    TrainSection,
)
from plait.core.job.tables import check_tables
from plait.core.job.texts import PREDICTION_FILES, check_exists, resolve_paths
from plait.core.model.precision import unquantised
from plait.core.model.spec import ModelSpec
from plait.core.parallel.layout import ContextSplit, Layout
from plait.core.parallel.sharding import Sharding
from plait.core.parallel.strategy import Strategy


class Job(Section):
    """A whole job file, checked.

    >>> Job.from_dict({"model": {"preset": "gpt3-125m"}, "strategy": {"tp": 4}}).base_strategy.tp
    4
    """

    model: dict[str, Any]
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    strategy: StrategySection = StrategySection()
    cluster: ClusterSection = ClusterSection()
    plan: PlanSection = PlanSection()
    recipe: RecipeSection = RecipeSection()
    run: RunSection = RunSection()
    slurm: SlurmSection = SlurmSection()
    kubernetes: KubernetesSection = KubernetesSection()
    place: PlaceSection = PlaceSection()
    open: Annotated[tuple[str, ...], Field(strict=False, exclude=True)] = ()
    """Settings that are left to the planner: they are ``auto`` in the file, and have their defaults
    in the job."""

    @staticmethod
    def read(path: str | Path, overrides: Sequence[str] = (), *, searched: bool = True) -> Job:
        """Return the job in a TOML file, with ``section.key=value`` overrides applied: each changes
        its own key alone. searched: if False and the file has no [strategy], other keys of the
        strategy have their defaults instead of being left to the planner. Raises JobError naming
        file and key."""
        with naming(path, overrides):
            written = resolve_paths(read_toml(path), Path(path).parent)
            values = _overridden(with_open_strategy(written, overrides) if searched else written, overrides)
            try:
                return Job.from_dict(values)
            except JobError as error:
                raise with_valid_changes(error, values, _refusal) from None

    @staticmethod
    def from_dict(values: dict[str, Any], base: str | Path = ".") -> Job:
        """Return a checked job from plain values; relative paths are relative to ``base``."""
        job = decode(Job, resolve_paths(values, Path(base)))
        job.check()
        return job

    @staticmethod
    def completed(
        values: Mapping[str, Any], overrides: Sequence[str], complete: Callable[[dict[str, Any]], None]
    ) -> Job:
        """Return a checked job from incomplete values: ``section.key=value`` overrides are applied,
        then ``complete`` fills in what is missing."""
        said = _overridden(values, overrides)

        def job(values: Mapping[str, Any]) -> Job:
            found = deepcopy(dict(values))
            complete(found)
            return Job.from_dict(found)

        try:
            return job(said)
        except JobError as error:
            raise with_valid_changes(error, said, partial(_refusal, read=job)) from None

    def changed(self, overrides: Sequence[str]) -> Job:
        """Return the job with ``section.key=value`` overrides applied."""
        values = _overridden(self.to_dict(), overrides)
        try:
            return Job.from_dict(values)
        except JobError as error:
            raise error if error.file else with_valid_changes(error.in_file(COMMAND_LINE), values, _refusal) from None

    def with_choices_of(self, planned: Job) -> Job:
        """Return the job with every setting that it leaves to the planner as ``planned`` has it.
        Raises JobError if a rule forbids the combination."""
        values, chosen = self.to_dict(), planned.to_dict()
        for key in self.open:
            section, _, name = key.partition(".")
            values[section][name] = chosen[section][name]
        return Job.from_dict(values)

    def named(self, name: str) -> Job:
        """Return the job with ``name`` as its run's name, unless the job names its run."""
        return self.model_copy(update={"run": self.run.named(name)})

    @model_validator(mode="before")
    @classmethod
    def _has_model(cls, values: Any) -> Any:
        if "model" not in values and not any(nearest(key, ["model"]) for key in values if key not in cls.model_fields):
            raise JobError(
                "is missing", key="[model]", fix='Name a preset, such as preset = "gpt3-125m", or give the shapes'
            )
        refuse_peers_names(values)
        return with_open_keys(with_steps_of_tokens(values))

    def check(self) -> None:
        """Raise JobError for values that are valid alone and contradict each other."""
        check_job(self)

    @property
    def planning_only(self) -> tuple[tuple[str, Any], ...]:
        """Keys that can be planned and not be trained yet, with their values."""
        return tuple((key, value) for key, value, _ in planning_only_keys(self))

    @property
    def without_planning_only(self) -> Job:
        """The job without settings that can only be planned. Raises JobError if the job is not
        valid without them."""
        values = self.to_dict()
        values.pop("recipe", None)
        values["train"]["precision"] = unquantised(self.train.precision)
        return Job.from_dict(values)

    def check_trains(self, model: ModelSpec, doing: str = "trained") -> None:
        """Raise JobError if the job with this model can be planned, and not be trained (or
        ``doing``) yet."""
        refuse_untrained(self, model, doing)

    def check_predicted(self, where: PlaceSection) -> None:
        """Raise JobError for a file that a prediction may read and that does not exist. where: the
        job's [place]."""
        check_exists(self.to_dict() | {"place": where.model_dump()}, PREDICTION_FILES)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one optimizer step, for gradient accumulation or to fill a pipeline."""
        each = self.train.micro_batch_size * self.degrees[0][0]
        return -(-self.train.global_batch_size // each) if each else 1

    @property
    def micro_batch(self) -> int:
        """Sequences of one micro-batch, over all data-parallel replicas."""
        return self.train.global_batch_size // self.num_micro_batches

    @property
    def degrees(self) -> tuple[tuple[int, int], ...]:
        """(dp, tp) of every pipeline rank. Raises JobError for a list that is not as long as the
        pipeline."""
        section, found = self.strategy, list[tuple[int, ...]]()
        for key, given in (("dp", section.dp), ("tp", section.tp)):
            each = (given,) * section.pp if isinstance(given, int) else given
            if len(each) != section.pp:
                raise JobError(
                    f"{list(each)} has {len(each)} numbers for pp = {section.pp}",
                    key=f"strategy.{key}",
                    changes=[
                        *({f"strategy.{key}": one} for one in dict.fromkeys((each[0], 1))),
                        {"strategy.pp": len(each)},
                    ],
                )
            found.append(each)
        return tuple(zip(*found, strict=True))

    @property
    def sequence_cut(self) -> ContextSplit:
        """Division of sequences among cp ranks. Raises JobError if ulysses x ring is not cp."""
        cp, kind = self.strategy.cp, self.strategy.cp_comm_type
        if isinstance(kind, str):
            return ContextSplit(cp=cp, ring=cp if kind == "ring" else 1)
        if kind.ulysses * kind.ring != cp:
            problem = f"{kind.ulysses} x {kind.ring} is not cp = {cp}"
            changes: list[dict[str, Any]] = [
                {"strategy.cp": kind.ulysses * kind.ring},
                {"strategy.cp_comm_type": "ulysses"},
            ]
            raise JobError(problem, key="strategy.cp_comm_type", changes=changes)
        return ContextSplit(cp=cp, ring=kind.ring)

    def sharding(self, ranks: int) -> Sharding:
        """Return the sharding over ``ranks`` ranks that hold the same weights."""
        given = self.strategy.shard
        return Sharding.named(given, ranks) if isinstance(given, str) else Sharding(**given.model_dump())

    @property
    def layout(self) -> Layout:
        """Layout of the ranks, which fixes their order."""
        return Layout(self.degrees, self.strategy.cp)

    @property
    def world_size(self) -> int:
        """Number of ranks that the job needs."""
        return sum(dp * tp for dp, tp in self.degrees) * self.strategy.cp

    @property
    def leaves_ranks_open(self) -> bool:
        """True if the planner chooses the number of ranks, so that it is not known yet."""
        return bool({f"strategy.{key}" for key in ("tp", "dp", "pp", "cp")}.intersection(self.open))

    @property
    def measures_slack(self) -> bool:
        """True if the schedule is slack-1f1b and its slack is to follow from measured times."""
        return self.strategy.schedule == "slack-1f1b" and not self.strategy.slack

    @property
    def tunes_sharding(self) -> bool:
        """True if timed steps are to decide which of sharding's communication overlaps
        computation."""
        return isinstance(self.strategy.overlap, OverlapKinds) and self.strategy.overlap.shard == "auto"

    @property
    def base_strategy(self) -> Strategy:
        """The strategy as written, ``auto`` slices as one slice and ``auto`` sequence parallelism
        as off."""
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
            tp=self.degrees[0][1], overlap=overlap, shard_overlap=hidden, p1=slices.batch, p2=slices.columns,
            sequence_parallel=section.sequence_parallel is True, cp=section.cp, ring=self.sequence_cut.ring,
            ep=section.ep, whole_experts=section.etp == 1 and self.degrees[0][1] > 1,
            awaits_experts=not isinstance(given, str) and given.ep == "off",
            recompute=kind, recompute_layers=layers, compile=section.compile is True,
            cuda_graphs=section.cuda_graphs is True, streams=section.streams,
        )  # fmt: skip

    def model_spec(self, vocab: int) -> ModelSpec:
        """Return the model. Its vocabulary is the job's, else the Hugging Face config's, else
        ``vocab``, the tokenizer's. With the byte tokenizer, which is for trying things out, a
        preset keeps its own vocabulary. Raises JobError for a vocabulary that is smaller than
        ``vocab``, and for contradictory shapes."""
        given = dict(self.model)
        preset, config = given.pop("preset", None), given.pop("huggingface", None)
        if preset is not None and config is not None:
            raise JobError("conflicts with model.preset", key="model.huggingface",
                           changes=[{"model.huggingface": None}, {"model.preset": None}])  # fmt: skip
        for key, value in (("preset", preset), ("huggingface", config)):
            if value is not None and not isinstance(value, str):
                raise JobError(f"{shown(value)} is not a text", key=f"model.{key}", fix="Write it in quotes")
        base: dict[str, Any] = {"max_sequence": self.data.sequence_length, "vocab": vocab}
        if config is not None:
            base = ModelSpec.from_huggingface(config).to_dict()
        elif preset is not None:
            values = ModelSpec.preset_values(preset, specs_folder() / "models")
            base = values if self.data.tokenizer == BYTES else values | {"vocab": vocab}
        if config is None:
            base["vocab"] += -base["vocab"] % self.data.vocab_multiple
        if self.data.vocab_multiple > 1 and ("vocab" in given or config is not None):
            raise JobError("the model sets the size of its vocabulary", key="data.vocab_multiple",
                           changes=[{"data.vocab_multiple": 1}])  # fmt: skip
        try:
            spec = ModelSpec.from_dict(_changed(base, given))
        except JobError as error:
            if preset is None or (error.key or "").removeprefix("model.") in given:
                raise
            problem = f"{error.problem} ({', '.join(given)} of [model] override the preset)"
            raise JobError(problem, key=error.key, fix=error.fix, changes=error.changes) from None
        if spec.vocab < vocab:
            fix = f"Use at least {vocab}, or leave it out"
            if config is not None or self.train.init_from:  # the loaded embedding has that many rows
                fix = "Name the tokenizer of this model with data.tokenizer"
            raise JobError(f"{spec.vocab} is less than the tokenizer's {vocab} tokens", key="model.vocab", fix=fix)
        return spec

    def to_dict(self) -> dict[str, Any]:
        """Return plain values from which ``from_dict`` makes an equal job. Unset values are left
        out, and so are a [place] and a [recipe] with defaults only."""
        unset = {"place": self.place == PlaceSection(), "recipe": self.recipe == RecipeSection()}
        return {key: value for key, value in self._values().items() if not unset.get(key)}

    @property
    def planned(self) -> dict[str, Any]:
        """Plain values from which a plan is made: all but [place]."""
        return {key: value for key, value in self.to_dict().items() if key != "place"}

    def _values(self) -> dict[str, Any]:
        values = self.model_dump(mode="json", exclude_none=True)
        if self.train.tokens:  # the tokens determine the steps
            del values["train"]["steps"]
        for key in self.open:
            section, _, name = key.partition(".")
            values[section][name] = "auto"
        return values

    def to_toml(self) -> str:
        """Return the job as TOML with every default written out; ``read`` makes an equal job from
        it."""
        return to_toml(self._values())

    @property
    def content_hash(self) -> str:
        """sha256 over all values, 64 hex digits; equal jobs have equal hashes, whatever the order
        or layout of their files."""
        return digest(self.to_dict())

    @property
    def _fixed(self) -> dict[str, Any]:
        """Values that must stay the same as long as a run does, by key: model, data, and the shape
        of the state."""
        return {key: value for key, value in self._numbers.items() if effect_of(key) == "refused"}

    @property
    def _numbers(self) -> dict[str, Any]:
        """Values that determine the numbers a run computes, by key."""
        values = self.to_dict()
        named = [one for section in ("model", "data", "train") for one in flatten(values[section], section)]
        return {key: value for key, value in named if effect_of(key) != "at once"}

    @property
    def fingerprint(self) -> str:
        """Hash of the values that must stay the same as long as a run does. Names, logging, the
        run's length and learning rates are not part of it."""
        return digest(self._fixed)

    def changes(self, old: Job) -> tuple[Change, ...]:
        """Return the settings that determine numbers and differ from ``old``; changes that are not
        allowed come first."""
        now, before = self._numbers, old._numbers
        found = [
            Change(key, before.get(key), now.get(key), effect_of(key) != "refused")
            for key in {**now, **before}
            if before.get(key) != now.get(key)
        ]
        return tuple(sorted(found, key=lambda one: one.allowed))

    def __hash__(self) -> int:
        return hash(self.content_hash)


_ABOUT: dict[type[PlaitError], str] = {
    ScheduleError: "strategy.schedule",
    CheckpointError: "train.init_from",
    DataError: "data.tokenizer",
}
"""Key of the job that an error before the run is about, by the error's class."""


@contextmanager
def naming(path: str | Path, overrides: Sequence[str] = ()) -> Generator[None]:
    """Add the place of a setting to errors about it: the job file, or the command line."""
    try:
        try:
            yield
        except tuple(_ABOUT) as error:  # an error in a file that the job names
            raise JobError(str(error), key=_ABOUT[type(error)]) from None
    except JobError as error:
        if error.file or (error.key or "").startswith("-"):  # about another file, or an option
            raise
        typed = any(overlapping_keys(setting.partition("=")[0].strip(), error.key) for setting in overrides)
        raise error.in_file(COMMAND_LINE if typed else str(path)) from None


def _changed(base: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return a model's values with a job's in their place: a table of experts replaces key by key."""
    experts = given.get("experts")
    if isinstance(experts, dict):
        given = given | {"experts": (base.get("experts") or {}) | cast("dict[str, Any]", experts)}
    return base | given


def _refusal(values: dict[str, Any], read: Callable[[dict[str, Any]], Job] = Job.from_dict) -> JobError | None:
    """Return the error in plain values of a job, or None if they are valid. read: makes a job from
    values."""
    try:
        read(values)
    except JobError as error:
        return error
    return None


def _overridden(values: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return plain values with ``section.key=value`` overrides applied. Raises JobError for a
    setting without its table."""
    result, typed = override(values, overrides, _is_text)
    check_tables(result, Job.model_fields.keys() - {"open"}, typed)
    return result


def _is_text(key: str) -> bool:
    """Return True if ``section.name`` takes text only, so that ``run.name=7`` needs no quotes."""
    section, _, name = key.partition(".")
    field = Job.model_fields.get(section)
    names = getattr(field.annotation, "model_fields", {}) if field else {}
    return name in names and names[name].annotation in (str, str | None)
