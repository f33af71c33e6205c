"""Words of a shell script expanded as bash does, as far as the script itself says what they are.

What a run brings (arguments, the environment, output of programs) stays, in a value, as its source between
two ``UNKNOWN``. A variable that nobody sets counts as unset where a word says what to take then
(``${X:-8}``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate
from itertools import pairwise
from typing import NamedTuple

from plait.plan.shell_arithmetic import evaluate, targets
from plait.plan.shell_nodes import Assignment
from plait.plan.shell_syntax import UNKNOWN, ShellSyntaxError, part_end

LONGEST = 1 << 18
"""Letters of a value, and items."""
LONGEST_MATCHED = 2000
"""Letters of a value in which patterns are looked for."""
DEEPEST = 30
"""Numbers of which others are computed, one within another."""
_PARAMETER = re.compile(
    r"(!?)(#(?=[\w@*]))?([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[((?:[^][]|\[[^]]*\])*)\])?(.*)", re.DOTALL
)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "e": "\x1b", "a": "\a"}
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(-?\d+))?|([A-Za-z])\.\.([A-Za-z])")

Value = str | dict[str, str] | None
"""A text, an array by index, or None for what is unset."""


class Piece(NamedTuple):
    """A part of a word. plain: a letter of it may be a pattern's; splits: blanks in it end the word."""

    text: str
    plain: bool = False
    splits: bool = False


_ALWAYS = "HOME USER LOGNAME HOSTNAME PATH SHELL RANDOM SECONDS LINENO UID EUID PPID BASHPID BASH_VERSION SHLVL OSTYPE"
ALWAYS = frozenset(_ALWAYS.split())
"""Variables that every run has."""
SEVERAL = UNKNOWN * 2
"""Behind what is not known: it may be any number of words."""
END = Piece("\n")
"""Between two words of an array; compared by identity."""


def unknown(source: str) -> str:
    """A value that is not known. source: as it is written."""
    return f"{UNKNOWN}{source.replace(UNKNOWN, '')}{UNKNOWN}"


def known_part(text: str) -> str:
    """Return the known part of a value."""
    return "".join(text.split(UNKNOWN)[::2])


@dataclass
class Variables:
    """The variables of a shell. named: arrays whose indices are texts; whole: variables that hold numbers;
    fixed: those that stay. arguments: None where a run brings them. touched: names that were set, and why:
    sources of unknown values, both shared by copies. own: names that the script sets somewhere, which its
    environment has not. open: why variables that nobody sets may be set."""

    values: dict[str, Value] = field(default_factory=dict[str, Value])
    named: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    references: Mapping[str, str] = field(default_factory=dict[str, str])
    arguments: tuple[str, ...] | None = None
    own: frozenset[str] = frozenset()
    open: str = ""
    touched: set[str] = field(default_factory=set[str], compare=False)
    why: dict[str, str] = field(default_factory=dict[str, str], compare=False)

    @property
    def blanks(self) -> str:
        """Letters that end words (IFS)."""
        found = self.values.get("IFS")
        return found if isinstance(found, str) else " \t\n"

    def get(self, name: str, index: str = "") -> Value | bool:
        """A value, an item of an array, all of it for ``@`` and ``*``; False where a run brings it."""
        if name in ("@", "*") or (name.isdigit() and name != "0"):
            if self.arguments is None:
                return False
            if name.isdigit():
                return self.arguments[int(name) - 1] if int(name) <= len(self.arguments) else None
            return {str(number): one for number, one in enumerate(self.arguments)}
        if name == "#":
            return False if self.arguments is None else str(len(self.arguments))
        found = self.values.get(name, None if name in self.own and not self.open else False)
        if index in ("@", "*"):
            return {"0": found} if isinstance(found, str) and UNKNOWN not in found else found
        if UNKNOWN in index:
            return False
        if isinstance(found, dict):
            if _loose(found):
                return False
            keys = _ordered(found) if index.startswith("-") and name not in self.named else []
            return found.get(keys[int(index)] if keys and -int(index) <= len(keys) else index or "0")
        return found if index in ("", "0") or found is False else None

    def put(self, name: str, value: Value, index: str | None = None) -> None:
        """Set a variable, or an item of an array. Raises ShellSyntaxError for a value that is too long."""
        if name in self.fixed:
            return
        if other := self.references.get(name):
            self.put(other, unknown(f"${{{other}[@]}}"))  # a name of another variable
        if UNKNOWN in name:
            self.open = f"it sets {name.replace(UNKNOWN, '')}"
        if index is not None and UNKNOWN in index:
            value = unknown(f"${{{name}[@]}}")
        elif index is not None:
            before = self.values.get(name)
            items = dict(before) if isinstance(before, dict) else {"0": before} if isinstance(before, str) else {}
            value = {**items, index: str(value or "")}
        size = len(value) if isinstance(value, str) else len(value) + sum(map(len, value.values())) if value else 0
        if size > LONGEST:
            raise ShellSyntaxError(f"{name} grows beyond {LONGEST:,} letters")
        self.touched.add(name)
        self.values[name] = value

    def set_arguments(self, arguments: Sequence[str]) -> None:
        """Have arguments; where some of them may be any number of words, they are not known."""
        self.arguments = None if any(one.endswith(SEVERAL) for one in arguments) else tuple(arguments)

    def restore(self, name: str, value: Value | bool) -> None:
        """Have a variable as it was. value: False for one that was not there."""
        if isinstance(value, bool):
            self.values.pop(name, None)
        else:
            self.values[name] = value


