"""Which hosts are cut off, by who reaches whom."""

from __future__ import annotations

import pytest

from plait.core.runs.evidence import Evidence
from plait.diagnose.verdicts.hang import cut_off

EVERYBODY = set(range(5))


def ranks(missed: str, reached: str = "", hosts: str = "abcde") -> list[Evidence]:
    """Rank n is on host n; ``01 12``: 0 does not reach 1, nor 1 2."""
    tell = [{(int(pair[0]), int(pair[1])) for pair in told.split()} for told in (missed, reached)]
    lists = [[tuple(b for a, b in sorted(told) if a == rank) for told in tell] for rank in range(len(hosts))]
    return [
        Evidence(rank=rank, host="" if host == "." else host, missed=lists[rank][0], reached=lists[rank][1])
        for rank, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    ("missed", "reached", "hosts"),
    [
        ("01", "", (["a", "b"], True)),
        ("01 02", "", (["a"], False)),
        ("10 20", "", (["a"], False)),
        ("01", "02", (["b"], False)),
        ("01", "12", (["a"], False)),
        ("01", "02 12", (["a", "b"], True)),
        ("01 02 03 12 14", "", (["a", "b"], False)),
        ("01 02 34", "", (["a", "d", "e"], False)),
        ("01 02 34", "23", (["a", "e"], False)),
        ("01 02", "01", (["a"], False)),
    ],
)
def test_the_fewest_hosts_that_explain_what_is_missed(missed: str, reached: str, hosts: tuple[list[str], bool]) -> None:
    assert cut_off(ranks(missed, reached), EVERYBODY) == hosts


def test_what_explains_nothing() -> None:
    assert cut_off(ranks("", "01 12"), EVERYBODY) is None
    assert cut_off(ranks("01"), {2, 3}) is None, "a break between others"
    assert cut_off(ranks("01"), {1}) == (["a", "b"], True)
    assert cut_off(ranks("01"), {1, 77}) == (["a", "b"], True)
    assert cut_off(ranks("01", hosts="aabcd"), EVERYBODY) is None, "within a host"
    assert cut_off(ranks("01", hosts=".abcd"), EVERYBODY) is None, "nobody knows where rank 0 is"
    assert cut_off(ranks("01", hosts="a.bcd"), EVERYBODY) is None
    assert cut_off([Evidence(rank=0, host="a", missed=(9,))], {0}) is None, "of rank 9 nothing is known"
