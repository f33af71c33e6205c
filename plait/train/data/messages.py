"""Read the messages of chats, under the names of several formats, and convert them to the form that
a chat template expects.

| a message has | read as |
|---|---|
| ``role``, ``content`` | themselves; a role of ``ROLES`` by its usual name, whatever its capitals |
| ``from``, ``value`` (ShareGPT) | ``role``, ``content`` |
| ``from: function_call`` | an answer: a tool call if the template writes tool calls, else its text |
| ``from: observation`` | a tool's result; ``role: observation`` stays, as some templates' own name |
| ``train: false``, ``weight: 0`` | an answer that does not count |
| ``tool_calls`` as JSON text | the list |
| ``function_call``, a table | a tool call, if the template writes tool calls |

Templates differ in the forms that they can write: contents as text or as parts, arguments of tool
calls as tables or as JSON text. What a template does not expect, it leaves out, or prints as Python
or JSON spells it: ``[{'type': 'text', ...}]`` as a content, ``"{\\"city\\": ...}"`` as arguments.
The model would be trained on that. So a chat is rendered in all possible forms, and the first form
of which the template writes most is chosen. What is still left out or misprinted is reported.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from plait.core.base.numbers import shown

Message = Mapping[str, Any]
ANSWERS = "assistant"
"""The role of messages that are answers."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; whichever a chat uses, a template gets the first two."""
CALL = "function_call"
KNOWN = ("system", "developer", "user", ANSWERS, "tool")
ROLES: Mapping[str, str] = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "chatbot", "model", "ai", CALL), ANSWERS),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
"""Other names of known roles, in lower case."""


class InvalidChat(Exception):
    """A chat that the template refuses, or that cannot be rendered; the text gives the reason."""


