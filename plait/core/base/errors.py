"""Every error Plait raises on purpose.

    PlaitError
    ├── JobError          what the user wrote is wrong         exit status 2
    ├── InfeasiblePlan    no strategy meets a constraint       exit status 2
    ├── ScheduleError     an op list that cannot run           exit status 2
    ├── ReshardError      layouts that fit no tensor or mesh   exit status 2
    ├── PlacementError    ranks do not fit on the nodes        exit status 2
    ├── DataError         a corpus, shard or tokenizer file    exit status 2
    ├── CheckpointError   a checkpoint cannot be used          exit status 2
    ├── LaunchError       ranks or the lab could not start     exit status 2
    ├── MissingExtra      a package is not installed           exit status 2
    ├── RankFailure       a running rank died or hung          exit status 1
    ├── NotFinite         loss, gradients or weights are NaN   exit status 1
    └── RunLost           the run's folder or lock is gone     exit status 1

The command line prints one paragraph for each of these, never a traceback; any other exception is a bug and
does show its traceback. ``assert`` is for our own invariants.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, cast

from plait.core.base.text import LONGEST_QUOTED, brief, printable, shortened

ERROR_MARK = "plait-error: "  # how a rank begins, in its log, the one paragraph that a user should read
LONGEST_KEY = 200
"""Letters of a key that a message names: one from a file may have millions."""
_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*(?:;.*\bextra\s*==\s*['\"]([\w.-]+)['\"])?")
"""A package and the extra that brings it, if one does, in metadata such as ``dash>=4; extra == 'view'``."""
DO_NOT_RETRY = 93
"""Exit status of a rank, or of a start, that would only end the same way again (NVIDIA's resiliency tools
have it so)."""


class PlaitError(Exception):
    """Base of every deliberate error; ``exit_status`` is what the command line returns.

    As a text it is one paragraph, whatever a name or a value in it holds, and however long that is.

    >>> print(PlaitError("the tensor 'a\\n\\nb' is missing"))
    the tensor 'a\\n\\nb' is missing
    """

    exit_status = 2

    def __str__(self) -> str:
        return brief(printable(super().__str__(), kept=""))


class JobError(PlaitError):
    """What the user wrote cannot be used: says where, which value, what is allowed and what to change.

    changes: alternatives, each of them keys of a job file and their values, None for a key that is left out.
    Where there are any, the advice is made of them (``core.job.advice`` tries them first), else it is
    ``fix``.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: str | None = None,
        key: str | None = None,
        fix: str | None = None,
        changes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.changes = tuple(changes)
        fix = _advice(self.changes, key) if changes else fix
        where = ": ".join(
            part for part in (file and shortened(file, LONGEST_QUOTED), key and shortened(key, LONGEST_KEY)) if part
        )
        super().__init__(
            ". ".join(part.rstrip(".") for part in (f"{where}: {problem}" if where else problem, fix) if part) + "."
        )
        self.problem, self.file, self.key, self.fix = problem, file, key, fix

    def in_file(self, file: str) -> JobError:
        """The same error with the file it was read from."""
        return JobError(self.problem, file=file, key=self.key, fix=self.fix, changes=self.changes)


class InfeasiblePlan(PlaitError):
    """No strategy meets the constraints: which one, and by how much."""


class ScheduleError(PlaitError):
    """An op list that cannot run: names the op or the cycle."""


class ReshardError(PlaitError):
    """A tensor layout that cannot be, or a move between layouts that was not planned like this."""


class PlacementError(PlaitError):
    """Ranks do not fit on the nodes."""


class DataError(PlaitError):
    """A corpus, token shard or tokenizer file cannot be used."""


class CheckpointError(PlaitError):
    """A checkpoint cannot be read or written."""


class LaunchError(PlaitError):
    """Ranks, or the emulated cluster, could not be started."""


class MissingExtra(PlaitError):
    """A package that only some need is not installed: names the extra that brings it."""


class RankFailure(PlaitError):
    """A running rank died or stopped answering: names the rank and the cause.

    ranks: whose fault it is, as far as is known. cause: a word for it (``killed``, ``ended``, ``silent``, or
    a verdict's). words: the last that the rank has said.
    """

    exit_status = 1

    def __init__(self, message: str, *, ranks: Iterable[int] = (), cause: str = "", words: str = "") -> None:
        super().__init__(message)
        self.ranks, self.cause, self.words = tuple(ranks), cause, words


