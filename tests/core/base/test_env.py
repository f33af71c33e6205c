from __future__ import annotations

import io
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from plait.core.base import cluster_env
from plait.core.base import env as environment
from plait.core.base.cluster_env import PodEnv
from plait.core.base.env import RankEnv, rank_variables, specs_folder
from plait.core.base.errors import JobError, LaunchError


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
        RankEnv(
            rank=1, world_size=2, local_rank=1, local_world_size=2, node_rank=0, master_addr="127.0.0.1", master_port=5
        )
    )
    assert (started["SOMETHING"], started["RANK"], started["MASTER_PORT"]) == ("else", "1", "5")
    assert "OMP_NUM_THREADS" in started


IMPOSSIBLE = {
    "RANK=0": "RANK is set but WORLD_SIZE is not",
    "WORLD_SIZE=2": "WORLD_SIZE is '2' but RANK is not set",
    "RANK=2 WORLD_SIZE=2": "RANK is 2. Allowed: 0 to 1",
    "RANK=one WORLD_SIZE=2": "RANK is 'one', not a whole number",
    "RANK=0 WORLD_SIZE=0": "WORLD_SIZE is 0. Allowed: at least 1",
    "RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=8": "LOCAL_WORLD_SIZE is 8. Allowed: 1 to 4",
    "RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2": "MASTER_ADDR is not set",
    "RANK=0 WORLD_SIZE=4 MASTER_ADDR=host0": "LOCAL_WORLD_SIZE is not set",
    "RANK=0 WORLD_SIZE=2 LOCAL_RANK=2": "LOCAL_RANK is 2. Allowed: 0 to 1",
    "RANK=0 WORLD_SIZE=2 LOCAL_RANK=-1": "LOCAL_RANK is -1. Allowed: 0 to 1",
    "RANK=0 WORLD_SIZE=2 GROUP_RANK=-1": "GROUP_RANK is -1. Allowed: at least 0",
    "RANK=0 WORLD_SIZE=2 NODE_RANK=a": "NODE_RANK is 'a', not a whole number",
    "MASTER_PORT=70000": "MASTER_PORT is 70000. Allowed: 1 to 65535",
    "MASTER_PORT=65536": "MASTER_PORT is 65536. Allowed: 1 to 65535",
    "MASTER_PORT=0": "MASTER_PORT is 0. Allowed: 1 to 65535",
    "RANK=-1 WORLD_SIZE=2": "RANK is -1. Allowed: 0 to 1",
    "RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=0": "LOCAL_WORLD_SIZE is 0. Allowed: 1 to 4",
    "TORCHELASTIC_RESTART_COUNT=-1": "TORCHELASTIC_RESTART_COUNT is -1. Allowed: at least 0",
}


@pytest.mark.parametrize("variables", IMPOSSIBLE)
def test_what_cannot_be_is_refused_by_name(variables: str) -> None:
    with pytest.raises(LaunchError) as caught:
        RankEnv.read(dict(one.split("=") for one in variables.split()))
    assert IMPOSSIBLE[variables] in str(caught.value)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"WORLD_SIZE": "1"}, RankEnv()),  # said by schedulers of a job of one process
        ({"LOCAL_RANK": "0", "NODE_RANK": "3"}, RankEnv(node_rank=3)),
        ({"NODE_RANK": "3", "GROUP_RANK": "2"}, RankEnv(node_rank=2)),
        ({"MASTER_PORT": "1"}, RankEnv(master_port=1)),
        ({"MASTER_PORT": "65535"}, RankEnv(master_port=65535)),
        ({"PLAIT_LAB": ""}, RankEnv(lab=None)),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"},
         RankEnv(agent_store=True, attempt=2)),
        ({"TORCHELASTIC_USE_AGENT_STORE": "False"}, RankEnv(agent_store=False)),
        ({"MASTER_ADDR": "host0"}, RankEnv(master_addr="host0")),  # one process needs no word on machines
        ({"RANK": "1", "WORLD_SIZE": "2"}, RankEnv(rank=1, world_size=2, local_rank=1, local_world_size=2)),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.1.1"},
         RankEnv(rank=1, world_size=2, local_rank=1, local_world_size=2, master_addr="127.0.1.1")),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"},
         RankEnv(rank=1, world_size=2, local_rank=1, local_world_size=2, master_addr="localhost")),
    ],
)  # fmt: skip
def test_what_may_be_left_out_or_is_at_the_edge(env: dict[str, str], expected: RankEnv) -> None:
    assert RankEnv.read(env) == expected


