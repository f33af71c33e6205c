"""Chats rendered in a process of its own, within limits of processor time and memory.

A chat template is a program of somebody else (``plait.train.data.chat_template``). Its sandbox keeps it from
files and from Python; here the system keeps it from running on and on, and from all memory: whatever it
loops over or repeats, ``SECONDS`` of processor a chat and ``MEMORY`` end it, which no count of operations
could promise.

Over all chats the process takes ``SECONDS`` more than such chats need at most: a template of somebody else's
that needs a second for each would otherwise hold up a corpus for hours without ever meeting the limit.

The process reads a line of JSON for each chat and answers with one. It ends with the end of its input, so
that a killed parent leaves none behind. Values that JSON does not have (dates, bytes, of Parquet) are
rendered as they print.
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
from contextlib import suppress
from typing import Any

from plait.core.base.errors import DataError
from plait.core.base.process import command_of
from plait.core.base.programs import RENDERER
from plait.train.data.chat_template import ChatTemplate, Rendered
from plait.train.data.messages import ANSWERS, Message, WrongChat

SECONDS = 20
"""Of processor, for one chat; one of 6 MB takes less than one."""
USUAL, USUAL_BYTE = 4e-3, 5e-8
"""Of processor, for rendering a chat once, and for each byte of it: seven times what public models' templates
take at most."""
MEMORY = 2 << 30
TOO_LARGE = f"the template takes more than {MEMORY >> 30} GiB of memory for it"
TOO_LONG = f"the template takes more than {SECONDS} s of processor for it, or was ended from outside"

TOO_SLOW = f"the template takes too long: {SECONDS} s of processor more, for all chats up to it, than such chats need"


class Renderer:
    """A template in a process that is started for the first chat, and again after one that ended it."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._process: subprocess.Popen[str] | None = None

    def rendered(self, messages: Sequence[Message], tools: Any = None) -> list[Rendered]:
        """As ``ChatTemplate.rendered``. Raises WrongChat, and DataError for what is no template."""
        process = self._process or self._start()
        try:
            answer = _ask(process, {"messages": messages, "tools": tools})
        except (OSError, ValueError):
            _end(process)
            self._process = None
            raise WrongChat(TOO_LONG) from None
        if answer.get("template"):
            raise DataError(answer["template"])
        if answer.get("chat"):
            raise WrongChat(answer["chat"])
        return [
            Rendered(text, tuple((begin, end) for begin, end in spans), tuple(remarks))
            for text, spans, remarks in answer["texts"]
        ]

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(command_of(RENDERER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        weakref.finalize(self, _end, process)
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
    """A line there and one back. Raises OSError or ValueError where the process has ended."""
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(question, default=str) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def _end(process: subprocess.Popen[str]) -> None:
    """Have it end, and wait until it has."""
    process.kill()
    for pipe in (process.stdin, process.stdout):
        assert pipe
        with suppress(OSError):
            pipe.close()
    process.wait()


# ---- in the process ----


def main() -> int:
    """Render what comes, until no more does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; the end of input follows
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
"""How an answer with texts begins."""


def _usual_seconds(line: str) -> float:
    """Of processor, that a chat takes at most under templates as they are: each answer is rendered thrice."""
    answers = sum(one.get("role") == ANSWERS for one in json.loads(line)["messages"])
    return (6 + 3 * answers) * (USUAL + USUAL_BYTE * len(line))


def _answer(template: ChatTemplate, line: str) -> str:
    """Texts, or what is wrong with the template or the chat."""
    try:
        asked = json.loads(line)
        texts = template.rendered(asked["messages"], asked["tools"])
        return json.dumps({"texts": [(one.text, one.answers, one.remarks) for one in texts]})
    except WrongChat as error:
        return json.dumps({"chat": str(error)})
    except DataError as error:
        return json.dumps({"template": str(error)})
    except MemoryError:
        return json.dumps({"chat": TOO_LARGE})


if __name__ == "__main__":
    sys.exit(main())
