"""``python -m tests.golden``: write the golden files anew, and say what changed.

Their inputs were drawn once.
"""

from __future__ import annotations

import sys

from tests.golden.contents import CONTENTS
from tests.golden.files import differences, packed, path_of, read, rounded

SHOWN = 5
"""Differences of a file that are printed."""


def main() -> int:
    """Write every file whose content changed."""
    inputs = read("inputs")
    for name, made in CONTENTS.items():
        print(_written(name, rounded(made(inputs))), flush=True)
    return 0


def _written(name: str, content: object) -> str:
    """Write a file, if its content changed: the line that says so."""
    old, path = read(name), path_of(name)
    found = list(differences(old, content)) if old is not None else []
    if old is not None and not found:
        return f"{path.name}: unchanged"
    path.write_bytes(packed(content))
    size = f"{path.stat().st_size / 1024:.0f} KiB"
    if old is None:
        return f"{path.name}: new, {size}"
    more = f"\n  and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return f"{path.name}: {len(found)} values changed, {size}\n  " + "\n  ".join(found[:SHOWN]) + more


if __name__ == "__main__":
    sys.exit(main())
