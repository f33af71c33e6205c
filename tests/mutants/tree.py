"""A copy of the project to plant faults in, with an interpreter of its own that imports from it."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
"""Where programs of the environment are looked for, such as shfmt."""
NO_TESTS = 5
"""Exit status of pytest where nothing was selected."""
MEMORY = 6 << 30
"""Bytes that a process of tests may allocate: a loop without an end fails before the machine
does."""


class Tree:
    """A copy of the project that git knows, uncommitted changes included, below ``folder``."""

    def __init__(self, project: Path, folder: Path) -> None:
        self.root = folder / "project"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=project, capture_output=True, check=True,
        )  # fmt: skip
        compiled = (path.relative_to(project) for path in (project / "plait").rglob("*.so"))
        for name in [*(Path(os.fsdecode(one)) for one in listed.stdout.split(b"\0") if one), *compiled]:
            if (project / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(project / name, self.root / name)
        self.python = self._interpreter()

    def _interpreter(self) -> Path:
        """An environment whose packages are this one's, but for Plait, which is the copy."""
        place = self.root / ".venv"
        venv.create(place, symlinks=True)
        (packages,) = place.glob("lib/python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        (packages / "project.pth").write_text("\n".join([str(self.root), *ours]) + "\n")
        command = place / "bin" / "plait"
        command.write_text(f"#!{place}/bin/python\nfrom plait.cli import run\nrun()\n")
        command.chmod(0o755)
        return place / "bin" / "python"

    def test(
        self, chosen: Sequence[str], *options: str, timeout: float, variables: dict[str, str] | None = None
    ) -> tuple[int | None, str]:
        """pytest's exit status, None where it took too long, and what it printed."""
        names = self.root.parent / "chosen.txt"
        names.write_text("\n".join(chosen) + "\n")
        process = subprocess.Popen(
            [self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, f"@{names}"],
            cwd=self.root,
            env={**os.environ, **(variables or {}), "PATH": PROGRAMS, "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (MEMORY, MEMORY))  # a fault may have no end
        try:
            output, _ = process.communicate(timeout=timeout)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