@dataclass
class MessageReader:
    """A reader of one job's messages. calls: True if its template writes tool calls. roles: how
    often each role was read. remarks: how often a message was read in another form than written."""

    calls: bool
    roles: Counter[str] = field(default_factory=Counter[str])
    remarks: Counter[str] = field(default_factory=Counter[str])

    def messages(self, values: Mapping[str, Any], key: str, setting: str) -> list[dict[str, Any]]:
        """Return the messages of a row, each with a role. setting: the setting of ``[data]`` that
        names the key. Raises InvalidChat."""
        listed = value_of(values, key, setting)
        if isinstance(listed, str):  # a format without lists stores JSON text
            listed = parse_json(listed, key)
        if not isinstance(listed, list) or not listed:
            raise InvalidChat(f"{shown(key)} is {shown(listed)}, no list of messages")
        return [
            self._message(one, f"message {number} of {shown(key)}")
            for number, one in enumerate(cast("list[Any]", listed), 1)
        ]

    def _message(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise InvalidChat(f"{where} is {shown(value)}, no table with a role and a content")
        message = {key: one for key, one in cast("dict[str, Any]", value).items() if one is not None}
        keys = ", ".join(shown(key) for key in list(message)[:12])
        sharegpt = "role" not in message and isinstance(message.get("from"), str)
        if sharegpt:
            message |= {"role": message.pop("from"), "content": message.pop("value", None)}
        name = message.get("role")
        if not isinstance(name, str) or not name:
            problem = f"has the role {shown(name)}, no text" if name else f"has no role, but {keys}"
            raise InvalidChat(f"{where} {problem}; a message has role and content, or from and value")
        message["role"] = self._role(name, sharegpt=sharegpt)
        if name.lower() == CALL and self.calls:
            message |= _calls(message.get("content"))
        call = message.get(CALL)
        if self.calls and isinstance(call, dict) and not message.get("tool_calls"):  # OpenAI's older form
            message |= {CALL: None, "tool_calls": [{"type": "function", "function": call}]}
        if isinstance(message.get("tool_calls"), str):
            message["tool_calls"] = parse_json(message["tool_calls"], "tool_calls")
        if message.get("train") is False:
            message["weight"] = 0
        if message.get("content") is None and not message.get("tool_calls") and not call:
            raise InvalidChat(f"{where} has no content, but {keys}; a message has role and content, or from and value")
        _check(message, where)
        return {key: one for key, one in message.items() if one is not None}

    def _role(self, name: str, *, sharegpt: bool) -> str:
        """Return the usual name of a role, such as ``user`` for ``human``, and count it. sharegpt:
        the message has ShareGPT's keys ``from`` and ``value``."""
        small = name.strip().lower()
        role = ROLES.get(small, small)
        if role not in KNOWN or (role == "tool" != small and not sharegpt):
            role = name
        elif role != name and not sharegpt:
            self.remarks[f"message(s) of the role {shown(name)} are read as {role}"] += 1
        self.roles[role] += 1
        return role


def value_of(values: Mapping[str, Any], key: str, setting: str) -> Any:
    """Return a row's value under a key. setting: the setting of ``[data]`` that names the key.
    Raises InvalidChat."""
    if values.get(key) is None:
        names = ", ".join(shown(one) for one in list(values)[:12] if values[one] is not None) or "nothing"
        raise InvalidChat(f"has no {shown(key)}, but {names}; name its key with data.{setting}")
    return values[key]


def parse_json(text: str, key: str) -> Any:
    """Return the value of JSON text, as tables without lists store it. Raises InvalidChat."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidChat(f"{shown(key)} is {shown(text)}, neither a list nor JSON of one") from None


def _calls(content: Any) -> dict[str, Any]:
    """Return the tool calls that ShareGPT writes as JSON of names and arguments; empty for other
    contents."""
    try:
        found = json.loads(content)
    except (TypeError, ValueError, RecursionError):
        return {}
    calls = cast("list[Any]", found if isinstance(found, list) else [found])
    if not calls or not all(isinstance(one, dict) and {"name", "arguments"} <= one.keys() for one in calls):
        return {}
    return {"content": "", "tool_calls": [{"type": "function", "function": one} for one in calls]}


def _check(message: Mapping[str, Any], where: str) -> None:
    """Raise InvalidChat for an invalid content, invalid tool calls or an invalid weight."""
    content, calls = message.get("content"), message.get("tool_calls")
    if content is not None and not isinstance(content, str | list):
        raise InvalidChat(f"{where} has the content {shown(content)}, neither a text nor a list")
    if calls is not None and not isinstance(calls, list):
        raise InvalidChat(f"{where} has the tool_calls {shown(calls)}, no list")
    if message.get("weight") not in (None, 0, 1):
        raise InvalidChat(f"{where} has the weight {shown(message['weight'])}, and it is 0 or 1")


# ---- forms of what messages hold ----

Render = Callable[[Sequence[Message]], str]
Form = tuple[Sequence[Message], tuple[str, ...]]
"""A chat in one form: its messages, and remarks on what was changed."""
TAG = f"{secrets.randbits(64):020}"
"""A tag of digits, which no template filter changes."""
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

    Raises InvalidChat for parts that are no text, and if the template refuses every form.
    """
    filled = [_change_calls(_with_parts(one), _filled) for one in messages]
    empty = (NONE,) * (_arguments(filled) != _arguments(messages))
    messages, joined = _fit_contents(filled, lambda form: _in_any_arguments(form, render), source)
    messages, changed = _fit_arguments(messages, render)
    return messages, (*empty, *joined, *changed)


def label(message: Message, tag: str, *, empty: bool = False) -> Message:
    """Return the message with a tag after every text of its content and reasoning; if it has no
    text, after the names of the tools that it calls. empty: also after empty texts."""
    texts = {key: text for key in ("content", *REASONING) if isinstance(text := message.get(key), str)}
    found: dict[str, Any] = {key: text + tag for key, text in texts.items() if text or empty}
    if _has_parts(message):
        found["content"] = [one | {"text": one["text"] + tag} if _is_text(one) else one for one in message["content"]]
    elif not any(texts.values()):
        message = _change_calls(message, lambda one: one | {"name": f"{one.get('name')}{tag}"})
    return {**message, **found}


def _best(forms: Sequence[Form], score: Callable[[Sequence[Message]], int], most: int) -> tuple[int, Form]:
    """Return the first form with the highest score, at most ``most``, and its score. Raises the
    first InvalidChat if all forms are refused."""
    scores, refusals = list[tuple[int, Form]](), list[InvalidChat]()
    for form in forms:
        try:
            scores.append((score(form[0]), form))
        except InvalidChat as wrong:
            refusals.append(wrong)
        if scores and scores[-1][0] >= most:
            break
    if not scores:
        raise refusals[0]
    return max(scores, key=lambda one: one[0])


# ---- contents ----


def _fit_contents(messages: Sequence[Message], render: Render, source: str) -> Form:
    """Return the messages with contents joined to text or split into parts, if the template
    misprints, refuses or leaves out the original form."""
    in_parts = [(number, one["content"]) for number, one in enumerate(messages, 1) if _has_parts(one)]
    for number, parts in in_parts:
        _check_parts(parts, number, source)
    tagged = [{**one, **label({"content": one["content"]}, TAG)} if one.get("content") else one for one in messages]
    most = str([one.get("content") for one in tagged]).count(TAG)

    def texts(form: Sequence[Message]) -> int:
        text = render(form)
        if any(spelling in text for one in form if _has_parts(one) for spelling in _printed(one["content"])):
            raise InvalidChat(
                "the template prints contents in parts as Python or JSON spells them; write them as texts"
            )
        return text.count(TAG)

    changes = {JOINED: _join} if in_parts and all(_is_text(part) for _, parts in in_parts for part in parts) else {}
    changes |= {PARTED: _part} if len(in_parts) < len(messages) else {}
    forms = [(tagged, ()), *(([change(one) for one in tagged], (remark,)) for remark, change in changes.items())]
    try:
        written, (_, remarks) = _best(forms, texts, most)
    except InvalidChat:
        if in_parts:
            raise
        return messages, ()  # the refusal is not about contents
    for remark in remarks:
        messages = [changes[remark](one) for one in messages]
    return messages, (*remarks, *(LOST,) * (written < most))


def _has_parts(message: Message) -> bool:
    return isinstance(message.get("content"), list)


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str)