def test_the_line_to_the_launcher_is_for_one_process() -> None:
    """So that what a rank starts does not speak for it."""
    variables = environment.launcher_variable(0)
    assert environment.take_launcher(variables) == 0
    assert variables == {}
    assert environment.take_launcher(variables) is None


def test_a_rank_of_a_warm_process_becomes_who_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RANK": "0", "HOME": "/home/a"})
    environment.adopt_environment({"RANK": "3"}, 7)
    assert os.environ == {"RANK": "3", "HOME": "/home/a", "PLAIT_LAUNCHER": "7"}


def test_where_the_launcher_is_must_be_told_to_an_agent_and_to_nobody_else() -> None:
    variables = cluster_env.agent_variable("host0:29400/word")
    assert cluster_env.take_agent(variables) == "host0:29400/word"
    assert variables == {}
    with pytest.raises(LaunchError, match="PLAIT_AGENT is not set"):
        cluster_env.take_agent(variables)


@pytest.mark.parametrize(("gpus", "variables"), [(0, {}), (1, {"PLAIT_GPUS": "1"})])
def test_ranks_know_of_how_many_gpus_were_asked_for(gpus: int, variables: dict[str, str]) -> None:
    assert cluster_env.gpus_variable(gpus) == variables
    assert cluster_env.granted_gpus(variables) == gpus


SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "2", "SLURMD_NODENAME": "n2", "SLURM_JOB_NODELIST": "n[1-3]"}
POD = {"PLAIT_RUN": "gpt", "JOB_COMPLETION_INDEX": "2"}


@pytest.mark.parametrize(
    ("asked", "variables", "answer"),
    [
        (cluster_env.this_host, {}, socket.gethostname()),
        (cluster_env.this_host, SLURM, "n2"),
        (cluster_env.this_host, POD, "gpt-2"),
        (cluster_env.this_host, POD | {"PLAIT_NODE": "k5"}, "gpt-2"),  # the cluster has chosen it
        (cluster_env.this_host, POD | {"PLAIT_NODE": "k5", "PLAIT_HOSTS": "k[1-5]"}, "k5"),
        (cluster_env.this_host, POD | {"PLAIT_HOSTS": "k[1-5]"}, "gpt-2"),
        (cluster_env.cluster_job, {}, ("", 0)),
        (cluster_env.cluster_job, SLURM, ("slurm/7", 0)),
        (cluster_env.cluster_job, SLURM | {"SLURM_CLUSTER_NAME": "big", "SLURM_RESTART_COUNT": "3"}, ("big/7", 3)),
        (cluster_env.cluster_job, SLURM | POD, ("kubernetes/gpt", 0)),
        (cluster_env.cluster_job, POD | {"PLAIT_ATTEMPT": "5"}, ("kubernetes/gpt", 5)),
        (cluster_env.slurm_job, {}, ("", "")),
        (cluster_env.slurm_job, SLURM, ("7", "n[1-3]")),
        (cluster_env.task_number, {}, -1),
        (cluster_env.task_number, SLURM, 2),
        (cluster_env.task_number, {"JOB_COMPLETION_INDEX": "4"}, 4),
        (cluster_env.task_number, {"JOB_COMPLETION_INDEX": "4", "SLURM_PROCID": "0"}, 0),
        (environment.cpp_compiler, {}, "g++"),
        (environment.cpp_compiler, {"CXX": ""}, "g++"),
        (environment.cpp_compiler, {"CXX": "clang++"}, "clang++"),
        (environment.data_folder, {}, Path.home() / ".local" / "share" / "plait"),
        (environment.data_folder, {"XDG_DATA_HOME": "/data"}, Path("/data/plait")),
        (environment.data_folder, {"XDG_DATA_HOME": "data"}, Path.home() / ".local" / "share" / "plait"),
    ],
)
def test_what_a_cluster_manager_or_a_user_says(
    asked: Callable[[Mapping[str, str]], object], variables: dict[str, str], answer: object
) -> None:
    assert asked(variables) == answer


