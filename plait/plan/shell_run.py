"""The commands that a shell script starts, without starting them: it is followed as bash follows it.

What it sets itself decides conditions and loops. Where a run decides (arguments, the environment, files,
other programs), both ways are followed, as two shells; a loop of which nobody knows how often it runs leaves
what it sets unknown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from plait.core.base.files import contents_within
from plait.plan.shell_builtins import BUILTINS, declare
from plait.plan.shell_nodes import (
    Arithmetic,
    Case,
    Chain,
    Function,
    Group,
    If,
    Loop,
    Node,
    Pipeline,
    Program,
    Simple,
    Test,
)
from plait.plan.shell_state import Log, Run, Shell, forget, fork
from plait.plan.shell_syntax import DECLARING, UNKNOWN, ShellSyntaxError, parse
from plait.plan.shell_tests import combine, evaluate
from plait.plan.shell_words import SEVERAL, Variables, Words, unknown

MOST_STEPS = 20_000
"""Commands that are followed."""
MOST_SHELLS = 64
"""Ways that are followed at once."""
MOST_ROUNDS = 1_000
"""Rounds of a loop that are followed."""
FLAG = re.compile(r"--[A-Za-z]")
COMMAND = re.compile(r"\s--[a-z]")
"""Flags of a command that is one word."""
LARGEST = 2 << 20
"""Bytes of a file."""
REMOTE = ("ssh", "pdsh", "clush", "docker", "podman", "kubectl", "apptainer", "singularity", "su", "sudo")
"""Programs that have a shell run their last word."""
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
FEEDERS = ("xargs", "parallel")
"""Programs that add words to those of a command."""
READERS = frozenset(["chmod", "ls", "grep", "egrep", "awk", "wc", "head", "tail", "diff", "stat", "md5sum"])
"""Programs that write none of the files among their words."""
_OF_PROGRAMS = re.compile(r"(activate|rc|profile|conda\.sh|vars\.sh)$|^/(etc|opt)/")
"""Files that set up programs."""
_SILENT = "chmod cp kill ln mkdir module mv popd pushd rm rsync sleep touch trap ulimit umask wait"
SILENT = frozenset(_SILENT.split())
"""Commands that print nothing."""


def follow_script(text: str, file: str, variables: Mapping[str, str]) -> list[Shell]:
    """The shells in which a script may end. file: its path; variables: that its environment has. Raises
    ShellSyntaxError."""
    shell = Shell(log := Log(), _capture, file, exported=frozenset(variables))
    shell.variables.why = log.why
    shell.variables.values |= {**variables, "PWD": os.getcwd(), "IFS": " \t\n"}
    if file:
        shell.variables.values |= {"0": file, "BASH_SOURCE": {"0": file}}
    if "\r\n" in text:
        log.remarks.append("Lines end as in DOS: they are read without what bash would pass on of their ends.")
    return follow(_program(text.replace("\r\n", "\n"), shell, lines=True), shell)


def _program(text: str, shell: Shell, *, lines: bool = False) -> Program:
    """The commands of a text that a shell reads, which then has their names."""
    program = parse(text, lines=lines, own=(own := set[str]()))
    shell.variables.own |= own
    return program


def follow(nodes: Program, shell: Shell) -> list[Shell]:
    """The shells in which commands may end. Raises ShellSyntaxError for what takes too long."""
    shells = [shell]
    for node in nodes:
        shells = _deduplicate([end for one in shells for end in ([one] if one.flow else _step(node, one))])
    return shells


def _deduplicate(shells: Sequence[Shell]) -> list[Shell]:
    """Shells that differ. One that ends without having started anything is none that trains."""
    live = [one for one in shells if one.flow != "exit" or one.runs] or shells[:1]
    found = list[Shell]()
    for one in live:
        if same := next((other for other in found if other == one), None):
            same.decided = tuple(what for what in same.decided if what in one.decided)
        else:
            found.append(one)
    return found if len(found) <= MOST_SHELLS else [_merge(found)]


def _merge(shells: Sequence[Shell]) -> Shell:
    """One shell for many, in which what they have otherwise is not known."""
    first = shells[0]
    for other in shells[1:]:
        for name in {*first.variables.values, *other.variables.values}:
            if first.variables.values.get(name, False) != other.variables.values.get(name, False):
                forget(first, [name], other.decided[-1][0] if other.decided else "a run")
        first.record(other.runs)
        first.variables.open = first.variables.open or other.variables.open
    return first


def _capture(text: str, shell: Shell) -> str | None:
    """Return the output of commands; None where that is not known."""
    child = shell.copy()
    child.printed = ()
    try:
        ends = follow(parse(text), child)
    except ShellSyntaxError:
        return None
    for one in ends:
        shell.record(one.runs)
    printed = {one.printed for one in ends}
    parts = printed.pop() if len(printed) == 1 else (None,)
    return None if parts is None or None in parts else "".join(map(str, parts)).rstrip("\n")


def _subshell(body: Program, child: Shell, shell: Shell, before: Sequence[str] = ()) -> list[Shell]:
    """A shell in which a child has run commands: what it starts and prints counts, what it sets does not.
    before: words that start the child."""
    found, child.runs = list[Shell](), ()
    for end in follow(body, child):
        one = shell.copy()
        one.record(Run(run.line, (*before, *run.words)) for run in end.runs)
        one.status, one.printed, one.decided = end.status, end.printed, end.decided
        found.append(one)
    return _deduplicate(found)


def _step(node: Node, shell: Shell) -> list[Shell]:
    match node:
        case Simple():
            return _simple(node, shell)
        case Chain():
            return _chain(node, shell)
        case Pipeline():
            return _pipeline(node, shell)
        case Group(body=body, silent=True):
            return _silently(lambda: follow(body, shell), shell)
        case Group(body=body, subshell=True):
            return _subshell(body, shell.copy(), shell)
        case Group(body=body):
            return follow(body, shell)
        case If():
            return _if(node, shell)
        case Loop():
            return _loop(node, shell)
        case Case():
            return _case(node, shell)
        case Function(name=name, body=body):
            shell.functions = {**shell.functions, name: body}
            shell.status = True
        case Test(words=words):
            shell.status = evaluate(words, shell.words)
        case Arithmetic(text=text):
            number = shell.words.number(text)
            shell.status = None if number is None else bool(number)
    return [shell]


def _silently(run: Callable[[], list[Shell]], shell: Shell) -> list[Shell]:
    """Shells in which commands may end whose output goes elsewhere."""
    printed, shell.printed = shell.printed, None
    ends = run()
    for end in ends:
        end.printed = printed
    return ends


def _chain(node: Chain, shell: Shell) -> list[Shell]:
    shells = _step(node.first, shell)
    for operator, other in node.rest:
        after = list[Shell]()
        for one in shells:
            if one.status is None and not one.flow:
                after.append(fork(one, node.source, status=operator == "||"))
                one = fork(one, node.source, status=operator == "&&")
            after += [one] if one.flow or one.status is not (operator == "&&") else _step(other, one)
        shells = _deduplicate(after)
    return shells


def _pipeline(node: Pipeline, shell: Shell) -> list[Shell]:
    if len(node.nodes) == 1:
        shells = _step(node.nodes[0], shell)
        for one in shells:
            one.status = one.status if one.status is None else one.status is not node.negated
        return shells
    shells, printed = [shell], shell.printed
    for each in node.nodes:
        shells = [end for one in shells for end in _subshell((each,), one.copy(), one)]
    for one in shells:
        one.status, one.printed = None, printed
        one.show(None)
    return shells


def _if(node: If, shell: Shell) -> list[Shell]:
    waiting, found = [shell], list[Shell]()
    for condition, body in node.arms:
        after = list[Shell]()
        for end in (end for one in waiting for end in follow(condition, one)):
            if end.status is None and not end.flow:
                after.append(fork(end, node.source, status=False))
                end = fork(end, node.source, status=True)
            if end.flow or end.status:
                found += [end] if end.flow else follow(body, end)
            else:
                after.append(end)
        waiting = after
    for one in waiting:
        one.status = True
        found += follow(node.last, one)
    return _deduplicate(found)


def _case(node: Case, shell: Shell) -> list[Shell]:
    text, found = shell.words.value(node.word), list[Shell]()
    for patterns, body in node.arms:
        known = [None if UNKNOWN in text else shell.words.pattern(one) for one in patterns]
        sides = [None if one is None else fnmatchcase(text, one) for one in known]
        told = "*" in patterns or combine(sides, ends=True)
        if told:
            return _deduplicate([*found, *follow(body, shell)])
        if told is None:
            found += follow(body, fork(shell, node.source, status=True))
            shell = fork(shell, node.source, status=False)
    shell.status = True
    return _deduplicate([*found, shell])


# ---- loops ----


def _loop(node: Loop, shell: Shell) -> list[Shell]:
    start, live, done = shell.copy(), [shell], list[Shell]()
    values = _values(node, shell) if node.kind == "for" else []
    if values is None:
        return _unknown_loop(node, shell)
    for number in range(MOST_ROUNDS):
        before, after = [one.copy() for one in live], list[Shell]()
        for end in (end for one in live for end in _advance(node, one, values, number)):
            if end.status is None:
                return _unknown_loop(node, start)
            if not end.status or end.flow:
                done.append(end)
                continue
            for last in follow(node.body, end):
                (done if _leaves(last) else after).append(last)
        live = _deduplicate(after)
        if not live or (live == before and node.kind != "for"):
            return _deduplicate([*done, *live])
    return _unknown_loop(node, start)


def _values(node: Loop, shell: Shell) -> list[str] | None:
    """Return the values of a loop; None where a run decides."""
    found = shell.words.fields(*('"$@"',) if node.words is None else node.words)
    return None if any(one.endswith(SEVERAL) for one in found) else found


def _advance(node: Loop, shell: Shell, values: Sequence[str], number: int) -> list[Shell]:
    """Shells before the body of a loop; their status says whether it runs."""
    if node.kind == "for":
        shell.status = number < len(values)
        if shell.status:
            shell.variables.put(node.name, values[number])
        return [shell]
    if node.kind == "count":
        first, condition, last = node.condition
        _step(last if number else first, shell)
        shell.status = True
        return [shell] if condition == Arithmetic("") else _step(condition, shell)
    ends = follow(node.condition, shell)
    for one in ends:
        one.status = one.status if one.status is None or node.kind == "while" else not one.status
    return ends


def _leaves(shell: Shell) -> bool:
    """Tell whether a loop ends for a shell, which then goes on behind it."""
    word, _, levels = shell.flow.partition(" ")
    if word not in ("break", "continue"):
        return bool(word)
    further = int(levels) - 1 if levels.isdigit() else 0
    shell.flow = f"{word} {further}" if further else ""
    return word == "break" or bool(further)


def _unknown_loop(node: Loop, shell: Shell) -> list[Shell]:
    """A shell behind a loop of which nobody knows how often it runs: what it sets is not known."""
    names = {node.name} - {""}
    while True:
        child = shell.copy()
        child.variables = replace(child.variables, touched=set())
        forget(child, names, node.source)
        condition = () if node.kind in ("for", "count") else node.condition
        ends = follow((*condition, *node.body), child)
        if child.variables.touched <= names:
            break
        names |= child.variables.touched
    for one in ends:
        shell.record(one.runs)
        shell.variables.open = shell.variables.open or one.variables.open
    forget(shell, names, node.source)
    shell.status = None
    return [shell]


# ---- commands ----


def _simple(node: Simple, shell: Shell) -> list[Shell]:
    shell.log.steps += 1
    if shell.log.steps > MOST_STEPS:
        raise ShellSyntaxError(f"it takes more than {MOST_STEPS:,} commands")
    shell.line = node.line or shell.line
    words = shell.words
    given = words.fields(*node.words)
    text = _document(node, words)
    shell.log.written |= {shell.path(words.value(one)) for one in node.files}
    if given and given[0] in DECLARING:
        declare(node, given, shell)
        return [shell]
    saved = {one.name: shell.variables.values.get(one.name, False) for one in node.assignments}
    for one in node.assignments:
        words.assign(one)
    if not given:
        values = [word for one in node.assignments for word in (one.value, *(one.items or ()))]
        shell.status = None if any(re.search(r"\$\([^(]|`", word) for word in values) else True
        if node.kind == "file":
            shell.show(None)
        return [shell]
    exported, shell.exported = shell.exported, shell.exported | saved.keys()

    def run() -> list[Shell]:
        return _execute(given, text, shell)

    ends = _silently(run, shell) if node.silent else run()
    for end in ends:
        end.exported = end.exported - saved.keys() | exported
        for name, value in saved.items():
            end.variables.restore(name, value)
    return ends


def _document(node: Simple, words: Words) -> str | None:
    """A here-document or here-string."""
    if node.text is None or node.kind == "literal":
        return node.text
    if node.kind == "string":
        return words.value(node.text) + "\n"
    return "".join(piece.text for piece in words.pieces(node.text.replace('"', '\\"'), quoted=True))


def _execute(given: list[str], text: str | None, shell: Shell) -> list[Shell]:
    """A command with its words expanded. text: of its here-document."""
    name, rest = given[0], given[1:]
    if name in shell.functions:
        return _call(shell.functions[name], rest, shell)
    if name in ("command", "builtin") and rest:
        return _execute(rest, text, shell)
    if name == "exec" and rest:
        ends = _execute(rest, text, shell)
        for end in ends:
            end.flow = "exit"
        return ends
    if name == "eval":
        return _eval(" ".join(rest), shell)
    if name in ("source", "."):
        return _source_file(rest, shell)
    if builtin := BUILTINS.get(name):
        builtin(shell, rest, text)
        return [shell]
    return _external(given, text, shell)


def _call(body: Node, given: list[str], shell: Shell) -> list[Shell]:
    """A function of the script."""
    arguments, variables, references = shell.variables.arguments, shell.variables, shell.variables.references
    variables.set_arguments(given)
    shell.locals = (*shell.locals, {})
    ends = _step(body, shell)
    for end in ends:
        for name, value in end.locals[-1].items():
            end.variables.restore(name, value)
        end.variables.fixed -= end.locals[-1].keys()
        end.variables.references = references
        end.locals, end.variables.arguments = end.locals[:-1], arguments
        end.flow = "" if end.flow == "return" else end.flow
    return ends


def _eval(text: str, shell: Shell) -> list[Shell]:
    if text.startswith(UNKNOWN):
        shell.not_read(f"eval {text}")
    try:
        return follow(parse(text), shell)
    except ShellSyntaxError as error:
        shell.not_read("eval", f": {error}")
    shell.status = None
    return [shell]


def _source_file(given: list[str], shell: Shell) -> list[Shell]:
    """Another file, in this shell."""
    text = _file(given[0] if given else "", shell)
    if text is None and _OF_PROGRAMS.search(given[0] if given else ""):
        shell.remark(f"source {given[0]} is not read")
    elif text is None:
        shell.not_read(f"source {' '.join(given[:1])}", _missing(given[0] if given else "", shell))
    if text is None:
        shell.status = None
        return [shell]
    arguments = shell.variables.arguments
    shell.variables.arguments = tuple(given[1:]) or arguments
    line, ends = shell.line, follow(_program(text, shell), shell)
    for end in ends:
        end.line, end.variables.arguments = line, arguments
        end.flow = "" if end.flow == "return" else end.flow
    return ends


def _file(path: str, shell: Shell) -> str | None:
    """A file that a script names: from the folder where it is started, or from its own; None for one that
    the script may write itself."""
    here = shell.path(path) if path else ""
    if not here or here in shell.log.written:
        return None
    for file in (here, os.path.join(os.path.dirname(shell.file), os.path.relpath(here))):
        try:
            return contents_within(Path(file), LARGEST).decode().replace("\r\n", "\n")
        except (OSError, ValueError):
            continue
    return None


def _missing(path: str, shell: Shell) -> str:
    written = shell.path(path) in shell.log.written - {""}
    return ": the script may write it" if written else ": no such file is here"


def _external(given: list[str], text: str | None, shell: Shell) -> list[Shell]:
    """A program; of one that starts a shell, what that starts."""
    ends, name = [shell], PurePosixPath(given[0]).name
    if name in FEEDERS:
        given = _fed(given)
    if inner := _nested_program(given, text, shell):
        before, program, arguments = inner
        child = shell.copy()
        kept = child.variables.values if "*" in child.exported else child.exported
        child.variables = Variables({name: one for name, one in child.variables.values.items() if name in kept},
                                    child.variables.named, arguments=arguments, why=child.log.why)  # fmt: skip
        child.functions, child.flow = {name: one for name, one in child.functions.items() if name in kept}, ""
        ends = _subshell(_program(program, child), child, shell, before)
    else:
        if any(FLAG.match(one) for one in given):
            shell.record([Run(shell.line, tuple(given))])
        if name not in READERS:
            shell.log.written |= {shell.path(word) for word in given[1:]}
    for end in ends:
        end.status, end.flow = None, ""
        if given[0] not in SILENT:
            end.show(None)
    return ends


def _fed(given: Sequence[str]) -> list[str]:
    """The words of a command to which a program adds others."""
    marks = [word.removeprefix("-I") or after for word, after in pairwise(given) if word.startswith("-I")]
    mark = re.compile("|".join((r"\{[\w.%/#-]*\}", *map(re.escape, marks))))
    found = [mark.sub(lambda one: unknown(one[0]), word) for word in given]
    return found if found != given else [*found, unknown(given[0]) + SEVERAL]


class Nested(NamedTuple):
    """The words before a shell that a command starts, its program, and its arguments, if they are known."""

    before: list[str]
    program: str
    arguments: tuple[str, ...] | None


def _nested_program(given: list[str], text: str | None, shell: Shell) -> Nested | None:
    """Return what a shell runs that a command starts; None where it starts none, or none that is read."""
    for number, word in enumerate(given):
        if word.startswith("--wrap="):
            return Nested(given[:number], word.removeprefix("--wrap="), ())
        if PurePosixPath(word).name not in SHELLS:
            continue
        rest = given[number + 1 :]
        while rest and rest[0].startswith("-"):
            if re.fullmatch(r"-\w*c\w*", rest[0]):
                return Nested(given[:number], rest[1], tuple(rest[3:])) if len(rest) > 1 else None
            rest = rest[2 if rest[0] in ("-o", "--rcfile") else 1 :]
        if rest and (found := _file(rest[0], shell)) is not None:
            return Nested(given[:number], found, tuple(rest[1:]))
        if rest:
            shell.remark(f"{word} {rest[0]} is not read{_missing(rest[0], shell)}")
            return None
        if not text:
            shell.remark(f"what {word} reads is not followed")
        return Nested(given[:number], text, ()) if text else None
    if given[0] == "sbatch" and text:
        return Nested(given[:1], text, ())
    last = given[-1]
    if PurePosixPath(given[0]).name in REMOTE and len(given) > 1 and COMMAND.search(last):
        return Nested(given[:-1], last, None)
    return None
