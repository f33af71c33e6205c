"""Errors, files, text, numbers and processes: the modules that every other package uses."""

# pyright: reportUnsupportedDunderAll=false

__all__ = [
    "cluster_env",
    "codec",
    "env",
    "errors",
    "files",
    "ignored_input",
    "lab_hosts",
    "numbers",
    "pictures",
    "process",
    "programs",
    "text",
]
