"""Profiles from measurements of other tools, so that no cluster must be measured twice.

===============  ======================================================================================
nccl-tests       printed output (``nccl_tests.log``) and JSON (``nccl_tests.json_form``), also of rccl-tests
Galvatron        files of measured bandwidths and times (``formats.galvatron``)
Plait            its own profiles, so that all can be joined
refused          any other file; logs and JSON documents above the limits of size
===============  ======================================================================================

Each reader counts what it skips.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path

from plait.core.base.codec.json_text import parse_json, read_unpacked
from plait.core.base.errors import JobError
from plait.core.base.files import reason_of
from plait.core.base.ignored_input import IgnoredInput
from plait.core.cluster.profile import Profile, joined
from plait.formats.galvatron import galvatron
from plait.formats.nccl_tests import json_form as nccl_json
from plait.formats.nccl_tests.log import read_log

LARGEST = 32 << 20
"""Maximum size of a file in bytes, unpacked."""
_OF_A_LAUNCHER = re.compile(r"\[(?:[0-9]+(?:,[0-9]+)?|[^]{}\"\n]{0,200}[A-Za-z/-][^]{}\"\n]{0,200})\][^,\n]")
"""Prefix of mpirun or kubectl in front of the first line, which is not the start of a JSON list."""
MOST_LINES, MOST_VALUES = 1_000_000, 2_000_000


def import_profiles(files: Sequence[Path], over: IgnoredInput | None = None) -> Profile:
    """Return one profile of all files. over: counts what is skipped. Raises JobError naming the
    file and the part that cannot be used."""
    over = IgnoredInput() if over is None else over
    found: list[Profile] = []
    for file in files:
        own = IgnoredInput()
        found.append(import_profile(file, own))
        over.add(own, file.name if len(files) > 1 else "")
    return joined(found)


def import_profile(file: Path, over: IgnoredInput | None = None) -> Profile:
    """Return the profile in one file, detecting its format."""
    over = IgnoredInput() if over is None else over
    try:
        text = read_unpacked(file, LARGEST).decode()
        date = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC).date().isoformat()
    except (OSError, ValueError) as error:
        raise JobError(f"cannot be read: {reason_of(error)}", file=str(file)) from None
    try:
        if text.lstrip()[:1] not in ("{", "[") or _OF_A_LAUNCHER.match(text):
            return _log(text, str(file), date, over)
        return _document(text, str(file), date, over)
    except (ValueError, OverflowError) as error:  # thousands of digits, times that round to 0, sizes beyond all memory
        told = " ".join(line.strip() for line in str(error).partition(" [type")[0].splitlines()[-2:])
        raise JobError(f"has an impossible number: {told}", file=str(file), fix="Leave the file out") from None


def _log(text: str, file: str, date: str, over: IgnoredInput) -> Profile:
    if sum(map(text.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")) > MOST_LINES:
        raise JobError(f"has more than {MOST_LINES} lines", file=file, fix="Keep the lines of the tests")
    return read_log(text, file, date, over)


def _document(text: str, file: str, date: str, over: IgnoredInput) -> Profile:
    try:
        values = parse_json(text, most=MOST_VALUES)
    except ValueError as error:
        raise JobError(f"is not valid JSON, or is cut off: {error}", file=file, fix="Give the whole file") from None
    if nccl_json.is_results(values):
        return nccl_json.read_json(values, file, date, over)
    if isinstance(values, dict) and "version" in values:
        return Profile.from_json(text, file)
    return galvatron(values, file, date)
