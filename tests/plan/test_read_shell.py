"""Shell scripts: which branches run, and what a run decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.plan.read_branches import taken
from plait.plan.read_shell import arguments, read_script
from tests.plan.told_files import told

SIZES = """
MODEL=${1:-7B}
case $MODEL in
  7B) L=32; H=4096 ;;
  13B | 14B)
    L=40
    H=5120 ;;
  *) echo "what's $MODEL?"; exit 1 ;;
esac
if [[ "$DTYPE" == "fp8" && $L -gt 30 ]]; then
  ARGS=(
    --fp8-format hybrid
  )
elif [ "$DTYPE" = bf16 ]; then ARGS=(--bf16)
else
  ARGS=(--fp16)
fi
run --num-layers $L --hidden-size $H "${ARGS[@]}"
"""


def shown(text: str) -> str:
    return " ".join(map(str, arguments(text)))


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("DTYPE=fp8\nset -- \n", "--num-layers 32 --hidden-size 4096 --fp8-format hybrid"),
        ("DTYPE=bf16\n", "--num-layers 32 --hidden-size 4096 --bf16"),
        ('DTYPE="fp16"\n', "--num-layers 32 --hidden-size 4096 --fp16"),
    ],
)
def test_what_a_script_decides_itself_is_read_as_it_runs(before: str, found: str) -> None:
    script = read_script(before + SIZES)
    assert " ".join(map(str, script.arguments)) == found and not script.open


def test_another_size_is_another_branch() -> None:
    assert "--num-layers 40 --hidden-size 5120" in shown("DTYPE=x\n" + SIZES.replace(":-7B", ":-14B"))


def test_what_a_run_decides_is_named(tmp_path: Path) -> None:
    text = "L=24\nif [ $FP8 = 1 ]; then\n  L=48; X=--bf16\nfi\n"
    text += "run --num-layers $L --hidden-size 64 $X --num-attention-heads 4"
    assert read_script(text).open == {"if [ $FP8 = 1 ]": ["L", "X"]}
    assert "--num-layers 48" in shown(text)
    said = " ".join(told(tmp_path, "a.sh", text).lines())
    assert "A run decides if [ $FP8 = 1 ], which sets L, X: all of its branches are read" in said


@pytest.mark.parametrize(
    ("condition", "runs"),
    [
        ("[ 8 -ge 8 ]", True),
        ("[ $A != 1 ]", False),
        ("! [ $A = 1 ]", False),
        ('[ -z "$A" ]', False),
        ("[[ -n $A ]] && [[ $A == 1* ]]", True),
        ("[ $A = 2 ] || [ $B = 3 ]", None),
        ("[ $A = 1 ] || [ $B = 3 ]", True),
        ("[[ $A = 2 && $B = 3 ]]", False),
        ("[ -f data.bin ]", None),
        ("(( A > 1 ))", None),
        ("[ a -lt 2 ]", None),
        ("which nvcc", None),
    ],
)
def test_conditions(condition: str, runs: bool | None) -> None:
    found = taken(f"A=1\nif {condition}; then X=1; fi\n")
    assert ("X=1" in found.text, bool(found.open)) == (runs is not False, runs is None)


def test_a_branch_behind_one_that_a_run_decides_is_decided_by_it_too() -> None:
    text = "if [ $Q = 1 ]; then A=1; elif [ 1 = 1 ]; then A=2; else A=3; fi\nif [ $A = 2 ]; then B=1; fi"
    found = taken(text)
    assert found.text.split() == ["A=1", "A=2", "A=3", "B=1"]
    assert list(found.open.values()) == [["A"], ["B"]]


@pytest.mark.parametrize(
    ("text", "found", "open_ones"),
    [
        ("[ $A = 1 ] && X=--b\nrun --a $X", "--a --b", ["[ $A = 1 ]"]),
        ("A=2\n[ $A = 1 ] && X=--b\n[[ $A -gt 1 ]] && Y=--c\nrun --a 1 $X $Y", "--a 1 $X --c", []),
        ("A=2\n[ $A = 1 ] || X=--b\n[ $A = 2 ] || X=--c\nrun --a 1 $X", "--a 1 --b", []),
        (": ${A:=4}\nrun --a $A --b ${C:=5}", "--a 4 --b 5", []),
        ("export A=1 B='2 3'\nC=4 D=5 run --a $A --b $B --c $C", "--a 1 --b 2 3 --c 4", []),
        ('srun --nodes 2 bash -c "run --a 1 --b"', "--nodes 2 bash -c run --a 1 --b", []),
    ],
)
def test_statements_that_set_and_start(text: str, found: str, open_ones: list[str]) -> None:
    script = read_script(text)
    assert " ".join(map(str, script.arguments)) == found and list(script.open) == open_ones


def test_of_several_commands_the_training_is_read(tmp_path: Path) -> None:
    text = (
        "python prepare.py --input x\nrun a.py --num-layers 2 --hidden-size 8 --num-attention-heads 1\nconvert --tp 1\n"
    )
    one = told(tmp_path, "a.sh", text)
    assert one.get("model.num_layers") == 2 and not one.unknown
    assert "the one with most flags is read, not python prepare.py --input, convert --tp 1." in " ".join(one.notes)


def test_a_megatron_script_that_also_names_deepspeed_is_read(tmp_path: Path) -> None:
    one = told(
        tmp_path, "a.sh", "run --num-layers 2 --hidden-size 8 --num-attention-heads 1 --deepspeed --zero-stage 1"
    )
    assert one.unknown == ["--deepspeed", "--zero-stage 1"]


@pytest.mark.parametrize("text", ['echo "open\nA=1\nrun --a $A', "A=(1\nrun --a 1", "cat <<E\ndon't\nE\nrun --a 1"])
def test_a_text_whose_quotes_do_not_close_stays_as_it_is(text: str) -> None:
    assert taken(text).text == text


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.sh", "torchrun -m torchtitan.train --job.config_file x.toml", "starts torchtitan"),
        ("a.sh", "run --parallelism.tensor_parallel_degree 8", "starts torchtitan"),
        ("a.sh", "deepspeed train.py --deepspeed ds.json --bf16", "starts DeepSpeed"),
        ("a.sh", "python train.py --model x --lr 1", "none of which says a size of Megatron-LM's"),
        ("a.yaml", "distributed_type: FSDP\nnum_processes: 8", "none of which says a size of Megatron-LM's"),
    ],
)
def test_other_programs_command_lines_are_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        told(tmp_path, name, text)
