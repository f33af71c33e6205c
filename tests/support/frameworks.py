"""Other frameworks' packages in a folder of the tests' own, beside what the suite has installed. Of
their dependencies only those that are named are installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PACKAGES = {
    "megatron": ("megatron-core==0.16.1",),
    "torchtitan": (
        "torchtitan==0.3.0", "spmd_types==0.2.3", "torchdata", "torch_checkpointing", "tyro", "typeguard",
        "docstring-parser", "einops", "triton", "tensorboard", "tensorboard-data-server", "markdown", "grpcio",
        "datasets<4.8", "dill", "multiprocess", "xxhash", "httpx", "httpcore",
    ),
    "deepspeed": ("deepspeed==0.19.8", "hjson", "py-cpuinfo", "msgpack", "psutil", "einops"),
}  # fmt: skip
"""Of a framework: what importing its configurations needs."""


def installed(framework: str, folder: Path) -> Path:
    """The folder with a framework's packages. Skips the test where the registry cannot be
    reached."""
    where = folder / framework
    argv = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check"]
    argv += ["--no-build-isolation", "--target"]  # DeepSpeed's archive asks for the version of torch
    done = subprocess.run([*argv, str(where), *PACKAGES[framework]], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{framework} could not be installed: {done.stderr.strip()[-200:]}")
    return where


def answer(site: Path, program: str, asked: Any) -> Any:
    """What a program answers as JSON on its last line. asked: what it reads as JSON from its
    input."""
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(asked), capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(site), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
