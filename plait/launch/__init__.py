"""Launch ranks and end them together: on this machine, under Slurm and in Kubernetes."""
