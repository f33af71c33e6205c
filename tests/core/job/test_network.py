"""Which network ranks use: said once, and the same for ranks wherever they are started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from plait.api.places.kubernetes import KubernetesTarget
from plait.api.places.slurm import SlurmTarget
from plait.core.base.env import use_network
from plait.core.base.errors import JobError
from plait.core.job.settings import RunSection
from plait.core.job.spec import Job

JOB: dict[str, Any] = {
    "model": {"family": "gpt", "num_layers": 2, "hidden": 32, "num_heads": 2, "max_sequence": 128},
    "run": {"folder": "/data/runs", "name": "job", "network_interface": "ib0", "rdma_devices": ["mlx5_0:1", "mlx5_1"]},
    "kubernetes": {"image": "plait:1", "volumes": ["claim:/data"], "workload": "job", "host_network": True,
                   "env": ["NCCL_SOCKET_IFNAME=eth7"]},
    "slurm": {"nodes": 1, "gpus": 0},
}  # fmt: skip


def test_variables_are_set_where_nobody_has_set_them() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "eth9"}
    use_network(Job.from_dict(JOB).run.network_variables, environ)
    assert environ == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth9", "NCCL_IB_HCA": "mlx5_0:1,mlx5_1"}
    assert RunSection().network_variables == {}


def test_the_dry_run_shows_them() -> None:
    job = Job.from_dict(JOB)
    script = SlurmTarget("").preview(job, Path("/data/runs/job"))[1].splitlines()
    assert "export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-ib0}" in script
    assert "export NCCL_IB_HCA=${NCCL_IB_HCA:-mlx5_0:1,mlx5_1}" in script
    pod = next(iter(yaml.safe_load_all(KubernetesTarget("").preview(job, Path("/data/runs/job"))[1])))["spec"][
        "template"
    ]["spec"]
    env = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_IB_HCA"]) == ("ib0", "mlx5_0:1,mlx5_1")
    assert env["NCCL_SOCKET_IFNAME"] == "eth7"  # the user's own
    assert (pod["hostNetwork"], pod["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")


@pytest.mark.parametrize("text", ["ib0}; rm -rf /", "$(x)", "a b", "ib0\n", "`x`", "\N{CYRILLIC SMALL LETTER A}"])
def test_what_is_no_name_of_a_device_is_refused(text: str) -> None:
    for key, value in (("network_interface", text), ("rdma_devices", [text])):
        with pytest.raises(JobError, match=rf"^run\.{key}: .* is no name of a device"):
            RunSection.model_validate({key: value})
