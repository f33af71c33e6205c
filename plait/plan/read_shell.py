"""Flags of the training command that a shell script starts, without starting it (``shell_run`` follows it).

What a run brings stays as it is written, between two ``UNKNOWN``; so does what several commands, or several
ways through the script, have otherwise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from plait.core.base.errors import JobError
from plait.plan.shell_run import follow_script
from plait.plan.shell_state import Run, Shell
from plait.plan.shell_syntax import UNKNOWN, ShellSyntaxError
from plait.plan.shell_words import unknown

_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_ATOM = re.compile(f"{UNKNOWN}[^{UNKNOWN}]*{UNKNOWN}+")
"""A word of which nothing is known."""
_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>]*>")
"""A value that a text leaves to whoever uses it."""
_SLURM = re.compile(r"(?<=\s)(--[a-z-]+|-[NnGc])(?:=|\s*)([^\s#]\S*)?")
_SLURM_KEYS = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-c": "--cpus-per-task"}
_SLURM_NAMES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",), "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"), "--gres": ("SLURM_GPUS_ON_NODE",),
    "--gpus": ("SLURM_GPUS",),
}  # fmt: skip
"""Variables that Slurm sets, by options of ``#SBATCH``."""
_SLURM_ALWAYS = (
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_NODELIST",
    "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID",
)  # fmt: skip
_NODES = ("nnodes", "num-nodes", "nodes")
_EACH = ("nproc-per-node", "num-gpus", "gpus-per-node", "gres", "ntasks-per-node")
_TOTAL = ("num-processes", "np", "ntasks")
"""Flags of launchers that say how many nodes there are, ranks on each, and ranks in all: the first counts."""
_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-np": "--np"}
_LAUNCHERS = re.compile(r"(^|/)(python[\d.]*|torchrun|deepspeed|accelerate|srun|mpirun|mpiexec)$")

EITHER = "set or left out"
"""The value of a flag without one that only some runs have."""


class Argument(NamedTuple):
    """A flag without its dashes, with ``-`` for ``_``, and the words behind it. name: empty for words that
    stand before every flag, and are not known. line: of its command."""

    name: str
    values: tuple[str, ...]
    line: int = 0

    def __str__(self) -> str:
        return " ".join((f"--{self.name}", *map(source_text, self.values)))


def source_text(text: str) -> str:
    """A value as it is written."""
    return text.replace(UNKNOWN, "")


def is_unknown(text: str) -> bool:
    """Tell whether a value, or a part of it, is not known."""
    return UNKNOWN in text or _PLACEHOLDER.search(text) is not None


class Script(NamedTuple):
    """arguments: of its command. why: sources of values that are not known, and what decides these. notes:
    sentences on what is not read, and what a run decides."""

    arguments: list[Argument]
    why: Mapping[str, str]
    notes: list[str]


def arguments(text: str) -> list[Argument]:
    """Flags of the commands in a text."""
    return read_script(text).arguments


def read_script(text: str, file: str = "") -> Script:
    """Flags of the training command of a script; of a text without commands all flags in it. Raises JobError.

    >>> script = 'N=4\\nARGS=(--num-layers $((2*N)) --bf16)\\ntorchrun run.py ${ARGS[@]}'
    >>> [str(one) for one in read_script(script).arguments]
    ['--num-layers 8', '--bf16']
    >>> [str(one) for one in read_script('--lr 1e-4 --save $1 # where').arguments]
    ['--lr 1e-4', '--save $1']
    """
    slurm = dict(_slurm(text))
    try:
        shells = follow_script(text, file, _variables(slurm))
    except (ShellSyntaxError, RecursionError) as error:
        problem = str(error) if isinstance(error, ShellSyntaxError) else "is nested too deeply"
        raise JobError(problem, file=file or None, fix="Name a script that bash runs, or its flags in a text") from None
    notes, why = list(dict.fromkeys(shells[0].log.remarks)), dict(shells[0].log.why)
    runs = _training_runs(shells, notes)
    found, differ = _merge([list(_arguments(run)) for run in runs])
    if differ:
        reason = _reason(runs, shells)
        why |= {source_text(one.values[0]): reason for one in found if one.name in differ}
        notes.append(f"Which {', '.join(f'--{name}' for name in differ)} it has: {reason}.")
    return Script(_rank_flags(found, slurm), why, notes)


