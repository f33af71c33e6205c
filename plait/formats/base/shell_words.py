"""Expansion of a shell script's words, numbers and conditions by bash's rules, from the script's
text alone.

A value known only in a run (arguments, environment, output of programs) stays as an atom. A
variable that the script never sets counts as unset if the word has a default (``${X:-8}``)."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase, translate
from typing import Any, NamedTuple

from plait.formats.base.shell_syntax import (
    ATOM,
    SEVERAL,
    UNKNOWN,
    Node,
    ShellSyntaxError,
    known_part,
    unknown,
    walk,
)

LONGEST = 1 << 18
"""The longest value, in letters."""
LONGEST_MATCHED = 2000
"""The longest value in which patterns are matched, in letters."""
LARGEST = 1 << 62
"""The largest number; a shell's numbers wrap around beyond it."""
ALWAYS = frozenset(
    ["HOME", "USER", "LOGNAME", "HOSTNAME", "PATH", "SHELL", "RANDOM", "SECONDS", "LINENO", "UID", "EUID", "PPID",
     "BASHPID", "BASH_VERSION", "SHLVL", "OSTYPE"]
)  # fmt: skip
"""Variables that every environment has."""
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'"}
_BRACES = re.compile(r"(?<!\\)\{[^{}]*(,|\.\.)[^{}]*\}")
_NUMBERS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "==": operator.eq, "!=": operator.ne, "<": operator.lt,
    "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "/": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "%": lambda a, b: abs(a) % abs(b) * (-1 if a < 0 else 1),
    "**": lambda a, b: a**b if 0 <= b < 64 else LARGEST + 1,
}  # fmt: skip
"""Arithmetic operators; ValueError or ArithmeticError where bash has no result, either."""
_COMPARED = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}
_QUOTED = '$`"\\'
"""Letters that a backslash escapes between double quotes."""

Value = str | list[str] | None
"""A variable's value: a text, an array, or None if unset."""


class Piece(NamedTuple):
    """A part of a word. plain: its letters may be pattern letters. splits: blanks in it end the
    word."""

    text: str
    plain: bool = False
    splits: bool = False


END = Piece("\n")
"""The separator between two words of an array; compared by identity."""


