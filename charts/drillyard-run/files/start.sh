# First process of a pod: waits for node 0's name, sources the network's settings, and becomes the command.
if [ "$NNODES" -gt 1 ] && command -v getent >/dev/null 2>&1; then
    left=1800
    # A name exists as soon as its pod has an address; pods start when each has its image.
    until getent hosts "$MASTER_ADDR" >/dev/null 2>&1; do
        left=$((left - 1))
        if [ "$left" -le 0 ]; then
            echo "error: the name of node 0, $MASTER_ADDR, does not resolve after 1800 tries" >&2
            exit 1
        fi
        sleep 1
    done
fi
if [ -r /etc/drillyard/network.sh ]; then
    . /etc/drillyard/network.sh || exit $?
fi
exec "$@"
