"""The wheel in an empty environment, outside of the source tree: built with a compiler and without
one, the base alone and what trains. Packages come from the registry, in the versions of
requirements.lock."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

TIER = "system"
ROOT = Path(__file__).parents[1]
PARTS = ("plait", "specs", "examples", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE")
"""Of the source tree: what a wheel is built from."""
BUILT = (".pyc", ".so")
OFFLINE = ("NewConnectionError", "NameResolutionError", "Network is unreachable", "ConnectTimeout")
JOB = """
[model]
family = "gpt"
num_layers = 2
hidden = 64
num_heads = 2
max_sequence = 64
[data]
text = "python-stdlib"
sequence_length = 64
[train]
steps = 4
global_batch_size = 4
[strategy]
tp = 2
"""


def _build(folder: Path, **variables: str) -> tuple[Path, str]:
    """A wheel built from a copy of the source, and what was said."""
    source = folder / "source"
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        source.mkdir(parents=True, exist_ok=True)
        copy(ROOT / part, source / part)
    for built in source.rglob("_ring.*.so"):
        built.unlink()
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=source, env=os.environ | variables, text=True, capture_output=True, check=True,
    )  # fmt: skip
    shutil.rmtree(source)
    [wheel] = folder.glob("*.whl")
    return wheel, done.stdout + done.stderr


@pytest.fixture(scope="module")
def pure(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return _build(tmp_path_factory.mktemp("pure"), CC="no-compiler-here")


class Empty:
    """An environment that began empty, and commands in it."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.work = folder / "venv" / "bin", folder / "work"
        self.work.mkdir()
        venv.create(folder / "venv", with_pip=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.env = kept | {"NO_COLOR": "1", "OMP_NUM_THREADS": "1"}

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        argv = [str(self.bin / str(words[0])), *map(str, words[1:])]
        return subprocess.run(argv, cwd=self.work, env=self.env, text=True, capture_output=True, check=False)

    def said(self, *words: object) -> str:
        done = self.run(*words)
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout + done.stderr

    def install(self, *wanted: object) -> None:
        done = self.run("python", "-m", "pip", "install", "-q", "-c", ROOT / "requirements.lock", *wanted)
        if done.returncode and any(sign in done.stderr for sign in OFFLINE):
            pytest.skip("no package registry can be reached from here")
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def base(pure: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Empty:
    """The base alone, without the part in C."""
    return _with_base(pure[0], tmp_path_factory.mktemp("empty"))


def _with_base(wheel: Path, folder: Path) -> Empty:
    """An environment with the base, and a job."""
    empty = Empty(folder)
    empty.install(wheel)
    (empty.work / "job.toml").write_text(JOB)
    (empty.work / "jobs.csv").write_text("submit,gpus,duration\n" + "".join(f"{i},1,100\n" for i in range(20)))
    return empty


def test_a_wheel_that_no_compiler_was_there_for_serves_every_machine(pure: tuple[Path, str]) -> None:
    wheel, said = pure
    assert wheel.name.endswith("-py3-none-any.whl")
    assert said.count("Plait records in Python") == 1 and "apt-get install" in said


def test_a_wheel_holds_all_that_commands_read(pure: tuple[Path, str]) -> None:
    with zipfile.ZipFile(pure[0]) as wheel:
        inside = set(wheel.namelist())
    wanted = {
        file for folder in ("plait", "specs", "examples") for file in (ROOT / folder).rglob("*") if file.is_file()
    }
    names = {file.relative_to(ROOT).as_posix() for file in wanted if file.suffix not in (".pyc", ".so")}
    assert {name if name.startswith("plait/") else f"plait/{name}" for name in names} <= inside


@pytest.mark.timeout(900)
def test_the_base_plans_places_and_reads_without_torch(base: Empty) -> None:
    assert base.run("python", "-c", "import torch").returncode == 1
    assert "job.plan.json" in base.said("plait", "plan", "job.toml", "cluster.preset=h100")
    base.said("plait", "topology", "generate", "--help")
    assert "preset" in base.said("plait", "job", "model.preset")
    base.said("plait", "train", "job.toml", "--dry-run")
    assert base.said("python", "-c", "import plait.core.record.ring_writer as w; print(w.NATIVE)") == "False\n"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("words", "extra"),
    [("train job.toml", "train"), ("sample runs/x --prompt a", "train"), ("export runs/x --out y", "train"),
     ("measure machine", "train"), ("view .", "view"), ("view . --save a.html", "view")],
)  # fmt: skip
def test_what_an_extra_brings_is_named(base: Empty, words: str, extra: str) -> None:
    done = base.run("plait", *words.split())
    assert done.returncode == 2, done.stderr
    assert f"pip install 'plait[{extra}]'" in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.count("\n") <= 3


@pytest.mark.timeout(1500)
def test_what_trains_is_added_by_the_extra(pure: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """The second wheel has the part in C, where there is a compiler; both examples of a loop of
    one's own."""
    wheel, said = _build(tmp_path_factory.mktemp("native"))
    base = _with_base(pure[0], tmp_path_factory.mktemp("trains"))  # its own: others are to find no PyTorch
    base.install("--force-reinstall", "--no-deps", wheel)
    base.install(f"{wheel}[train]")
    native = base.said("python", "-c", "import plait.core.record.ring_writer as w; print(w.NATIVE)")
    assert native == f"{'Plait records in Python' not in said}\n"
    assert "step 4/4" in base.said("plait", "train", "job.toml")
    assert "after step 4" in base.said("plait", "export", "runs/job", "--out", "hf")
    (base.work / "notes.txt").write_text("Slices of a batch hide what travels. " * 200)
    rank = ("torchrun", "--nproc-per-node=2", "-m")
    own = base.said(*rank, "plait.examples.finetune", "job.toml", "notes.txt", "run.name=own")
    assert "after 4 steps" in own
    weighted = base.said(*rank, "plait.examples.token_weights", "job.toml", "run.name=weighted")
    assert "better sequences became more likely" in weighted
