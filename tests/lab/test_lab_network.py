"""The links: their rates in both directions, what is isolated from what, and what cut, heal and
slow do."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from plait.core.base.errors import JobError
from plait.lab import Lab, LabSpec
from tests.lab.lab_measure import goodputs
from tests.support.lab import wait_until

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("needs_lab")]

PING = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])).close()"
LISTEN = (
    "import socket, sys; s = socket.create_server((sys.argv[1], 7000)); print(flush=True)\n"
    "while True: s.accept()[0].close()"
)


def listen(lab: Lab, rank: int, address: str) -> None:
    """Accept connections on a rank's host until the lab ends."""
    process = lab.popen(rank, [sys.executable, "-I", "-S", "-c", LISTEN, address], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()


def reaches(lab: Lab, rank: int, address: str, seconds: float = 2.0) -> bool:
    """Whether a rank can connect to an address."""
    argv = [sys.executable, "-I", "-S", "-c", PING, address, str(seconds)]
    return lab.popen(rank, argv, stderr=subprocess.DEVNULL).wait() == 0


def near(rate: float, wanted: float) -> bool:
    return abs(rate / wanted - 1) < 0.1


def undisturbed(lab: Lab, size: int, mode: str, wanted: float) -> list[float]:
    """Goodputs of the first transfer that nothing held up, or of the last try: other machines on
    the host may take the processors."""
    for _ in range(20):
        rates = goodputs(lab, size, mode)
        if all(near(rate, wanted) for rate in rates):
            break
    return rates


@pytest.mark.parametrize("nic, mode", [("200mbit", "both"), ("1gbit", "to0")])
def test_a_link_has_its_rate(nic: str, mode: str) -> None:
    with Lab(LabSpec(2, 1, nic)) as lab:
        assert lab.spec.rate is not None
        rates = undisturbed(lab, lab.spec.rate // 8 // 2, mode, lab.spec.rate)
        assert len(rates) == (2 if mode == "both" else 1)
        assert all(near(rate, lab.spec.rate) for rate in rates), rates


def test_a_message_after_a_pause_gets_no_free_ride() -> None:
    with Lab(LabSpec(2, 1, "200mbit")) as lab:
        (rate,) = undisturbed(lab, 256 << 10, "message", 200e6)
        assert near(rate, 200e6)


def test_large_segments_keep_the_rate() -> None:
    with Lab(LabSpec(2, 1, "300mbit", segment=1 << 18)) as lab:
        rates = undisturbed(lab, 18_000_000, "both", 3e8)
        assert all(near(rate, 3e8) for rate in rates), rates


def test_every_lab_has_the_same_congestion_control() -> None:
    with Lab(LabSpec(2, 1)) as lab:
        listen(lab, 1, "10.77.0.2")
        route = subprocess.check_output(lab.network.enter(0, ["ip", "route", "get", "10.77.0.2"]), text=True)
        assert "congctl cubic" in route


def test_ranks_of_one_host_are_not_limited() -> None:
    with Lab(LabSpec(1, 2, "10mbit")) as lab:
        (rate,) = goodputs(lab, 30 << 20, "to0")
        assert rate > 500e6


def test_hosts_reach_each_other_and_nothing_else() -> None:
    with Lab(LabSpec(3, 1)) as lab:
        listen(lab, 2, "10.77.0.3")
        assert reaches(lab, 0, "10.77.0.3")
        assert reaches(lab, 2, "10.77.0.3")
        assert not reaches(lab, 0, "192.0.2.1")  # no route leaves the lab
        links = subprocess.check_output(lab.rank_command(1, ["ip", "-brief", "link"]), text=True)
        assert {line.split()[0].split("@")[0] for line in links.splitlines()} == {"lo", "eth0"}


def test_the_loopback_of_a_host_is_its_own() -> None:
    with Lab(LabSpec(2, 2)) as lab:
        listen(lab, 0, "127.0.0.1")
        assert reaches(lab, 1, "127.0.0.1")
        assert not reaches(lab, 2, "127.0.0.1")


def test_two_labs_at_once_do_not_meet() -> None:
    with Lab(LabSpec(2, 1)) as first, Lab(LabSpec(2, 1)) as second:
        assert first.name != second.name
        listen(first, 1, "10.77.0.2")
        listen(second, 1, "10.77.0.2")  # the same address is free in the other lab


def test_cut_and_heal() -> None:
    with Lab(LabSpec(2, 1)) as lab:
        listen(lab, 1, "10.77.0.2")
        lab.cut(1)
        assert [state.cut for state in lab.network.state()] == [False, True]
        assert not reaches(lab, 0, "10.77.0.2", 0.3)
        lab.heal(1)
        assert reaches(lab, 0, "10.77.0.2")


def test_a_stream_goes_on_after_a_short_cut() -> None:
    with Lab(LabSpec(2, 1, "100mbit")) as lab:
        argv = [sys.executable, str(Path(__file__).with_name("lab_measure.py")), str(16_000_000), "to0"]
        ranks = [lab.popen(rank, argv, stdout=subprocess.DEVNULL) for rank in range(2)]
        wait_until(lambda: received(lab, 0) > 100_000, "nothing arrives")
        lab.cut(0)
        time.sleep(0.4)  # as long as the cut is
        assert any(rank.poll() is None for rank in ranks)
        lab.heal(0)
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
        assert received(lab, 0) > 16_000_000


def received(lab: Lab, host: int) -> int:
    """Bytes that have come to a host."""
    lines = subprocess.check_output(lab.network.enter(host, ["cat", "/proc/net/dev"]), text=True).splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines if line.split(":")[0].strip() != "lo")


def test_slow_changes_both_directions() -> None:
    with Lab(LabSpec(2, 1, "unlimited")) as lab:
        lab.slow(1, "100mbit")
        assert [state.nic for state in lab.network.state()] == ["unlimited", "100mbit"]
        for mode in ("to0", "to1"):
            rates = undisturbed(lab, 4_000_000, mode, 100e6)
            assert near(rates[0], 100e6), rates
        lab.slow(1, "unlimited")
        assert goodputs(lab, 30 << 20, "to0")[0] > 500e6


def test_a_host_that_does_not_exist() -> None:
    with Lab(LabSpec(2, 1)) as lab:
        for act in (lab.cut, lab.heal, lambda host: lab.slow(host, "1gbit")):
            with pytest.raises(JobError, match=r"host 2 does not exist.*0 to 1"):
                act(2)
        with pytest.raises(JobError, match="rank 2 does not exist"):
            lab.rank_command(2, ["true"])
