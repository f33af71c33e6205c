"""torchtitan: readers of configurations and logs, and the writer of configurations."""
