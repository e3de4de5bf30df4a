"""The archive of `--sync`: the files of the working directory that git does not ignore.

Files keep their modes, so that a private file stays private. Links stay links; those that point
outside of it are left out. Files that look like credentials are included, since programs may need
them, and reported.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from drillyard.formatting import first_few
from drillyard.launch.plan import Program
from drillyard.launch.remote_files import print_notice
from drillyard.programs import TEMPORARY, Host, Programs

CARRY = "carry"
"""The stage of the step that copies."""
CARRIED_LIST = ".drillyard-carried"
"""On the cluster, with a suffix for each directory that was copied: the list of copied files, so
that the next `--sync` removes those that were deleted here, and none that another copied."""
UNPACK_OVER = f"""\
{TEMPORARY} && cat >"$d/tar" && mkdir -p "$0" && cd "$0" && touch "$1" &&
LC_ALL=C.UTF-8 tar -t --quoting-style=escape -f "$d/tar" >"$d/new" && LC_ALL=C sort -o "$d/new" "$d/new" || exit
cat "$1" "$d/new" | LC_ALL=C sort -u | sed 's,^,./,' |
    xargs -r -d '\\n' sh -c 'find "$@" -maxdepth 0 -type f -newermt 1970-01-02 2>"$0"' "$d/missing" >"$d/edited"
if [ -s "$d/edited" ]; then
    kept=.drillyard-replaced-$(date -u +%Y%m%dT%H%M%SZ).tar.gz
    (umask 077 && tar -czf "$kept" --verbatim-files-from -T "$d/edited") || exit
    echo "drillyard: edited on the cluster: $(wc -l <"$d/edited") files in $0, replaced or removed by --sync;" \\
        "as they were: $kept" >&2
fi
tar -x --no-same-permissions --no-same-owner -f "$d/tar" &&
LC_ALL=C comm -23 "$1" "$d/new" | xargs -r -d '\\n' rm -f -- && cp "$d/new" "$1"
"""  # noqa: E501
"""Unpacks the archive on standard input in the directory "$0". The archive's files have no times,
so a file that has one was edited there: such files are backed up before they are replaced."""

_CREDENTIALS = re.compile(
    r"\.env(\..+)?|[._]netrc|\.git-credentials|\.pypirc|\.npmrc|\.pgpass|\.dockercfg|id_(rsa|dsa|ecdsa|ed25519)(_sk)?"
    r"|.+\.(pem|p12|pfx|key|ppk|kdbx)|credentials(\.json)?|application_default_credentials\.json|kubeconfig"
)
_HARMLESS = re.compile(r"\.env\.(example|sample|template|dist)")
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY( BLOCK)?-----")
_HEAD_BYTES = 4096
_MOST_SHOWN = 5


def sync_step(host: Host, here: str, project: str) -> Program:
    """The step that replaces the project's directory on a host with this machine's working
    directory."""
    return Program(
        f"copy the working directory to {host.title}",
        host.argv(["sh", "-c", UNPACK_OVER, project, carried_list(here)]),
        sends_directory=here,
        parallel=True,
        stage=CARRY,
    )


def carried_list(here: str) -> str:
    """The name of the list of what was copied from the directory `here`."""
    return f"{CARRIED_LIST}-{hashlib.sha256(os.fsencode(here)).hexdigest()[:12]}"


def archive_of_directory(directory: Path, programs: Programs) -> bytes:
    """The tar archive, sorted, without times or owners. Prints notices of possible credentials and
    of links left out."""
    buffer = io.BytesIO()
    credentials, left_out = [], []
    root = os.path.realpath(directory)
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in working_files(directory, programs):
            path, member = directory / name, tarfile.TarInfo(str(name))
            target = os.readlink(path) if path.is_symlink() else None
            if not Path(os.path.realpath(path)).is_relative_to(root) or (
                target and not _stays(name, target)
            ):
                left_out.append(repr(str(name)))
                continue
            if target is not None:
                member.type, member.linkname, member.mode = tarfile.SYMTYPE, target, 0o777
                tar.addfile(member)
                continue
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                content = file.read()
                member.size, member.mode = len(content), os.fstat(file.fileno()).st_mode & 0o777
            if looks_like_credentials(name, content):
                credentials.append(repr(str(name)))
            tar.addfile(member, io.BytesIO(content))
    if credentials:
        shown = first_few(credentials, _MOST_SHOWN)
        print_notice(
            f"--sync copies files that look like credentials: {shown}; git-ignored files are not"
            " copied"
        )
    if left_out:
        print_notice(
            f"--sync leaves out links that point outside of {directory}:"
            f" {first_few(left_out, _MOST_SHOWN)}"
        )
    return buffer.getvalue()


def looks_like_credentials(name: Path, content: bytes) -> bool:
    """Whether a file's name, or the beginning of its content, is that of credentials."""
    named = _CREDENTIALS.fullmatch(name.name) is not None and _HARMLESS.fullmatch(name.name) is None
    return named or _PRIVATE_KEY.search(content[:_HEAD_BYTES]) is not None


def working_files(directory: Path, programs: Programs) -> Iterator[Path]:
    """The files and links of a directory that git does not ignore; all but .git outside of a
    repository."""
    listed = programs.run(
        [
            "git",
            "-C",
            str(directory),
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
            "--deduplicate",
        ]
    )
    if listed.returncode == 0:
        names = [Path(name) for name in listed.stdout.split("\0") if name]
    else:
        names = [
            Path(root, file).relative_to(directory)
            for root, directories, files in os.walk(directory)
            for file in [*files, *(name for name in directories if Path(root, name).is_symlink())]
            if ".git" not in Path(root).relative_to(directory).parts
        ]
    for name in sorted(names):
        try:
            mode = (directory / name).lstat().st_mode
        except OSError:
            # A deleted file is still listed by git.
            continue
        if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            yield name


def _stays(name: Path, target: str) -> bool:
    """Whether a relative link points below the directory."""
    landed = os.path.normpath(name.parent / target)
    return not os.path.isabs(target) and landed.split("/")[0] != ".."
