"""job.sbatch: the script that Slurm runs on the first node of an allocation, and the reason of each
of its lines.

A script is a generated head (directives, variables and the srun command) and files of this package:
requeue.sh leaves a node on which nothing can run (in array.sbatch too), job.sh starts the program
of one start (agent/slurm_job.py), again where it is killed. The program starts one agent per node
with srun; agents start and restart the ranks. Slurm fails a job whose --output it cannot open, so
the script opens its log itself once it can read the storage.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable, Iterator, Sequence
from importlib.resources import files

from drillyard.errors import UserError
from drillyard.formatting import plural
from drillyard.hardware.capacity import machine_of
from drillyard.launch.plan import Plan
from drillyard.launch.request import LaunchRequest
from drillyard.launch.run_status import Handle
from drillyard.launch.slurm.config import SlurmConfig
from drillyard.launch.slurm.rules import MEMORY_OPTIONS, options_in
from drillyard.plan_files import ExplainedField
from drillyard.programs import comment_safe

SCRIPT = "job.sbatch"
_SBATCH = "https://slurm.schedmd.com/sbatch.html"
_SRUN = "https://slurm.schedmd.com/srun.html"
_OURS = "drillyard"
_BREAK = " \\\n        "
_CPUS = "--cpus-per-task=all of the smallest node"
"""As the job's program gives it to srun."""
ExplainedOption = tuple[str, str, str]
"""An option of sbatch or srun, its reason and its source."""


def directives(request: LaunchRequest, handle: Handle) -> Iterator[ExplainedOption]:
    """The #SBATCH lines of a run. Raises UserError for settings that contradict each other."""
    cluster, slurm = request.cluster, request.cluster.section_as(SlurmConfig)

    def as_set(*options: str) -> Iterator[ExplainedOption]:
        for option in options:
            if (value := getattr(slurm, option)) is not None:
                yield _option(option, str(value)), "as set", f"cluster.yaml: slurm.{option}"

    yield _option("job-name", handle.run), "the run's name", "run.yaml: name"
    yield _option("comment", str(handle)), "`drillyard runs` finds its jobs by it", _OURS
    yield from as_set("partition", "account", "qos")
    yield f"--nodes={cluster.nodes}", "as set", "cluster.yaml: nodes"
    yield "--ntasks-per-node=1", "one agent per node; it starts the ranks", _OURS
    if slurm.gres is not None:
        yield (
            _option("gres", slurm.gres),
            "GPUs as this cluster types them",
            "cluster.yaml: slurm.gres",
        )
    elif cluster.machine is not None and (
        gpus := machine_of(cluster, request.facts).num_accelerators
    ):
        source = f"cluster.yaml: machine {cluster.machine}"
        yield f"--gpus-per-node={gpus}", "all GPUs of the machine", source
    if slurm.exclusive:
        yield (
            "--exclusive",
            "no other job takes cores, memory or NICs",
            "cluster.yaml: slurm.exclusive",
        )
        if MEMORY_OPTIONS.isdisjoint(name for name, _ in options_in(slurm.arguments)):
            yield "--mem=0", "all memory of the nodes; the default may be a share", _SBATCH
    if excluded := [*slurm.exclude, *request.exclude]:
        yield (
            _option("exclude", ",".join(excluded)),
            "nodes not to use",
            "cluster.yaml: slurm.exclude" if slurm.exclude else "--exclude",
        )
    yield from as_set("constraint", "segment")
    if slurm.time_limit is not None:
        yield f"--time={slurm.time_limit}", "as set", "cluster.yaml: slurm.time_limit"
    yield (
        f"--signal=B:USR1@{slurm.signal_seconds}",
        (
            "this script gets the signal before the time limit (up to 60 s earlier), so that the"
            " run saves"
        ),
        "cluster.yaml: slurm.signal_seconds",
    )
    yield "--requeue", "after a lost node or preemption Slurm queues the job again", _SBATCH
    yield "--export=ALL", "SBATCH_EXPORT=NONE of a site would leave out PATH", _SBATCH
    yield (
        "--output=/dev/null",
        (
            "the script writes launch/slurm-JOB.log itself: Slurm fails a job whose log it cannot"
            " open, and one node without the storage would end the run"
        ),
        _OURS,
    )
    for argument in slurm.arguments:
        yield argument, "as set", "cluster.yaml: slurm.arguments"


