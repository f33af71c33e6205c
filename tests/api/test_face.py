"""The names of ``plait.api``, which ``plait`` has too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import plait
import plait.api


@pytest.mark.parametrize("name", plait.api.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    assert getattr(plait, name) is getattr(plait.api, name)
    assert getattr(plait, name).__doc__
    assert name in dir(plait)


def test_a_type_checker_sees_every_name() -> None:
    folder = Path(plait.__file__).parent
    names = re.findall(r"^from plait\.api import (\w+) as \1$", (folder / "__init__.pyi").read_text(), re.MULTILINE)
    assert sorted(names) == sorted(plait.api.__all__) and (folder / "py.typed").exists()


def test_names_are_few_and_hide_no_package() -> None:
    assert len(plait.api.__all__) <= 13
    assert not {"plan", "place", "train", "diagnose", "launch", "lab", "view", "cli"} & {*plait.api.__all__}


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = getattr(plait, "nothing")  # noqa: B009
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        plait.api.nothing  # noqa: B018


@pytest.mark.system
def test_plait_loads_nothing_before_a_name_is_asked_for() -> None:
    code = "import sys, plait; print([one for one in sys.modules if one.startswith('plait.') or one == 'numpy'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
