"""Forms in which a chat template writes what messages hold: contents as text or as parts, arguments of calls
as tables or as JSON text.

Templates differ. They leave out what they do not expect, or print it as Python or JSON spells it:
``[{'type': 'text', ...}]`` as a content, ``"{\\"city\\": ...}"`` as arguments. That would be trained on. So a
chat is rendered in the forms that it can have; the first of which the template writes most is chosen, and
what it still leaves out or prints so is told.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from plait.core.base.numbers import shown
from plait.train.data.messages import REASONING, Message, WrongChat

Render = Callable[[Sequence[Message]], str]
Form = tuple[Sequence[Message], tuple[str, ...]]
"""Messages, and remarks on what was changed."""
TAG = f"{secrets.randbits(64):020}"
"""Digits, which no filter changes."""
TEXT_PARTS = (None, "text", "input_text", "output_text")
MEDIA = ("image", "audio", "video", "file")
JOINED = "chat(s) have contents in parts, which were joined, since the chat template writes texts alone"
PARTED = "chat(s) have contents as text, which the chat template got in parts, since it writes parts alone"
LOST = "chat(s) have messages whose content the chat template does not write"
TABLES = "chat(s) have arguments of tool calls as JSON text, which the chat template got as tables"
TEXTS = "chat(s) have arguments of tool calls as tables, which the chat template got as JSON text"
NONE = "chat(s) have calls of tools without arguments, which the chat template got as an empty table"
NO_TABLE = (
    "chat(s) have arguments of tool calls as text that is no JSON of a table, which the chat template got as it is"
)
PYTHON = "chat(s) have arguments of tool calls that the chat template quotes, or writes as Python spells them"


def fit(messages: Sequence[Message], render: Render, source: str) -> Form:
    """Return messages in the forms that a template writes. source: the template's text.

    Raises WrongChat for parts that are no text, and where the template takes no form.
    """
    filled = [_change_calls(_with_parts(one), _filled) for one in messages]
    empty = (NONE,) * (_arguments(filled) != _arguments(messages))
    messages, joined = _fit_contents(filled, lambda form: _in_any_arguments(form, render), source)
    messages, changed = _fit_arguments(messages, render)
    return messages, (*empty, *joined, *changed)


def label(message: Message, tag: str, *, empty: bool = False) -> Message:
    """Put a tag behind every text of the content and of the reasoning, behind the names of the tools that it
    calls where it has no such text. empty: behind empty texts, too."""
    texts = {key: text for key in ("content", *REASONING) if isinstance(text := message.get(key), str)}
    found: dict[str, Any] = {key: text + tag for key, text in texts.items() if text or empty}
    if _has_parts(message):
        found["content"] = [one | {"text": one["text"] + tag} if _is_text(one) else one for one in message["content"]]
    elif not any(texts.values()):
        message = _change_calls(message, lambda one: one | {"name": f"{one.get('name')}{tag}"})
    return {**message, **found}


def _best(forms: Sequence[Form], score: Callable[[Sequence[Message]], int], most: int) -> tuple[int, Form]:
    """The first form with the highest score, at most ``most``. Raises the first WrongChat where all are
    refused."""
    scores, refusals = list[tuple[int, Form]](), list[WrongChat]()
    for form in forms:
        try:
            scores.append((score(form[0]), form))
        except WrongChat as wrong:
            refusals.append(wrong)
        if scores and scores[-1][0] >= most:
            break
    if not scores:
        raise refusals[0]
    return max(scores, key=lambda one: one[0])


# ---- contents ----


def _fit_contents(messages: Sequence[Message], render: Render, source: str) -> Form:
    """Contents in parts are joined, and texts become parts, where the template prints them, refuses them or
    leaves them out."""
    in_parts = [(number, one["content"]) for number, one in enumerate(messages, 1) if _has_parts(one)]
    for number, parts in in_parts:
        _check_parts(parts, number, source)
    tagged = [{**one, **label({"content": one["content"]}, TAG)} if one.get("content") else one for one in messages]
    most = str([one.get("content") for one in tagged]).count(TAG)

    def texts(form: Sequence[Message]) -> int:
        text = render(form)
        if any(spelling in text for one in form if _has_parts(one) for spelling in _printed(one["content"])):
            raise WrongChat("the template prints contents in parts as Python or JSON spells them; write them as texts")
        return text.count(TAG)

    changes = {JOINED: _join} if in_parts and all(_is_text(part) for _, parts in in_parts for part in parts) else {}
    changes |= {PARTED: _part} if len(in_parts) < len(messages) else {}
    forms = [(tagged, ()), *(([change(one) for one in tagged], (remark,)) for remark, change in changes.items())]
    try:
        written, (_, remarks) = _best(forms, texts, most)
    except WrongChat:
        if in_parts:
            raise
        return messages, ()  # nothing to do with contents
    for remark in remarks:
        messages = [changes[remark](one) for one in messages]
    return messages, (*remarks, *(LOST,) * (written < most))


def _has_parts(message: Message) -> bool:
    return isinstance(message.get("content"), list)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)


def _check_parts(parts: Sequence[Any], number: int, source: str) -> None:
    """Raise WrongChat for a part of message ``number`` that is no text, unless the template names its type
    and that is no medium."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        named = isinstance(kind, str) and kind in source and not any(medium in kind for medium in MEDIA)
        if not _is_text(part) and (kind in TEXT_PARTS or not named):
            raise WrongChat(f"message {number} has {shown(part)} in its content, and Plait trains on texts alone")


