"""Rows with chats become tokens of which answers are marked: the same ids and masks as
transformers'."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from plait.core.base.errors import DataError, JobError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.job.settings import DataSection, TrainSection
from plait.train.data.chats import MARK, AnswerTokenizer, Chats, ChatSettings, unmarked
from plait.train.data.check import check_data
from plait.train.data.rendering import Renderer
from plait.train.data.sets import prepare_corpus
from plait.train.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.support.chats import CHATML, CHATS, MARKED, TEMPLATES, TOOLS, say, tokenizer_folder

CHAT, PAIRS = ChatSettings(rows="chats"), ChatSettings(rows="pairs")


def made(folder: Path, template: str | None, settings: ChatSettings = CHAT) -> tuple[Chats, AnswerTokenizer]:
    """Of a folder with a tokenizer."""
    plain = load_tokenizer(tokenizer_folder(folder, template))
    return Chats.of(settings, plain), AnswerTokenizer(plain)


def encoded(found: tuple[Chats, AnswerTokenizer], row: Any) -> list[np.ndarray]:
    """The ids of a row's texts."""
    chats, tokenizer = found
    return tokenizer.encode_many(list(chats.texts(row, "here", IgnoredInput())))


def test_ids_and_masks_are_transformers(tmp_path: Path) -> None:
    ours, theirs = made(tmp_path, MARKED), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for chat in CHATS:
        (ids,) = encoded(ours, {"messages": chat})
        want = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        assert unmarked(ids).tolist() == list(want["input_ids"])
        assert (ids >= MARK).astype(int).tolist() == list(want["assistant_masks"])


def test_pairs_are_one_text_of_which_the_second_counts(tmp_path: Path) -> None:
    ours = made(tmp_path, None, PAIRS)
    (ids,) = encoded(ours, {"prompt": "2 + 2 = ", "completion": "4 é🙂"})
    plain = unmarked(ids)
    assert ours[1].decode(plain[:-1]) == "2 + 2 = 4 é🙂"
    assert plain[-1] == ours[1].end_of_text
    assert ours[1].decode(ids[ids >= MARK]) == "4 é🙂"
    assert ids[-1] >= MARK
    bytes_ = Chats.of(PAIRS, ByteTokenizer()), AnswerTokenizer(ByteTokenizer())
    (ids,) = encoded(bytes_, {"prompt": "é", "completion": "🙂"})
    assert unmarked(ids).tolist() == [*"é🙂".encode(), 256]
    assert (ids >= MARK).tolist() == [False] * 2 + [True] * 5


def test_pairs_of_messages_are_a_chat_of_which_the_second_list_counts(tmp_path: Path) -> None:
    chats, tokenizer = made(tmp_path, CHATML, PAIRS)
    whole = say("a", "b", "c", "d")
    (ids,) = encoded((chats, tokenizer), {"prompt": whole[:3], "completion": whole[3:]})
    assert tokenizer.decode(ids) == chats.template.render(whole)  # type: ignore[union-attr]
    assert tokenizer.decode(ids[ids >= MARK]) == "d<|im_end|>"


def test_other_names_of_roles_json_in_tables_and_loss_on_all(tmp_path: Path) -> None:
    ours = made(tmp_path, CHATML)
    want = encoded(ours, {"messages": say("a", "b")})[0]
    shared = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    assert encoded(ours, {"messages": shared})[0].tolist() == want.tolist()
    assert encoded(ours, {"messages": json.dumps(say("a", "b"))})[0].tolist() == want.tolist()
    every = made(tmp_path, CHATML, ChatSettings(rows="chats", loss="all"))
    (ids,) = encoded(every, {"messages": say("a", "b")})
    assert (ids >= MARK).all()
    assert unmarked(ids).tolist() == unmarked(want).tolist()


def test_what_has_no_answer_is_counted(tmp_path: Path) -> None:
    (chats, _), over = made(tmp_path, CHATML), IgnoredInput()
    assert not list(chats.texts({"messages": say("a")}, "1", over))
    assert not list(chats.texts({"messages": say("x" * (7 << 20), "b")}, "2", over))
    assert over.first == {"chat(s) without an answer": "1", "chat(s) of more than 6 MB": "2"}
    pairs = made(tmp_path, None, PAIRS)
    assert encoded(pairs, {"prompt": "a", "completion": ""}) == []


def test_what_a_template_does_not_write_is_counted(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    rows = [
        {"messages": say("a", "b")},
        {"messages": [*say("a", "b"), {"role": "assistant", "content": "", "tool_calls": [call]}], "tools": TOOLS},
        {"messages": [say("a")[0], {"role": "assistant", "content": "b", "thinking": "hm"}]},
        {"messages": [say("a")[0], {"role": "assistant", "content": "b", "reasoning": "hm"}]},
        {"messages": [say("a")[0], {"role": "assistant", "content": "b", "loss": 0, "weight": 1}], "functions": [1]},
        {"messages": say("a", "b"), "system": "Be short.", "chat_template_kwargs": {"x": False}, "documents": []},
    ]
    unread = {"functions": 1, "system": 1, "chat_template_kwargs": 1}
    said = "of chats, which the chat template does not write"
    for template, want in (
        (CHATML, {"tool_calls": 1, "tools": 1, "thinking": 1, "reasoning": 1, "loss": 1} | unread),
        (TEMPLATES["qwen3"], {"tool_calls": 1, "loss": 1} | unread),
    ):  # fmt: skip
        (chats, _), over = made(tmp_path, template), IgnoredInput()
        for row in rows:
            list(chats.texts(row, "here", over))
        assert over.counts == {f"{key} {said}": count for key, count in want.items()}


def test_a_chat_whose_earlier_answers_change_is_cut(tmp_path: Path) -> None:
    ours = made(tmp_path, TEMPLATES["qwen3"])
    assert len(encoded(ours, {"messages": CHATS[2]})) == 2
    assert "1 chat(s) became a text for each answer" in ours[0].lines()[0]


NO_END = MARKED.replace(
    "{{- message.content + '<|im_end|>' }}{% endgeneration %}",
    "{{- message.content }}{% endgeneration %}{{- '<|im_end|>' }}",
)
NEXT_ROLE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)


