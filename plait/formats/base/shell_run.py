"""An interpreter of shell scripts that collects the started commands without running them.

The script's own variables decide conditions and loops. If only a run decides (arguments,
environment, files, other programs), both branches are followed, in two shells. A loop with an
unknown number of rounds leaves its variables unknown. A form that Plait does not interpret is
refused."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import takewhile
from pathlib import Path, PurePosixPath

from plait.core.base.files import contents_within
from plait.formats.base.shell_builtins import BUILTINS, Run, Shell, declare
from plait.formats.base.shell_syntax import SEVERAL, UNKNOWN, Node, ShellSyntaxError, parse, walk
from plait.formats.base.shell_words import Value, combine

MOST_STEPS = 20_000
"""The largest number of commands that are interpreted."""
MOST_SHELLS = 64
"""The largest number of shells that are followed at once."""
FLAG = re.compile(r"--[A-Za-z]")
COMMAND = re.compile(r"\s--[a-z]")
"""A flag within a whole command that is passed as one word."""
LARGEST = 2 << 20
"""The largest file that is read, in bytes."""
REMOTE = ("ssh", "pdsh", "clush", "docker", "podman", "kubectl", "apptainer", "singularity", "su", "sudo")
"""Programs that run their last argument in a shell."""
SHELLS = ("bash", "sh", "zsh", "dash", "ksh")
READERS = frozenset(["chmod", "ls", "grep", "egrep", "awk", "wc", "head", "tail", "diff", "stat", "md5sum"])
"""Programs that write none of the files among their arguments."""
_OF_PROGRAMS = re.compile(r"(activate|rc|profile|conda\.sh|vars\.sh)$|^/(etc|opt)/")
"""Names of files that set up programs."""


def follow_script(text: str, file: str, variables: Mapping[str, str]) -> list[Shell]:
    """Return the shells in which a script may end. file: the script's path. variables: its
    environment. Raises ShellSyntaxError if it is no valid bash or cannot be interpreted."""
    given: dict[str, Value] = {
        **variables,
        "PWD": os.getcwd(),
        "IFS": " \t\n",
        **({"0": file, "BASH_SOURCE": [file]} if file else {}),
    }
    shell = Shell(_capture, given, file=file, exported=frozenset(variables))
    if "\r\n" in text:
        shell.log.remarks.append("Lines end as in DOS: they are read without what bash would pass on of their ends.")
    return follow(_program(text.replace("\r\n", "\n"), shell, lines=True), shell)


def _program(text: str, shell: Shell, *, lines: bool = False) -> list[Node]:
    """Return the commands of a script's text, and add the variables that they set to the shell's
    own names."""
    tree, fresh, more = parse(text, lines=lines), set[str](), set[str]()
    for node in walk(tree):
        declared = node.Type == "DeclClause" and node.Variant.Value != "local"
        for one in (node.Args if declared else node.Assigns) or ():
            if one.Name and not one.Naked:
                used = (one.Append and not one.Array) or re.search(rf"\$\{{?{one.Name.Value}\b", one.text)
                (more if used else fresh).add(one.Name.Value)
    shell.own |= fresh - more
    return tree.Stmts or []


def follow(nodes: Sequence[Node] | None, shell: Shell) -> list[Shell]:
    """Return the shells in which commands may end. Raises ShellSyntaxError for more than
    ``MOST_STEPS`` commands."""
    shells = [shell]
    for node in nodes or ():
        shells = _deduplicate([end for one in shells for end in ([one] if one.flow else _statement(node, one))])
    return shells


def _deduplicate(shells: Sequence[Shell]) -> list[Shell]:
    """Return the distinct shells. A shell that exited without starting a command is dropped: it
    trains nothing."""
    live = [one for one in shells if one.flow != "exit" or one.runs] or shells[:1]
    found = list[Shell]()
    for one in live:
        if same := next((other for other in found if other == one), None):
            same.decided = tuple(what for what in same.decided if what in one.decided)
        else:
            found.append(one)
    return found if len(found) <= MOST_SHELLS else [_merge(found)]


def _merge(shells: Sequence[Shell]) -> Shell:
    """Merge shells into one, in which variables that differ are unknown."""
    first = shells[0]
    for other in shells[1:]:
        for name in {*first.values, *other.values}:
            if first.values.get(name, False) != other.values.get(name, False):
                first.forget(name, other.decided[-1][0] if other.decided else "a run")
        first.record(other.runs)
        first.open = first.open or other.open
    return first


def _capture(nodes: Sequence[Node], shell: Shell) -> str | None:
    """Return the output of commands; None if it is unknown."""
    child = shell.copy()
    child.printed = ()
    ends = follow(nodes, child)
    for one in ends:
        shell.record(one.runs)
    printed = {one.printed for one in ends}
    parts = printed.pop() if len(printed) == 1 else (None,)
    return None if parts is None or None in parts else "".join(map(str, parts)).rstrip("\n")


def _subshell(nodes: Sequence[Node] | None, child: Shell, shell: Shell, before: Sequence[str] = ()) -> list[Shell]:
    """Run commands in a child shell: its started commands and output count, its variables do not.
    before: words that start the child."""
    found, child.runs = list[Shell](), ()
    for end in follow(nodes, child):
        one = shell.copy()
        one.record(Run(run.line, (*before, *run.words)) for run in end.runs)
        one.status, one.printed, one.decided = end.status, end.printed, end.decided
        found.append(one)
    return _deduplicate(found)


def _statement(node: Node, shell: Shell) -> list[Shell]:
    """Interpret a command with its redirections."""
    shell.line, text, silent = node.line or shell.line, None, False
    if node.Background:
        return _subshell([Node(node, Background=False)], shell.copy(), shell)
    for one in node.Redirs or ():
        if one.Op in ("<<", "<<-", "<<<"):
            text = shell.document(one)
        elif ">" in one.Op:
            silent = silent or not one.N or one.N.Value == "1"
            shell.log.written.add(shell.path(shell.value(one.Word)))
    if not node.Cmd:
        shell.show(None)
        return [shell]
    printed, shell.printed = shell.printed, None if silent else shell.printed
    ends = _command(node.Cmd, text, shell)
    for end in ends:
        end.printed = printed if silent else end.printed
        end.status = end.status if end.status is None else end.status is not bool(node.Negated)
    return ends


def _command(node: Node, text: str | None, shell: Shell) -> list[Shell]:
    """Interpret a command. text: the here-document's."""
    match node.Type:
        case "CallExpr":
            return _simple(node, text, shell)
        case "BinaryCmd":
            return _chain(node, shell) if node.Op in ("&&", "||") else _pipeline(node, shell)
        case "Block":
            return follow(node.Stmts, shell)
        case "Subshell":
            return _subshell(node.Stmts, shell.copy(), shell)
        case "TimeClause":
            return follow([node.Stmt], shell)
        case "IfClause":
            return _if(node, shell, _source(node, node.Cond[-1]))
        case "WhileClause":
            return _loop(node, shell, _source(node, node.Cond[-1]))
        case "ForClause" if not node.Select:
            return _loop(node, shell, _source(node, node.Loop))
        case "CaseClause" if all(one.Op == ";;" for one in node.Items or ()):
            return _case(node, shell)
        case "FuncDecl":
            shell.functions = {**shell.functions, node.Name.Value: node.Body}
            shell.status = True
        case "DeclClause":
            shell.status = declare(node, shell)
        case "TestClause":
            shell.status = shell.test(node.X)
        case "ArithmCmd" | "LetClause":
            numbers = [shell.number(one) for one in node.Exprs or [node.X]]
            shell.status = None if numbers[-1] is None else bool(numbers[-1])
        case _:
            raise shell.refuse(node.text.split("\n")[0])
    return [shell]


