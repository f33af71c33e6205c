"""Lines of ``KEY=VALUE`` words, as Slurm's configuration files have them and ``scontrol`` prints them."""

from __future__ import annotations

from collections.abc import Iterator

from plait.core.errors import JobError


def lines(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Where each line is, for messages, and its words, keys in small letters and in their order. Comments,
    and what daemons print of themselves, are left out; a ``\\`` at its end goes on in the next line. Raises
    JobError for a word without a key, and for one that stands twice.

    >>> list(lines("SwitchName=s1 Nodes=n[1-2]  # a leaf"))
    [('line 1', {'switchname': 's1', 'nodes': 'n[1-2]'})]
    """
    whole, number = "", 0
    for at, line in enumerate(text.splitlines(), 1):
        number = number or at
        line = line.partition("#")[0]
        if line.rstrip().endswith("\\"):
            whole += line.rstrip()[:-1] + " "
            continue
        whole, line, first, number = "", (whole + line).strip(), number, 0
        if not line or line.startswith("slurm"):  # the daemons' own chatter
            continue
        where = f"line {first}"
        words: dict[str, str] = {}
        for word in line.split():
            key, sign, value = word.partition("=")
            if not sign or key.lower() in words:
                raise JobError(f"'{word[:60]}' is no KEY=VALUE" if not sign else f"{key} stands twice", key=where)
            words[key.lower()] = value
        yield where, words
    if whole:
        raise JobError("the last line ends in a \\ and goes on nowhere")
