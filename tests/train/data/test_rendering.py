"""The process that renders chats: what it gives is the template's, and what a hostile template does
ends."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from plait.core.base.errors import DataError
from plait.core.base.process import command_of
from plait.train.data import rendering
from plait.train.data.chat_template import ChatTemplate, InvalidChat
from plait.train.data.messages import ANSWERS
from plait.train.data.rendering import Renderer
from tests.support.chats import CHATS, SPECIAL, TEMPLATES, TOOLS, say, tokenizer_folder

pytestmark = pytest.mark.system
NEVER_ENDS = (
    "{% set n = [1] * 1000 %}"
    + "".join(f"{{% for a{at} in n %}}" for at in range(6)) + "{% endfor %}" * 6
)  # fmt: skip
GROWS = "{% set n = namespace(x='xxxxxxxxxx') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
NESTS = "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}"


def renderer(folder: Path, template: str) -> Renderer:
    """Of a tokenizer with this template."""
    return Renderer(ChatTemplate.of_tokenizer(tokenizer_folder(folder, template) / "tokenizer.json", SPECIAL))


def test_it_gives_what_the_template_gives(tmp_path: Path) -> None:
    for name, template in TEMPLATES.items():
        ours = renderer(tmp_path / name, template)
        for chat in CHATS:
            assert ours.rendered(chat, TOOLS) == ours.template.rendered(chat, TOOLS)
    odd = say("\ud800 \r\n\0 é🙂", "\u2028 {{ 1 }}")
    assert ours.rendered(odd) == ours.template.rendered(odd)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NEVER_ENDS, "2 s of processor"),
        (GROWS, "of memory|2 s of processor"),
        ("{{ 'x' * 299999999 }}", "of memory|2 s of processor|makes more than 268,435,456 characters"),
        ("{{ 9 ** 999999999 }}", "2 s of processor"),
        (NESTS, "of memory|2 s of processor"),
        ("{{ ('a' * 900000) | replace('a', 'b' * 900000) }}", "of memory|2 s of processor"),
        ("{{ raise_exception('no') }}", "refuses it: no"),
    ],
)
def test_what_a_hostile_template_does_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, said: str
) -> None:
    monkeypatch.setattr(rendering, "TOO_LONG", "the template takes more than 2 s of processor for it")
    less = "from plait.train.data import rendering as it; it.SECONDS, it.MEMORY = 1, 1 << 30; it.main()"
    command = [*command_of("-")[:2], "-c", less]
    monkeypatch.setattr(rendering, "command_of", lambda module: command)
    ours = renderer(tmp_path, template)
    for _ in range(1 + (template == NEVER_ENDS)):  # the second time in a process anew
        with pytest.raises(InvalidChat, match=said):
            ours.rendered(say("a", "b"))


SLOW = "{% for a in range(900) %}{% for b in range(1000) %}{% endfor %}{% endfor %}"
"""Some 50 ms a rendering: a chat is far from the limit of one."""


def test_what_is_slow_for_every_chat_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    less = "from plait.train.data import rendering as it; it.SECONDS = 1; it.main()"
    monkeypatch.setattr(rendering, "command_of", lambda module: [*command_of("-")[:2], "-c", less])
    ours, chat = renderer(tmp_path / "slow", SLOW + TEMPLATES["chatml"]), say("a", "b")
    assert ours.rendered(chat) == ours.template.rendered(chat)
    with pytest.raises(InvalidChat, match=r"takes too long: .* s of processor more, for all chats up to it"):
        deque(map(ours.rendered, [chat] * 200, [[ANSWERS] * 100] * 200))  # tools that name who answers are none
    usual = renderer(tmp_path / "usual", TEMPLATES["qwen3"])
    assert len(list(map(usual.rendered, [CHATS[2] * 5] * 50))) == 50


def test_what_is_no_template_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a chat template"):
        renderer(tmp_path, "{% for %}").rendered(say("a", "b"))
