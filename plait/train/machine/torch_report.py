"""Print a description of the installed PyTorch as one line of JSON. ``plait doctor`` runs it as a
process, since importing PyTorch takes long, and may fail or hang.

    python -m plait.train.machine.torch_report
"""

from __future__ import annotations

import json
import os
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from plait.train.machine.gpu import visible_devices


def report() -> dict[str, Any]:
    """Return versions, devices with their memory in bytes, and the reason why gloo does not start
    (empty if it does)."""
    devices, nccl, why = visible_devices()
    return {
        "torch": torch.__version__, "cuda": torch.version.cuda or "", "rocm": getattr(torch.version, "hip", None) or "",
        "nccl": nccl, "devices": devices, "why": why, "gloo": gloo_problem(), "threads": torch.get_num_threads(),
    }  # fmt: skip


def gloo_problem() -> str:
    """Return why a process group of one rank cannot be opened; empty if it can."""
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
