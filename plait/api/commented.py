"""Job files with a comment above each key: what the key means, from the one table of settings.

    # a head, kept as it stands

    [train]
    # Optimizer steps of the whole run.
    steps = 300
    # Weight decay of matrices, ...
    #weight_decay = 0.1

A line that begins with ``#`` and a key, or a section, is left out, with a value to begin with. Lines of ``##
text`` are remarks on this file and stay. Lines of ``# text`` within a section are made anew, so that files
cannot differ from what the reference says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from plait.core.base.errors import JobError
from plait.core.base.text import paragraph

COLUMNS = 98
"""Of a comment, without its ``# ``."""
_SECTION = re.compile(r"#?\[+([\w.]+)\]+\s*$")
_KEY = re.compile(r"#?([\w-]+)\s*=")
_OWN = "##"
"""How a remark begins that stays."""


def commented(text: str) -> str:
    """A job file with the meaning of each key above it. Raises JobError for a key that no setting has.

    >>> print(commented("# A try.\\n\\n[train]\\n#steps = 3\\n"), end="")
    # A try.
    <BLANKLINE>
    [train]
    # Optimizer steps of the whole run.
    #steps = 3
    """
    return "".join(f"{line}\n" for line in _lines(text.strip().splitlines()))


def _lines(lines: list[str]) -> Iterator[str]:
    meanings, section = _meanings(), ""
    for line in lines:
        if found := _SECTION.match(line):
            section = found.group(1)
        elif section and (found := _KEY.match(line)):
            name = f"{section}.{found.group(1)}"
            if name not in meanings:
                raise JobError("no setting has this name", key=name, fix="plait job shows all of them")
            for one in paragraph(meanings[name], COLUMNS).splitlines():
                yield f"# {one}"
        elif section and line.startswith("#") and not line.startswith(_OWN):
            continue
        yield line


def _meanings() -> dict[str, str]:
    """By the whole name of a setting."""
    from plait.core.job.reference import reference

    return {key.name: key.meaning.replace("``", "") for table in reference() for key in table.keys}
