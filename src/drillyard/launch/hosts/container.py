"""A run in containers on hosts that have Docker or Podman and no scheduler.

The agent runs on the host, its command is a script that becomes `docker run`. The container belongs to the agent as any
other command does: signals are passed on (`--init` hands them to the program), its exit code is the program's, and
its processes carry the agent's mark in their environment, so that the nets which end a killed command's processes
(agent/node_command.py) find those of a container too; they run as the user who launched, who may end them. A
container that was left by a node that lost its power has a name, and is removed before the next one starts.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from drillyard.launch.agent import rank_output
from drillyard.launch.agent.identity import AGENT_MARK, RUN_MARK
from drillyard.launch.agent.shared_modules import launched, redaction
from drillyard.launch.run_status import Handle

SCRIPT = "container.sh"


def container_name(handle: Handle) -> str:
    """The container's name on each host, without the node's rank at its end."""
    return f"drillyard-{handle.cluster}-{handle.run}"


def volumes(mounts: Iterable[str]) -> list[str]:
    """`--volume` arguments of `/here`, `/here:/there` and either with `:ro`."""
    arguments = []
    for mount in mounts:
        path, *rest = mount.split(":")
        options = [part for part in rest if not part.startswith("/")]
        inside = [part for part in rest if part.startswith("/")] or [path]
        arguments += ["--volume", ":".join([path, *inside, *options])]
    return arguments


def script(
    handle: Handle,
    image: str,
    mounts: Sequence[str],
    environment: Mapping[str, str],
    secrets: Iterable[str],
    working_directory: str | None,
    profile_script: str | None,
) -> str:
    """container.sh: starts its arguments in the image, as the command of one node.

    Values of `environment` and `secrets` come from the agent's environment and are only named here.
    """
    ours = (*launched.GIVEN, rank_output.PIPES, RUN_MARK, AGENT_MARK, redaction.GIVEN_NAMES)
    names = dict.fromkeys([*ours, *environment, *secrets])
    options = [
        *("--rm", "--init"),
        *("--network host --ipc host", "--ulimit memlock=-1 --ulimit stack=67108864"),
        *([f"--workdir {shlex.quote(working_directory)}"] if working_directory else []),
        *(shlex.join(pair) for pair in _pairs(volumes(mounts))),
        *(f"--env {name}" for name in names),
        # Nobody's home: the user of the host is not in the image's passwd.
        *([] if "HOME" in names else ["--env HOME=/tmp"]),
    ]
    lines = " \\\n    ".join(options)
    inner = ""
    if profile_script is not None:
        # The variables that the network stack checks are those of the process that starts the ranks.
        inner = f' bash -c \'. "$0" && exec "$@"\' {shlex.quote(profile_script)}'
    made = f"mkdir -p {shlex.quote(working_directory)}\n" if working_directory else ""
    return f"""\
#!/bin/sh
# The command of one node in a container; its arguments are the program. Started by the agent, once per round.
set -eu
name={shlex.quote(container_name(handle))}-"$NODE_RANK"
if command -v docker >/dev/null; then
    runtime=docker
    user="--user $(id -u):$(id -g)"
    gpus="--gpus all"
elif command -v podman >/dev/null; then
    runtime=podman
    user="--userns keep-id"
    gpus="--device nvidia.com/gpu=all"
else
    echo "error: $(hostname): neither docker nor podman is installed, and the run has an image" >&2
    exit 2
fi
[ -e /dev/nvidiactl ] || gpus=
devices=
[ ! -d /dev/infiniband ] || devices="--device /dev/infiniband"
{made}"$runtime" rm --force "$name" >/dev/null 2>&1 || true
# shellcheck disable=SC2086
exec "$runtime" run --name "$name" $user $gpus $devices \\
    {lines} \\
    {shlex.quote(image)}{inner} "$@"
"""


def _pairs(arguments: Sequence[str]) -> list[Sequence[str]]:
    return [arguments[start : start + 2] for start in range(0, len(arguments), 2)]
