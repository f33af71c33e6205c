"""The flags of a shell script's training command, found without running it (``shell_run``
interprets the script).

A value that only a run knows stays as its source text, as an atom that begins with ``UNKNOWN``. So
does a value in which several commands, or several paths through the script, differ.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from plait.core.base.errors import JobError
from plait.formats.base.shell_builtins import Run, Shell
from plait.formats.base.shell_run import follow_script
from plait.formats.base.shell_syntax import ATOM, UNKNOWN, ShellSyntaxError, source_text, unknown

_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>]*>")
"""A placeholder that the user of the text is to fill in."""
_SLURM = re.compile(r"(?<=\s)(--[a-z-]+|-[NnGc])(?:=|\s*)(?:[a-z]\w*:)*(\d+)(?![\w:-])")
"""An option of ``#SBATCH`` and its count; ``gpu:h100:8`` is one."""
_SLURM_KEYS = {"-N": "--nodes", "-n": "--ntasks", "-G": "--gpus", "-c": "--cpus-per-task", "--gres": "--gpus-per-node"}
_SLURM_NAMES = {
    "--nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "--ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "--ntasks-per-node": ("SLURM_NTASKS_PER_NODE",), "--cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "--gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"), "--gpus": ("SLURM_GPUS",),
}  # fmt: skip
"""Variables that Slurm sets for each ``#SBATCH`` option."""
_SLURM_ALWAYS = (
    "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_NODELIST",
    "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID",
)  # fmt: skip
_NODES = ("nnodes", "num-nodes", "nodes")
_EACH = ("nproc-per-node", "num-gpus", "gpus-per-node", "gres", "ntasks-per-node")
_TOTAL = ("num-processes", "np", "ntasks")
"""Names of launcher flags: ``_NODES`` count nodes, ``_EACH`` ranks per node, ``_TOTAL`` all ranks.
Of each list, the first flag present counts."""
_SHORT = {"-N": "--nodes", "-n": "--ntasks", "-np": "--np"}
_LAUNCHERS = re.compile(r"(^|/)(python[\d.]*|torchrun|deepspeed|accelerate|srun|mpirun|mpiexec)$")

FIX = "Write its flags out in a text, or name the log of a run, in which Megatron-LM prints its arguments"
"""Advice for scripts that Plait cannot interpret."""
EITHER = "set or left out"
"""The value of a flag without argument that only some of the runs have."""


class Argument(NamedTuple):
    """A flag and its values. name: without dashes, with ``-`` for ``_``; empty for unknown words
    before the first flag. values: the words after the flag. line: the command's line."""

    name: str
    values: tuple[str, ...]
    line: int = 0

    def __str__(self) -> str:
        return " ".join((f"--{self.name}", *map(source_text, self.values)))


def is_unknown(text: str) -> bool:
    """True if a value, or a part of it, is unknown."""
    return UNKNOWN in text or _PLACEHOLDER.search(text) is not None


class Script(NamedTuple):
    """A script as read. arguments: flags of the training command. why: the cause by source text of
    each unknown value. notes: sentences on commands that are not read and conditions that only a
    run decides."""

    arguments: list[Argument]
    why: Mapping[str, str]
    notes: list[str]


def arguments(text: str) -> list[Argument]:
    """Return the flags of the training command in a text."""
    return read_script(text).arguments


def read_script(text: str, file: str = "") -> Script:
    """Return the flags of a script's training command, or all flags of a text without commands.
    Raises JobError if the script is no valid shell script or cannot be interpreted.

    >>> script = 'N=4\\nARGS=(--num-layers $((2*N)) --bf16)\\ntorchrun run.py ${ARGS[@]}'
    >>> [str(one) for one in read_script(script).arguments]
    ['--num-layers 8', '--bf16']
    >>> [str(one) for one in read_script('--lr 1e-4 --save $1 # where').arguments]
    ['--lr 1e-4', '--save $1']
    """
    slurm = _slurm(text)
    try:
        shells = follow_script(text, file, _variables(text, slurm))
    except (ShellSyntaxError, RecursionError) as error:
        problem = str(error) if isinstance(error, ShellSyntaxError) else "is nested too deeply"
        raise JobError(problem, file=file or None, fix=FIX) from None
    notes, why = list(dict.fromkeys(shells[0].log.remarks)), dict(shells[0].why)
    runs = _training_runs(shells, notes)
    found, differ = _merge([list(_arguments(run)) for run in runs])
    if differ:
        reason = _reason(runs, shells)
        why |= {source_text(one.values[0]): reason for one in found if one.name in differ}
        notes.append(f"Which {', '.join(f'--{name}' for name in differ)} it has: {reason}.")
    return Script(_rank_flags(found, slurm), why, notes)


