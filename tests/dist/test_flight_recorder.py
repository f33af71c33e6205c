"""What PyTorch's flight recorder writes in this version of it, as it writes it: pickles of plain
data."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.core.base.codec.pickles import read_plain
from plait.core.base.ignored_input import IgnoredInput
from plait.diagnose.measured.importing import import_traces
from plait.formats.flight_recorder import Dump
from tests.support.ranks import Ranks


def dumped(rank: int) -> tuple[bytes, bytes]:
    """A rank's dump after some collectives: as it is written, and as JSON."""
    dist.all_reduce(torch.ones(4, 3))
    dist.broadcast(torch.ones(5), 0)
    dist.barrier()
    own = import_module("torch._C._distributed_c10d")
    for _ in range(100):  # gloo's threads set states after the call that waited has returned
        before, pickled, after = own._dump_fr_trace_json(), own._dump_fr_trace(), own._dump_fr_trace_json()
        if before == after:
            return pickled, after
    raise AssertionError("the recorder's entries change without an end")


def entries(document: dict[str, Any]) -> Dump:
    found = Dump(IgnoredInput())
    for one in document["entries"]:
        found.add(one)
    found.finish(document)
    found.entries = [replace(one, stack=()) for one in found.entries]  # JSON has none
    return found


def test_what_it_writes_is_read(four: Ranks, tmp_path: Path) -> None:
    pickles, texts = zip(*four.run(dumped), strict=True)
    files = [tmp_path / f"nccl_trace_rank_{rank}" for rank in range(4)]
    for file, pickled, text in zip(files, pickles, texts, strict=True):
        file.write_bytes(pickled)
        over, taken = IgnoredInput(), list[Any]()
        document = {**read_plain(file, {"entries": taken.append}, over), "entries": taken}
        assert not over
        assert json.dumps(document) == json.dumps(pickle.loads(pickled))
        assert entries(document) == entries(json.loads(text))
    found = import_traces(files, tmp_path / "run")
    assert found.ranks == 4
    assert found.verdict is not None
    assert found.verdict.cause == "none"
