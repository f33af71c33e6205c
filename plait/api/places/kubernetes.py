"""``--on kubernetes``: a plan submitted to a cluster as a JobSet or a Job, and followed from
here."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.api.places.base import ManagedTarget, Submission
from plait.core.base.errors import JobError, LaunchError, PlaitError

if TYPE_CHECKING:
    from plait.api.ranks import RankSet
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.formats.kubernetes.manifests import PodRun
    from plait.launch.kubernetes.api import KubernetesNamespace


LOST = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral", "image")
"""Kinds of volumes whose files are lost with their pod, or that are not writable."""


@dataclass(frozen=True)
class KubernetesTarget(ManagedTarget):
    """A Kubernetes namespace as a launch target. namespace: its name; the kubeconfig's current one
    if empty."""

    namespace: str = ""
    shares_files = False  # volumes may be mounted only in pods

    def run(self, ranks: RankSet) -> int:
        """Raise JobError: only training runs are sent to Kubernetes."""
        fix = "Run plait in a pod there, with --on local, or train with: plait train --on kubernetes"
        raise JobError("starts training runs alone", key="--on kubernetes", fix=fix)

    def submit(self, plan: Plan, folder: Path, *, follow: bool) -> Submission:
        """Submit the plan as a JobSet or a Job; return the accepted run. Raises LaunchError if the
        cluster refuses, JobError for settings that cannot run there."""
        from plait.launch.kubernetes import follow as kubernetes

        assert plan.job is not None
        cluster = self._cluster(plan.job)
        run = self._run(plan.job, folder, plan.layout.world_size, plan.job.strategy.pp, self._kind(plan.job, cluster))
        hosts = (*run.table.hosts, *run.settings.spare_nodes) if run.table else ()
        run = replace(run, plan=plan.to_json(), hostnames=kubernetes.hostnames(cluster, hosts) if hosts else {})
        run, order = self._with_topology(plan.job, run)
        with ExitStack() as sending:
            signals = sending.enter_context(
                kubernetes.queueing_signals(cluster)
            )  # a stop may come before it is followed
            kubernetes.submit(cluster, run)
            held = sending.pop_all()
        note = f"submitted as {run.kind} {run.name}; to end it: {kubernetes.removal(cluster, run)}"

        def wait() -> int:
            with held:
                if follow:
                    return kubernetes.follow(cluster, run, signals)
                return kubernetes.unfollowed_status(cluster, run, signals)

        return Submission((note, *order), wait)

    def preview(self, job: Job, folder: Path) -> tuple[str, str]:
        """Return (title, manifests as YAML)."""
        note = ""
        try:
            kind = self._kind(job)
        except LaunchError as error:
            kind, note = "Job", f"# Without a cluster to ask whether it has JobSets: {error}\n"
        run = self._run(job, folder, job.world_size, job.strategy.pp, kind, word="(drawn when it is sent)")
        return "The manifests", note + _yaml([run.workload(), *run.owned_objects()])

    def manifests(self, plan: Plan, folder: Path) -> tuple[dict[str, str], str]:
        """Return (manifests as text, by the names of files for ``kubectl apply -f``; a note for the
        user). They are all objects that run the plan without a launcher outside the cluster: access
        rights, the plan with the secret that pods share, and the workload."""
        from plait.launch.kubernetes.lost import access

        assert plan.job is not None
        note, kind = "", "Job"
        try:
            kind = self._kind(plan.job)
        except LaunchError as error:
            note = f"It is a Job, since no cluster could be asked whether it has JobSets: {error}"
        run = self._run(plan.job, folder, plan.layout.world_size, plan.job.strategy.pp, kind)
        run, order = self._with_topology(plan.job, replace(run, plan=plan.to_json()))
        note, namespace = " ".join(filter(None, (note, *order))), self._namespace(plan.job)
        given = access(run, namespace)
        account = run.settings.service_account or run.name
        run = replace(run, settings=run.settings.model_copy(update={"service_account": account}))
        files = {"1-access.yaml": given, "2-files.yaml": run.owned_objects(), "3-workload.yaml": [run.workload()]}
        for one in (one for objects in files.values() for one in objects):
            one["metadata"]["namespace"] = namespace
        return {name: _yaml(objects) for name, objects in files.items()}, note

    def _with_topology(self, job: Job, run: PodRun) -> tuple[PodRun, tuple[str, ...]]:
        """Return (the run with the topology that orders its nodes, notes). The topology is the
        job's, or the one in the labels of the cluster's nodes, unless a rank table orders them; a
        note says if none is known."""
        from plait.api.in_cluster import kubernetes_topology
        from plait.api.topologies import read_topology
        from plait.core.topology.form import to_dict

        if run.table or run.nodes == 1 or not run.settings.exclusive:
            return run, ()
        try:
            if (asked := job.place).topology:
                tree, _ = read_topology(
                    asked.topology, form=asked.format, states=asked.states, tolerated=asked.tolerate
                )
                return replace(run, topology=json.dumps(to_dict(tree))), ()
            cluster, pods = self._cluster(job), list[Any]()
            with suppress(LaunchError):
                pods = cluster.everywhere("Pod")
            return replace(run, topology=kubernetes_topology(cluster.list("Node")[0], pods)), ()
        except PlaitError as error:
            return run, (f"Ranks are ordered by pod index, because no topology is known: {error}",)

    def _namespace(self, job: Job) -> str:
        """Return the run's namespace: that of ``--on`` or the job, else the kubeconfig's."""
        said = self.namespace or job.kubernetes.namespace
        try:
            return said or self._cluster(job).namespace
        except LaunchError:
            return "default"

    def _kind(self, job: Job, cluster: KubernetesNamespace | None = None) -> str:
        """Return the kind of object that makes the pods, ``Job`` or ``JobSet``. cluster: asked only
        if the job leaves the kind open."""
        if job.kubernetes.workload == "auto":
            return "JobSet" if (cluster or self._cluster(job)).has_jobset() else "Job"
        return "JobSet" if job.kubernetes.workload == "jobset" else "Job"

    def _cluster(self, job: Job) -> KubernetesNamespace:
        from plait.launch.kubernetes.api import KubernetesNamespace

        return KubernetesNamespace(job.kubernetes.context, self.namespace or job.kubernetes.namespace)

    def _run(self, job: Job, folder: Path, world: int, stages: int, kind: Any, word: str = "") -> PodRun:
        from plait.core.base import programs
        from plait.core.base.process import command_of
        from plait.core.job.cluster_settings import check_format
        from plait.core.topology.rank_table import RankTable
        from plait.formats.kubernetes.manifests import PodRun, with_node_count
        from plait.formats.kubernetes.pod_file import PodFile, check_pod, read_pod
        from plait.launch.kubernetes.follow import new_name

        table = RankTable.read(self.table) if self.table else None
        check_format("namespace", self.namespace, "--on kubernetes")
        settings, folder = with_node_count(job.kubernetes, world, table), folder.absolute()
        if job.run.device == "cuda" and not settings.gpus and not settings.pod:
            fix = f"Say how many each pod is to have ({settings.gpu_resource})"
            raise JobError("is 0, and run.device = 'cuda' plans ranks for GPUs", key="kubernetes.gpus", fix=fix)
        said = {text.partition("=")[0] for text in settings.env}
        network = [f"{name}={value}" for name, value in job.run.network_variables.items() if name not in said]
        settings = settings.model_copy(update={"env": (*settings.env, *network)})
        argv = tuple(command_of(programs.RANK, str(folder), python=settings.python))
        run = PodRun(
            name=new_name(job.run.name), argv=argv, world_size=world,
            folder=folder, secret=word or secrets.token_hex(16), settings=settings, kind=kind, table=table,
            timeout=job.run.timeout, stages=stages, pod=read_pod(settings.pod) if settings.pod else PodFile(),
        )  # fmt: skip
        check_pod(settings, run.pod.spec)
        _check_mounted(run)
        return run


def _yaml(objects: Sequence[Any]) -> str:
    import yaml

    return yaml.safe_dump_all(objects, sort_keys=False, width=1000)


def _check_mounted(run: PodRun) -> None:
    """Raise JobError if the files that the run saves would be lost with its pods."""
    from plait.formats.kubernetes.manifests import CONTAINER

    pod = run.template()["spec"]
    kinds = {one["name"]: next((key for key in one if key != "name"), "emptyDir") for one in pod["volumes"]}
    ranks = next(one for one in pod["containers"] if one["name"] == CONTAINER)
    mounts = [one for one in ranks["volumeMounts"] if run.folder.is_relative_to(one.get("mountPath", "/"))]
    nearest = max(mounts, key=lambda one: len(Path(one["mountPath"]).parts), default=None)
    if nearest is None:
        problem = f"is {run.folder}, which no volume of the pods holds: checkpoints would be lost with them"
    elif (kind := kinds.get(nearest["name"], "")) in LOST:
        problem = f"is {run.folder} in {nearest['mountPath']}, a volume ({kind}) that is lost with the pods"
    elif nearest.get("readOnly"):
        problem = f"is {run.folder} in {nearest['mountPath']}, which is mounted read-only"
    else:
        return
    fix = 'Choose one below a volume, such as kubernetes.volumes=["CLAIM:/data"] and run.folder=/data/runs'
    raise JobError(problem, key="run.folder", fix=fix)
