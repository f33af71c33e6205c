"""Render chats as text with a tokenizer's chat template, and locate the answers in the text.

A template is a Jinja program that ships with a model (transformers' documentation, "Chat
templates", https://huggingface.co/docs/transformers/chat_templating, read 2026-11). It is rendered
as in transformers: ``trim_blocks`` and ``lstrip_blocks``, loop controls, the functions
``raise_exception`` and ``strftime_now``, ``tojson`` that escapes nothing, special tokens by their
names, keys without a value left out. It runs in jinja2's sandbox for immutable values, in a process
with limits of time and memory (``plait.train.data.rendering``).

Answers are located in one of three ways, in this order:

- The template marks them with ``{% generation %}``: these characters.
- Rendering is additive: the chat before an answer, with the generation prompt, renders to a prefix of the
  chat with the answer, and that to a prefix of the whole chat. The answer is the difference, without
  white space after its last special token.
- Otherwise the chat becomes one text for each answer: the chat up to this answer, as the template renders it.
  Only this answer counts (needed for templates that leave out earlier reasoning, for example).
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from plait.core.base.codec.json_text import read_table
from plait.core.base.errors import DataError
from plait.core.base.files import contents_within, kind_of, reason_of
from plait.train.data.messages import ANSWERS, REASONING, InvalidChat, Message, fit, label

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

TEMPLATE, SETTINGS, TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LARGEST = 1 << 20
"""Bytes of a template, at most; the longest public ones have 30,000."""
MOST_TEXT = 256 << 20
"""Characters of a rendered chat, at most."""


def settings_in(file: Path) -> dict[str, Any]:
    """Return the settings in a JSON file; empty if there is no file. Raises DataError."""
    try:
        return read_table(file) if kind_of(file) else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read as JSON settings ({reason_of(error)}); repair or remove it") from None


def spelled(token: Any) -> Any:
    """Return the text of a special token, which is a string or a table with ``content``."""
    return cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token


@dataclass(frozen=True)
class Rendered:
    """A chat as text. answers: begin and end of each answer in characters, rising. remarks: on
    forms that were changed."""

    text: str
    answers: tuple[tuple[int, int], ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, with the special tokens that it may name. special: all special tokens of the
    tokenizer."""

    source: str
    where: str
    tokens: Mapping[str, str]
    special: tuple[str, ...] = ()

    @staticmethod
    def of_tokenizer(
        tokenizer: Path | None, special: Sequence[str] = (), *, instead: Path | None = None
    ) -> ChatTemplate:
        """Return a tokenizer's template: from ``chat_template.jinja``, else from
        ``tokenizer_config.json``, in its folder. tokenizer: its file; None for the byte tokenizer,
        which has no template. instead: a template file to use instead. Raises DataError if there is
        no template."""
        if tokenizer is None:
            if instead is None:
                raise DataError(
                    "bytes have no chat template; name the tokenizer of a model for chats (data.tokenizer), or a file "
                    "with a template (data.chat_template)"
                )
            return ChatTemplate(_read(instead), str(instead), {}, tuple(special))
        settings = settings_in(tokenizer.with_name(SETTINGS))
        given = {**settings_in(tokenizer.with_name(TOKENS)), **settings}
        tokens = {name: text for name in NAMED if isinstance(text := spelled(given.get(name)), str)}
        file = instead or tokenizer.with_name(TEMPLATE)
        if instead or kind_of(file) == "file":
            return ChatTemplate(_read(file), str(file), tokens, tuple(special))
        where = tokenizer.with_name(SETTINGS)
        source = settings.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {str(one.get("name")): one.get("template") for one in source if isinstance(one, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise DataError(
                f"{where}: has no chat_template, and there is no {TEMPLATE} beside it; take the folder of a model for "
                "chats, or name a file with a template (data.chat_template)"
            )
        return ChatTemplate(source, str(where), tokens, tuple(special))

    @property
    def identity(self) -> tuple[object, ...]:
        """All values that decide the rendered text, apart from the date."""
        return self.source, sorted(self.tokens.items()), self.special

    @property
    def dated(self) -> bool:
        """True if the template may write the current date."""
        return "strftime_now" in self.source

    @cached_property
    def _compiled(self) -> Template:
        from jinja2 import TemplateError

        try:
            return _environment().from_string(self.source)
        except (TemplateError, RecursionError) as error:
            raise DataError(
                f"{self.where}: not a chat template ({error or type(error).__name__}); correct it"
            ) from None

    def render(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """Return the text of a chat. prompt: append the generation prompt. Raises InvalidChat."""
        return self._marked(messages, tools, prompt=prompt).replace(BEGIN, "").replace(END, "")

    def _marked(self, messages: Sequence[Message], tools: Any, *, prompt: bool) -> str:
        """Return the text, with marks around the ranges in ``{% generation %}``."""
        from jinja2 import TemplateError

        values: dict[str, Any] = {**self.tokens, "messages": [_plain(one) for one in messages], "tools": tools}
        try:
            text = self._compiled.render(**values, documents=None, add_generation_prompt=prompt)
        except TemplateError as error:
            raise InvalidChat(f"the template refuses it: {error.message or type(error).__name__}") from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise InvalidChat(f"the template cannot render it ({type(error).__name__}: {error})") from None
        if len(text) > MOST_TEXT:
            raise InvalidChat(f"the template makes more than {MOST_TEXT:,} characters of it")
        return text

    def rendered(self, messages: Sequence[Message], tools: Any = None) -> list[Rendered]:
        """Return the texts of a chat: one if rendering is additive, else one per answer; each has
        at least one answer. Answers with ``weight`` 0 do not count. Raises InvalidChat."""
        due = [at for at, one in enumerate(messages) if one.get("role") == ANSWERS and one.get("weight", 1)]
        if not due:
            return []
        messages, remarks = fit(messages, lambda form: self.render(form, tools), self.source)
        whole = self._marked(messages, tools, prompt=False)
        if re.search(r"{%[-+]?\s*generation\b", self.source):
            return [replace(self._by_marks(whole, messages, tools, due), remarks=remarks)]
        texts = [replace(self._answer(messages, tools, at), remarks=remarks) for at in due]
        if all(whole.startswith(one.text[: one.answers[0][1]]) for one in texts):
            return [Rendered(whole, tuple(span for one in texts for span in one.answers), remarks)]
        return texts

    def _by_marks(self, whole: str, messages: Sequence[Message], tools: Any, due: Sequence[int]) -> Rendered:
        """Return the text with the marked ranges as answers, restricted to the messages in
        ``due``."""
        text, spans = _spans(whole)
        if sum(one.get("role") == ANSWERS for one in messages) > len(due):
            found = (self._owners(messages, tools, empty=empty) for empty in (True, False))
            owners = next((one for one in found if len(one) == len(spans)), None)
            if owners is None:
                raise InvalidChat(
                    "the template marks answers, but Plait cannot determine which of them have weight 0; "
                    "use a template without {% generation %}"
                )
            spans = [span for span, owner in zip(spans, owners, strict=True) if owner in due]
        return Rendered(text, tuple((begin, end) for begin, end in spans if begin < end))

    def _owners(self, messages: Sequence[Message], tools: Any, *, empty: bool) -> list[int]:
        """Return for each marked range the index of the message that it belongs to: of the last
        message whose text begins before the range's end, or of the next answer after it, if that
        message has another role. To find out, every text (with ``empty``, also an empty one) is
        rendered with its message's number appended. Return an empty list if the template refuses
        that."""
        last, owners = -1, list[int]()
        labelled = [label(one, f"{LABEL}{at:06}", empty=empty) for at, one in enumerate(messages)]
        try:
            whole = self._marked(labelled, tools, prompt=False)
        except InvalidChat:
            return []
        for part in re.split(f"({LABEL}[0-9]{{6}}|{END})", whole):
            if part.startswith(LABEL):
                last = int(part.removeprefix(LABEL))
            elif part == END:
                later = (at for at in range(max(last, 0), len(messages)) if messages[at].get("role") == ANSWERS)
                owners.append(next(later, -1))
        return owners

    def _answer(self, messages: Sequence[Message], tools: Any, at: int) -> Rendered:
        """Return the chat up to and including message ``at``, with this answer's range. Raises
        InvalidChat."""
        before = self.render(messages[:at], tools) if at else ""
        try:
            asked = self.render(messages[:at], tools, prompt=True)
        except InvalidChat:
            if at:
                raise
            asked = ""  # many templates need a first message
        text = self.render(messages[: at + 1], tools)
        begin = _common(asked, text)
        if begin < len(before) or begin >= len(text):
            raise InvalidChat(
                f"the template renders what comes before message {at + 1} otherwise with it than without, so "
                "where it begins cannot be told; mark answers in the template with {% generation %}"
            )
        return Rendered(text, ((begin, self._end(text, begin)),))

    def _end(self, text: str, begin: int) -> int:
        """Return the end of an answer's last special token, if only white space follows; else the
        end of the text."""
        stripped = text.rstrip()
        ends = len(stripped) > begin and any(stripped.endswith(token) for token in self.special)
        return len(stripped) if ends else len(text)


def _common(one: str, other: str) -> int:
    """Return the length of the common prefix in characters."""
    if other.startswith(one):
        return len(one)
    return next(at for at, (a, b) in enumerate(zip(f"{one}\0", f"{other}\1", strict=False)) if a != b)


def _spans(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Return the text without generation marks, and the (begin, end) ranges in characters that were
    marked."""
    text, spans, begin = "", list[tuple[int, int]](), 0
    for part in re.split(f"({BEGIN}|{END})", marked):
        if part == BEGIN:
            begin = len(text)
        elif part == END:
            spans.append((begin, len(text)))
        else:
            text += part
    return text, spans


# ---- reading ----


def _read(path: Path) -> str:
    try:
        return contents_within(path, LARGEST).decode()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a chat template: {reason_of(error)}; correct it") from None


def _plain(message: Message) -> dict[str, Any]:
    """Return a message in the form that templates expect."""
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in REASONING if key in found), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


# ---- the sandbox ----

_NONCE = secrets.token_hex(8)
BEGIN, END = f"\ue000{_NONCE}b", f"\ue000{_NONCE}e"
"""Marks of an answer in the rendered text; random, so that no chat can contain them."""
LABEL = f"z{_NONCE}"
"""The beginning of the tag with a message's number that is appended to a message's texts to locate
them."""


def _environment() -> Environment:
    """Return the environment to render templates in: jinja2 3.1.6 or newer, whose sandbox has no
    known escape."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block ``{% generation %}``."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> Node:
            """Return the block's text, between marks."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("marked")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def marked(self, caller: Callable[[], str]) -> str:
            """Return the text with marks around it."""
            return BEGIN + caller() + END

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  (the user's local date)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
