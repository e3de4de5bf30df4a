log=$launch/slurm-$job.log
exec >>"$log" 2>&1
# Slurm itself may have queued this start again: the reason of the last requeue does not apply to it.
[ "$restarts" = 0 ] || note "" || true

# Whether Slurm has no newer start of this job: an older one may continue on a node that Slurm has lost.
is_newest() {
    local now
    now=$(slurm_has Restarts) || true
    [ "${now:-$restarts}" = "$restarts" ]
}

# Record the end of this start, for `drillyard runs` on clusters without accounting.
ended() { # CODE WORD REASON
    trap - EXIT
    say "$2: $3 (exit code $1)"
    is_newest || exit "$1"
    rm -f "$launch/secrets.json"
    printf '{"submission": "%s", "attempt": "%s", "code": %d, "state": "%s", "reason": "%s", "at": %d}\n' \
        "$job" "$restarts" "$1" "$2" "$(sed 's/[\\"]/\\&/g' <<<"$3")" "$(date +%s)" >"$launch/ended.json.new"
    mv "$launch/ended.json.new" "$launch/ended.json"
    exit "$1"
}
line=
trap 'line=$LINENO' ERR
trap 'ended $? failed "the job script stopped at line $line"' EXIT

if [ "$restarts" -gt "$max_requeues" ]; then
    ended 1 failed "lost capacity: queued again $max_requeues times (slurm.max_requeues)"
fi
rm -f "$launch/ended.json"
log_begin=$(stat -c %s "$log")

# SETUP
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd , -)
# The first host runs the leader. If its name does not resolve, take its address from Slurm.
first=${hosts%%,*}
leader=$first
if ! getent hosts "$leader" >/dev/null; then
    leader=$(scontrol show node -o "$leader" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
fi
# All cores of the smallest node. Slurm writes 72, 72, 36 as `72(x2),36`.
cpus=${SLURM_CPUS_PER_TASK:-$(tr , '\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | sed -n 1p)}

signal=
limit_is_near() {
    signal=USR1
    say "the time limit is near: the run saves and is queued again"
    scancel --signal=TERM "$job" || true
}
# Slurm itself sends SIGTERM to the agents.
is_ended() {
    signal=TERM
}
trap limit_is_near USR1
trap is_ended TERM

say "on $SLURM_JOB_NODELIST, led by $leader"
agents() {
    # Signals to the whole job are meant for srun's tasks, not for the shell that waits for srun.
    trap : TERM USR1
    local code=0
    run_on_all_nodes "$launch/agent" run --quiet --job "$launch/job.json" \
        --leader "$leader" --submission "$job" --attempt "$restarts" \
        --hosts "$hosts" --srun-log "$log" "$log_begin" || code=$?
    echo "$code" >"$codes"
}
# `wait` does not return the code reliably if a signal arrives at the end.
codes=$launch/srun-$job-$restarts
agents &
pid=$!
while kill -0 "$pid" 2>/dev/null; do
    wait "$pid" || true
done
code=$(cat "$codes" || echo 137)
rm -f "$codes"

# Print a field that the leader wrote to state.json; nothing if no leader has begun in this start.
leader_state() { # FIELD
    if grep -qs "^  \"submission\": \"$job\"" "$launch/state.json" &&
        grep -qs "^  \"attempt\": \"$restarts\"" "$launch/state.json"; then
        sed -n "s/^  \"$1\": //p" "$launch/state.json" | sed 's/,$//; s/^"\(.*\)"$/\1/; s/\\\(.\)/\1/g; s/^null$//'
    fi
}

# Filter the output of srun and the agents in this start.
printed() { # SCRIPT of sed
    tail -c "+$((log_begin + 1))" "$log" | sed -nE "$1"
}

# Whether Slurm ends the job for good, and not for a reason after which it starts again.
was_cancelled() {
    [ "$signal" = TERM ] && [ "$(squeue -h -j "$job" -o %T)" != RUNNING ] &&
        [ "$(slurm_has Reason)" != TimeLimit ] && [ "$(slurm_has PreemptTime)" = None ]
}

again() { # REASON [NODES]
    if ! is_newest; then
        say "$1; Slurm itself has queued it again"
        trap - EXIT
        exit 0
    fi
    if was_cancelled; then
        ended 130 cancelled "cancelled"
    fi
    queue_again "$@"
    if [ "$restarts" -ge "$max_requeues" ]; then
        ended 1 failed "$1; queued again $max_requeues times before (slurm.max_requeues)"
    fi
    ended 1 failed "$1; scontrol requeue $job failed"
}

# Handle a leader that was killed or never started.
without_leader() {
    local nodes=$1 without
    without=$(leader_state exclude)
    if [ -z "$(leader_state attempt)" ]; then
        # Only this file counts starts without a leader.
        echo "$restarts" >>"$launch/unled-$job"
        if [ "$(wc -l <"$launch/unled-$job")" -gt "$max_failures" ]; then
            ended 1 failed "no agent can lead the run, last on ${nodes:-$first}$because"
        fi
        without=${nodes:-$first}
    elif [ -n "$nodes" ]; then
        without=$nodes${without:+,$without}
    elif grep -qs "^    \"$first\": " "$launch/state.json"; then
        # The host was lost before. The next leader counts this loss.
        without=$first${without:+,$without}
    fi
    if [ -n "$nodes" ]; then
        again "Slurm cannot start the agent of $nodes" "$without"
    fi
    again "the agent of node 0 ($first) was killed" "$without"
}

# Exit code of node 0's agent: as the agent recorded it, else as srun reports it.
reported=$(leader_state exit_code)
because=
unstarted=
if [ -z "$reported" ]; then
    unstarted=$(printed 's/^srun: error: .* failed on node ([^ :]+): .*/\1/p' | sort -u | paste -sd , -)
    end=$(printed 's/^srun: error: [^ ]+: tasks? 0([-,][-,0-9]*)?: (.*)/\2/p' | sed -n 1p)
    cause=$(printed 's/^ *0+: //p' | tail -n 1)
    because=${cause:+: node 0 ($first): $cause}
    case $unstarted$end in
        "Exited with exit code "*) reported=${end##* } ;;
        "") [ "$code" -gt 130 ] || reported=$code ;;
    esac
fi
case $reported in
    "") without_leader "$unstarted" ;;
    0) ended 0 succeeded "done" ;;
    85) again "$([ "$signal" = USR1 ] && echo "time limit" || echo "stopped from outside"), all is saved" ;;
    75)
        reason=$(leader_state reason)
        reason=${reason%; to be started again*}
        again "${reason:-a node was lost}" "$(leader_state exclude)"
        ;;
    2) ended 2 failed "refused$because" ;;
    130)
        # Cancel the job in Slurm too, so that it does not count as failed there.
        scancel "$job" || true
        ended 130 cancelled "cancelled"
        ;;
    *) ended "$reported" failed "$([ "$signal" != USR1 ] || echo "time limit: ")exit code $reported$because" ;;
esac
