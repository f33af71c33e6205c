"""A real Slurm of a few nodes on one Linux machine, to try and to test with."""

from plait.lab.slurm.cluster import SlurmCluster, down, find, running, up
from plait.lab.slurm.files import SlurmSpec

__all__ = ["SlurmCluster", "SlurmSpec", "down", "find", "running", "up"]
