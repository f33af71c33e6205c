"""Runs under Slurm: submission, following, queue admission, and the launcher inside a job."""
