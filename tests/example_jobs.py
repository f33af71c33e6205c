"""``python -m tests.example_jobs``: write the comments of the shipped jobs anew, after a setting's meaning
has changed."""

from __future__ import annotations

from plait.api.commented import commented
from plait.api.new_job import examples

AS_WRITTEN = ("pipeline", "quickstart")
"""Whose comments are their authors'."""


def main() -> None:
    """Each in its place."""
    for name, file in examples().items():
        if name not in AS_WRITTEN:
            file.write_text(commented(file.read_text()))


if __name__ == "__main__":
    main()
