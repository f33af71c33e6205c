"""Commands that a shell has itself, or that print what follows from their words."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

from plait.plan.shell_nodes import Simple
from plait.plan.shell_state import Shell, forget
from plait.plan.shell_syntax import UNKNOWN, ShellSyntaxError
from plait.plan.shell_tests import evaluate
from plait.plan.shell_words import LONGEST_MATCHED, Value, unknown

Builtin = Callable[[Shell, list[str], str | None], None]
"""A shell, the words behind the command, the text of its here-document."""


def declare(node: Simple, given: Sequence[str], shell: Shell) -> None:
    """``export``, ``local``, ``declare`` and their kin."""
    options = "".join(one for one in given[1:] if one.startswith(("-", "+")))
    bare = [one for one in given[1:] if re.fullmatch(r"[A-Za-z_]\w*", one)]
    names, variables = [*bare, *(one.name for one in node.assignments)], shell.variables
    local = shell.locals and given[0] in ("local", "declare", "typeset") and "g" not in options
    if local:
        kept = {name: variables.values.get(name, False) for name in names}
        shell.locals = (*shell.locals[:-1], kept | shell.locals[-1])
    if "A" in options:
        variables.named |= set(names)
    if "i" in options:
        variables.whole |= set(names)
    values = dict[str, Value]()  # words are expanded before any of them is set
    for one in node.assignments:
        before = variables.values.get(one.name, False)
        shell.words.assign(one)
        values[one.name] = variables.values.get(one.name)
        variables.restore(one.name, before)
    variables.values |= values | (dict.fromkeys(bare) if local else {})
    for one in given[1:]:
        if UNKNOWN in one:
            shell.not_read(f"{given[0]} {one}")
        elif found := re.fullmatch(r"([A-Za-z_]\w*)=(.*)", one, re.DOTALL):
            variables.put(found[1], found[2])
    if "n" in options:
        named = {name: str(value).partition("[")[0] for name, value in values.items()}
        variables.references = {**variables.references, **named}
    if set("nul") & set(options):  # names of others, and texts that change as they are set
        forget(shell, names, f"line {shell.line}")
    if given[0] == "readonly" or "r" in options:
        variables.fixed |= set(names)
    if given[0] == "export" or "x" in options:
        shell.exported |= set(names)
    shell.status = True


def _status(value: bool | None) -> Builtin:
    def run(shell: Shell, given: list[str], text: str | None) -> None:
        shell.status = value

    return run


def _flow(shell: Shell, word: str, given: Sequence[str]) -> None:
    if word in ("exit", "return"):
        shell.status = shell.status if not given else given[0] == "0" if given[0].isdigit() else None
        shell.flow = word
    else:
        shell.flow = f"{word} {given[0] if given and given[0].isdigit() else 1}"


def _test(shell: Shell, given: list[str], text: str | None) -> None:
    tokens = given[:-1] if given[-1:] == ["]"] else given
    shell.status = evaluate(tokens, None) if tokens else False


def _let(shell: Shell, given: list[str], text: str | None) -> None:
    numbers = [shell.words.number(one) for one in given]
    shell.status = None if not numbers or numbers[-1] is None else bool(numbers[-1])


def _set(shell: Shell, given: list[str], text: str | None) -> None:
    if "--" in given:
        shell.variables.set_arguments(given[given.index("--") + 1 :])
    if given[:1] == ["-a"] or given[:2] == ["-o", "allexport"]:
        shell.exported |= {"*"}
    elif given[:1] == ["+a"] or given[:2] == ["+o", "allexport"]:
        shell.exported = shell.exported - {"*"} | shell.variables.values.keys()
    shell.status = True


def _shift(shell: Shell, given: list[str], text: str | None) -> None:
    arguments, count = shell.variables.arguments, given[0] if given else "1"
    if arguments is not None and count.isdigit():
        shell.variables.arguments = arguments[int(count) :]
    shell.status = True


def _unset(shell: Shell, given: list[str], text: str | None) -> None:
    for name in given:
        found = re.fullmatch(r"(\w+)(?:\[(.*)\])?", name)
        if found and found[2]:
            items = shell.variables.values.get(found[1])
            kept = {key: one for key, one in items.items() if key != found[2]} if isinstance(items, dict) else None
            shell.variables.put(found[1], kept)
        elif found:
            shell.variables.put(name, None)
    shell.status = True


def _read(shell: Shell, given: list[str], text: str | None) -> None:
    """``read``: of a text that stands in the script, its words."""
    options, names = _options(given, "adinNptu")
    names = [options["a"]] if "a" in options else names or ["REPLY"]
    whole, marks = options.get("d") == "", shell.variables.blanks
    line = (text or "") if whole else (text or "").split("\n")[0]
    known = text is not None and UNKNOWN not in line and ("r" in options or "\\" not in line)
    known = known and not options.keys() & set("inNtu") and (whole or "d" not in options)
    if "a" in options:
        items = {str(at): one for at, one in enumerate(filter(None, shell.words.split(line)))}
        shell.variables.put(names[0], items if known else unknown(f"${{{names[0]}[@]}}"))
    else:
        line = line.strip("".join(one for one in marks if one.isspace()))
        words = re.split(f"[{re.escape(marks)}]+", line, maxsplit=len(names) - 1) if len(names) > 1 else [line]
        for name, word in zip_longest(names, words, fillvalue=""):
            shell.variables.put(name, word if known else unknown(f"${name}"))
    shell.status = not whole if known else None


def _options(given: Sequence[str], valued: str) -> tuple[dict[str, str], list[str]]:
    """Options of one letter with their values, and the words behind them. valued: letters that take one."""
    found, rest = dict[str, str](), list(given)
    while rest and rest[0].startswith("-") and len(rest[0]) > 1:
        word = rest.pop(0)
        for at, letter in enumerate(word[1:], 2):
            if letter in valued:
                found[letter] = word[at:] or (rest.pop(0) if rest else "")
                break
            found[letter] = ""
    return found, rest


def _shopt(shell: Shell, given: list[str], text: str | None) -> None:
    if "-s" in given and (found := [one for one in given if one.startswith("nocase")]):
        raise ShellSyntaxError(f"line {shell.line}: shopt {found[0]} is not read")
    shell.status = None


def _mapfile(shell: Shell, given: list[str], text: str | None) -> None:
    name = next((one for one in given if not one.startswith("-")), "MAPFILE")
    lines = (text or "").removesuffix("\n").split("\n")
    shell.variables.put(name, unknown(f"${{{name}[@]}}") if text is None or UNKNOWN in text or "-t" not in given else
                        {str(at): one for at, one in enumerate(lines)})  # fmt: skip
    shell.status = True


def _echo(shell: Shell, given: list[str], text: str | None) -> None:
    escapes = False
    while given and re.fullmatch(r"-[neE]+", given[0]):
        escapes, given = escapes or "e" in given[0], given[1:]
    text = " ".join(given) + "\n"
    shell.show(None if escapes and "\\" in text else text)
    shell.status = True


def _printf(shell: Shell, given: list[str], text: str | None) -> None:
    """``printf`` of texts and numbers."""
    name, rest = (given[1], given[2:]) if given[:1] == ["-v"] and len(given) > 2 else ("", given)
    found = _format(rest[0], rest[1:]) if rest else None
    if name:
        shell.variables.put(name, unknown(f"${name}") if found is None else found)
    else:
        shell.show(found)
    shell.status = True


def _format(form: str, given: Sequence[str]) -> str | None:
    marks = re.findall(r"%(.?)", form)
    kinds = [one for one in marks if one != "%"]
    if UNKNOWN in "".join((form, *given)) or not set(kinds) <= {"s", "d"} or len(kinds) != len(given):
        return None  # it repeats itself for more
    plain = form.replace("\\n", "\n").replace("\\t", "\t")
    if "\\" in plain:
        return None
    try:
        return plain % tuple(int(one) if kind == "d" else one for one, kind in zip(given, kinds, strict=True))
    except ValueError:
        return None


def _cat(shell: Shell, given: list[str], text: str | None) -> None:
    shell.show(text if not given else None)
    shell.status = True


def _cd(shell: Shell, given: list[str], text: str | None) -> None:
    """``cd``; nobody looks whether the folder is there."""
    before, to = shell.variables.values.get("PWD"), given[-1] if given else "~"
    known = isinstance(before, str) and UNKNOWN not in before + to and to[:1] not in ("-", "~")
    shell.variables.put("PWD", os.path.normpath(os.path.join(str(before), to)) if known else unknown("$PWD"))
    shell.status = None if not known else True


def _pwd(shell: Shell, given: list[str], text: str | None) -> None:
    found = shell.variables.values.get("PWD")
    shell.show(found if isinstance(found, str) and UNKNOWN not in found else None)
    shell.status = True


def _printer(made: Callable[[list[str]], str | None]) -> Builtin:
    """A program that prints what its words say."""

    def run(shell: Shell, given: list[str], text: str | None) -> None:
        shell.show(None if UNKNOWN in "".join(given) else made(given))
        shell.status = True

    return run


def _expr(shell: Shell, given: list[str], text: str | None) -> None:
    number = shell.words.number(" ".join(given)) if re.fullmatch(r"[-\d+*/% ()]*", " ".join(given)) else None
    shell.show(None if number is None else str(number))
    shell.status = None


def _basename(given: list[str]) -> str | None:
    if len(given) not in (1, 2) or given[0].startswith("-"):
        return None
    name = os.path.basename(given[0].rstrip("/"))
    return name.removesuffix(given[1]) if len(given) > 1 and name != given[1] else name


def _realpath(given: list[str]) -> str | None:
    """``realpath``, and ``readlink -f``, of a file that is no link."""
    return os.path.realpath(given[-1]) if given and not given[-1].startswith("-") else None


def _dirname(given: list[str]) -> str | None:
    return (os.path.dirname(given[0].rstrip("/")) or ".") if len(given) == 1 else None


def _seq(given: list[str]) -> str | None:
    if not 1 <= len(given) <= 3 or not all(re.fullmatch(r"-?\d+", one) for one in given):
        return None
    numbers = [int(one) for one in given]
    first, last = numbers[0] if len(numbers) > 1 else 1, numbers[-1]
    step = numbers[1] if len(numbers) > 2 else 1
    some = range(first, last + (1 if step > 0 else -1), step) if step else ()
    return "\n".join(map(str, some)) if len(some) <= LONGEST_MATCHED else None


BUILTINS: Mapping[str, Builtin] = {
    ":": _status(True), "true": _status(True), "false": _status(False), "test": _test, "[": _test, "let": _let,
    "set": _set, "shift": _shift, "unset": _unset, "read": _read, "mapfile": _mapfile, "readarray": _mapfile,
    "echo": _echo, "printf": _printf, "cat": _cat, "cd": _cd, "pwd": _pwd, "basename": _printer(_basename),
    "dirname": _printer(_dirname), "seq": _printer(_seq), "expr": _expr, "shopt": _shopt,
    "realpath": _printer(_realpath), "readlink": _printer(_realpath),
    **{word: lambda shell, given, text, word=word: _flow(shell, word, given)
       for word in ("exit", "return", "break", "continue")},
}  # fmt: skip