class NotFinite(PlaitError):
    """Training gave numbers that are not finite: names the step, the rank and the first tensor."""

    exit_status = 1


class RunLost(PlaitError):
    """The folder of a running run was removed, or another run has taken it over."""

    exit_status = 1


def told_error(kind: str, message: str) -> PlaitError:
    """The error that another process has raised. kind: the name of its class; any other word: PlaitError.

    >>> told_error("NotFinite", "step 2: the loss is nan")
    NotFinite('step 2: the loss is nan')
    """
    return next((one for one in PlaitError.__subclasses__() if one.__name__ == kind), PlaitError)(message)


def _advice(changes: Sequence[Mapping[str, Any]], key: str | None) -> str:
    """Alternatives in words; what changes ``key`` itself does not repeat it.

    >>> _advice([{"strategy.tp": 1}, {"strategy.tp": 3}, {"strategy.cp": None}], "strategy.tp")
    'Use 1 or 3, or leave out strategy.cp'
    >>> _advice([{"strategy.pp": 1, "strategy.virtual_stages": 1}], "strategy.pp")
    'Set strategy.pp=1 and strategy.virtual_stages=1'
    """
    told, before = list[str](), ""
    for change in changes:
        if len(change) > 1:
            told.append("set " + " and ".join(f"{name}={written(value)}" for name, value in change.items()))
            before = ""
            continue
        ((name, value),) = change.items()
        if value is None:
            told.append("leave it out" if name == key else f"leave out {name}")
        elif name == before:
            told[-1] += f"\0{written(value)}"
        else:
            told.append(f"use {written(value)}" if name == key else f"set {name}={written(value)}")
        before = "" if value is None else name
    return _first_upper(", or ".join(map(_listed, told)))


def _listed(values: str) -> str:
    """Values with zero bytes between them as a list: commas, and ``or`` before the last."""
    *others, last = values.split("\0")
    return f"{', '.join(others)} or {last}" if others else last


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def written(value: Any) -> str:
    """A plain value as TOML has it, for messages."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return "{ " + ", ".join(f"{name} = {written(one)}" for name, one in table.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(written(one) for one in cast("Sequence[Any]", value)) + "]"
    return json.dumps(value)


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the known word closest to ``word``, or nothing.

    >>> nearest("hiden", ["hidden", "layers"])
    " (did you mean 'hidden'?)"
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


# ---- packages that only some need: the extras of pyproject.toml, which alone says what is in them ----


def requirements() -> list[tuple[str, str]]:
    """Packages that the installed Plait asks for, each with the extra that brings it; empty for those that it
    cannot do without. None where it runs from a source that nobody has installed."""
    from importlib.metadata import PackageNotFoundError, requires  # slow to load

    try:
        found = filter(None, map(_REQUIREMENT.match, requires("plait") or ()))
    except PackageNotFoundError:
        return []
    return [(one[1], one[2] or "") for one in found]


def extra_of(package: str) -> str:
    """The extra that brings a package, which is named as it is imported; empty for what belongs to none.

    >>> extra_of("dash"), extra_of("numpy")
    ('view', '')
    """
    wanted = package.lower().replace("_", "-")
    found = ((name.lower().replace("_", "-"), extra) for name, extra in requirements())
    return next((extra for name, extra in found if name == wanted and extra not in ("", "all")), "")


def how_to_install(package: str) -> str:
    """The command that brings a package.

    >>> how_to_install("dash")
    "pip install 'plait[view]'"
    """
    extra = extra_of(package)
    return f"pip install 'plait[{extra}]'" if extra else f"pip install {package}"


def missing(package: str, who: str) -> MissingExtra:
    """The error for a package that is not installed. who: what needs it.

    >>> print(missing("dash", "the page"))
    the page needs the package dash, which is not installed. Install it: pip install 'plait[view]'
    """
    return MissingExtra(
        f"{who} needs the package {package}, which is not installed. Install it: {how_to_install(package)}"
    )


def need(package: str, who: str) -> None:
    """Raise MissingExtra, before anything is begun, if a package is not installed."""
    if find_spec(package) is None:
        raise missing(package, who)


@contextmanager
def naming_extras(who: str) -> Generator[None]:
    """Raise MissingExtra for an import inside that finds no package of an extra. One that belongs to none is
    a bug, and stays one."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not extra_of(package) or find_spec(package) is not None:
            raise
        raise missing(package, who) from None
