"""Chats as text: a tokenizer's own chat template, and which characters of a rendered chat are answers.

A template is a program in Jinja that comes with a model (transformers' documentation, "Chat templates",
https://huggingface.co/docs/transformers/chat_templating, read 2026-11). It is rendered as transformers
renders it: ``trim_blocks`` and ``lstrip_blocks``, loop controls, the functions ``raise_exception`` and
``strftime_now``, ``tojson`` that escapes nothing, special tokens by their names, keys without a value left
out. It runs in jinja2's sandbox for values that cannot be changed, within the limits below; and in a process
with others (``plait.train.data.rendering``).

Answers are found in one of three ways, in this order:

- the template marks them with ``{% generation %}``: these characters;
- rendering is additive: what a chat renders to, up to before an answer and with the prompt for one, begins
  what it renders to with the answer, and this begins the whole. The answer is what is between. White space
  behind its last special token is no part of it;
- else the chat becomes one text for each answer, what the template shows when that answer is due, and only
  this answer counts (templates that leave out earlier reasoning, for example).
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
from plait.core.base.numbers import shown
from plait.train.data.messages import ANSWERS, REASONING, Message, WrongChat
from plait.train.data.template_forms import fit, label

if TYPE_CHECKING:
    from jinja2 import Environment, Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

TEMPLATE, SETTINGS, TOKENS = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LARGEST = 1 << 20
"""Bytes of a template; the longest public ones have 30,000."""
MOST_TEXT = 256 << 20
"""Characters that a chat is rendered to."""
MOST_WORK = 2_000_000
"""Numbers that ``range`` counts, and characters that ``*`` makes, in one rendering."""


@dataclass(frozen=True)
class Rendered:
    """A chat as text. answers: from which to which character, rising. remarks: on forms that were changed."""

    text: str
    answers: tuple[tuple[int, int], ...]
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class ChatTemplate:
    """One, with the special tokens that it may name. special: all that a tokenizer has."""

    source: str
    where: str
    tokens: Mapping[str, str]
    special: tuple[str, ...] = ()

    @staticmethod
    def beside(tokenizer: Path | None, special: Sequence[str] = (), *, instead: Path | None = None) -> ChatTemplate:
        """A tokenizer's: of ``chat_template.jinja``, else of ``tokenizer_config.json``, in its folder. None:
        bytes, which have none. instead: a file with another. Raises DataError where there is none."""
        if tokenizer is None:
            if instead is None:
                raise DataError(
                    "bytes have no chat template; name the tokenizer of a model for chats (data.tokenizer), or a file "
                    "with a template (data.chat_template)"
                )
            return ChatTemplate(_read(instead), str(instead), {}, tuple(special))
        settings = _table(tokenizer.with_name(SETTINGS))
        given = {**_table(tokenizer.with_name(TOKENS)), **settings}
        tokens = {name: text for name in NAMED if (text := _content(given.get(name))) is not None}
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
        """All that decides what a chat renders to, apart from the day."""
        return self.source, sorted(self.tokens.items()), self.special

    @property
    def dated(self) -> bool:
        """Whether it may write the day on which it is rendered."""
        return "strftime_now" in self.source

    @cached_property
    def _compiled(self) -> tuple[Template, _Work]:
        from jinja2 import TemplateError

        work = _Work()
        try:
            return _environment(work).from_string(self.source), work
        except (TemplateError, RecursionError) as error:
            raise DataError(
                f"{self.where}: not a chat template ({error or type(error).__name__}); correct it"
            ) from None

    def render(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        """The text of a chat; prompt: with what asks for an answer behind it. Raises WrongChat."""
        return self._marked(messages, tools, prompt=prompt).replace(BEGIN, "").replace(END, "")

    def _marked(self, messages: Sequence[Message], tools: Any, *, prompt: bool) -> str:
        """With marks around what the template says is generated."""
        from jinja2 import TemplateError

        template, work = self._compiled
        work.done, size, parts = 0, 0, list[str]()
        values: dict[str, Any] = {**self.tokens, "messages": [_plain(one) for one in messages], "tools": tools}
        try:
            for part in template.generate(**values, documents=None, add_generation_prompt=prompt):
                size += len(part)
                if size > MOST_TEXT:
                    raise WrongChat(f"the template makes more than {MOST_TEXT:,} characters of it")
                parts.append(part)
        except TemplateError as error:
            raise WrongChat(f"the template refuses it: {error.message or type(error).__name__}") from None
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise WrongChat(f"the template cannot render it ({type(error).__name__}: {error})") from None
        return "".join(parts)

    def rendered(self, messages: Sequence[Message], tools: Any = None) -> list[Rendered]:
        """The texts of a chat, one unless rendering is not additive, each with at least one answer. Answers
        with ``weight`` 0 do not count. Raises WrongChat."""
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
        """What stands between marks is an answer, if it belongs to a message that is due."""
        text, spans = _spans(whole)
        if sum(one.get("role") == ANSWERS for one in messages) > len(due):
            found = (self._owners(messages, tools, empty=empty) for empty in (True, False))
            owners = next((one for one in found if len(one) == len(spans)), None)
            if owners is None:
                raise WrongChat(
                    "the template marks answers, and which of them have weight 0 cannot be told; give it without "
                    "{% generation %}"
                )
            spans = [span for span, owner in zip(spans, owners, strict=True) if owner in due]
        return Rendered(text, tuple((begin, end) for begin, end in spans if begin < end))

    def _owners(self, messages: Sequence[Message], tools: Any, *, empty: bool) -> list[int]:
        """Return for each mark the message whose text stands in it or last before it; behind texts of other
        roles, the next answer. For that, texts (also those that are empty) have their message's number behind
        them; nothing where the template refuses this."""
        last, owners = -1, list[int]()
        labelled = [label(one, f"{LABEL}{at:06}", empty=empty) for at, one in enumerate(messages)]
        try:
            whole = self._marked(labelled, tools, prompt=False)
        except WrongChat:
            return []
        for part in re.split(f"({LABEL}[0-9]{{6}}|{END})", whole):
            if part.startswith(LABEL):
                last = int(part.removeprefix(LABEL))
            elif part == END:
                later = (at for at in range(max(last, 0), len(messages)) if messages[at].get("role") == ANSWERS)
                owners.append(next(later, -1))
        return owners

    def _answer(self, messages: Sequence[Message], tools: Any, at: int) -> Rendered:
        """The chat up to an answer, and where this stands."""
        before = self.render(messages[:at], tools) if at else ""
        try:
            asked = self.render(messages[:at], tools, prompt=True)
        except WrongChat:
            if at:
                raise
            asked = ""  # many templates look at the first message
        text = self.render(messages[: at + 1], tools)
        begin = _common(asked, text)
        if begin < len(before) or begin >= len(text):
            raise WrongChat(
                f"the template renders what comes before message {at + 1} otherwise with it than without, so "
                "where it begins cannot be told; mark answers in the template with {% generation %}"
            )
        return Rendered(text, ((begin, self._end(text, begin)),))

    def _end(self, text: str, begin: int) -> int:
        """Behind an answer's last special token, if nothing but white space follows."""
        stripped = text.rstrip()
        ends = len(stripped) > begin and any(stripped.endswith(token) for token in self.special)
        return len(stripped) if ends else len(text)