def _slurm(text: str) -> Iterator[tuple[str, str]]:
    """Options of a script's ``#SBATCH`` lines, which stand before its first command."""
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            for option, value in _SLURM.findall(line):
                yield _SLURM_KEYS.get(str(option), str(option)), str(value)
        elif line.strip() and not line.startswith("#"):
            return


def _variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Slurm sets for a script's options, and those that every job of it has."""
    counts = {name: _count(name, value) for name, value in slurm.items()}
    nodes, each = counts.get("--nodes"), counts.get("--ntasks-per-node")
    if nodes and each:
        counts.setdefault("--ntasks", nodes * each)
    found = {name: unknown(f"${name}") for name in (_SLURM_ALWAYS if slurm else ())}
    names = {option: _SLURM_NAMES.get(option, ()) for option, count in counts.items() if count}
    return found | {name: str(counts[option]) for option, some in names.items() for name in some}


def _count(option: str, value: str) -> int | None:
    """Return the count of an option; of ``gpu:h100:8`` the last number."""
    if option == "--gres":
        value = next((one for one in value.split(",") if one.startswith("gpu")), "")
    last = value.rpartition(":")[2]
    return int(last) if last.isdigit() else 1 if option == "--gres" and value else None


def _training_runs(shells: Sequence[Shell], notes: list[str]) -> list[Run]:
    """The runs of the training program: of commands the one with most flags, and others of the same program.
    notes: others are added."""
    every = list(dict.fromkeys(run for shell in shells for run in shell.runs))
    alone = [run for run in every if run.words[0].startswith("-")]
    commands = [run for run in every if run not in alone]
    if not commands:
        words = [word for run in alone for word in run.words] or _set_words(shells[0])
        return [Run(alone[0].line if alone else 0, tuple(words))]
    most = max(commands, key=lambda run: len(list(_arguments(run))))
    runs = [run for run in commands if _program(run) == _program(most)]
    if others := [source_text(" ".join(run.words[:3])) for run in commands if run not in runs]:
        notes.append(f"Of its commands the one with most flags is read, not {', '.join(dict.fromkeys(others))}.")
    for run in alone:
        text = source_text(" ".join(run.words))[:60]
        notes.append(
            f"line {run.line}: {text} is no part of a command: this ends with its line, and so does a comment."
        )
    for run in runs:
        words = [source_text(word) for word in run.words[: _program_at(run.words) + 1] if _ATOM.fullmatch(word)]
        notes += [f"line {run.line}: {word}, of the launcher, is not known." for word in words]
    return runs


def _set_words(shell: Shell) -> list[str]:
    """Words of what a script sets, where it starts nothing."""
    values = shell.variables.values
    words = shell.words
    found = [words.fields(f'"${{{name}[@]}}"' if isinstance(one, dict) else f"${name}") for name, one in values.items()]
    return [word for some in found if any(_FLAG.match(word) for word in some) for word in some]


def _program(run: Run) -> str:
    return os.path.basename(run.words[_program_at(run.words)])


def _program_at(words: Sequence[str]) -> int:
    """Return the position of the program that a launcher starts: a file of Python, what follows ``-m``, or,
    behind a launcher, a word that is not known and no flag's value; the first word where there is none."""
    files = [number for number, word in enumerate(words) if word.endswith(".py")]
    modules = [number + 1 for number, word in enumerate(words[:-1]) if word == "-m"]
    others = [number for number, word in enumerate(words) if _ATOM.fullmatch(word)
              and number and _LAUNCHERS.search(words[0]) and not words[number - 1].startswith("-")]  # fmt: skip
    return files[0] if files else modules[-1] if modules else others[0] if others else 0


