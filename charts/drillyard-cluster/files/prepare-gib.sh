# Packets of the RDMA NICs would fill the kernel's log.
for setting in /proc/sys/net/ipv4/conf/gpu*rdma*/log_martians; do
    [ ! -w "$setting" ] || echo 0 >"$setting"
done
