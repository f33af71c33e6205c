"""Turn rows that hold chats, or prompts with answers, into texts in which answers are marked.

| ``data.rows`` | a row has | the text |
|---|---|---|
| ``chats`` | ``messages``: a list of ``role``, ``content`` (or ``from``, ``value``); ``tools`` | a chat |
| ``pairs`` | ``prompt`` and ``completion``: texts | prompt, completion, end-of-text |
| ``pairs`` | ``prompt`` and ``completion``: lists of messages | a chat; only the second list counts |

A marked text is bytes, with marks that UTF-8 never contains: begin of an answer, end of an answer,
end-of-text. So the preparation handles it like any other text; ``AnswerTokenizer`` reads the marks.
In the corpus a token of an answer is its id plus ``MARK``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from plait.core.base.errors import DataError
from plait.core.base.ignored_input import IgnoredInput
from plait.core.base.numbers import shown
from plait.core.job.settings import DataSection
from plait.train.data.chat_template import ChatTemplate, Rendered
from plait.train.data.kinds import utf8
from plait.train.data.messages import (
    ANSWERS,
    CALL,
    KNOWN,
    REASONING,
    InvalidChat,
    Message,
    MessageReader,
    parse_json,
    value_of,
)
from plait.train.data.rendering import Renderer
from plait.train.data.tokenizer import FileTokenizer, Tokenizer

BEGIN, END, STOP = b"\xff", b"\xfe", b"\xfd"
MARK = 1 << 31
READ_AS: Mapping[str, Sequence[str]] = dict.fromkeys(REASONING, REASONING[:2])
"""The names under which a template may read a message's key."""
NO_ANSWER, TOO_LONG = "chat(s) without an answer", "chat(s) of more than 6 MB"
MOST_BYTES = 6 << 20
SPLIT = (
    "chat(s) became a text for each answer, since the template renders the turns before an answer differently once "
    "more turns follow"
)
ENDLESS = (
    "chat(s) have answers that end with no special token, and a model that learns no end never stops: have the chat "
    "template write the token that ends a turn, inside {% generation %} if it uses that"
)
UNREAD = ("system", "documents", "functions", "chat_template_kwargs")
"""Keys of rows that other programs pass to chat templates."""
READ = ("role", "content", "weight", "train", "tool_calls", CALL, *REASONING)
"""Keys of messages that are read, or reported by name."""


@dataclass(frozen=True, kw_only=True)
class ChatSettings:
    """Settings of reading rows. template: a template file, instead of the tokenizer's own. loss:
    with ``all`` every token counts like a token of an answer."""

    rows: Literal["chats", "pairs"]
    messages: str = "messages"
    prompt: str = "prompt"
    answer: str = "completion"
    template: str | None = None
    loss: Literal["answers", "all"] = "answers"


