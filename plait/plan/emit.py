"""A strategy in the settings of other frameworks.

Settings are written, read back, and predicted as their framework would run them. The strategy in
another framework's file is compared with the best that a search finds.
"""

from __future__ import annotations

import json
import re
from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from plait.core.base.errors import JobError, PlaitError, nearest
from plait.core.base.text import in_bytes, in_seconds
from plait.core.job.spec import Job
from plait.formats.base.frameworks import FRAMEWORKS
from plait.formats.base.literals import python_settings
from plait.formats.base.parsed_config import ParsedConfig
from plait.formats.base.rows import Emitted, WriterContext
from plait.formats.base.shell import arguments
from plait.formats.deepspeed import parse_deepspeed, write_deepspeed
from plait.formats.megatron.emit import write_megatron
from plait.formats.megatron.flags import ROWS
from plait.formats.megatron.read import parse_megatron
from plait.formats.torchtitan.emit import write_torchtitan
from plait.formats.torchtitan.read import parse_torchtitan
from plait.plan.answer import Planner
from plait.plan.explain.reasons import differences
from plait.plan.search.candidate import Candidate

SOURCE_NAME = "what is emitted"


@dataclass(frozen=True)
class Writer:
    """A framework's settings writer. program: the program that torchrun starts. read: reads written
    settings as the framework would."""

    write: Callable[[WriterContext], Emitted]
    program: str
    read: Callable[[str], ParsedConfig]


WRITERS: Mapping[str, Writer] = {
    "torchtitan": Writer(
        write_torchtitan, "-m torchtitan.train --module plait_plan --config planned",
        lambda text: parse_torchtitan(SOURCE_NAME, python_settings(text, SOURCE_NAME), python=True),
    ),
    "megatron": Writer(
        write_megatron, "pretrain_gpt.py ARGUMENTS", lambda text: parse_megatron(SOURCE_NAME, arguments(text))
    ),
    "deepspeed": Writer(
        write_deepspeed, "PROGRAM --deepspeed_config ds_config.json",
        lambda text: parse_deepspeed(SOURCE_NAME, json.loads(text)),
    ),
}  # fmt: skip
HOW = "This is {file}. With strategy=auto, the same command searches for the fastest strategy of {framework}"
"""A remark on a file whose strategy is predicted, and not searched for."""
DEGREES = "strategy.tp=auto strategy.pp=auto strategy.dp=auto"
"""Settings that search for parallel degrees alone."""
SAME = 0.005
"""Relative gain in a step's time: a search that finds less is reported as finding nothing faster.
"""


def check_framework(framework: str, other_values: Sequence[str] = ()) -> None:
    """Raise JobError for a framework that ``emit`` does not know. other_values: further values that
    --show accepts."""
    if framework not in (known := (*other_values, *WRITERS)):
        problem = f"'{framework}' is unknown{nearest(framework, known)}"
        raise JobError(problem, key="--show", fix=f"Use {' or '.join(known)}")


def check_emits(job: Job, framework: str) -> None:
    """Raise JobError for a job that cannot be written in the framework's settings."""
    model = job.model_spec(vocab=1)
    if framework != "megatron" or job.train.precision == "nvfp4":
        job.check_trains(model, "emitted")


def emit(job: Job, framework: str, ranks_per_node: int = 0) -> Emitted:
    """Return a job's strategy as settings of ``framework``. job: leaves nothing open.
    ranks_per_node: adds lines that start it with torchrun; 0: none. Raises JobError for unknown
    frameworks, and for a job that the framework cannot express."""
    check_framework(framework)
    words, writer = WriterContext(job), WRITERS[framework]
    found = writer.write(words)
    if ranks_per_node:
        found.launch = words.launch(writer.program, ranks_per_node)
    return found


