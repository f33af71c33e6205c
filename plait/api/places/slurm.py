"""``--on slurm``: from outside of a job by submitting one, inside of it by starting ranks on its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from plait.api.places.base import Managed, Submitted
from plait.api.ranks import suspicion_of

if TYPE_CHECKING:
    from plait.api.ranks import Ranks
    from plait.core.job.plan import Plan
    from plait.core.job.spec import Job
    from plait.core.runs.progress import Progress
    from plait.launch.slurm import Batch


@dataclass(frozen=True)
class InSlurm(Managed):
    """A partition of Slurm's; the default one if empty."""

    partition: str = ""

    @property
    def inside(self) -> bool:
        """Whether we are in a job of Slurm's already."""
        from plait.core.base.cluster_env import slurm_job

        return bool(slurm_job()[0])

    def run(self, ranks: Ranks) -> int:
        """On the nodes of the job that we are in."""
        from plait.api.ordering import slurm_order
        from plait.core.base.errors import JobError
        from plait.core.topology.rank_table import RankTable
        from plait.launch import slurm_job
        from plait.launch.slurm_nodes import PLACED
        from plait.launch.watch import RunGuard

        if not self.inside:
            fix = "Run it inside of one, such as: salloc --nodes=2 plait ..."
            raise JobError("is not inside of a Slurm job", key="--on", fix=fix)
        folder = ranks.logs.parent
        if self.table:
            RankTable.read(self.table).write(folder / PLACED)
        else:
            (folder / PLACED).unlink(missing_ok=True)

        def guarded(progress: Progress) -> RunGuard:
            return RunGuard(lock=ranks.lock, suspicion=suspicion_of(ranks), progress=progress)

        hooks = slurm_job.SlurmHooks(guarded, slurm_order)
        return slurm_job.run(folder, ranks.argv, ranks.world, timeout=ranks.timeout, plan=ranks.plan, hooks=hooks)

    def batch(self, job: Job, folder: Path, world_size: int) -> Batch:
        """What would be submitted."""
        from plait.core.base.cluster_env import sbatch_variables
        from plait.core.base.errors import JobError
        from plait.core.job.one_line import one_line
        from plait.core.topology.rank_table import RankTable
        from plait.launch.slurm import Batch, asked

        one_line(self.partition, "--on slurm")
        one_line(str(folder), "run.folder")
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
            settings=asked(settings, world_size, table, job.run),
        )  # fmt: skip

    def preview(self, job: Job, folder: Path) -> tuple[str, str]:
        """The batch script. Where no Slurm answers it lacks what only Slurm knows, and says so."""
        from plait.core.base.errors import LaunchError

        note = ""
        try:
            batch = self.batch(job, folder, job.world_size)
        except LaunchError as error:
            known = job.slurm.model_copy(update={"gpus": 0})
            if not (self.table or known.nodes) or job.slurm.gpus != "auto":
                raise
            note = f"# Without a Slurm to ask how many GPUs its nodes have, none are asked for: {error}\n"
            batch = self.batch(job.model_copy(update={"slurm": known}), folder, job.world_size)
        return "The batch script", note + batch.script()

    def submit(self, plan: Plan, folder: Path, *, follow: bool) -> Submitted:
        """Have the plan run as a job."""
        from plait.core.runs.lock import RunLock
        from plait.launch import slurm, slurm_follow
        from plait.launch.run_folder import write_run

        assert plan.job is not None
        batch = self.batch(plan.job, folder, plan.layout.world_size)
        with RunLock(folder):  # nobody else starts there meanwhile; the job takes it in turn
            write_run(plan, folder)
            submitted = slurm.submit(batch)
        note = f"submitted as Slurm job {submitted.job}; its output goes to {submitted.log}"
        return Submitted((note,), lambda: slurm_follow.follow(submitted) if follow else 0)
