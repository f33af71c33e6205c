"""Records of ``scontrol show``, by field.

A record begins at the left margin, and names a field a line, or several; free text (comments, paths) has a
line of its own. A job's name and comment are printed as its user wrote them, ends of lines included (tried on
Slurm 22.05): they may look like fields, or like the record of somebody else's job. So which jobs there are is
asked of ``squeue``, which prints numbers alone; a job that seems to have several records is asked for alone;
and a record in which a user's lines pass for Slurm's is not taken.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress

from plait.core.base.errors import LaunchError
from plait.launch.slurm import command

FREE_TEXT = ("AdminComment", "Comment", "SystemComment", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Extra",
             "Reason", "OS", "Power", "Container")  # fmt: skip


def records(what: str, *options: str) -> list[dict[str, str]]:
    """Of all nodes, partitions or reservations, which operators name."""
    return [found for block in _blocks(_shown(what, options=options)) if (found := _fields(block))]


def job_records(partition: str, qos: str) -> tuple[list[dict[str, str]], list[str]]:
    """Of all jobs of a partition or QOS; and the numbers of those whose record is not to be told from what
    its user wrote."""
    chosen = [f"--partition={partition}"] * bool(partition) + [f"--qos={qos}"] * bool(qos)
    listed = command("squeue", "--noheader", "--states=all", "--format=%A", *chosen).split()
    blocks = defaultdict[str, list[list[str]]](list)
    for block in _blocks(_shown("job")):
        blocks[_number(block)].append(block)
    found, unclear = list[dict[str, str]](), list[str]()
    for number in dict.fromkeys(listed):
        mine = blocks[number]
        if len(mine) > 1:  # others may say that they are it; asked for alone, it has one
            mine = list[list[str]]()
            with suppress(LaunchError):  # it has gone
                mine = _blocks(_shown("job", number))
        if len(mine) > 1 or any(not _sound(block) for block in mine):
            unclear.append(number)
        else:
            found += map(_fields, mine)
    return found, unclear


def _shown(what: str, *names: str, options: Sequence[str] = ()) -> str:
    return command("env", "SLURM_TIME_FORMAT=%s", "scontrol", *options, "show", what, *names)


def _blocks(text: str) -> list[list[str]]:
    """Lines of each record; none of what stands before the first."""
    found = list[list[str]]()
    for line in text.splitlines():
        if line and not line[0].isspace():
            found.append([])
        if found and line.strip():
            found[-1].append(line)
    return found


def _number(block: Sequence[str]) -> str:
    """Of a job."""
    return block[0].split()[0].partition("=")[2]


def _sound(block: Sequence[str]) -> bool:
    """Whether a job's record has the fields that begin it where Slurm prints them, and once; what is after a
    comment, which the comment may have brought, is not among what decides over the job."""
    keys = [line.strip().partition("=")[0] for line in block]
    comment = keys.index("Comment") if "Comment" in keys else len(keys)
    return keys[1:2] == ["UserId"] and keys.count("UserId") == 1 and "AdminComment" not in keys[comment:]


def _fields(block: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in block:
        key, _, rest = line.strip().partition("=")
        if not rest:
            continue
        if key in FREE_TEXT and line[0].isspace():
            found.setdefault(key, rest.strip())
            continue
        for word in line.partition(" JobName=")[0].split():
            name, equals, value = word.partition("=")
            if equals:
                found.setdefault(name, value)
    return found
