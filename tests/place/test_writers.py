"""Topologies written for others: their own reader finds the same wires."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.core.topology.switches import Hardware
from plait.place.outline import WRITERS, written
from plait.place.topologies import MinipodSizes, generate, read_topology


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("uneven", [0.0, 0.5])
def test_what_is_written_is_read(tmp_path: Path, form: str, uneven: float) -> None:
    tree = generate(
        MinipodSizes(minipods=4, nodes=100, uneven=uneven),
        busy=0.4,
        down=0.1,
        seed=3,
        hardware=Hardware(gpus=8, device="H100"),
    )
    file = tmp_path / "topology"
    file.write_text(written(tree, form))
    found, remarks = read_topology(str(file))
    assert not remarks.notes and not remarks.over
    assert found.fabric_key == tree.fabric_key
    assert [switch.name for switch in found.switches] == [switch.name for switch in tree.switches]
    if form in ("toml", "json"):
        assert found == tree
    assert written(found, form) == written(tree, form)


def test_an_unknown_form() -> None:
    with pytest.raises(JobError, match=r"--as: no form 'tomll' \(did you mean 'toml'\?\)"):
        written(generate(MinipodSizes(minipods=1, nodes=1)), "tomll")
