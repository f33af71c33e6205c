"""What the emulated API server refuses to change, in the words of the real one."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.support.kubernetes.objects import Refusal, Store

TIER = "unit"
TEMPLATE = {
    "metadata": {"labels": {"a": "b"}},
    "spec": {"containers": [{"name": "ranks", "image": "i:1"}], "affinity": {"podAntiAffinity": {"x": 1}}},
}


def job(*, suspend: bool, started: bool) -> tuple[Store, str]:
    store = Store()
    spec = {"suspend": suspend, "completions": 2, "parallelism": 2, "template": copy.deepcopy(TEMPLATE)}
    store.create({"kind": "Job", "metadata": {"name": "run"}, "spec": spec})
    if started:
        store.get("Job", "run")["status"] = {"startTime": "2026-01-01T00:00:00Z"}
    return store, "run"


MOVED: Any = [
    {"spec": {"nodeSelector": {"zone": "z"}}},
    {"spec": {"tolerations": [{"key": "k", "operator": "Exists"}]}},
    {"spec": {"affinity": {"nodeAffinity": {"x": 1}}}},
    {"metadata": {"labels": {"a": "c"}, "annotations": {"d": "e"}}},
]


@pytest.mark.parametrize("change", MOVED)
def test_where_pods_go_may_be_changed_until_the_first_start(change: Any) -> None:
    store, name = job(suspend=True, started=False)
    store.patch("Job", name, {"spec": {"template": change}})
    for suspend, started in ((False, False), (False, True), (True, True)):
        store, name = job(suspend=suspend, started=started)
        with pytest.raises(
            Refusal, match=r'^Job\.batch "run" is invalid: spec\.template: .*: field is immutable$'
        ) as why:
            store.patch("Job", name, {"spec": {"template": change}})
        assert why.value.status == 422


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("template", {"template": {"spec": {"containers": [{"name": "ranks", "image": "i:2"}]}}}),
        ("template", {"template": {"spec": {"affinity": {"podAntiAffinity": {"x": 2}}}}}),
        ("completions", {"completions": 3}),
        ("completionMode", {"completionMode": "NonIndexed"}),
    ],
)
def test_what_a_job_is_may_never_be_changed(field: str, change: Any) -> None:
    store, name = job(suspend=True, started=False)
    with pytest.raises(Refusal, match=rf"spec\.{field}: Invalid value: .*: field is immutable$"):
        store.patch("Job", name, {"spec": change})
    store.patch("Job", name, {"spec": {"suspend": False, "parallelism": 1, "backoffLimit": 7}})


@pytest.mark.parametrize(
    ("gates", "change", "why"),
    [
        (["g"], {"nodeSelector": {"a": "b", "c": "d"}}, ""),
        (["g"], {"nodeSelector": {"a": "z"}}, "only additions to spec.nodeSelector are allowed"),
        ([], {"nodeSelector": {"a": "b", "c": "d"}}, "pod updates may not change fields other than"),
        (["g", "h"], {"schedulingGates": [{"name": "h"}]}, ""),
        (["g"], {"schedulingGates": [{"name": "g"}, {"name": "x"}]}, "but found new scheduling gate 'x'"),
        ([], {"activeDeadlineSeconds": 9}, ""),
        ([], {"activeDeadlineSeconds": 11}, "must be less than or equal to previous value"),
        ([], {"priority": 1}, "pod updates may not change fields other than"),
    ],
)
def test_a_gated_pod_may_be_narrowed_and_let_go(gates: list[str], change: Any, why: str) -> None:
    store, spec = Store(), {"nodeSelector": {"a": "b"}, "activeDeadlineSeconds": 10}
    spec["schedulingGates"] = [{"name": gate} for gate in gates]
    store.create({"kind": "Pod", "metadata": {"name": "p"}, "spec": spec, "status": {"phase": "Pending"}})
    if not why:
        store.patch("Pod", "p", {"spec": change})
        return
    with pytest.raises(Refusal, match=why) as refused:
        store.patch("Pod", "p", {"spec": change})
    assert str(refused.value).startswith('Pod "p" is invalid: spec')
