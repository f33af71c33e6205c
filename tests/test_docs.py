"""What documents point to is there."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
from pathlib import Path

import pytest

from plait.core.job.framework_names import key_of
from tests.support.runs import command, write_job

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
NAMED = re.compile(
    r"`((?:plait/|core/|plan/|train/|launch/|cli/|lab/|diagnose/|specs/|tests/|benchmarks/|docs/)[\w/.-]+)`"
)
DOCUMENTS = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if not path.name.endswith(".draft.md")]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_links_to_exists(document: Path) -> None:
    links = LINK.findall(document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_names_exists(document: Path) -> None:
    """``core/step/overlap.py`` and ``plan/sharding.step_bytes`` alike."""
    named = {name.removeprefix("plait/").rstrip("/") for name in NAMED.findall(document.read_text())}
    there = {name for name in named for base in (ROOT, ROOT / "plait") if _exists(base / name)}
    assert named - there == set()


def test_every_module_that_the_architecture_names_exists() -> None:
    """``plan.make`` and ``step.memory.estimate`` alike."""
    named = re.findall(r"`((?:api|diagnose|launch|place|plan|step|train)\.(?!json)[a-z_.]+)`", ARCHITECTURE)
    modules = [name.replace("step", "core/step").replace(".", "/") for name in named]
    assert [module for module in modules if not _exists(ROOT / "plait" / module)] == [] != modules


README, ARCHITECTURE = (ROOT / "README.md").read_text(), (ROOT / "docs" / "ARCHITECTURE.md").read_text()


def test_the_readme_is_read_in_a_few_minutes() -> None:
    """At most 150 lines and 1,100 words; no line of code that scrolls; no sentence of over 25
    words."""
    prose, code = list[str](), list[str]()
    fenced = False
    for line in README.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        else:
            (code if fenced else prose).append(line)
    words = [word for word in README.split() if any(map(str.isalnum, word))]
    assert len(README.splitlines()) <= 150 and len(words) <= 1100
    assert [line for line in code if len(line) > 100] == []
    plain = [LINK.sub("]", line).lstrip("#>-* ") for line in prose if not line.startswith("|")]
    sentences = re.split(r"(?<=[.!?:])\s", " ".join(line or "." for line in plain))
    assert [one for one in sentences if len(re.findall(r"[\w`]+[\w./-]*", one)) > 25] == []


def _exists(path: Path) -> bool:
    return path.exists() or path.with_suffix(".py").is_file() or path.with_suffix("").with_suffix(".py").is_file()


WAY = ARCHITECTURE.partition("## The way from")[2].partition("\n## ")[0]
FILES = re.findall(r"^\d+\. `(plait/\S+)`", WAY, re.MULTILINE)
"""From ``plait train`` to the first step."""

TRACER = """
import os, sys

entered = set()


def importing(frame):
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            return True
        frame = frame.f_back
    return False


def enter(frame, event, _):
    name = frame.f_code.co_filename
    if event == "call" and name.startswith({root!r}) and name not in entered and frame.f_code.co_name != "<module>":
        if not importing(frame):
            entered.add(name)
            with open({out!r} + os.environ.get("RANK", "command"), "a") as file:
                print(name, file=file)


sys.setprofile(enter)
"""
"""Every process writes the files of Plait that its main thread calls, in the order of first
calls."""


def test_the_way_to_the_first_step_names_every_file_once() -> None:
    numbers = re.findall(r"^(\d+)\. ", WAY, re.MULTILINE)
    assert [int(number) for number in numbers] == list(range(1, len(FILES) + 1))
    assert len(set(FILES)) == len(FILES) == 25
    order = ("plait/plan/make.py", "plait/launch/local/local.py", "plait/train/worker.py")
    assert [file for file in FILES if file in order] == list(order)


@pytest.mark.system
def test_a_run_takes_the_way_that_is_written_down(tmp_path: Path) -> None:
    job, path = write_job(tmp_path, steps=1), tmp_path / "path"
    path.mkdir()
    (path / "sitecustomize.py").write_text(TRACER.format(root=f"{ROOT / 'plait'}/", out=f"{tmp_path}/entered-"))
    few = ("strategy.tp=1", "strategy.pp=2", "train.eval_every=0", "train.warmup_steps=0")
    environ = {**os.environ, "PYTHONPATH": f"{path}:{ROOT}"}
    subprocess.run(command(job, *few), env=environ, timeout=240, check=True, capture_output=True)
    entered = [name for process in ("command", "0") for name in _entered(tmp_path / f"entered-{process}")]
    first = [name for name in dict.fromkeys(entered) if name in FILES]
    assert first == FILES


def _entered(file: Path) -> list[str]:
    return [str(Path(line).relative_to(ROOT)) for line in file.read_text().splitlines()]


def test_the_picture_is_what_its_script_draws(tmp_path: Path) -> None:
    """It shows what the simulator says today."""
    script = tmp_path / "picture.py"  # it draws beside itself
    script.write_text((ROOT / "docs" / "picture.py").read_text())
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "overlap.svg").read_text() == (ROOT / "docs" / "overlap.svg").read_text()


def test_peers_names_beside_features_are_those_of_the_keys() -> None:
    """Of names that ``core.job.framework_names`` knows, which errors and the page of names are made
    of."""
    lines = (ROOT / "docs" / "features.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:2] == "| "]
    seen = 0
    for feature, own, *theirs in rows[1:]:
        keys = {key.split(" ")[0] for key in re.findall(r"`([^`]+)`", own)}
        for name in re.findall(r"`([^`]+)`", " ".join(theirs[:3])):
            if meant := key_of(name):
                seen += 1
                same = {meant, meant.rpartition(".")[2]} & keys or {key for key in keys if key.startswith(f"{meant}.")}
                assert same, f"{feature}: {name} is {meant} in core/job/framework_names.py, and not {keys}"
    assert seen > 25
