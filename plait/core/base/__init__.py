"""What every other part needs: errors, files, text, numbers, processes."""

# pyright: reportUnsupportedDunderAll=false

__all__ = [
    "cluster_env",
    "codec",
    "env",
    "errors",
    "files",
    "lab_hosts",
    "numbers",
    "passed_over",
    "pictures",
    "process",
    "programs",
    "text",
]
