"""What tensors take in a step, measured in a process that has much else in its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from plait.train.machine.memory import MemoryMeter, held_by_tensors

MIB = 1 << 20

STEPS = """
import json, torch
from plait.train.machine.memory import MemoryMeter, held_by_tensors
MIB = 1 << 20
kept, meter, found = torch.ones(10 * MIB), MemoryMeter(), []
for size in (40, 10):  # what was freed before counts neither way
    meter.begin(kept)
    for _ in range(2):  # one after the other
        torch.ones(size * MIB).add_(1)
    meter.end()
    found.append((size, held_by_tensors(kept), *meter.peaks()))
print(json.dumps(found))
"""


class Slotted:
    __slots__ = ("kept", "missing")

    def __init__(self, kept: object) -> None:
        self.kept = kept


def test_tensors_are_counted_once_however_deep_they_lie_and_however_many_views_they_have() -> None:
    whole, captured, bound = torch.ones(3 * MIB), torch.ones(MIB), torch.nn.Linear(1024, 1024)
    weight = bound.weight
    weight.grad = torch.ones(1024, 1024)
    roots = {
        "views": [*whole.split(MIB), whole.view(3, MIB).T, torch.nn.Parameter(whole)],
        "slots": Slotted({"deep": (whole[0], None)}),
        "functions": [lambda: captured, bound.forward],
    }
    roots["itself"] = roots
    assert held_by_tensors(roots) == 4 * (3 * MIB + MIB + 1024 * 1024 + 1024 + 1024 * 1024)
    assert held_by_tensors(Slotted(None), 3, "text", torch.ones(4, device="meta")) == 0


def test_what_a_compiler_traces_with_takes_no_memory() -> None:
    """Such tensors outlive a compilation, and say that they are on a CPU."""
    with FakeTensorMode():
        fake = torch.ones(3 * MIB)
    with FunctionalTensorMode():
        functional = FunctionalTensor.to_functional(torch.ones(3 * MIB))
    assert (fake.device.type, functional.device.type) == ("cpu", "cpu")
    assert held_by_tensors([fake, functional, torch.ones(MIB)]) == 4 * MIB


@pytest.mark.system
def test_a_step_takes_what_there_was_and_what_it_needs_at_most() -> None:
    """In a process of its own: threads and leftovers of other tests would take memory in the step,
    too."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    ran = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=False, env=clean)
    assert ran.returncode == 0, ran.stderr
    for size, held, tensors, process in json.loads(ran.stdout):
        assert held == 40 * MIB
        assert -MIB < tensors - held - size * 4 * MIB < 32 * MIB, "the process may take more meanwhile"
        assert process >= (40 + 160) * MIB


def test_a_step_that_was_not_measured_is_unknown_and_not_nothing() -> None:
    assert MemoryMeter().peaks().tensors is None
    with mock.patch("plait.train.machine.memory.forget_peak", return_value=False):
        meter = MemoryMeter()
        meter.begin()
        meter.end()
    assert meter.peaks().tensors is None


def test_where_the_system_tells_nothing_nothing_is_known() -> None:
    with mock.patch("plait.train.machine.memory.process_memory", return_value=None):
        meter = MemoryMeter()
        meter.begin()
        meter.end()
        assert meter.peaks() == (None, None)
