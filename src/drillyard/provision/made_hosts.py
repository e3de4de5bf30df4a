"""The hosts of a cluster without Kubernetes: where they are, and the files by which ssh finds them.

`launch` takes a config of platform `ssh`. What ssh needs beside it (addresses, Google's tunnel, the
hosts' keys) is in an OpenSSH configuration on this machine, which every command that reaches the
hosts writes again. A host's key is kept under the id of its machine, so a new machine of the same
name or address is another host, and not an attack.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drillyard.config.load import yaml_text
from drillyard.errors import UserError
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.terraform_engine import remove_empty_directories, working_directory
from drillyard.provision.terraform_output import StateResource
from drillyard.safe_files import (
    YAML,
    describe_os_error,
    is_marked,
    replace_file,
    require_replaceable,
    write_output,
)

_OF_GOOGLE, _OF_NEBIUS = "google_compute_instance", "nebius_compute_v1_instance"
HOST_KINDS = (_OF_GOOGLE, _OF_NEBIUS)
_MADE_BY = "# Made by `drillyard cluster up`"
CONFIG, KNOWN_HOSTS = "config", "known_hosts"
TAKE_NEW_FILE = """\
# One that differs is kept under another name: it may have been edited.
if [ -e {file} ] && ! cmp -s {file} {file}.new; then
    kept={file}.$(date +%Y%m%dT%H%M%S)
    mv {file} "$kept"
    echo "{file} was replaced; the earlier one is $kept"
fi
mv {file}.new {file}
echo 'drillyard launch RUN.YAML --cluster {file}'
"""
"""Shell of the scripts of plans: put the config for `launch`, written as FILE.new, into its
place."""


@dataclass(frozen=True)
class MadeHost:
    """A host that exists. `key`: Terraform's address, of it or of its group; `address`: within its
    network; `public`: from everywhere, empty without; `created`: when it was made."""

    key: str
    name: str
    zone: str
    address: str
    public: str
    instance_id: str
    created: str


def made_hosts(state: Mapping[str, StateResource]) -> tuple[MadeHost, ...]:
    """The hosts that a state has, in the order of their numbers."""
    found = [_host(each) for each in state.values() if each.kind in HOST_KINDS]
    return tuple(sorted(found, key=lambda each: _number(each.name)))


def planned_hosts(plan: ClusterPlan, hosts: Sequence[MadeHost]) -> tuple[MadeHost, ...]:
    """Those of the plan, in its order: the ranks'. Hosts that are not there are left out."""
    assert plan.login is not None
    if plan.login.group is not None:
        return tuple(each for each in hosts if each.key == plan.login.group.group)
    by_key = {each.key: each for each in hosts}
    return tuple(by_key[key] for key in plan.login.hosts if key in by_key)


def launch_values_of_hosts(plan: ClusterPlan, hosts: Sequence[MadeHost]) -> dict[str, Any]:
    """The config of platform ssh for runs on these hosts, whose ssh configuration is written."""
    values = dict(plan.launch_settings or {})
    values["nodes"] = len(hosts)
    values["ssh"] = {
        "hosts": [each.name for each in hosts],
        **values["ssh"],
        "config_file": str(ssh_directory(plan) / CONFIG),
        "rendezvous_host": hosts[0].address,
    }
    return values


def launch_text_of_hosts(plan: ClusterPlan, hosts: Sequence[MadeHost], config: str) -> str:
    """The text of the config for runs on these hosts. `config`: the file of the cluster."""
    return launch_text(plan, launch_values_of_hosts(plan, hosts), config)


def launch_text(plan: ClusterPlan, values: Mapping[str, Any], config: str) -> str:
    """The text of a config for `launch` with these values, and what a node-hour costs. `config`:
    the file of the cluster."""
    lines = [f"{_MADE_BY} of {config}, which writes it again after each change."]
    for line in plan.prices:
        if line.pool and line.usd_per_hour is not None:
            usd = line.usd_per_hour.value / line.count
            option = f"--price-per-node-hour {usd:.4g}"
            lines.append(f"# What a run costs: drillyard estimate RUN.YAML --cluster FILE {option}")
    return "\n".join([*lines, yaml_text(dict(values), width=100)])


