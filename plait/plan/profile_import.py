"""Profiles from what other tools have measured, so that nobody measures a cluster twice.

===============  ======================================================================================
nccl-tests       what they print (``nccl_log``) and write as JSON (``nccl_json``), and rccl-tests
Galvatron        files of measured bandwidths and times (``galvatron_profile``)
Plait            its own profiles, so that all may be joined
refused          any other file; more than is read of a log or of a JSON document
===============  ======================================================================================

Each reader counts what it passes over.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path

from plait.core.base.codec.json_text import parse_json, read_unpacked
from plait.core.base.errors import JobError
from plait.core.base.files import reason_of
from plait.core.base.passed_over import PassedOver
from plait.core.cluster.profile import Profile, joined
from plait.plan import nccl_json
from plait.plan.galvatron_profile import galvatron
from plait.plan.nccl_log import read_log

LARGEST = 32 << 20
"""Bytes of a file, unpacked."""
_OF_A_LAUNCHER = re.compile(r"\[(?:[0-9]+(?:,[0-9]+)?|[^]{}\"\n]{0,200}[A-Za-z/-][^]{}\"\n]{0,200})\][^,\n]")
"""What mpirun or kubectl put before the first line: no list of JSON."""
MOST_LINES, MOST_VALUES = 1_000_000, 2_000_000


def import_profiles(files: Sequence[Path], over: PassedOver | None = None) -> Profile:
    """One profile of all files. over: what is not taken is counted in it. Raises JobError naming the file and
    what of it cannot be used."""
    over = PassedOver() if over is None else over
    found: list[Profile] = []
    for file in files:
        own = PassedOver()
        found.append(import_profile(file, own))
        over.add(own, file.name if len(files) > 1 else "")
    return joined(found)


def import_profile(file: Path, over: PassedOver | None = None) -> Profile:
    """The profile of one file, whatever wrote it."""
    over = PassedOver() if over is None else over
    try:
        text = read_unpacked(file, LARGEST).decode()
        date = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC).date().isoformat()
    except (OSError, ValueError) as error:
        raise JobError(f"cannot be read: {reason_of(error)}", file=str(file)) from None
    try:
        if text.lstrip()[:1] not in ("{", "[") or _OF_A_LAUNCHER.match(text):
            return _log(text, str(file), date, over)
        return _document(text, str(file), date, over)
    except (ValueError, OverflowError) as error:  # thousands of digits, times that vanish, sizes beyond all memory
        told = " ".join(line.strip() for line in str(error).partition(" [type")[0].splitlines()[-2:])
        raise JobError(f"has a number that cannot be: {told}", file=str(file)) from None


def _log(text: str, file: str, date: str, over: PassedOver) -> Profile:
    if sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")) > MOST_LINES:
        raise JobError(f"has more than {MOST_LINES} lines", file=file, fix="Keep those of the tests")
    return read_log(text, file, date, over)


def _document(text: str, file: str, date: str, over: PassedOver) -> Profile:
    try:
        values = parse_json(text, most=MOST_VALUES)
    except ValueError as error:
        raise JobError(f"is no JSON, or only a part of it: {error}", file=file) from None
    if nccl_json.looks(values):
        return nccl_json.read_json(values, file, date, over)
    if isinstance(values, dict) and "version" in values:
        return Profile.from_json(text, file)
    return galvatron(values, file, date)
