"""Contents in parts and arguments of calls reach a template in a form that it writes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.train.data.chat_template import ChatTemplate
from plait.train.data.messages import JOINED, LOST, NO_TABLE, NONE, PARTED, PYTHON, TABLES, TEXTS, InvalidChat

PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALLS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function or c %}CALL{% endfor %}<|end|>{% endfor %}" + PROMPT
)
ARGUMENTS = {"city": "Ålesund", "days": 2, "exact": True, "unit": None}
TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
ITEMS = "{% for k, v in f.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %}"
LISTED = "".join(f"{key}={json.dumps(value, ensure_ascii=False)};" for key, value in ARGUMENTS.items())
EITHER = "{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}"


def called(call: str, arguments: Any, *, question: str = "Q", plain: bool = False) -> tuple[str, tuple[str, ...]]:
    """What a template that writes calls so makes of one, and its remarks."""
    function = {"name": "weather", "arguments": arguments}
    answer = {"role": "assistant", "tool_calls": [function if plain else {"type": "function", "function": function}]}
    chat = [{"role": "user", "content": question}, answer, {"role": "tool", "content": "rain"}]
    (found,) = ChatTemplate(CALLS.replace("CALL", call), "here", {}, ("<|end|>",)).rendered(chat)
    assert question in found.text
    ((begin, end),) = found.answers
    return found.text[begin:end].removesuffix("<|end|>"), found.remarks


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("call", "arguments", "want", "remarks"),
    [
        ("{{ f.arguments | tojson }}", ARGUMENTS, TEXT, ()),
        ("{{ f.arguments | tojson }}", TEXT, TEXT, (TABLES,)),
        ("{{ f.arguments | tojson }}", "{}", "{}", (TABLES,)),
        ("{{ f | tojson }}", TEXT, f'{{"name": "weather", "arguments": {TEXT}}}', (TABLES,)),
        ("{{ f.arguments | tojson(ensure_ascii=True) }}", TEXT, json.dumps(ARGUMENTS), (TABLES,)),
        (ITEMS, ARGUMENTS, LISTED, ()),
        (ITEMS, TEXT, LISTED, (TABLES,)),
        (ITEMS, "{}", "", (TABLES,)),
        ("{{ f.arguments }}", TEXT, TEXT, ()),
        ("{{ f.arguments }}", ARGUMENTS, TEXT, (TEXTS,)),
        ("{{ 'x' + f.arguments }}", TEXT, f"x{TEXT}", ()),
        ("{{ 'x' + f.arguments }}", ARGUMENTS, f"x{TEXT}", (TEXTS,)),
        (EITHER, TEXT, TEXT, ()),
        (EITHER, ARGUMENTS, TEXT, ()),
        ("{{ f.name }}", TEXT, "weather", ()),
        ("{{ f.arguments | tojson }}", None, "{}", (NONE,)),
        ("{{ f.arguments }}", "", "{}", (NONE,)),
        ("{{ f.arguments | tojson }}", "in Oslo", '"in Oslo"', (NO_TABLE,)),
        ("{{ f.arguments }}", "in Oslo", "in Oslo", (NO_TABLE,)),
        (
            "{% for k in f.arguments %}{{ f.arguments[k] }}{% endfor %}",
            {"a": {"b": [None]}},
            "{'b': [None]}",
            (PYTHON,),
        ),
        ("{{ f.arguments | tojson | tojson }}", {"a": 1}, '"{\\"a\\": 1}"', ()),
    ],
)
def test_arguments_are_written_once(
    call: str, arguments: Any, want: str, remarks: tuple[str, ...], plain: bool
) -> None:
    assert called(call, arguments, plain=plain) == (want, remarks)


def test_a_question_that_quotes_arguments_changes_nothing() -> None:
    for call in ("{{ f.arguments }}", "{{ 'x' ~ f.arguments }}", "{{ 'x' + f.arguments }}"):
        assert called(call, TEXT, question=json.dumps(TEXT, ensure_ascii=False))[1] == ()


@pytest.mark.parametrize("call", [ITEMS, "{{ f.arguments.items() }}"])
def test_arguments_that_no_form_mends_are_named(call: str) -> None:
    with pytest.raises(
        InvalidChat, match=r"cannot render the arguments of a tool call, 'Oslo': .*write them as a table"
    ):
        called(call, "Oslo")
    with pytest.raises(InvalidChat, match="no such tool"):
        called("{{ raise_exception('no such tool') }}", "Oslo")


PARTS = [{"type": "text", "text": "A"}, {"type": "text", "text": "."}]
WRITES_PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
)


def content(template: str, *contents: Any) -> tuple[str, tuple[str, ...]]:
    """What a template that writes contents so makes of an answer, and its remarks."""
    chat = [{"role": ("user", "assistant")[at % 2], "content": one} for at, one in enumerate(["Q", *contents])]
    source = "{% for m in messages %}<|{{ m.role }}|>" + template + "<|end|>{% endfor %}" + PROMPT
    (found,) = ChatTemplate(source, "here", {}, ("<|end|>",)).rendered(chat)
    begin, end = found.answers[0]
    return found.text[begin:end], found.remarks


@pytest.mark.parametrize(
    ("template", "remarks"),
    [
        ("{{ m.content }}", (JOINED,)),
        ("{{ m.content | trim }}", (JOINED,)),
        ("{{ m.content | tojson if m.content is not string else m.content }}", (JOINED,)),
        ("{{ m.content + '' }}", (JOINED,)),
        ("{% if m.content is string %}{{ m.content }}{% endif %}", (JOINED,)),
        ("{{ m.content if m.content is string else m.content[0].text }}", (JOINED,)),
        (WRITES_PARTS, ()),
    ],
)
@pytest.mark.parametrize(
    "parts",
    [
        PARTS, [{"text": "A."}], [{"type": "output_text", "text": "A", "image": None}, {"type": "text", "text": "."}],
    ],
)  # fmt: skip
def test_contents_in_parts_are_written_as_texts(template: str, remarks: tuple[str, ...], parts: Any) -> None:
    text, told = content(template, parts)
    assert text == "A.<|end|>"
    assert told == (() if len(parts) == 1 and "[0]" in template else remarks)
    assert content(template, parts, [{"type": "text", "text": "A"}], "b")[0] == text


@pytest.mark.parametrize(
    ("template", "part", "said"),
    [
        (WRITES_PARTS, {"type": "image", "image": "cat.png"}, "message 2 has {'type': 'image'.* texts alone"),
        (WRITES_PARTS + "{# 'image_url' #}", {"type": "image_url", "text": "cat"}, "message 2 has .*image_url"),
        (WRITES_PARTS, {"type": "thinking", "thinking": "hm"}, "message 2 has .*thinking"),
        (WRITES_PARTS, {"type": "text", "text": None}, "message 2 has"),
        ("{{ m.content }}{# thinking #}", {"type": "thinking", "thinking": "hm"}, "prints contents in parts"),
    ],
)
def test_parts_that_are_no_texts_are_refused(template: str, part: Any, said: str) -> None:
    with pytest.raises(InvalidChat, match=said):
        content(template, [*PARTS, part])


WRITES_PARTS_ALONE = "{% for p in m.content %}{{ p.text }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "one", "remarks"),
    [
        (WRITES_PARTS_ALONE, "A.", (PARTED,)),
        ("{% for p in m.content %}{{ p['text'] | upper }}{% endfor %}", "a.", (PARTED,)),
        ("{{ m.content[0].text }}", "A.", (PARTED,)),
        ("{% if m.content is string %}{{ raise_exception('no') }}{% endif %}{{ m.content[0].text }}", "A.", (PARTED,)),
        (WRITES_PARTS_ALONE, ["A", "."], (PARTED,)),
        ("{{ m.content }}", ["A", "."], (JOINED,)),
        (WRITES_PARTS, ["A", "."], ()),
        ("{{ m.content if m.role != 'user' }}", "A.", (LOST,)),
    ],
)
def test_texts_reach_a_template_that_writes_parts_alone(template: str, one: Any, remarks: tuple[str, ...]) -> None:
    assert content(template, one) == ("A.<|end|>", remarks)


def test_parts_that_the_template_names_are_its_own() -> None:
    template = WRITES_PARTS.replace("{{ p.text }}", "{{ p.text if p.type == 'text' else p.thinking }}")
    assert content(template, [{"type": "thinking", "thinking": "hm "}, *PARTS]) == ("hm A.<|end|>", ())