class Words:
    """Expansion of words. output: what a command prints, None where that is not known."""

    def __init__(self, variables: Variables, output: Callable[[str], str | None]) -> None:
        self.variables, self._output = variables, output

    def fields(self, *words: str) -> list[str]:
        """Words as a command is given them."""
        return [one for word in words for raw in _braces(word) for one in self._fields(raw)]

    def _fields(self, word: str) -> Iterator[str]:
        text, some = "", False
        pieces = list(self.pieces(word))
        patterns = any((one.plain or one.splits) and re.search(r"[*?]", one.text) for one in pieces)
        if patterns and re.search(r"[/.]|(^|\s)[*?]+(\s|$)", "".join(one.text for one in pieces)):
            yield unknown(word) + SEVERAL  # names of files
            return
        for piece in pieces:
            if piece is END:
                if some:
                    yield text
                text, some = "", False
            elif not piece.splits:
                text, some = text + piece.text, True
            else:
                first, *others = (one + SEVERAL * (UNKNOWN in one) for one in self.split(piece.text))
                if first:
                    text, some = text + first, True
                for one in others:
                    if some:
                        yield text
                    text, some = one, bool(one)
        if some:
            yield text.replace(SEVERAL, "") + SEVERAL if SEVERAL in text else text

    def split(self, text: str) -> list[str]:
        """A text at the blanks (IFS) in it; the first and the last piece may be empty."""
        marks = self.variables.blanks
        if not marks:
            return [text]
        atoms = re.split(f"({UNKNOWN}[^{UNKNOWN}]*{UNKNOWN})", text)
        found = [""]
        for number, atom in enumerate(atoms):
            first, *others = [atom] if number % 2 else re.split(f"[{re.escape(marks)}]+", atom)
            found[-1] += first
            found += others
        return found

    def value(self, word: str) -> str:
        """A word as one text: what an assignment takes."""
        return "".join(" " if piece is END else piece.text for piece in self.pieces(word))

    def pattern(self, word: str) -> str | None:
        """A word as ``fnmatch`` has it; None where it is not known."""
        found = ""
        for one in self.pieces(word):
            found += one.text.replace("[^", "[!") if one.plain else re.sub(r"[*?[]", r"[\g<0>]", one.text)
        return None if UNKNOWN in found or re.search(r"[@?*+!]\(|\[:", found) else found

    def pieces(self, word: str, *, quoted: bool = False) -> Iterator[Piece]:
        """Parts of a word. quoted: within double quotes."""
        at = 0
        while at < len(word):
            one, end = word[at], part_end(word, at, quoted=quoted)
            part, at = word[at:end], end
            if one == "\\":
                if part != "\\\n":
                    yield Piece(part if quoted and part[1:] not in ("$", "`", '"', "\\") else part[1:])
            elif one == "'" and not quoted:
                yield Piece(part[1:-1])
            elif one == '"':
                inner = list(self.pieces(part[1:-1], quoted=True))
                yield from inner if inner or len(part) > 2 else [Piece("")]
            elif one == UNKNOWN:
                yield Piece(part)
            elif one == "`":
                yield self._substitution(re.sub(r"\\([$`\\])", r"\1", part[1:-1]), part, quoted)
            elif one == "$" and len(part) > 1:
                yield from self._dollar(part, quoted=quoted)
            elif one == "$" and not quoted and word[at : at + 1] == '"':
                continue  # a text that may be translated
            elif one == "~" and not quoted and at == 1:
                yield Piece(unknown(part))
            elif one in "<>" and not quoted:  # a placeholder, or the output of a program as a file
                yield Piece(unknown(word[at - 1 :]))
                return
            else:
                yield Piece(part, plain=not quoted)

    def _substitution(self, text: str, source: str, quoted: bool) -> Piece:
        found = self._output(text)
        return Piece(unknown(source) if found is None else found, splits=not quoted)

    def _dollar(self, source: str, *, quoted: bool) -> Iterator[Piece]:
        """Expand what a ``$`` begins."""
        if source[1] == "'":
            yield Piece(re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), source[2:-1], flags=re.DOTALL))
        elif source[1] == "[" or (source.startswith("$((") and source.endswith("))")):
            number = self.number(source[2:-1] if source[1] == "[" else source[3:-2])
            yield Piece(unknown(source) if number is None else str(number))
        elif source[1] == "(":
            yield self._substitution(source[2:-1], source, quoted)
        else:
            inner = source[2:-1] if source[1] == "{" else source[1:]
            yield from self._parameter(inner, source, quoted=quoted)

    # ---- parameters ----

    def _parameter(self, inner: str, source: str, *, quoted: bool) -> Iterator[Piece]:
        found = _PARAMETER.fullmatch(inner)
        if not found:
            yield Piece(unknown(source))
            return
        indirect, length, name, index, rest = found.groups()
        index = self._index(name, index) if index else ""
        source = source if rest or index or length or indirect else f"${name}"
        if indirect and index in ("@", "*") and not rest:
            value = self.variables.get(name, index)
            value = {key: key for key in _ordered(value)} if isinstance(value, dict) else value
        elif indirect:
            other = self.variables.get(name)
            if not isinstance(other, str) or UNKNOWN in other:
                yield Piece(unknown(source))
                return
            value, name = self.variables.get(other), other
        else:
            value = self.variables.get(name, index)
        if rest[:2] in (":-", ":=", ":+", ":?") or rest[:1] in ("-", "=", "+", "?"):
            yield from self._operator(value, name, rest, source, quoted=quoted)
            return
        yield from self._value_pieces(
            self._modify(value, rest, length or "", source), name, index, source, quoted=quoted
        )

    def _index(self, name: str, index: str) -> str:
        if index in ("@", "*"):
            return index
        if name in self.variables.named:
            return self.value(index)
        number = self.number(index)
        return unknown(index) if number is None else str(number)

    def _value_pieces(
        self, value: Value | bool, name: str, index: str, source: str, *, quoted: bool
    ) -> Iterator[Piece]:
        """A value as parts of a word."""
        if isinstance(value, bool):
            several = quoted and "@" in (name, index)
            if self.variables.open:
                self.variables.why.setdefault(source, self.variables.open)
            yield Piece(unknown(source) + SEVERAL * several, splits=not quoted)
        elif not isinstance(value, dict):
            if value or quoted:
                yield Piece(value or "", splits=not quoted)
        elif "*" in (name, index) and quoted:
            yield Piece(self.variables.blanks[:1].join(_items(value)))
        elif "@" not in (name, index) and "*" not in (name, index):
            yield Piece(value.get("0", ""), splits=not quoted)
        else:
            for number, one in enumerate(_items(value)):
                if number:
                    yield END
                yield Piece(one, splits=not quoted)

    def _operator(self, value: Value | bool, name: str, rest: str, source: str, *, quoted: bool) -> Iterator[Piece]:
        """``${X:-word}`` and its kin: what nobody sets is unset, unless the environment surely has it."""
        operator, word = rest.lstrip(":")[0], rest.lstrip(":")[1:]
        there = value not in (False, None) and not (rest[0] == ":" and value in ("", {}))
        maybe_set = value is False and name.isidentifier() and (self.variables.open or name in ALWAYS)
        maybe_empty = rest[:2] == ":+" and isinstance(value, str) and value and not known_part(value)
        if maybe_set or maybe_empty:
            self.variables.why.setdefault(source, self.variables.open or "its environment has it")
            yield Piece(unknown(source), splits=not quoted)
        elif operator == "+":
            yield from self._default(word, quoted=quoted) if there else ()
        elif there:
            yield from self._value_pieces(value, name, "@" if isinstance(value, dict) else "", source, quoted=quoted)
        elif operator == "?":
            yield Piece(unknown(f"${name}"))
        else:
            if operator == "=":
                self.variables.put(name, self.value(word))
            yield from self._default(word, quoted=quoted)

    def _default(self, word: str, *, quoted: bool) -> Iterator[Piece]:
        if quoted:
            yield Piece("".join(piece.text for piece in self.pieces(word, quoted=True)))
            return
        for piece in self.pieces(word):
            yield Piece(piece.text, splits=True) if piece.plain else piece

    def _modify(self, value: Value | bool, rest: str, length: str, source: str) -> Value | bool:
        """A value of which a part is taken, cut or changed."""
        if isinstance(value, bool) or not (rest or length):
            return value
        if isinstance(value, dict) and (length or rest[:1] == ":") and _loose(value):
            return unknown(source)
        if length and not rest:
            known = len(value) if isinstance(value, dict) else None if UNKNOWN in (value or "") else len(value or "")
            return unknown(source) if known is None else str(known)
        if isinstance(value, dict):
            if rest[0] == ":":
                return self._slice(value, rest[1:], source)
            return {key: self._modify_text(one, rest, source) for key, one in value.items()}
        return self._modify_text(value or "", rest, source)

    def _slice(self, items: dict[str, str], rest: str, source: str) -> Value:
        begin, count = self._bounds(rest)
        if begin is None or count is None:
            return unknown(source)
        found = [str(self.variables.values.get("0", "")), *_items(items)] if source[2] in "@*" else _items(items)
        begin = begin + len(found) if begin < 0 else begin
        return dict(zip(map(str, range(count)), found[begin : begin + count], strict=False))

    def _bounds(self, rest: str) -> tuple[int | None, int | None]:
        begin, _, count = rest.partition(":")
        return self.number(begin), self.number(count) if _ else LONGEST

    def _modify_text(self, text: str, rest: str, source: str) -> str:
        """One text, cut (``#``, ``%``, ``:``), with a part of it replaced, or in other letters."""
        found = None
        if UNKNOWN not in text and len(text) <= LONGEST_MATCHED:
            if rest[0] in "#%":
                longest = rest[1:2] == rest[0]
                pattern = self.pattern(rest[1 + longest :])
                found = None if pattern is None else _trim(text, pattern, rest[0], longest=longest)
            elif rest[0] == "/":
                found = self._replace(text, rest[1:])
            elif rest[0] == ":":
                begin, count = self._bounds(rest[1:])
                if begin is not None and count is not None:
                    begin = begin + len(text) if begin < 0 else begin
                    found = text[begin : count if count < 0 else begin + count]
            elif rest in ("^^", ",,", "^", ","):
                change = str.upper if rest[0] == "^" else str.lower
                found = change(text) if len(rest) == 2 else change(text[:1]) + text[1:]
        return unknown(source) if found is None else found

    def _replace(self, text: str, rest: str) -> str | None:
        every, start, end = rest[:1] == "/", rest[:1] == "#", rest[:1] == "%"
        rest = rest[1:] if every or start or end else rest
        at = 0
        while at < len(rest) and (rest[at] != "/" or not (at or start or end)):
            at = part_end(rest, at)
        pattern, other = self.pattern(rest[:at]), self.value(rest[at + 1 :])
        if pattern is None or "&" in other:  # which newer shells replace
            return None
        if not pattern:
            return other + text if start else text + other if end else text
        if not pattern.strip("*"):
            return other if text else ""
        found = re.compile(translate(pattern).removesuffix(r"\Z") + (r"\Z" if end else ""))
        if start:
            first = found.match(text)
            return other + text[first.end() :] if first else text
        return found.sub(lambda _: other, text, count=0 if every else 1)

    # ---- numbers ----

    def number(self, text: str, depth: int = 0) -> int | None:
        """The value of an arithmetic expression; None where it is not known."""
        told = "".join(piece.text for piece in self.pieces(text, quoted=True))
        if UNKNOWN in told or depth > DEEPEST:
            return None

        def read(name: str) -> int | None:
            found = self.variables.get(name)
            found = found.get("0") if isinstance(found, dict) else found
            return None if isinstance(found, bool) else self.number(found or "0", depth + 1)

        def write(name: str, value: int | None) -> None:
            self.variables.put(name, unknown(f"${name}") if value is None else str(value))

        try:
            return evaluate(told, read, write)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            for name in targets(told):
                write(name, None)
            return None

    def assign(self, one: Assignment) -> None:
        """Carry out an assignment."""
        variables, before = self.variables, self.variables.values.get(one.name)
        if one.items is not None:
            items = dict(before) if one.append and isinstance(before, dict) else dict[str, str]()
            if one.append and isinstance(before, str):
                items = {"0": before}
            for word in one.items:
                found = re.match(r"\[([^\]]+)\]=", word)
                if found:
                    items[self._index(one.name, found[1])] = self.value(word[found.end() :])
                    continue
                after = max((int(key) for key in items if key.isdigit()), default=-1) + 1
                items |= {str(at): one for at, one in enumerate(self.fields(word), after)}
            loose = any(UNKNOWN in key for key in items)
            variables.put(one.name, unknown(f"${{{one.name}[@]}}") if loose else items)
            return
        index = self._index(one.name, one.index) if one.index is not None else "0" if isinstance(before, dict) else None
        text = self.value(one.value)
        if one.append:
            old = variables.get(one.name, index or "")
            joint = "+" if one.name in variables.whole else ""
            text = (unknown(f"${one.name}") if old is False else str(old or "")) + joint + text
        if one.name in variables.whole:
            number = self.number(text)
            text = unknown(f"${one.name}") if number is None else str(number)
        variables.put(one.name, text, index)


