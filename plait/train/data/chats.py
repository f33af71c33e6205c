"""Rows that hold chats, or prompts with answers, as texts in which answers are marked.

| ``data.rows`` | a row has | which becomes |
|---|---|---|
| ``chats`` | ``messages``: a list of ``role``, ``content`` (or ``from``, ``value``); ``tools`` | a chat |
| ``pairs`` | ``prompt`` and ``completion``: texts | one behind the other, then end-of-text |
| ``pairs`` | ``prompt`` and ``completion``: lists of messages | a chat; only the second list counts |

A text is bytes with marks that no UTF-8 contains: where an answer begins, where it ends, and end-of-text. So
it goes through preparation like any other; ``AnswerTokenizer`` reads the marks. In the corpus a token of an
answer is its id plus ``MARK``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from plait.core.base.errors import DataError
from plait.core.base.numbers import shown
from plait.core.base.passed_over import PassedOver
from plait.core.job.settings import DataSection
from plait.train.data.chat_template import ANSWERS, REASONING, ChatTemplate, Message, Rendered, WrongChat
from plait.train.data.rendering import Renderer
from plait.train.data.tokenizer import FileTokenizer, Tokenizer
from plait.train.data.utf8 import utf8

BEGIN, END, STOP = b"\xff", b"\xfe", b"\xfd"
MARK = 1 << 31
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
"""Of messages that say ``from``."""
READ_AS: Mapping[str, Sequence[str]] = dict.fromkeys(REASONING, REASONING[:2])
"""By which names a template finds what a message calls otherwise."""
NO_ANSWER, TOO_LONG = "chat(s) without an answer", "chat(s) of more than 6 MB"
MOST_BYTES = 6 << 20


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """How rows are read. template: a file, instead of the tokenizer's own. loss: ``all``: every token counts
    as an answer does."""

    rows: Literal["chats", "pairs"]
    messages: str = "messages"
    prompt: str = "prompt"
    answer: str = "completion"
    template: str | None = None
    loss: Literal["answers", "all"] = "answers"


@dataclass
class Chats:
    """Rows of one job become texts. renderer: of its template. cut: chats that became several."""

    settings: ChatSettings
    renderer: Renderer | None
    cut: int = 0

    @staticmethod
    def of(settings: ChatSettings, tokenizer: Tokenizer) -> Chats:
        """With the template of a tokenizer. Raises DataError where chats have none."""
        instead = None if settings.template is None else Path(settings.template)
        path, special = None, ()
        if isinstance(tokenizer, FileTokenizer):
            path, special = tokenizer.path, tokenizer.special
        try:
            template = ChatTemplate.beside(path, special, instead=instead)
        except DataError:
            if settings.rows == "chats":
                raise
            template = None
        return Chats(settings, template and Renderer(template))

    @property
    def template(self) -> ChatTemplate | None:
        """Of the job's chats."""
        return self.renderer and self.renderer.template

    @property
    def ends(self) -> list[str]:
        """The special token that ends an answer to one question; none if the template has none."""
        assert self.renderer
        try:
            (found,) = self.renderer.rendered(({"role": "user", "content": "a"}, {"role": ANSWERS, "content": "b"}))
        except (WrongChat, ValueError):
            return []
        begin, end = found.answers[-1]
        return [token for token in self.renderer.template.special if found.text[begin:end].endswith(token)]

    @property
    def identity(self) -> str:
        """All that decides the texts, apart from the day."""
        return repr((self.settings, self.template and self.template.identity))

    def lines(self) -> list[str]:
        """What is to be said of it."""
        found = list[str]()
        if self.cut:
            found.append(
                f"{self.cut} chat(s) became a text for each answer, since the template shows what comes before an "
                "answer otherwise once it is followed by more"
            )
        if self.template and self.template.dated:
            found.append("the chat template may write today's date")
        return found

    def texts(self, values: Mapping[str, Any] | str, where: str, over: PassedOver) -> Iterator[bytes]:
        """The marked texts of a row. where: file and line. over: counts what is passed over. Raises DataError
        for what is no chat."""
        try:
            found = [self._marked(one) for one in self._rendered(values)]
        except WrongChat as error:
            raise DataError(f"{where}: {error}") from None
        if not any(BEGIN in one for one in found):
            over.note(NO_ANSWER, where)
            return
        for key in self._unwritten(values):
            over.note(f"{key} of chats, which the chat template does not write", where)
        self.cut += len(found) > 1
        for one in found:
            if len(one) > MOST_BYTES:
                over.note(TOO_LONG, where)
            else:
                yield one

    def check(self, values: Mapping[str, Any] | str, where: str) -> None:
        """Raise DataError for a row that is no chat, or no pair; nothing is rendered."""
        try:
            self._given(values)
        except WrongChat as error:
            raise DataError(f"{where}: {error}") from None

    def _unwritten(self, values: Mapping[str, Any] | str) -> list[str]:
        """Of tools, calls of these and reasoning, what a chat has and the template never names."""
        if self.template is None or isinstance(values, str):
            return []
        given, source = self._given(values), self.template.source
        if isinstance(given, _Pair):
            return []
        found = [key for key in ("tool_calls", *REASONING) if any(one.get(key) for one in given)]
        found += ["tools"] * bool(values.get("tools"))
        names = {key: READ_AS.get(key, (key,)) for key in found}
        return [key for key in found if not any(re.search(rf"\b{name}\b", source) for name in names[key])]

    def _rendered(self, values: Mapping[str, Any] | str) -> list[Rendered] | list[_Pair]:
        given = self._given(values)
        if isinstance(given, _Pair):
            return [given]
        if self.renderer is None:
            raise WrongChat("is a list of messages, and there is no chat template beside the tokenizer")
        assert isinstance(values, Mapping)
        tools = values.get("tools")
        return self.renderer.rendered(given, (_parsed(tools, "tools") if isinstance(tools, str) else tools) or None)

    def _given(self, values: Mapping[str, Any] | str) -> _Pair | Sequence[Message]:
        """The messages or texts of a row. Raises WrongChat."""
        if isinstance(values, str):
            raise WrongChat("is a text alone, no row with keys")
        settings = self.settings
        if (
            settings.rows == "chats"
            and settings.messages not in values
            and {settings.prompt, settings.answer} <= {*values}
        ):
            raise WrongChat(f'has {shown(settings.prompt)} and {shown(settings.answer)}; set data.rows = "pairs"')
        if settings.rows == "chats":
            return _messages(values, settings.messages, "messages_key")
        prompt, answer = (
            _present(values, settings.prompt, "prompt_key"),
            _present(values, settings.answer, "answer_key"),
        )
        if isinstance(prompt, str) and isinstance(answer, str):
            return _Pair(prompt, answer)
        if isinstance(prompt, str) != isinstance(answer, str):
            told = " and ".join(
                f"{shown(key)} is {shown(value)}"
                for key, value in ((settings.prompt, prompt), (settings.answer, answer))
            )
            raise WrongChat(f"{told}; both are texts, or both lists of messages")
        before = [
            one | {"weight": 0} if one.get("role") == ANSWERS else one
            for one in _messages(values, settings.prompt, "prompt_key")
        ]
        return [*before, *_messages(values, settings.answer, "answer_key")]

    def _marked(self, one: Rendered | _Pair) -> bytes:
        if isinstance(one, _Pair):
            if not one.answer:
                return b""
            parts, stop = [(0, one.prompt), (1, one.answer)], STOP
        else:
            ends = [0, *(end for span in one.answers for end in span), len(one.text)]
            texts = (one.text[a:b] for a, b in pairwise(ends))
            parts, stop = [(number % 2, text) for number, text in enumerate(texts)], b""
        if self.settings.loss == "all":
            parts = [(1, "".join(text for _, text in parts))]
        coded = ((counts, utf8(text)) for counts, text in parts)
        return b"".join(BEGIN + text + END if counts else text for counts, text in coded) + stop


