"""A cluster's file: what cannot be is refused, by its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.core.base.env import specs_folder
from plait.core.base.errors import JobError
from plait.core.cluster.hardware import HERE, Cluster, Hosts

H100 = (specs_folder() / "clusters" / "h100.toml").read_text()
ORIGIN = 'source = "me", date = "2024"'


def own(constant: str, value: float) -> tuple[str, str]:
    """A constant of efficiency replaced."""
    return 'efficiency = "hopper"', f'efficiency = {{ like = "hopper", {constant} = {{ value = {value}, {ORIGIN} }} }}'


@pytest.mark.parametrize("name", sorted(file.stem for file in (specs_folder() / "clusters").glob("*.toml")))
def test_those_that_ship_are_as_they_should_be(name: str) -> None:
    assert Cluster.preset(name).name


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("value = 450e9", "value = -450e9", "tiers.nvlink.rate.value"),
        ("value = 450e9", "value = 0", "tiers.nvlink.rate.value"),
        ("value = 450e9", "value = nan", "tiers.nvlink.rate.value"),
        ("value = 450e9", "value = 1e300", "tiers.nvlink.rate.value"),
        ("value = 2e-6", "value = -2e-6", "tiers.nvlink.latency.value"),
        ("value = 85.899e9", "value = 0", "device.memory.value"),
        ("value = 3.352e12", "value = 0", "device.memory_rate.value"),
        ("value = 989.4e12", "value = 0.0", "device.peak.bf16-mixed.value"),
        (*own("matmul", 0), "efficiency.matmul.value"),
        (*own("matmul_launch", -1), "efficiency.matmul_launch.value"),
        (*own("slow_communication", 0.5), "efficiency.slow_communication.value"),
        ('name = "network"', 'name = "nvlink"', "tiers.name"),
        ("ranks_per_node = 8", "ranks_per_node = 3", "tiers.ranks"),
        ("ranks = 0", "ranks = 12", "tiers.ranks"),
        ("ranks = 0", "ranks = 4", "tiers.ranks"),
        ("ranks = 0", "ranks = 8", "tiers.ranks"),
        (*own("slow_computation", 0.99), "efficiency.slow_computation.value"),
        (*own("memory", 0), "efficiency.memory.value"),
        (*own("inside.share", 0), "efficiency.inside.share.value"),
        (*own("across.share", 0), "efficiency.across.share.value"),
        ('efficiency = "hopper"', 'efficiency = "hoper"', "efficiency"),
        (*own("matmul_nvfp4", 0), "efficiency.matmul_nvfp4.value"),
        ('name = "network"', 'name = "network"\nmesh = true', "tiers.network.mesh"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, old: str, new: str, key: str) -> None:
    file = tmp_path / "mine.toml"
    assert old in H100
    file.write_text(H100.replace(old, new, 1))
    with pytest.raises(JobError) as caught:
        Cluster.read(file)
    assert (caught.value.file, caught.value.key) == (str(file), key)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "h100"\n', "", "name: is missing. Give a text"),
        ("[[tiers]]", "[[layers]]", "unknown key|is missing"),
        (
            ', source = "NVIDIA H100 datasheet", date = "2023-03", error = 0.01',
            "",
            r"device\.memory\.source: is missing",
        ),
        ("bf16-mixed =", "bf17 =", 'device.peak: unknown key "bf17". Known here: "fp32" or "bf16-mixed"'),
        ('date = "2023-03", error', 'date = "March", error', r'"March" is not allowed. Allowed: a text that matches'),
    ],
)
def test_what_is_missing_or_unknown_is_said_in_a_few_words(tmp_path: Path, old: str, new: str, words: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(H100.replace(old, new, 1))
    with pytest.raises(JobError, match=words) as caught:
        Cluster.read(file)
    assert len(str(caught.value)) < 500


def test_a_device_without_any_peak_and_one_whose_memory_is_all_reserved(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    head, _, rest = H100.partition("[device.peak]")
    file.write_text(f"{head}peak = {{}}\n[[tiers]]{rest.partition('[[tiers]]')[2]}")
    with pytest.raises(JobError, match=r"device\.peak: is empty"):
        Cluster.read(file)
    file.write_text(H100.replace("reserve = { value = 0.0111,", "reserve = { value = 1.0,"))
    with pytest.raises(JobError, match=r"overhead\.reserve\.value: 1 leaves no memory"):
        Cluster.read(file)


@pytest.mark.parametrize("ranks", [1, 3, 6])
def test_nodes_of_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    text = H100.replace("ranks_per_node = 8", f"ranks_per_node = {ranks}").replace("ranks = 8", f"ranks = {ranks}")
    (tmp_path / "mine.toml").write_text(text)
    assert Cluster.read(tmp_path / "mine.toml").ranks_per_node == ranks


def test_a_tier_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(H100.replace('name = "network"', ""))
    with pytest.raises(JobError, match=r"tiers\[1\]\.name: is missing"):
        Cluster.read(file)


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(H100, encoding="utf-8-sig")
    assert Cluster.read(file) == Cluster.preset("h100")


@pytest.mark.parametrize(("nodes", "connected"), [(0, True), (2, True), (3, False)])
def test_the_outermost_tier_connects_all_nodes(tmp_path: Path, nodes: int, connected: bool) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(f"nodes = {nodes}\n" + H100.replace("ranks = 0", "ranks = 16"))
    if connected:
        assert Cluster.read(file).nodes == nodes
    else:
        with pytest.raises(JobError, match=r"tiers\.network\.ranks: does not connect all nodes"):
            Cluster.read(file)


def test_ranks_that_are_neighbours_meet_in_the_innermost_tier_that_holds_them(tmp_path: Path) -> None:
    cluster = Cluster.preset("h100")
    assert [cluster.tier_of(span) for span in (1, 8, 9, 10**6)] == [0, 0, 1, 1]
    file = tmp_path / "mine.toml"
    file.write_text(H100.replace("ranks = 0", "ranks = 16"))
    assert [Cluster.read(file).tier_of(span) for span in (8, 9, 16, 17)] == [0, 1, 1, 1]


def test_a_host_is_limited_by_the_first_tier_beyond_it(tmp_path: Path) -> None:
    assert Cluster.preset("h100").hosts == Hosts(ranks_per_host=8, rate=8 * 50e9)
    file = tmp_path / "mine.toml"
    file.write_text(H100.partition('[[tiers]]\nname = "network"')[0])
    assert Cluster.read(file).hosts == Hosts(ranks_per_host=8, rate=None)  # one node


def test_ranks_fill_one_host_after_the_other() -> None:
    assert Hosts(ranks_per_host=2).of(5) == (0, 0, 1, 1, 2)
    assert HERE.of(3) == (0, 0, 0)


@pytest.mark.parametrize(("kind", "like"), [("cpu", "cpu"), ("cuda", "ampere")])
def test_what_a_file_leaves_out_follows_from_its_device(kind: str, like: str, tmp_path: Path) -> None:
    file, named = tmp_path / "mine.toml", tmp_path / "named.toml"
    text = H100.replace("[device]\n", f'[device]\nkind = "{kind}"\n')
    file.write_text(text.replace('efficiency = "hopper"\n', ""))
    named.write_text(text.replace("hopper", like))
    assert Cluster.read(file) == Cluster.read(named)
    assert (Cluster.read(file).overhead.context.value < 1e9) == (kind == "cpu")


def test_a_table_of_efficiency_replaces_single_constants(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    told = f"value = 0.5, {ORIGIN}"
    file.write_text(H100.replace(
        'efficiency = "hopper"',
        f'efficiency = {{ like = "hopper", inside = {{ share = {{ {told} }} }}, memory = {{ {told} }} }}',
    ))  # fmt: skip
    found, hopper = Cluster.read(file).efficiency, Cluster.preset("h100").efficiency
    assert (found.inside.share.value, found.memory.value) == (0.5, 0.5)
    assert found.inside.latency == hopper.inside.latency
    assert found.across == hopper.across
    assert found.matmul == hopper.matmul
    file.write_text(H100.replace('efficiency = "hopper"', "efficiency = { matmul = 5 }"))
    with pytest.raises(JobError, match=r"efficiency\."):
        Cluster.read(file)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("ranks = 0", "ranks = 12", "the 12 ranks of network are no multiple of the 8 of nvlink"),
        ("ranks = 8", "ranks = 12", "the 12 ranks of nvlink are no multiple of the 8 of a node"),
    ],
)
def test_what_a_tier_would_cut_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    (tmp_path / "mine.toml").write_text(H100.replace(old, new, 1))
    with pytest.raises(JobError, match=f"tiers.ranks: {says}"):
        Cluster.read(tmp_path / "mine.toml")


def test_a_tier_of_all_ranks_connects_however_many_nodes(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("nodes = 5\n" + H100)
    assert Cluster.read(file).nodes == 5
