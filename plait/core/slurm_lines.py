"""Lines of ``KEY=VALUE`` words, as Slurm's configuration files have them and ``scontrol`` prints them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from plait.core.errors import JobError

_KEY = re.compile(r"\s*([A-Za-z0-9_.]+)\s*=[ \t]*")
_VALUE = re.compile(r'(?:"[^"]*"|[^\s"]+)*')


def lines(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Where each line is, for messages, and its words, keys in small letters and in their order. Raises
    JobError naming the line.

    ============  ===================================================================================
    known         ``KEY=VALUE``, blanks around ``=``, ``KEY=`` without a value, values in double
                  quotes, ``#`` and what follows it, a ``\\`` at the end that goes on in the next line
    passed over   what daemons print of themselves (lines that begin with ``slurm``)
    refused       a word without a key, a key that stands twice, a quote that is never closed
    ============  ===================================================================================

    >>> list(lines('SwitchName=s1 Nodes = "n[1-2],n5"  # a leaf'))
    [('line 1', {'switchname': 's1', 'nodes': 'n[1-2],n5'})]
    """
    whole, number = "", 0
    for at, line in enumerate(text.splitlines(), 1):
        number = number or at
        line = line.partition("#")[0]
        if line.rstrip().endswith("\\"):
            whole += line.rstrip()[:-1] + " "
            continue
        whole, line, first, number = "", (whole + line).strip(), number, 0
        if line and not line.startswith("slurm"):
            yield f"line {first}", _words(line, f"line {first}")
    if whole:
        raise JobError("the last line ends in a \\ and goes on nowhere")


def _words(line: str, where: str) -> dict[str, str]:
    words: dict[str, str] = {}
    at = 0
    while at < len(line):
        key = _KEY.match(line, at)
        if not key:
            raise JobError(f"'{line[at:].split()[0][:60]}' is no KEY=VALUE", key=where)
        at = key.end()
        empty = key[0][-1].isspace() and _KEY.match(line, at)  # another key follows: this one has no value
        found = None if empty else _VALUE.match(line, at)
        value = found[0] if found else ""
        at += len(value)
        if line[at : at + 1] == '"':
            raise JobError(f"the value of {key[1]} begins with a quote and ends nowhere", key=where)
        if key[1].lower() in words:
            raise JobError(f"{key[1]} stands twice", key=where)
        words[key[1].lower()] = value.replace('"', "")
    return words
