"""What PyTorch is here, as one line of JSON: started by itself (``plait doctor``), since importing it takes
long, and may fail or hang.

    python -m plait.train.machine.torch_report
"""

from __future__ import annotations

import json
import os
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from plait.train.machine.gpu import seen_devices


def report() -> dict[str, Any]:
    """Versions, devices with their bytes, and why gloo does not start; that is empty where it does."""
    devices, nccl, why = seen_devices()
    return {
        "torch": torch.__version__, "cuda": torch.version.cuda or "", "rocm": getattr(torch.version, "hip", None) or "",
        "nccl": nccl, "devices": devices, "why": why, "gloo": gloo_problem(), "threads": torch.get_num_threads(),
    }  # fmt: skip


def gloo_problem() -> str:
    """Why a group of one rank cannot be opened; empty if it can."""
    if not dist.is_available() or not dist.is_gloo_available():
        return "PyTorch is built without it"
    with TemporaryDirectory(prefix="plait-doctor-") as folder:
        try:
            dist.init_process_group("gloo", init_method=f"file://{os.path.join(folder, 'meet')}", rank=0, world_size=1)
            dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()
        except (RuntimeError, ValueError) as error:
            return str(error).strip().splitlines()[0]
    return ""


if __name__ == "__main__":
    print(json.dumps(report()), flush=True)
