"""What files say of a cluster: their kinds, what is learnt, what contradicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.api.calibrating import Calibration, calibrate_cluster
from plait.core.base.codec.toml_text import to_toml
from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.cluster.hardware import Cluster
from plait.core.step.seconds import rates
from plait.plan.calibrate.fit import constant_of, with_constants
from plait.plan.calibrate.recorded import predicted_seconds
from plait.plan.calibrate.sources import read_runs, source_kind
from plait.plan.calibrate.training_log import read_training_log, run_of_log
from tests.formats.kineto.test_profile import Trace
from tests.plan.training_logs import megatron_log, torchtitan_log
from tests.support.command import plait

CLUSTER = Cluster.preset("h100")
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1},
    {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4, "sequence_parallel": False},
    {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": 1, "micro_batch_size": 2},
)


def changed(**values: float) -> Cluster:
    """The cluster with constants so many times as large."""
    named = {name.replace("__", "."): factor for name, factor in values.items()}
    new = {name: (constant_of(CLUSTER, name).value * factor, 0.0) for name, factor in named.items()}
    return with_constants(CLUSTER, new, source="test", date="2026")


def logs_of(truth: Cluster, folder: Path) -> list[Path]:
    """Logs of runs that take as long as the closed form says of a cluster."""
    found: list[Path] = []
    for number, layout in enumerate(LAYOUTS):
        file = megatron_log(folder / f"run{number}.log", 1.0, **layout)
        run = run_of_log(read_training_log(file, "megatron"), None, [], 256)
        found.append(megatron_log(file, predicted_seconds(truth, [run.priced_step(truth.device)])[0], **layout))
    return found


def trace_of(truth: Cluster, folder: Path) -> Path:
    """A trace of products as fast as they are on a cluster."""
    trace = Trace()
    for m in (1024, 4096, 16384):
        for k, n in ((4096, 4096), (4096, 14336), (14336, 4096)):
            took = float(rates.matmul(truth, "bf16-mixed", m, k, n)) * 1e6
            trace.operator("aten::mm", [[m, k], [k, n]], took)
    trace.read(folder)
    return folder / "trace.json"


def links_of(truth: Cluster, file: Path, nodes: int = 2) -> Path:
    """nccl-tests' all-reduces of nodes of 8, as a cluster takes."""
    ranks = 8 * nodes
    lines = ["# nccl-tests version 2.17.1", "# Collective test starting: all_reduce_perf", "# Using devices"]
    lines += [f"#  Rank {r:2} Group  0 Pid {r + 1} on node{r // 8} device {r % 8} [0x01] H100" for r in range(ranks)]
    lines.append("#  size count type redop root time algbw busbw #wrong time algbw busbw #wrong")
    for power in range(16, 31, 2):
        size = 1 << power
        took = float(rates.collective(truth, "all_reduce", size, ranks, 1)) * 1e6
        row = f"{took:.2f} {size / took / 1e3:.2f} {size / took / 1e3 * 2 * (ranks - 1) / ranks:.2f} 0"
        lines.append(f"{size} {size // 4} float sum -1 {row} {row}")
    file.write_text("\n".join([*lines, "# Out of bounds values : 0 OK"]) + "\n")
    return file


def known(found: Calibration, name: str) -> tuple[float, float, str]:
    """A constant's value, its error, and where it is from."""
    one = next(one for one in found.constants if one.name == name)
    assert one.error_after is not None
    return one.value, one.error_after, one.provenance


def test_one_command_takes_logs_traces_and_links(tmp_path: Path) -> None:
    truth = changed(matmul=0.85, across__share=0.6)
    files = [*logs_of(truth, tmp_path), trace_of(truth, tmp_path), links_of(truth, tmp_path / "nccl.log")]
    found = calibrate_cluster(files, tmp_path / "c.toml", "h100")
    for name in ("matmul", "across.share"):
        value, error, _ = known(found, name)
        assert value == pytest.approx(constant_of(truth, name).value, rel=2 * error)
        assert value < constant_of(CLUSTER, name).value
    measured, refitted = np.array([run.seconds for run in found.runs]), found.refitted
    assert refitted is not None and abs(refitted.after / measured - 1).max() < 0.03
    value = constant_of(Cluster.read(tmp_path / "c.toml"), "matmul").value
    assert value == pytest.approx(known(found, "matmul")[0])
    assert known(found, "jitter")[2] == known(found, "matmul_fp8")[2] == "stays prior"
    assert known(found, "across.share")[2].startswith(f"learnt from {tmp_path / 'nccl.log'}")
    assert known(found, "matmul")[2].startswith(f"learnt from {tmp_path / 'trace.json'} and ")
    assert not found.conflicts
    text = found.text()
    assert "log of megatron: " in text and "trace of PyTorch: 9 products" in text and "8 sizes of coll" in text
    told = found.to_dict()
    assert json.loads(json.dumps(told))["constants"][0]["name"] == "matmul"
    assert {one["learnt"] for one in told["constants"]} == {True, False}