def _join(message: Message) -> Message:
    return (
        {**message, "content": "".join(one["text"] for one in message["content"])} if _has_parts(message) else message
    )


def _part(message: Message) -> Message:
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def _with_parts(message: Message) -> Message:
    """The message, with texts among its parts as parts."""
    if not _has_parts(message):
        return message
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in message["content"]]
    return {**message, "content": parts}


def _printed(value: Any) -> list[str]:
    """How Python and JSON spell a value."""
    return [str(value), json.dumps(value), json.dumps(value, ensure_ascii=False)]


# ---- arguments of calls ----


def _fit_arguments(messages: Sequence[Message], render: Render) -> Form:
    """Arguments become tables where the template quotes or refuses JSON text, JSON text where it prints or
    refuses tables."""
    values = _arguments(messages)
    if not values:
        return messages, ()
    tables, texts = ([_change_arguments(one, change) for one in messages] for change in (_as_table, _as_text))
    forms: list[Form] = [(messages, ()), (tables, (TABLES,)), (texts, (TEXTS,))]
    contents = "\n".join(str(one.get("content")) for one in messages)

    def as_written(form: Sequence[Message], part: Callable[[Any], list[Any]] = lambda one: [one]) -> int:
        text = render(form)
        wrong = [spelling for one in _arguments(form) for value in part(one) for spelling in _misspellings(value)]
        return not any(text.count(spelling) > contents.count(spelling) for spelling in wrong)

    odd = (NO_TABLE,) * any(isinstance(one, str) and _as_table(one) is one for one in values)
    try:
        changed = [one for one in forms if one[0] is messages or _arguments(one[0]) != values]
        written, (messages, remarks) = _best(changed, as_written, 1)
        written = written and (not any(map(_inner, values)) or as_written(messages, _inner))
        return messages, (*remarks, *odd, *(PYTHON,) * (not written))
    except WrongChat as wrong:
        for other in ({}, "{}"):
            with suppress(WrongChat):
                render([_change_arguments(one, lambda _, other=other: other) for one in messages])
                problem = f"the template cannot render the arguments of a tool call, {shown(values[0])}"
                wrong = WrongChat(f"{problem}: {wrong}; write them as a table, or as JSON text of one")
        raise wrong from None


def _in_any_arguments(messages: Sequence[Message], render: Render) -> str:
    """The text that a template makes of messages, whichever form of arguments it takes. Raises the first
    WrongChat."""
    refusals = list[WrongChat]()
    for change in (lambda one: one, _as_table, _as_text)[: 3 if _arguments(messages) else 1]:
        try:
            return render([_change_arguments(one, change) for one in messages])
        except WrongChat as wrong:
            refusals.append(wrong)
    raise refusals[0]


def _misspellings(arguments: Any) -> list[str]:
    """Texts that a template writes for arguments only if it takes them to be of another form."""
    if isinstance(arguments, str):
        return [] if _as_table(arguments) is arguments else _printed(arguments)[1:]
    return [str(arguments)] if arguments and str(arguments) != json.dumps(arguments, ensure_ascii=False) else []


def _inner(arguments: Any) -> list[Any]:
    """The tables and lists in a table of arguments."""
    return [one for one in arguments.values() if isinstance(one, dict | list)] if isinstance(arguments, dict) else []


def _as_table(arguments: Any) -> Any:
    """The table that JSON text spells; what is no such text stays."""
    with suppress(TypeError, ValueError, RecursionError):
        if isinstance(found := json.loads(arguments), dict | list):
            return found
    return arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict | list) else arguments


def _filled(function: dict[str, Any]) -> dict[str, Any]:
    """With a table of arguments where there is none."""
    return function | {"arguments": {}} if function.get("arguments") in (None, "") else function


def _arguments(messages: Sequence[Message]) -> list[Any]:
    """The arguments of all calls, in order."""
    found = list[Any]()
    for message in messages:
        _change_arguments(message, found.append)
    return found


def _change_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    return _change_calls(
        message, lambda one: one | {"arguments": change(one["arguments"])} if "arguments" in one else one
    )


def _change_calls(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    """The message with other functions in its calls, which are tables or have one under ``function``."""

    def changed(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        table = cast("dict[str, Any]", call)
        return (
            {**table, "function": change(table["function"])}
            if isinstance(table.get("function"), dict)
            else change(table)
        )

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [changed(one) for one in calls]} if isinstance(calls, list) else message
