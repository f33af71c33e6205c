"""Which branches of a shell script are taken, as far as the script itself says.

A condition on what it sets is decided; one on what a run brings (``$1``, the environment, files) is not, and
its branches stay, in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from plait.plan.shell_values import ASSIGNED, expanded, value_at

_FLAG = re.compile(r"(?:^|\s)[\"']?(--[a-z][\w-]+)")
_PATTERN = re.compile(r"\(?([^()]+)\)\s*(.*)", re.DOTALL)
_TEST = re.compile(r"(?:\[\[(?P<two>.*)\]\]|\[(?P<one>.*)\]|test\s(?P<word>.*))", re.DOTALL)
_GUARDED = re.compile(r"((?:! *)?(?:\[\[ .*? \]\]|\[ .*? \]|test [^&|]*))\s*(&&|\|\|)\s*(.*)", re.DOTALL)
_COMPARED = re.compile(r"(\S*)\s+(==?|!=|-eq|-ne|-gt|-ge|-lt|-le)\s+(\S*)")
_ORDERS = {"-eq": (0,), "-ne": (-1, 1), "-gt": (1,), "-ge": (0, 1), "-lt": (-1,), "-le": (-1, 0)}
"""Signs of the difference of two numbers."""


@dataclass
class _Branch:
    """One that is open. word: of a ``case``, None of an ``if``. named: the condition as it stands. live:
    whether its statements run, None where nobody knows. passed: the same of any branch before. waits: for the
    next pattern of a ``case``."""

    word: str | None
    named: str
    live: bool | None = False
    passed: bool | None = False
    waits: bool = False

    def close(self) -> None:
        """End a branch; the next one begins where it is opened."""
        self.passed = True if True in (self.live, self.passed) else None if None in (self.live, self.passed) else False
        self.live = False

    def open(self, decided: bool | None) -> None:
        """Begin a branch, which runs if none before did and its condition holds."""
        self.live = False if self.passed or decided is False else True if decided and self.passed is False else None


@dataclass
class Taken:
    """text: of what runs, a statement a line. open: conditions that are not decided, with what they set."""

    text: str
    open: dict[str, list[str]] = field(default_factory=dict[str, list[str]])


def taken(text: str) -> Taken:
    """What of a script runs. A text whose quotes do not close stays as it is.

    >>> taken('A=1; if [ $A = 1 ]; then B=2; else B=3; fi').text.split()
    ['A=1', 'B=2']
    >>> taken('case $1 in x) B=2;; *) B=3;; esac').open
    {'case $1': ['B']}
    """
    parts = list(statements(text))
    if parts and parts[-1] is None:
        return Taken(text)
    found, stack, kept, known = Taken(""), list[_Branch](), list[str](), dict[str, str]()
    for part in (piece for whole in parts if whole for piece in _assignments(whole.strip())):
        plain = _opened(part, stack, known)
        if not plain or any(one.live is False for one in stack):
            continue
        unsure = [one.named for one in stack if one.live is None]
        if guarded := _GUARDED.fullmatch(plain):
            told = _decided(guarded[1], known)
            if told is (guarded[2] == "||"):
                continue
            plain, unsure = guarded[3], [*unsure, *([guarded[1]] if told is None else [])]
        kept.append(plain)
        assigned = ASSIGNED.match(plain)
        if assigned:
            value = plain[assigned.end() :].strip().strip("\"'")
            name = assigned[1]
            known[name] = "$" if unsure else known.get(name, "") + value if assigned[2] else value
        if unsure:
            found.open.setdefault(unsure[-1], []).extend([assigned[1]] if assigned else _FLAG.findall(plain))
    found.text = "\n".join(kept) + "\n"
    found.open = {named: list(dict.fromkeys(names)) for named, names in found.open.items() if names}
    return found


def statements(text: str) -> Iterator[str | None]:
    """Between ends of lines and semicolons that no quote and no bracket holds; ``;;`` is one of its own. None
    at the end where a quote or a bracket does not close.

    >>> list(statements('a;b "c;d"\\nE=(1;\\n2)'))
    ['a', 'b "c;d"', 'E=(1;\\n2)']
    """
    begin = at = depth = 0
    quote = ""
    while at < len(text):
        one = text[at]
        if quote:
            at += one == "\\" and quote == '"'
            quote = "" if one == quote else quote
        elif one == "\\":
            at += 1
        elif one in "'\"`":
            quote = one
        elif one == "#" and (at == 0 or text[at - 1] in " \t\n;"):
            at = (text + "\n").index("\n", at) - 1
        elif one in "({" and (one == "(" or text[at - 1 : at] == "$" or depth):
            depth += 1
        elif one in ")}" and depth:
            depth -= 1
        elif one in ";\n" and not depth:
            yield text[begin:at]
            if text[at : at + 2] == ";;":
                yield ";;"
                at += 1
            begin = at + 1
        at += 1
    yield text[begin:]
    if quote or depth:
        yield None


def _assignments(part: str) -> list[str]:
    """A statement; one of several assignments, and of a command behind these, as each of them.

    >>> _assignments('export A=1 B="2 3"'), _assignments("run A=1 B=2")
    (['export A=1', 'B="2 3"'], ['run A=1 B=2'])
    """
    match = ASSIGNED.match(part)
    if not match:
        return [part]
    end = value_at(part, match.end())[1]
    rest = part[end:].strip()
    return [part[:end], *_assignments(rest)] if rest and ASSIGNED.match(rest) else [part]


def _opened(part: str, stack: list[_Branch], known: dict[str, str]) -> str:
    """A statement behind words that open and close branches, which the stack follows; nothing where there is
    none."""
    word, rest = (*part.split(maxsplit=1), "", "")[:2]
    top = stack[-1] if stack else None
    if word == "if":
        stack.append(_Branch(None, part))
        stack[-1].open(_decided(rest, known))
    elif word == "case" and (match := re.fullmatch(r"(\S+)\s+in\b\s*(.*)", rest, re.DOTALL)):
        stack.append(_Branch(expanded(match[1], known).strip("\"'"), f"case {match[1]}", waits=True))
        return _opened(match[2], stack, known) if match[2] else ""
    elif top and word in ("fi", "esac"):
        stack.pop()
    elif top and word == "then":
        return _opened(rest, stack, known) if rest else ""
    elif top and top.word is None and word in ("elif", "else"):
        top.close()
        top.open(_decided(rest, known) if word == "elif" else True)
        return _opened(rest, stack, known) if word == "else" and rest else ""
    elif top and top.word is not None and part == ";;":
        top.close()
        top.waits = True
    elif top and top.waits and (match := _PATTERN.fullmatch(part)):
        top.waits = False
        top.open(_matches(top.word or "", match[1]))
        return _opened(match[2], stack, known) if match[2] else ""
    else:
        return part
    return ""


def _matches(word: str, patterns: str) -> bool | None:
    """Whether a word is one of a case's patterns."""
    if patterns.strip() == "*":
        return True
    if "$" in word or "$" in patterns:
        return None
    return any(fnmatchcase(word, one.strip().strip("\"'")) for one in patterns.split("|"))


