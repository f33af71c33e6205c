from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.core.base.errors import JobError, LaunchError
from plait.core.base.files import DEEPEST, check_path, check_target, contents, kind_of, reason_of, replacing, walk


def test_the_file_appears_whole_with_ordinary_rights(tmp_path: Path) -> None:
    target = tmp_path / "folder" / "file"
    with replacing(target) as partial:
        partial.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    mask = os.umask(0)
    os.umask(mask)
    assert target.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_failure_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(RuntimeError, match="boom"), replacing(target) as partial:  # noqa: PT012  (the block is the test)
        partial.write_text("half")
        raise RuntimeError("boom")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_what_could_not_be_written_is_known_before(tmp_path: Path) -> None:
    for target in (tmp_path, tmp_path / ("x" * 300), Path("/proc/none/file.json")):
        with pytest.raises(LaunchError, match=r"cannot be written: .*Choose another"):
            check_target(target, fix="Choose another")
    check_target(tmp_path / "new" / "file.json", fix="Choose another")
    assert list(tmp_path.iterdir()) == []


def test_no_file_takes_the_place_of_a_device_or_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"), replacing(pipe) as partial:
        partial.write_text("new")
    assert pipe.is_fifo()
    with pytest.raises(LaunchError, match="not a regular file"):
        check_target(pipe, fix="Choose another")
    assert list(tmp_path.iterdir()) == [pipe]


def test_only_ordinary_files_are_read(tmp_path: Path) -> None:
    """A device may never end, a pipe never begin."""
    os.mkfifo(tmp_path / "pipe")
    for path, problem in ((tmp_path / "pipe", "It is a pipe"), (Path("/dev/zero"), "It is a device")):
        with pytest.raises(OSError, match=f"{problem}, no regular file"):
            contents(path)
    with pytest.raises(IsADirectoryError):
        contents(tmp_path)
    with pytest.raises(FileNotFoundError):
        contents(tmp_path / "none")
    (tmp_path / "file").write_bytes(b"all of it")
    assert contents(tmp_path / "file") == b"all of it"
    assert [kind_of(tmp_path / name) for name in ("file", "pipe", "none", "file/none", "")] == [
        "file", "pipe", "", "", "folder",
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["", "a\0", "\ud800", "x" * 256, "\N{EURO SIGN}" * 86, "x/" * 2000])
def test_what_can_be_no_path(path: str) -> None:
    with pytest.raises(JobError, match=r"^data\.text: "):
        check_path(path, "data.text")
    check_path("x" * 255, "data.text")


def test_the_longest_name_of_a_path_is_told() -> None:
    check_path("/".join(["x" * 255] * 3), "k")
    for path, size in (("x" * 256, 256), ("é" * 128, 256), ("/".join(["y" * 256, "x" * 300, "y" * 260]), 300)):
        with pytest.raises(JobError, match=f"k: has a name of {size} bytes. Allowed: names of at most 255 bytes"):
            check_path(path, "k")
    longest = "/".join(["x" * 204] * 20)[:3840]
    check_path(longest, "k")
    with pytest.raises(JobError, match=r"k: has 3841 bytes\. Allowed: at most 3840"):
        check_path(longest + "y", "k")
    with pytest.raises(JobError, match="k: is empty"):
        check_path("", "k")


def test_what_went_wrong_in_the_systems_words_or_the_errors_own() -> None:
    assert reason_of(OSError(28, "No space left", "/a/b")) == "No space left"
    assert reason_of(OSError("odd")) == "odd"
    assert reason_of(ValueError("odd")) == "odd"


def test_folders_that_are_missing_are_made_unless_they_should_be_there(tmp_path: Path) -> None:
    for target in (tmp_path / "a" / "b" / "file", tmp_path / "a" / "b" / "other"):
        with replacing(target) as partial:
            partial.write_text("new")
        assert target.read_text() == "new"
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "gone" / "file", parents=False):
        pass
    assert not (tmp_path / "gone").exists()


def test_who_removes_the_new_file_hears_of_the_own_mistake(tmp_path: Path) -> None:
    def fails() -> None:
        with replacing(tmp_path / "file") as partial:
            partial.unlink()
            raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        fails()
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done, fsync, rename = list[str](), os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("replace"), rename(a, b)))
    with replacing(tmp_path / "file") as partial:
        partial.write_text("new")
    assert done == ["fsync", "replace"]


def test_folders_are_looked_into_so_far_and_no_further(tmp_path: Path) -> None:
    """A thousand in each other would end in a RecursionError."""
    bottom = tmp_path.joinpath(*["d"] * (DEEPEST + 2))
    bottom.mkdir(parents=True)
    (tmp_path / "a").write_text("")
    found = list(walk(tmp_path))
    assert found[0] == (tmp_path, ["d"], ["a"])
    assert [place for place, _, _ in found] == [tmp_path.joinpath(*["d"] * depth) for depth in range(DEEPEST + 1)]
    found = [place for place, folders, _ in walk(tmp_path) if not folders.clear()]
    assert found == [tmp_path], "who walks says into which"
