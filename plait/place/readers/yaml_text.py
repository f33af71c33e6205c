"""YAML of other programs, read within limits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from plait.core.errors import JobError

LARGEST = 4 << 20
"""Bytes: host lists make ten thousand nodes a file of a hundredth of that, and YAML is slow to read."""
MOST_EVENTS = 500_000
"""Values, and beginnings and ends of lists and mappings."""
DEEPEST = 20
"""Lists and mappings in each other; a topology has six."""


def load(text: str) -> Any:
    """Its value. Raises JobError naming the line."""
    import yaml

    if len(text) > LARGEST:
        raise JobError(f"more than {LARGEST >> 20} MiB of YAML")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(yaml.parse(text, Loader=loader))
        return yaml.load(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = f"not valid YAML: {error.problem or error.context or 'it cannot be read'}"
        raise JobError(problem, key=f"line {mark.line + 1}" if mark else None) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        deep = isinstance(error, RecursionError)
        raise JobError("nested too deeply" if deep else f"not valid YAML: {str(error)[:200]}") from None


def _check_events(events: Iterable[Any]) -> None:
    """What is nested ever deeper ends the process in the loader, which is written in C; what an alias repeats
    is shared when loaded, and a billion names once it is written out."""
    import yaml

    depth = 0
    for number, event in enumerate(events):
        if isinstance(event, yaml.AliasEvent):
            raise JobError("aliases (*name) are not read", fix="Write out what they stand for")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise JobError("nested too deeply", key=f"line {event.start_mark.line + 1}")
        if number > MOST_EVENTS:
            raise JobError(f"more than {MOST_EVENTS} values of YAML")
