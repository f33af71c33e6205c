"""``--on slurm``: outside a Slurm job, submits one; inside a job, starts ranks on its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait.api.places.base import ManagedTarget, Submission
from plait.api.ranks import hang_detection_of

if TYPE_CHECKING:
    from plait.api.ranks import RankSet
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.core.runs.progress import Progress
    from plait.launch.slurm.commands import Batch


@dataclass(frozen=True)
class SlurmTarget(ManagedTarget):
    """A Slurm partition as a launch target. partition: its name; the default partition if empty."""

    partition: str = ""

    @property
    def inside(self) -> bool:
        """True if this process runs in a Slurm job."""
        from plait.core.base.cluster_env import slurm_job

        return bool(slurm_job()[0])

    def run(self, ranks: RankSet) -> int:
        """Start ranks on the nodes of the Slurm job that this process runs in. Raises JobError
        outside a job."""
        from plait.api.in_cluster import slurm_order
        from plait.core.base.errors import JobError
        from plait.core.topology.rank_table import RankTable
        from plait.launch.slurm import job as slurm_job
        from plait.launch.slurm.nodes import PLACED
        from plait.launch.watch import RunGuard

        if not self.inside:
            fix = "Get one with: salloc --nodes=2, and give this command again in its shell"
            raise JobError("runs only inside a Slurm job", key="--on", fix=fix)
        folder = ranks.logs.parent
        if self.table:
            RankTable.read(self.table).write(folder / PLACED)
        else:
            (folder / PLACED).unlink(missing_ok=True)

        def guarded(progress: Progress) -> RunGuard:
            return RunGuard(lock=ranks.lock, suspicion=hang_detection_of(ranks), progress=progress)

        hooks = slurm_job.SlurmHooks(guarded, slurm_order)
        return slurm_job.run(folder, ranks.argv, ranks.world, timeout=ranks.timeout, plan=ranks.plan, hooks=hooks)

    def batch(self, job: Job, folder: Path, world_size: int) -> Batch:
        """Return the batch job that ``submit`` would submit. Raises JobError for settings that
        conflict."""
        from plait.core.base.cluster_env import sbatch_variables
        from plait.core.base.errors import JobError
        from plait.core.job.texts import check_single_line
        from plait.core.topology.rank_table import RankTable
        from plait.launch.slurm.commands import Batch, resolve_resources

        check_single_line(self.partition, "--on slurm")
        check_single_line(str(folder), "run.folder")
        if "\\" in str(folder):
            fix = "Choose another folder, or another run.name"
            raise JobError(f"{folder} holds a backslash, which Slurm does not take in paths", key="run.folder", fix=fix)
        table = RankTable.read(self.table) if self.table else None
        network = [f"export {name}=${{{name}:-{value}}}" for name, value in job.run.network_variables.items()]
        partition = self.partition or job.slurm.partition or sbatch_variables().get("SBATCH_PARTITION", "")
        changed = {"partition": partition, "setup": (*job.slurm.setup, *network)}
        settings = job.slurm.model_copy(update=changed)
        return Batch(
            folder=folder, name=job.run.name, world_size=world_size, table=table,
            settings=resolve_resources(settings, world_size, table, job.run),
        )  # fmt: skip

    def preview(self, job: Job, folder: Path) -> tuple[str, str]:
        """Return (title, batch script). If Slurm does not answer, the script lacks values that only
        Slurm knows, and says so."""
        from plait.core.base.errors import LaunchError

        note = ""
        try:
            batch = self.batch(job, folder, job.world_size)
        except LaunchError as error:
            known = job.slurm.model_copy(update={"gpus": 0})
            if not (self.table or known.nodes) or job.slurm.gpus != "auto":
                raise
            note = f"# Without a Slurm to ask how many GPUs its nodes have, none are requested: {error}\n"
            batch = self.batch(job.model_copy(update={"slurm": known}), folder, job.world_size)
        return "The batch script", note + batch.script()

    def submit(self, plan: Plan, folder: Path, *, follow: bool) -> Submission:
        """Submit the plan as a Slurm job; return the accepted run. Raises LaunchError if Slurm
        refuses, JobError for settings that conflict."""
        from plait.core.runs.lock import RunLock
        from plait.launch.run_folder import write_run
        from plait.launch.slurm import commands as slurm
        from plait.launch.slurm import follow as slurm_follow

        assert plan.job is not None
        batch = self.batch(plan.job, folder, plan.layout.world_size)
        with RunLock(folder):  # no other process starts there meanwhile; the job takes the lock next
            write_run(plan, folder)
            submitted = slurm.submit(batch)
        note = f"submitted as Slurm job {submitted.job}; its output goes to {submitted.log}"
        return Submission((note,), lambda: slurm_follow.follow(submitted) if follow else 0)