def job_script(request: LaunchRequest, prepared: Plan) -> tuple[str, list[ExplainedField]]:
    """The text of job.sbatch and the reason of each of its parts. Raises UserError."""
    lines = list(directives(request, prepared.handle))
    srun = list(_srun(request, prepared))
    job = prepared.job
    launch = job.launch_directory
    shown = comment_safe(shlex.quote(launch))
    head = f"""\
#!/bin/bash
# {prepared.handle}: {plural(job.nodes, "node")} with \
{plural(job.processes_per_node, "process", "processes")} each, an agent on every node.
#
# Made by `drillyard launch` from run.yaml and cluster.yaml in this directory.
# By hand: sbatch {shown}/{SCRIPT}
# Its log: {shown}/slurm-JOB.log
#
# Before its time limit, after preemption and after a lost node the job is queued again and continues from its newest
# checkpoint. Exit code: 0 done, 2 refused, 130 cancelled, anything else failed.
#
{_sbatch_lines(lines)}
set -euo pipefail

launch={shlex.quote(launch)}
{_variables(request, prepared.handle)}
job_program() {{ # OPTIONS
    # exec alone would lower SHLVL, and the run's own bash take itself for a login's, which reads .bashrc.
    exec env "SHLVL=$SHLVL" python3 "$launch/agent" slurm-job --launch-directory "$launch" --handle "$handle" \\
        --submission "$job" --attempt "$restarts" \\
        --max-requeues "$max_requeues" --max-failures "$max_failures" "$@" -- \\
    srun {_BREAK.join(option for option, _, _ in srun if option != _CPUS)} \\
        python3
}}

"""  # noqa: E501
    slurm = request.cluster.section_as(SlurmConfig)
    # Scripts that `module load` and the like source use unset variables.
    shell = "\n".join(["set +u", *slurm.setup, "set -u", ""]) if slurm.setup else ""
    text = head + _source("requeue.sh") + _source("job.sh").replace("# SETUP\n", shell)
    fields = []
    for option, reason, source in (*lines, *((f"srun {option}", *why) for option, *why in srun)):
        name, equals, value = option.partition("=")
        fields.append(
            ExplainedField(f"{SCRIPT}: {name}", value if equals else "set", reason, source)
        )
    again = "all is saved, or a node was lost: queued again, the second time without that node"
    limit = "a run that is queued again more often has failed"
    # The parts of the script that are no options.
    parts = [
        (
            "program",
            "python3 LAUNCH_DIR/agent slurm-job",
            "starts srun, and decides what follows; started again where it is killed",
            _OURS,
        ),
        (
            "leader",
            "first name of scontrol show hostnames",
            "a name, as a host may have many addresses",
            _SBATCH,
        ),
        ("agent", "python3 LAUNCH_DIR/agent run", "runs the node's part; needs no packages", _OURS),
        (
            "trap USR1",
            "scancel --signal=TERM",
            "the whole step saves and ends with 85, as on preemption",
            _SBATCH,
        ),
        ("code 85, 75", "scontrol requeue", again, _OURS),
        ("max_requeues", str(slurm.max_requeues), limit, "cluster.yaml: slurm.max_requeues"),
        *(("setup", line, "as set", "cluster.yaml: slurm.setup") for line in slurm.setup),
    ]
    return text, [
        *fields,
        *(ExplainedField(f"{SCRIPT}: {name}", *explained) for name, *explained in parts),
    ]


def array_script(request: LaunchRequest, launches: Sequence[str]) -> str:
    """The script of an array job: task I becomes the job.sbatch in `launches[I]`. `request`: the
    first point's."""
    first = Handle(request.cluster.platform, request.cluster.name, request.run.name)
    points = "\n".join(f"    {shlex.quote(launch)}" for launch in launches)
    head = f"""\
#!/bin/bash
# A sweep of {len(launches)} runs, of which {first} is the first. Each task is the job of one run.
# By hand: sbatch {comment_safe(shlex.quote(posixpath.join(launches[0], "array.sbatch")))}
#
{_sbatch_lines(directives(request, first))}
#SBATCH --array=0-{len(launches) - 1}
set -euo pipefail

points=(
{points}
)
launch=${{points[$SLURM_ARRAY_TASK_ID]}}
{_variables(request, first)}
"""
    return head + _source("requeue.sh") + 'exec bash "$launch/job.sbatch"\n'


def _sbatch_lines(lines: Iterable[ExplainedOption]) -> str:
    return "\n".join(f"#SBATCH {option}" for option, _, _ in lines)


def _variables(request: LaunchRequest, handle: Handle) -> str:
    """The variables that requeue.sh and job.sh read, besides `launch`."""
    max_requeues = request.cluster.section_as(SlurmConfig).max_requeues
    return f"handle={handle}\nmax_requeues={max_requeues}\nmax_failures={request.max_failures}"


def _source(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def enroot_image(image: str) -> str:
    """An image as enroot names it: `registry#path:tag`; files and names without a registry stay as
    they are.

    https://github.com/NVIDIA/enroot/blob/master/doc/cmd/import.md
    """
    name = image.removeprefix("docker://")
    registry, slash, path = name.partition("/")
    is_file = name.startswith(("/", "./")) or name.endswith(".sqsh")
    if (
        is_file
        or "#" in name
        or not slash
        or not ("." in registry or ":" in registry or registry == "localhost")
    ):
        return name
    return f"{registry}#{path}"


def _srun(request: LaunchRequest, prepared: Plan) -> Iterator[ExplainedOption]:
    job = prepared.job
    yield (
        f"--nodes={job.nodes} --ntasks={job.nodes} --ntasks-per-node=1",
        "one agent on each node",
        _OURS,
    )
    yield (
        _CPUS,
        (
            "srun does not take it over from sbatch since 22.05; without it all ranks of a node"
            " share one core"
        ),
        _SRUN,
    )
    yield "--export=ALL", "else a site's SLURM_EXPORT_ENV=NONE leaves srun without PATH", _SRUN
    yield "--kill-on-bad-exit=0", "the agents end together, with time to save", _OURS
    yield (
        "--wait=60",
        "agents end together, after the ranks: srun kills one that does not answer then",
        _SRUN,
    )
    yield "--label", "lines in this log begin with the node's rank", _SRUN
    if prepared.image is not None:
        yield (
            f"--container-image={shlex.quote(enroot_image(prepared.image))}",
            "pyxis starts each agent in the image; enroot separates registry and path by '#'",
            "https://github.com/NVIDIA/pyxis",
        )
        mounts = ",".join(prepared.mounts)
        reason = "the run's directory, the project, the network stack's libraries, and what is set"
        yield f"--container-mounts={shlex.quote(mounts)}", reason, "cluster.yaml: mounts"


def _option(name: str, value: str) -> str:
    if not value.isprintable():
        raise UserError(
            f"cluster config: slurm.{name}: {value!r} has a control character; write it without"
        )
    return f"--{name}={shlex.quote(value)}"
