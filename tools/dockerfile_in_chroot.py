"""Tries the steps of a Dockerfile where no image can be built: each stage is a root of debootstrap's, in
which its RUN lines run by chroot. It needs root, debootstrap and the network.

    python tools/dockerfile_in_chroot.py Dockerfile /var/tmp/images [COMMAND]

COMMAND runs in the last stage at the end, with what ENV says. Beyond Docker's own: the host's certificates,
and pip's variables of the environment (PIP_...), so that a mirror is used where there is one. Layers, users
and .dockerignore are not tried, nor whether the base image is what debootstrap makes of the same release.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
SOURCE = Path(__file__).parents[1]


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Each instruction and what follows it."""
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest


@contextmanager
def mounted(root: Path) -> Iterator[None]:
    """What a container has of the kernel, and the folder of a pip that finds packages on this machine."""
    done, wheels = list[Path](), os.environ.get("PIP_FIND_LINKS", "")
    try:
        for kind in ("proc", "dev", "sys", *([wheels.lstrip("/")] if Path(wheels or "-").is_dir() else [])):
            (root / kind).mkdir(parents=True, exist_ok=True)
            how = ["-t", "proc", "proc"] if kind == "proc" else ["--rbind", "--make-rslave", f"/{kind}"]
            subprocess.run(["mount", *how, root / kind], check=True)
            done.append(root / kind)
        yield
    finally:
        for folder in reversed(done):
            subprocess.run(["umount", "-R", "-l", folder], check=False)


def run(root: Path, command: str, where: str, variables: Mapping[str, str]) -> None:
    """A shell's line in a root."""
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    inside = root / CERTIFICATES.relative_to("/")
    if CERTIFICATES.is_file() and inside.is_file():
        shutil.copy(CERTIFICATES, inside)
        kept |= {"PIP_CERT": str(CERTIFICATES)}
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND": "noninteractive", "HOME": "/root"}
    (root / where.lstrip("/")).mkdir(parents=True, exist_ok=True)
    line = f"cd {shlex.quote(where)} && {command}"
    with mounted(root):
        subprocess.run(["/usr/sbin/chroot", root, "/bin/sh", "-c", line], env={**env, **kept, **variables}, check=True)


def copy(words: list[str], root: Path, stages: Mapping[str, Path]) -> None:
    """COPY: of the source tree as git knows it, or of an earlier stage."""
    target = root / words[-1].lstrip("/")
    if words[0].startswith("--from="):
        shutil.copytree(stages[words[0].partition("=")[2]] / words[1].lstrip("/"), target, dirs_exist_ok=True)
        return
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=SOURCE, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCE / name, target / name)


def main(file: str, folder: str, *command: str) -> None:
    """All stages, and the command in the last."""
    stages, root, where, variables = dict[str, Path](), Path(), "/", dict[str, str]()
    for word, rest in instructions(Path(file).read_text()):
        print(f"== {word} {rest}", flush=True)
        began, words = time.monotonic(), shlex.split(rest)
        if word == "FROM":
            release = words[0].partition(":")[2].partition("-")[0]
            name = words[2] if len(words) == 3 else "last"
            root, where, variables = Path(folder) / f"{Path(file).name}-{name}", "/", {}
            stages[name] = root
            subprocess.run(["debootstrap", "--variant=minbase", release, root], check=True, stdout=subprocess.DEVNULL)
            shutil.copy("/etc/resolv.conf", root / "etc" / "resolv.conf")
        elif word == "RUN":
            run(root, rest, where, variables)
        elif word == "COPY":
            copy(words, root, stages)
        elif word == "ENV":
            variables |= dict([words[0].split("=", 1)])
        elif word == "WORKDIR":
            where = rest
        elif word != "CMD":
            sys.exit(f"{file}: {word} is not tried here")
        print(f"   {time.monotonic() - began:.0f} s", flush=True)
    if command:
        run(root, " ".join(command), where, variables)
    subprocess.run(["du", "-sm", root], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
