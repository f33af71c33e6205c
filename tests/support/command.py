"""``plait`` as a user types it, in this process: the start of another takes longer than most
commands."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest import mock

from typer.testing import CliRunner

from plait.cli.main import main


def plait(
    *words: object, text: str = "", folder: Path | None = None, variables: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    """What the command line does and prints. text: its standard input; folder: where it is typed.

    An exception that the command line does not expect is raised: a bug.
    """
    argv = ["plait", *map(str, words)]
    status: object = 0
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.dict(os.environ, {"NO_COLOR": "1", **(variables or {})}),
        contextlib.chdir(folder or Path.cwd()),
        CliRunner().isolation(input=text) as (out, err, _),
    ):
        try:
            main()
        except SystemExit as ended:
            status = ended.code
        sys.stdout.flush()
        sys.stderr.flush()
        printed, said = (each.getvalue().decode(errors="replace") for each in (out, err))
    return CompletedProcess(argv, status if isinstance(status, int) else int(status is not None), printed, said)


def succeed(*words: object, folder: Path | None = None) -> CompletedProcess[str]:
    """``plait``, which ends well."""
    done = plait(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    return done


def values(*words: object, folder: Path | None = None) -> Any:
    """What the command prints as JSON."""
    return json.loads(succeed(*words, "--json", folder=folder).stdout)
