"""A framework's settings as rows of a table, and the engine that reads and writes configurations by
these rows.

A setting that equals one key of a job is one row: the engine reads it, asks for it if its value is
unknown, and writes it. Settings that mean something only together are rows with ``part``: the
engine reads their values, and one function of the framework's reader and one of its writer combine
them. A key without a setting in the framework is a row without a name; its refusal is reported for
every value but the default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

from plait.core.job.spec import Job
from plait.core.parallel.strategy import SLICED
from plait.core.step.schedules import own_chunks, takes_chunks
from plait.core.step.stages import Stage, split_layers
from plait.formats.base.frameworks import FRAMEWORKS, framework_of
from plait.formats.base.parsed_config import ParsedConfig, number, whole_number

Kind = Mapping[Any, Any] | Callable[[ParsedConfig, str, Any], Any]
"""Plait's values by the framework's words, or a function that reads a value and raises JobError for
a wrong one."""


def verbatim(_: ParsedConfig, __: str, value: Any) -> Any:
    """Return the value unchanged."""
    return value


def switch(_: ParsedConfig, __: str, ___: Any) -> bool:
    """Return True: a flag without a value is on wherever it occurs."""
    return True


def count(parsed: ParsedConfig, name: str, value: Any) -> int:
    """Return a whole number from 1. Raises JobError for any other value."""
    found = whole_number(parsed, name, value)
    if found < 1:
        raise parsed.refuse(name, f"{found} is not positive", "Use at least 1")
    return found


def share(parsed: ParsedConfig, name: str, value: Any) -> float:
    """Return a finite number from 0. Raises JobError for any other value."""
    found = number(parsed, name, value)
    if not 0 <= found < math.inf:
        problem = f"{value} is negative" if found < 0 else f"{value} is not finite"
        raise parsed.refuse(name, problem, "Use at least 0")
    return found


def boolean(parsed: ParsedConfig, name: str, value: Any) -> bool:
    """Return a bool. Raises JobError for any other value."""
    if not isinstance(value, bool):
        raise parsed.refuse(name, f"'{value}' is neither true nor false", "Write true or false, without quotes")
    return value


class Row(NamedTuple):
    """One setting of a framework. name: the setting's name; empty if the framework has none. key:
    the job's key. kind: how values are read. default: the value that a missing setting means, which
    is not written; None if there is none. refusal: why the framework cannot express a value of the
    key. part: the setting is combined with others. omitted: a value that is not written, although a
    file without it leaves the key open."""

    name: str
    key: str = ""
    kind: Kind = verbatim
    default: Any = None
    refusal: str = ""
    part: bool = False
    omitted: Any = None


part = partial(Row, part=True)


class Settings(dict[str, Any]):
    """Values of a framework's settings, by name; a missing setting has the default of its table
    row."""

    def __init__(self, rows: Mapping[str, Row], values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._rows = rows

    def __missing__(self, name: str) -> Any:
        return self._rows[name].default


class _Any:
    """The type of ``ANY``, a default that equals no value."""


ANY = _Any()


@dataclass(frozen=True, kw_only=True)
class Table:
    """All known settings of a framework. rows: settings that are read. unmodelled: settings that
    change time or memory in ways that Plait does not model, with the value that changes neither.
    harmless: settings without effect on time and memory. A name ending in ``*`` matches every name
    with that prefix. prefix: prepended to names in messages. whole: the written text overrides a
    configuration with values of its own, so defaults are written, too."""

    rows: tuple[Row, ...]
    unmodelled: Mapping[str, Any]
    harmless: Collection[str]
    prefix: str = ""
    whole: bool = False

    @cached_property
    def named(self) -> dict[str, Row]:
        """Rows of the table, by the setting's name."""
        return {row.name: row for row in self.rows if row.name}

    @cached_property
    def keys(self) -> dict[str, str]:
        """The job's keys by setting; the user is asked for a key if its setting's value is unknown
        before a run."""
        return {name: row.key for name, row in self.named.items() if row.key}

    def knows(self, name: str) -> bool:
        """True if the setting is read, unmodelled or harmless."""
        return any(name in some or starts_of(name, some) for some in (self.named, self.unmodelled, self.harmless))

    def read(self, parsed: ParsedConfig, settings: Iterable[tuple[str, Any, str]]) -> Settings:
        """Sort settings by kind, set the job's keys by rows, and return the values by name.
        settings: name, value and text of each. Raises JobError for wrong values."""
        found = dict[str, Any]()
        for name, value, text in settings:
            if row := self.named.get(name):
                found[name] = self._value(parsed, row, value)
            elif name in self.unmodelled or starts_of(name, self.unmodelled):
                same = self.unmodelled.get(name, ANY) == value
                (parsed.harmless if same else parsed.unmodelled).append(self.prefix + name if same else text)
            elif name in self.harmless or starts_of(name, self.harmless):
                parsed.harmless.append(self.prefix + name)
            else:
                parsed.note_unknown(name, text, self.keys)
        for row in self.rows:
            if row.name and row.key and not row.part and (value := found.get(row.name, row.default)) is not None:
                parsed.set(row.key, value)
        return Settings(self.named, found)

    def _value(self, parsed: ParsedConfig, row: Row, value: Any) -> Any:
        name = self.prefix + row.name
        if callable(row.kind):
            return row.kind(parsed, name, value)
        if not isinstance(value, str | int | float) or value not in row.kind:
            raise parsed.refuse(name, f"'{value}' is unknown", f"Use {', '.join(map(str, row.kind))}")
        return row.kind[value]

    def write(self, words: WriterContext) -> dict[str, Any]:
        """Return the settings that express a job, by name; ``words`` collects what cannot be
        expressed."""
        found = dict[str, Any]()
        for row in self.rows:
            value = None if row.part else words.value(row.key)
            if value is None or (not (self.whole and row.name) and value in (row.default, row.omitted)):
                continue
            written = _written(row.kind, value) if row.name else None
            if written is None:
                shown = f" = {value}".lower() if isinstance(value, str | int | float | tuple) else ""
                words.note_unsupported(f"{row.key}{shown} ({row.refusal})")
            else:
                found[row.name] = written
        return found


