"""Running managers, asked by commands that stand in for theirs."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError
from plait.place import topologies as readers
from plait.place.topologies import read_topology
from tests.place.readers import texts

SCONTROL = f"""#!/bin/sh
case "$*" in
"show topology") cat <<'END'
{texts.TREE_SHOWN}END
;;
"-o show nodes") cat <<'END'
{texts.NODES_SHOWN}END
;;
*) exit 9 ;;
esac
"""
SQUEUE = "#!/bin/sh\necho '7|2026-11-23T12:00:00|n[001-002]'\n"


def command(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in front of the others in which commands are looked for."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.system
def test_slurm_is_asked(path: Path) -> None:
    command(path, "scontrol", SCONTROL)
    command(path, "squeue", SQUEUE)
    topology, remarks = read_topology("slurm:")
    assert topology.levels == ("core", "minipod", "leaf")
    assert topology.node("n001").state.holder == "job 7"
    assert topology.node("n003").state.holder == "bad nic"
    assert len(remarks.notes) == 1
    assert "scontrol -o show nodes: no state of 4 nodes" in remarks.notes[0]


@pytest.mark.system
def test_kubernetes_is_asked(path: Path) -> None:
    (path / "nodes.json").write_text(texts.KUEUE)
    command(path, "kubectl", f"#!/bin/sh\ncat {path}/nodes.json\n")
    assert len(read_topology("kubernetes:")[0].minipods()) == 2


@pytest.mark.system
def test_commands_that_fail_are_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(path, "scontrol", "#!/bin/sh\necho 'slurm_load_topo: Unable to contact slurm controller' >&2; exit 1\n")
    with pytest.raises(JobError, match="'scontrol show topology' failed: slurm_load_topo: Unable to contact"):
        read_topology("slurm:")
    command(path, "scontrol", "#!/bin/sh\necho No topology information available\n")
    command(path, "squeue", SQUEUE)
    with pytest.raises(JobError, match="scontrol show topology: no format of a topology is recognised"):
        read_topology("slurm:")
    monkeypatch.setattr(readers, "COMMAND_TIMEOUT", 0.2)
    command(path, "scontrol", "#!/bin/sh\nexec sleep 10\n")
    with pytest.raises(JobError, match=r"has not answered within 0 s"):
        read_topology("slurm:")
    monkeypatch.setenv("PATH", str(path))
    with pytest.raises(JobError, match="there is no command kubectl here"):
        read_topology("kubernetes:")


def asked(monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, bytes, bytes]) -> list[Sequence[str]]:
    """What commands are started, where each gives a status, output and errors in turn."""
    started: list[Sequence[str]] = []

    def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        assert options["timeout"] == readers.COMMAND_TIMEOUT and options["capture_output"]
        started.append(command)
        return subprocess.CompletedProcess(command, *answers[len(started) - 1])

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    return started


def test_every_command_of_a_source_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    started = asked(monkeypatch, (0, b"wires", b""), (0, b"nodes \xff", b"odd"), (0, b"7|x|n1\n", b""))
    assert readers.answers("slurm:") == [
        ("scontrol show topology", "wires"), ("scontrol -o show nodes", "nodes \ufffd"),
        ("squeue -h -t R,CG,CF -o %i|%e|%N", "JOBID|END_TIME|NODELIST\n7|x|n1\n"),
    ]  # fmt: skip
    assert started == list(readers.SOURCES["slurm:"])


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (b"first\nlast " + b"x" * 300, r"failed: last x{195}\. Make it work"),
        (b"", r"failed: status 3\. Make it work"),
        (b" \n", r"failed: status 3\. Make it work"),
    ],
)
def test_a_command_that_fails(monkeypatch: pytest.MonkeyPatch, errors: bytes, said: str) -> None:
    asked(monkeypatch, (3, b"{}", errors))
    with pytest.raises(JobError, match=said):
        readers.answers("kubernetes:")


def test_a_command_that_is_not_there_or_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(command: Sequence[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 60)

    monkeypatch.setattr(subprocess, "run", late)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    with pytest.raises(JobError, match=r"'kubectl get nodes,pods .+' has not answered within 60 s"):
        readers.answers("kubernetes:")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(JobError, match="there is no command kubectl here"):
        readers.answers("kubernetes:")