def _check_parts(parts: Sequence[Any], number: int, source: str) -> None:
    """Raise InvalidChat for a part of message ``number`` that is no text, unless the template names
    its type and the type is no medium."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        named = isinstance(kind, str) and kind in source and not any(medium in kind for medium in MEDIA)
        if not _is_text(part) and (kind in TEXT_PARTS or not named):
            raise InvalidChat(f"message {number} has {shown(part)} in its content, and Plait trains on texts alone")


def _join(message: Message) -> Message:
    return (
        {**message, "content": "".join(one["text"] for one in message["content"])} if _has_parts(message) else message
    )


def _part(message: Message) -> Message:
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def _with_parts(message: Message) -> Message:
    """Return the message with plain strings among its parts converted to parts."""
    if not _has_parts(message):
        return message
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in message["content"]]
    return {**message, "content": parts}


def _printed(value: Any) -> list[str]:
    """Return a value as text, spelled in Python's way and as JSON."""
    return [str(value), json.dumps(value), json.dumps(value, ensure_ascii=False)]


# ---- arguments of calls ----


def _fit_arguments(messages: Sequence[Message], render: Render) -> Form:
    """Return the messages with arguments of tool calls as tables, if the template quotes or refuses
    JSON text; as JSON text, if it misprints or refuses tables."""
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
    except InvalidChat as wrong:
        for other in ({}, "{}"):
            with suppress(InvalidChat):
                render([_change_arguments(one, lambda _, other=other: other) for one in messages])
                problem = f"the template cannot render the arguments of a tool call, {shown(values[0])}"
                wrong = InvalidChat(f"{problem}: {wrong}; write them as a table, or as JSON text of one")
        raise wrong from None


def _in_any_arguments(messages: Sequence[Message], render: Render) -> str:
    """Return the text that a template makes of messages, in whichever form of arguments it accepts.
    Raises the first InvalidChat."""
    refusals = list[InvalidChat]()
    for change in (lambda one: one, _as_table, _as_text)[: 3 if _arguments(messages) else 1]:
        try:
            return render([_change_arguments(one, change) for one in messages])
        except InvalidChat as wrong:
            refusals.append(wrong)
    raise refusals[0]


def _misspellings(arguments: Any) -> list[str]:
    """Return texts that a template writes for arguments only if it expects another form of them."""
    if isinstance(arguments, str):
        return [] if _as_table(arguments) is arguments else _printed(arguments)[1:]
    return [str(arguments)] if arguments and str(arguments) != json.dumps(arguments, ensure_ascii=False) else []


def _inner(arguments: Any) -> list[Any]:
    """Return the tables and lists directly inside a table of a tool call's arguments."""
    return [one for one in arguments.values() if isinstance(one, dict | list)] if isinstance(arguments, dict) else []


def _as_table(arguments: Any) -> Any:
    """Return the table that JSON text spells; other values unchanged."""
    with suppress(TypeError, ValueError, RecursionError):
        if isinstance(found := json.loads(arguments), dict | list):
            return found
    return arguments


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict | list) else arguments


def _filled(function: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call's function with an empty table for missing arguments."""
    return function | {"arguments": {}} if function.get("arguments") in (None, "") else function


def _arguments(messages: Sequence[Message]) -> list[Any]:
    """Return the arguments of all tool calls of a chat, in order."""
    found = list[Any]()
    for message in messages:
        _change_arguments(message, found.append)
    return found


def _change_arguments(message: Message, change: Callable[[Any], Any]) -> Message:
    return _change_calls(
        message, lambda one: one | {"arguments": change(one["arguments"])} if "arguments" in one else one
    )


def _change_calls(message: Message, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Message:
    """Return the message with changed functions in its calls; a call is a function's table, or has
    one under ``function``."""

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