@dataclass(frozen=True)
class _Pair:
    """Two texts."""

    prompt: str
    answer: str


def _present(values: Mapping[str, Any], key: str, setting: str) -> Any:
    """What a row has under a key, which a setting of ``[data]`` names. Raises WrongChat."""
    if values.get(key) is None:
        names = ", ".join(shown(one) for one in list(values)[:12] if values[one] is not None) or "nothing"
        raise WrongChat(f"has no {shown(key)}, but {names}; name its key with data.{setting}")
    return values[key]


def _messages(values: Mapping[str, Any], key: str, setting: str) -> list[dict[str, Any]]:
    """The messages of a row, each with a role. Raises WrongChat."""
    given = _present(values, key, setting)
    if isinstance(given, str):  # tables without lists
        given = _parsed(given, key)
    if not isinstance(given, list) or not given:
        raise WrongChat(f"{shown(key)} is {shown(given)}, no list of messages")
    return [
        _message(one, f"message {number + 1} of {shown(key)}") for number, one in enumerate(cast("list[Any]", given))
    ]


def _message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise WrongChat(f"{where} is {shown(given)}, no table with a role and a content")
    message = cast("dict[str, Any]", given)
    if message.get("role") is None and isinstance(message.get("from"), str):
        who = cast("str", message["from"])
        message = {"role": ROLES.get(who, who), "content": message.get("value")}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise WrongChat(f"{where} has the role {shown(role)}, no text")
    if content is None and not message.get("tool_calls"):
        raise WrongChat(f"{where} has no content")
    if content is not None and not isinstance(content, str | list):
        raise WrongChat(f"{where} has the content {shown(content)}, neither a text nor a list")
    if message.get("weight") not in (None, 0, 1):
        raise WrongChat(f"{where} has the weight {shown(message['weight'])}, and it is 0 or 1")
    return {key: value for key, value in message.items() if value is not None}


