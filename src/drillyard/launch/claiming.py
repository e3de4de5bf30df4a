"""One launch of a run at a time: who submits claims it first, and releases it when others can see what was submitted.

A claim is a line in a file on the head host: whose it is, since when, and the process that launches. A lock of that
host's kernel makes looking and entering one step. The claim ends with its release, with the process that launches where
that is on the same host, else with time. Who finds another's claim has submitted nothing and undoes nothing.

The scripts are POSIX shell with flock(1); the launchers put before them which files are claimed ("$@"), and choose a
place that all who launch there see.
"""

from __future__ import annotations

from drillyard.errors import UserError
from drillyard.launch.agent.identity import this_process
from drillyard.launch.handles import Handle
from drillyard.launch.plan import File

CLAIM, RELEASE = "claim", "release"
"""Stages of a plan: the first thing and the last that is done on the head host to submit."""
CLAIM_SECONDS = 900
"""A claim that is older is of a launch that is dead: all that is done under one takes less, by its time limits."""
CLAIMED = 3
"""What `CLAIM_ALL` exits with where another launch has one of the files."""

UNPACKED = """\
d=$(mktemp -d) && trap 'rm -rf "$d"' EXIT && tar -x -C "$d" -f - && n=$(sha256sum <"$d/secret" | cut -c1-16)"""
"""The archive on standard input, in `$d` as long as the shell lives; `$n` names the submission by its secret."""
CLAIM_ALL = f"""\
umask 022 && {UNPACKED} && now=$(date +%s) || exit 1
here=$(cat /proc/sys/kernel/random/boot_id)/$(stat -L -c %i /proc/self/ns/pid)
for file; do
    mkdir -p "${{file%/*}}" && exec 9>>"$file" && flock -w 30 9 || exit 1
    if read -r other since where pid start <"$file" && [ "$other" != "$n" ] && [ $((now - since)) -lt {CLAIM_SECONDS} ]
    then
        if [ "$where" != "$here" ] || [ "$(sed 's/.*) //' "/proc/$pid/stat" 2>&1 | cut -d ' ' -f 20)" = "$start" ]; then
            echo "submission $other, $((now - since)) s ago; a claim ends after {CLAIM_SECONDS} s" >&2
            exit {CLAIMED}
        fi
    fi
    echo "$n $now $(cat "$d/client")" >"$file" || exit 1
done
"""
"""Enters the submission into every file of "$@", in their order; of two that want the same files one gets the first."""
RELEASE_ALL = f"""\
{UNPACKED} || exit 1
for file; do
    exec 9>>"$file" && flock -w 30 9 || exit 1
    if read -r whose rest <"$file" && [ "$whose" = "$n" ]; then : >"$file"; fi
done
"""


def client() -> File:
    """This process, for `CLAIM_ALL`: with it a claim ends."""
    me = this_process()
    return File("client", f"{me.machine} {me.pid} {me.started}\n")


def taken(handle: Handle, whose: str) -> UserError:
    """What is told where another launch, described by `whose`, has the run."""
    return UserError(
        f"{handle}: is being launched by another drillyard ({whose}); nothing was submitted\n"
        f"drillyard runs status {handle} tells of that one; give this run another name, or launch it again later"
    )
