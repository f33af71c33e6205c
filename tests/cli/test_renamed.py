"""Names of earlier versions are refused with the new one, in one paragraph and with exit status 2."""

from __future__ import annotations

from typing import Any

import pytest
from typer.main import get_command

from plait.cli.main import app
from plait.cli.renamed import COMMANDS, OPTIONS, refuse_old_words
from plait.core.base.errors import JobError
from plait.core.job.reference import look_up
from plait.core.job.renamed import KEYS, VALUES, renamed
from plait.core.job.spec import Job
from tests.support.command import plait

TIER = "unit"
OLD = [
    *((old.split(), new) for old, new in COMMANDS.items()),
    *(([*command.split(), option], new) for command, named in OPTIONS.items() for option, new in named.items()),
]


@pytest.mark.parametrize(("words", "new"), OLD, ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_an_old_name_is_refused_with_the_new_one(words: list[str], new: str) -> None:
    done = plait(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"is called {new} now" in " ".join(done.stderr.split())
    assert plait(*words[:-1], f"{words[-1]}=2").returncode == 2


def _options(words: list[str]) -> set[str]:
    command = get_command(app)
    for word in words:
        command = getattr(command, "commands", {})[word]
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("command", OPTIONS)
def test_nothing_answers_to_an_old_option_and_new_ones_are_there(command: str) -> None:
    there, named = _options(command.split()), OPTIONS[command]
    assert not there & set(named)
    assert {new.split()[0] for new in named.values() if new.startswith("--")} <= there


@pytest.mark.parametrize("new", [new for new in COMMANDS.values() if "," not in new])
def test_new_names_of_commands_are_there(new: str) -> None:
    words = [word for word in new.split()[1:] if word.islower() and not word.startswith("--")]
    assert _options(words) >= {word for word in new.split() if word.startswith("--")}


def test_a_command_has_at_most_eight_options() -> None:
    """What describes a thing is a setting behind the command, ``KEY=VALUE``."""
    commands, most = [get_command(app)], dict[str, int]()
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        options = {one.name for one in command.params if one.param_type_name == "option"} - {"help"}
        most[str(command.name)] = len(options)
    assert max(most.values()) <= 8, most


@pytest.mark.parametrize(
    "words",
    [
        ["lab", "run", "2x1@1gbit", "python", "x.py", "--hosts", "3"],
        ["lab", "run", "--raw", "2x1@1gbit", "--", "a", "--nic"],
        ["train", "profile"],
        ["diagnose", "timeline"],
        ["plan", "job.toml", "--draw", "x.svg"],
        [],
    ],
)
def test_words_that_are_no_old_names_pass(words: list[str]) -> None:
    refuse_old_words(words)


MODEL = {"preset": "gpt3-125m"}


def _tables(key: str, value: object) -> dict[str, Any]:
    """A job with one value, at a key with dots."""
    table: Any = value
    for part in reversed(key.split(".")):
        table = {part: table}
    return {"model": MODEL} | table


@pytest.mark.parametrize(("old", "new"), KEYS.items())
def test_an_old_key_is_refused_with_the_new_one(old: str, new: str) -> None:
    with pytest.raises(JobError, match=rf"^{old}: is called {new} now") as caught:
        Job.from_dict(_tables(old, 1))
    assert caught.value.exit_status == 2
    assert look_up(new)


@pytest.mark.parametrize(("key", "old", "new"), [(*place, new) for place, new in VALUES.items()])
def test_an_old_value_is_refused_with_the_new_one(key: str, old: str, new: str) -> None:
    with pytest.raises(JobError, match=f'"{old}" is called "{new}" (now|here)'):
        Job.from_dict(_tables(key, old))
    Job.from_dict(_tables(key, new))


def test_what_an_earlier_version_wrote_is_read_by_its_new_names() -> None:
    old: dict[str, Any] = {
        "model": MODEL,
        "train": {"micro_batch": 2},
        "strategy": {"tp": 2, "slices": {"p1": 2, "p2": 1}, "overlap": {"tp": "none"}},
    }
    job = Job.from_dict(renamed(old))
    assert (job.base_strategy.p1, job.base_strategy.overlap) == (2, "no-communication")
    assert old["strategy"]["slices"] == {"p1": 2, "p2": 1}
