"""Text for people fits its width and loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.core.base.text import (
    Column,
    Part,
    Shown,
    Table,
    duration,
    in_bytes,
    in_seconds,
    paragraph,
    printable,
    progress_line,
    table,
)

MORE = [
    "eval 3.812",
    "12,345 tokens/s",
    "communication 120 ms, hidden 66%",
    "MFU 34%",
    "first stage idle 12%",
]


@pytest.mark.parametrize("width", [59, 60, 79, 80, 119, 200])
@pytest.mark.parametrize("total", [12, 1_000_000])
def test_a_progress_line_always_has_step_bar_loss_and_time_left(width: int, total: int) -> None:
    line = progress_line(total - 2, total, "loss 10.123", 100_000, MORE, width)
    assert len(line) <= width
    assert line.startswith(f"step {total - 2:>{len(str(total))}}/{total}  ━")
    assert "  loss 10.123  " in line
    assert line.endswith("  27:46:40 left")


def test_a_wider_progress_line_says_more_the_most_important_first() -> None:
    counts: list[int] = []
    for width in range(60, 200):
        line = progress_line(5, 400, "loss 2.345", 75, MORE, width)
        shown = [part in line for part in MORE]
        assert shown == sorted(shown, reverse=True)
        counts.append(sum(shown))
    assert counts == sorted(counts)
    assert (counts[0], counts[80 - 60], counts[-1]) == (1, 2, len(MORE))


@given(st.integers(1, 60), st.integers(0, 10**9), st.integers(1, 10**9), st.none() | st.floats(0, 1e9))
def test_a_progress_line_never_exceeds_its_width(width: int, done: int, total: int, left: float | None) -> None:
    assert len(progress_line(min(done, total), total, "loss 2.345", left, MORE, width)) <= width


def test_the_bar_is_empty_at_first_and_full_at_the_end() -> None:
    assert "━" not in progress_line(0, 9, "loss 1.000", None, [], 60)
    assert "─" not in progress_line(9, 9, "loss 1.000", 0, [], 60)


CELLS = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=30)


@given(st.integers(1, 8).flatmap(lambda n: st.lists(st.lists(CELLS, min_size=n, max_size=n), min_size=2, max_size=5)),
       st.none() | st.integers(30, 120))  # fmt: skip
def test_a_table_holds_every_cell_whole_and_fits(rows: list[list[str]], width: int | None) -> None:
    lines = table(rows[0], rows[1:], width)
    words = [word for line in lines for word in line.split() if not word.startswith("─")]
    assert words == [cell for row in rows for cell in row]
    if width is None:
        assert len(lines) == len(rows) + 1
    elif width >= 36:  # the longest cell and what a further line is moved in
        assert max(map(len, lines)) <= width


def test_a_table_that_is_too_wide_goes_on_below() -> None:
    lines = table(["step", "box", "ms"], [["0", "[0:512]", "1.5"], ["10", "[512:1024]", "12.5"]], 19)
    assert lines == [
        "step  box",
        "        ms",
        "────────────────",
        "   0  [0:512]",
        "       1.5",
        "  10  [512:1024]",
        "      12.5",
    ]


def test_what_could_steer_a_terminal_is_spelled_out() -> None:
    assert printable("[b]é\x1b[31m\r\x07\u202e\udcff") == "[b]é\\x1b[31m\\r\\x07\\u202e\\udcff"
    assert "\x1b" not in "".join(table(["\x1b[1m"], [["\x1b[31mred"]], 80))
    assert "\x1b" not in paragraph("a \x1b[31mb", 80)


@given(st.lists(st.text(st.characters(codec="ascii", categories=("L", "P", "N")), min_size=1, max_size=90)),
       st.integers(20, 100))  # fmt: skip
def test_a_paragraph_is_broken_between_words_only(words: list[str], width: int) -> None:
    text = " ".join(words)
    lines = paragraph(text, width).split("\n")
    assert " ".join(lines) == text
    assert all(len(line) <= width or " " not in line or "'" in line or '"' in line for line in lines)


def test_a_paragraph_keeps_paths_whole() -> None:
    path = "/a/folder-with-hyphens/" + "x" * 60
    text = f"'/my runs/first try': cannot be written beside {path}."
    for width in range(10, 100):
        lines = paragraph(text, width).split("\n")
        assert any(f"{path}." in line for line in lines)
        assert any("'/my runs/first try':" in line for line in lines)
    assert paragraph(text, None) == text


def test_durations() -> None:
    assert [duration(s) for s in (0, 59.6, 3600, 47.9 * 3600, 48 * 3600)] == [
        "0:00", "1:00", "1:00:00", "47:54:00", "2 d 0 h",
    ]  # fmt: skip


def test_a_column_without_rows_is_of_no_numbers() -> None:
    assert table(["n", "what"], [], 80) == ["n  what", "───────"]
    assert table(["what", "n"], [["a", "1"], ["b", "-2.5"]], 80)[2:] == ["a        1", "b     -2.5"]
    assert table(["what", "n"], [["a", "12"], ["b", "x"]], 80)[2:] == ["a     12", "b     x"]


def test_a_progress_line_that_just_fits_keeps_all() -> None:
    whole = "step 3/9  loss 2.5  1:15 left"
    assert progress_line(3, 9, "loss 2.5", 75, [], len(whole)) == whole
    assert progress_line(3, 9, "loss 2.5", 75, [], len(whole) - 1) == "step 3/9  1:15 left"
    assert progress_line(3, 9, "loss 2.5", 75, [], len("step 3/9  1:15 left")) == "step 3/9  1:15 left"
    assert progress_line(3, 9, "loss 2.5", 75, [], len("step 3/9  1:15 left") - 1) == "step 3/9"


def test_what_is_kept_of_a_text_for_a_terminal() -> None:
    assert printable("a\tb\n") == "a\\tb\n"
    assert printable("a\tb\n", kept="\t") == "a\tb\\n"
    assert printable("é b") == "é b"


def test_a_table_that_just_fits_is_not_broken() -> None:
    rows = [["ab", "1.5", "x"], ["c", "12.5", "yy"]]
    whole = table(["n", "ms", "what"], rows, 80)
    assert whole[0] == "n     ms  what"
    assert table(["n", "ms", "what"], rows, len(whole[0])) == whole
    assert table(["n", "ms", "what"], rows, len(whole[0]) - 1)[:2] == ["n     ms", "    what"]


def test_every_line_of_a_paragraph_but_the_first_is_moved_in() -> None:
    assert paragraph("one two three four", 9, "  ") == "one two\n  three\n  four"
    assert paragraph("one two", 7, "  ") == "one two"
    assert paragraph("one two", 6, "  ") == "one\n  two"
    assert paragraph("one two three", None, "  ") == "one two three"


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), ((1 << 20) - 1, "1024 KiB"),
        (1 << 20, "1 MiB"), (1 << 30, "1 GiB"), (1234 << 30, "1.205 TiB"), (1 << 50, "1 PiB"), (1 << 60, "1 EiB"),
        (1 << 70, "1024 EiB"), (999_999 << 60, "1e+06 EiB"), (10**6 << 60, "1.0e+06 EiB"),
        (3 * 10**6 << 60, "3.0e+06 EiB"),
    ],
)  # fmt: skip
def test_bytes_in_words(size: int, told: str) -> None:
    assert in_bytes(size) == told


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.0, "0 s"), (1.0, "1.00 s"), (123.4, "123 s"), (0.999, "999 ms"), (1e-3, "1.00 ms"), (2.5e-6, "2.50 us"),
     (1e-6, "1.00 us"), (5e-7, "5.0e-07 s"), (999.4, "999 s"), (1972.6, "1,973 s")],
)  # fmt: skip
def test_seconds_in_words(seconds: float, told: str) -> None:
    assert in_seconds(seconds) == told


class Answer(Shown):
    """Two steps, one of which was not measured."""

    def parts(self) -> list[Part]:
        steps = Table("Steps <1>", ("kind", Column("ms", ".1f", key="seconds")), [("compute", 12.25), ("wait", None)])
        return [Table("A run"), "It is slow & long.", "", steps]

    def to_dict(self) -> dict[str, object]:
        return {}


def test_an_answer_is_lines_of_its_parts() -> None:
    assert Answer().text() == (
        "A run\nIt is slow & long.\n\nSteps <1>\nkind     ms\n─────────────\ncompute  12.2\nwait     -"
    )
    assert "It is\n  slow &\n  long." in Answer().text(8)


def test_an_answer_is_html_in_which_nothing_is_markup() -> None:
    html = Answer()._repr_html_()
    assert html.startswith("<h4>A run</h4><p>It is slow &amp; long.</p><table><caption>Steps &lt;1&gt;</caption>")
    assert "<td>12.2" in html


def test_records_of_a_table_hold_values_not_texts() -> None:
    table = Answer().parts()[-1]
    assert isinstance(table, Table)
    assert table.records() == [{"kind": "compute", "seconds": 12.25}, {"kind": "wait", "seconds": None}]
