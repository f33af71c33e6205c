#!/bin/bash
# Runs a command beside the Slurm of a newer Debian, for what that of the stable one has not (blocks, --segment):
#
#     tests/support/newer_slurm.sh .venv/bin/python -m pytest tests/slurm/test_blocks.py
#
# The command sees this machine's /root, /home, /opt, /tmp and the repository, and for the rest a Debian in
# a folder (NEWER_DEBIAN, 500 MB), made by debootstrap the first time. Needs root and Debian's archive.
set -euo pipefail
root=${NEWER_DEBIAN:-/var/tmp/plait-newer-debian} release=${NEWER_RELEASE:-trixie}
repository=$(cd "$(dirname "$0")/../.." && pwd)
if [ ! -x "$root/usr/sbin/slurmctld" ]; then
    command -v debootstrap >/dev/null || { echo "debootstrap is missing: apt-get install debootstrap" >&2; exit 2; }
    packages=munge,slurmctld,slurmd,slurm-client,iproute2,libffi8,libsqlite3-0,libbz2-1.0,libreadline8t64,libgomp1,libexpat1
    debootstrap --variant=minbase --include=$packages "$release" "$root" http://deb.debian.org/debian >&2
    chroot "$root" slurmctld -V >&2
fi
cp /etc/hosts "$root/etc/hosts" # Slurm looks its own machine up
inside='
root=$1 repository=$2; shift 2
mount --rbind "$root" "$root"
for folder in /*; do
    case $folder in /bin | /boot | /etc | /lib* | /run | /sbin | /usr | /var) continue ;; esac
    [ -d "$folder" ] && [ ! -L "$folder" ] || continue
    mkdir -p "$root$folder"
    mount --rbind "$folder" "$root$folder"
done
exec chroot "$root" /usr/bin/env -C "$repository" "$@"
'
exec unshare --mount bash -ec "$inside" bash "$root" "$repository" "$@"
