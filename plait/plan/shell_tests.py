"""Conditions of a shell script, ``[ ... ]`` and ``[[ ... ]]``, as far as the script decides them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from plait.plan.shell_syntax import UNKNOWN
from plait.plan.shell_words import Words, known_part

_FILES = frozenset(f"-{letter}" for letter in "abcdefghkoprstuvwxGLNORS")
"""Questions about files, and others that a run answers."""
_ORDERS = {"-eq": (0,), "-ne": (-1, 1), "-gt": (1,), "-ge": (0, 1), "-lt": (-1,), "-le": (-1, 0)}
"""Signs of the difference of two numbers."""
_COMPARED = frozenset((*_ORDERS, "=", "==", "!=", "<", ">", "=~", "-nt", "-ot", "-ef"))


def evaluate(tokens: Sequence[str], words: Words | None) -> bool | None:
    """Evaluate a condition; None where a run decides. words: expand tokens, as ``[[`` does; None: they
    are, as ``[`` has them.

    >>> evaluate(["8", "-ge", "8", "-a", "!", "x"], None)
    False
    """
    condition = _Condition(tokens, words)
    found = condition.either()
    return found if condition.at >= len(tokens) else False  # bash ends with an error


def combine(sides: Sequence[bool | None], *, ends: bool) -> bool | None:
    """Several conditions as one. ends: what one of them has that decides all."""
    return ends if ends in sides else None if None in sides else not ends


class _Condition:
    """Words of a condition, and how far they are read."""

    def __init__(self, tokens: Sequence[str], words: Words | None) -> None:
        self.tokens, self.words, self.at = tokens, words, 0

    def _next(self, ahead: int = 0) -> str:
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else ""

    def either(self) -> bool | None:
        """Conditions of which one must hold."""
        return self._several(("||",) if self.words else ("-o",), self._both, ends=True)

    def _both(self) -> bool | None:
        return self._several(("&&",) if self.words else ("-a",), self._one, ends=False)

    def _several(self, joints: Sequence[str], read: Callable[[], bool | None], *, ends: bool) -> bool | None:
        sides = [read()]
        while self._next() in joints:
            self.at += 1
            sides.append(read())
        return combine(sides, ends=ends)

    def _one(self) -> bool | None:
        if self._next() == "!" and len(self.tokens) > self.at + 1:
            self.at += 1
            told = self._one()
            return told if told is None else not told
        if self._next() == "(" and ")" in self.tokens[self.at + 2 :]:
            self.at += 1
            told = self.either()
            self.at += 1
            return told
        first, how = self._next(), self._next(1)
        if how in _COMPARED and len(self.tokens) > self.at + 2:
            self.at += 3
            return self._compared(first, how, self.tokens[self.at - 1])
        if (first in ("-z", "-n") or first in _FILES) and len(self.tokens) > self.at + 1:
            self.at += 2
            told = self._empty(how)
            return None if first in _FILES or told is None else told == (first == "-z")
        self.at += 1
        told = self._empty(first)
        return told if told is None else not told

    def _text(self, token: str) -> str:
        return self.words.value(token) if self.words else token

    def _empty(self, token: str) -> bool | None:
        text = self._text(token)
        return False if known_part(text) else None if UNKNOWN in text else True

    def _compared(self, first: str, how: str, second: str) -> bool | None:
        left, right = self._text(first), self._text(second)
        if how in _ORDERS:
            numbers = [self._number(one) for one in (left, right)]
            a, b = numbers
            if a is None or b is None:
                return None
            return ((a > b) - (a < b)) in _ORDERS[how]
        if UNKNOWN in left + right or how in ("=~", "-nt", "-ot", "-ef"):
            return None
        if how in ("<", ">"):
            return left < right if how == "<" else left > right
        pattern = self.words.pattern(second) if self.words else None
        if self.words and pattern is None:
            return None
        return (fnmatchcase(left, pattern) if pattern is not None else left == right) == (how != "!=")

    def _number(self, text: str) -> int | None:
        if self.words:
            return self.words.number(text) if UNKNOWN not in text else None
        return int(text) if text.strip().lstrip("+-").isdigit() else None
