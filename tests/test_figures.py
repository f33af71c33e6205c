"""Figures of README and documents are those of the JSON that measurements have left, or follow from
it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from plait.core.base.env import specs_folder
from plait.core.cluster.mfu import dense_peak, known_device, mfu
from plait.core.model.spec import ModelSpec

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def kept(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def page(name: str) -> str:
    """A document, its lines joined."""
    return " ".join((ROOT / "docs" / f"{name}.md").read_text().split())


def variants(name: str, case: str) -> Any:
    """Of a benchmark's case."""
    (found,) = (one["variants"] for one in kept(name)["cases"] if one["case"] == case)
    return found


def results() -> dict[str, str]:
    """README's results: the figure, by the benchmark in the last column."""
    rows = re.findall(r"^\|.*\| ([\d.]+)(?:x| % median error) \| `benchmarks/(\w+)\.py` \|$", README, re.M)
    return {name: figure for figure, name in rows}


def test_results_of_the_readme() -> None:
    domino, pipeline = kept("domino-2core")["points"][0], variants("pipeline-2core", "gpt")
    planner, placement, recorder = kept("planner-accuracy"), kept("placement-2core"), kept("recorder-2core")
    assert results() == {
        "domino": f"{domino['async_s'] / domino['domino_s']:.2f}",
        "pipeline": f"{pipeline['torch_runtime']['seconds'] / pipeline['eager']['seconds']:.2f}",
        "sharding": f"{variants('sharding-2core', 'overlap')['zero3']['against_fsdp2']:.2f}",
        "planner_accuracy": f"{100 * planner['left_out']['aimed']['median_abs_rel_error']:.1f}",
        "placement": f"{placement['mean_ratio_strict']:.2f}",
    }
    assert f"{planner['left_out']['aimed']['rows']:,} published steps" in README
    choice = planner["shipped"]["choice"]["overall"]
    assert f"{choice['mean_loss']:.1%} slower than the best on average, {choice['worst_loss']:.0%} at" in plain(README)
    assert f"costs up to {max(job['cost'] for job in recorder['jobs'].values()):.1%} of a step" in plain(README)


def plain(text: str) -> str:
    return text.replace(" %", "%")


LLAMA = ModelSpec(**tomllib.loads((specs_folder() / "models" / "llama3.2-1b.toml").read_text()))


def share(tokens_a_second: float) -> str:
    """MFU of Llama-3.2 1B on one H200, of sequences of 2,048, from tokens a second."""
    peak = dense_peak(known_device("NVIDIA H200"), "bf16-mixed")
    found = mfu(LLAMA, sequence=2048, batch=1, seconds=2048 / tokens_a_second, devices=1, peak=peak)
    return f"{100 * (found or 0):.0f}"


def test_utilisation_of_one_h200_follows_from_tokens_a_second() -> None:
    a, b = share(55_800), share(63_100)
    assert f"55,800 tokens/s, {a} % [MFU](docs/figures.md), compiled at 63,100, {b} %" in README
    assert f"55,800 tokens/s, compiled at 63,100: {a} and {b} % of 989.4 TFLOP/s" in page("figures")
    assert f"AdamW 54,600 tokens/s, {share(54_600)} % MFU" in page("gpu")
    rates = (55_800, 55_100, 63_100, 46_350)
    shares = ", ".join(map(share, rates[:3])), share(rates[3])
    assert f"63,100 and 46,350 tokens/s, which are {shares[0]} and {shares[1]} % MFU" in page("gpu")
    rows = kept("gpu")["cases"]["llama3-8b"]["whole"]["rows"]
    own, captured, peer, compiled = (
        f"{100 * rows[name]['mfu']:.1f} %"
        for name in ("plait", "plait captured", "transformers", "transformers compiled")
    )
    assert f"MFU {own}; captured {captured}; transformers {peer}, with `torch.compile` {compiled}" in page("gpu")


@pytest.mark.parametrize(
    ("name", "where"),
    [("cluster_faults_kubernetes", "Emulated Kubernetes, "), ("cluster_faults_slurm", "Slurm 22.05, "),
     ("cluster_faults_kubernetes_jobset", "Under JobSet, ")],
)  # fmt: skip
def test_faults_of_clusters(name: str, where: str) -> None:
    found, told = kept(name), page("benchmarks").partition(where)[2][:1300]
    assert f" by seed {found['seed']}" in told and f"{round(found['seconds'] / 60)} minutes" in told
    assert f"{found['steps']:,} losses" in told
    assert re.search(rf"\b{found['attempts']} attempts", told)


def test_the_page_of_a_large_run() -> None:
    seconds = f"{kept('view-scale-2core')['first_paint']:.1f}"
    assert f"The page shows it {seconds} seconds after" in page("view") and f"paint after {seconds} s" in page(
        "benchmarks"
    )


def test_published_memory_is_one_figure() -> None:
    memory, accuracy = kept("planner-memory")["found"]["overall"], kept("planner-accuracy")["left_out"]
    risk = accuracy["risk"]["all, by the median"]
    assert memory["median_abs_rel_error"] == accuracy["overall"]["memory_error"]
    assert (memory["fit_right"], memory["oom_right"]) == pytest.approx(
        (risk["ran_fits"], risk["out_does_not"]), abs=1e-4
    )


def test_sizes_and_versions_of_an_installation() -> None:
    text = page("install")
    base, view = (int(re.findall(rf"{row} \| (\d+)", text)[0]) for row in ("`lab`", "pictures in files"))
    sizes = [base + view + int(one.replace(",", "")) for one in re.findall(r"([\d,]+) \((?:CPU|CUDA)\)", text)]
    cpu, cuda = (f"{size / 1000:.1f} GB" for size in sizes)
    assert f"{cuda} in all" in text and f"it is {cpu}" in text
    assert f"shows runs: {cpu}, with CUDA {cuda}" in README
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    (torch,) = (one for one in extras if one.startswith("torch>"))
    least, below = re.findall(r"2\.(\d+)", torch)
    assert set(re.findall(r"2\.\d+ to 2\.\d+", text)) == {f"2.{least} to 2.{int(below) - 1}"}
