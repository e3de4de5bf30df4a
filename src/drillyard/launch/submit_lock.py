"""The submit lock on hosts: one launch of a run at a time, from the first change on the head host until agents run.

The lock is a line in the file `claim` of the launch directory: the submission, the time, and the process that launches,
entered under a lock of that host's kernel (without one a notice is printed). It ends when it is released, when the
launching process of the same host dies, else after `LOCK_SECONDS`. A launch that finds it taken has submitted nothing.
Agents start on several hosts, so a kernel lock cannot be held that long; on Slurm, where one program submits, it is
(agent/submit.py). The scripts are POSIX shell with flock(1); the files to lock are in "$@". A plan that is applied by
hand sends no `client`: its lock ends when it is released, or with time.
"""

from __future__ import annotations

from drillyard.errors import UserError
from drillyard.launch.plan import PlanFile
from drillyard.launch.remote_files import print_notice
from drillyard.launch.run_status import Handle
from drillyard.supervise.process_identity import this_process

LOCK, UNLOCK = "claim", "release"
"""Stages of a plan: the first and the last on the head host."""
LOCK_SECONDS = 900
"""An older lock has expired."""
LOCKED_BY_OTHER = 3
"""Exit code of `LOCK_ALL` where another launch has locked one of the files."""
_UNLOCKED = "no lock on "
"""Prefix of the scripts' message about a file system without locks."""

UNPACKED = """\
d=$(mktemp -d) && trap 'rm -rf "$d"' EXIT && tar -x -C "$d" -f - && n=$(sha256sum <"$d/secret" | cut -c1-16)"""
"""Unpacks the archive on standard input into `$d`, removed when the shell exits; `$n` is a digest of its secret."""
_LOCKED = f"""\
locked() {{
    exec 9>>"$1" || exit 1
    flock -w 30 -E 75 9 && return
    [ $? -ne 75 ] || {{ echo "$1: another launch has had its lock for 30 s" >&2; exit 1; }}
    echo "{_UNLOCKED}$1: launches of a run at the very same moment are not kept apart" >&2
}}
"""
"""`locked FILE`: lock a file on descriptor 9, until the next one is locked or the shell exits. flock(1) exits with 75
after a timeout, and with another code on file systems without locks (Lustre mounted without `-o flock`, NFS without a
lock daemon) and where it is not installed."""
LOCK_ALL = f"""\
{_LOCKED}here=$(cat /proc/sys/kernel/random/boot_id)/$(stat -L -c %i /proc/self/ns/pid)
for file; do
    locked "$file" && now=$(date +%s) || exit 1
    if read -r other since where pid start <"$file" && [ "$other" != "$n" ] && [ $((now - since)) -lt {LOCK_SECONDS} ]
    then
        if [ "$where" != "$here" ] || [ "$(sed 's/.*) //' "/proc/$pid/stat" 2>&1 | cut -d ' ' -f 20)" = "$start" ]; then
            echo "submission $other, $((now - since)) s ago; a claim ends after {LOCK_SECONDS} s" >&2
            exit {LOCKED_BY_OTHER}
        fi
    fi
    echo "$n $now $(cat "$d/client" 2>/dev/null)" >"$file" || exit 1
done
"""
"""After `UNPACKED`. Enters the submission into every file of "$@", in order: of two launches one gets the first."""
UNLOCK_ALL = f"""\
{UNPACKED} || exit 1
{_LOCKED}for file; do
    locked "$file" || exit 1
    if read -r whose rest <"$file" && [ "$whose" = "$n" ]; then : >"$file"; fi
done
"""


def client() -> PlanFile:
    """This process, for `LOCK_ALL`: its death ends the lock."""
    me = this_process()
    return PlanFile("client", f"{me.machine} {me.pid} {me.started}\n")


def being_launched_error(handle: Handle, whose: str) -> UserError:
    """The error where another launch, described by `whose`, has the run."""
    return UserError(
        f"{handle}: is being launched by another drillyard ({whose}); nothing was submitted\n"
        f"see drillyard runs status {handle}; give this run another name, or launch it again later"
    )


def print_unlocked_notice(said: str) -> None:
    """Print the messages of a locking script about file systems without locks."""
    for line in said.splitlines():
        if line.startswith(_UNLOCKED):
            print_notice(line)