@dataclass
class Chats:
    """A converter of one job's rows to texts. renderer: of the chat template. remarks: counts of
    remarks for the user."""

    settings: ChatSettings
    renderer: Renderer | None
    remarks: Counter[str] = field(default_factory=Counter[str])

    @staticmethod
    def of(settings: ChatSettings, tokenizer: Tokenizer) -> Chats:
        """Return a converter with the template of a tokenizer. Raises DataError for chats without a
        template."""
        instead = None if settings.template is None else Path(settings.template)
        path, special = None, ()
        if isinstance(tokenizer, FileTokenizer):
            path, special = tokenizer.path, tokenizer.special
        try:
            template = ChatTemplate.of_tokenizer(path, special, instead=instead)
        except DataError:
            if settings.rows == "chats":
                raise
            template = None
        return Chats(settings, template and Renderer(template))

    @property
    def template(self) -> ChatTemplate | None:
        """The template of the job's chats; None without one."""
        return self.renderer and self.renderer.template

    @property
    def ends(self) -> list[str]:
        """The special tokens that end the answer to a single question; empty if the template writes
        none."""
        assert self.renderer
        try:
            (found,) = self.renderer.rendered(({"role": "user", "content": "a"}, {"role": ANSWERS, "content": "b"}))
        except (InvalidChat, ValueError):
            return []
        begin, end = found.answers[-1]
        return [token for token in self.renderer.template.special if found.text[begin:end].endswith(token)]

    @property
    def identity(self) -> str:
        """A string of all settings that decide the texts, apart from the date."""
        return repr((self.settings, self.template and self.template.identity))

    @cached_property
    def _reader(self) -> MessageReader:
        return MessageReader(bool(self.template and "tool_calls" in self.template.source), remarks=self.remarks)

    def lines(self) -> list[str]:
        """Return the remarks for the user, as lines."""
        found = [f"{count:,} {remark}" for remark, count in (+self.remarks).most_common()]
        for role, count in self._reader.roles.items():
            if role not in KNOWN:
                found.append(f"{count:,} message(s) have the role {shown(role)}; answers are those of {shown(ANSWERS)}")
        if self.template and self.template.dated:
            found.append("the chat template may write today's date")
        return found

    @property
    def without_answers(self) -> str:
        """The message for rows without any answer."""
        roles = ", ".join(f"{shown(role)} ({count:,})" for role, count in self._reader.roles.most_common(12))
        if not roles:
            return f"no row has an answer to train on: a text under {shown(self.settings.answer)}"
        return (
            f"no row has an answer to train on: a message of the role {shown(ANSWERS)} whose weight is not 0; its "
            f"messages are of {roles}"
        )

    def texts(self, values: Mapping[str, Any] | str, where: str, over: IgnoredInput) -> Iterator[bytes]:
        """Yield the marked texts of a row. where: file and line. over: counts what is passed over.
        Raises DataError for an invalid chat."""
        try:
            row = self._read(values)
            rendered = [row] if isinstance(row, _Pair) else self._render(row, values)
        except InvalidChat as error:
            raise DataError(f"{where}: {error}") from None
        found = [self._marked(one) for one in rendered]
        if not any(BEGIN in one for one in found):
            over.note(NO_ANSWER, where)
            return
        if not isinstance(row, _Pair):
            for key in self._unwritten(row, values):
                over.note(f"{key} of chats, which the chat template does not write", where)
        self._remark([one for one in rendered if isinstance(one, Rendered)])
        for one in found:
            if len(one) > MOST_BYTES:
                over.note(TOO_LONG, where)
            else:
                yield one

    def check(self, values: Mapping[str, Any] | str, where: str) -> None:
        """Raise DataError for a row that is no chat, or no pair; nothing is rendered."""
        try:
            self._read(values)
        except InvalidChat as error:
            raise DataError(f"{where}: {error}") from None

    def _remark(self, rendered: Sequence[Rendered]) -> None:
        """Count the remarks on the texts of a chat."""
        self.remarks.update(one for text in rendered[:1] for one in text.remarks)
        self.remarks[SPLIT] += len(rendered) > 1
        self.remarks[ENDLESS] += not all(self._stops(one) for one in rendered)

    def _stops(self, one: Rendered) -> bool:
        """Return True if each answer ends with a special token that counts in the loss."""
        assert self.template
        ends = tuple({*self.template.special, *filter(None, [self.template.tokens.get("eos_token")])})
        if self.settings.loss == "all":
            begins = [begin for begin, _ in one.answers]
            return all(any(end in one.text[a:b] for end in ends) for a, b in pairwise([*begins, len(one.text)]))
        return all(one.text[begin:end].rstrip().endswith(ends) for begin, end in one.answers)

    def _unwritten(self, messages: Sequence[Message], values: Mapping[str, Any] | str) -> list[str]:
        """Return the parts of a chat that the template never names: tools, tool calls, reasoning,
        keys for other programs."""
        assert self.template and isinstance(values, Mapping)
        found = [key for key in ("tool_calls", CALL, *REASONING) if any(one.get(key) for one in messages)]
        found += ["tools"] * bool(values.get("tools"))
        found += [key for key in {key: 0 for one in messages for key in one} if key not in (*READ, *found)]
        names = {key: READ_AS.get(key, (key,)) for key in found}
        source = self.template.source
        unwritten = [key for key in found if not any(re.search(rf"\b{name}\b", source) for name in names[key])]
        return unwritten + [key for key in UNREAD if values.get(key)]

    def _render(self, messages: Sequence[Message], values: Mapping[str, Any] | str) -> list[Rendered]:
        if self.renderer is None:
            raise InvalidChat("is a list of messages, and there is no chat template beside the tokenizer")
        assert isinstance(values, Mapping)
        tools = values.get("tools")
        return self.renderer.rendered(
            messages, (parse_json(tools, "tools") if isinstance(tools, str) else tools) or None
        )

    def _read(self, values: Mapping[str, Any] | str) -> _Pair | Sequence[Message]:
        """Return the messages or texts of a row. Raises InvalidChat."""
        if isinstance(values, str):
            raise InvalidChat("is plain text, not a row with keys")
        settings = self.settings
        if settings.rows == "chats":
            if settings.messages not in values and {settings.prompt, settings.answer} <= {*values}:
                raise InvalidChat(f'has {shown(settings.prompt)} and {shown(settings.answer)}; set data.rows = "pairs"')
            return self._reader.messages(values, settings.messages, "messages_key")
        prompt, answer = (
            value_of(values, settings.prompt, "prompt_key"),
            value_of(values, settings.answer, "answer_key"),
        )
        if isinstance(prompt, str) and isinstance(answer, str):
            return _Pair(prompt, answer)
        if isinstance(prompt, str) != isinstance(answer, str):
            told = " and ".join(
                f"{shown(key)} is {shown(value)}"
                for key, value in ((settings.prompt, prompt), (settings.answer, answer))
            )
            raise InvalidChat(f"{told}; both are texts, or both lists of messages")
        before = [
            one | {"weight": 0} if one.get("role") == ANSWERS else one
            for one in self._reader.messages(values, settings.prompt, "prompt_key")
        ]
        return [*before, *self._reader.messages(values, settings.answer, "answer_key")]

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
    """A prompt and its answer, as texts."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class AnswerTokenizer:
    """A tokenizer for marked texts: the tokens of ``plain``, with ``MARK`` added to each token that
    has a character of an answer (the rule of transformers' assistant masks)."""

    plain: Tokenizer

    @property
    def path(self) -> Path | str:
        """The plain tokenizer's file; empty for the byte tokenizer."""
        return self.plain.path if isinstance(self.plain, FileTokenizer) else ""

    @property
    def vocab(self) -> int:
        """One more than the largest marked id."""
        return MARK + self.plain.vocab

    @property
    def end_of_text(self) -> int:
        """The end-of-text id, unmarked."""
        return self.plain.end_of_text

    @property
    def fingerprint(self) -> str:
        """The plain tokenizer's fingerprint, with a prefix."""
        return f"answers-2-{self.plain.fingerprint}"

    def encode(self, text: bytes | str) -> np.ndarray:
        """Return the marked ids of one text, int64 [tokens]."""
        return self.encode_many([text if isinstance(text, bytes) else utf8(text)])[0]

    def encode_many(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each text, int64 [tokens], with marks on the tokens of answers."""
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
        """Return the plain tokenizer's ids and offsets."""
        return self.plain.encode_offsets(texts)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ``ids``, without marks."""
        return self.plain.decode(unmarked(np.asarray(ids, np.int64)))


def unmarked(ids: np.ndarray) -> np.ndarray:
    """Return ids without their marks."""
    return ids & (MARK - 1)


def _unmarked(marked: bytes) -> tuple[str, list[tuple[int, int]], bool]:
    """Return the text without marks, the character ranges of its answers, and True if end-of-text
    follows."""
    stops = marked.endswith(STOP)
    text, spans = "", list[tuple[int, int]]()
    for number, part in enumerate(marked.removesuffix(STOP).replace(END, BEGIN).split(BEGIN)):
        begin, text = len(text), text + part.decode()
        if number % 2:
            spans.append((begin, len(text)))
    return text, spans, stops


Readers = Mapping[str, Chats]
"""Converters of rows to texts, by ``data.rows``; rows of plain text have no entry."""


def readers_of(data: DataSection, tokenizer: Tokenizer) -> Readers:
    """Return the converters for all kinds of rows in a job's sources. Raises DataError for chats
    without a template."""
    found = dict[str, Chats]()
    for kind in sorted(data.chat_rows):
        settings = ChatSettings(
            rows=kind, messages=data.messages_key, prompt=data.prompt_key, answer=data.answer_key,
            template=data.chat_template, loss=data.loss,
        )  # fmt: skip
        found[kind] = Chats.of(settings, tokenizer)
    return found
