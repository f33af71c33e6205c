"""Signals to a launcher: ranks save and end, or are ended at once; and what is said meanwhile."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.errors import RankFailure
from plait.core.runs.channel import Stop
from plait.launch import watch as module
from plait.launch.watch import RunGuard
from tests.launch.story import Story

TIER = "unit"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_asks_every_rank_to_save_and_end(
    story: Story, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    asked = list[list[int]]()
    status = 128 + number
    story.trains(5, 5)
    noted = list[str]()
    story.progress.on_stop_request = noted.append
    found = story.run(
        None,
        story.sent(number),
        lambda: asked.extend(story.asked()),
        story.ended(status, None),  # which is no failure
        story.ended(status, 0),
    )
    assert (found, asked, story.progress.stopping) == (status, [[number], [number]], True)
    assert noted == [signal.Signals(number).name]
    assert "stopping after this step; the run is saved first" in capsys.readouterr().err
    assert not any(process.killed for process in story.processes)


def test_the_second_ctrl_c_ends_all_at_once(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    story.trains(5, 5)
    found = story.run(
        None,
        story.sent(signal.SIGTERM, signal.SIGTERM, signal.SIGHUP),  # asked, and that is enough
        lambda: story.processes[0].killed or story.signals.append(signal.SIGINT),
        None,
    )
    assert found == 128 + signal.SIGTERM
    assert [process.killed for process in story.processes] == [True, True]
    assert story.asked() == [[signal.SIGTERM]] * 2
    assert "what was not saved is lost" in capsys.readouterr().err


def test_a_rank_that_got_a_signal_has_all_asked(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    story.trains(5, 5)
    asked = list[list[int]]()
    assert story.run(
        lambda: story.ends[1].send(Stop(signal.SIGTERM)),
        None,
        lambda: asked.extend(story.asked()),
        story.ended(143, 143),
    ) == 143  # fmt: skip
    assert asked == [[signal.SIGTERM]] * 2
    assert "rank 1 got SIGTERM: stopping after this step" in capsys.readouterr().err


def test_what_fails_once_ranks_are_to_end_before_they_train_is_no_news(
    story: Story, capsys: pytest.CaptureFixture[str]
) -> None:
    story.trains(0, -1)
    assert story.run(
        None, story.sent(signal.SIGINT), story.ended(1, None),
        story.ended(1, 1),
    ) == 130  # fmt: skip
    assert "ending; nothing is to be saved yet" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "killed"), [((0, -1), True), ((0, 0), False)])
def test_ranks_that_have_nothing_to_save_end_soon(story: Story, steps: tuple[int, int], killed: bool) -> None:
    """Such as do not listen, or hang in an import; a step and its checkpoint may take as long as
    they do."""
    story.trains(*steps)
    late = [lambda: story.after(1.0)] * (int(module.GRACE) + 2)
    ends = [] if killed else [story.ended(143, 143)]
    assert story.run(None, story.sent(signal.SIGTERM), *late, *ends) == 143
    assert [process.killed for process in story.processes] == [killed, killed]


def test_what_fails_while_ranks_save_is_news(story: Story) -> None:
    story.trains(5, 5)
    with pytest.raises(RankFailure, match="rank 0 ended with status 1"):
        story.run(None, story.sent(signal.SIGINT), story.ended(1, None))


HERE = -1


@pytest.mark.parametrize(
    ("sources", "kills"),
    [([0, 1], False), ([0, 0], True), ([0, 1, 1], True), ([HERE, 0, 1], False), ([HERE, 0, 1, 1], True)],
)
def test_one_ctrl_c_may_reach_every_node(story: Story, sources: list[int], kills: bool) -> None:
    story.trains(5, 5)

    def come(at: int) -> None:
        story.signals.append(signal.SIGINT) if at == HERE else story.sources[at].theirs.send(bytes([signal.SIGINT]))

    comes = [lambda at=at: come(at) for at in sources]
    story.run(None, *comes, None, story.ended(130, 130))
    assert story.processes[0].killed == kills


def test_a_source_that_is_gone_is_listened_to_no_more(story: Story) -> None:
    assert story.run(story.sources[1].theirs.close, None, story.ended(0, 0)) == 0


def test_ranks_that_run_already_are_watched_to_their_end(story: Story, tmp_path: Path) -> None:
    given: dict[str, Any] = {"timeout": 60, "sources": [story], "guard": RunGuard(progress=story.progress)}
    story.steps.extend([story.sent(0), lambda: signal.raise_signal(signal.SIGTERM),
                        None, story.ended(143, 143), None])  # fmt: skip
    assert module.watched(story.ranks, tmp_path, **given) == 143
    assert story.progress.stopping


def test_signals_are_queued_and_what_handled_them_before_comes_back() -> None:
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    own = list[int]()
    mine = signal.signal(signal.SIGTERM, lambda number, frame: own.append(number))
    try:
        with module.catching_signals() as caught:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.raise_signal(number)
            assert list(caught) == [signal.SIGTERM, signal.SIGINT]
        signal.raise_signal(signal.SIGTERM)
        assert own == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, ignored)
        signal.signal(signal.SIGTERM, mine)


def test_another_thread_leaves_signals_to_its_caller() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def other() -> object:
        with module.catching_signals() as caught:
            return signal.getsignal(signal.SIGTERM), list(caught)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(other).result() == (before, [])


@pytest.mark.parametrize(("columns", "widest"), [(40, 40), (200, 100), (None, 360)])
def test_what_is_said_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int | None, widest: int
) -> None:
    monkeypatch.setattr(module, "terminal_width", lambda stream: columns)
    module.say("word " * 70)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("plait: word")
    assert widest - 10 < max(map(len, lines)) <= widest