def launch_file_of(config: Path, platform: str = "ssh") -> Path:
    """The file beside a cluster's config that `launch` takes: lab-ssh.yaml of lab.yaml."""
    return config.with_name(f"{config.stem}-{platform}{config.suffix or '.yaml'}")


def require_launch_file(path: Path) -> None:
    """Raise UserError where `write_launch_file` would: the file there is somebody's own, or was
    edited since it was written."""
    try:
        require_replaceable(path, is_marked(YAML), "move it away, or leave out --write")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {describe_os_error(error)}") from None


def write_launch_file(path: Path, text: str) -> None:
    """Write it over an unedited earlier one. Raises UserError where the file there is another, or
    it cannot be written."""
    require_launch_file(path)
    try:
        write_output(path, text.encode(), overwrite=True, mark=YAML)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {describe_os_error(error)}") from None


def ssh_directory(plan: ClusterPlan) -> Path:
    """Where this machine has the hosts' ssh configuration and keys."""
    return working_directory(plan.project, f"{plan.name}.ssh")


def write_login(plan: ClusterPlan, hosts: Sequence[MadeHost]) -> Path:
    """Write the ssh configuration of the hosts; its path. Raises UserError where it cannot be
    written."""
    path = ssh_directory(plan) / CONFIG
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, ssh_config_text(plan, hosts).encode(), mode=0o600)
    except OSError as error:
        raise UserError(f"{path}: cannot be written: {describe_os_error(error)}") from None
    return path


def remove_login(plan: ClusterPlan) -> None:
    """Remove what this machine has for reaching the hosts."""
    directory = ssh_directory(plan)
    for name in (CONFIG, KNOWN_HOSTS):
        with contextlib.suppress(OSError):
            (directory / name).unlink()
    remove_empty_directories(directory)


def ssh_config_text(plan: ClusterPlan, hosts: Sequence[MadeHost]) -> str:
    """The configuration (ssh_config(5)): first what each host has, then what all have."""
    login = plan.login
    assert login is not None
    lines = [f"{_MADE_BY}; `drillyard cluster down` removes it."]
    for each in hosts:
        lines += [f"Host {each.name}", f"    HostKeyAlias drillyard-{each.instance_id}"]
        if login.through_iap:
            tunnel = f"start-iap-tunnel %n %p --listen-on-stdin --zone={each.zone}"
            command = f"gcloud compute {tunnel} --project={plan.project} --verbosity=warning"
            # No address: by it ssh tells its shared connections apart, also those of a host of the
            # same name in another project.
            lines.append(f"    HostName {each.name}.{each.instance_id}")
            lines.append(f"    ProxyCommand {command}")
        else:
            lines.append(f"    HostName {each.public}")
    lines += [
        "Host *",
        f'    UserKnownHostsFile "{ssh_directory(plan) / KNOWN_HOSTS}"',
        "    StrictHostKeyChecking accept-new",
    ]
    lines += ["    IdentitiesOnly yes"] if login.identity_file else []
    return "\n".join(lines) + "\n"


def _host(found: StateResource) -> MadeHost:
    values = found.attributes
    if found.kind == _OF_NEBIUS:
        return _nebius_host(found.address, values)
    (first, *_) = values.get("network_interface") or [{}]
    (outside, *_) = first.get("access_config") or [{}]
    return MadeHost(
        found.address,
        str(values["name"]),
        str(values.get("zone") or "").rpartition("/")[2],
        str(first.get("network_ip") or ""),
        str(outside.get("nat_ip") or ""),
        str(values.get("instance_id") or ""),
        str(values.get("creation_timestamp") or ""),
    )


def _nebius_host(address: str, values: Mapping[str, Any]) -> MadeHost:
    (first, *_) = (values.get("status") or {}).get("network_interfaces") or [{}]

    def of(kind: str) -> str:
        """An address, which Nebius gives with its prefix: 10.0.0.1/32."""
        return str((first.get(kind) or {}).get("address") or "").partition("/")[0]

    return MadeHost(
        address,
        str(values["name"]),
        "",
        of("ip_address"),
        of("public_ip_address"),
        str(values.get("id") or ""),
        str(values.get("created_at") or ""),
    )


def _number(name: str) -> tuple[int, str]:
    digits = re.search(r"\d+$", name)
    return (int(digits[0]) if digits else 0, name)