def starts_of(name: str, names: Iterable[str]) -> bool:
    """True if a name has the prefix of one of ``names`` that ends in ``*``."""
    return any(one.endswith("*") and name.startswith(one[:-1]) for one in names)


def _written(kind: Kind, value: Any) -> Any:
    if not callable(kind):
        return next((theirs for theirs, ours in kind.items() if ours == value), None)
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass
class Emitted:
    """A written configuration. text: a file's text, or a command line. unsupported: what the
    framework cannot express, and its replacement. target: the framework's version. launch: command
    lines that start the run."""

    text: str = ""
    unsupported: list[str] = field(default_factory=list[str])
    target: str = ""
    launch: list[str] = field(default_factory=list[str])


class WriterContext:
    """A complete job while a framework's configuration is written from it, and what could not be
    expressed so far.

    dp, tp: degrees of the first pipeline rank. micro: sequences per micro-batch and replica.
    replicas: ranks with the same weights, dp x cp. unsupported: what the framework cannot
    express."""

    def __init__(self, job: Job) -> None:
        self.job, self.section, self.strategy = job, job.strategy, job.base_strategy
        self.dp, self.tp = job.degrees[0]
        self.micro = -(-job.micro_batch // self.dp)
        self.replicas = self.dp * job.strategy.cp
        self.sharding = job.sharding(self.replicas)
        self.model = job.model_spec(vocab=1)
        self.unsupported: list[str] = []
        self._values = {
            "strategy.tp": self.tp, "train.micro_batch_size": self.micro,
            "strategy.sequence_parallel": self.tp > 1 and self.strategy.sequence_parallel,
            "shard.secondary": self.sharding.secondary,
        }  # fmt: skip
        if len(set(job.degrees)) > 1:
            self.note_unsupported("unequal pipeline ranks (the first one's tp and dp are used for all)")
        if self.strategy.overlap in SLICED and self.tp > 1 and (self.strategy.p1, self.strategy.p2) != (1, 1):
            self.note_unsupported(f"slices {self.strategy.p1}x{self.strategy.p2} of Domino (their batch is not sliced)")
        if self.model.without:
            self.note_unsupported(f"other parts of the model ({', '.join(self.model.without)}; not planned either)")

    def value(self, key: str) -> Any:
        """Return the job's value of a key; None if the job lacks that part."""
        if key in self._values:
            return self._values[key]
        section, *names = key.split(".")
        found = self.model if section == "model" else getattr(self.job, section)
        for name in names:
            found = getattr(found, name, None)
        return found

    def note_unsupported(self, what: str) -> None:
        """Note something that the framework cannot express; a repeated note is ignored."""
        if what not in self.unsupported:
            self.unsupported.append(what)

    def schedule(self, framework: str, known: Collection[str], instead: Mapping[str, str]) -> str:
        """Return the framework's word for the schedule, or for a replacement that it runs with as
        many micro-batches. known: schedules that the framework can express. instead: replacements
        by schedule."""
        name, rounds = self.section.schedule, self.job.num_micro_batches
        runs = partial(FRAMEWORKS[framework].supports_schedule, pp=self.section.pp, num_micro=rounds)
        tried = [one for one in (name, instead.get(name, "1f1b"), "1f1b", "gpipe") if one in known]
        other = next(filter(runs, tried), tried[0])
        if other != name:
            why = f", not of {rounds} micro-batches" if name in known else ""
            self.note_unsupported(f"schedule = {name}{why} ({other} stands for it)")
        return other

    def stages(self, schedule: str) -> tuple[Stage, ...]:
        """Return the model's stages for a schedule, chunk by chunk and in order of the pipeline
        ranks."""
        rounds = self.section.virtual_stages if takes_chunks(schedule) else own_chunks(schedule)
        given = self.section.stage_layers
        stages = self.section.pp * max(1, rounds)
        runs = framework_of(self.job.plan.framework)
        if runs and len(given) != stages:  # embedding and head may be stages of their own
            return runs.options.stages(self.model.num_layers, stages)
        return split_layers(self.model.num_layers, stages, given if len(given) == stages else ())

    def launch(self, program: str, each: int) -> list[str]:
        """Return command lines: torchrun on every node of ``each`` ranks, and the same through
        Slurm."""
        ranks = self.job.world_size
        nodes, per = max(1, -(-ranks // each)), min(each, ranks)
        several = f" --nnodes={nodes} --node-rank=$NODE_RANK --master-addr=$HOST --master-port=29500"
        meets = f" --rdzv-backend=c10d --rdzv-endpoint=$HOST:29500 --nnodes={nodes}"
        return [
            f"torchrun --nproc-per-node={per}{several if nodes > 1 else ''} {program}",
            f"srun --nodes={nodes} --ntasks-per-node=1 --gpus-per-node={per} "
            f"torchrun --nproc-per-node={per}{meets if nodes > 1 else ''} {program}",
        ]