def test_sources_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    one, other = (links_of(changed(across__share=by), tmp_path / f"{by}.log") for by in (0.9, 0.3))
    found = calibrate_cluster([one, other], tmp_path / "c.toml", "h100")
    assert any(said.startswith(f"across.share: {one} says ") and str(other) in said for said in found.conflicts)
    assert "CONFLICT: across.share" in found.text()
    agreeing = links_of(changed(across__share=0.9), tmp_path / "again.log")
    assert not calibrate_cluster([one, agreeing], tmp_path / "c.toml", "h100").conflicts


def test_what_cannot_be_is_named_and_not_taken(tmp_path: Path) -> None:
    """Products at thirty times what the device can do at most; what another trace says of them
    counts."""
    for name, truth in (("fast", changed(matmul=30.0)), ("true", changed(matmul=0.8))):
        (tmp_path / name).mkdir()
        trace_of(truth, tmp_path / name)
    fast, true = tmp_path / "fast" / "trace.json", tmp_path / "true" / "trace.json"
    alone, both = (calibrate_cluster(files, tmp_path / "c.toml", "h100") for files in ([fast], [fast, true]))
    value = constant_of(CLUSTER, "matmul").value
    now = [next(one for one in found.constants if one.name == "matmul").value for found in (alone, both)]
    assert now == [value, pytest.approx(0.8 * value, rel=0.1)]
    for found in (alone, both):
        assert sum("which cannot be" in one and str(fast) in one for one in found.conflicts) == 1


def test_links_inside_nodes_that_leave_nothing_for_others_are_why(tmp_path: Path) -> None:
    """Two nodes whose links inside are faster than known: all takes less than those are said to."""
    truth = changed(inside__share=1.6, across__share=2.0)
    two, one = links_of(truth, tmp_path / "two.log"), links_of(truth, tmp_path / "one.log", nodes=1)
    found = calibrate_cluster([two], tmp_path / "c.toml", "h100")
    (said,) = found.conflicts
    assert said.startswith(f"{two} says ") and "(across.share), which cannot be: predictions add up" in said
    assert "all_reduce of 1 GiB over 2 nodes of 8" in said and "which a log of one node tells" in said
    kept = ("across.share", "across.latency", "across.hop", "across.half")
    assert said.endswith(f"Nothing of across is taken from it: {', '.join(kept)} stay as they were.")
    assert {known(found, name)[2] for name in kept} == {"stays prior"}
    both = calibrate_cluster([two, one], tmp_path / "c.toml", "h100")
    assert not both.conflicts
    assert known(both, "inside.share")[2] == f"learnt from {one}"
    value, error, learnt = known(both, "across.share")
    assert learnt == f"learnt from {two}"
    assert value == pytest.approx(constant_of(truth, "across.share").value, rel=2 * error)


def test_collectives_that_pass_all_tiers_at_once_are_learnt_where_the_slowest_counts(tmp_path: Path) -> None:
    preset = (specs_folder() / "clusters" / "h100.toml").read_text()
    file, words = tmp_path / "slowest.toml", 'efficiency = { like = "hopper", tiers = "slowest" }'
    file.write_text(preset.replace('efficiency = "hopper"', words))
    slowest = Cluster.read(file)
    taken = links_of(with_constants(slowest, {"across.share": (0.93, 0.0)}, source="test", date="2026"), tmp_path / "l")
    (said,) = calibrate_cluster([taken], tmp_path / "c.toml", "h100").conflicts
    assert 'efficiency.tiers = "slowest" in the cluster\'s file' in said
    found = calibrate_cluster([taken], tmp_path / "c.toml", str(file))
    value, error, _ = known(found, "across.share")
    assert not found.conflicts and value == pytest.approx(0.93, rel=max(2 * error, 0.02))
    assert Cluster.read(tmp_path / "c.toml").efficiency.tiers == "slowest"


