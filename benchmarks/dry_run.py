"""How long ``plait train --dry-run`` takes, Python's start included, for every preset that can be trained
and for Llama-3 405B on 16,384 ranks; prints JSON.

    python benchmarks/dry_run.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from keeping import timed

from plait.core.model.spec import ModelSpec

JOB = """
[model]
preset = "{preset}"
[data]
sequence_length = {sequence}
[train]
global_batch_size = 2048
micro_batch_size = 1
[strategy]
{strategy}
"""
SMALL = {"one place": "tp = 4", "pipeline": 'pp = 5\ndp = 8\nshard = "fsdp"\nschedule = "zb-h1"'}
LARGE = {
    f"16384 ranks, cp {cp}": f'tp = 8\npp = 16\ndp = {128 // cp}\ncp = {cp}\ncp_comm_type = "ring"\nshard = "fsdp"'
    for cp in (1, 16)
}


def measured(preset: str, strategy: str, sequence: int) -> dict[str, float]:
    """Seconds of a dry run, and of the processor for it."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.toml")
        job.write_text(JOB.format(preset=preset, strategy=strategy, sequence=sequence))
        ran = timed([sys.executable, "-m", "plait.cli.main", "train", str(job), "--dry-run", "--json"])
    return {"seconds": round(ran.seconds, 2), "processor_seconds": round(ran.processor_seconds, 2)}


def main() -> None:
    """All of them."""
    models = {path.stem: ModelSpec.preset(path.stem, path.parent) for path in Path("specs/models").glob("*.toml")}
    presets = sorted(name for name, model in models.items() if not model.experts)  # which can be planned only
    rows = [(preset, name, strategy, 1024) for preset in presets for name, strategy in SMALL.items()]
    rows += [("llama3-405b", name, strategy, 8192) for name, strategy in LARGE.items()]
    for preset, name, strategy, sequence in rows:
        print(json.dumps({"preset": preset, "strategy": name} | measured(preset, strategy, sequence)), flush=True)


if __name__ == "__main__":
    main()