def _slurm(text: str) -> dict[str, int]:
    """Return the counts in a script's ``#SBATCH`` lines by option; these lines precede the first
    command."""
    found = dict[str, int]()
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            found |= {_SLURM_KEYS.get(one[1], one[1]): int(one[2]) for one in _SLURM.finditer(line)}
        elif line.strip() and not line.startswith("#"):
            break
    if "--nodes" in found and "--ntasks-per-node" in found:
        found.setdefault("--ntasks", found["--nodes"] * found["--ntasks-per-node"])
    return found


def _variables(text: str, slurm: Mapping[str, int]) -> dict[str, str]:
    """Return the variables that Slurm sets for a script's options, and the unknown ones of every
    Slurm job."""
    found = {name: unknown(f"${name}") for name in (_SLURM_ALWAYS if "#SBATCH" in text else ())}
    return found | {name: str(count) for option, count in slurm.items() for name in _SLURM_NAMES.get(option, ())}


def _training_runs(shells: Sequence[Shell], notes: list[str]) -> list[Run]:
    """Return the runs of the training program: the command with most flags, and other runs of that
    program. notes: sentences on the commands that are ignored are added."""
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
        words = [source_text(word) for word in run.words[: _program_at(run.words) + 1] if ATOM.fullmatch(word)]
        notes += [f"line {run.line}: {word}, of the launcher, is not known." for word in words]
    return runs


def _set_words(shell: Shell) -> list[str]:
    """Return the words of variables with flags, for a script that starts no command."""
    values = shell.values.values()
    found = [one if isinstance(one, list) else (one or "").split() for one in values]
    return [word for some in found if any(_FLAG.match(word) for word in some) for word in some]


def _program(run: Run) -> str:
    return os.path.basename(run.words[_program_at(run.words)])


def _program_at(words: Sequence[str]) -> int:
    """Return the position of the program that a launcher starts: a Python file, the word after
    ``-m``, or, after a launcher, an unknown word that is no flag's value; else 0."""
    files = [number for number, word in enumerate(words) if word.endswith(".py")]
    modules = [number + 1 for number, word in enumerate(words[:-1]) if word == "-m"]
    others = [number for number, word in enumerate(words) if ATOM.fullmatch(word)
              and number and _LAUNCHERS.search(words[0]) and not words[number - 1].startswith("-")]  # fmt: skip
    return files[0] if files else modules[-1] if modules else others[0] if others else 0


def _arguments(run: Run) -> Iterator[Argument]:
    """Yield a run's flags in order with their values; of the launcher's flags only those that count
    ranks."""
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
    """Return the arguments of several runs as one list, and the names of flags whose values differ
    and become unknown."""
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
    """Return a sentence on what decides between several runs."""
    ways = [shell.decided for shell in shells if any(run in shell.runs for run in runs)]
    some = dict.fromkeys(what for way in ways for what, _ in way)
    if some:
        return f"a run decides {' and '.join(source_text(one) for one in some)}"
    return f"it starts {len(runs)} runs (line {', '.join(dict.fromkeys(str(run.line) for run in runs))})"


def _rank_flags(flags: Sequence[Argument], slurm: Mapping[str, int]) -> list[Argument]:
    """Return the arguments with rank counts as torchrun's flags; counts missing in the launcher's
    flags come from Slurm's options."""
    said = {one.name: one.values[0] for one in flags if one.values and one.values[0].isdigit()}
    counts = {name[2:]: str(count) for name, count in slurm.items()}
    each = ("ntasks-per-node", *_EACH) if slurm.get("--ntasks-per-node", 0) > 1 else _EACH

    def first(names: Sequence[str], more: Sequence[str] = ()) -> str | None:
        words = [said[name] for name in names if name in said]
        return next(iter([*words, *(counts[name] for name in more or names if name in counts)]), None)

    nodes, ranks, total = first(_NODES), first(_EACH, each), first(_TOTAL)
    if total and not ranks:
        nodes, ranks = "1", total
    if "nproc-per-node" in said and not nodes and not any(one.name == "nnodes" for one in flags):
        nodes = "1"  # torchrun's default
    rest = [one for one in flags if one.name not in {*_NODES, *_EACH, *_TOTAL} - {"nnodes", "nproc-per-node"}]
    both = {name: count for name, count in (("nnodes", nodes), ("nproc-per-node", ranks)) if count}
    return [*(Argument(name, (count,)) for name, count in both.items()), *(one for one in rest if one.name not in both)]
