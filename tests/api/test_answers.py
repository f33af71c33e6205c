"""Answers of ``plait.api`` show the same figures as text, as JSON and as HTML; the page on Python
holds."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from plait.api.calibrating import Calibration, FittedConstantRow
from plait.api.health import HostCheck
from plait.api.planning import known_clusters
from plait.api.resharding import explain_reshard, fabric_of
from plait.api.schedules import Shape, show_schedule
from plait.api.topologies import MinipodSizes, TopologyAnswer, generate_topology
from plait.core.base.text import Shown, Table
from plait.core.reshard.layouts import Reshard, TensorLayout
from plait.launch.health.links import Finding, in_rate

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python.md").read_text()


def reshard() -> Shown:
    source, destination = TensorLayout.parse("(2,4) R S0 R"), TensorLayout.parse("(2,4)@8 S0 R R")
    return explain_reshard(Reshard(source, destination, (64, 64, 8), 4), fabric_of(source, destination, rate=1.25e9))


ANSWERS: dict[str, Callable[[], Shown]] = {
    "schedule": lambda: show_schedule("zb-h1", Shape(ranks=4, micro_batches=6)),
    "reshard": reshard,
    "topology": lambda: TopologyAnswer(generate_topology(MinipodSizes(minipods=2, nodes=9, leaf_nodes=4))),
    "clusters": known_clusters,
}


@pytest.mark.parametrize("name", ANSWERS)
def test_every_cell_of_an_answer_is_in_its_text_and_its_html(name: str) -> None:
    found = ANSWERS[name]()
    text, html = found.text(), found._repr_html_()
    tables = [part for part in found.parts() if isinstance(part, Table) and part.header]
    assert tables
    for table in tables:
        for row in table.cells():
            assert any(all(cell in line for cell in row) for line in text.splitlines())
            assert all(f"<td>{cell}" in html for cell in row if not set(cell) & set("<>&"))
    assert json.loads(json.dumps(found.to_dict()))


def test_functions_that_the_page_names_are_there_and_documented() -> None:
    rows = re.findall(r"^\| (`plait\.api\.[^|]*) \| ([^|]*) \|", PAGE, re.MULTILINE)
    assert len(rows) >= 15
    for modules, names in rows:
        there = [import_module(module) for module in re.findall(r"`(plait\.api\.\w+)`", modules)]
        for name in re.findall(r"`(\w+)`", names):
            found = next(getattr(module, name) for module in there if hasattr(module, name))
            assert found.__doc__, name


def test_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "specs").symlink_to(ROOT / "specs")
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        names = {"Path": Path, "plait": import_module("plait")}
        exec(block, names)
        for found in (one for one in names.values() if isinstance(one, Shown)):
            assert found._repr_html_() and json.dumps(found.to_dict())
    assert (tmp_path / "quickstart.plan.json").is_file() and (tmp_path / "1f1b.svg").is_file()


HOSTS = {
    "hosts": {
        "a": {"loopback": 4e9, "disk": {"rate": 2e8, "free": 3 << 30}, "clock": (0.0012, 0.0005)},
        "b": {"loopback": None},
    },
    "links": [{"from": "a", "to": "b", "kind": "pair", "rate": 1e9}, {"from": "b", "to": "a", "kind": "pair"}],
    "all_at_once": {"a": 5e8},
}


def test_hosts_that_measured_nothing_have_dashes_and_what_is_bad_stands_last() -> None:
    bad = Finding(what="link", hosts=("b", "a"), why="the link from b to a passes nothing")
    found = HostCheck(HOSTS, [bad])
    lines = [line.split() for line in found.text().splitlines()]
    assert ["a", in_rate(4e9), in_rate(5e8)] == [lines[3][0], " ".join(lines[3][1:3]), " ".join(lines[3][3:5])]
    assert "+1.2 ms (within 0.5)" in found.text() and "3 GiB" in found.text()
    assert lines[4] == ["b", "-", "-", "-", "-", "-"]
    links = [line for line in lines if line[:1] in (["a"], ["b"]) and "pair" in line]
    assert [link[:3] for link in links] == [["b", "a", "pair"], ["a", "b", "pair"]]  # the slowest first
    assert found.text().endswith("BAD link: the link from b to a passes nothing")
    assert HostCheck(HOSTS, []).text().endswith("Nothing is wrong with what was tried.")
    assert found.to_dict()["bad"] == [{"what": "link", "hosts": ("b", "a"), "why": bad.why}]


def test_a_calibration_tells_how_far_off_each_prediction_was_and_is() -> None:
    run = SimpleNamespace(folder="runs/a", seconds=2.0)
    refitted = SimpleNamespace(before=np.array([3.0]), after=np.array([2.1]), moved={"nic.rate": (1e9, 2e9)})
    told: dict[str, Any] = {"prior": 1e9, "value": 2e9, "error": 0.2, "error_after": 0.1}
    constants = [
        FittedConstantRow(name="nic.rate", **told, sources=["runs/a", "b.log"], improved=True),
        FittedConstantRow(name="memory", **told, sources=["runs/a"], improved=False),
        FittedConstantRow(name="step", **told, sources=[], improved=False),
    ]
    found = Calibration(cast("Any", [run]), cast("Any", refitted), Path("c.toml"), constants, conflicts=["a, b"])
    lines = [line.split() for line in found.text().splitlines()]
    assert ["runs/a", "2", "3", "+50.0%", "2.1", "+5.0%"] in lines
    values = ["1e+09", "2e+09", "20%", "10%"]
    assert ["nic.rate", *values, *["learnt", "from", "runs/a", "and", "1", "more"]] in lines
    shifted = ["shifted", "with", "other", "constants", "by", "runs/a,", "error", "not", "reduced"]
    assert ["memory", *values, *shifted] in lines
    assert ["step", *values, "stays", "prior"] in lines
    assert ["CONFLICT:", "a,", "b"] in lines
    json = found.to_dict()
    assert json["runs"] == [{"run": "runs/a", "measured": 2.0, "before": 3.0, "after": 2.1}]
    assert json["constants"][0] == {
        "name": "nic.rate", "prior": 1e9, "now": 2e9, "prior_error": 0.2, "error": 0.1, "learnt": True,
        "sources": ["runs/a", "b.log"],
    }  # fmt: skip
    assert (json["cluster"], json["moved"]) == ("c.toml", {"nic.rate": (1e9, 2e9)})