def _source(node: Node, last: Node) -> str:
    """Return the source text from one node to the end of another, with its line."""
    text = node.raw[node.Pos.Offset : last.End.Offset].decode().split("\n")[0].rstrip("; ")
    return f"{text} (line {node.line})" if node.line else text


def _ways(shell: Shell, source: str) -> list[Shell]:
    """Return shells to continue with after a command: the shell itself, or, if only a run decides
    its exit status, one copy for each outcome."""
    if shell.status is not None or shell.flow:
        return [shell]
    other = shell.copy()
    for one, status in ((shell, True), (other, False)):
        one.status, one.decided = status, (*one.decided, (source, status))
    return [shell, other]


def _chain(node: Node, shell: Shell) -> list[Shell]:
    first, found = node.X, list[Shell]()
    while first.Cmd.Op in ("&&", "||"):
        first = first.Cmd.X
    for end in _statement(node.X, shell):
        for one in _ways(end, _source(first, first)):
            goes_on = not one.flow and one.status is (node.Op == "&&")
            found += _statement(node.Y, one) if goes_on else [one]
    return _deduplicate(found)


def _pipeline(node: Node, shell: Shell) -> list[Shell]:
    """Interpret both sides of a pipe in shells of their own; the output is unknown."""
    printed = shell.printed
    ends = _subshell([Node(node.X, Background=True), Node(node.Y, Background=True)], shell.copy(), shell)
    for one in ends:
        one.status, one.printed = None, printed
        one.show(None)
    return ends


