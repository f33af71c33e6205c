"""A machine that cannot compile is told of before any rank starts."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from plait.api.job_check import check_compiler
from plait.core.base.errors import JobError


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/c++")
    with pytest.raises(JobError, match=r"/no/such/c\+\+") as caught:
        check_compiler()
    assert caught.value.key == "strategy.compile"
    assert '"auto"' in str(caught.value)


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(JobError, match=r"Python\.h"):
        check_compiler()
    (tmp_path / "Python.h").touch()
    check_compiler()
