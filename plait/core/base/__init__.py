"""What every other part needs: errors, files, text, numbers, processes."""

# pyright: reportUnsupportedDunderAll=false

__all__ = [
    "codec",
    "columns",
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
