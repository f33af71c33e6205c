"""Model FLOPs utilisation: one definition, and peaks of devices by the names of their drivers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from plait.core.base.env import specs_folder
from plait.core.cluster.hardware import Cluster
from plait.core.cluster.mfu import dense_peak, known_device, mfu
from plait.core.model.spec import ModelSpec

SHIPPED = {file.stem: Cluster.read(file).device for file in (specs_folder() / "clusters").glob("*.toml")}
LLAMA = ModelSpec(
    family="llama", num_layers=16, hidden=2048, num_heads=32, num_kv_heads=8, ffn_hidden=8192, vocab=128_256,
    max_sequence=2048, tied_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize(("rate", "share"), [(55_800, 0.44), (63_100, 0.50)])
def test_a_model_of_1_2_billion_parameters_on_an_h200(rate: float, share: float) -> None:
    peak = dense_peak(known_device("NVIDIA H200"), "bf16-mixed")
    assert peak == 989.4e12
    found = mfu(LLAMA, sequence=2048, batch=16, seconds=16 * 2048 / rate, devices=1, peak=peak)
    assert found == pytest.approx(share, abs=0.005)


def test_of_no_peak_and_of_one_that_is_not_the_devices_there_is_none() -> None:
    step = {"sequence": 2048, "batch": 16, "seconds": 1.0, "devices": 1}
    assert mfu(LLAMA, **step, peak=None) is None and mfu(LLAMA, **step, peak=1e9) is None


def test_a_name_of_a_driver_is_that_of_one_device() -> None:
    names = Counter(name for device in SHIPPED.values() for name in (device.name, *device.driver_names))
    assert names.most_common(1)[0][1] == 1
    for name in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "", "cpu"):
        assert known_device(name) is None


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_peaks_are_of_the_jobs_precision(name: str) -> None:
    device = SHIPPED[name]
    for precision, peak in device.peak.items():
        assert dense_peak(device, precision) == (None if device.kind == "cpu" else peak.value)
    known = None if device.kind == "cpu" or device.tf32 is None else device.tf32.value
    assert dense_peak(device, "fp32", tf32=True) == known
    assert dense_peak(device, "bf16-mixed", tf32=True) == dense_peak(device, "bf16-mixed")
    assert dense_peak(device, "nvfp4") == (device.peak["nvfp4"].value if "nvfp4" in device.peak else None)


def test_a_device_of_the_users_own_file_is_known(tmp_path: Path) -> None:
    text = (specs_folder() / "clusters" / "h100.toml").read_text()
    own = tmp_path / "own.toml"
    own.write_text(text.replace('"NVIDIA H100 80GB HBM3"', '"NVIDIA H100 PCIe"').replace("989.4e12", "756e12"))
    assert dense_peak(known_device("NVIDIA H100 PCIe", str(own)), "bf16-mixed") == 756e12
    assert known_device("NVIDIA H100 PCIe", str(tmp_path / "gone.toml")) is None
