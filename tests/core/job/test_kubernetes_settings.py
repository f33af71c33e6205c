"""What a job may ask Kubernetes for: forms of entries, and texts of one line."""

from __future__ import annotations

import pytest

from plait.core.base.errors import JobError
from plait.core.job.cluster_settings import FORMS, KubernetesSection


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("tolerations", ["gpu", "a.b/c=d:NoExecute", "gpu:PreferNoSchedule", ":NoSchedule", ""], ["a b", "gpu:Never"]),
        ("volumes", ["data:/data", "/mnt/a:/data", "data/part:/data"], ["data", "data:", "Data:/data", "data:data"]),
        ("env", ["A=", "A=b=c", "A=two words"], ["A", "=b", "A B=c"]),
        ("resources", ["cpu=32", "rdma/hca=8"], ["cpu", "=32"]),
        ("node_labels", ["a.b/c=d"], ["a.b/c"]),
        (
            "kueue_topology",
            ["", "unconstrained", "required:a.b/c", "preferred:rack"],
            ["rack", "required:", "other:rack"],
        ),
    ],
)
def test_entries_have_a_form(key: str, good: list[str], bad: list[str]) -> None:
    def of(one: str) -> object:
        return getattr(KubernetesSection.model_validate({key: one if key == "kueue_topology" else [one]}), key)

    assert set(map(of, good)) == ({*good} if key == "kueue_topology" else {(one,) for one in good})
    for one in bad:
        with pytest.raises(JobError) as caught:
            of(one)
        assert f"kubernetes.{key}" in str(caught.value)
        assert f"'{one}'" in str(caught.value)
        assert FORMS[key][1] in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("image", "a\nb"), ("namespace", "a\rb"), ("python", "a\x1b[2J"), ("priority", "a\u2028b"),
     ("env", ["GOOD=1", "A=b\nc"]), ("spare_nodes", ["a\nb"])],
)  # fmt: skip
def test_a_line_break_or_an_escape_is_refused(key: str, value: str | list[str]) -> None:
    with pytest.raises(JobError, match=f"kubernetes.{key}.*line break"):
        KubernetesSection.model_validate({key: value})


def test_a_tab_is_no_line_break() -> None:
    assert KubernetesSection.model_validate({"env": ["A=b\tc"]}).env == ("A=b\tc",)
