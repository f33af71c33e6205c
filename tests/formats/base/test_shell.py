"""Shell scripts, held to what bash passes: what Plait understands of one is what it understands of
the words that bash gives the program, or a word is named that nobody knows before a run."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from plait.api.planning import plan_job
from plait.core.base.errors import JobError
from plait.formats.base.shell_run import follow_script
from plait.formats.base.shell_syntax import UNKNOWN
from tests.support.command import plait

TIER = "system"
RUN = "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py"
SIZES = "--num-layers 24 --hidden-size 2048 --micro-batch-size 2 --global-batch-size 64"
COMMON = (
    "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --padded-vocab-size 50304 "
    "--lr 1e-4 --train-iters 100"
)
FILES = {
    "plait_common.sh": "LAYERS=24\nPARALLEL_ARGS=(--tensor-model-parallel-size 4 --bf16)\n",
    "plait_train.sh": f'tp=$1; shift\n{RUN} {SIZES} --tensor-model-parallel-size $tp "$@" {COMMON}\n',
    "plait_args.txt": "--tensor-model-parallel-size 2 --bf16\n",
    "plait_number.txt": "4\n",
    "plait_pairs.txt": "tp 4\n",
}
"""Beside each script."""
PRINTS = '#!/bin/bash\nprintf "%s\\0" "$(basename "$0")" "$@" >> words; printf "\\1\\0" >> words\n'
STARTS = """#!/bin/bash
while [ $# -gt 0 ]; do
    case "$1" in bash|sh|python|python3|torchrun|numactl) exec "$@" ;; *) shift ;; esac
done
"""
"""What stands for programs: those that print their words, those that start others, those that do
nothing."""
PROGRAMS = {
    **dict.fromkeys(("torchrun", "python", "python3", "deepspeed"), PRINTS),
    **dict.fromkeys(("srun", "mpirun", "numactl", "nohup"), STARTS), "clear": "#!/bin/bash\n",
}  # fmt: skip
SLURM = {"SLURM_NNODES": "--nodes[= ](\\d+)|-N ?(\\d+)", "SLURM_GPUS_PER_NODE": "--gpus-per-node=(\\d+)"}
"""Variables that Slurm sets of a script's own lines."""


def filled(text: str) -> str:
    for mark, words in ((r"\bSIZES\b", SIZES), (r"\bRUN\b", RUN), (r"(?<=[ \n])@(?=[\s\"';]|$)", COMMON)):
        text = re.sub(mark, words, text)
    return f"#!/bin/bash\n{text}"


_, *PARTS = re.split(r"^### (.*)\n", (Path(__file__).parent / "shell_forms.txt").read_text(), flags=re.MULTILINE)
FORMS = dict(zip(PARTS[::2], map(filled, PARTS[1::2]), strict=True))


def passed(folder: Path, text: str) -> list[str]:
    """What bash gives each run of the program, as command lines."""
    tools = folder / "tools"
    tools.mkdir()
    for name, program in PROGRAMS.items():
        (tools / name).write_text(program)
        (tools / name).chmod(0o755)
    for name, content in FILES.items():
        (folder / name).write_text(content)
    (folder / "run.sh").write_text(text)
    (folder / "words").touch()
    asked = {name: re.search(f"^#SBATCH (?:{how})", text, re.MULTILINE) for name, how in SLURM.items()}
    slurm = {name: next(filter(None, found.groups())) for name, found in asked.items() if found}
    if "ntasks-per-node" in text and "SLURM_NNODES" in slurm:
        slurm["SLURM_NTASKS"] = str(8 * int(slurm["SLURM_NNODES"]))
    here = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(folder), **slurm}
    subprocess.run(["bash", "run.sh"], cwd=folder, env=here, capture_output=True, timeout=60, check=False)
    runs = (folder / "words").read_text().split("\0\1\0")[:-1]
    return [shlex.join(run.split("\0")) for run in runs if "--num-layers" in run]


