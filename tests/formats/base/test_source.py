"""What readers are given: files, standard input, pipes. No more is read of them than any cluster
needs."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait.core.base.errors import JobError
from plait.formats.base import source
from plait.formats.base.source import ReadOptions, Source, from_chains
from plait.place.topologies import FORMATS, read_topology

TREE = "SwitchName=a Nodes=n[1-2]\n"


def test_standard_input_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"\xef\xbb\xbf" + TREE.encode())))
    found = Source.read("-")
    assert (found.where, found.text) == ("standard input", TREE)


@pytest.mark.parametrize(("more", "refused"), [(0, False), (1, True)])
def test_standard_input_ends_at_a_limit(monkeypatch: pytest.MonkeyPatch, more: int, refused: bool) -> None:
    monkeypatch.setattr(source, "LARGEST", 1 << 20)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"\n" * ((1 << 20) + more))))
    if refused:
        with pytest.raises(JobError, match="standard input: more than 1 MiB"):
            Source.read("-")
    else:
        monkeypatch.setattr(source, "MOST_LINES", 1 << 21)
        assert len(Source.read("-").text) == 1 << 20


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_packed_files_are_unpacked(tmp_path: Path, pack: type[bytes]) -> None:
    (tmp_path / "t").write_bytes(pack(TREE.encode()))
    assert Source.read(str(tmp_path / "t")).text == TREE


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xffx", "byte 0 is not UTF-8, so this is no text"),
        (gzip.compress(b"x" * 99, mtime=0)[:-9], "cannot be unpacked"),
        (None, "cannot be read: No such file"),
    ],
)  # fmt: skip
def test_files_that_are_none(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "t").write_bytes(content)
    with pytest.raises(JobError, match=says) as caught:
        Source.read(str(tmp_path / "t"))
    assert caught.value.file == str(tmp_path / "t")


@pytest.mark.parametrize(
    ("text", "limit", "most", "says"),
    [
        ("abc", "LARGEST_TEXT", 3, ""), ("abcd", "LARGEST_TEXT", 3, "MiB of text"), ("{bcd", "LARGEST_TEXT", 3, ""),
        ("a\nb\r", "MOST_LINES", 2, ""), ("a\nb\n\u2028", "MOST_LINES", 2, "more than 2 lines"),
        ("abc\nd", "LONGEST_LINE", 3, ""), ("a\nbcde\nf", "LONGEST_LINE", 3, "a line of more than 3 characters"),
        ("[\nbcde\nf", "LONGEST_LINE", 3, ""),
    ],
)  # fmt: skip
def test_texts_have_limits_that_json_has_not(
    monkeypatch: pytest.MonkeyPatch, text: str, limit: str, most: int, says: str
) -> None:
    monkeypatch.setattr(source, limit, most)
    if says:
        with pytest.raises(JobError, match=says):
            Source("file", text).checked()
    else:
        assert Source("file", text).checked().text == text


def test_json_that_breaks_off_is_told_by_its_line() -> None:
    with pytest.raises(JobError, match=r"line 2: not valid JSON: .*\(character 4\)"):
        _ = Source("f", '{\n"a"').json
    with pytest.raises(JobError, match="not valid JSON") as caught:
        _ = Source("f", "[" * 100_000).json
    assert caught.value.key is None


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.5)


@pytest.mark.parametrize("writer", [True, False])
def test_a_pipe_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: bool) -> None:
    clock = Clock()
    monkeypatch.setattr(source, "time", clock)
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR) if writer else None
    try:
        says = "whoever opened this pipe writes nothing, for 60 s" if writer else "nobody has opened .* for 5 s"
        with pytest.raises(JobError, match=says):
            Source.read(str(tmp_path / "pipe"))
        assert (60 if writer else 5) < clock.now < (62 if writer else 7)
    finally:
        if end is not None:
            os.close(end)


def test_what_is_written_into_a_pipe_is_read_until_it_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that is silent for 50 s twice is waited for."""
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR)
    clock = Clock()
    parts = [(50.0, TREE[:9].encode()), (100.0, TREE[9:].encode())]

    def sleep(seconds: float) -> None:
        nonlocal end
        clock.now += max(seconds, 0.5)
        while parts and clock.now >= parts[0][0]:
            os.write(end, parts.pop(0)[1])
            if not parts:
                last, end = end, -1
                os.close(last)

    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=sleep))
    assert Source.read(str(tmp_path / "pipe")).text == TREE


def test_of_several_sources_counts_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "t").write_text(TREE)
    states = "NodeName=n1 State=IDLE\nNodeName=n2 State=IDLE\nNodeName=x State=IDLE\n"
    (tmp_path / "s").write_text(states)
    _, remarks = read_topology(str(tmp_path / "t"), states=[str(tmp_path / "s")])
    assert [row["what"] for row in remarks.over.rows()] == ["nodes under no switch"]
    (tmp_path / "s").write_text(states + "NodeName=n1 State=IDLE\n")
    with pytest.raises(JobError, match="line 4: 'n1' is listed twice") as caught:
        read_topology(str(tmp_path / "t"), states=[str(tmp_path / "s")])
    assert caught.value.file == str(tmp_path / "s")


def test_what_connects_everything_gets_a_name_that_nothing_has() -> None:
    found = from_chains({"n1": ["fabric"], "n2": ["fabric_"]})
    assert found.switches[0].name == "fabric__" and len(found.switches) == 3
    alone = from_chains({"n1": ["a", "b"], "n2": ["a", "c"]})
    assert [one.name for one in alone.switches] == ["a", "b", "c"]
    assert [one.name for one in from_chains({"n1": ["a"]}, top=True).switches] == ["fabric", "a"]
    with pytest.raises(JobError, match="no node says which switches are above it"):
        from_chains({})


def test_levels_are_called_as_they_are_told() -> None:
    chains = {"n1": ["a", "b"], "n2": ["a", "c"]}
    assert from_chains(chains, levels=["zone", "rack"]).levels == ("zone", "rack")
    assert from_chains(chains, levels=["zone"]).levels != ("zone",), "one of two"
    two = {"n1": ["a", "b"], "n2": ["x", "c"]}
    assert from_chains(two, levels=["zone", "rack"]).levels == ("fabric", "zone", "rack")
    with pytest.raises(JobError, match="n2: its switch 'b' is under 'x', and under 'a' for others"):
        from_chains({"n1": ["a", "b"], "n2": ["x", "b"]})
    nested = from_chains({"n1": ["a", "1"], "n2": ["b", "1"]}, nested=True)
    assert {one.name for one in nested.switches} == {"fabric", "a", "b", "a/1", "b/1"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("version = 1\nversion = 2\n", "not valid TOML: "), ("a = " + "[" * 5000, "nested too deeply|not valid TOML"),
        ("a." * 60 + "b = 1\n", "a key of more than 50 parts"),
    ],
)  # fmt: skip
def test_plaits_own_form_in_broken_toml(text: str, says: str) -> None:
    with pytest.raises(JobError, match=says):
        next(form for form in FORMATS if form.name == "plait").read(Source("file", text), ReadOptions())
