"""A cluster without a server: its objects in a table, its answers at once, its pods made by the
test."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from plait.core.job.cluster_settings import KubernetesSection
from plait.core.topology.rank_table import RankTable
from plait.formats.kubernetes.manifests import HOSTNAME, INDEX, RUN, PodRun, with_node_count
from plait.launch.kubernetes.api import Conflict, KubernetesNamespace, NotFound
from tests.support.kubernetes.objects import Object, Refusal, Store

NAME = "plait-test"


class InMemory:
    """What a ``KubernetesNamespace`` does.

    before: called with (verb, kind, name) ahead of each call, may raise.
    done: calls that changed something, with the options of deletions."""

    def __init__(self, nodes: Sequence[str] = ()) -> None:
        self.store = Store()
        self.namespace = "ml"
        self.interrupted: Collection[int] = ()
        self.jobset = False
        self.before: Callable[[str, str, str], object] = lambda verb, kind, name: None
        self.done: list[tuple[Any, ...]] = []
        for name in nodes:
            self.add_node(name)

    @property
    def api(self) -> KubernetesNamespace:
        return cast("KubernetesNamespace", self)

    def add_node(self, name: str, *, ready: str = "True", gpus: int = 0, **labels: str) -> Object:
        """labels: keys with ``__`` for a slash."""
        own = {key.replace("__", "/").replace("_", "."): value for key, value in labels.items()}
        return self.store.create({
            "kind": "Node", "metadata": {"name": name, "labels": {HOSTNAME: f"host-{name}"} | own}, "spec": {},
            "status": {"conditions": [{"type": "Ready", "status": ready}],
                       "allocatable": {"nvidia.com/gpu": str(gpus)}},
        })  # fmt: skip

    def add_pod(self, run: PodRun, index: int, *, name: str = "", phase: str = "Pending", **spec: Any) -> Object:
        """One that waits."""
        return self.store.create({
            "kind": "Pod",
            "metadata": {"name": name or f"{run.name}-{index}", "labels": {RUN: run.name, INDEX: str(index)}},
            "spec": spec, "status": {"phase": phase},
        })  # fmt: skip

    def pods(self) -> list[Object]:
        """As they were told: later changes are not seen."""
        return copy.deepcopy(self.store.of("Pod"))

    def node(self, name: str) -> Object:
        return self.store.get("Node", name)

    def has_jobset(self) -> bool:
        return self.jobset

    def create(self, body: Object) -> Object:
        return self._do("create", body["kind"], body["metadata"]["name"], lambda: self.store.create(body))

    def get(self, kind: str, name: str) -> Object:
        return self._do("get", kind, name, lambda: self.store.get(kind, name))

    def list(self, kind: str, labels: str = "") -> tuple[Sequence[Object], str]:
        return self._do("list", kind, labels, lambda: (self.store.of(kind, labels), "1"))

    def everywhere(self, kind: str) -> Sequence[Object]:
        return self._do("list", kind, "", lambda: self.store.of(kind))

    def patch(self, kind: str, name: str, changes: Sequence[Object] | Mapping[str, Any], *,
              status: bool = False) -> Object:  # fmt: skip
        return self._do("patch", kind, name, lambda: self.store.patch(kind, name, changes, status=status))

    def delete(self, kind: str, name: str, *, grace: int | None = None, wait_for_pods: bool = False,
               uid: str = "") -> None:  # fmt: skip
        try:
            self._do("delete", kind, name, lambda: self.store.remove(self.store.get(kind, name)))
        except NotFound:
            return
        self.done[-1] += (grace, wait_for_pods)

    def _do(self, verb: str, kind: str, name: str, act: Callable[[], Any]) -> Any:
        self.before(verb, kind, name)
        try:
            found = copy.deepcopy(act())
        except Refusal as refusal:
            raise (NotFound if refusal.status == 404 else Conflict)(str(refusal)) from None
        if verb not in ("get", "list"):
            self.done.append((verb, kind, name))
        return found


def a_run(table: RankTable | None = None, *, world: int = 0, **settings: Any) -> PodRun:
    """A rank to each pod."""
    world = world or (table.world_size if table else 2)
    values: dict[str, Any] = {"image": "plait:1", "grace": 20, "wait": 60}
    found = with_node_count(KubernetesSection(**(values | settings)), world, table)
    return PodRun(
        name=NAME, argv=("true",), world_size=world, folder=Path("/data/x"), secret="sesame", settings=found,
        kind="Job",
        timeout=60.0, table=table,
    )  # fmt: skip
