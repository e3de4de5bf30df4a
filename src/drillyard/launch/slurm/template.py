"""The text of job.sbatch and array.sbatch around what script.py fills in. Bash, for `str.format`.

A job that was cancelled must not queue itself again, and `scontrol requeue` would do that. When Slurm ends a job it
sends SIGTERM and tells the cause only in the job's log, so that is where the script looks (slurmstepd's `DUE TO TIME
LIMIT` and `DUE TO PREEMPTION`); a job that Slurm itself queues again needs nothing.
"""

from __future__ import annotations

TEMPLATE = r"""#!/bin/bash
# {handle}: {nodes} with {processes} each, an agent on every node.
#
# Made by `drillyard launch` from run.yaml and cluster.yaml in this directory.
# By hand: sbatch {launch}/job.sbatch
#
# Before its time limit, after preemption and after a lost node the job is queued again and goes on from its newest
# checkpoint. Exit code: 0 done, 2 refused, 130 cancelled, anything else failed.
#
{directives}
set -euo pipefail

launch={launch}
max_requeues={max_requeues}
restarts=${{SLURM_RESTART_COUNT:-0}}
# An array's task by its own name: the array's last task has the id of the whole array.
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID:-}}}}
job=${{job:-$SLURM_JOB_ID}}

say() {{
    echo "=== $(date -u +%Y-%m-%dT%H:%M:%SZ) job $job, start $restarts: $*"
}}

# Whether Slurm has no newer start of this job: on a node that it lost, an older one may go on.
is_newest() {{
    local now
    now=$(scontrol show job -o "$job" 2>/dev/null | sed -n 's/.* Restarts=\([0-9]*\) .*/\1/p') || true
    [ "${{now:-$restarts}}" = "$restarts" ]
}}

# Note how this start ended, for `drillyard runs` on clusters that keep no accounts.
ended() {{ # CODE WORD REASON
    trap - EXIT
    say "$2: $3 (exit code $1)"
    is_newest || exit "$1"
    printf '{{"submission": "%s", "attempt": "%s", "code": %d, "state": "%s", "reason": "%s", "at": %d}}\n' \
        "$job" "$restarts" "$1" "$2" "$3" "$(date +%s)" >"$launch/{ended}.new"
    mv "$launch/{ended}.new" "$launch/{ended}"
    exit "$1"
}}
line=
trap 'line=$LINENO' ERR
trap 'ended $? failed "the job script stopped at line $line"' EXIT

if [ "$restarts" -gt "$max_requeues" ]; then
    ended 1 failed "lost capacity: queued again $max_requeues times (slurm.max_requeues)"
fi
rm -f "$launch/{ended}"
# Slurm writes into this file why it ends the job.
log=$(scontrol show job -o "$SLURM_JOB_ID" | sed -n 's/.* StdOut=\([^ ]*\).*/\1/p') || true
log_begin=$(stat -c %s "$log" 2>/dev/null || echo 0)

{setup}# The first host leads. Where its name resolves nowhere, Slurm knows its address.
leader=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
if ! getent hosts "$leader" >/dev/null; then
    leader=$(scontrol show node -o "$leader" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
fi
# All cores of the smallest node, `72(x2),36` being Slurm's way to write 72, 72, 36.
cpus=${{SLURM_CPUS_PER_TASK:-$(tr , '\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | sed -n 1p)}}

signal=
limit_is_near() {{
    signal=USR1
    say "the time limit is near: the run saves and is queued again"
    scancel --signal=TERM "$job" || true
}}
# Slurm sends SIGTERM to the agents itself.
is_ended() {{
    signal=TERM
}}
trap limit_is_near USR1
trap is_ended TERM

say "on $SLURM_JOB_NODELIST, led by $leader"
agents() {{
    # What Slurm sends to the whole job is for srun's tasks, and not for the shell that waits for srun.
    trap : TERM USR1
    local code=0
    srun {srun} \
        {python} "$launch/agent" run --quiet --job "$launch/job.json" \
        --leader "$leader" --submission "$job" --attempt "$restarts" || code=$?
    echo "$code" >"$codes"
}}
# `wait` does not tell a code reliably where a signal comes with the end.
codes=$launch/srun-$job-$restarts
agents &
pid=$!
while kill -0 "$pid" 2>/dev/null; do
    wait "$pid" || true
done
code=$(cat "$codes" || echo 137)
rm -f "$codes"

# The agents end with their leader's code. Where one of them was killed srun tells of that one, so the leader's is read.
told=
if grep -qs "^  \"submission\": \"$job\"" "$launch/state.json" &&
    grep -qs "^  \"attempt\": \"$restarts\"" "$launch/state.json"; then
    told=$(sed -n 's/^  "exit_code": \([0-9]*\),*$/\1/p' "$launch/state.json")
fi

# Whether Slurm ends the job, and not for a reason that asks to start it again.
was_cancelled() {{
    [ "$signal" = TERM ] && [ "$(squeue -h -j "$job" -o %T)" != RUNNING ] &&
        ! tail -c "+$((log_begin + 1))" "$log" 2>/dev/null |
            grep "JOB $SLURM_JOB_ID .* DUE TO \(TIME LIMIT\|PREEMPTION\)" >/dev/null
}}

again() {{ # REASON
    if ! is_newest; then
        say "$1; Slurm itself has queued it again"
        trap - EXIT
        exit 0
    fi
    if was_cancelled; then
        ended 130 cancelled "cancelled"
    fi
    if [ "$restarts" -ge "$max_requeues" ]; then
        ended 1 failed "$1; queued again $max_requeues times before (slurm.max_requeues)"
    fi
    say "$1; is queued again"
    # The controller may be away for a while.
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        if scontrol requeue "$job"; then
            trap - EXIT
            exit 0
        fi
        sleep 30
    done
    ended 1 failed "$1; scontrol requeue $job failed"
}}

case ${{told:-$code}} in
    0) ended 0 succeeded "done" ;;
    85) again "$([ "$signal" = USR1 ] && echo "time limit" || echo "stopped from outside"), all is saved" ;;
    75) again "a node was lost" ;;
    2) ended 2 failed "refused" ;;
    130)
        # In Slurm's own books, too, the job was cancelled and has not failed.
        scancel "$job" || true
        ended 130 cancelled "cancelled"
        ;;
    *)
        if [ -n "$told" ] || [ "$code" -lt 128 ]; then
            ended "${{told:-$code}}" failed "$([ "$signal" != USR1 ] || echo "time limit: ")exit code ${{told:-$code}}"
        fi
        # The leader was killed: a node that has too little memory, say. That counts.
        echo "$restarts" >>"$launch/unled-$job"
        if [ "$(wc -l <"$launch/unled-$job")" -gt {max_failures} ]; then
            ended "$code" failed "the agent of node 0 was killed, again and again"
        fi
        again "the agent of node 0 was killed"
        ;;
esac
"""

ARRAY_TEMPLATE = r"""#!/bin/bash
# A sweep of {count} runs, of which {first} is the first. Each task is the job of one run.
# By hand: sbatch {here}
#
{directives}
set -euo pipefail

points=(
{points}
)
launch=${{points[$SLURM_ARRAY_TASK_ID]}}
exec bash "$launch/job.sbatch" >>"$launch/slurm-${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID.log" 2>&1
"""
