"""The files that a node's containerd, its pods' network and its kubelet are started with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ADDRESSES_OF_A_NODE = 90


def containerd_toml(place: Path, socket: Path) -> str:
    """containerd.toml of a node whose files are in `place`, its containers' base spec in
    spec.json."""
    runtime: dict[str, Any] = {
        "runtime_type": "io.containerd.runc.v2",
        "base_runtime_spec": str(place / "spec.json"),
        "options": {"SystemdCgroup": False},
    }
    cri = {
        "sandbox_image": "localhost/pause:1",
        "restrict_oom_score_adj": True,
        "cni": {"bin_dir": "/usr/lib/cni", "conf_dir": str(place / "cni")},
        "containerd": {"runtimes": {"runc": runtime}},
    }
    return (
        _toml({"version": 2, "root": f"{place}/root", "state": f"{place}/state"})
        + _toml({"address": str(socket)}, "grpc")
        + _tables(cri, 'plugins."io.containerd.grpc.v1.cri"')
    )


def pod_network(place: Path, bridge: str, network: str, number: int) -> str:
    """The CNI configuration of node `number`: its share of the addresses on the bridge."""
    first = number * 100 - 90
    addresses = {
        "subnet": f"{network}.0/24",
        "gateway": f"{network}.1",
        "rangeStart": f"{network}.{first}",
        "rangeEnd": f"{network}.{first + ADDRESSES_OF_A_NODE}",
    }
    ipam: dict[str, Any] = {
        "type": "host-local",
        "dataDir": f"{place}/ipam",
        "ranges": [[addresses]],
    }
    ipam["routes"] = [{"dst": "0.0.0.0/0"}]
    plugin = {
        "type": "bridge",
        "bridge": bridge,
        "isGateway": True,
        "hairpinMode": True,
        "ipam": ipam,
    }
    return json.dumps({"cniVersion": "0.4.0", "name": "pods", "plugins": [plugin]})


def kubelet_config(place: Path, socket: Path, keys: Path, node: str, own: dict[str, Any]) -> str:
    """kubelet.yaml of a node; `own` has its addresses and control group."""
    x509 = {"clientCAFile": str(keys / "ca.crt")}
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": x509,
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{socket}",
        "cgroupDriver": "cgroupfs",
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "imageGCHighThresholdPercent": 100,
        "clusterDomain": "cluster.local",
        "readOnlyPort": 0,
        "healthzPort": 0,
        "podLogsDir": f"{place}/logs",
        "tlsCertFile": f"{keys}/{node}.crt",
        "tlsPrivateKeyFile": f"{keys}/{node}.key",
    }
    return str(yaml.safe_dump(config | own))


def _toml(values: dict[str, Any], table: str = "") -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join([f"[{table}]" if table else "", *lines, ""])


def _tables(values: dict[str, Any], table: str) -> str:
    """Nested tables in TOML."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    nested = [
        _tables(value, f"{table}.{key}") for key, value in values.items() if isinstance(value, dict)
    ]
    return _toml(plain, table) + "".join(nested)