def understood(file: Path) -> dict[str, Any]:
    """A job, and what is known of its framework."""
    found = plan_job(file, ["cluster.preset=h100", "cluster.ranks=16"])
    assert found.config
    read = found.config.to_dict()
    job = {name: table for name, table in found.planner.job.to_dict().items() if name != "run"}
    kinds = ("options", "not_understood", "not_modelled")
    return {"job": job, "harmless": set(read["harmless"]), **{kind: read[kind] for kind in kinds}}


@pytest.mark.parametrize("name", FORMS)
def test_what_bash_passes_is_understood_or_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = passed(tmp_path, FORMS[name])
    if name.startswith("NAMED"):
        assert runs
        with pytest.raises(JobError, match=r"known only during a run") as refused:
            understood(Path("run.sh"))
        assert re.search(r"line \d+: .* (in|into) the file", str(refused.value))
        return
    assert len(runs) == 1
    (tmp_path / "plain.txt").write_text(runs[0])
    assert understood(Path("run.sh")) == understood(Path("plain.txt"))


# ---- drawn scripts ----

NAMES = "ABCD"
PROG = 'prog() { printf "%s\\0" "$@" > words; }\n'
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
    "$(f2)", "${!P}", "$(( I % 2 ? 3 : 5 ))", "$((I++))", '"${ARR[@]/%/s}"', "$'a\\tb'", "{1,2}",
)  # fmt: skip
CONDITIONS = (
    '[ "$v" = "4" ]', '[ -z "$v" ]', "[[ -n $v ]]", "[[ $v == *x* ]]", '[[ "$v" == "*x*" ]]', "[ $I -gt 3 ]",
    "(( I % 2 ))", '[[ $I -le 4 && -n "$v" ]]', '! [ "$v" != 1 ]', 'test "$v" = "a b"', '[ -n "$v" -a $I -lt 9 ]',
    "[[ $v < m ]]", "true", "[[ $v != [0-9]* || $I == 3 ]]", "false", "[[ ! ( $v == m* ) ]]",
    "[[ -n $v && $I == 1 || $v == 3 ]]", "[[ ! -z $v && $I == 1 ]]", "[ ! -n \"$v\" -o $I = 1 ]",
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
        mixed = f'"{self.word()}-${{{self.random.choice(NAMES)}:-q}} ${self.random.choice(NAMES)}"'
        numbered = f"{self.random.randint(1, 9)}{self.one(EXPANDED)}"
        return self.random.choice((f"'{self.word()}'", self.one(EXPANDED), mixed, numbered))

    def statement(self, depth: int) -> str:
        name, inner = self.random.choice(NAMES), depth - 1
        kinds: list[Callable[[], str]] = [
            lambda: f"{name}={self.value()}",
            lambda: f"{name}+={self.value()}",
            lambda: f"ARR+=({self.value()} {self.value()})",
            lambda: f"ARR[{self.random.choice('013')}]={self.value()}",
            lambda: "((I += 2))",
            lambda: f"declare {name}={self.value()} D=${name}".replace("{1,2}", "9"),
            lambda: f"{self.one(CONDITIONS)} && {name}={self.value()}",
            lambda: f"set -- {self.value()} {self.value()}; {name}=$#$1",
            lambda: f"f3 {self.value()} {self.value()}; P={name}",
            lambda: f"read -r {name} D <<< {self.value()}",
        ]
        if depth > 0:
            kinds += [
                lambda: f"if {self.one(CONDITIONS)}; then {self.statement(inner)}; else {self.statement(inner)}; fi",
                lambda: f"for {name} in 1 {self.one(EXPANDED)} z; do {self.statement(inner)}; I=$((I+1)); done",
                lambda: f"for {name} in 1 2 3; do {self.one(CONDITIONS)} && break; {self.statement(inner)}; done",
                lambda: f"case $A in 1|4) {self.statement(inner)} ;; m*|*x*) :;; *) {self.statement(inner)} ;; esac",
                lambda: f"( {self.statement(inner)} ); {self.statement(inner)}",
            ]
        if depth > 1:
            kinds.append(lambda: f"while [ $I -lt 5 ]; do I=$((I + 1)); {self.statement(inner)}; done")
        return self.random.choice(kinds)()

    def script(self) -> str:
        first = [f"{name}='{self.word()}'" for name in NAMES]
        words = " ".join(
            (*(f'"${name}"' for name in NAMES), "$I", '"${ARR[@]}"', self.one(EXPANDED), self.one(EXPANDED))
        )
        behind = ("", " # c \\", " # don't")
        body = [self.statement(2) + self.random.choice(behind) for _ in range(self.random.randint(2, 6))]
        return BEGIN + "\n".join((*first, *body, f"prog --begin {words}")) + "\n"


def may_be(words: tuple[str, ...], passed: list[str]) -> bool:
    """Tell whether words are those that bash passes, where one that is not known may be any number
    of these."""
    ends = {0}
    for word in words:
        if UNKNOWN in word:
            ends = set(range(min(ends, default=len(passed)), len(passed) + 1))
        else:
            ends = {end + 1 for end in ends if passed[end : end + 1] == [word]}
    return len(passed) in ends


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_words_are_those_that_bash_passes(first: int, tmp_path: Path) -> None:
    """Of several ways through a script one is bash's."""
    known = 0
    for seed in range(first, first + 50):
        script = Drawn(seed).script()
        (tmp_path / "run.sh").write_text(PROG + script)
        subprocess.run(["bash", "run.sh"], cwd=tmp_path, capture_output=True, timeout=60, check=False)
        runs = {run.words[1:] for shell in follow_script(script, "", {}) for run in shell.runs}
        words = (tmp_path / "words").read_text().split("\0")[:-1]
        assert any(may_be(run, words) for run in runs), script
        known += len(runs) == 1 and UNKNOWN not in "".join(map("".join, runs))
    assert known >= 20


# ---- what is said ----


def said(folder: Path, text: str, *more: str) -> tuple[int, str]:
    """Status and words of planning a script."""
    file = folder / "run.sh"
    file.write_text(filled(text))
    found = plait("plan", file, "cluster.preset=h100", *more)
    return found.returncode, " ".join((found.stdout + found.stderr).split())


@pytest.mark.parametrize(
    ("text", "named", "keys"),
    [
        ("RUN SIZES --tensor-model-parallel-size $TP @",
         "line 2: --tensor-model-parallel-size: '$TP': known only during a run. Set it in the file, or add "
         "strategy.tp=... to the command", ["strategy.tp=2"]),
        ("TP=4\nif [ -f x ]; then TP=2; fi\nRUN SIZES --tensor-model-parallel-size $TP @",
         "'2 or 4': known only during a run (a run decides if [ -f x ] (line 3))", ["strategy.tp=2"]),
        ("for TP in 4 8; do RUN SIZES --tensor-model-parallel-size $TP @; done",
         "'4 or 8': known only during a run (it starts 2 runs (line 2))", ["strategy.tp=4"]),
        ("TP=4; while read -r x; do TP=$x; done < y\nRUN SIZES --tensor-model-parallel-size $TP @",
         "'$TP': known only during a run (while read -r x (line 2))", ["strategy.tp=4"]),
        ("[ -f x ] && P=--bf16\nRUN SIZES ${P:-} @", "add train.precision=... to the command",
         ["train.precision=bf16-mixed"]),
        ('RUN SIZES --tensor-model-parallel-size 2 "$@" @',
         "line 2: $@: may stand for flags that are known only during a run. Write them into the file, or add to the "
         "command what they say; where they say none of these: strategy.pp=1 strategy.cp=1 train.precision=fp32 "
         "strategy.shard=ddp strategy.recompute=none",
         ["strategy.pp=1", "strategy.cp=1", "train.precision=bf16-mixed", "strategy.shard=zero1",
          "strategy.recompute=none"]),
    ],
)  # fmt: skip
def test_what_is_asked_for_can_be_said(tmp_path: Path, text: str, named: str, keys: list[str]) -> None:
    status, words = said(tmp_path, text)
    assert status == 2 and named in words
    status, words = said(tmp_path, text, *keys)
    assert status == 0 and re.search("is the command's|are not in the prediction", words), words


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\nsrun torchrun pretrain_gpt.py", 32),
        ("#SBATCH -N 4 --gres=gpu:h100:8\nsrun torchrun --nnodes $SLURM_NNODES pretrain_gpt.py", 32),
        ("#SBATCH -N4\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\nsrun python pretrain_gpt.py", 32),
        ("#SBATCH --nodes=4\n#SBATCH --gres=gpu:8\ntorchrun --nnodes 2 --nproc-per-node 4 pretrain_gpt.py", 8),
        ("#SBATCH --ntasks=16 --time=24:00:00\nsrun python pretrain_gpt.py", 16),
        ("srun -N 2 --ntasks-per-node=8 python pretrain_gpt.py", 16),
        ("mpirun -np 16 python pretrain_gpt.py", 16),
        ("deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py", 16),
        ("accelerate launch --num_processes 16 pretrain_gpt.py", 16),
        ("##SBATCH --nodes=4\nX=1\n#SBATCH --nodes=2\nsrun --gpus-per-node=8 python pretrain_gpt.py", 0),
    ],
)
def test_launchers_and_slurm_say_how_many_ranks_there_are(tmp_path: Path, text: str, ranks: int) -> None:
    (tmp_path / "run.sh").write_text(filled(f"{text} SIZES @"))
    if ranks:
        job = plan_job(tmp_path / "run.sh", ["cluster.preset=h100"]).planner.job
        assert job.world_size == ranks
    else:
        with pytest.raises(JobError, match="does not say how many ranks there are"):
            plan_job(tmp_path / "run.sh", ["cluster.preset=h100"])


