"""Chat templates in the forms of public models, each written after the documentation of its format;
chats; a tokenizer that has all their special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""As OpenAI has documented ChatML."""
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system, messages = messages[0]['content'] | trim, messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{%- if date is not defined %}
    {%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n\\n' + system + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- (message['content'] | trim) + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""As Meta's model cards describe the prompts of Llama 3."""
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought, content = '', message.content or '' %}
        {%- if message.reasoning_content is string %}
            {%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.user %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
"""As Qwen's documentation describes Qwen 3: reasoning is kept behind the last question alone."""
MISTRAL = """\
{%- if messages[0].role == 'system' %}
    {%- set system, turns = messages[0].content, messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set asked = turns | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate: user, assistant, user, ...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {%- if system is defined and message == asked[-1] %}
            {{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message.content + '[/INST]' }}
        {%- endif %}
    {%- else %}
        {{- ' ' + (message.content | trim) + eos_token }}
    {%- endif %}
{%- endfor %}
"""
"""As Mistral's cookbook describes its third tokenizer: the system's words stand before the last
question."""
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('there is no system role') }}
{%- endif %}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
"""As Google's documentation describes Gemma's turns."""
MARKED = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
"""ChatML that says what is generated."""
TEMPLATES = {
    "chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "mistral": MISTRAL, "gemma": GEMMA, "marked": MARKED,
}  # fmt: skip
SPECIAL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
)  # fmt: skip


def say(*texts: str, system: str = "") -> list[dict[str, Any]]:
    """A chat of questions and answers."""
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    return found + [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]


CHATS = (
    say("Hello", "Hi!"),
    say("  What is 2 + 2?\n", " It is 4. ", "And 3 + 3?", "6", "é\u200b🙂\r\n?", "{{ 7 * 7 }} <b>&amp;</b>"),
    say("Explain", "<think>\nwell\n</think>\n\nSo it is.", "Thanks", "<think>\nok\n</think>\n\nAny time."),
)
"""Chats that every template takes."""
TOOLS = [{"type": "function", "function": {"name": "add", "description": "é <&>", "parameters": {}}}]
WITH_SYSTEM = (say("Hello", "Hi!", "Bye", "See you.", system="Be short."), say("One", "1", system="Count."))


def tokenizer_folder(folder: Path, template: str | None = None, *, as_file: bool = False) -> Path:
    """A folder with a small byte-level tokenizer that has all special tokens, and a chat
    template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(["the answer is that it is what it is", "well so it is", "assistant user"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
    }  # fmt: skip
    if template is not None and as_file:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    elif template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