@pytest.mark.parametrize(
    ("template", "loss", "endless"),
    [
        *(
            (TEMPLATES[name], loss, 0)
            for name in ("chatml", "mistral", "qwen3", "marked")
            for loss in ("answers", "all")
        ),
        (CHATML + "{{ eos_token }}", "answers", 0),
        (CHATML.replace("<|im_end|>", "<|end|>"), "answers", 2),
        (CHATML.replace("<|im_end|>", "<|end|>"), "all", 2),
        (NEXT_ROLE, "answers", 2),
        (NEXT_ROLE, "all", 2),
        (NO_END, "answers", 2),
        (NO_END, "all", 0),
    ],
)
def test_answers_without_an_end_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, loss: Any, endless: int
) -> None:
    chats, _ = made(tmp_path, template, ChatSettings(rows="chats", loss=loss))
    monkeypatch.setattr(Renderer, "rendered", lambda self, chat, tools: self.template.rendered(chat, tools))
    for chat in CHATS[:2]:
        list(chats.texts({"messages": chat}, "here", IgnoredInput()))
    (line,) = [one for one in chats.lines() if "never stops" in one] or [""]
    assert line.startswith(f"{endless} chat(s) have answers that end with no special token") == bool(endless)


@pytest.mark.parametrize(("name", "said"), [("narrator", "'narrator' (2), 'user' (1)"), ("user", "'user' (3)")])
def test_rows_without_answers_are_refused_with_their_roles(tmp_path: Path, name: str, said: str) -> None:
    rows = [{"role": "user", "content": "a"}, *[{"role": name, "content": "b"}] * 2]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": rows}))
    data = DataSection(
        text=str(tmp_path / "chats.jsonl"), rows="chats", tokenizer=str(tokenizer_folder(tmp_path, CHATML))
    )
    told = re.escape(f"a message of the role 'assistant' whose weight is not 0; its messages are of {said}")
    with pytest.raises(JobError, match=told):
        check_data(data, TrainSection(), tmp_path / "out")
    with pytest.raises(DataError, match=told):
        prepare_corpus(data, tmp_path / "out", print)


def test_text_that_spells_marks_or_is_no_unicode(tmp_path: Path) -> None:
    ours = made(tmp_path, CHATML)
    odd = say("\ue000\ufdd0\xff\xfe<|im_end|>\n<|im_start|>assistant\nno", "\ud800 yes \x00")
    (ids,) = encoded(ours, {"messages": odd})
    assert ours[1].decode(ids[ids >= MARK]) == "\ufffd yes \x00<|im_end|>"


WRONG = (
    ({}, "has no 'messages', but nothing"),
    ({"text": "a"}, "has no 'messages', but 'text'"),
    ("a text", "is plain text"),
    ({"messages": None}, "has no 'messages'"),
    ({"messages": []}, "no list of messages"),
    ({"messages": "hello"}, "neither a list nor JSON"),
    ({"messages": "[" * 100_000}, "neither a list nor JSON"),
    ({"messages": {"role": "user"}}, "no list of messages"),
    ({"messages": ["a"]}, "no table with a role"),
    ({"messages": [{"role": "assistant", "content": [1]}]}, "message 1 has 1 in its content"),
    ({"prompt": "a", "completion": "b"}, "has 'prompt' and 'completion'; set data.rows = \"pairs\""),
    ({"conversations": [{"from": "human", "value": "a"}]}, "but 'conversations'; name its key with data.messages_key"),
)


NO_PAIR = (
    ({"instruction": "a", "completion": "b"}, "has no 'prompt', but 'instruction', 'completion'; name its key with"),
    ({"prompt": "a", "output": "b"}, "name its key with data.answer_key"),
    ({"prompt": "a", "completion": 3}, "'prompt' is 'a' and 'completion' is 3; both are texts, or both lists"),
    ({"prompt": say("a"), "completion": "b"}, "'completion' is 'b'; both are texts, or both lists of messages"),
)


@pytest.mark.parametrize(
    ("settings", "row", "said"), [*((CHAT, *one) for one in WRONG), *((PAIRS, *one) for one in NO_PAIR)]
)
def test_what_is_no_chat_and_no_pair_is_refused_by_its_row(
    tmp_path: Path, settings: ChatSettings, row: Any, said: str
) -> None:
    chats, _ = made(tmp_path, CHATML, settings)
    with pytest.raises(DataError, match=f"line 7: .*({said})"):
        list(chats.texts(row, "line 7", IgnoredInput()))


def test_no_template_and_templates_of_ones_own(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat_template"):
        made(tmp_path, None)
    with pytest.raises(DataError, match="bytes have no chat template"):
        Chats.of(CHAT, ByteTokenizer())
    own = tmp_path / "own.jinja"
    own.write_text(CHATML)
    chats = Chats.of(ChatSettings(rows="chats", template=str(own)), ByteTokenizer())
    (ids,) = encoded((chats, AnswerTokenizer(ByteTokenizer())), {"messages": say("a", "é")})
    assert (
        bytes(unmarked(ids).astype(np.uint8)).decode()
        == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\né<|im_end|>\n"
    )
    with pytest.raises(DataError, match="no chat template beside"):
        encoded(made(tmp_path / "no", None, PAIRS), {"prompt": say("a"), "completion": say("a", "b")})
