# Defaults of the shell that submitted this job by hand: sbatch and srun would prefer them to this script's options.
unset -v "${!SBATCH_@}" "${!SRUN_@}"
restarts=${SLURM_RESTART_COUNT:-0}
# Name an array's task by array and index: the last task's own id is that of the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}
job=${job:-$SLURM_JOB_ID}

say() {
    echo "=== $(date -u +%Y-%m-%dT%H:%M:%SZ) job $job, start $restarts: $*"
}

slurm_has() { # FIELD of this job
    scontrol show job -o "$job" 2>/dev/null | sed -n "s/.* $1=\([^ ]*\).*/\1/p"
}

note() { # REASON
    scontrol update JobId="$job" Comment="$handle $(printf %s "$1" | tr '|\n' '  ' | cut -c -500)"
}

# Queue this job again, without NODES if Slurm has others for it. Returns only if it may not be queued again, or if
# Slurm does not do it.
queue_again() { # REASON [NODES]
    local reason=$1 without=${2-} before list=
    [ "$restarts" -lt "$max_requeues" ] || return 0
    if [ -n "$without" ]; then
        before=$(slurm_has ExcNodeList) || true
        [ "${before:-(null)}" = "(null)" ] || without=$without,$before
        if sbatch --test-only --exclude="$without" "$0" >/dev/null 2>&1; then
            list=ExcNodeList=$without
            reason="$reason; from now on without $2"
        else
            reason="$reason; Slurm has no other node in place of $2"
        fi
    fi
    say "$reason; is queued again"
    # Slurm sends SIGTERM to the remaining processes of this start while the job waits.
    trap '' TERM
    # The controller may be unavailable for a while.
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        # Write the reason first: a waiting job never shows that of an earlier start.
        note "$reason" || true
        if scontrol requeue "$job"; then
            # Slurm changes the excluded nodes of waiting jobs only. This start is still among the job's processes, so
            # the next one cannot begin before the change.
            if [ -n "$list" ] && ! scontrol update JobId="$job" "$list"; then
                note "$1; Slurm did not exclude $2" || true
            fi
            trap - EXIT
            exit 0
        fi
        sleep 30
    done
}

# Without the storage there is nothing to run, and no log. A stale mount may not answer.
if ! timeout -s KILL 30 test -r "$launch/job.json"; then
    reason="$(squeue -h -j "$job" -o %k | sed -n 's/^[^ ]* \(.* cannot read .*\)/\1; /p')"
    reason="$reason$SLURMD_NODENAME cannot read $launch"
    if [ "$(grep -o "cannot read" <<<"$reason" | wc -l)" -le "$max_failures" ]; then
        queue_again "$reason" "$SLURMD_NODENAME"
    fi
    note "$reason" || true
    exit 1
fi