def _if(node: Node, shell: Shell, source: str) -> list[Shell]:
    if not node.Cond:
        return follow(node.Then, shell)
    found = list[Shell]()
    for one in (way for end in follow(node.Cond, shell) for way in _ways(end, source)):
        if one.flow:
            found.append(one)
        elif one.status:
            found += follow(node.Then, one)
        else:
            one.status = True
            found += _if(node.Else, one, source) if node.Else else [one]
    return _deduplicate(found)


def _case(node: Node, shell: Shell) -> list[Shell]:
    text, source, found = shell.value(node.Word), _source(node, node.Word), list[Shell]()
    for arm in node.Items or ():
        known = [None if UNKNOWN in text else shell.pattern(one) for one in arm.Patterns]
        sides = [None if one is None else fnmatchcase(text, one) for one in known]
        shell.status = True if any(one.text == "*" for one in arm.Patterns) else combine(sides, ends=True)
        taken, *others = _ways(shell, source)
        if taken.status:
            taken.status = True
            found += follow(arm.Stmts, taken)
            if not others:
                return _deduplicate(found)
            shell = others[0]
    shell.status = True
    return _deduplicate([*found, shell])


# ---- loops ----


def _loop(node: Node, shell: Shell, source: str) -> list[Shell]:
    """Interpret a loop. Only ``for`` over known words has a known number of rounds."""
    loop = node.Loop
    values = _values(loop, shell) if loop and loop.Type == "WordIter" else None
    if values is None:
        return _unknown_loop(node, shell, source)
    live, done = [shell], list[Shell]()
    for value in values:
        after = list[Shell]()
        for one in live:
            one.put(loop.Name.Value, value)
            for end in follow(node.Do, one):
                (done if _leaves(end) else after).append(end)
        live = _deduplicate(after)
    return _deduplicate([*done, *live])


def _values(loop: Node, shell: Shell) -> list[str] | None:
    """Return the values of a ``for`` loop; None if only a run decides."""
    found = shell.get("@")
    if loop.InPos:
        found = shell.fields(*loop.Items or ())
    return None if not isinstance(found, list) or any(one.endswith(SEVERAL) for one in found) else found


def _leaves(shell: Shell) -> bool:
    """True if a loop ends for a shell by ``break``, ``exit`` or the like; updates the shell's
    ``flow``."""
    word, _, levels = shell.flow.partition(" ")
    if word not in ("break", "continue"):
        return bool(word)
    further = int(levels) - 1 if levels.isdigit() else 0
    shell.flow = f"{word} {further}" if further else ""
    return word == "break" or bool(further)


def _unknown_loop(node: Node, shell: Shell, source: str) -> list[Shell]:
    """Return the shell after a loop with an unknown number of rounds: variables set in the loop are
    unknown."""
    condition, loop, names = node.Cond or (), node.Loop or Node(), set[str]()
    while True:
        child = replace(shell.copy(), touched=set())
        for name in (*names, *([loop.Name.Value] if loop.Name else [])):
            child.forget(name, source)
        for one in (loop.Init, loop.Cond, loop.Post):
            child.number(one)
        ends = follow([*condition, *node.Do], child)
        if child.touched <= names:
            break
        names |= child.touched
    for one in ends:
        shell.record(one.runs)
        shell.open = shell.open or one.open
    for name in names:
        shell.forget(name, source)
    shell.status = None
    return [shell]


# ---- commands ----


def _simple(node: Node, text: str | None, shell: Shell) -> list[Shell]:
    shell.log.steps += 1
    if shell.log.steps > MOST_STEPS:
        raise ShellSyntaxError(f"it takes more than {MOST_STEPS:,} commands")
    assigned = node.Assigns or ()
    given = shell.fields(*node.Args or ())
    saved = {one.Name.Value: shell.values.get(one.Name.Value, False) for one in assigned}
    for one in assigned:
        shell.put(*shell.assignment(one))
    if not given:
        shell.status = None if any(one.Type == "CmdSubst" for one in walk([*assigned])) else True
        return [shell]
    exported, shell.exported = shell.exported, shell.exported | saved.keys()
    ends = _execute(given, text, shell)
    for end in ends:
        end.exported = end.exported - saved.keys() | exported
        for name, value in saved.items():
            end.put(name, value)
    return ends


