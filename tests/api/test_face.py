"""The names of ``plait.api``, which ``plait`` has too."""

from __future__ import annotations

import subprocess
import sys

import pytest

import plait
import plait.api


@pytest.mark.parametrize("name", plait.api.__all__)
def test_every_name_is_there_and_documented(name: str) -> None:
    assert getattr(plait, name) is getattr(plait.api, name)
    assert getattr(plait, name).__doc__
    assert name in dir(plait)


def test_names_are_few_and_hide_no_package() -> None:
    assert len(plait.api.__all__) <= 13
    assert not {"plan", "place", "train", "diagnose", "launch", "lab", "view", "cli"} & {*plait.api.__all__}


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        plait.nothing  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        plait.api.nothing  # noqa: B018


@pytest.mark.system
def test_plait_loads_nothing_before_a_name_is_asked_for() -> None:
    code = "import sys, plait; print([one for one in sys.modules if one.startswith('plait.') or one == 'numpy'])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
