"""Lines of words as Slurm has them: what is read, and what is refused by its line."""

from __future__ import annotations

import pytest

from plait.core.errors import JobError
from plait.core.slurm_lines import lines


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("# a comment\n\nslurmctld: up\n", []),
        ("Nodes=n1 # SwitchName=s1", [("line 1", {"nodes": "n1"})]),
        ("\nA=1\n\nB=2", [("line 2", {"a": "1"}), ("line 4", {"b": "2"})]),
        ("A=1 \\\nB=2\nC=3", [("line 1", {"a": "1", "b": "2"}), ("line 3", {"c": "3"})]),
        ("A=1 \\  \n \\\nB=2", [("line 1", {"a": "1", "b": "2"})]),
        ("A= B=2", [("line 1", {"a": "", "b": "2"})]),
        ("A=", [("line 1", {"a": ""})]),
        ("A = 1\tB\t=\t2", [("line 1", {"a": "1", "b": "2"})]),
        ('A="x y" B=a"b c"d', [("line 1", {"a": "x y", "b": "ab cd"})]),
        ('A=""', [("line 1", {"a": ""})]),
        ("A=b=c", [("line 1", {"a": "b=c"})]),
        ("A= b=c", [("line 1", {"a": "", "b": "c"})]),
    ],
)
def test_words_of_lines(text: str, found: list[tuple[str, dict[str, str]]]) -> None:
    assert list(lines(text)) == found


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        ("A=1\nnothing", "line 2", "'nothing' is no KEY=VALUE"),
        ("A=1 =2", "line 1", "'=2' is no KEY=VALUE"),
        ("x" * 99, "line 1", f"'{'x' * 60}' is no KEY=VALUE"),
        ('A="x y', "line 1", "the value of A begins with a quote and ends nowhere"),
        ('A=x" y', "line 1", "the value of A begins with a quote and ends nowhere"),
        ("A=1 a=2", "line 1", "a stands twice"),
        ("A=1 \\\nA=2", "line 1", "A stands twice"),
        ("A=1\nB=2 \\", None, r"the last line ends in a \ and goes on nowhere"),
    ],
)
def test_what_are_no_words_is_refused_by_its_line(text: str, key: str | None, why: str) -> None:
    with pytest.raises(JobError) as caught:
        list(lines(text))
    assert (caught.value.key, caught.value.problem) == (key, why)


def test_a_file_that_includes_another_is_refused_with_what_to_do() -> None:
    with pytest.raises(JobError, match=r"line 2: Include other\.conf is not followed") as caught:
        list(lines("SwitchName=a Nodes=n1\n  include other.conf # more\n"))
    assert "pasted" in str(caught.value)