def _loose(items: Mapping[str, str]) -> bool:
    """Tell whether an item of an array may be any number of items."""
    return any(one.endswith(SEVERAL) for one in items.values())


def _ordered(items: Mapping[str, str]) -> list[str]:
    """Indices of an array; numbers in order."""
    return sorted(items, key=int) if all(one.isdigit() for one in items) else list(items)


def _items(items: Mapping[str, str]) -> list[str]:
    return [items[key] for key in _ordered(items)]


def _trim(text: str, pattern: str, end: str, *, longest: bool) -> str:
    """Without the shortest, or the longest, beginning or end that a pattern matches."""
    sizes: Sequence[int] = range(len(text) + 1)
    for size in reversed(sizes) if longest else sizes:
        cut = text[:size] if end == "#" else text[len(text) - size :]
        if fnmatchcase(cut, pattern):
            return text[size:] if end == "#" else text[: len(text) - size]
    return text


def _braces(word: str) -> list[str]:
    """A word with braces in it as the words that these make."""
    at = 0
    while at < len(word):
        if word[at] != "{":
            at = part_end(word, at)
            continue
        cuts, depth, end = [at], 0, at
        while end < len(word):
            depth += {"{": 1, "}": -1}.get(word[end], 0)
            if (word[end] == "," and depth == 1) or not depth:
                cuts.append(end)
            if not depth:
                break
            end = part_end(word, end)
        inner = word[at + 1 : end] if not depth else ""
        if some := _RANGE.fullmatch(inner):
            parts = _range(some)
        elif len(cuts) > 2 and not depth:
            parts = [word[a + 1 : b] for a, b in pairwise(cuts)]
        else:
            at += 1
            continue
        return [one for part in parts for one in _braces(word[:at] + part + word[end + 1 :])]
    return [word]


def _range(found: re.Match[str]) -> list[str]:
    if found[4]:
        a, b = ord(found[4]), ord(found[5])
        return [chr(one) for one in range(a, b + (1 if a <= b else -1), 1 if a <= b else -1)]
    a, b, step = int(found[1]), int(found[2]), abs(int(found[3] or 1)) or 1
    if abs(b - a) > LONGEST_MATCHED:
        raise ShellSyntaxError(f"{found[0]} counts too far")
    return [str(one) for one in range(a, b + (1 if a <= b else -1), step if a <= b else -step)]
