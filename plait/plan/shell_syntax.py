"""Shell scripts as trees of commands (POSIX shell, and what bash adds): nothing is run.

A word stays as it is written; ``shell_words`` expands it. A comment ends with its line, also behind a
backslash.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property, lru_cache

from plait.plan.shell_nodes import (
    Arithmetic,
    Assignment,
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

DECLARING = ("export", "declare", "readonly", "typeset", "local")
"""Commands whose arguments are assignments."""
UNKNOWN = "\0"
"""Encloses, within a value, the source of what is not known."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[((?:[^][\n]|\[[^][\n]*\])*)\])?(\+?)=")
_BLANK = re.compile(r"(?:[ \t]|\\\n)*(?:#[^\n]*)?")
_REDIRECTION = re.compile(r"(\d+|\{\w+\})?(<<<|<<-?|<>|<&|>&|&>>|&>|>>|>\||[<>])(?!\()")
_OPERATOR = re.compile(r"&&|\|\||;;&|;;|;&|\|&|[;&|()\n]")
_RESERVED = re.compile(r"(?:if|then|elif|else|fi|for|while|until|do|done|case|esac|[{}!]|\[\[)(?=[\s;&|()<>]|\Z)")
_FUNCTION = re.compile(
    r"(?:function[ \t]+([\w:.-]+)[ \t]*(?:\([ \t]*\))?|([A-Za-z_][\w:.-]*)[ \t]*\([ \t]*\))\s*(?=[{(])"
)
_PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n;|&]*[^<>\n;|&\s]>(?=[\s\\\"']|\Z)")
"""A word that whoever starts the script is to fill in."""
_TIME = re.compile(r"time(?:[ \t]+-p)?[ \t]+(?=\S)")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BACKTICKS = re.compile(r"`(?:[^\\`]|\\.)*`", re.DOTALL)
_ANSI = re.compile(r"\$'(?:[^\\']|\\.)*'", re.DOTALL)


class ShellSyntaxError(ValueError):
    """A text that bash does not take either, or that is not read: line and problem."""


def parse(text: str, *, lines: bool = False, own: set[str] | None = None) -> Program:
    """The commands of a text. lines: whether commands have the numbers of their lines. own: names are added
    that it sets without a look at what they have. Raises ShellSyntaxError.

    >>> parse("a b && c")[0].rest[0][1].words
    ['c']
    """
    parser = _Parser(text, lines=lines)
    found = parser.program()
    if parser.at < len(text):
        raise parser.error(f"'{text[parser.at : parser.at + 20].split()[0]}' is not expected")
    if own is not None:
        own |= {name for name, fresh in parser.fresh.items() if fresh}
    return found


def word_end(text: str, at: int, *, pattern: bool = False) -> int:
    """Return the end of a word. pattern: brackets of extended patterns belong to it."""
    begin = at
    while at < len(text):
        one, two = text[at], text[at : at + 2]
        if placeholder := _PLACEHOLDER.match(text, at):
            at = placeholder.end()
        elif two in ("<(", ">("):
            at = _substitution_end(text, at + 2)
        elif pattern and one == "(" and at > begin and text[at - 1] in "@?*+!":
            at = _balanced(text, at)
        elif one in " \t\n;&|<>()":
            break
        else:
            at = part_end(text, at)
    return at


def part_end(text: str, at: int, *, quoted: bool = False) -> int:
    """Return the end of a letter, or of what is quoted or expanded from it on. quoted: within double quotes.
    ShellSyntaxError where it does not end."""
    one = text[at]
    if one == "\\":
        return min(at + 2, len(text))
    if one == UNKNOWN or (one == "'" and not quoted):
        return _closed(text, at, text.find(one, at + 1) + 1)
    if one == '"':
        return _until(text, at, at + 1, quoted=True)
    if one == "`":
        found = _BACKTICKS.match(text, at)
        return _closed(text, at, found.end() if found else 0)
    return _dollar_end(text, at, quoted) if one == "$" else at + 1


def _closed(text: str, at: int, end: int) -> int:
    if not end:
        line = text.count("\n", 0, at) + 1
        raise ShellSyntaxError(f"line {line}: what {text[at : at + 2].strip()} opens is not closed")
    return end


def _until(text: str, begin: int, at: int, *, quoted: bool, close: str = '"') -> int:
    while at < len(text) and text[at] != close:
        at = part_end(text, at, quoted=quoted)
    return _closed(text, begin, at + 1 if at < len(text) else 0)


def _balanced(text: str, begin: int) -> int:
    """Return the position behind a bracket's partner."""
    depth, at = 0, begin
    while at < len(text):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at = part_end(text, at)
        if not depth:
            return at
    return _closed(text, begin, 0)


def _substitution_end(text: str, at: int) -> int:
    parser = _Parser(text, at)
    parser.program()
    return _closed(text, at - 2, parser.at + 1 if text[parser.at : parser.at + 1] == ")" else 0)


@lru_cache(maxsize=4096)
def _dollar_end(text: str, at: int, quoted: bool) -> int:
    two = text[at + 1 : at + 2]
    if two == "(":
        if text[at + 2 : at + 3] == "(" and text[(end := _balanced(text, at + 1)) - 2 : end] == "))":
            return end
        return _substitution_end(text, at + 2)
    if two == "[":  # older arithmetic
        return _closed(text, at, text.find("]", at) + 1)
    if two == "{":
        return _until(text, at, at + 2, quoted=quoted, close="}")
    if two == "'" and not quoted:
        found = _ANSI.match(text, at)
        return _closed(text, at, found.end() if found else 0)
    name = _NAME.match(text, at + 1)
    return name.end() if name else at + 1


class _Parser:
    """A text, and how far it is read."""

    def __init__(self, text: str, at: int = 0, *, lines: bool = False) -> None:
        self.text, self.at, self.numbered = text, at, lines
        self.waiting: list[tuple[Simple, str, bool]] = []
        """Commands whose here-documents begin with the next line, their last lines, whether tabs are cut."""
        self.fresh = dict[str, bool]()
        """Names that are set; whether that is so, first, without what they have."""

    @cached_property
    def _ends(self) -> list[int]:
        return [found.start() for found in re.finditer("\n", self.text)]

    @property
    def line(self) -> int:
        return bisect_right(self._ends, self.at - 1) + 1 if self.numbered else 0

    def error(self, problem: str) -> ShellSyntaxError:
        """The error, at the line that is reached."""
        line = self.text.count("\n", 0, self.at) + 1
        return ShellSyntaxError(f"line {line}: {problem}")

    def program(self, *ends: str) -> Program:
        """Commands up to a reserved word of ``ends``, a bracket that closes, or the end of a case's arm."""
        found = list[Node]()
        while True:
            self.space()
            operator = self.operator()
            if self.at >= len(self.text) or operator in (")", ";;", ";&", ";;&") or self.reserved() in ends:
                return tuple(found)
            found.append(self.chain())
            if (operator := self.operator()) in (";", "&", "\n"):
                self.take(operator)
            elif operator not in ("", ")", ";;", ";&", ";;&"):
                raise self.error(f"'{operator}' is not expected")

    def blanks(self) -> None:
        """Go on to the next word or operator of the line."""
        found = _BLANK.match(self.text, self.at)
        self.at = found.end() if found else self.at

    def space(self) -> None:
        """Go on to the next word or operator."""
        self.blanks()
        while self.operator() == "\n":
            self.take("\n")
            self.blanks()

    def operator(self) -> str:
        """The operator that is next, if one is."""
        self.blanks()
        found = _OPERATOR.match(self.text, self.at)
        return found[0] if found and not self.text.startswith("&>", self.at) else ""

    def reserved(self) -> str:
        """The reserved word that is next, if one is."""
        found = _RESERVED.match(self.text, self.at)
        return found[0] if found else ""

    def take(self, word: str) -> None:
        """Go on behind a word or an operator. Raises ShellSyntaxError where another one is next."""
        if not self.text.startswith(word, self.at):
            there = self.text[self.at : self.at + 20].split() or ["the end"]
            raise self.error(f"{word} is expected before {there[0]}")
        self.at += len(word)
        while word == "\n" and self.waiting:
            self._document(*self.waiting.pop(0))

    def _document(self, node: Simple, last: str, cut: bool) -> None:
        found = list[str]()
        while self.at < len(self.text):
            end = self.text.find("\n", self.at) % (len(self.text) + 1)
            line, self.at = self.text[self.at : end], min(end + 1, len(self.text))
            line = line.lstrip("\t") if cut else line
            if line == last:
                break
            found.append(line + "\n")
        node.text = "".join(found)

    def chain(self) -> Node:
        """Pipelines joined by ``&&`` and ``||``."""
        begin, first, rest = self.at, self.pipeline(), list[tuple[str, Node]]()
        source = self._source(begin)
        while (operator := self.operator()) in ("&&", "||"):
            self.take(operator)
            self.space()
            rest.append((operator, self.pipeline()))
        return Chain(source, first, tuple(rest)) if rest else first

    def pipeline(self) -> Node:
        """Commands joined by ``|``."""
        negated = False
        if timed := _TIME.match(self.text, self.at):
            self.at = timed.end()
        while self.reserved() == "!":
            self.take("!")
            self.blanks()
            negated = not negated
        nodes = [self.command()]
        while (operator := self.operator()) in ("|", "|&"):
            self.take(operator)
            self.space()
            nodes.append(self.command())
        return Pipeline(tuple(nodes), negated) if negated or len(nodes) > 1 else nodes[0]

    def command(self) -> Node:
        """One command, with its redirections."""
        if found := _FUNCTION.match(self.text, self.at):
            self.at = found.end()
            return Function(found[1] or found[2], self.command())
        if self.text.startswith("((", self.at):
            end = _balanced(self.text, self.at)
            if self.text[end - 2 : end] == "))":
                text, self.at = self.text[self.at + 2 : end - 2], end
                return self._redirected(Arithmetic(text))
        if self.operator() == "(":
            return self._redirected(Group(self._enclosed("(", ")"), subshell=True))
        read = {"{": self._braces, "[[": self._test, "if": self._if, "case": self._case, "for": self._for,
                "while": self._while, "until": self._while}.get(self.reserved())  # fmt: skip
        return self._redirected(read()) if read else self._simple()

    def _enclosed(self, begin: str, end: str) -> Program:
        self.take(begin)
        found = self.program(end)
        self.take(end)
        return found

    def _braces(self) -> Node:
        return Group(self._enclosed("{", "}"), subshell=False)

    def _source(self, begin: int) -> str:
        """Return the text from a position on, without what closes it, and its line."""
        line = self.text.count("\n", 0, begin) + 1
        text = self.text[begin : self.at].strip().split("\n")[0].rstrip("; ")
        return f"{text} (line {line})" if self.numbered else text

    def _if(self) -> Node:
        begin, source, word, arms = self.at, "", "if", list[tuple[Program, Program]]()
        while word in ("if", "elif"):
            self.take(word)
            condition = self.program("then")
            source = source or self._source(begin)
            self.take("then")
            arms.append((condition, self.program("elif", "else", "fi")))
            word = self.reserved()
        last = self._enclosed("else", "fi") if word == "else" else ()
        if word != "else":
            self.take("fi")
        return If(source, tuple(arms), last)

    def _while(self) -> Node:
        begin, kind = self.at, self.reserved()
        self.take(kind)
        condition = self.program("do")
        source = self._source(begin)
        return Loop(source, kind, "", None, condition, self._enclosed("do", "done"))

    def _for(self) -> Node:
        begin, kind, name, words, condition = self.at, "for", "", None, ()
        self.take("for")
        self.blanks()
        if self.text.startswith("((", self.at):
            end = _balanced(self.text, self.at)
            parts = self.text[self.at + 2 : end - 2].split(";")
            kind, condition, self.at = "count", tuple(Arithmetic(one) for one in parts), end
        else:
            name = self._word()
            self.space()
            if re.match(r"in\s", self.text[self.at : self.at + 3]):
                self.take("in")
                words = tuple(self._words())
        source = self._source(begin)
        if self.operator() == ";":
            self.take(";")
        self.space()
        body = self._enclosed(*(("{", "}") if self.reserved() == "{" else ("do", "done")))
        return Loop(source, kind, name, words, condition, body)

    def _case(self) -> Node:
        begin, arms = self.at, list[tuple[tuple[str, ...], Program]]()
        self.take("case")
        self.blanks()
        word = self._word()
        source = self._source(begin)
        self.space()
        self.take("in")
        through = False
        while self.space() or self.reserved() != "esac":
            if self.operator() == "(":
                self.take("(")
            patterns = [self._word(pattern=True)]
            while self.operator() == "|":
                self.take("|")
                self.blanks()
                patterns.append(self._word(pattern=True))
            body = self._enclosed_arm()
            if through:  # the arm before goes on into this one
                arms[-1] = arms[-1][0], arms[-1][1] + body
            arms.append((tuple(patterns), body))
            end = self.operator()
            through = end == ";&"
            if end == ";;&":
                raise self.error("';;&' is not read")
            if end:
                self.take(end)
        self.take("esac")
        return Case(source, word, tuple(arms))

    def _enclosed_arm(self) -> Program:
        self.blanks()
        self.take(")")
        return self.program("esac")

    def _test(self) -> Node:
        self.take("[[")
        words = list[str]()
        while self.space() or not re.match(r"\]\](?=[\s;&|)]|\Z)", self.text[self.at : self.at + 3]):
            if words and words[-1] == "=~":
                end = self.at
                while end < len(self.text) and not self.text[end].isspace():
                    end = _balanced(self.text, end) if self.text[end] == "(" else part_end(self.text, end)
                words.append(self.text[self.at : end])
                self.at = end
            elif found := re.compile(r"&&|\|\||[()<>]").match(self.text, self.at):
                words.append(found[0])
                self.at = found.end()
            else:
                words.append(self._word(pattern=True))
        self.take("]]")
        return Test(tuple(words))

    def _word(self, *, pattern: bool = False) -> str:
        end = word_end(self.text, self.at, pattern=pattern)
        if end == self.at:
            raise self.error(f"a word is expected before '{self.text[end : end + 1] or 'the end'}'")
        word, self.at = self.text[self.at : end], end
        return word

    def _words(self) -> list[str]:
        """Words up to the next operator."""
        found = list[str]()
        while not self.operator() and self.at < len(self.text):
            found.append(self._word())
        return found

    def _simple(self) -> Node:
        node = Simple(self.line)
        while not self.operator() and self.at < len(self.text):
            if self._redirection(node):
                continue
            assigned = _ASSIGNMENT.match(self.text, self.at)
            if assigned and (not node.words or node.words[0] in DECLARING):
                node.assignments.append(self._assignment(assigned))
            else:
                node.words.append(self._word())
        if not node.words or node.words[0] in DECLARING[:-1]:
            for one in node.assignments:
                again = (one.append and one.items is None) or re.search(rf"\$\{{?{one.name}\b", one.value)
                self.fresh.setdefault(one.name, not again)
        return node

    def _assignment(self, found: re.Match[str]) -> Assignment:
        name, index, more = found.groups()
        self.at = found.end()
        if not self.text.startswith("(", self.at):
            end = word_end(self.text, self.at)
            value, self.at = self.text[self.at : end], end
            return Assignment(name, index, bool(more), value)
        self.take("(")
        items = list[str]()
        while self.space() or self.operator() != ")":
            items.append(self._word())
        self.take(")")
        return Assignment(name, index, bool(more), "", tuple(items))

    def _redirected(self, node: Node) -> Node:
        """A compound command; of what it reads and writes only that its output goes elsewhere counts."""
        other = Simple(0)
        while not self.operator() and self.at < len(self.text):
            if not self._redirection(other):
                raise self.error(f"'{self._word()}' is not expected")
        return Group((node,), subshell=False, silent=True) if other.silent else node

    def _redirection(self, node: Simple) -> bool:
        """Go on behind a redirection; tell whether there was one."""
        found = _REDIRECTION.match(self.text, self.at)
        if not found or _PLACEHOLDER.match(self.text, self.at):
            return False
        self.at = found.end()
        self.blanks()
        word = self._word()
        if found[2] in ("<<", "<<-"):
            node.kind = "literal" if re.search(r"['\"\\]", word) else ""
            self.waiting.append((node, re.sub(r"['\"\\]", "", word), found[2] == "<<-"))
        elif found[2] == "<<<":
            node.text, node.kind = word, "string"
        elif ">" in found[2]:
            node.files.append(word)
            node.silent = node.silent or found[1] in (None, "1")
        elif found[2] == "<":
            node.kind = "file"
        return True
