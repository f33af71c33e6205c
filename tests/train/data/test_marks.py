"""Answers that a template marks count if their messages do: as Python writes it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.train.data.chat_template import ChatTemplate
from plait.train.data.messages import InvalidChat
from tests.support.chats import CHATML, MARKED, SPECIAL

ANSWER = {
    "whole": "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}",
    "end apart": "{% generation %}{{ m.content }}{% endgeneration %}{% generation %}<|im_end|>{% endgeneration %}",
    "trimmed": "{% generation %}{{ m.content | trim }}<|im_end|>{% endgeneration %}",
    "text alone": "{% if m.content %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}<|im_end|>",
    "set before": "{% set text = m.content ~ '<|im_end|>' %}{% generation %}{{ text }}{% endgeneration %}",
    "thoughts": "{% generation %}{{ (m.thinking or '') ~ m.content ~ '<|im_end|>' }}{% endgeneration %}",
}
"""What a template writes of an answer."""


def template(answer: str) -> str:
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}|{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )


def by_hand(form: str, chat: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """The text of a chat, and what counts of it."""
    text, counts = "", list[str]()
    for one in chat:
        text += f"<|im_start|>{one['role']}|"
        content, end = one["content"], "<|im_end|>"
        if one["role"] == "assistant":
            content = {"trimmed": content.strip(), "thoughts": one.get("thinking", "") + content}.get(form, content)
            parts = {"end apart": [content, end], "text alone": [content]}.get(form, [content + end])
            counts += [part for part in parts if part and one.get("weight", 1)]
        text += content + end
    return text, counts


TEXT = st.sampled_from(["", " ", "yes", " no\n", "yes", "<|im_end|>", "é🙂"])
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "assistant", "tool"]), "content": TEXT},
    optional={"weight": st.sampled_from([0, 0, 1]), "thinking": TEXT},
)


@pytest.mark.parametrize("form", ANSWER)
@given(chat=st.lists(MESSAGE, min_size=1, max_size=7))
def test_marked_answers_count_if_their_messages_do(form: str, chat: list[dict[str, Any]]) -> None:
    found = ChatTemplate(template(ANSWER[form]), "here", {}, SPECIAL).rendered(chat)
    if not any(one["role"] == "assistant" and one.get("weight", 1) for one in chat):
        assert found == []
        return
    text, counts = by_hand(form, chat)
    assert [one.text for one in found] == [text]
    assert [text[a:b] for a, b in found[0].answers] == counts


CHAT = st.lists(st.tuples(TEXT, TEXT.filter(bool), st.sampled_from([0, 1])), min_size=1, max_size=4)


@given(turns=CHAT)
def test_marks_change_nothing_of_what_counts(turns: list[tuple[str, str, int]]) -> None:
    chat = [
        one
        for question, answer, weight in turns
        for one in ({"role": "user", "content": question}, {"role": "assistant", "content": answer, "weight": weight})
    ]
    plain, marked = (ChatTemplate(one, "here", {}, SPECIAL).rendered(chat) for one in (CHATML, MARKED))
    assert [(one.text, one.answers) for one in plain] == [(one.text, one.answers) for one in marked]


@pytest.mark.parametrize("source", [CHATML, MARKED])
def test_of_an_answer_that_comes_first_the_prompt_does_not_count(source: str) -> None:
    (found,) = ChatTemplate(source, "here", {}, SPECIAL).rendered([{"role": "assistant", "content": "Hi!"}])
    assert [found.text[a:b] for a, b in found.answers] == ["Hi!<|im_end|>"]


def test_which_marks_belong_to_which_message_cannot_be_told() -> None:
    """A template that marks another number of answers when their texts are others."""
    source = template("{% if m.content == 'a' %}{% generation %}a{% endgeneration %}{% endif %}")
    chat = [{"role": "assistant", "content": "a", "weight": weight} for weight in (0, 1)]
    with pytest.raises(InvalidChat, match="cannot determine which"):
        ChatTemplate(source, "here", {}).rendered(chat)