def _execute(words: list[str], text: str | None, shell: Shell) -> list[Shell]:
    """Run a command by its expanded words. text: the here-document's."""
    name, rest = words[0], words[1:]
    if name in shell.functions:
        return _call(shell.functions[name], rest, shell)
    if name in ("command", "builtin", "exec") and rest:
        ends = _execute(rest, text, shell)
        for end in ends:
            end.flow = "exit" if name == "exec" else end.flow
        return ends
    if name == "eval":
        return _eval(" ".join(rest), shell)
    if name in ("source", "."):
        return _source_file(rest, shell)
    if builtin := BUILTINS.get(name):
        shell.status = builtin(shell, rest, text)
        return [shell]
    return _external(words, text, shell)


def _call(body: Node, arguments: list[str], shell: Shell) -> list[Shell]:
    """Call a function of the script."""
    shell.locals = (*shell.locals, {"@": shell.get("@")})
    shell.set_arguments(arguments)
    ends = _statement(body, shell)
    for end in ends:
        for name, value in end.locals[-1].items():
            end.put(name, value)
        end.locals = end.locals[:-1]
        end.flow = "" if end.flow == "return" else end.flow
    return ends


def _eval(text: str, shell: Shell) -> list[Shell]:
    if text.startswith(UNKNOWN):
        shell.note_unread(f"eval {text}")
    return follow(parse(text).Stmts, shell)


def _source_file(words: list[str], shell: Shell) -> list[Shell]:
    """Run ``source``: another file in this shell."""
    name = words[0] if words else ""
    text = _file(name, shell)
    if text is None:
        if _OF_PROGRAMS.search(name):
            shell.remark(f"source {name} is not read")
        else:
            shell.note_unread(f"source {name}", _missing(name, shell))
        shell.status = None
        return [shell]
    line, arguments = shell.line, shell.get("@")
    if words[1:]:
        shell.set_arguments(words[1:])
    ends = follow(_program(text, shell), shell)
    for end in ends:
        end.line, end.flow = line, "" if end.flow == "return" else end.flow
        end.put("@", arguments)
    return ends


def _file(path: str, shell: Shell) -> str | None:
    """Return the text of a file relative to the shell's folder or the script's folder; None if it
    cannot be read, or if the script may write it."""
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


def _external(words: list[str], text: str | None, shell: Shell) -> list[Shell]:
    """Run an external program; if it starts a shell, interpret that shell's commands."""
    ends, name = [shell], PurePosixPath(words[0]).name
    inner, flags = _nested_program(words, text, shell), any(FLAG.match(one) for one in words)
    if name in ("xargs", "parallel") and (inner or flags):
        raise shell.refuse(" ".join(words[:3]))
    if inner:
        before, program, arguments = inner
        kept = {name: one for name, one in shell.values.items() if name in shell.exported}
        functions = {name: one for name, one in shell.functions.items() if name in shell.exported}
        child = replace(shell, values=kept, functions=functions, own=frozenset(), fixed=frozenset(), open="")
        child.set_arguments(arguments) if arguments is not None else None
        ends = _subshell(_program(program, child), child, shell, before)
    elif flags:
        shell.record([Run(shell.line, tuple(words))])
    if not inner and name not in READERS:
        shell.log.written |= {shell.path(word) for word in words[1:]}
    for end in ends:
        end.status, end.flow = None, ""
        end.show(None)
    return ends


def _nested_program(
    words: list[str], text: str | None, shell: Shell
) -> tuple[list[str], str, Sequence[str] | None] | None:
    """Return the words before a started shell, the shell's script text, and its arguments (None if
    unknown). None if the command starts no shell, or one whose script is not read."""
    at = next((number for number, word in enumerate(words) if PurePosixPath(word).name in SHELLS), None)
    if at is None:
        if words[0] == "sbatch" and text:
            return words[:1], text, ()
        remote = PurePosixPath(words[0]).name in REMOTE and COMMAND.search(words[-1])
        return (words[:-1], words[-1], None) if remote else None
    options = [*takewhile(lambda one: one.startswith("-"), words[at + 1 :])]
    rest = words[at + 1 + len(options) :]
    if rest and any(re.fullmatch(r"-\w*c\w*", one) for one in options):
        return words[:at], rest[0], rest[2:]
    if rest and (found := _file(rest[0], shell)) is not None:
        return words[:at], found, rest[1:]
    if rest:
        shell.remark(f"{words[at]} {rest[0]} is not read{_missing(rest[0], shell)}")
    elif not text:
        shell.remark(f"what {words[at]} reads is not followed")
    return (words[:at], text, ()) if text and not rest else None