def read_back(emitted: Emitted, framework: str, job: Job) -> ParsedConfig:
    """Return emitted settings as the framework's reader understands them.

    job: the job that they were made from. It supplies the model, which a framework may describe
    only approximately, the ranks and the cluster, and what DeepSpeed leaves to the training
    program. Raises JobError.
    """
    told = WRITERS[framework].read(emitted.text)
    if framework == "deepspeed":
        told.set("data.sequence_length", job.data.sequence_length)
        if job.strategy.pp == 1 and told.get("strategy.recompute") is None:  # the model's own code recomputes layers
            again = job.base_strategy.recompute in ("full", "layer")
            told.set("strategy.recompute", "full" if again else "none")
    told.values["model"] = dict(job.model)
    told.values["cluster"] = job.cluster.model_dump(exclude_none=True) | {"ranks": job.world_size}
    return told


def as_emitted(planner: Planner, emitted: Emitted, framework: str, job: Job) -> Candidate:
    """Return the prediction of settings that were emitted for a job. Raises PlaitError if they
    cannot be predicted."""
    told = read_back(emitted, framework, job)
    if not {"preset", "huggingface"} & job.model.keys():
        told.values["model"].setdefault("vocab", planner.vocab)
    other = replace(planner, job=told.job(), configured_framework=told.runs)
    return other.predict(other.job)


def compare_predictions(planner: Planner, best: Candidate, emitted: Emitted, framework: str) -> str:
    """Return a sentence that compares the planned strategy's prediction with that of the emitted
    settings."""
    runs, planned = FRAMEWORKS[framework], planner.framework
    before = f"Planned for {planned.version if planned else 'Plait'}: {_figures(best)}"
    try:
        after = as_emitted(planner, emitted, framework, best.job)
    except PlaitError as error:
        return f"{before}. As {runs.version} would run these settings, nothing is predicted: {error}"
    short = "" if after.memory.fits else ", which does not fit"
    return f"{before}. As {runs.version} would run these settings: {_figures(after)}{short}."


def _figures(candidate: Candidate) -> str:
    usable = in_bytes(candidate.memory.usable)
    return f"{in_seconds(candidate.seconds)} a step, {in_bytes(candidate.most_memory)} of {usable}"


@dataclass(frozen=True)
class OwnStrategy:
    """The strategy in another framework's file. own: its prediction; None if it has none, for the
    reason ``refused``. changes: settings in which the best strategy differs, as the framework
    writes them. file: the file's name. lines: the changed settings as lines of the file; removed:
    names of settings that it should no longer have."""

    own: Candidate | None
    refused: str
    changes: list[str]
    file: str = ""
    lines: Sequence[str] = ()
    removed: Sequence[str] = ()

    def gains(self, best: Candidate) -> bool:
        """Return True if the best strategy is faster than the file's, or fits where that does
        not."""
        own = self.own
        return own is None or not own.memory.fits or best.seconds <= (1 - SAME) * own.seconds

    def describe(self, best: Candidate) -> str:
        """Return a sentence that compares the file's strategy with the best."""
        if self.own is None:
            return f"{self.file} as it is has no prediction: {self.refused}"
        if not self.gains(best):
            return f"The search finds nothing faster than {self.file} as it is."
        short = "" if self.own.memory.fits else f", which does not fit into {in_bytes(self.own.memory.usable)}"
        times = f"{self.own.seconds / best.seconds:.3f}".rstrip("0").rstrip(".")
        return f"The best found is {times} times as fast as {self.file}{short}."

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"own": self.own and self.own.to_dict(), "refused": self.refused, "changes": self.changes}


def own_strategy(planner: Planner, config: ParsedConfig, own: Job | PlaitError, best: Candidate) -> OwnStrategy:
    """Return the comparison of the file's own strategy with the best one found. own: the file's
    job, or the error that prevents it."""
    file = Path(config.file).name
    try:
        if isinstance(own, PlaitError):
            raise own
        found = replace(planner, job=own).predict(own)
    except PlaitError as error:
        return OwnStrategy(None, str(error), [], file)
    try:
        check_emits(best.job, config.framework)
        texts = [emit(one.job, config.framework).text for one in (found, best)]
    except PlaitError:  # the framework cannot express a job: as a job file writes it
        changes = [f"{key}={value}" for key, (_, value) in differences(found.readable, best.readable).items()]
        return OwnStrategy(found, "", changes, file, changes)
    before, after = map(_settings, texts)
    written = [text for name, text in after.items() if before.get(name) != text]
    removed = [name for name in before if name not in after]
    needed = [after[need] for name, need in NEEDS.items() if after.get(name) in written]
    if config.framework == "deepspeed":
        old, new = map(json.loads, texts)  # whole tables: a framework's defaults may depend on other keys of a table
        lines = json.dumps({key: value for key, value in new.items() if old.get(key) != value}, indent=2).splitlines()
    else:
        lines = _as_in(file, [*written, *needed])
    changes = [*written, *(f"no {name}" for name in removed)]
    return OwnStrategy(found, "", changes, file, lines, _replaced(config, before, after))


