"""``--on kubernetes``: a plan sent to a cluster as a JobSet or a Job, and followed from here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.cli.running import Managed

if TYPE_CHECKING:
    from plait.cli.running import Ranks
    from plait.core.job import Job
    from plait.core.plan import Plan
    from plait.launch.kubernetes_api import Cluster
    from plait.launch.kubernetes_manifests import PodRun


@dataclass(frozen=True)
class InKubernetes(Managed):
    """A namespace; the current one if empty."""

    namespace: str = ""
    shares_files = False  # volumes may be mounted in pods alone

    def run(self, ranks: Ranks) -> int:
        """Only trainings are sent to Kubernetes."""
        from plait.core.errors import JobError

        fix = "Run plait in a pod there, with --on local, or train with: plait train --on kubernetes"
        raise JobError("runs trainings alone", key="--on kubernetes", fix=fix)

    def submit(self, plan: Plan, folder: Path, *, follow: bool) -> int:
        """Send the plan; the run's exit status, or 0 if it is not followed."""
        from dataclasses import replace

        from plait.cli import terminal
        from plait.launch import kubernetes

        assert plan.job is not None
        cluster = self._cluster(plan.job)
        run = self._run(plan.job, folder, plan.layout.world_size, plan.job.strategy.pp, _kind(plan.job, cluster))
        if run.table and not follow:  # nobody would bind pods that are started again
            run = replace(run, settings=run.settings.model_copy(update={"restarts": 0}))
            terminal.text("not followed, so that pods cannot be bound again: the run is not restarted if it fails")
        run = replace(run, plan=plan.to_json())
        kubernetes.submit(cluster, run)
        place = f"kubectl -n {cluster.namespace}"
        terminal.text(f"submitted as {run.kind} {run.name}; to end it: {place} delete {run.kind.lower()} {run.name}")
        if follow or run.table:
            return kubernetes.follow(cluster, run, until_bound=not follow)
        return 0

    def preview(self, job: Job, folder: Path) -> tuple[str, str]:
        """The manifests, as YAML."""
        import yaml

        from plait.core.errors import LaunchError

        note = ""
        try:
            kind = _kind(job, self._cluster(job))
        except LaunchError as error:
            kind, note = "Job", f"# Without a cluster to ask whether it has JobSets: {error}\n"
        run = self._run(job, folder, job.world_size, job.strategy.pp, kind, word="(drawn when it is sent)")
        objects = yaml.safe_dump_all([run.workload(), *run.belongings()], sort_keys=False, width=1000)
        return "The manifests", note + objects

    def _cluster(self, job: Job) -> Cluster:
        from plait.launch.kubernetes_api import Cluster

        return Cluster(job.kubernetes.context, self.namespace or job.kubernetes.namespace)

    def _run(self, job: Job, folder: Path, world: int, stages: int, kind: Any, word: str = "") -> PodRun:
        import secrets

        from plait.core.process import command_of
        from plait.core.rank_table import RankTable
        from plait.launch.kubernetes import new_name
        from plait.launch.kubernetes_manifests import PodRun, asked
        from plait.launch.run_folder import WORKER

        table = RankTable.read(self.table) if self.table else None
        settings = asked(job.kubernetes, world, table)
        argv = tuple(command_of(WORKER, str(folder), python=settings.python))
        run = PodRun(
            name=new_name(job.run.name), argv=argv, world_size=world,
            folder=folder, word=word or secrets.token_hex(16), settings=settings, kind=kind, table=table,
            timeout=job.run.timeout, stages=stages, extra=_pod_file(settings.pod),
        )  # fmt: skip
        _check_mounted(run)
        return run


def _kind(job: Job, cluster: Cluster) -> str:
    if job.kubernetes.workload == "auto":
        return "JobSet" if cluster.has_jobset() else "Job"
    return "JobSet" if job.kubernetes.workload == "jobset" else "Job"


def _pod_file(file: str | None) -> dict[str, Any]:
    """The pod's spec in a YAML file, which may be that of a whole pod."""
    import yaml

    from plait.core.errors import JobError
    from plait.core.files import contents

    if not file:
        return {}
    try:
        found = yaml.safe_load(contents(file))
    except OSError as error:
        raise JobError(error.strerror or str(error), file=file, key="kubernetes.pod") from None
    except yaml.YAMLError as error:
        raise JobError(f"is no YAML: {' '.join(str(error).split())}", file=file, key="kubernetes.pod") from None
    spec = found.get("spec", found) if isinstance(found, dict) else None
    if not isinstance(spec, dict) or not all(isinstance(key, str) for key in spec):
        raise JobError("holds no pod", file=file, key="kubernetes.pod", fix="Write a pod's spec, as kubectl takes it")
    return spec


def _check_mounted(run: PodRun) -> None:
    """Raise JobError if what the run saves would be lost with its pods."""
    from plait.core.errors import JobError

    pod = run.workload()["spec"]
    pod = pod["replicatedJobs"][0]["template"]["spec"] if run.kind == "JobSet" else pod
    mounts = [one["mountPath"] for one in pod["template"]["spec"]["containers"][0]["volumeMounts"]]
    if not any(run.folder.is_relative_to(mount) for mount in mounts):
        raise JobError(
            f"is {run.folder}, which no volume of the pods holds: checkpoints would be lost with them",
            key="run.folder",
            fix='Choose one below a volume, such as kubernetes.volumes=["CLAIM:/data"] and run.folder=/data/runs',
        )  # fmt: skip
