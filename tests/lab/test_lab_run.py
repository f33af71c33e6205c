"""``plait lab run``: what ranks are told, what is printed, and how a run ends, well or not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from plait.cli.lab import app
from plait.core.base.errors import LaunchError, PlaitError
from plait.lab import Lab, LabSpec, running
from tests.support.lab import CLI, REPOSITORY, PlaitLab, as_nobody, processes_of, wait_until

pytestmark = pytest.mark.lab


def test_the_environment_of_a_rank(plait_lab: PlaitLab, tmp_path: Path) -> None:
    code = f"import json, os; json.dump(dict(os.environ), open('{tmp_path}/env' + os.environ['RANK'], 'w'))"
    plait_lab("run", "--name", "env", "2x2@1gbit", "--", sys.executable, "-c", code)
    found = json.loads((tmp_path / "env3").read_text())
    wanted = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "PLAIT_LAB": "env",
    }
    assert {key: found[key] for key in wanted} == wanted
    assert found["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")


@pytest.mark.usefixtures("needs_lab")
def test_one_host_speaks_over_its_loopback() -> None:
    with Lab(LabSpec(1, 2)) as lab:
        assert lab.environment(1)["GLOO_SOCKET_IFNAME"] == "lo"


def test_lines_carry_their_rank(plait_lab: PlaitLab) -> None:
    done = plait_lab("run", "2x1@1gbit", "sh", "-c", "echo out; printf 'half\\rline\\r\\n'; printf 'no end' >&2")
    for rank in (0, 1):
        assert [line for line in done.stdout.replace("\r", "\n").split("\n") if line.startswith(f"[{rank}]")] == [
            f"[{rank}] out",
            f"[{rank}] half",
            f"[{rank}] line",
        ]
    assert sorted(done.stderr.splitlines()) == ["[0] no end", "[1] no end"]


def test_only_one_rank_is_shown_but_errors_are_not_hidden(plait_lab: PlaitLab) -> None:
    assert plait_lab("run", "--only-rank", "1", "2x1@1gbit", "sh", "-c", "echo I am $RANK").stdout == "I am 1\n"
    done = plait_lab(
        "run",
        "--only-rank",
        "1",
        "2x1@1gbit",
        "sh",
        "-c",
        "test $RANK = 1 || { echo cause >&2; exit 3; }; sleep 60",
        status=3,
    )
    assert "[0] cause\n" in done.stderr


def test_a_failing_rank_ends_the_others(plait_lab: PlaitLab, own_list: Path) -> None:
    done = plait_lab(
        "run", "2x1@1gbit", "sh", "-c", f"test $RANK = 1 && exit 7; sleep 60; touch {own_list}/slept", status=7
    )
    assert "rank 1 on host 1 ended with status 7; ending the other ranks" in done.stderr
    assert not (own_list / "slept").exists()


def test_a_rank_that_will_not_end_is_killed(plait_lab: PlaitLab) -> None:
    plait_lab(
        "run",
        "--grace",
        "0.2",
        "2x1@1gbit",
        "sh",
        "-c",
        "trap '' TERM; test $RANK = 1 && { sleep 0.3; exit 7; }; while true; do sleep 1; done",
        status=7,
    )


def test_a_signal_ends_everything(running_lab: subprocess.Popen[str], own_list: Path) -> None:
    running_lab.send_signal(signal.SIGTERM)
    running_lab.communicate(timeout=60)
    assert running_lab.returncode == 128 + signal.SIGTERM
    assert not processes_of(own_list)
    assert not running()


def test_a_lab_of_another_shell_is_changed_by_its_name_alone(plait_lab: PlaitLab, own_list: Path) -> None:
    """A lab whose shell is still there, and one of this process."""
    code = f"touch {own_list}/up; sleep 60"
    argv = [sys.executable, "-c", CLI, "run", "--name", "theirs", "2x1@1gbit", "--", "sh", "-c", code]
    shell = subprocess.Popen(["sh", "-c", '"$@"; true', "sh", *argv], stderr=subprocess.DEVNULL)
    wait_until((own_list / "up").exists, "the ranks did not start")
    for words in (["slow", "1", "100mbit"], ["cut", "1"], ["heal", "1"], ["stop"]):
        done = plait_lab(*words, status=2)
        assert "no lab that is running (theirs) was started by this shell" in done.stderr
    with Lab(LabSpec(2, 1, "1gbit"), name="ours"):
        assert plait_lab("slow", "1", "100mbit").stdout == "ours: the link of host 1 had 1gbit, and has 100mbit\n"
        assert plait_lab("slow", "--name", "theirs", "0", "unlimited").stdout == (
            "theirs: the link of host 0 had 1gbit, and has unlimited\n"
        )
        with Lab(LabSpec(1, 1), name="more"):
            assert "several labs of this shell are running (more, ours)" in plait_lab("cut", "0", status=2).stderr
    assert plait_lab("stop", "--name", "theirs").stdout == "theirs: has ended\n"
    shell.wait(60)
    assert not running()


def test_a_second_signal_kills(plait_lab: PlaitLab, own_list: Path) -> None:
    process = plait_lab.start(
        "run",
        "--grace",
        "60",
        "2x1@1gbit",
        "sh",
        "-c",
        f"trap '' TERM; touch {own_list}/rank$RANK; while true; do sleep 1; done",
    )
    wait_until(lambda: (own_list / "rank0").exists() and (own_list / "rank1").exists(), "the ranks did not start")
    process.send_signal(signal.SIGINT)
    assert process.stderr
    assert any("SIGINT received; ending the ranks (once more to kill them)" in line for line in process.stderr)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT


def test_kill_9_of_the_lab_leaves_nothing(running_lab: subprocess.Popen[str], own_list: Path) -> None:
    (entry,) = running()
    before = processes_of(own_list)
    assert len(before) >= 6  # the lab, its keeper, two ranks, and a child in its own session of each
    running_lab.kill()
    running_lab.wait()
    wait_until(lambda: not processes_of(own_list), "ranks outlived their lab")
    # The switch and the links lived in namespaces that only these processes held; the machine itself never
    # had any.
    assert not any(name.startswith(("host", "sw0")) for name in os.listdir("/sys/class/net"))
    assert (own_list / "plait-lab" / f"{entry.name}.json").exists()
    assert running() == []
    assert not (own_list / "plait-lab" / f"{entry.name}.json").exists()


@pytest.mark.usefixtures("needs_lab")
def test_a_lab_ends_with_its_block() -> None:
    with Lab(LabSpec(2, 1)) as lab:
        process = lab.popen(1, ["sh", "-c", "setsid sleep 60 & sleep 60"])
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(LaunchError, match="not up"):
        lab.popen(0, ["true"])


def test_another_terminal_sees_and_changes_a_lab(running_lab: subprocess.Popen[str], plait_lab: PlaitLab) -> None:
    assert "host 1 is cut off" in plait_lab("cut", "1").stdout
    plait_lab("slow", "0", "2.5gbit", "--name", "lab1")
    (lab,) = json.loads(plait_lab("list", "--json").stdout)["labs"]
    assert lab["name"] == "lab1"
    assert lab["pid"] == running_lab.pid
    assert [(host["nic"], host["cut"]) for host in lab["hosts"]] == [("2.5gbit", False), ("1gbit", True)]
    plait_lab("heal", "1")
    assert "cut off" not in plait_lab("list").stdout
    assert "host 9 does not exist" in plait_lab("cut", "9", status=2).stderr
    assert "no lab called 'other'" in plait_lab("cut", "0", "--name", "other", status=2).stderr


@pytest.mark.usefixtures("needs_lab")
def test_which_lab_must_be_said_when_several_run(plait_lab: PlaitLab) -> None:
    with Lab(LabSpec(2, 1), name="a"), Lab(LabSpec(2, 1), name="b"):
        assert "(a, b)" in plait_lab("cut", "0", status=2).stderr
        assert "running already" in plait_lab("run", "--name", "a", "2x1@1gbit", "true", status=2).stderr
    assert "no lab is running" in plait_lab("heal", "0", status=2).stderr


@pytest.mark.parametrize(
    "words, problem",
    [
        (("2x1@1gbit",), "nothing to run"),
        (("2x1@1gbit", "no-such-program"), "'no-such-program' is not an executable file"),
        (("2x1@1gbps", "true"), "'1gbps' is not a link rate"),
        (("0x1", "true"), "hosts = 0"),
        (("2x0", "true"), "ranks_per_host = 0"),
        (("--only-rank", "2", "2x1", "true"), "rank 2 does not exist"),
        (("--name", "../x", "2x1", "true"), "cannot name a lab"),
    ],
)
def test_a_user_error_is_one_paragraph(words: tuple[str, ...], problem: str, needs_lab: None) -> None:
    error = CliRunner().invoke(app, ["run", *words]).exception
    assert isinstance(error, PlaitError)
    assert error.exit_status == 2
    assert problem in str(error)
    assert "\n" not in str(error)


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name, path=None: None if name == "tc" else "/bin/true")
    with pytest.raises(LaunchError, match=r"'tc'.*Install iproute2"):
        Lab(LabSpec()).__enter__()


def test_another_system_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(LaunchError, match=r"needs Linux.*darwin"):
        Lab(LabSpec()).__enter__()


UNPRIVILEGED = """
import os, subprocess, sys
from plait.lab import Lab, LabSpec, run
assert os.geteuid() == 65534
with Lab(LabSpec(2, 2, "1gbit"), name="mine") as lab:
    assert lab.network.userns
    other = "from plait.lab import find; find('mine').network.cut(1); find('mine').network.slow(0, '100mbit')"
    subprocess.run([sys.executable, "-c", other], check=True)
    print([(state.nic, state.cut) for state in lab.network.state()])
    lab.popen(3, ["sh", "-c", "setsid sleep 60 & sleep 60"])
sys.exit(run(LabSpec(2, 1), ["sh", "-c", "echo hello; sleep $RANK; exit $((5 * RANK))"]))
"""


@pytest.mark.usefixtures("needs_lab")
def test_no_root_is_needed(nobody_python: str, own_list: Path) -> None:
    for folder in [own_list, *own_list.parents[:3]]:  # pytest's own folders are closed to others
        if folder.stat().st_uid == os.geteuid() and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    own_list.chmod(0o777)
    done = subprocess.run(
        [*as_nobody(nobody_python), "-c", UNPRIVILEGED],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "user namespaces" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert "[('100mbit', False), ('1gbit', True)]" in done.stdout, done.stderr
    assert {"[0] hello", "[1] hello"} <= set(done.stdout.splitlines())
    assert done.returncode == 5
