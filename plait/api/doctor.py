"""``plait doctor``: what this machine has, what it lacks, and what to do about it. Hosts and links of a run
are measured by ``plait check``, which needs ranks; this needs neither ranks nor PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.core.base.text import Part, Shown, Table

if TYPE_CHECKING:
    from plait.launch.doctor import DoctorFinding


@dataclass(frozen=True)
class Examination(Shown):
    """What was found, in order."""

    findings: Sequence[DoctorFinding]

    @property
    def missing(self) -> list[DoctorFinding]:
        """What does not work."""
        return [one for one in self.findings if one.state == "missing"]

    def to_dict(self) -> dict[str, Any]:
        """For a bug report: all that was found, with its values."""
        return {"version": 1, "findings": [asdict(one) for one in self.findings],
                "missing": [one.what for one in self.missing]}  # fmt: skip

    def parts(self) -> Iterator[Part]:
        """The table, then what to do, which is too long for a column of it."""
        yield Table("This machine", ("", "what", "found"), [(one.state, one.what, one.found) for one in self.findings])
        yield from (f"{one.state} {one.what}: {one.fix}." for one in self.findings if one.fix)
        looked = sum(one.state == "look" for one in self.findings)
        if self.missing:
            yield f"{len(self.missing)} missing: {', '.join(one.what for one in self.missing)}."
        elif looked:
            yield "Nothing is missing. What says look works, or only some need it."
        else:
            yield "Nothing is missing. plait check tries links and disks."


def examine_machine(folder: Path) -> Examination:
    """All probes. folder: where runs are to go. One that does not answer costs its time limit, no more."""
    from plait.core.base.process import usable_cores
    from plait.launch import doctor
    from plait.launch import doctor_software as software
    from plait.launch.doctor import Probe
    from plait.plan.fits import room

    torch, driver = dict[str, Any](), dict[str, Any]()

    def torch_finding() -> DoctorFinding:
        torch.update(software.ask_torch())
        return software.torch_finding(torch)

    def driver_finding() -> DoctorFinding:
        driver.update((found := software.driver_gpus()).values)
        return found

    first = doctor.examine([  # what they say, others are judged by
        Probe("PyTorch", torch_finding, software.TORCH_LIMIT + 10.0), Probe("driver", driver_finding, 40.0),
    ])[:1]  # fmt: skip
    there = room("cpu", 1)
    cores, memory = doctor.processors(usable_cores(), there.shared if there else None)
    told = torch or {"error": first[0].found}
    number = len(driver.get("gpus", told.get("devices", [])))
    rest = doctor.examine([
        Probe("plait", software.python),
        Probe("packages", software.packages),
        Probe("GPUs", lambda: software.gpus(told, driver)),
        Probe("NCCL", lambda: software.nccl(told)),
        Probe("compiler", software.compiler),
        Probe("processors", lambda: cores),
        Probe("memory", lambda: memory),
        Probe("/dev/shm", partial(doctor.shared_memory, number)),
        Probe(f"folder of runs ({folder})", partial(doctor.run_folder, folder)),
        Probe("limits", partial(doctor.limits, number)),
        Probe("clock", doctor.clock),
        Probe("network", doctor.own_name),
        Probe("namespaces", doctor.namespaces),
        Probe("Slurm", software.slurm, 30.0),
        Probe("Kubernetes", software.kubernetes, 30.0),
    ])  # fmt: skip
    return Examination([*rest[:2], *first, *rest[2:]])
