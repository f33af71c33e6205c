"""Chats are rendered as transformers renders them, and answers are what the template says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from plait.core.base.errors import DataError
from plait.train.data.chat_template import ChatTemplate, InvalidChat
from tests.support.chats import CHATML, CHATS, MARKED, SPECIAL, TEMPLATES, TOOLS, WITH_SYSTEM, say, tokenizer_folder


def both(folder: Path, template: str, *, as_file: bool = False) -> tuple[ChatTemplate, Any]:
    """Ours and transformers', of one folder."""
    made = tokenizer_folder(folder, template, as_file=as_file)
    theirs = transformers.AutoTokenizer.from_pretrained(made)
    return ChatTemplate.of_tokenizer(made / "tokenizer.json", SPECIAL), theirs


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_is_rendered_as_transformers_renders_it(tmp_path: Path, name: str, as_file: bool) -> None:
    ours, theirs = both(tmp_path, TEMPLATES[name], as_file=as_file)
    chats = (*CHATS, *(WITH_SYSTEM if name != "gemma" else ()))
    for chat in chats:
        for end in range(1, len(chat) + 1):
            for prompt in (False, True):
                want = theirs.apply_chat_template(chat[:end], tokenize=False, add_generation_prompt=prompt)
                assert ours.render(chat[:end], prompt=prompt) == want


def test_reasoning_tools_and_keys_without_a_value(tmp_path: Path) -> None:
    ours, theirs = both(tmp_path, TEMPLATES["qwen3"])
    calls = say("a", "b", system="s")
    calls[2] = {"role": "assistant", "content": "b", "thinking": "hm", "tool_calls": None}
    want = theirs.apply_chat_template(calls, tools=TOOLS, tokenize=False)
    assert ours.render(calls, TOOLS) == want
    assert "hm" in want
    assert "é <&>" in want


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "marked"])
@pytest.mark.parametrize("chat", CHATS)
def test_answers_are_all_that_the_model_says(tmp_path: Path, name: str, chat: list[dict[str, Any]]) -> None:
    ours, _ = both(tmp_path, TEMPLATES[name])
    (found,) = ours.rendered(chat)
    end = {"llama3": "<|eot_id|>", "gemma": "<end_of_turn>"}.get(name, "<|im_end|>")
    strip = str.strip if name in ("llama3", "gemma") else str
    want = [strip(one["content"]) + end for one in chat if one["role"] == "assistant"]
    assert [found.text[a:b] for a, b in found.answers] == want
    assert found.text == ours.render(chat)


def test_what_is_rendered_otherwise_later_becomes_a_text_for_each_answer(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, TEMPLATES["qwen3"])
    first, second = ours.rendered(CHATS[2])
    assert first.text == ours.render(CHATS[2][:2])
    assert [first.text[a:b] for a, b in first.answers] == ["<think>\nwell\n</think>\n\nSo it is.<|im_end|>"]
    assert [second.text[a:b] for a, b in second.answers] == ["<think>\nok\n</think>\n\nAny time.<|im_end|>"]
    assert "well" not in second.text
    system, *_ = both(tmp_path / "mistral", TEMPLATES["mistral"])
    texts = system.rendered(WITH_SYSTEM[0])
    assert [one.text[a:b] for one in texts for a, b in one.answers] == [" Hi!</s>", " See you.</s>"]
    assert len(texts) == 2
    assert len(system.rendered(CHATS[1])) == 1


def test_a_prompt_that_an_answer_does_not_keep(tmp_path: Path) -> None:
    """Reasoning that is begun for the model and left out of its answer."""
    ours, _ = both(tmp_path, CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'"))
    (found,) = ours.rendered(say("a", "b", "c", "d"))
    assert [found.text[a:b] for a, b in found.answers] == ["b<|im_end|>", "d<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no') }}", "refuses it: no"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|refuses"),
        ("{{ messages.append(1) }}", "unsafe|refuses"),
        ("{% for a in range(1999999) %}{% endfor %}", "OverflowError"),
        ("{{ messages[0].nothing.more }}", "undefined|refuses"),
        ("{{ 1 / 0 }}", "ZeroDivision"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_hostile_templates_end_in_a_sentence(tmp_path: Path, template: str, said: str) -> None:
    ours = ChatTemplate.of_tokenizer(tokenizer_folder(tmp_path, template) / "tokenizer.json")
    with pytest.raises(InvalidChat, match=said):
        ours.rendered(say("a", "b"))


def test_what_is_no_template(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat_template"):
        ChatTemplate.of_tokenizer(tokenizer_folder(tmp_path / "none") / "tokenizer.json")
    broken = ChatTemplate.of_tokenizer(tokenizer_folder(tmp_path / "broken", "{% for %}") / "tokenizer.json")
    with pytest.raises(DataError, match="not a chat template"):
        broken.render(say("a"))
    folder = tokenizer_folder(tmp_path / "bytes")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot be read as a chat template"):
        ChatTemplate.of_tokenizer(folder / "tokenizer.json")
    named = tokenizer_folder(tmp_path / "named")
    config = named / "tokenizer_config.json"
    config.write_text('{"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}]}')
    assert ChatTemplate.of_tokenizer(named / "tokenizer.json").render(say("a")) == "y"


def test_nobody_can_write_marks_of_answers(tmp_path: Path) -> None:
    ours, _ = both(tmp_path, MARKED)
    text = ours._marked(say("a", "b"), None, prompt=False)
    (mark, *_) = re.findall("\ue000.{17}", text)
    assert mark not in ours.render(say("a", "b"))