def test_a_host_of_a_lab_is_called_as_the_lab_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.core.base.lab_hosts.here", lambda: "host3")
    assert cluster_env.this_host({"PLAIT_LAB": "lab1", **SLURM}) == "host3"
    assert cluster_env.this_host(SLURM) == "n2"
    monkeypatch.setattr("plait.core.base.lab_hosts.here", lambda: "")
    assert cluster_env.this_host({"PLAIT_LAB": "lab1", **SLURM}) == "n2"


def test_a_pod_says_which_start_of_the_run_it_is() -> None:
    variables = POD | {"PLAIT_POD_ADDRESS": "10.0.0.3", "PLAIT_FILES": "/files", "PLAIT_ENDED": "/ended"}
    before = int(time.time())
    assert PodEnv.read(variables) == PodEnv("gpt", "", "10.0.0.3", Path("/files"), Path("/ended"))
    name, start = cluster_env.cluster_job(variables)
    assert name == "kubernetes/gpt"
    assert before <= start <= time.time()
    assert PodEnv.read(variables | {"PLAIT_HOSTS": "k1"}).hosts == "k1"
    with pytest.raises(LaunchError, match="PLAIT_FILES, PLAIT_ENDED not set"):
        PodEnv.read(POD | {"PLAIT_POD_ADDRESS": "10.0.0.3", "PLAIT_ENDED": ""})


@pytest.mark.parametrize(
    ("adds", "name", "value"),
    [
        (environment.stay_on_loopback, "GLOO_SOCKET_IFNAME", "lo"),
        (environment.connect_when_needed, "TORCH_GLOO_LAZY_INIT", "1"),
        (environment.ready_for_accelerator, "CUDA_MODULE_LOADING", "EAGER"),
        (environment.expand_segments, "PYTORCH_ALLOC_CONF", "expandable_segments:True"),
    ],
)
def test_what_a_user_sets_is_kept(adds: Callable[[dict[str, str]], None], name: str, value: str) -> None:
    unset, chosen = dict[str, str](), {name: "theirs"}
    adds(unset)
    adds(chosen)
    assert (unset[name], chosen[name]) == (value, "theirs")


@pytest.mark.parametrize(("queues", "allowed"), [("7", False), ("8", True), ("32", True), ("33", False), ("0", False)])
def test_queues_of_a_gpu_are_within_bounds(queues: str, allowed: bool) -> None:
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": queues}
    if allowed:
        environment.ready_for_accelerator(variables)
        assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == queues
    else:
        with pytest.raises(LaunchError, match="CUDA_DEVICE_MAX_CONNECTIONS is"):
            environment.ready_for_accelerator(variables)


@pytest.mark.parametrize(
    ("variables", "port", "interface"),
    [({}, None, ""), ({"MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": ""}, None, ""),
     ({"MASTER_PORT": "65535", "GLOO_SOCKET_IFNAME": "eth0,eth1"}, 65535, "eth0")],
)  # fmt: skip
def test_where_ranks_meet_may_be_chosen(
    variables: dict[str, str], port: int | None, interface: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    assert environment.chosen_port() == port
    assert environment.gloo_interface() == interface


def test_a_port_beyond_the_last_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "65536")
    with pytest.raises(LaunchError, match="Allowed: 0 to 65535"):
        environment.chosen_port()


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


@pytest.mark.parametrize(("columns", "own", "width"), [("", 132, 132), ("", 0, 80), ("60", 132, 60), ("0", 132, 132)])
def test_a_terminal_has_a_width_and_a_file_has_none(
    columns: str, own: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((own, 50)))
    monkeypatch.setattr(sys, "__stdout__", None)  # in pytest no terminal either
    assert environment.terminal_width(Terminal()) == width
    assert environment.terminal_width(io.StringIO()) is None


@pytest.mark.parametrize(
    ("variables", "dumb", "plain"),
    [({}, False, False), ({"TERM": "dumb"}, True, True), ({"TERM": "unknown"}, True, True),
     ({"TERM": "xterm"}, False, False), ({"TERM": "xterm", "NO_COLOR": "1"}, False, True),
     ({"NO_COLOR": ""}, False, False)],
)  # fmt: skip
def test_who_wants_plain_text(
    variables: dict[str, str], dumb: bool, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", variables)
    assert (environment.dumb_terminal(), environment.no_colour()) == (dumb, plain)


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