@dataclass
class Words:
    """A shell's variables and the expansion of words. capture: returns the output of commands, None
    if unknown. values: known values by name; ``@`` is the arguments. own: names that the script
    sets somewhere, assumed absent from its environment. fixed: read-only names. open: why variables
    that the script does not set may be set nevertheless; empty if they are not. touched: names that
    were set. why: cause by source text of unknown values. Copies share ``touched`` and ``why``."""

    capture: Callable[[Sequence[Node], Any], str | None] = field(compare=False)
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    own: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    open: str = ""
    touched: set[str] = field(default_factory=set[str], compare=False)
    why: dict[str, str] = field(default_factory=dict[str, str], compare=False)

    def get(self, name: str, index: str = "") -> Value | bool:
        """Return a variable's value, an item of an array, or the whole array for ``@`` and ``*``;
        False if only a run knows it."""
        if name in "@*#":
            name, index = "@", "#" if name == "#" else "@"
        elif name.isdigit() and name != "0":
            name, index = "@", str(int(name) - 1)
        found = self.values.get(name, None if name in self.own and not self.open else False)
        if index in ("@", "*"):
            return [found] if isinstance(found, str) and UNKNOWN not in found else found
        if UNKNOWN in index or (isinstance(found, list) and _loose(found)):
            return False
        if not isinstance(found, list):
            whole = index in ("", "0") or found is False or (isinstance(found, str) and UNKNOWN in found)
            return found if whole else None
        if index == "#":
            return str(len(found))
        return found[int(index or 0)] if -len(found) <= int(index or 0) < len(found) else None

    def put(self, name: str, value: Value | bool) -> None:
        """Set a variable; a value of False means that only a run knows it. Raises ShellSyntaxError
        for read-only names and for values of more than ``LONGEST`` letters."""
        if name in self.fixed:
            raise ShellSyntaxError(f"{name} is read-only, and set again")
        if UNKNOWN in name:
            self.open = f"it sets {name}"
        if not isinstance(value, bool) and sum(map(len, value or "")) > LONGEST:
            raise ShellSyntaxError(f"{name} grows beyond {LONGEST:,} letters")
        self.touched.add(name)
        if isinstance(value, bool):
            self.values.pop(name, None)
        else:
            self.values[name] = value

    def forget(self, name: str, why: str = "") -> None:
        """Make a variable's value unknown. why: the cause."""
        array = isinstance(self.values.get(name), list)
        source = f"${{{name}[@]}}" if array else f"${name}"
        self.put(name, unknown(source) + SEVERAL * array)
        self.why |= {source: why} if why else {}

    def set_arguments(self, arguments: Sequence[str]) -> None:
        """Set the arguments; if one of them may be any number of words, all become unknown."""
        self.put("@", unknown("$@") + SEVERAL if _loose(arguments) else [*arguments])

    def fields(self, *words: Node) -> list[str]:
        """Return the words as the command receives them after expansion."""
        return [one for word in words for one in self._fields(word)]

    def _fields(self, word: Node) -> Iterator[str]:
        pieces = list(self.pieces(word.Parts))
        patterns = any((one.plain or one.splits) and re.search(r"[*?]", one.text) for one in pieces)
        files = patterns and re.search(r"[/.]|(^|\s)[*?]+(\s|$)", "".join(one.text for one in pieces))
        if files or has_braces(word):
            yield unknown(word.text) + SEVERAL
            return
        text, some = "", False
        for piece in [*pieces, END]:
            if piece is END:
                if some:
                    yield _several(text) if SEVERAL in text else text
                text, some = "", False
            elif not piece.splits:
                text, some = text + piece.text, True
            else:
                first, *others = (one + SEVERAL * (UNKNOWN in one) for one in self.split(piece.text))
                text, some = text + first, some or bool(first)
                for one in others:
                    if some:
                        yield _several(text) if SEVERAL in text else text
                    text, some = one, bool(one)

    @property
    def blanks(self) -> str:
        """The letters that separate words (IFS)."""
        found = self.values.get("IFS")
        return found if isinstance(found, str) else " \t\n"

    def split(self, text: str) -> list[str]:
        """Split a text at its blanks (IFS); the first and the last piece may be empty."""
        marks = self.blanks
        return re.split(f"[{re.escape(marks)}]+", text) if marks else [text]

    def value(self, word: Node | None) -> str:
        """Return a word's value as one text, as in an assignment."""
        return "".join(" " if piece is END else piece.text for piece in self.pieces(word.Parts if word else ()))

    def pattern(self, word: Node | None) -> str | None:
        """Return a word as a pattern for ``fnmatch``; None if it is unknown."""
        found = ""
        for one in self.pieces(word.Parts if word else ()):
            found += one.text.replace("[^", "[!") if one.plain else re.sub(r"[*?[]", r"[\g<0>]", one.text)
        return None if UNKNOWN in found or "[:" in found else found

    def document(self, redirection: Node) -> str:
        """Return the text of a here-document or here-string."""
        word = redirection.Hdoc
        if redirection.Op == "<<<":
            return self.value(redirection.Word) + "\n"
        if any(one.Type != "Lit" or "\\" in one.Value for one in redirection.Word.Parts):
            text = "".join(one.Value for one in word.Parts) if word else ""
        else:
            text = "".join(one.text for one in self.pieces(word.Parts if word else (), quoted="$`\\"))
        return re.sub(r"^\t+", "", text, flags=re.MULTILINE) if redirection.Op == "<<-" else text

    def pieces(self, parts: Sequence[Node], *, quoted: str = "") -> Iterator[Piece]:
        """Yield the expanded parts of a word. quoted: letters that a backslash escapes; empty
        outside of double quotes."""
        for number, part in enumerate(parts):
            match part.Type:
                case "Lit" if quoted:
                    yield Piece(re.sub(rf"\\([{re.escape(quoted)}])", r"\1", part.Value))
                case "Lit":
                    yield from _literal(part.Value, first=not number)
                case "SglQuoted" if part.Dollar:
                    yield Piece(re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[0]), part.Value))
                case "SglQuoted":
                    yield Piece(part.Value or "")
                case "DblQuoted":
                    yield from self.pieces(part.Parts, quoted='$`"\\') if part.Parts else [Piece("")]
                case "ParamExp":
                    yield from self._parameter(part, bool(quoted))
                case "CmdSubst":
                    found = self.capture(part.Stmts or (), self)
                    yield Piece(unknown(part.text) if found is None else found, splits=not quoted)
                case "ArithmExp":
                    number = self.number(part.X)
                    yield Piece(unknown(part.text) if number is None else str(number))
                case _:
                    yield Piece(unknown(part.text))

    # ---- parameters ----

    def _parameter(self, node: Node, quoted: bool) -> Iterator[Piece]:
        """Yield the expansion of a ``$`` parameter."""
        name, index = node.Param.Value, self._index(node.Index)
        operation = node.Exp or node.Repl or node.Slice
        source = node.text if node.Excl or node.Length or node.Index or operation else f"${name}"
        value = False if node.Names or node.Width else self.get(name, index)
        if node.Excl:
            if not isinstance(value, str) or not value.isidentifier() or UNKNOWN in value:
                yield Piece(unknown(source) + SEVERAL * (index == "@"), splits=not quoted)
                return
            name, value = value, self.get(value)
        if node.Exp and node.Exp.Op.lstrip(":") in ("-", "=", "+", "?"):
            yield from self._default(node, value, name, source, quoted)
            return
        if not isinstance(value, bool) and (operation or node.Length):
            value = self._modify(node, value, source)
        yield from self._value_pieces(value, "*" if "*" in (name, index) else index or name, source, quoted)

    def _index(self, node: Node | None) -> str:
        if node is None or node.text in ("@", "*"):
            return node.text if node else ""
        number = self.number(node)
        return unknown(node.text) if number is None else str(number)

    def _value_pieces(self, value: Value | bool, index: str, source: str, quoted: bool) -> Iterator[Piece]:
        """Yield a value as parts of a word. index: ``@`` and ``*`` stand for all items of an
        array."""
        if isinstance(value, bool):
            if self.open:
                self.why.setdefault(source, self.open)
            yield Piece(unknown(source) + SEVERAL * (quoted and index == "@"), splits=not quoted)
        elif not isinstance(value, list):
            if value or quoted:
                yield Piece(value or "", splits=not quoted)
        elif index == "*" and quoted:
            yield Piece(self.blanks[:1].join(value))
        else:
            for number, one in enumerate(value if index in ("@", "*") else value[:1]):
                if number:
                    yield END
                yield Piece(one, splits=not quoted)

    def _default(self, node: Node, value: Value | bool, name: str, source: str, quoted: bool) -> Iterator[Piece]:
        """Yield the expansion of ``${X:-word}`` and the like. A variable that the script does not
        set is unset, unless every environment has it."""
        word, how = node.Exp.Word, node.Exp.Op
        there = value not in (False, None) and not (how[0] == ":" and value in ("", []))
        maybe_set = value is False and name.isidentifier() and (self.open or name in ALWAYS)
        maybe_empty = how == ":+" and isinstance(value, str) and value and not known_part(value)
        if maybe_set or maybe_empty:
            self.why.setdefault(source, self.open or "its environment has it")
            yield Piece(unknown(source), splits=not quoted)
        elif there and how[-1] != "+":
            yield from self._value_pieces(value, "@" if isinstance(value, list) else "", source, quoted)
        elif how[-1] == "?":
            yield Piece(unknown(f"${name}"))
        elif there or how[-1] != "+":
            if how[-1] == "=":
                self.put(name, self.value(word))
            for piece in self.pieces(word.Parts if word else (), quoted='$`"\\' if quoted else ""):
                yield Piece(piece.text, splits=True) if piece.plain else piece

    def _modify(self, node: Node, value: Value, source: str) -> Value:
        """Return the length, a slice, or the trimmed or replaced text of a value."""
        items = value if isinstance(value, list) else [value or ""]
        if node.Length or node.Slice:
            if _loose(items) or (UNKNOWN in items[0] if isinstance(value, str) else False):
                return unknown(source)
            return str(len(value or "")) if node.Length else self._slice(node, value or "", source)
        changed = [self._modify_text(node, one) for one in items]
        texts = [unknown(source) if one is None else one for one in changed]
        return texts if isinstance(value, list) else texts[0]

    def _slice(self, node: Node, value: str | list[str], source: str) -> Value:
        if node.Param.Value in "@*":
            value = [str(self.values.get("0", "")), *value]
        begin, count = self.number(node.Slice.Offset), LONGEST
        if node.Slice.Length:
            count = self.number(node.Slice.Length)
        if begin is None or count is None or count < 0 or begin < -len(value):
            return unknown(source)
        begin += len(value) if begin < 0 else 0
        return value[begin : begin + count]

    def _modify_text(self, node: Node, text: str) -> str | None:
        """Return one text trimmed, with matches replaced, or in another case; None if the result is
        unknown."""
        word, how = (node.Repl.Orig, "/") if node.Repl else (node.Exp.Word, node.Exp.Op)
        pattern = self.pattern(word)
        if pattern is None or UNKNOWN in text or len(text) > LONGEST_MATCHED:
            return None
        if how == "/":
            other = self.value(node.Repl.With)
            if "&" in other or not pattern.strip("*") or pattern[0] in "#%":  # newer shells replace &
                return None
            found = re.compile(translate(pattern).removesuffix(r"\Z"))
            return found.sub(lambda _: other, text, count=0 if node.Repl.All else 1)
        if how in ("#", "##", "%", "%%"):
            return _trim(text, pattern, how[0], longest=len(how) == 2)
        return {"^^": text.upper(), ",,": text.lower()}.get(how) if not pattern else None

    def assignment(self, node: Node) -> tuple[str, Value]:
        """Return the variable that an assignment sets, and its new value."""
        name = node.Name.Value
        before = self.values.get(name)
        items = [_several(before)] if isinstance(before, str) else [*before] if before else []
        if node.Array:
            if any(one.Index for one in node.Array.Elems or ()):
                raise ShellSyntaxError(f"'{node.text}' is a form that Plait does not follow")
            new = self.fields(*(one.Value for one in node.Array.Elems or ()))
            return name, [*items, *new] if node.Append else new
        index = self._index(node.Index) or ("0" if isinstance(before, list) else "")
        text = self.value(node.Value)
        if node.Append:
            old = self.get(name, index)
            text = (unknown(f"${name}") if old is False else str(old or "")) + text
        if not index:
            return name, text
        if UNKNOWN in index or _loose(items) or not -len(items) <= int(index) <= len(items):
            return name, unknown(f"${{{name}[@]}}") + SEVERAL
        items[int(index) : (int(index) + 1) or None] = [text]
        return name, items

    # ---- numbers ----

    def number(self, node: Node | None) -> int | None:
        """Return the value of an arithmetic expression; None if unknown, and its variables become
        unknown, too."""
        try:
            found = self._number(node) if node else 0
        except (ValueError, ArithmeticError):
            found = None
        if found is None or abs(found) > LARGEST:
            for one in walk(node):
                if one.Type and "Arithm" in one.Type and _sets(one):
                    self.forget(one.X.text)
            return None
        return int(found)

    def _number(self, node: Node) -> int | None:
        how, x, y = node.Op, node.X, node.Y
        if node.Type == "Word":
            return self.integer(self.value(node))
        if node.Type == "ParenArithm":
            return self._number(x)
        if _sets(node):
            return self._set_number(node)
        first = self._number(x)
        if first is None or node.Type == "UnaryArithm":
            return first if first is None else {"-": -first, "+": first, "!": not first}.get(how)
        if how == "?":
            return self._number(y.X if first else y.Y)
        if how in ("&&", "||"):
            second = self._number(y) if bool(first) is (how == "&&") else first
            return second if second is None else bool(second)
        second = self._number(y)
        return None if second is None or how not in _NUMBERS else _NUMBERS[how](first, second)

    def integer(self, text: str) -> int | None:
        """Return the number of a text or of the variable that it names; None for other
        expressions."""
        if re.fullmatch(r"\s*[-+]?(0[xX][\da-fA-F]+|\d+)\s*", text):
            return int(text, 8 if re.match(r"\s*[-+]?0\d", text) else 0)
        if not text.isidentifier() or UNKNOWN in text:
            return None
        value = self.get(text, "0")
        return None if isinstance(value, bool) else self.integer(str(value or "0"))

    def _set_number(self, node: Node) -> int | None:
        how = node.Op[0] if node.Op != "=" else ""
        old = self._number(node.X) if how else 0
        more = self._number(node.Y) if node.Y else 1
        if old is None or more is None or (how and how not in _NUMBERS):
            return None
        new = int(_NUMBERS[how](old, more) if how else more)
        self.put(node.X.text, str(new))
        return old if node.Post else new

    # ---- conditions ----

    def test(self, node: Node) -> bool | None:
        """Return the outcome of ``[[ ... ]]``. None if only a run decides, or if the tree is not
        bash's, because shfmt gives ``&&`` and ``||`` the same precedence."""
        how, joints = node.Op, ("&&", "||")
        if how in joints:
            sides = [self.test(node.X), self.test(node.Y)]
            return None if how == "&&" and node.Y.Op == "||" else combine(sides, ends=how == "||")
        if how == "!":
            found = None if node.X.Op in joints else self.test(node.X)
            return found if found is None else not found
        if node.Type == "ParenTest":
            return self.test(node.X)
        if node.Type != "BinaryTest":
            return _unary(how or "-n", self.value(node.X or node))
        left, right = self.value(node.X), self.value(node.Y)
        if UNKNOWN not in left + right and how in ("=", "==", "!="):
            pattern = self.pattern(node.Y)
            return None if pattern is None else fnmatchcase(left, pattern) is (how != "!=")
        return _compare(left, how, right, self.integer)

    def bracket(self, words: Sequence[str]) -> bool | None:
        """Return the outcome of ``[ ... ]`` with expanded words; None if only a run decides.

        >>> Words(lambda nodes, shell: None).bracket(["8", "-ge", "8", "-a", "!", "-z", "x"])
        True
        """
        if len(words) == 3 and words[1] in (*_COMPARED, "=", "==", "!=", "<", ">"):
            return _compare(
                words[0], words[1], words[2], lambda one: int(one) if one.strip().lstrip("-").isdigit() else None
            )
        for joint in ("-o", "-a"):
            if joint in words[1:-1]:
                at = words.index(joint, 1)
                return combine([self.bracket(words[:at]), self.bracket(words[at + 1 :])], ends=joint == "-o")
        if len(words) > 1 and words[0] == "!":
            found = self.bracket(words[1:])
            return found if found is None else not found
        if len(words) == 1:
            return _unary("-n", words[0])
        return _unary(words[0], words[1]) if len(words) == 2 else None if words else False


