"""Shell scripts, held to what bash passes: what Plait understands of one is what it understands of the words
that bash gives the program, or a word is named that nobody knows before a run."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plait.api.planning import plan_job
from plait.core.base.errors import JobError
from tests.support.command import plait

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
"""What stands for programs: those that print their words, those that start others, those that do nothing."""
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
KNOWN = [name for name in FORMS if not name.startswith("NAMED")]
NAMED = [name for name in FORMS if name.startswith("NAMED")]


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
    assert found.told
    read = found.told.to_dict()
    job = {name: table for name, table in found.planner.job.to_dict().items() if name != "run"}
    kinds = ("options", "not_understood", "not_modelled")
    return {"job": job, "harmless": set(read["harmless"]), **{kind: read[kind] for kind in kinds}}


@pytest.mark.system
@pytest.mark.parametrize("name", KNOWN)
def test_what_bash_passes_is_understood(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = passed(tmp_path, FORMS[name])
    assert len(runs) == 1
    (tmp_path / "plain.txt").write_text(runs[0])
    assert understood(Path("run.sh")) == understood(Path("plain.txt"))


@pytest.mark.system
@pytest.mark.parametrize("name", NAMED)
def test_what_a_run_decides_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert passed(tmp_path, FORMS[name])
    with pytest.raises(JobError, match=r"nobody knows .*before a run") as refused:
        understood(Path("run.sh"))
    assert re.search(r"line \d+: .* (in|into) the file", str(refused.value))


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
         "line 2: --tensor-model-parallel-size: '$TP': nobody knows it before a run. Set it in the file, or add "
         "strategy.tp=... to the command", ["strategy.tp=2"]),
        ("TP=4\nif [ -f x ]; then TP=2; fi\nRUN SIZES --tensor-model-parallel-size $TP @",
         "'2 or 4': nobody knows it before a run (a run decides if [ -f x ] (line 3))", ["strategy.tp=2"]),
        ("for TP in 4 8; do RUN SIZES --tensor-model-parallel-size $TP @; done",
         "'4 or 8': nobody knows it before a run (it starts 2 runs (line 2))", ["strategy.tp=4"]),
        ("TP=4; while read -r x; do TP=$x; done < y\nRUN SIZES --tensor-model-parallel-size $TP @",
         "'$TP': nobody knows it before a run (while read -r x (line 2))", ["strategy.tp=4"]),
        ("RUN SIZES --num-layers $L @", "add model.num_layers=... to the command", ["model.num_layers=12"]),
        ("[ -f x ] && P=--bf16\nRUN SIZES ${P:-} @", "add train.precision=... to the command",
         ["train.precision=bf16-mixed"]),
        ('RUN SIZES --tensor-model-parallel-size 2 "$@" @',
         "line 2: $@: stands for flags that nobody knows before a run. Write them into the file, or add to the "
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
        ("#SBATCH --nodes=4\n#SBATCH --gpus-per-node=8\nsrun torchrun pretrain_gpt.py SIZES @", 32),
        ("#SBATCH -N 4 --gres=gpu:h100:8\nsrun torchrun --nnodes $SLURM_NNODES pretrain_gpt.py SIZES @", 32),
        (
            "#SBATCH -N4\n#SBATCH --ntasks-per-node=8\n#SBATCH --gpus-per-node=8\nsrun python pretrain_gpt.py SIZES @",
            32,
        ),
        ("#SBATCH --nodes=4\n#SBATCH --gres=gpu:8\ntorchrun --nnodes 2 --nproc-per-node 4 pretrain_gpt.py SIZES @", 8),
        ("#SBATCH --ntasks=16\nsrun python pretrain_gpt.py SIZES @", 16),
        ("srun -N 2 --ntasks-per-node=8 python pretrain_gpt.py SIZES @", 16),
        ("mpirun -np 16 python pretrain_gpt.py SIZES @", 16),
        ("deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py SIZES @", 16),
        ("accelerate launch --num_processes 16 pretrain_gpt.py SIZES @", 16),
        ("##SBATCH --nodes=4\nX=1\n#SBATCH --nodes=2\nsrun --gpus-per-node=8 python pretrain_gpt.py SIZES @", 0),
    ],
)
def test_launchers_and_slurm_say_how_many_ranks_there_are(tmp_path: Path, text: str, ranks: int) -> None:
    (tmp_path / "run.sh").write_text(filled(text))
    if ranks:
        job = plan_job(tmp_path / "run.sh", ["cluster.preset=h100"]).planner.job
        assert job.world_size == ranks
    else:
        with pytest.raises(JobError, match="does not say how many ranks there are"):
            plan_job(tmp_path / "run.sh", ["cluster.preset=h100"])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("cat > node.sh <<X\nRUN SIZES @\nX\nsrun bash node.sh",
         "(line 5: bash node.sh is not read: the script may write it)"),
        ("bash nowhere.sh", "(line 2: bash nowhere.sh is not read: no such file is here)"),
        ("echo 'RUN SIZES @' | sh", "(line 2: what sh reads is not followed)"),
        ("torchrun --nproc_per_node 8 pretrain_gpt.py SIZES --tensor-model-parallel-size 16 @",
         "cluster.ranks: it starts 8 ranks, no multiple of tp x pp x cp = 16"),
        ("shopt -s nocasematch\nRUN SIZES @", "line 2: shopt nocasematch is not read"),
    ],
)  # fmt: skip
def test_what_is_not_followed_is_said(tmp_path: Path, text: str, named: str) -> None:
    status, words = said(tmp_path, text)
    assert status == 2 and named in words, words


def test_ends_of_lines_as_in_dos_are_said(tmp_path: Path) -> None:
    status, words = said(tmp_path, "TP=2\r\nRUN SIZES --tensor-model-parallel-size $TP @\r\n")
    assert status == 0 and "Lines end as in DOS" in words


def test_a_comment_that_ends_a_command_is_said(tmp_path: Path) -> None:
    """In bash a comment goes to its line's end, and the command with it, whatever the last letter is."""
    status, words = said(tmp_path, "RUN SIZES @ \\\n  # tp \\\n  --tensor-model-parallel-size 4")
    assert status == 0 and "1 16 1 1" in words
    assert "line 4: --tensor-model-parallel-size 4 is no part of a command" in words


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('echo "open\nRUN SIZES @', 'line 2: what "o opens is not closed'),
        ("if true; then RUN SIZES @", "fi is expected"),
        ("RUN SIZES @ (x)", "'(' is not expected"),
        ("X=1\n" + "while true; do X=$X$X; done\nRUN SIZES @", "X grows beyond"),
        ("f() { f; }; f\nRUN SIZES @", "nested too deeply"),
        ("for ((;;)); do N=$((N+1)); M=$N$N; done\nRUN SIZES --tensor-model-parallel-size $M @", "nobody knows it"),
    ],
)
def test_scripts_that_bash_cannot_run_are_one_paragraph(tmp_path: Path, text: str, problem: str) -> None:
    status, words = said(tmp_path, text)
    assert status == 2 and problem in words, words