def _common(one: str, other: str) -> int:
    """Characters with which both begin."""
    if other.startswith(one):
        return len(one)
    return next(at for at, (a, b) in enumerate(zip(f"{one}\0", f"{other}\1", strict=False)) if a != b)


def _spans(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """A text without marks, and what stood between each two of them."""
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


def _table(path: Path) -> dict[str, Any]:
    """The settings in a file of JSON; none where there is no file."""
    try:
        return read_table(path) if kind_of(path) else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON settings ({reason_of(error)}); repair or remove it") from None


def _read(path: Path) -> str:
    try:
        return contents_within(path, LARGEST).decode()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a chat template: {reason_of(error)}; correct it") from None


def _content(token: Any) -> str | None:
    """The text of a special token, which stands there as such or in a table."""
    found = cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates get it."""
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in REASONING if key in found), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


# ---- the sandbox ----

_NONCE = secrets.token_hex(8)
BEGIN, END = f"\ue000{_NONCE}b", f"\ue000{_NONCE}e"
"""Marks of an answer in what is rendered; nobody who writes a chat can know them."""
LABEL = f"z{_NONCE}"
"""What stands before a message's number in its own texts."""


class _Work:
    """What a rendering has done. Raises WrongChat where it is too much."""

    done = 0

    def add(self, amount: int) -> None:
        """Count some."""
        self.done += amount
        if self.done > MOST_WORK:
            raise WrongChat(f"the template counts or repeats more than {MOST_WORK:,} times for it")


def _environment(work: _Work) -> Environment:
    """Where templates are rendered: jinja2 3.1.6 or newer, whose sandbox has no known way out."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}``."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> Node:
            """The block's text, between marks."""
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("marked")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def marked(self, caller: Callable[[], str]) -> str:
            """With marks."""
            return BEGIN + caller() + END

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """Texts and numbers of a sensible size."""
            if operator == "*":
                work.add(max(_amount(left, right), _amount(right, left)))
            elif operator == "**" or (isinstance(left, str) and re.search(r"\d{4}|\*", left)):
                raise WrongChat(f"the template computes {operator} of {shown(left)}")
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, called: Any, *given: Any, **named: Any) -> Any:
            """Nothing makes a text of a length that is given as a number."""
            work.add(max((abs(one) for one in (*given, *named.values()) if isinstance(one, int)), default=1))
            return super().call(context, called, *given, **named)

    def counted(*bounds: int) -> range:
        numbers = range(*bounds)
        work.add(len(numbers))
        return numbers

    def measured(function: Callable[..., Any]) -> Callable[..., Any]:
        def measure(*given: Any, **named: Any) -> Any:
            work.add(max((abs(one) for one in (*given, *named.values()) if isinstance(one, int)), default=1))
            return function(*given, **named)

        return measure

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    for name in ("center", "indent", "format"):
        environment.filters[name] = measured(environment.filters[name])
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now, "range": counted}
    environment.globals.pop("lipsum", None)
    return environment


def _amount(text: Any, times: Any) -> int:
    """Characters or values of a repeated one."""
    repeats = isinstance(text, str | list | tuple) and isinstance(times, int)
    return len(text) * max(times, 0) if repeats else 1


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  (the day where the user is)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
