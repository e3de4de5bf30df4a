#!/bin/bash
# mpi.sh PROGRAM ARGUMENT...: runs an MPI program, one process per GPU, over the nodes of a run. Every node's container runs
# this script: each starts an ssh server of its own user, and node 0 starts mpirun once all of them are there.
#
# MPI_DIRECTORY is a directory that all nodes share, where they meet. Needs in the image: Open MPI, OpenSSH's server and client.
set -euo pipefail

meeting=$MPI_DIRECTORY/$MASTER_PORT
mkdir -p "$meeting"
chmod 700 "$meeting"
own=$(mktemp -d)
port=$((30000 + MASTER_PORT % 10000 + NODE_RANK))
trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$own"' EXIT

wait_for() { # seconds, file
    for _ in $(seq "$1"); do
        [ ! -e "$2" ] || return 0
        sleep 1
    done
    echo "error: node $NODE_RANK: no $2 after $1 s" >&2
    exit 1
}

# Node 0 makes the key that all nodes accept, and keeps it: only mpirun, there, connects with it.
if [ "$NODE_RANK" = 0 ]; then
    ssh-keygen -q -t ed25519 -N '' -f "$own/key"
    cp "$own/key.pub" "$meeting/key.pub.part"
    mv "$meeting/key.pub.part" "$meeting/key.pub"
fi
wait_for 300 "$meeting/key.pub"

ssh-keygen -q -t ed25519 -N '' -f "$own/host"
# A server that root starts needs this directory.
mkdir -p /run/sshd 2>/dev/null || true
cp "$meeting/key.pub" "$own/authorized"
"$(command -v sshd || echo /usr/sbin/sshd)" -D -e -f /dev/null -p "$port" -h "$own/host" -o PidFile=none -o UsePAM=no \
    -o StrictModes=no -o PasswordAuthentication=no -o AuthorizedKeysFile="$own/authorized" &
# The name of a pod is known to itself alone.
host=$(hostname)
[ -z "${KUBERNETES_SERVICE_HOST:-}" ] || host=$(hostname -i | cut -d ' ' -f 1)
echo "$host $port" >"$meeting/node-$NODE_RANK.part"
mv "$meeting/node-$NODE_RANK.part" "$meeting/node-$NODE_RANK"

if [ "$NODE_RANK" != 0 ]; then
    until [ -e "$meeting/ended" ]; do sleep 1; done
    exit "$(cat "$meeting/ended")"
fi

for ((node = 0; node < NNODES; node++)); do
    wait_for 300 "$meeting/node-$node"
    read -r host at <"$meeting/node-$node"
    echo "$host slots=$NPROC_PER_NODE" >>"$own/hosts"
    printf 'Host %s\n  Port %s\n' "$host" "$at" >>"$own/ssh_config"
done
cat >>"$own/ssh_config" <<END
Host *
  IdentityFile $own/key
  IdentitiesOnly yes
  # A node is there before its server listens.
  ConnectionAttempts 60
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
END

# Every rank gets the variables of NCCL and the libraries that are set here.
pass=()
for name in $(compgen -e | grep -E '^(NCCL_|UCX_|FI_|LD_LIBRARY_PATH$)'); do pass+=(-x "$name"); done
code=0
mpirun --allow-run-as-root --hostfile "$own/hosts" -np $((NNODES * NPROC_PER_NODE)) --bind-to none \
    --mca plm_rsh_agent "ssh -F $own/ssh_config" --mca plm_rsh_no_tree_spawn 1 --mca orte_keep_fqdn_hostnames 1 \
    "${pass[@]}" "$@" || code=$?
echo "$code" >"$meeting/ended.part"
mv "$meeting/ended.part" "$meeting/ended"
exit "$code"
