"""What cannot fit is refused before anything starts, in no time whatever the sizes, with what would fit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import InfeasiblePlan, JobError, PlaitError
from plait.core.job.spec import Job
from plait.core.step.memory.estimate import estimate
from plait.plan import fits
from plait.plan.fits import Room, by_kind, check_device, check_fits, check_size, least_bytes, room
from plait.plan.make import job_step

GIB = 1 << 30
LIMIT = 20.0
SMALL = {"family": "gpt", "num_layers": 2, "hidden": 64, "num_heads": 4, "max_sequence": 128}


def job(model: dict[str, Any], **sections: dict[str, Any]) -> Job:
    return Job.from_dict({"model": model, **sections})


def refused(asked: Job, there: Room | None) -> PlaitError:
    """The error of a job that must not start, and that it comes at once."""
    start = time.process_time()
    with pytest.raises(PlaitError) as caught:
        check_all(asked, there)
    assert time.process_time() - start < LIMIT
    return caught.value


def check_all(asked: Job, there: Room | None) -> None:
    """As ``plait train`` does."""
    check_size(asked, 257, there)
    found = estimate(job_step(asked, 257), gpu=bool(there and there.each))
    if there:
        check_fits(asked, found, 257, there)


def test_gpt3_175b_on_24_gib() -> None:
    asked = job({"preset": "gpt3-175b"}, data={"sequence_length": 2048}, strategy={"tp": 2})
    error = refused(asked, Room(shared=24 * GIB))
    assert isinstance(error, InfeasiblePlan)
    assert error.exit_status == 2
    for word in ("1.359 TiB", "optimizer 650", "gradients", "24 GiB", "all 2 ranks", "Use a smaller model"):
        assert word in str(error)


@pytest.mark.parametrize(("model", "sections"), [
    ({"num_layers": 10**8}, {}),
    ({"num_layers": 10**12}, {}),
    ({"hidden": 10**9}, {}),
    ({"vocab": 10**12}, {}),
    ({"max_sequence": 10**12}, {}),
    ({"ffn_hidden": 10**12}, {}),
    ({"max_sequence": 10**11}, {"data": {"sequence_length": 10**11}}),
    ({}, {"train": {"global_batch_size": 10**12}}),
    ({}, {"train": {"global_batch_size": 10**9, "micro_batch_size": 1}}),
    ({}, {"train": {"global_batch_size": 10**7, "micro_batch_size": 1}, "strategy": {"pp": 2}}),
    ({}, {"train": {"global_batch_size": 10**9}, "strategy": {"dp": 10**9}}),
    ({}, {"train": {"global_batch_size": 10**6}, "strategy": {"slices": {"batch": 10**6}}}),
], ids=str)  # fmt: skip
def test_absurd_sizes_are_refused_at_once(model: dict[str, Any], sections: dict[str, Any]) -> None:
    start = time.process_time()
    with pytest.raises(PlaitError):
        check_all(job(SMALL | model, **sections), Room(shared=24 * GIB))
    assert time.process_time() - start < LIMIT


@pytest.mark.parametrize(("model", "sections", "says"), [
    ({}, {"strategy": {"pp": 10**9}}, "2 layers leave one of 1000000000 stages"),
    ({"num_layers": 10**9}, {"strategy": {"pp": 10**8}}, "stages are more than"),
    ({"num_layers": 10**9}, {"strategy": {"virtual_stages": 10**8}}, "stages are more than"),
    ({"num_heads": 10**6, "hidden": 10**6}, {"strategy": {"tp": 3}}, "does not divide num_heads"),
    ({"family": "utransformer", "levels": 10**9, "num_layers": 2 * 10**9 + 1}, {}, "cannot be halved"),
], ids=str)  # fmt: skip
def test_absurd_jobs_are_not_even_read(model: dict[str, Any], sections: dict[str, Any], says: str) -> None:
    start = time.process_time()
    with pytest.raises(JobError, match=says):
        job(SMALL | model, **sections)
    assert time.process_time() - start < LIMIT


def test_where_memory_is_not_known_lengths_are_limited() -> None:
    assert "1000" in str(refused(job(SMALL | {"num_layers": 10**8}), None))
    many = {"global_batch_size": 10**7, "micro_batch_size": 1}
    assert "micro-batches" in str(refused(job(SMALL, train=many, strategy={"pp": 2}), None))


MANY = {"train": {"global_batch_size": 202, "micro_batch_size": 0}}
WIDE = {"train": {"global_batch_size": 8}, "data": {"sequence_length": 128}}


@pytest.mark.parametrize(("model", "sections", "there", "says"), [
    ({"num_layers": 1_000}, {}, None, ""),
    ({"num_layers": 1_001}, {}, None, "1001 layers are more than 1000"),
    ({"num_layers": 1_001}, {}, Room(shared=1 << 62), "1001 layers are more than 1000"),
    ({"num_layers": 1_001}, {}, Room(shared=1 << 20), r"need at least .* there are 1 MiB \(this machine\)\. Use a "
     r"smaller model\."),
    ({"num_layers": 1_001}, {"strategy": {"tp": 2}}, Room(each=1 << 20, what="each of 2 GPUs"),
     r"there are 2 MiB \(each of 2 GPUs\)\. Use a smaller model or more ranks\."),
    ({"num_layers": 1_000}, {**MANY, "strategy": {"tp": 2, "slices": {"batch": 100, "columns": 2}}}, None, ""),
    ({"num_layers": 1_000}, {**MANY, "strategy": {"tp": 2, "slices": {"batch": 101, "columns": 2}}}, None,
     "101 x 2 slices are more"),
    ({}, {"train": {"global_batch_size": 500_000, "micro_batch_size": 1}, "strategy": {"pp": 2}}, None, ""),
    ({}, {"train": {"global_batch_size": 500_001, "micro_batch_size": 1}, "strategy": {"pp": 2}}, None,
     "500001 micro-batches on 2 stages"),
    ({"num_layers": 4}, {"train": {"global_batch_size": 250_002, "micro_batch_size": 1},
      "strategy": {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"}}, None, "250002 micro-batches on 4 stages"),
    ({}, {**WIDE, "strategy": {"tp": 2}}, Room(shared=2 * 8 * 128 * 16), ""),
    ({}, {**WIDE, "strategy": {"tp": 2}}, Room(shared=2 * 8 * 128 * 16 - 1),
     r"the tokens of a step of 8 sequences of 128 take 16 KiB on each of 2 ranks, and there are 32 KiB"),
    ({}, {**WIDE, "strategy": {"tp": 2}}, Room(each=1), ""),
], ids=str)  # fmt: skip
def test_sizes_have_bounds_that_are_said(
    model: dict[str, Any], sections: dict[str, Any], there: Room | None, says: str
) -> None:
    asked = job(SMALL | {"dropout": 0.0} | model, **sections)
    if not says:
        check_size(asked, 257, there)
        return
    with pytest.raises(PlaitError, match=says):
        check_size(asked, 257, there)


@pytest.mark.parametrize(("precision", "each"), [("fp32", 16), ("bf16-mixed", 18), ("fp64", 32)])
def test_the_least_that_a_step_takes_is_states_and_one_stream(precision: str, each: int) -> None:
    """Of every parameter: what computes, its gradient and two moments, and a wider copy where there is one;
    of every layer, the stream of a micro-batch."""
    asked = job(SMALL, train={"precision": precision, "global_batch_size": 8, "micro_batch_size": 2})
    model, itemsize = asked.model_spec(257), {"fp32": 4, "bf16-mixed": 2, "fp64": 8}[precision]
    stream = 2 * asked.data.sequence_length * 64 * itemsize * 2
    assert least_bytes(asked, 257) == model.num_parameters * each + stream


def test_kinds_are_listed_from_the_largest_without_those_that_take_nothing() -> None:
    told = by_kind({"parameters": 5, "gradients": 9 << 10, "optimizer": 0, "buffers": 7, "activations": 6, "total": 1})
    assert told == "gradients 9 KiB, buffers 7 B, activations 6 B, parameters 5 B"


def test_room_holds_the_fullest_rank_or_all_of_them() -> None:
    found = estimate(job_step(job(SMALL | {"num_layers": 3}, strategy={"pp": 2, "schedule": "1f1b"}), 257))
    most, every = found.most.memory.total, found.bytes
    assert most < every < 2 * most
    assert [Room(each=size).holds(found) for size in (most, most - 1)] == [True, False]
    assert [Room(shared=size).holds(found) for size in (every, every - 1)] == [True, False]
    assert (Room(each=5).total(3), Room(shared=5).total(3)) == (15, 5)


def test_a_hugging_face_config_of_a_billion_layers(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_layer": 10**9, "n_embd": 64, "n_head": 4, "vocab_size": 300, "n_positions": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refused(job({"huggingface": str(tmp_path)}), Room(shared=24 * GIB))
    assert "at least" in str(error)


def test_the_bound_is_below_the_estimate() -> None:
    for strategy in ({}, {"tp": 2}, {"pp": 2, "schedule": "1f1b"}, {"dp": 2, "shard": "fsdp"}):
        asked = job(SMALL, strategy=strategy | {"recompute": "full"})
        assert least_bytes(asked, 257) < estimate(job_step(asked, 257)).bytes


GPUS = Room(each=80 * GIB, what="each of 8 GPUs")


@pytest.mark.parametrize(("there", "sections", "says"), [
    (GPUS, {"strategy": {"dp": 8}}, "would fit with strategy.shard=zero1"),
    (GPUS, {"train": {"micro_batch_size": 0}, "strategy": {"dp": 4, "shard": "zero1"}},
     "would fit with strategy.shard=fsdp"),
    (GPUS, {"train": {"global_batch_size": 64, "micro_batch_size": 0}, "strategy": {"tp": 4, "recompute": "full"}},
     "train.micro_batch_size="),
    (GPUS, {}, "strategy.tp=2"),
    (Room(shared=16 * GIB), {}, "or more machines"),
], ids=str)  # fmt: skip
def test_it_says_what_would_fit(there: Room, sections: dict[str, Any], says: str) -> None:
    base = {"train": {"global_batch_size": 8}, "data": {"sequence_length": 2048}}
    asked = job({"preset": "gpt3-6.7b"}, **(base | sections))
    error = refused(asked, there)
    assert "optimizer" in str(error)
    assert says in str(error)
    if "would fit" in str(error):
        changes = dict(pair.split("=") for pair in str(error).split("would fit with ")[1].rstrip(".").split())
        again = asked.to_dict()
        for key, value in changes.items():
            section, name = key.split(".")
            again[section][name] = int(value) if value.isdigit() else value
        assert there.holds(estimate(job_step(Job.from_dict(again), 257), gpu=bool(there.each)))


def test_what_fits_is_let_through() -> None:
    asked = job(SMALL)
    check_all(asked, Room(shared=GIB))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A machine without GPUs, of 24 GiB, with the control groups' files given."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def made(own: str = "", **files: str) -> Path:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {24 << 20} kB\n")
        (tmp_path / "proc/self/cgroup").write_text(own)
        for name, text in files.items():
            file = (
                tmp_path / "sys/fs/cgroup" / name.replace("__", "/").replace("_max", ".max").replace("_now", ".current")
            )
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return made


def test_memory_is_what_the_machine_has(machine: Callable[..., Path]) -> None:
    assert room("auto", 2, machine()) == Room(shared=24 * GIB)
    assert room("cuda", 2, Path("/nowhere")) is None
    assert room("cpu", 2, Path("/nowhere")) is None


def test_a_control_groups_limit_counts_also_of_those_around_it(machine: Callable[..., Path]) -> None:
    files = {
        "a__memory_max": f"{4 * GIB}",
        "a__memory_now": f"{GIB}",
        "a__b__memory_max": "max",
        "a__b__memory_now": "7",
    }
    assert room("cpu", 2, machine("0::/a/b\n", **files)) == Room(shared=3 * GIB)


@pytest.mark.parametrize(
    ("device", "ranks", "found"),
    [
        ("auto", 2, Room(each=5, what="each of 2 GPUs")),
        ("auto", 3, Room(shared=24 * GIB)),
        ("cuda", 3, Room(each=5, what="each of 2 GPUs")),
        ("shared", 4, Room(each=2, what="each rank's part of 2 GPUs")),
        ("shared", 5, Room(each=1, what="each rank's part of 2 GPUs")),
        ("cpu", 2, Room(shared=24 * GIB)),
    ],
)
def test_gpus_count_where_each_rank_has_one_or_they_are_asked_for(
    machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, device: str, ranks: int, found: Room
) -> None:
    monkeypatch.setattr(fits, "gpus", lambda: [7, 5])
    assert room(device, ranks, machine()) == found


@pytest.mark.parametrize("device", ["cuda", "shared"])
def test_a_device_that_nobody_counts_is_not_known(
    machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setattr(fits, "gpus", list)
    assert room(device, 1, machine()) is None


@pytest.mark.parametrize(
    ("device", "ranks", "gpus", "there", "says"),
    [
        ("auto", 2, 0, "", ""),
        ("cpu", 2, 0, "", ""),
        ("cuda", 1, 0, "", "cuda, and this machine has no GPU"),
        ("shared", 1, 0, "", "shared, and this machine has no GPU"),
        ("shared", 1, 0, "nvidiactl", "this machine has no GPU"),
        ("cuda", 4, 0, "nvidia0", ""),
        ("cuda", 4, 0, "kfd", ""),
        ("shared", 4, 0, "dxg", ""),
        ("cuda", 2, 2, "", ""),
        ("cuda", 2, 1, "", "cuda, and this machine has 1 GPU for 2 ranks"),
        ("cuda", 3, 2, "", "cuda, and this machine has 2 GPUs for 3 ranks"),
        ("shared", 3, 2, "", ""),
    ],
)
def test_gpus_that_are_not_there_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, ranks: int, gpus: int, there: str, says: str
) -> None:
    monkeypatch.setattr(fits, "gpus", lambda: [80 * GIB] * gpus)
    if there:
        (tmp_path / there).touch()
    if not says:
        check_device(device, ranks, tmp_path)
        return
    with pytest.raises(JobError, match=says) as caught:
        check_device(device, ranks, tmp_path)
    assert caught.value.key == "run.device"


V1 = "memory/jobs/one/memory."


@pytest.mark.parametrize(
    ("own", "files", "gib"),
    [
        ("4:cpu,memory:/jobs/one\n", {f"{V1}limit_in_bytes": 5 * GIB, f"{V1}usage_in_bytes": GIB}, 4),
        ("4:cpu:/jobs/one\n", {f"{V1}limit_in_bytes": 5 * GIB, f"{V1}usage_in_bytes": GIB}, 24),
        ("0::/a\n", {"a/memory.max": 2 * GIB, "a/memory.current": 3 * GIB}, 0),
        ("0::/a\n", {"memory.max": 2 * GIB, "memory.current": GIB}, 1),
        ("0::/a\n", {"a/memory.max": 2 * GIB}, 24),
        ("0::/a\n", {"a/memory.max": 40 * GIB, "a/memory.current": GIB}, 24),
        ("0::/a\n", {"a/memory.max": 4 * GIB, "a/memory.current": 3 * GIB, "a/memory.stat":
                     f"anon 7\ninactive_file {GIB}\ntotal_inactive_file 9\nodd\n"}, 2),
        ("4:memory:/jobs/one\n", {f"{V1}limit_in_bytes": 5 * GIB, f"{V1}usage_in_bytes": 4 * GIB,
                                  f"{V1}stat": f"total_inactive_file {2 * GIB}\n"}, 3),
    ],
)  # fmt: skip
def test_limits_of_control_groups_of_both_versions(
    machine: Callable[..., Path], own: str, files: dict[str, Any], gib: int
) -> None:
    """What they leave, with the files that their kernel may drop."""
    root = machine(own)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert room("cpu", 2, root) == Room(shared=gib * GIB)


@pytest.mark.system
def test_gpus_are_asked(machine: Callable[..., Path]) -> None:
    root = machine()
    tool = root / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho 81920\necho 81559\n")
    tool.chmod(0o755)
    assert room("auto", 2, root) == Room(each=81559 << 20, what="each of 2 GPUs")
    assert room("auto", 3, root) == Room(shared=24 * GIB)  # not one for each
    assert room("shared", 3, root) == Room(each=(81559 << 20) // 2, what="each rank's part of 2 GPUs")
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert room("auto", 2, root) == Room(shared=24 * GIB)