def _replaced(config: ParsedConfig, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names of settings in the file that the best strategy's settings contradict or no
    longer have. before, after: emitted settings by name."""
    names = [name for name in before if name not in PARTS]
    if config.framework == "megatron":  # several flags may set one key
        keys = {row.key for row in ROWS if before.get(f"--{row.name}") != after.get(f"--{row.name}")} - {""}
        names += [f"--{row.name}" for row in ROWS if row.name and row.key in keys]
    text = Path(config.file).read_text(errors="replace")
    found = {name: _named_in(config.file, name) for name in names if name not in after}
    ends = {name: re.escape(word.rpartition(".")[2]) for name, word in found.items()}
    return [word for name, word in found.items() if re.search(rf"(?<![\w-]){ends[name]}(?![\w-])", text)]


def _as_in(file: str, written: Sequence[str]) -> list[str]:
    """Return changed settings as lines of a file: flags and lines of Python as they are; for TOML
    and YAML, in their syntax."""
    if file.endswith(YAML):
        pairs = [text.partition(" ") for text in written]
        return [f"{_named_in(file, name)}: {value or 'true'}" for name, _, value in pairs]
    if not file.endswith(".toml"):
        return list(written)
    tables = dict[str, list[str]]()
    for text in written:
        name, _, value = text.partition(" = ")
        if not value or name in PARTS[1:]:
            continue
        found = literal_eval(TOML_VALUES.get(value, value))
        if name == PARTS[0]:
            found = [[f"layers.{layer}" for layer in range(*ends)] for ends in pairwise(found)]
            found = [["tok_embeddings", *found[0]], *found[1:-1], [*found[-1], "norm", "output"]]
        table, _, key = _named_in(file, name).rpartition(".")
        tables.setdefault(table, []).append(f"{key} = {json.dumps(found)}")
    return [line for table, some in tables.items() for line in (f"[{table}]", *some)]


def _named_in(file: str, name: str) -> str:
    """Return an emitted setting's name as a file calls it."""
    if file.endswith(YAML):
        return name.removeprefix("--").replace("-", "_")
    return TOML_KEYS.get(name, name) if file.endswith(".toml") else name.strip('"')


YAML = (".yaml", ".yml")
PARTS = ("first", "parts", "parts[0].insert(0,", "parts[-1]", "parallelism.module_fqns_per_model_part")
"""Names of the lines in a Python module of torchtitan that cut the model into stages."""
NEEDS = {"compile.enable_async_tensor_parallel": "compile.enable"}
"""Settings without which a changed one is refused. Emitted settings have them, and a file may not."""
TOML_KEYS = {
    PARTS[0]: PARTS[-1],
    "config.activation_checkpoint": "activation_checkpoint.mode",
    "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
}
"""Keys of torchtitan's TOML that are called otherwise in its Python modules, by their name there."""
TOML_VALUES = {"None": "'none'", "SelectiveAC.Config()": "'selective'", "FullAC.Config()": "'full'"}
"""Values of ``activation_checkpoint.mode`` in TOML, by what Python modules have."""


def _settings(text: str) -> dict[str, str]:
    """Return the values of settings by name. text: one setting on each line."""
    lines = [line.strip().rstrip("\\, ") for line in text.splitlines()]
    return {re.split(r"[\s=:]", line)[0]: line for line in lines if re.match(r"[-\w\"]", line)}