def _compare(left: str, how: str, right: str, number: Callable[[str], int | None]) -> bool | None:
    if UNKNOWN in left + right:
        return None
    if how in _COMPARED:
        a, b = number(left), number(right)
        return None if a is None or b is None else bool(_NUMBERS[_COMPARED[how]](a, b))
    texts = {"=": left == right, "==": left == right, "!=": left != right, "<": left < right, ">": left > right}
    return texts.get(how)


def _unary(how: str, text: str) -> bool | None:
    """Return the outcome of ``-z`` or ``-n``; None for tests of files and other questions to a
    run."""
    empty = False if known_part(text) else None if UNKNOWN in text else True
    return empty == (how == "-z") if how in ("-z", "-n") and empty is not None else None


def combine(sides: Sequence[bool | None], *, ends: bool) -> bool | None:
    """Return the outcome of several conditions joined by ``&&`` or ``||``; None if only a run
    decides. ends: the outcome of one condition that decides all: True for or, False for and."""
    return ends if ends in sides else None if None in sides else not ends


def _sets(node: Node) -> bool:
    """True if an arithmetic expression sets a variable."""
    how = node.Op or ""
    return how in ("++", "--") or (how.endswith("=") and how not in ("==", "!=", "<=", ">="))


def _literal(text: str, *, first: bool) -> Iterator[Piece]:
    """Yield the pieces of unquoted text in a word. first: True at the word's beginning, where ``~``
    may stand."""
    for found in re.finditer(rf"\\(.)|({ATOM.pattern})|[^\\{UNKNOWN}]+", text, re.DOTALL):
        if first and not found.start() and found[0][0] == "~":
            yield Piece(unknown("~"))
            yield Piece(found[0][1:], plain=True)
        elif found[1] is not None:
            yield Piece(found[1])
        else:
            yield Piece(found[0], plain=not found[2], splits=bool(found[2]))


def has_braces(word: Node) -> bool:
    """True if a word has a brace expansion, such as ``a{1,2}``."""
    return bool(_BRACES.search("".join(one.Value if one.Type == "Lit" else "_" for one in word.Parts)))


def _several(text: str) -> str:
    """Return a text, marked as any number of words if it is unknown."""
    return text.replace(SEVERAL, "") + SEVERAL if UNKNOWN in text else text


def _loose(items: Sequence[str]) -> bool:
    """True if an item of an array may be any number of items."""
    return any(one.endswith(SEVERAL) for one in items)


def _trim(text: str, pattern: str, end: str, *, longest: bool) -> str:
    """Return the text without the shortest (or longest) beginning or end that a pattern matches."""
    sizes = range(len(text) + 1)
    for size in reversed(sizes) if longest else sizes:
        cut = text[:size] if end == "#" else text[len(text) - size :]
        if fnmatchcase(cut, pattern):
            return text[size:] if end == "#" else text[: len(text) - size]
    return text
