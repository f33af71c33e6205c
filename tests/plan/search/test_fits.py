"""What cannot fit is refused before anything starts, in no time whatever the sizes, with what would
fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import JobError, PlaitError
from plait.core.job.spec import Job
from plait.core.step.memory.estimate import estimate
from plait.plan.make import job_step
from plait.plan.search import fits
from plait.plan.search.fits import AvailableMemory, by_kind, check_device, check_fits, check_size, least_bytes, room

GIB = 1 << 30
LIMIT = 20.0
SMALL = {"family": "gpt", "num_layers": 2, "hidden": 64, "num_heads": 4, "max_sequence": 128}


def job(model: dict[str, Any], **sections: dict[str, Any]) -> Job:
    return Job.from_dict({"model": model, **sections})


def refused(asked: Job, there: AvailableMemory | None) -> PlaitError:
    """The error of a job that must not start, and that it comes at once."""
    start = time.process_time()
    with pytest.raises(PlaitError) as caught:
        check_all(asked, there)
    assert time.process_time() - start < LIMIT
    return caught.value


def check_all(asked: Job, there: AvailableMemory | None) -> None:
    """As ``plait train`` does."""
    check_size(asked, 257, there)
    found = estimate(job_step(asked, 257), gpu=bool(there and there.each))
    if there:
        check_fits(asked, found, 257, there)


@pytest.mark.parametrize(("model", "sections"), [
    ({"num_layers": 10**12}, {}),
    ({"hidden": 10**9}, {}),
    ({"max_sequence": 10**11}, {"data": {"sequence_length": 10**11}}),
    ({}, {"train": {"global_batch_size": 10**12}}),
    ({}, {"train": {"global_batch_size": 10**7, "micro_batch_size": 1}, "strategy": {"pp": 2}}),
    ({}, {"train": {"global_batch_size": 10**9}, "strategy": {"dp": 10**9}}),
    ({}, {"train": {"global_batch_size": 10**6}, "strategy": {"slices": {"batch": 10**6}}}),
], ids=str)  # fmt: skip
def test_absurd_sizes_are_refused_at_once(model: dict[str, Any], sections: dict[str, Any]) -> None:
    start = time.process_time()
    with pytest.raises(PlaitError):
        check_all(job(SMALL | model, **sections), AvailableMemory(shared=24 * GIB))
    assert time.process_time() - start < LIMIT


@pytest.mark.parametrize(("model", "sections", "says"), [
    ({}, {"strategy": {"pp": 10**9}}, "2 layers cannot fill 1000000000 stages"),
    ({"num_layers": 10**9}, {"strategy": {"pp": 10**8}}, "stages are more than"),
    ({"num_heads": 10**6, "hidden": 10**6}, {"strategy": {"tp": 3}}, "does not divide num_heads"),
    ({"family": "utransformer", "levels": 10**9, "num_layers": 2 * 10**9 + 1}, {}, "cannot be halved"),
], ids=str)  # fmt: skip
def test_absurd_jobs_are_not_even_read(model: dict[str, Any], sections: dict[str, Any], says: str) -> None:
    start = time.process_time()
    with pytest.raises(JobError, match=says):
        job(SMALL | model, **sections)
    assert time.process_time() - start < LIMIT


MANY = {"train": {"global_batch_size": 202, "micro_batch_size": 0}}
WIDE = {"train": {"global_batch_size": 8}, "data": {"sequence_length": 128}}


@pytest.mark.parametrize(("model", "sections", "there", "says"), [
    ({"num_layers": 1_000}, {}, None, ""),
    ({"num_layers": 1_001}, {}, None, "1001 layers are more than 1000"),
    ({"num_layers": 1_001}, {}, AvailableMemory(shared=1 << 62), "1001 layers are more than 1000"),
    ({"num_layers": 1_001}, {}, AvailableMemory(shared=1 << 20),
     r"need at least .* only 1 MiB are available \(this machine\)\. Use a "
     r"smaller model\."),
    ({"num_layers": 1_001}, {"strategy": {"tp": 2}}, AvailableMemory(each=1 << 20, what="each of 2 GPUs"),
     r"only 2 MiB are available \(each of 2 GPUs\)\. Use a smaller model or more ranks\."),
    ({"num_layers": 1_000}, {**MANY, "strategy": {"tp": 2, "slices": {"batch": 100, "columns": 2}}}, None, ""),
    ({"num_layers": 1_000}, {**MANY, "strategy": {"tp": 2, "slices": {"batch": 101, "columns": 2}}}, None,
     "101 x 2 slices are more"),
    ({}, {"train": {"global_batch_size": 500_000, "micro_batch_size": 1}, "strategy": {"pp": 2}}, None, ""),
    ({}, {"train": {"global_batch_size": 500_001, "micro_batch_size": 1}, "strategy": {"pp": 2}}, None,
     "500001 micro-batches on 2 stages"),
    ({"num_layers": 4}, {"train": {"global_batch_size": 250_002, "micro_batch_size": 1},
      "strategy": {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"}}, None, "250002 micro-batches on 4 stages"),
    ({}, {**WIDE, "strategy": {"tp": 2}}, AvailableMemory(shared=2 * 8 * 128 * 16), ""),
    ({}, {**WIDE, "strategy": {"tp": 2}}, AvailableMemory(shared=2 * 8 * 128 * 16 - 1),
     r"the tokens of a step of 8 sequences of 128 take 16 KiB on each of 2 ranks, but only 32 KiB are available"),
    ({}, {**WIDE, "strategy": {"tp": 2}}, AvailableMemory(each=1), ""),
], ids=str)  # fmt: skip
def test_sizes_have_bounds_that_are_said(
    model: dict[str, Any], sections: dict[str, Any], there: AvailableMemory | None, says: str
) -> None:
    asked = job(SMALL | {"dropout": 0.0} | model, **sections)
    if not says:
        check_size(asked, 257, there)
        return
    with pytest.raises(PlaitError, match=says):
        check_size(asked, 257, there)


@pytest.mark.parametrize(("precision", "each"), [("fp32", 16), ("bf16-mixed", 18), ("fp64", 32)])
def test_the_least_that_a_step_takes_is_states_and_one_stream(precision: str, each: int) -> None:
    """Of every parameter: what computes, its gradient and two moments, and a wider copy where there
    is one; of every layer, the stream of a micro-batch."""
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
    assert [AvailableMemory(each=size).holds(found) for size in (most, most - 1)] == [True, False]
    assert [AvailableMemory(shared=size).holds(found) for size in (every, every - 1)] == [True, False]
    assert (AvailableMemory(each=5).total(3), AvailableMemory(shared=5).total(3)) == (15, 5)


def test_the_bound_is_below_the_estimate() -> None:
    for strategy in ({}, {"tp": 2}, {"pp": 2, "schedule": "1f1b"}, {"dp": 2, "shard": "fsdp"}):
        asked = job(SMALL, strategy=strategy | {"recompute": "full"})
        assert least_bytes(asked, 257) < estimate(job_step(asked, 257)).bytes


GPUS = AvailableMemory(each=80 * GIB, what="each of 8 GPUs")


@pytest.mark.parametrize(("there", "sections", "says"), [
    (GPUS, {"strategy": {"dp": 8}}, "would fit with strategy.shard=zero1"),
    (GPUS, {"train": {"micro_batch_size": 0}, "strategy": {"dp": 4, "shard": "zero1"}},
     "would fit with strategy.shard=fsdp"),
    (GPUS, {"train": {"global_batch_size": 64, "micro_batch_size": 0}, "strategy": {"tp": 4, "recompute": "full"}},
     "strategy.sequence_parallel=true"),
    (GPUS, {}, "strategy.tp=2"),
    (AvailableMemory(shared=16 * GIB), {}, "or more machines"),
], ids=str)  # fmt: skip
def test_it_says_what_would_fit(there: AvailableMemory, sections: dict[str, Any], says: str) -> None:
    base = {"train": {"global_batch_size": 8}, "data": {"sequence_length": 2048}}
    asked = job({"preset": "gpt3-6.7b"}, **(base | sections))
    error = refused(asked, there)
    assert "optimizer" in str(error)
    assert says in str(error)
    if "would fit" in str(error):
        again = asked.changed(str(error).split("would fit with ")[1].rstrip(".").split())
        assert there.holds(estimate(job_step(again, 257), gpu=bool(there.each)))


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
    assert room("auto", 2, machine()) == AvailableMemory(shared=24 * GIB)
    assert room("cuda", 2, Path("/nowhere")) is None
    assert room("cpu", 2, Path("/nowhere")) is None


def test_a_control_groups_limit_counts_also_of_those_around_it(machine: Callable[..., Path]) -> None:
    files = {
        "a__memory_max": f"{4 * GIB}",
        "a__memory_now": f"{GIB}",
        "a__b__memory_max": "max",
        "a__b__memory_now": "7",
    }
    assert room("cpu", 2, machine("0::/a/b\n", **files)) == AvailableMemory(shared=3 * GIB)


@pytest.mark.parametrize(
    ("device", "ranks", "found"),
    [
        ("auto", 2, AvailableMemory(each=5, what="each of 2 GPUs")),
        ("auto", 3, AvailableMemory(shared=24 * GIB)),
        ("cuda", 3, AvailableMemory(each=5, what="each of 2 GPUs")),
        ("shared", 4, AvailableMemory(each=2, what="each rank's part of 2 GPUs")),
        ("shared", 5, AvailableMemory(each=1, what="each rank's part of 2 GPUs")),
        ("cpu", 2, AvailableMemory(shared=24 * GIB)),
    ],
)
def test_gpus_count_where_each_rank_has_one_or_they_are_asked_for(
    machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, device: str, ranks: int, found: AvailableMemory
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
        ("cuda", 1, 0, "", "cuda, but this machine has no GPU"),
        ("shared", 1, 0, "", "shared, but this machine has no GPU"),
        ("shared", 1, 0, "nvidiactl", "this machine has no GPU"),
        ("cuda", 4, 0, "nvidia0", ""),
        ("cuda", 4, 0, "kfd", ""),
        ("shared", 4, 0, "dxg", ""),
        ("cuda", 2, 2, "", ""),
        ("cuda", 2, 1, "", "cuda, but this machine has 1 GPU for 2 ranks"),
        ("cuda", 3, 2, "", "cuda, but this machine has 2 GPUs for 3 ranks"),
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
    assert room("cpu", 2, root) == AvailableMemory(shared=gib * GIB)
