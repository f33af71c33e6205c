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

The command line prints one paragraph for each of these, never a traceback; any other exception is a
bug and does show its traceback. ``assert`` is for our own invariants.
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

ERROR_MARK = "plait-error: "  # starts the one paragraph of a rank's log that the user should read
LONGEST_KEY = 200
"""The most characters of a key that a message quotes: a key in a file may have millions."""
_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*(?:;.*\bextra\s*==\s*['\"]([\w.-]+)['\"])?")
"""The pattern of a requirement in package metadata, such as ``dash>=4; extra == 'view'``: package
and, if any, extra."""
DO_NOT_RETRY = 93
"""The exit status of a rank, or of a launch, that would fail in the same way again. NVIDIA's
resiliency tools use the same number."""


class PlaitError(Exception):
    """The base of every deliberate error; ``exit_status`` is the command line's exit status.

    ``str(error)`` is one paragraph of limited length, whatever names or values the message quotes.

    >>> print(PlaitError("the tensor 'a\\n\\nb' is missing"))
    the tensor 'a\\n\\nb' is missing
    """

    exit_status = 2

    def __str__(self) -> str:
        return brief(printable(super().__str__(), kept=""))


class JobError(PlaitError):
    """An error in the user's input. The message names the place, the value, what is allowed and
    what to change.

    changes: alternatives, each a mapping of job-file keys to values; None for a key to leave out.
    If there are any, the message's advice lists them (``core.job.advice`` tries them first);
    otherwise the advice is ``fix``.
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
        """Return the same error with the name of the file that was read."""
        return JobError(self.problem, file=file, key=self.key, fix=self.fix, changes=self.changes)


class InfeasiblePlan(PlaitError):
    """No strategy meets the constraints. The message names the constraint and by how much it is
    missed."""


class ScheduleError(PlaitError):
    """An op list that cannot run. The message names the op or the cycle."""


class ReshardError(PlaitError):
    """An impossible tensor layout, or a transfer between layouts that differs from its plan."""


class PlacementError(PlaitError):
    """The ranks do not fit on the nodes."""


class DataError(PlaitError):
    """A corpus, token shard or tokenizer file cannot be used."""


class CheckpointError(PlaitError):
    """A checkpoint cannot be read or written."""


class LaunchError(PlaitError):
    """The ranks, or the emulated cluster, could not be started."""


class MissingExtra(PlaitError):
    """An optional package is not installed. The message names the extra that installs it."""


class RankFailure(PlaitError):
    """A running rank died or stopped responding. The message names the rank and the cause.

    ranks: the ranks at fault, if known. cause: one word (``killed``, ``ended``, ``silent``, or a
    verdict's cause). words: the rank's last message.
    """

    exit_status = 1

    def __init__(self, message: str, *, ranks: Iterable[int] = (), cause: str = "", words: str = "") -> None:
        super().__init__(message)
        self.ranks, self.cause, self.words = tuple(ranks), cause, words


class NotFinite(PlaitError):
    """Training produced non-finite numbers. The message names the step, the rank and the first such
    tensor."""

    exit_status = 1


class RunLost(PlaitError):
    """The folder of a running run was removed, or another run has taken it over."""

    exit_status = 1


def remote_error(kind: str, message: str) -> PlaitError:
    """Return the error that another process raised. kind: its class's name; PlaitError if the name
    is unknown.

    >>> remote_error("NotFinite", "step 2: the loss is nan")
    NotFinite('step 2: the loss is nan')
    """
    return next((one for one in PlaitError.__subclasses__() if one.__name__ == kind), PlaitError)(message)


def _advice(changes: Sequence[Mapping[str, Any]], key: str | None) -> str:
    """Return the alternatives as a sentence; a change of ``key`` itself does not repeat the key.

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
    """Return a text of values separated by zero bytes as a list: commas, and ``or`` before the
    last."""
    *others, last = values.split("\0")
    return f"{', '.join(others)} or {last}" if others else last


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def written(value: Any) -> str:
    """Return a plain value in TOML's notation, for messages."""
    if isinstance(value, Mapping):
        table = cast("Mapping[str, Any]", value)
        return "{ " + ", ".join(f"{name} = {written(one)}" for name, one in table.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(written(one) for one in cast("Sequence[Any]", value)) + "]"
    return json.dumps(value)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known word closest to ``word``; an empty text if none
    is close.

    >>> nearest("hiden", ["hidden", "layers"])
    " (did you mean 'hidden'?)"
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean '{close[0]}'?)" if close else ""


# ---- optional packages: the extras of pyproject.toml, the only list of their packages ----


def requirements() -> list[tuple[str, str]]:
    """Return the packages that the installed Plait requires, each with its extra; the extra is
    empty for mandatory packages. The list is empty if Plait runs from a source tree that is not
    installed."""
    from importlib.metadata import PackageNotFoundError, requires  # slow to load

    try:
        found = filter(None, map(_REQUIREMENT.match, requires("plait") or ()))
    except PackageNotFoundError:
        return []
    return [(one[1], one[2] or "") for one in found]


def extra_of(package: str) -> str:
    """Return the extra that installs a package, which is named as it is imported; empty if no extra
    does.

    >>> extra_of("dash"), extra_of("numpy")
    ('view', '')
    """
    wanted = package.lower().replace("_", "-")
    found = ((name.lower().replace("_", "-"), extra) for name, extra in requirements())
    return next((extra for name, extra in found if name == wanted and extra not in ("", "all")), "")


def how_to_install(package: str) -> str:
    """Return the command that installs a package.

    >>> how_to_install("dash")
    "pip install 'plait[view]'"
    """
    extra = extra_of(package)
    return f"pip install 'plait[{extra}]'" if extra else f"pip install {package}"


def missing(package: str, who: str) -> MissingExtra:
    """Return the error for a package that is not installed. who: what needs the package.

    >>> print(missing("dash", "the page"))
    the page needs the package dash, which is not installed. Install it: pip install 'plait[view]'
    """
    return MissingExtra(
        f"{who} needs the package {package}, which is not installed. Install it: {how_to_install(package)}"
    )


def need(package: str, who: str) -> None:
    """Raise MissingExtra if a package is not installed, before any work begins."""
    if find_spec(package) is None:
        raise missing(package, who)


@contextmanager
def naming_extras(who: str) -> Generator[None]:
    """Raise MissingExtra if an import inside the block misses a package of an extra. A missing
    package of no extra is a bug; its ModuleNotFoundError passes."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not extra_of(package) or find_spec(package) is not None:
            raise
        raise missing(package, who) from None
