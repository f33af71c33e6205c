"""YAML of other programs (kubectl, Slurm), read within limits and restricted to JSON's values."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import cache
from typing import Any, ClassVar

from plait.core.base.errors import JobError

LARGEST = 4 << 20
"""The most characters of a document. With host lists, ten thousand nodes take a hundredth of that,
and YAML is slow to read."""
MOST_EVENTS = 300_000
"""The most parser events: values, and starts and ends of lists and mappings."""
DEEPEST = 20
"""The deepest nesting of lists and mappings; a topology has six levels, a pod ten."""
KNOWN = ("null", "bool", "int", "float", "str", "seq", "map")
"""The accepted types of values, by the last part of their YAML tags."""
INT = r"[-+]?(0b[01]+|0x[0-9a-fA-F]+|0[0-7]*|[1-9][0-9_]*)"
FLOAT = r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?"
"""Pattern of a decimal number with a point, such as ``1.5e3``. A text such as 12:30:00, which YAML
1.1 reads in base 60, stays a text."""


def load(text: str) -> Any:
    """Return the value of a YAML document.

    Accepted: null, true and false, whole and broken numbers, texts (dates included), lists,
    mappings. Ignored: comments. Raises JobError, naming the line if it is known, for aliases,
    duplicate keys, other types and numbers of more than 64 bits. Documents that are nested too
    deeply or too long, and several documents in a text, raise JobError, too.

    >>> load("{when: 2026-13-45, of: [1, 0x10, 12:30]}")
    {'when': '2026-13-45', 'of': [1, 16, '12:30']}
    """
    import yaml

    if len(text) > LARGEST:
        raise JobError(f"more than {LARGEST >> 20} MiB of YAML")
    try:
        library: Any = yaml  # it has no type hints
        _check_events(library.parse(text, Loader=_loader()))
        return library.load(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        problem = f"not valid YAML: {error.problem or error.context or 'it cannot be read'}"
        raise JobError(problem, key=f"line {mark.line + 1}" if mark else None) from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        deep = isinstance(error, RecursionError)
        raise JobError("nested too deeply" if deep else f"not valid YAML: {str(error)[:200]}") from None


@cache
def _loader() -> Any:
    import yaml

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    # None: the tag of the constructor for unknown types, which raises an error
    tags = {None, *(f"tag:yaml.org,2002:{name}" for name in KNOWN)}

    class Loader(base):  # pyright: ignore[reportUntypedBaseClass]
        """A loader restricted to JSON's values."""

        yaml_constructors: ClassVar[Any] = {tag: made for tag, made in base.yaml_constructors.items() if tag in tags}
        yaml_implicit_resolvers: ClassVar[Any] = {}

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            """Raise ConstructorError for a duplicate key: one of its values would be lost."""
            found: Any = base.construct_mapping(self, node, deep)
            if len(found) != len(node.value):
                raise yaml.constructor.ConstructorError(None, None, "a key occurs twice", node.start_mark)
            return found

    def number(make: Any) -> Any:
        def construct(loader: Any, node: Any) -> Any:
            value = make(loader, node)
            if not math.isfinite(value) or abs(value) >= 1 << 63:
                raise yaml.constructor.ConstructorError(None, None, "a number is too large", node.start_mark)
            return value

        return construct

    for name in ("int", "float"):
        tag = f"tag:yaml.org,2002:{name}"
        Loader.add_constructor(tag, number(base.yaml_constructors[tag]))
    for name, form, first in (("int", INT, "-+0123456789"), ("float", FLOAT, "-+0123456789.")):
        Loader.add_implicit_resolver(f"tag:yaml.org,2002:{name}", re.compile(f"^({form})$"), list(first))
    for first, known in base.yaml_implicit_resolvers.items():
        for tag, form in known:
            if tag.rpartition(":")[2] in ("bool", "null"):
                Loader.add_implicit_resolver(tag, form, [first])
    return Loader


def _check_events(events: Iterable[Any]) -> None:
    """Raise JobError for aliases, deep nesting and too many events, before the document is loaded.

    Deep nesting would crash the loader, which is written in C. Aliases share one value when loaded,
    but can expand to a billion values when written out.
    """
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
