"""Host lists as Slurm writes them: ``n[001-016,020],m[1-2]x[0-3]`` expanded, and names folded back.

Numbers keep leading zeros: ``n[08-11]`` is n08, n09, n10, n11. If there are several brackets, the
last one varies fastest. Names are counted before they are expanded: a short text cannot become a
million names.

===========  ====================================================================================
known        names, ``[first-last,number]``, several of each in a name, commas between names
ignored      nothing
refused      brackets without a partner, ranges that run downwards or in unequal digits, a name
             missing between commas, blanks in a name, more names than allowed
===========  ====================================================================================
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

MOST_HOSTS = 200_000
"""Most names that one expression may stand for."""
MOST_DIGITS = 18
_NUMBER = re.compile(rf"([0-9]{{1,{MOST_DIGITS}}})")
_RANGE = re.compile(rf"([0-9]{{1,{MOST_DIGITS}}})(?:-([0-9]{{1,{MOST_DIGITS}}}))?")
_PIECE = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_PLAIN = re.compile(r"[^\s,\[\]]+")
_Item: TypeAlias = tuple[tuple[str, ...], ...]
"""A name, or several names: texts and numbers alternate, each as the tuple of its values in all
these names."""


def expand(text: str, most: int = MOST_HOSTS) -> list[str]:
    """Return the names that an expression stands for, in its order; repeated names stay.

    Raises ValueError with the problem and its position. most: number of names that the expression
    may stand for.

    >>> expand("n[08-10],m[1-2]x[0-1]")
    ['n08', 'n09', 'n10', 'm1x0', 'm1x1', 'm2x0', 'm2x1']
    """
    text = text.strip()
    if not text:
        return []
    found: list[str] = []
    for item in _items(text):
        parts, count = _parts(item), 1
        for part in parts:
            count *= sum(high - low + 1 for low, high, _ in part) if isinstance(part, list) else 1
        if len(found) + count > most:
            raise ValueError(f"'{_short(text)}' stands for more than {most} names")
        if len(parts) == 1 and isinstance(parts[0], str):
            found.append(parts[0])
        else:
            written = [[part] if isinstance(part, str) else list(_written(part)) for part in parts]
            found += map("".join, itertools.product(*written))
    return found


def fold(names: Iterable[str]) -> str:
    """Return a short expression that ``expand`` turns into exactly these names, in this order.

    Raises ValueError for a name that holds a bracket, a comma or white space.

    >>> fold(["n08", "n09", "n10", "m1x0", "m1x1", "m2x0", "m2x1", "login"])
    'n[08-10],m[1-2]x[0-1],login'
    """
    return ",".join(map(_folded, _merged([_split(name) for name in names])))


def _items(text: str) -> Iterator[str]:
    """Yield the items of a host list: the texts between commas that are outside of brackets."""
    start, inside = 0, False
    for match in re.finditer(r"[\[\],]", text):
        sign = match[0]
        if sign == "," and not inside:
            yield text[start : match.start()].strip()
            start = match.end()
        elif sign != ",":
            if inside == (sign == "["):
                raise ValueError(f"'{_short(text)}': '{sign}' at character {match.start() + 1} has no partner")
            inside = not inside
    if inside:
        raise ValueError(f"'{_short(text)}': a '[' is never closed")
    yield text[start:].strip()


def _parts(item: str) -> list[str | list[tuple[int, int, int]]]:
    """Return the parts of one item: fixed texts, and bracketed ranges as lists of (first, last,
    digits)."""
    parts: list[str | list[tuple[int, int, int]]] = []
    end = 0
    for match in _PIECE.finditer(item):
        if match.start() != end:
            break
        parts.append(match[2] if match[2] is not None else [_range(one, item) for one in match[1].split(",")])
        end = match.end()
    if end != len(item) or not item:
        raise ValueError(f"'{_short(item)}' is no name" if item else "a name is missing between two commas")
    return parts


def _range(text: str, item: str) -> tuple[int, int, int]:
    match = _RANGE.fullmatch(text.strip())
    if not match:
        raise ValueError(f"'{_short(item)}': '{_short(text)}' is neither a number nor a range such as 001-016")
    low, high = match[1], match[2] or match[1]
    if int(high) < int(low) or len(high) < len(low) or (high[0] == "0" and len(high) != len(low)):
        raise ValueError(f"'{_short(item)}': the range {low}-{high} does not run upwards in equal digits")
    return int(low), int(high), len(low)


def _written(ranges: Sequence[tuple[int, int, int]]) -> Iterator[str]:
    for low, high, digits in ranges:
        yield from (str(number).zfill(digits) for number in range(low, high + 1))


def _split(name: str) -> _Item:
    """Return the parts of one name, with numbers at odd indices."""
    if not _PLAIN.fullmatch(name):
        raise ValueError(f"'{_short(name)}' cannot stand in a host list")
    return tuple((part,) for part in _NUMBER.split(name))


def _merged(items: list[_Item]) -> list[_Item]:
    """Return the items with neighbours merged that differ in one number; the last number first,
    since it varies fastest."""
    longest = max((len(item) for item in items), default=0)
    for back in range(2, longest + 1, 2):  # numbers are the second, fourth, ... from the end
        merged: list[_Item] = []
        for rest, group in itertools.groupby(items, lambda item: _rest(item, back)):  # noqa: B023
            alike = list(group)
            if rest is None or len(alike) == 1:
                merged += alike
            else:
                before, after = rest
                merged.append((*before, tuple(number for item in alike for number in item[-back]), *after))
        items = merged
    return items


def _rest(item: _Item, back: int) -> tuple[_Item, _Item] | None:
    """Return the parts before and after the number at ``back`` from the end; None for a name
    without such a number."""
    return (item[:-back], item[len(item) - back + 1 :]) if len(item) > back else None


def _folded(item: _Item) -> str:
    return "".join(part[0] if len(part) == 1 else f"[{','.join(_runs(part))}]" for part in item)


def _runs(numbers: Sequence[str]) -> Iterator[str]:
    first = last = numbers[0]
    for number in (*numbers[1:], ""):
        if number and int(number) == int(last) + 1 and number == str(int(number)).zfill(len(first)):
            last = number
            continue
        yield first if first == last else f"{first}-{last}"
        first = last = number


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
