"""Forms in which a chat template writes what messages hold: contents as text or as parts, arguments of calls
as tables or as JSON text.

Templates differ, and print what they do not expect as Python or JSON spells it: ``[{'type': 'text', ...}]``
as a content, ``"{\\"city\\": ...}"`` as arguments. That would be trained on. So a chat is rendered in each
form that it can have; the first that the template takes, and does not print so, is chosen.
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
TAG = secrets.token_hex(8)
TEXT_PARTS = (None, "text", "input_text", "output_text")
MEDIA = ("image", "audio", "video", "file")
JOINED = "chat(s) have contents in parts, which were joined, since the chat template writes texts alone"
TABLES = "chat(s) have arguments of tool calls as JSON text, which the chat template got as tables"
TEXTS = "chat(s) have arguments of tool calls as tables, which the chat template got as JSON text"


def fit(messages: Sequence[Message], render: Render, source: str) -> Form:
    """Return messages in the forms that a template writes. source: the template's text.

    Raises WrongChat for parts that are no text, and where the template takes no form.
    """
    messages, joined = _fit_contents(messages, render, source)
    messages, changed = _fit_arguments(messages, render)
    return messages, (*joined, *changed)


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


def _best(forms: Sequence[Form], score: Callable[[Sequence[Message]], int]) -> Form:
    """The first form with the highest score. Raises the first WrongChat where all are refused."""
    scores, refusals = list[tuple[int, Form]](), list[WrongChat]()
    for form in forms:
        try:
            scores.append((score(form[0]), form))
        except WrongChat as wrong:
            refusals.append(wrong)
    if not scores:
        raise refusals[0]
    return max(scores, key=lambda one: one[0])[1]


# ---- contents ----


def _fit_contents(messages: Sequence[Message], render: Render, source: str) -> Form:
    """Contents in parts are joined where the template prints them, refuses them or leaves texts out."""
    in_parts = [(number, one["content"]) for number, one in enumerate(messages, 1) if _has_parts(one)]
    if not in_parts:
        return messages, ()
    for number, parts in in_parts:
        _check_parts(parts, number, source)

    def texts(form: Sequence[Message]) -> int:
        text = render(form)
        if any(spelling in text for one in form if _has_parts(one) for spelling in _printed(one["content"])):
            raise WrongChat("the template prints contents in parts as Python or JSON spells them; write them as texts")
        return text.count(TAG)

    forms: list[Form] = [([label(one, TAG) for one in messages], ())]
    if all(_is_text(part) for _, parts in in_parts for part in parts):
        forms.append(([_join(one) for one in forms[0][0]], (JOINED,)))
    _, remarks = _best(forms, texts)
    return ([_join(one) for one in messages] if remarks else messages), remarks


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

    def as_written(form: Sequence[Message]) -> int:
        text = render(form)
        return not any(spelling in text for one in _arguments(form) for spelling in _misspellings(one))

    try:
        return _best([one for one in forms if one[0] is messages or _arguments(one[0]) != values], as_written)
    except WrongChat as wrong:
        for other in ({}, "{}"):
            with suppress(WrongChat):
                render([_change_arguments(one, lambda _, other=other: other) for one in messages])
                problem = f"the template cannot render the arguments of a tool call, {shown(values[0])}"
                wrong = WrongChat(f"{problem}: {wrong}; write them as a table, or as JSON text of one")
        raise wrong from None


def _misspellings(arguments: Any) -> list[str]:
    """Texts that a template writes for arguments only if it takes them to be of another form."""
    if isinstance(arguments, str):
        return [] if _as_table(arguments) is arguments else _printed(arguments)[1:]
    return [str(arguments)] if arguments else []


def _as_table(arguments: Any) -> Any:
    """The table that JSON text spells; what is no such text stays."""
    with suppress(TypeError, ValueError, RecursionError):
        if isinstance(found := json.loads(arguments), dict | list):
            return found
    return arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict | list) else arguments


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