@pytest.mark.parametrize(
    ("text", "status", "named"),
    [
        ("cat > node.sh <<X\nRUN SIZES @\nX\nsrun bash node.sh", 2,
         "(line 5: bash node.sh is not read: the script may write it)"),
        ("bash nowhere.sh", 2, "(line 2: bash nowhere.sh is not read: no such file is here)"),
        ("echo 'RUN SIZES @' | sh", 2, "(line 2: what sh reads is not followed)"),
        ("torchrun --nproc_per_node 8 pretrain_gpt.py SIZES --tensor-model-parallel-size 16 @", 2,
         "cluster.ranks: it starts 8 ranks, no multiple of tp x pp x cp = 16"),
        ("shopt -s nocasematch\nRUN SIZES @", 2, "line 2: 'shopt nocasematch' is a form that Plait does not follow"),
        ("declare -A X=([a]=1)\nRUN SIZES @", 2, "line 2: 'declare -A' is a form that Plait does not follow"),
        ("case a in a) X=1 ;& b) X=2 ;; esac\nRUN SIZES @", 2,
         "' is a form that Plait does not follow. Write its flags"),
        ("echo 4 | xargs RUN SIZES @", 2, "line 2: 'xargs torchrun --nproc_per_node' is a form that Plait does not"),
        ("readonly TP=2; TP=4\nRUN SIZES @", 2, "TP is read-only, and set again"),
        ('echo "open\nRUN SIZES @', 2, "line 2: reached EOF without closing quote"),
        ("if true; then RUN SIZES @", 2, "line 2: `if` statement must end with `fi`"),
        ("RUN SIZES @ (x)", 2, "line 2: a command can only contain words and redirects"),
        ("X=" + "x" * 100_000 + "\nX=$X$X$X\nRUN SIZES @", 2, "X grows beyond"),
        ("f() { f; }; f\nRUN SIZES @", 2, "nested too deeply"),
        ("for ((;;)); do N=$((N+1)); done\nRUN SIZES --tensor-model-parallel-size $N @", 2, "known only during"),
        ("TP=2\r\nRUN SIZES --tensor-model-parallel-size $TP @\r\n", 0, "Lines end as in DOS"),
        ("RUN SIZES @ \\\n  # tp \\\n  --tensor-model-parallel-size 4", 0,  # a comment goes to its line's end
         "line 4: --tensor-model-parallel-size 4 is no part of a command"),
        ("RUN SIZES @ --load <Your checkpoints> --save <out>/x", 0, "16 GPUs of h100"),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_said(tmp_path: Path, text: str, status: int, named: str) -> None:
    found, words = said(tmp_path, text)
    assert found == status and named in words, words
