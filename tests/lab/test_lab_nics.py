"""A lab whose hosts have several links: ranks share them out, each has its rate, and all are cut
together."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from plait.core.cluster.hardware import Hosts
from plait.lab import Lab, LabSpec, find
from plait.lab.lab import rank_environment
from plait.plan.reshard.cost import Fabric
from tests.lab.test_lab_network import listen, near, reaches
from tests.support.lab import PlaitLab, wait_until

pytestmark = pytest.mark.lab
SIZE = 2_500_000
PAIRS = f"""
import json, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, block = dist.get_rank(), torch.zeros({SIZE}, dtype=torch.uint8)
def sent():
    lines = open("/proc/net/dev").read().splitlines()[2:]
    return {{name.strip(): int(rest.split()[8]) for name, rest in (line.split(":") for line in lines)}}
def move():
    dist.send(block, rank + 2) if rank < 2 else dist.recv(block, rank - 2)
move()
rates = []
dist.barrier()
before = sent()
for _ in range(6):
    dist.barrier()
    began = time.perf_counter()
    move()
    rates.append(8 * {SIZE} / (time.perf_counter() - began))
dist.barrier()
after = sent()
dist.barrier()
print(json.dumps([rates, {{name: after[name] - before[name] for name in after}}]))
dist.destroy_process_group()
"""


Moved = list[tuple[list[float], dict[str, int]]]
"""Of each rank the rates at which it sent or received, and bytes that left each link of its
host."""


def moved(spec: LabSpec, holds: Callable[[list[float]], bool]) -> Moved:
    """The first of five tries in which ``holds`` is true of receivers' best rates, or the last:
    other work on the machine may take the processors."""
    told: Moved = []
    for _ in range(5):
        with Lab(spec) as lab:
            argv = [sys.executable, "-W", "ignore", "-c", PAIRS]
            ranks = [lab.popen(rank, argv, stdout=subprocess.PIPE, text=True) for rank in range(4)]
            told = [tuple(json.loads(rank.communicate(timeout=120)[0])) for rank in ranks]
        if holds([max(rates) for rates, _ in told[2:]]):
            break
    return told


def test_ranks_that_send_at_once_have_a_link_each(needs_lab: None) -> None:
    told = moved(LabSpec.parse("2x2@100mbit,nics=2"), lambda rates: all(near(rate, 100e6) for rate in rates))
    links = told[0][1]
    assert all(6 * SIZE <= links[link] < 6.6 * SIZE for link in ("eth0", "eth1")), links
    assert all(near(max(rates), 100e6) for rates, _ in told[2:]), told
    (_, links), *_, (rates, _) = moved(LabSpec.parse("2x2@100mbit"), lambda rates: rates[-1] < 80e6)
    assert 12 * SIZE <= links["eth0"] < 13.2 * SIZE
    assert max(rates) < 80e6, "two ranks share one link"


def test_all_links_of_a_host_are_cut_slowed_and_healed(plait_lab: PlaitLab) -> None:
    with Lab(LabSpec.parse("4x2@400mbit,2pods@100mbit,nics=2")) as lab:
        assert find(lab.name).network == lab.network
        for address in ("10.77.0.2", "10.78.0.2", "10.77.0.4", "10.78.0.4"):
            listen(lab, 2 if address.endswith(".2") else 6, address)
        assert all(reaches(lab, 0, address) for address in ("10.77.0.2", "10.78.0.2", "10.77.0.4", "10.78.0.4"))
        plait_lab("cut", "pod1")
        assert not any(reaches(lab, 0, address, 0.5) for address in ("10.77.0.4", "10.78.0.4"))
        plait_lab("cut", "1")
        assert not any(reaches(lab, 0, address, 0.5) for address in ("10.77.0.2", "10.78.0.2"))
        plait_lab("heal", "1")
        plait_lab("heal", "pod1")
        for address in ("10.78.0.2", "10.78.0.4"):
            wait_until(lambda address=address: reaches(lab, 0, address), f"{address} is still cut off", 20)
        plait_lab("slow", "1", "50mbit")
        (told,) = json.loads(plait_lab("list", "--json").stdout)["labs"]
        assert [host["nic"] for host in told["hosts"]] == ["400mbit", "50mbit", "400mbit", "400mbit"]
        assert "nics=2" in plait_lab("list").stdout


def test_plans_share_links_out_as_labs_do() -> None:
    lab = LabSpec.parse("2x4@800mbit,nics=2")
    hosts = lab.as_hosts
    assert hosts == Hosts(ranks_per_host=4, rate=1e8, nics=2)
    assert hosts.rank_rate == 5e7
    fabric = Fabric(hosts=hosts.of(8), rate=1e8, nics_per_host=hosts.nics)
    assert [fabric.nic(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    links = [rank_environment(lab, "lab", rank, (0, 1))["GLOO_SOCKET_IFNAME"] for rank in range(8)]
    assert links == ["eth0", "eth0", "eth1", "eth1"] * 2
    assert {place.hardware.rails for place in [lab.as_topology.node(name) for name in ("host0", "host1")]} == {2}
