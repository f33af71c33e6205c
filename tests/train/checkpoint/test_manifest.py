"""The text of a checkpoint's manifest: read back as it was, or refused in words."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from plait.core.reshard.layouts import Box
from plait.train.checkpoint.folder import Manifest, OlderFormatError, Stored, file_of, name_in_file

ONE, OTHER = file_of(0), file_of(123456)
MANIFEST = Manifest(
    step=7,
    serial=3,
    state={"sequences": 12, "skipped": 1},
    files={ONE: (100, 17), OTHER: (0, 0)},
    tensors={
        "master/norm.weight": Stored("F32", (8,), ((ONE, Box((0,), (3,))), (OTHER, Box((3,), (8,))))),
        "master/scale": Stored("F64", (), ((OTHER, Box((), ())),)),
        "master/empty": Stored("F32", (0, 4), ()),
    },
)


def changed(change: Callable[[dict[str, Any]], Any]) -> str:
    """Its text otherwise, with a checksum that fits."""
    body = json.loads(MANIFEST.to_text())
    del body["crc32"]
    change(body)
    return json.dumps({**body, "crc32": zlib.crc32(json.dumps(body, sort_keys=True).encode())})


def test_a_manifest_is_read_back_as_it_was() -> None:
    text = MANIFEST.to_text()
    assert text.endswith("}\n") and Manifest.from_text(text) == MANIFEST
    assert Manifest.from_text(changed(lambda body: None)) == MANIFEST
    assert json.loads(text)["format"] == 2, "checkpoints of other versions are told from these"


def test_files_and_their_parts_have_names_by_rank_and_range() -> None:
    assert (ONE, OTHER) == ("rank-00000.safetensors", "rank-123456.safetensors")
    assert name_in_file("master/scale", Box((), ())) == "master/scale[]"
    assert name_in_file("a", Box((0, 2), (1, 4))) == "a[0:1, 2:4]"


def part(body: dict[str, Any]) -> list[Any]:
    return body["tensors"]["master/norm.weight"][2][1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda body: body["state"].update(skipped=-1), "its state has -1 updates that were skipped"),
        (lambda body: body["state"].update(skipped=1.5), "its state has 1.5 updates that were skipped"),
        (lambda body: body["state"].update(skipped=None), "its state has None updates that were skipped"),
        (lambda body: body.update(state=[]), "its state is no table"),
        (lambda body: body["files"].update({"rank-0001.safetensors": [1, 1]}), "'rank-0001.safetensors' is no file"),
        (lambda body: body["files"].update({"xrank-00001.safetensors": [1, 1]}), "'xrank-00001.safetensors' is no"),
        (lambda body: body["files"].update({"rank-00001.safetensors.exe": [1, 1]}), "is no file of a checkpoint"),
        (lambda body: body["files"].update({ONE: [1, 1, 1]}), "too many values"),
        (
            lambda body: part(body).__setitem__(0, file_of(5)),
            r"a part of 'master/norm.weight' cannot lie at \[3:8\] in",
        ),
        (lambda body: part(body).__setitem__(1, [3, 0]), r"goes from \(3, 0\) to \(8,\), and its shape is \(8,\)"),
        (lambda body: part(body).__setitem__(2, [8, 1]), r"goes from \(3,\) to \(8, 1\)"),
        (lambda body: part(body).__setitem__(1, []), r"goes from \(\) to \(8,\)"),
        (lambda body: part(body).__setitem__(2, [9]), r"cannot lie at \[3:9\]"),
        (lambda body: part(body).__setitem__(1, [-1]), r"cannot lie at \[-1:8\]"),
        (lambda body: body.pop("serial"), "not the content of a manifest: KeyError"),
        (lambda body: body.pop("step"), "not the content of a manifest: KeyError"),
        (lambda body: body.update(tensors=None), "not the content of a manifest: AttributeError"),
        (lambda body: body.update(step=None), "not the content of a manifest: TypeError"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: Callable[[dict[str, Any]], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Manifest.from_text(changed(change))


def test_a_state_need_not_count_what_was_skipped() -> None:
    assert Manifest.from_text(changed(lambda body: body.update(state={}))).state == {}
    assert Manifest.from_text(changed(lambda body: body["state"].update(skipped=0))).state["skipped"] == 0


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (1, "it has format 1,.*an older Plait, holds a pickle.*train.init_from"),
        (3, "it has format 3, and this version reads format 2"),
        ("2", "it has format '2'"),
        (None, "it has format None"),
    ],
)
def test_other_formats_are_told_from_damage(number: object, says: str) -> None:
    with pytest.raises(OlderFormatError, match=says):
        Manifest.from_text(changed(lambda body: body.update(format=number)))


@pytest.mark.parametrize("text", [MANIFEST.to_text().replace('"step": 7', '"step": 8'),
                                  json.dumps({"format": 2}), json.dumps({"format": 1, "crc32": 0})])  # fmt: skip
def test_a_text_whose_checksum_differs_is_damaged_whatever_it_says(text: str) -> None:
    with pytest.raises(ValueError, match="its checksum does not match") as caught:
        Manifest.from_text(text)
    assert not isinstance(caught.value, OlderFormatError)
