"""What hosts of a lab are called, and which one we are on."""

from __future__ import annotations

import fcntl
import socket

import pytest

from plait.core.base import lab_hosts
from plait.core.base.errors import JobError


@pytest.mark.parametrize(("host", "address"), [(0, "10.77.0.1"), (1, "10.77.0.2"), (255, "10.77.1.0")])
def test_names_and_addresses_count_hosts(host: int, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lab_hosts.address(host) == address
    assert lab_hosts.number(lab_hosts.name(host)) == host

    def asked(probe: socket.socket, what: int, told: bytes) -> bytes:
        assert (what, told[:5], len(told)) == (0x8915, b"eth0\0", 40)  # netdevice(7): SIOCGIFADDR of an ifreq
        return told[:20] + socket.inet_aton(address) + told[24:]

    monkeypatch.setattr(fcntl, "ioctl", asked)
    assert lab_hosts.here() == f"host{host}"


@pytest.mark.parametrize("name", ["", "host", "host01", "host-1", "Host1", "host12345", "xhost1", "host1 "])
def test_what_is_no_host(name: str) -> None:
    with pytest.raises(JobError, match="is no host of a lab"):
        lab_hosts.number(name)


@pytest.mark.parametrize(
    ("address", "here"), [("10.77.0.0", None), ("10.77.3.232", "host999"), ("10.77.3.233", None), ("192.168.0.1", None)]
)
def test_other_addresses_are_of_no_lab(address: str, here: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "ioctl", lambda *_: bytes(20) + socket.inet_aton(address) + bytes(16))
    assert lab_hosts.here() == here


def test_without_such_a_link_we_are_in_no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> bytes:
        raise OSError(19, "No such device")

    monkeypatch.setattr(fcntl, "ioctl", none)
    assert lab_hosts.here() is None