def _arguments(run: Run) -> Iterator[Argument]:
    """Flags in order with the words behind each; of a launcher's those that say how many ranks there are."""
    at = _program_at(run.words) if run.words else 0
    for one in _flags([_SHORT.get(word, word) for word in run.words[:at]], run.line):
        if one.name in (*_NODES, *_EACH, *_TOTAL):
            yield one._replace(values=one.values[:1])
    yield from _flags(run.words[at + (not run.words[at].startswith("-")) :] if run.words else (), run.line)


def _flags(words: Sequence[str], line: int) -> Iterator[Argument]:
    name, values = "", list[str]()
    for word in words:
        match = _FLAG.fullmatch(word)
        if not match:
            values.append(word)
            continue
        if name or any(map(is_unknown, values)):
            yield Argument(name, tuple(values), line)
        name, values = match[1].replace("_", "-"), [] if match[2] is None else [match[2]]
    if name or any(map(is_unknown, values)):
        yield Argument(name, tuple(values), line)


def _merge(ways: Sequence[list[Argument]]) -> tuple[list[Argument], list[str]]:
    """Arguments of several runs as those of one, with the names of flags that they have otherwise: of these
    the values are not known."""
    if all([one[:2] for one in way] == [one[:2] for one in ways[0]] for way in ways):
        return ways[0], []
    values = [{one.name: one.values for one in way} for way in ways]
    found, differ = list[Argument](), list[str]()
    line = next(one.line for way in ways for one in way)
    for name in dict.fromkeys(one.name for way in ways for one in way):
        some = list(dict.fromkeys(way.get(name) for way in values))
        if len(some) == 1 or not name:
            found += [Argument(name, one, line) for one in some if one is not None]
            continue
        texts = ["left out" if one is None else source_text(" ".join(one)) or "set" for one in some]
        text = EITHER if set(some) == {(), None} else " or ".join(texts)
        found.append(Argument(name, (unknown(text),), line))
        differ.append(name)
    return found, differ


def _reason(runs: Sequence[Run], shells: Sequence[Shell]) -> str:
    """Return what decides which of several runs it is."""
    ways = [shell.decided for shell in shells if any(run in shell.runs for run in runs)]
    some = dict.fromkeys(what for way in ways for what, _ in way)
    if some:
        return f"a run decides {' and '.join(source_text(one) for one in some)}"
    return f"it starts {len(runs)} runs (line {', '.join(dict.fromkeys(str(run.line) for run in runs))})"


def _rank_flags(found: Sequence[Argument], slurm: Mapping[str, str]) -> list[Argument]:
    """Arguments, those that say how many ranks there are as torchrun's; what a launcher does not say, Slurm's
    options do."""
    said = {one.name: one.values[0] for one in found if one.values and one.values[0].isdigit()}
    counts = {name[2:]: str(count) for name, value in slurm.items() if (count := _count(name, value))}
    each = ("ntasks-per-node", *_EACH) if int(counts.get("ntasks-per-node", 0)) > 1 else _EACH
    nodes = next((one[name] for one in (said, counts) for name in _NODES if name in one), None)
    ranks = next((one[name] for one, names in ((said, _EACH), (counts, each)) for name in names if name in one), None)
    total = next((one[name] for one in (said, counts) for name in _TOTAL if name in one), None)
    if total and not ranks:
        nodes, ranks = "1", total
    if "nproc-per-node" in said and not nodes and not any(one.name == "nnodes" for one in found):
        nodes = "1"  # torchrun's default
    rest = [one for one in found if one.name not in {*_NODES, *_EACH, *_TOTAL} - {"nnodes", "nproc-per-node"}]
    both = {name: count for name, count in (("nnodes", nodes), ("nproc-per-node", ranks)) if count}
    return [*(Argument(name, (count,)) for name, count in both.items()), *(one for one in rest if one.name not in both)]