def test_steps_that_contradict_a_trace_are_named(tmp_path: Path) -> None:
    files = [*logs_of(changed(matmul=0.5), tmp_path), trace_of(CLUSTER, tmp_path)]
    found = calibrate_cluster(files, tmp_path / "c.toml", "h100")
    assert any(said.startswith(("matmul: ", str(tmp_path / "run"))) for said in found.conflicts)


def test_a_log_of_another_cluster_moves_nothing(tmp_path: Path) -> None:
    far = megatron_log(tmp_path / "far.log", 100.0)
    with pytest.raises(
        JobError, match=r"far\.log: has 100\S* s a step, and .* predicted for h100: this is another run"
    ):
        calibrate_cluster([far], tmp_path / "c.toml", "h100")
    found = calibrate_cluster([far, links_of(CLUSTER, tmp_path / "nccl.log")], tmp_path / "c.toml", "h100")
    assert not found.runs
    assert [said.partition(" has ")[0] for said in found.conflicts] == [str(far)]


def test_runs_that_no_constants_explain_are_refused(tmp_path: Path) -> None:
    """Logs that do not name their device, of H100, for A100."""
    out, words = tmp_path / "c.toml", [logs_of(CLUSTER, tmp_path)[0], "--cluster", "a100-80"]
    refused = plait("calibrate", *words, "--out", out)
    assert refused.returncode == 2 and not out.exists()
    told = " ".join(refused.stderr.split())
    assert "no constants explain it, and nothing was written. Name the cluster of the run with --cluster" in told
    forced = plait("calibrate", *words, "--out", out, "--force")
    assert forced.returncode == 0 and out.exists()
    assert "CONFLICT: " in forced.stdout
    row = next(line.split() for line in forced.stdout.splitlines() if line.startswith("matmul_mxfp8 "))
    assert row[3:] == ["unknown", "unknown", "unused:", "the", "device", "has", "no", "mxfp8"]


def test_what_is_of_another_device_is_named_and_not_taken(tmp_path: Path) -> None:
    log, out = torchtitan_log(tmp_path / "t.log", 1.5), tmp_path / "c.toml"
    with pytest.raises(JobError, match=r"t\.log: is of NVIDIA H100 80GB HBM3, and a100-80 has A100.*nothing is left"):
        calibrate_cluster([log], out, "a100-80")
    assert not out.exists()
    ours = torchtitan_log(tmp_path / "ours.log", 3.0)
    ours.write_text(ours.read_text().replace("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"))
    found = calibrate_cluster([log, ours], out, "a100-80")
    assert [run.folder for run in found.runs] == [str(ours)]
    (said,) = found.conflicts
    assert said.startswith(f"{log} is of NVIDIA H100 80GB HBM3, and a100-80 has A100") and said.endswith(": left out.")


def test_measurements_of_another_device_are_not_taken(tmp_path: Path) -> None:
    trace = trace_of(changed(matmul=0.8), tmp_path)
    values = json.loads(trace.read_text())
    trace.write_text(json.dumps(values | {"deviceProperties": [{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}]}))
    with pytest.raises(JobError, match=r"trace\.json: is of NVIDIA A100-SXM4-80GB, and h100 has .*nothing is left"):
        calibrate_cluster([trace], tmp_path / "c.toml", "h100")
    found = calibrate_cluster([trace, links_of(CLUSTER, tmp_path / "nccl.log")], tmp_path / "c.toml", "h100")
    assert known(found, "matmul")[2] == "stays prior"
    assert next(said for said in found.conflicts if str(trace) in said).endswith("left out.")


