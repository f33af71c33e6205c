"""Render chats in a separate process, within limits of CPU time and memory.

A chat template is a program of a third party (``plait.train.data.chat_template``). Its sandbox
keeps it from files and from Python. Here the operating system limits it to ``SECONDS`` of CPU time
per chat and ``MEMORY`` bytes, whatever it loops over or repeats, which counting operations could
not ensure.

Over all chats the process may take ``SECONDS`` more than such chats usually need. Otherwise a
template that needs a second per chat could delay a corpus for hours without ever meeting the limit.

The process reads a line of JSON for each chat and answers with one. It exits at the end of its
input, so that it does not outlive a killed parent. Values that JSON does not have (dates, bytes, of
Parquet) are rendered as ``str``.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any

from plait.core.base.errors import DataError
from plait.core.base.process import command_of, end_piped
from plait.core.base.programs import RENDERER
from plait.train.data.chat_template import ChatTemplate, Rendered
from plait.train.data.messages import ANSWERS, InvalidChat, Message

SECONDS = 20
"""CPU seconds for one chat, at most; a chat of 6 MB takes less than one."""
USUAL, USUAL_BYTE = 4e-3, 5e-8
"""CPU seconds to render a chat once, and per byte of it: seven times the most that public models'
templates take."""
MEMORY = 2 << 30
TOO_LARGE = f"the template takes more than {MEMORY >> 30} GiB of memory for it"
TOO_LONG = f"the template takes more than {SECONDS} s of processor for it, or was ended from outside"

TOO_SLOW = f"the template takes too long: {SECONDS} s of processor more, for all chats up to it, than such chats need"


class Renderer:
    """A template in a process, which is started for the first chat, and again after a chat that
    ended it."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._process: subprocess.Popen[str] | None = None

    def rendered(self, messages: Sequence[Message], tools: Any = None) -> list[Rendered]:
        """Return the texts of ``ChatTemplate.rendered``. Raises InvalidChat, and DataError for an
        invalid template."""
        process = self._process or self._start()
        try:
            answer = _ask(process, {"messages": messages, "tools": tools})
        except (OSError, ValueError):
            end_piped(process)
            self._process = None
            raise InvalidChat(TOO_LONG) from None
        if answer.get("template"):
            raise DataError(answer["template"])
        if answer.get("chat"):
            raise InvalidChat(answer["chat"])
        return [
            Rendered(text, tuple((begin, end) for begin, end in spans), tuple(remarks))
            for text, spans, remarks in answer["texts"]
        ]

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(command_of(RENDERER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        weakref.finalize(self, end_piped, process)
        one = self.template
        try:
            _ask(
                process, {"source": one.source, "where": one.where, "tokens": dict(one.tokens), "special": one.special}
            )
        except (OSError, ValueError):
            raise DataError(f"{one.where}: the process that renders chats has ended; run again") from None
        self._process = process
        return process


def _ask(process: subprocess.Popen[str], question: dict[str, Any]) -> dict[str, Any]:
    """Send one line and return the answer. Raises OSError or ValueError if the process has
    ended."""
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(question, default=str) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


# ---- in the process ----


def main() -> int:
    """Render chats until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the end of input follows
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    given = json.loads(sys.stdin.readline())
    template = ChatTemplate(given["source"], given["where"], given["tokens"], tuple(given["special"]))
    print("{}", flush=True)
    excess = 0.0
    for line in sys.stdin:
        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        begun = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(begun) + SECONDS + 1, most))
        answer = _answer(template, line)
        excess += max(0.0, time.process_time() - begun - _usual_seconds(line))
        if excess > SECONDS and answer.startswith(RENDERED):
            answer = json.dumps({"chat": TOO_SLOW})
        print(answer, flush=True)
    return 0


RENDERED = '{"texts"'
"""The beginning of an answer with texts."""


def _usual_seconds(line: str) -> float:
    """Return the most CPU seconds that a chat takes under usual templates: each answer is rendered
    three times."""
    answers = sum(one.get("role") == ANSWERS for one in json.loads(line)["messages"])
    return (6 + 3 * answers) * (USUAL + USUAL_BYTE * len(line))


def _answer(template: ChatTemplate, line: str) -> str:
    """Return the texts, or the problem of the template or the chat, as JSON."""
    try:
        asked = json.loads(line)
        texts = template.rendered(asked["messages"], asked["tools"])
        return json.dumps({"texts": [(one.text, one.answers, one.remarks) for one in texts]})
    except InvalidChat as error:
        return json.dumps({"chat": str(error)})
    except DataError as error:
        return json.dumps({"template": str(error)})
    except MemoryError:
        return json.dumps({"chat": TOO_LARGE})


if __name__ == "__main__":
    sys.exit(main())