def _decided(condition: str, known: dict[str, str]) -> bool | None:
    """Whether a condition holds; None where the script does not say."""
    text = condition.strip()
    for joint, ends in (("||", True), ("&&", False)):
        if len(sides := _sides(text, joint)) > 1:
            return _joined([_decided(one, known) for one in sides], ends=ends)
    negated, text = text.startswith("! "), text.removeprefix("! ").strip()
    match = _TEST.fullmatch(text)
    inner = next(filter(None, match.groups()), "").strip() if match else ""
    for joint, ends in (("||", True), ("&&", False)):
        if joint in inner:
            told = _joined([_compared(one.strip(), known) for one in inner.split(joint)], ends=ends)
            break
    else:
        told = _compared(inner, known) if inner else None
    return told if told is None else told != negated


def _sides(text: str, joint: str) -> list[str]:
    """Conditions that a joint connects outside of brackets."""
    found = [""]
    for piece in text.split(joint):
        whole = found[-1].count("[") == found[-1].count("]")
        found[-1:] = [found[-1], piece] if found[-1] and whole else [found[-1] + joint * bool(found[-1]) + piece]
    return found


def _joined(sides: list[bool | None], *, ends: bool) -> bool | None:
    """Of several conditions. ends: what one of them has that decides all."""
    return ends if ends in sides else None if None in sides else not ends


def _compared(text: str, known: dict[str, str]) -> bool | None:
    """A comparison of words or numbers, or whether one is empty."""
    told = " ".join(word.strip("\"'") or "''" for word in expanded(text, known).split())
    if "$" in told or "`" in told:
        return None
    if match := re.fullmatch(r"(-z|-n)\s+(\S+)", told):
        return (match[2] == "''") == (match[1] == "-z")
    if not (match := _COMPARED.fullmatch(told)):
        return None
    left, how, right = match.groups()
    if how in _ORDERS:
        try:
            one, other = int(left), int(right)
        except ValueError:
            return None
        return ((one > other) - (one < other)) in _ORDERS[how]
    return fnmatchcase(left, right) == (how != "!=")
