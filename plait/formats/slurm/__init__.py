"""Readers of Slurm's topologies, node states and options."""