def test_the_command_prints_what_was_learnt_and_an_error_that_nobody_told_is_unknown(tmp_path: Path) -> None:
    said = CLUSTER.model_dump(mode="json", exclude_none=True)
    del said["efficiency"]["jitter"]["error"]
    (tmp_path / "own.toml").write_text(to_toml(said))
    log = megatron_log(tmp_path / "run.log", 5.0, world_size="None")
    words = ["calibrate", log, "--cluster", tmp_path / "own.toml", "--out", tmp_path / "c.toml"]
    assert plait(*words).returncode == 2
    values = json.loads(plait(*words, "cluster.ranks=16", "--json").stdout)
    assert values["runs"][0]["measured"] == pytest.approx(5.0, rel=0.01)
    told = {one["name"]: one for one in values["constants"]}
    for name in ("mxfp8", "nvfp4"):  # which the device has not
        assert (told[f"matmul_{name}"]["prior_error"], told[f"matmul_{name}"]["error"]) == (None, None)
    assert told["matmul_fp8"]["error"] > 0 and told["matmul"]["learnt"] is True
    assert (told["jitter"]["prior_error"], told["jitter"]["learnt"]) == (None, False)
    assert Cluster.read(tmp_path / "c.toml").name == "h100"


def test_a_configuration_beside_a_log_is_its_own(tmp_path: Path) -> None:
    lines = megatron_log(tmp_path / "whole.log", 5.0).read_text().splitlines()
    bare = tmp_path / "bare.log"
    bare.write_text("\n".join(line for line in lines if "iteration" in line))
    job = tmp_path / "bare.toml"
    job.write_text(
        '[model]\npreset = "llama3-8b"\n[data]\nsequence_length = 8192\n[train]\nglobal_batch_size = 64\n'
        'precision = "bf16-mixed"\nmicro_batch_size = 1\n[strategy]\ntp = 2\npp = 2\ndp = 4\nshard = "zero1"\n'
    )
    found = calibrate_cluster([bare, job], tmp_path / "c.toml", "h100")
    assert found.sources[str(job)] == "configuration"
    assert found.refitted is not None and found.refitted.before[0] == pytest.approx(5.0, rel=0.3)
    (tmp_path / "other.toml").write_text(job.read_text().replace("tp = 2", "tp = 4"))
    again = read_runs({bare: "megatron", tmp_path / "other.toml": "configuration", job: "configuration"}, [], 256)
    assert [run.job for run in again.runs] == [run.job for run in found.runs]  # type: ignore[attr-defined]
    job.rename(tmp_path / "else.toml")
    with pytest.raises(JobError, match=r"bare\.log: has no configuration, and it is unclear which of 2 it has"):
        calibrate_cluster([bare, tmp_path / "other.toml", tmp_path / "else.toml"], tmp_path / "c.toml", "h100")
    with pytest.raises(JobError, match="there is no log of its run"):
        calibrate_cluster([tmp_path / "other.toml"], tmp_path / "c.toml", "h100")
    with pytest.raises(JobError, match="--cluster: is missing: logs and traces do not say"):
        calibrate_cluster([bare, tmp_path / "other.toml"], tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('{"schemaVersion": 1, "traceEvents": []}', "trace"),
        ('[{"ph": "X", "cat": "kernel"}]', "trace"),
        ('{"train_batch_size": 8}', "configuration"),
        ('{"version": 1, "hash": ""}', "profile"),
        ("# nccl-tests version 2\n#  size count type", "profile"),
        ("[1,0]<stdout>:# Rank 0 Group 0 Pid 1 on a device 0\n", "profile"),
        ("--num-layers 8", "configuration"),
    ],
)
def test_a_file_is_told_by_its_content(tmp_path: Path, text: str, kind: str) -> None:
    (tmp_path / "file").write_text(text)
    assert source_kind(tmp_path / "file") == kind


def test_logs_and_folders_are_told(tmp_path: Path) -> None:
    assert source_kind(megatron_log(tmp_path / "a.txt", 1.0)) == "megatron"
    assert source_kind(torchtitan_log(tmp_path / "b", 1.0)) == "torchtitan"
    assert source_kind(tmp_path) == "run"


@pytest.mark.parametrize("content", [b"", b"hello\n", b"\x00" * 100, b"\x1f\x8b\x08broken", b"{"])
def test_what_is_none_of_these_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(JobError, match="file"):
        calibrate_cluster([tmp_path / "file"], tmp_path / "c.toml", "h100")
    with pytest.raises(JobError, match="none: cannot be read"):
        source_kind(tmp_path / "none")
