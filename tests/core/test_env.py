from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from plait.core.env import RankEnv, rank_variables, specs_folder
from plait.core.errors import JobError, LaunchError


def test_an_empty_environment_is_a_run_of_one_process() -> None:
    assert RankEnv.read({}) == RankEnv()


def test_what_torchrun_sets_is_understood() -> None:
    env = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "host0",
        "MASTER_PORT": "1234",
    }
    expected = RankEnv(
        rank=5, world_size=8, local_rank=1, local_world_size=4, node_rank=1, master_addr="host0", master_port=1234
    )
    assert RankEnv.read(env) == expected
    assert RankEnv.read(expected.variables()) == expected


def test_what_is_left_out_follows_from_the_rest() -> None:
    rank = RankEnv.read({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "host0"})
    assert (rank.local_rank, rank.node_rank, rank.master_port) == (1, 1, 29500)


def test_a_rank_is_started_with_the_callers_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMETHING", "else")
    monkeypatch.setenv("RANK", "9")
    started = rank_variables(
        rank=1, world_size=2, local_rank=1, local_world_size=2, master_addr="127.0.0.1", master_port=5
    )
    assert (started["SOMETHING"], started["RANK"], started["MASTER_PORT"]) == ("else", "1", "5")
    assert "OMP_NUM_THREADS" in started


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is '2' but RANK is not set"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2. Allowed: 0 to 1"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is 0. Allowed: at least 1"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE is 8. Allowed: 1 to 4"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "host0"}, "LOCAL_WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, "LOCAL_RANK is 2. Allowed: 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "LOCAL_RANK is -1. Allowed: 0 to 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "-1"}, "GROUP_RANK is -1. Allowed: at least 0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "NODE_RANK": "a"}, "NODE_RANK is 'a', not a whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is 70000. Allowed: 1 to 65535"),
    ],
)
def test_what_cannot_be_is_refused_by_name(env: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError) as caught:
        RankEnv.read(env)
    assert words in str(caught.value)


def test_hosts_of_a_lab_share_the_machines_cores() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.1"}
    assert RankEnv.read(variables).place_among_cores == (1, 2)
    assert RankEnv.read(variables | {"PLAIT_LAB": "lab1"}).place_among_cores == (3, 4)


def test_the_specs_folder_may_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PLAIT_SPECS", raising=False)
    assert (specs_folder() / "models" / "gpt3-125m.toml").is_file()
    monkeypatch.setenv("PLAIT_SPECS", str(tmp_path))
    with pytest.raises(JobError, match="PLAIT_SPECS names"):
        specs_folder()
    (tmp_path / "models").mkdir()
    assert specs_folder() == tmp_path


@pytest.mark.system
def test_an_installed_wheel_finds_its_specs(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    root = Path(__file__).parents[2]
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    code = "from plait.core.env import specs_folder; print(specs_folder() / 'models' / 'llama2-7b.toml')"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "site", capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == str(tmp_path / "site" / "plait" / "specs" / "models" / "llama2-7b.toml")
    assert Path(found.stdout.strip()).is_file()