def _parsed(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise WrongChat(f"{shown(key)} is {shown(text)}, neither a list nor JSON of one") from None


@dataclass(frozen=True)
class AnswerTokenizer:
    """A tokenizer of marked texts: the tokens of ``plain``, and ``MARK`` on those that have a character of an
    answer, which is transformers' rule for its masks."""

    plain: Tokenizer

    @property
    def path(self) -> Path | str:
        """The plain one's file; empty for bytes."""
        return self.plain.path if isinstance(self.plain, FileTokenizer) else ""

    @property
    def vocab(self) -> int:
        """One more than the largest id, marked."""
        return MARK + self.plain.vocab

    @property
    def end_of_text(self) -> int:
        """Unmarked."""
        return self.plain.end_of_text

    @property
    def fingerprint(self) -> str:
        """Of the plain one."""
        return f"answers-1-{self.plain.fingerprint}"

    def encode(self, text: bytes | str) -> np.ndarray:
        """One text."""
        return self.encode_many([text if isinstance(text, bytes) else utf8(text)])[0]

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Ids, int64 [tokens], those of answers marked."""
        parsed = [_unmarked(text) for text in texts]
        encoded = self.plain.encode_offsets([text for text, _, _ in parsed])
        return [
            self._counted(ids, offsets, spans, stops=stops)
            for (ids, offsets), (_, spans, stops) in zip(encoded, parsed, strict=True)
        ]

    def _counted(
        self, ids: np.ndarray, offsets: np.ndarray, spans: Sequence[tuple[int, int]], *, stops: bool
    ) -> np.ndarray:
        counts = np.zeros(len(ids), bool)
        for begin, end in spans:
            counts |= (offsets[:, 0] < end) & (offsets[:, 1] > begin)
        found = ids + MARK * counts
        return np.append(found, self.end_of_text + MARK) if stops else found

    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of the plain one."""
        return self.plain.encode_offsets(texts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text, without marks."""
        return self.plain.decode(unmarked(np.asarray(ids, np.int64)))


def unmarked(ids: np.ndarray) -> np.ndarray:
    """Ids without their marks."""
    return ids & (MARK - 1)


def _unmarked(marked: bytes) -> tuple[str, list[tuple[int, int]], bool]:
    """A text, where in it answers stand, and whether end-of-text follows."""
    stops = marked.endswith(STOP)
    text, spans = "", list[tuple[int, int]]()
    for number, part in enumerate(marked.removesuffix(STOP).replace(END, BEGIN).split(BEGIN)):
        begin, text = len(text), text + part.decode()
        if number % 2:
            spans.append((begin, len(text)))
    return text, spans, stops


Readers = Mapping[str, Chats]
"""How rows become texts, by ``data.rows``; rows that are texts have no entry."""


def readers_of(data: DataSection, tokenizer: Tokenizer) -> Readers:
    """Of all kinds of rows that a job's sources have. Raises DataError where chats have no template."""
    found = dict[str, Chats]()
    for kind in sorted(data.chat_rows):
        settings = ChatSettings(
            rows=kind, messages=data.messages_key, prompt=data.prompt_key, answer=data.answer_key,
            template=data.chat_template, loss=data.loss,
        )  # fmt: skip
        found[kind] = Chats.of(settings, tokenizer)
    return found
