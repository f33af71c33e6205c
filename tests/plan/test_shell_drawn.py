"""Drawn scripts: the words that Plait follows are those that bash passes, or a word is not known."""

from __future__ import annotations

import subprocess
from pathlib import Path
from random import Random

import pytest

from plait.plan.shell_run import follow_script
from plait.plan.shell_syntax import UNKNOWN

NAMES = "ABCD"
BEGIN = """I=1; P=A; ARR=(1 "2 3" 4)
f1() { echo $(( $1 + I )); }
f2() { local q="$A"; echo "$q"; }
f3() { B=$1; C="${2:-none}$#"; }
"""
WORDS = ("3", "4x6", "m-8-24L", "aXbX", "v2.0", "", "a b", " 6  16 ", "x*y", "2,4,8", "--f6")
EXPANDED = (
    "${v}", '"$v"', "${v:-7}", "${v#*-}", "${v%-*}", "${v##*x}", "${v%%x*}", "${v/X/5}", "${v//[0-9]/n}", "${#v}",
    "${v:1:2}", "${v: -1}", "${v^^}", "${v:+y}", '"${v/x/ }"', "${v//,/ }", "$((${#v} + 2))", "'1'\"$v\"",
    "$(echo ${v})", '`echo "${v}"`', "${ARR[@]}", '"${ARR[@]}"', "${#ARR[@]}", '"${ARR[*]}"', "${ARR[@]:1}", "$(f1 3)",
    "$(f2)", "${!P}", "$(( I % 2 ? 3 : 5 ))", "$((I++))", "${v/#/p}", '"${ARR[@]/%/s}"',
)  # fmt: skip
CONDITIONS = (
    '[ "$v" = "4" ]', '[ -z "$v" ]', "[[ -n $v ]]", "[[ $v == *x* ]]", '[[ "$v" == "*x*" ]]', "[ $I -gt 3 ]",
    "(( I % 2 ))", '[[ $I -le 4 && -n "$v" ]]', '! [ "$v" != 1 ]', 'test "$v" = "a b"', '[ -n "$v" -a $I -lt 9 ]',
    "[[ $v < m ]]", "true", "[[ $v != [0-9]* || $I == 3 ]]", "false", "[[ ! ( $v == m* ) ]]",
)  # fmt: skip


class Drawn:
    """Statements, by the same number always the same ones."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)

    def one(self, some: tuple[str, ...]) -> str:
        return self.random.choice(some).replace("v", self.random.choice(NAMES))

    def word(self) -> str:
        return self.random.choice(WORDS)

    def value(self) -> str:
        plain = f"'{self.word()}'"
        mixed = f'"{self.word()}-${{{self.random.choice(NAMES)}:-q}} ${self.random.choice(NAMES)}"'
        return self.random.choice(
            (plain, self.one(EXPANDED), mixed, f"{self.random.randint(1, 9)}{self.one(EXPANDED)}")
        )

    def statement(self, depth: int) -> str:
        name, inner = self.random.choice(NAMES), depth - 1
        kinds = [
            lambda: f"{name}={self.value()}",
            lambda: f"{name}+={self.value()}",
            lambda: f"ARR+=({self.value()} {self.value()})",
            lambda: "((I += 2))",
            lambda: f"declare {name}={self.value()} D=${name}",
            lambda: f"{self.one(CONDITIONS)} && {name}={self.value()}",
            lambda: f"set -- {self.value()} {self.value()}; {name}=$#$1",
            lambda: f"f3 {self.value()} {self.value()}; P={name}",
            lambda: f"read -r {name} D <<< {self.value()}",
        ]
        if depth > 0:
            kinds += [
                lambda: f"if {self.one(CONDITIONS)}; then {self.statement(inner)}; else {self.statement(inner)}; fi",
                lambda: f"for {name} in 1 {self.one(EXPANDED)} z; do {self.statement(inner)}; I=$((I+1)); done",
                lambda: f"while [ $I -lt 5 ]; do I=$((I + 1)); {self.statement(inner)}; done",
                lambda: f"case $A in 1|4) {self.statement(inner)} ;; m*|*x*) :;; *) {self.statement(inner)} ;; esac",
                lambda: f"( {self.statement(inner)} ); {self.statement(inner)}",
            ]
        return self.random.choice(kinds)()

    def script(self) -> str:
        first = [f"{name}='{self.word()}'" for name in NAMES]
        words = " ".join(
            (*(f'"${name}"' for name in NAMES), "$I", '"${ARR[@]}"', self.one(EXPANDED), self.one(EXPANDED))
        )
        behind = ("", " # c \\", " # don't")
        body = [self.statement(2) + self.random.choice(behind) for _ in range(self.random.randint(2, 6))]
        return BEGIN + "\n".join((*first, *body, f"prog --begin {words}")) + "\n"


@pytest.mark.system
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_words_are_those_that_bash_passes(first: int, tmp_path: Path) -> None:
    known = 0
    for seed in range(first, first + 50):
        script = Drawn(seed).script()
        (tmp_path / "run.sh").write_text('prog() { printf "%s\\0" "$@" > words; }\n' + script)
        subprocess.run(["bash", "run.sh"], cwd=tmp_path, capture_output=True, timeout=60, check=False)
        passed = tuple((tmp_path / "words").read_text().split("\0")[:-1])
        runs = follow_script(script, "", {})[0].runs
        assert len(runs) == 1
        if UNKNOWN not in "".join(runs[0].words):
            assert runs[0].words[1:] == passed, script
            known += 1
    assert known >= 40
