"""One launch of a run at a time: who submits claims it first, and releases it when others can see what was submitted.

A claim is a line in a file on the head host: whose it is, since when, and the process that launches. A lock of that
host's kernel makes looking and entering one step; where the file system has none, that is told, and of two launches
within the same few milliseconds both may go on. The claim ends with its release, with the process that launches where
that is on the same host, else with time. Who finds another's claim has submitted nothing and undoes nothing.

No claim ends with time under a launch that goes on: the time limits of all that is done from the claim until the
first agent runs, which others see, add up to less than `LOCK_SECONDS`. Agents start on several hosts, so a lock of the
kernel cannot last as long; on Slurm, where one program submits, it does (agent/submit.py).

The scripts are POSIX shell with flock(1); before them stands which files are claimed ("$@"). A plan that is applied by
hand sends no `client`: its claim ends with its release, or with time.
"""

from __future__ import annotations

from drillyard.errors import UserError
from drillyard.launch.plan import PlanFile
from drillyard.launch.remote_files import print_notice
from drillyard.launch.run_status import Handle
from drillyard.supervise.process_identity import this_process

LOCK, UNLOCK = "claim", "release"
"""Stages of a plan: the first thing and the last that is done on the head host to submit."""
LOCK_SECONDS = 900
"""An older claim is ignored."""
LOCKED_BY_OTHER = 3
"""Exit code of `LOCK_ALL` where another launch has one of the files."""
_UNLOCKED = "no lock on "
"""Begins what the scripts say of a file system without locks."""

UNPACKED = """\
d=$(mktemp -d) && trap 'rm -rf "$d"' EXIT && tar -x -C "$d" -f - && n=$(sha256sum <"$d/secret" | cut -c1-16)"""
"""The archive on standard input, in `$d` as long as the shell lives; `$n` names the submission by its secret."""
_LOCKED = f"""\
locked() {{
    exec 9>>"$1" || exit 1
    flock -w 30 -E 75 9 && return
    [ $? -ne 75 ] || {{ echo "$1: another launch has had its lock for 30 s" >&2; exit 1; }}
    echo "{_UNLOCKED}$1: launches of a run at the very same moment are not kept apart" >&2
}}
"""
"""`locked FILE`: descriptor 9 has the lock of a file, until the next one is locked or the shell ends. flock(1) exits
with 75 here where it has waited in vain; it fails otherwise on file systems without locks (Lustre mounted without
`-o flock`, NFS without a lock daemon), and where it is not installed."""
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
"""After `UNPACKED`. Enters the submission into every file of "$@", in their order; of two that want the same files one
gets the first."""
UNLOCK_ALL = f"""\
{UNPACKED} || exit 1
{_LOCKED}for file; do
    locked "$file" || exit 1
    if read -r whose rest <"$file" && [ "$whose" = "$n" ]; then : >"$file"; fi
done
"""


def client() -> PlanFile:
    """This process, for `LOCK_ALL`: with it a claim ends."""
    me = this_process()
    return PlanFile("client", f"{me.machine} {me.pid} {me.started}\n")


def being_launched_error(handle: Handle, whose: str) -> UserError:
    """What is told where another launch, described by `whose`, has the run."""
    return UserError(
        f"{handle}: is being launched by another drillyard ({whose}); nothing was submitted\n"
        f"drillyard runs status {handle} tells of that one; give this run another name, or launch it again later"
    )


def print_unlocked_notice(said: str) -> None:
    """Pass on what a claiming script `said` of file systems without locks."""
    for line in said.splitlines():
        if line.startswith(_UNLOCKED):
            print_notice(line)
