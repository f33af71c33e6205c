"""Messages of a chat as rows have them, under the names of several formats, as chat templates want them.

| a message has | read as |
|---|---|
| ``role``, ``content`` | themselves; a role of ``ROLES`` by its usual name, whatever its capitals |
| ``from``, ``value`` (ShareGPT) | ``role``, ``content`` |
| ``from: function_call`` | an answer: a call of a tool where the template writes such, else its text |
| ``from: observation`` | what a tool gave back; under ``role`` a template's own name, which stays |
| ``train: false``, ``weight: 0`` | an answer that does not count |
| ``tool_calls`` as JSON text | the list |
| ``function_call``, a table | a call of a tool, where the template writes such |
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from plait.core.base.numbers import shown

Message = Mapping[str, Any]
ANSWERS = "assistant"
"""The role whose messages are answers."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; whichever a chat uses, a template finds the first two."""
CALL = "function_call"
KNOWN = ("system", "developer", "user", ANSWERS, "tool")
ROLES: Mapping[str, str] = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "chatbot", "model", "ai", CALL), ANSWERS),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}
"""Other names of known roles, in small letters."""


class WrongChat(Exception):
    """A chat that the template refuses, or that cannot be rendered; the text says why."""


@dataclass
class MessageReader:
    """A reader of the messages of one job. calls: whether its template writes calls of tools. roles: how
    often each role was read. remarks: how often a message was read otherwise than it stands."""

    calls: bool
    roles: Counter[str] = field(default_factory=Counter[str])
    remarks: Counter[str] = field(default_factory=Counter[str])

    def messages(self, values: Mapping[str, Any], key: str, setting: str) -> list[dict[str, Any]]:
        """The messages of a row, each with a role. setting: of ``[data]``, that names the key. Raises
        WrongChat."""
        listed = value_of(values, key, setting)
        if isinstance(listed, str):  # tables without lists
            listed = parse_json(listed, key)
        if not isinstance(listed, list) or not listed:
            raise WrongChat(f"{shown(key)} is {shown(listed)}, no list of messages")
        return [
            self._message(one, f"message {number} of {shown(key)}")
            for number, one in enumerate(cast("list[Any]", listed), 1)
        ]

    def _message(self, value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise WrongChat(f"{where} is {shown(value)}, no table with a role and a content")
        message = {key: one for key, one in cast("dict[str, Any]", value).items() if one is not None}
        keys = ", ".join(shown(key) for key in list(message)[:12])
        sharegpt = "role" not in message and isinstance(message.get("from"), str)
        if sharegpt:
            message |= {"role": message.pop("from"), "content": message.pop("value", None)}
        name = message.get("role")
        if not isinstance(name, str) or not name:
            problem = f"has the role {shown(name)}, no text" if name else f"has no role, but {keys}"
            raise WrongChat(f"{where} {problem}; a message has role and content, or from and value")
        message["role"] = self._role(name, sharegpt=sharegpt)
        if name.lower() == CALL and self.calls:
            message |= _calls(message.get("content"))
        call = message.get(CALL)
        if self.calls and isinstance(call, dict) and not message.get("tool_calls"):  # as OpenAI had it first
            message |= {CALL: None, "tool_calls": [{"type": "function", "function": call}]}
        if isinstance(message.get("tool_calls"), str):
            message["tool_calls"] = parse_json(message["tool_calls"], "tool_calls")
        if message.get("train") is False:
            message["weight"] = 0
        if message.get("content") is None and not message.get("tool_calls") and not call:
            raise WrongChat(f"{where} has no content, but {keys}; a message has role and content, or from and value")
        _check(message, where)
        return {key: one for key, one in message.items() if one is not None}

    def _role(self, name: str, *, sharegpt: bool) -> str:
        """The usual name of a role, counted."""
        small = name.strip().lower()
        role = ROLES.get(small, small)
        if role not in KNOWN or (role == "tool" != small and not sharegpt):
            role = name
        elif role != name and not sharegpt:
            self.remarks[f"message(s) of the role {shown(name)} are read as {role}"] += 1
        self.roles[role] += 1
        return role


def value_of(values: Mapping[str, Any], key: str, setting: str) -> Any:
    """What a row has under a key, which a setting of ``[data]`` names. Raises WrongChat."""
    if values.get(key) is None:
        names = ", ".join(shown(one) for one in list(values)[:12] if values[one] is not None) or "nothing"
        raise WrongChat(f"has no {shown(key)}, but {names}; name its key with data.{setting}")
    return values[key]


def parse_json(text: str, key: str) -> Any:
    """A value of a table without lists. Raises WrongChat."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise WrongChat(f"{shown(key)} is {shown(text)}, neither a list nor JSON of one") from None


def _calls(content: Any) -> dict[str, Any]:
    """The calls of tools that ShareGPT writes as JSON of names and arguments; none where it is not that."""
    try:
        found = json.loads(content)
    except (TypeError, ValueError, RecursionError):
        return {}
    calls = cast("list[Any]", found if isinstance(found, list) else [found])
    if not calls or not all(isinstance(one, dict) and {"name", "arguments"} <= one.keys() for one in calls):
        return {}
    return {"content": "", "tool_calls": [{"type": "function", "function": one} for one in calls]}


def _check(message: Mapping[str, Any], where: str) -> None:
    """Raise WrongChat for a content, calls or a weight that no message has."""
    content, calls = message.get("content"), message.get("tool_calls")
    if content is not None and not isinstance(content, str | list):
        raise WrongChat(f"{where} has the content {shown(content)}, neither a text nor a list")
    if calls is not None and not isinstance(calls, list):
        raise WrongChat(f"{where} has the tool_calls {shown(calls)}, no list")
    if message.get("weight") not in (None, 0, 1):
        raise WrongChat(f"{where} has the weight {shown(message['weight'])}, and it is 0 or 1")
