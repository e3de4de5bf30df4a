exec >>"$launch/slurm-$job.log" 2>&1
line=
trap 'line=$LINENO' ERR
trap 'job_program --failed $? "the job script stopped at line $line"' EXIT
# SETUP
trap - ERR EXIT
python3 -c "import sys; sys.exit(sys.version_info < (3, 9))" || leave_node "cannot run a python3 of 3.9 or newer"

# The program writes its exit code to this file. Where it is killed, it is started again and finds its srun there.
record=$launch/srun-$job-$restarts
: >"$record" || true
heard=() pid='' code=1
trap 'heard+=(--heard USR1); kill -USR1 "$pid" 2>/dev/null || true' USR1
trap 'heard+=(--heard TERM); kill -TERM "$pid" 2>/dev/null || true' TERM
for _ in 1 2 3 4 5; do
    job_program "${heard[@]}" &
    pid=$!
    # A signal ends `wait`, and may cost it the program's code.
    while kill -0 "$pid" 2>/dev/null; do
        wait "$pid" && code=0 || code=$?
    done
    [ -e "$record" ] || exit "$code"
    ended=$(cat "$record")
    if [[ $ended =~ ^[0-9]+$ ]]; then
        rm -f "$record"
        exit "$ended"
    fi
done
rm -f "$record"
job_program --failed "$code" "the job's program was killed five times, or cannot run: see $launch/slurm-$job.log"
