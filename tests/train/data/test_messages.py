"""Messages of other formats become those of chat templates; roles that nobody knows are told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.train.data.messages import InvalidChat, MessageReader

CALL = {"name": "f", "arguments": {"a": 1}}
TOOLS = {"tool_calls": [{"type": "function", "function": CALL}]}


def read(*messages: Any, calls: bool = True) -> tuple[list[dict[str, Any]], MessageReader]:
    reader = MessageReader(calls)
    return reader.messages({"messages": list(messages)}, "messages", "messages_key"), reader


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"), ("user", "user"), ("prompter", "user"), ("Human", "user"), ("SYSTEM", "system"),
        ("gpt", "assistant"), ("chatgpt", "assistant"), ("bot", "assistant"), ("chatbot", "assistant"),
        ("model", "assistant"), ("ai", "assistant"), ("Assistant", "assistant"), ("GPT ", "assistant"),
        ("observation", "tool"), ("function_response", "tool"), ("tool", "tool"), ("narrator", "narrator"),
        ("ipython", "ipython"),
    ],
)  # fmt: skip
def test_roles_have_their_usual_names(name: str, role: str) -> None:
    (sharegpt,), reader = read({"from": name, "value": "a", "weight": 0})
    assert sharegpt == {"role": role, "content": "a", "weight": 0}
    assert not reader.remarks
    assert reader.roles == {role: 1}
    (plain,), reader = read({"role": name, "content": "a"})
    kept = name if name in ("observation", "function_response") else role  # those are templates' own roles, too
    assert plain == {"role": kept, "content": "a"}
    assert list(reader.remarks) == ([] if kept == name else [f"message(s) of the role {name!r} are read as {role}"])


@pytest.mark.parametrize(
    ("message", "calls", "want"),
    [
        ({"from": "function_call", "value": json.dumps(CALL)}, True, {"content": "", **TOOLS}),
        ({"from": "function_call", "value": json.dumps([CALL])}, True, {"content": "", **TOOLS}),
        ({"role": "function_call", "content": json.dumps(CALL)}, True, {"content": "", **TOOLS}),
        ({"from": "function_call", "value": json.dumps(CALL)}, False, {"content": json.dumps(CALL)}),
        ({"from": "function_call", "value": '{"name": "f"}'}, True, {"content": '{"name": "f"}'}),
        ({"from": "function_call", "value": "f(1)"}, True, {"content": "f(1)"}),
        ({"role": "assistant", "tool_calls": json.dumps(TOOLS["tool_calls"])}, True, TOOLS),
        ({"role": "assistant", "function_call": CALL}, True, TOOLS),
        ({"role": "assistant", "function_call": CALL}, False, {"function_call": CALL}),
        ({"role": "assistant", "content": "a", "train": False}, True, {"content": "a", "train": False, "weight": 0}),
        ({"role": "assistant", "content": "a", "train": True}, True, {"content": "a", "train": True}),
        ({"role": "assistant", "content": "a", "name": None}, True, {"content": "a"}),
    ],
)
def test_what_the_model_wrote_is_an_answer(message: dict[str, Any], calls: bool, want: dict[str, Any]) -> None:
    (found,), _ = read(message, calls=calls)
    assert found == {"role": "assistant", **want}


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            {"from": "gpt"},
            "message 1 of 'messages' has no content, but 'from'; a message has role and content, or from",
        ),
        ({"from": "gpt", "content": "a"}, "has no content, but 'from', 'content'"),
        ({"speaker": "gpt", "text": "a"}, "has no role, but 'speaker', 'text'"),
        ({"role": "assistant", "tool_calls": {"name": "f"}}, "has the tool_calls {'name': 'f'}, no list"),
        ({"role": "assistant", "tool_calls": "f(1)"}, "'tool_calls' is 'f\\(1\\)', neither a list nor JSON"),
        ({"from": "gpt", "value": "a", "weight": 0.5}, "has the weight 0.5, and it is 0 or 1"),
        ({"role": 3, "content": "a"}, "has the role 3"),
        ({"role": "user", "content": 3}, "neither a text nor a list"),
    ],
)
def test_what_is_no_message_is_refused(message: Any, said: str) -> None:
    with pytest.raises(InvalidChat, match=said):
        read(message)
