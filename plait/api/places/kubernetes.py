"""``--on kubernetes``: a plan sent to a cluster as a JobSet or a Job, and followed from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.api.places.base import Managed, Submitted

if TYPE_CHECKING:
    from plait.api.ranks import Ranks
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.launch.kubernetes_api import KubernetesNamespace
    from plait.launch.kubernetes_manifests import PodRun


LOST = ("emptyDir", "configMap", "secret", "downwardAPI", "projected", "ephemeral", "image")
"""Volumes that end with their pod, or that nobody writes to."""


@dataclass(frozen=True)
class InKubernetes(Managed):
    """A namespace; the current one if empty."""

    namespace: str = ""
    shares_files = False  # volumes may be mounted in pods alone

    def run(self, ranks: Ranks) -> int:
        """Only trainings are sent to Kubernetes."""
        from plait.core.base.errors import JobError

        fix = "Run plait in a pod there, with --on local, or train with: plait train --on kubernetes"
        raise JobError("runs trainings alone", key="--on kubernetes", fix=fix)

    def submit(self, plan: Plan, folder: Path, *, follow: bool) -> Submitted:
        """Send the plan."""
        from dataclasses import replace

        from plait.launch import kubernetes

        assert plan.job is not None
        cluster = self._cluster(plan.job)
        run = self._run(plan.job, folder, plan.layout.world_size, plan.job.strategy.pp, self._kind(plan.job, cluster))
        hosts = (*run.table.hosts, *run.settings.spare_nodes) if run.table else ()
        run = replace(run, plan=plan.to_json(), hostnames=kubernetes.hostnames(cluster, hosts) if hosts else {})
        kubernetes.submit(cluster, run)
        note = f"submitted as {run.kind} {run.name}; to end it: {kubernetes.removal(cluster, run)}"
        return Submitted((note,), lambda: kubernetes.follow(cluster, run) if follow else 0)

    def preview(self, job: Job, folder: Path) -> tuple[str, str]:
        """The manifests, as YAML."""
        from plait.core.base.errors import LaunchError

        note = ""
        try:
            kind = self._kind(job)
        except LaunchError as error:
            kind, note = "Job", f"# Without a cluster to ask whether it has JobSets: {error}\n"
        run = self._run(job, folder, job.world_size, job.strategy.pp, kind, word="(drawn when it is sent)")
        return "The manifests", note + _yaml(run)

    def manifests(self, plan: Plan, folder: Path) -> str:
        """All that ``submit`` would send, as ``kubectl apply -f`` takes it: with the plan, and the word by
        which pods know each other. Raises LaunchError where the cluster is to be asked what it knows and does
        not answer."""
        from dataclasses import replace

        assert plan.job is not None
        run = self._run(plan.job, folder, plan.layout.world_size, plan.job.strategy.pp, self._kind(plan.job))
        return _yaml(replace(run, plan=plan.to_json()))

    def _kind(self, job: Job, cluster: KubernetesNamespace | None = None) -> str:
        """What pods are made by; a cluster is asked only where the job does not say."""
        if job.kubernetes.workload == "auto":
            return "JobSet" if (cluster or self._cluster(job)).has_jobset() else "Job"
        return "JobSet" if job.kubernetes.workload == "jobset" else "Job"

    def _cluster(self, job: Job) -> KubernetesNamespace:
        from plait.launch.kubernetes_api import KubernetesNamespace

        return KubernetesNamespace(job.kubernetes.context, self.namespace or job.kubernetes.namespace)

    def _run(self, job: Job, folder: Path, world: int, stages: int, kind: Any, word: str = "") -> PodRun:
        import secrets

        from plait.core.base import programs
        from plait.core.base.process import command_of
        from plait.core.topology.rank_table import RankTable
        from plait.launch.kubernetes import new_name
        from plait.launch.kubernetes_manifests import PodRun, asked
        from plait.launch.pod_file import PodFile, read_pod

        table = RankTable.read(self.table) if self.table else None
        settings, folder = asked(job.kubernetes, world, table), folder.absolute()
        argv = tuple(command_of(programs.RANK, str(folder), python=settings.python))
        run = PodRun(
            name=new_name(job.run.name), argv=argv, world_size=world,
            folder=folder, word=word or secrets.token_hex(16), settings=settings, kind=kind, table=table,
            timeout=job.run.timeout, stages=stages, pod=read_pod(settings.pod) if settings.pod else PodFile(),
        )  # fmt: skip
        _check_mounted(run)
        return run


def _yaml(run: PodRun) -> str:
    """All objects of a run."""
    import yaml

    return yaml.safe_dump_all([run.workload(), *run.belongings()], sort_keys=False, width=1000)


def _check_mounted(run: PodRun) -> None:
    """Raise JobError if what the run saves would be lost with its pods."""
    from plait.core.base.errors import JobError
    from plait.launch.kubernetes_manifests import CONTAINER

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
