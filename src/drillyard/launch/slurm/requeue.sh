# Defaults of the shell that submitted this job by hand: sbatch and srun would prefer them to this script's options.
unset -v "${!SBATCH_@}" "${!SRUN_@}"
restarts=${SLURM_RESTART_COUNT:-0}
# Name an array's task by array and index: the last task's own id is that of the whole array.
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID:-}}
job=${job:-$SLURM_JOB_ID}

note() { # REASON
    scontrol update JobId="$job" Comment="$handle $(printf %s "$1" | tr '|\n' '  ' | cut -c -500)" || true
}

# Queue this job again without this node, which cannot run it: max_failures times, as the job's comment counts.
leave_node() { # REASON
    local reason exclude
    reason="$(squeue -h -j "$job" -o %k | sed -n 's/^[^ ]* \(.* cannot .*\)/\1; /p')$SLURMD_NODENAME $1"
    note "$reason"
    [ "$(grep -o " cannot " <<<"$reason" | wc -l)" -le "$max_failures" ] && [ "$restarts" -lt "$max_requeues" ] || exit 1
    exclude=$(scontrol show job -o "$job" | sed -n 's/.* ExcNodeList=\([^ (]*\).*/\1/p')
    exclude=$SLURMD_NODENAME${exclude:+,$exclude}
    if sbatch --test-only --exclude="$exclude" "$0" >/dev/null 2>&1; then
        note "$reason; from now on without $SLURMD_NODENAME"
    else
        exclude=
    fi
    # Slurm sends SIGTERM to the remaining processes of this start while the job waits.
    trap '' TERM
    # The controller may be unavailable for a while.
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        if scontrol requeue "$job"; then
            # Slurm changes the excluded nodes of waiting jobs only.
            [ -z "$exclude" ] || scontrol update JobId="$job" ExcNodeList="$exclude"
            exit 0
        fi
        sleep 30
    done
    exit 1
}

# Without the storage there is no program and no log. A stale mount may not answer.
timeout -s KILL 30 test -r "$launch/job.json" || leave_node "cannot read $launch"
