"""Shell scripts that a blueprint contains: how the nodes' image is made, and the prolog and epilog
that start and end a network stack's daemon.

None has `$(`, which the toolkit would read as an expression of its own.
"""

from __future__ import annotations

import json
import shlex

from drillyard.hardware.cluster_toolkit import ToolkitRelease
from drillyard.hardware.network_stacks import NetworkStack

DAEMON = "rxdm-daemon"
_STARTED = "Buffer manager initialization complete"
_WAIT_SECONDS = 300
_SHELL = "#!/bin/bash\nset -e -o pipefail\n"


def slurm_variables(*, lustre: bool) -> str:
    """What slurm-gcp's playbook installs, as JSON."""
    return json.dumps(
        {
            "reboot": False,
            "install_cuda": False,
            "install_ompi": True,
            "install_lustre": False,
            "install_managed_lustre": lustre,
            "install_gcsfuse": True,
            "install_nvidia_repo": True,
            "allow_kernel_upgrades": False,
            "monitoring_agent": "cloud-ops",
        },
        indent=2,
    )


def install_slurm(release: ToolkitRelease) -> str:
    """Install Slurm, its plugins for containers and the scripts of the cloud."""
    return (
        f"{_SHELL}apt-get update\napt-get install -y git\n"
        "ansible-galaxy role install googlecloudplatform.google_cloud_ops_agents\n"
        "ansible-pull -U https://github.com/GoogleCloudPlatform/slurm-gcp"
        f" -C {release.slurm_gcp} \\\n"
        "  -i localhost, --limit localhost --connection=local \\\n"
        "  -e @/var/tmp/slurm_vars.json ansible/playbook.yml\n"
    )


def install_containers() -> str:
    """Docker's way to the GPUs, for daemons of network stacks; and DCGM, for checks."""
    return (
        f"{_SHELL}add-nvidia-repositories -y\napt-get update\n"
        "apt-get install -y nvidia-container-toolkit datacenter-gpu-manager-4-cuda12\n"
        "nvidia-ctk runtime configure --runtime=docker\n"
    )


def install_gib(release: ToolkitRelease) -> str:
    """Install gIB from Google's repository of packages, and keep its version."""
    keys = "/usr/share/keyrings/google-artifacts.asc"
    return (
        f"{_SHELL}"
        f"curl -fsSL https://us-apt.pkg.dev/doc/repo-signing-key.gpg -o {keys}\n"
        f"curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg >>{keys}\n"
        f"echo 'deb [signed-by={keys}] https://packages.cloud.google.com/apt"
        " apt-transport-artifact-registry-stable main' \\\n"
        "  >/etc/apt/sources.list.d/artifact-registry.list\n"
        "apt-get update\napt-get install -y apt-transport-artifact-registry\n"
        f"echo 'deb [signed-by={keys}] ar+https://us-apt.pkg.dev/projects/gce-ai-infra"
        " gpudirect-gib-apt main' \\\n"
        "  >/etc/apt/sources.list.d/gpudirect-gib.list\n"
        f"apt-get update\napt-get install -y {release.gib_package}\napt-mark hold nccl-gib\n"
    )


def install_tcpxo() -> str:
    """The kernel module by which the NIC reads GPU memory, and the devices of its aperture."""
    keys = "/usr/share/keyrings/google-artifacts.asc"
    return (
        f"{_SHELL}"
        f"curl -fsSL https://packages.cloud.google.com/apt/doc/apt-key.gpg -o {keys}\n"
        f"echo 'deb [signed-by={keys}] https://packages.cloud.google.com/apt"
        " apt-transport-artifact-registry-stable main' \\\n"
        "  >/etc/apt/sources.list.d/artifact-registry.list\n"
        "apt-get update\napt-get install -y dkms apt-transport-artifact-registry\n"
        "echo 'deb [arch=all trusted=yes] ar+https://us-apt.pkg.dev/projects/gce-ai-infra"
        " gpudirect-tcpxo-apt main' \\\n"
        "  >/etc/apt/sources.list.d/gpudirect-tcpxo.list\n"
        "apt-get update\napt-get install -y dmabuf-import-helper\n"
        "cat >/etc/udev/rules.d/00-a3-megagpu.rules <<'RULES'\n"
        'ACTION=="add", SUBSYSTEM=="pci", ATTR{vendor}=="0x1ae0", ATTR{device}=="0x0084",'
        ' TAG+="systemd",'
        ' RUN+="/usr/bin/mkdir --mode=0755 -p /dev/aperture_devices",'
        ' RUN+="/usr/bin/systemd-mount --type=none --options=bind --collect %S/%p'
        ' /dev/aperture_devices/%k",'
        " RUN+=\"/usr/bin/bash -c '/usr/bin/chmod 0666 /dev/aperture_devices/%k/resource*'\"\n"
        "RULES\nupdate-initramfs -u -k all\n"
        "mkdir -p /etc/systemd/system/slurmd.service.d\n"
        "cat >/etc/systemd/system/slurmd.service.d/aperture.conf <<'UNIT'\n"
        "[Service]\nExecCondition=/usr/bin/test -d /dev/aperture_devices\nUNIT\n"
    )


def install_plugin(stack: NetworkStack) -> str:
    """Put the stack's libraries where runs look for them, at each start of a node: an image has no
    Google registry's credentials, a node has."""
    assert stack.host_library_path is not None
    image = stack.images["installer"]
    parent = stack.host_library_path.rpartition("/")[0]
    return (
        f"{_SHELL}gcloud auth configure-docker --quiet us-docker.pkg.dev\n"
        f"rm -rf {parent}\n"
        f"docker run --rm --network=host --volume /var/lib:/var/lib {image} install"
        " --install-nccl\n"
        f"test -d {stack.host_library_path}\n"
    )


def daemon_prolog(stack: NetworkStack) -> str:
    """Start the stack's daemon for a job on several nodes, and wait until it is ready. A prolog
    that fails drains its node, and the job is queued again."""
    assert stack.sidecar is not None
    image, arguments = stack.images["sidecar"], shlex.split(stack.sidecar.arguments or "")
    run = (
        *("docker", "run", "--detach", "--rm", "--name", DAEMON, "--network=host"),
        *("--privileged", "--cap-add=NET_ADMIN", "--gpus", "all"),
        *("--volume", "/var/lib/nvidia/lib64:/usr/local/nvidia/lib64"),
        *("--volume", "/dev/dmabuf_import_helper:/dev/dmabuf_import_helper"),
        *("--env", "LD_LIBRARY_PATH=/usr/lib/x86_64-linux-gnu", image, *arguments),
    )
    # Without pipefail: grep ends before docker does once it has found the line.
    return (
        "#!/bin/bash\nset -e\n"
        'if [ "${SLURM_JOB_NUM_NODES:-2}" = 1 ]; then exit 0; fi\n'
        "modprobe import-helper\n"
        f"docker rm --force {DAEMON} >/dev/null 2>&1 || true\n"
        f"{shlex.join(run)}\n"
        f"for _ in {{1..{_WAIT_SECONDS // 2}}}; do\n"
        f"  if docker logs {DAEMON} 2>&1 | grep -q '{_STARTED}'; then exit 0; fi\n"
        "  sleep 2\ndone\n"
        f"docker logs --tail 20 {DAEMON} >&2 || true\n"
        f"echo '{DAEMON} is not ready after {_WAIT_SECONDS} s' >&2\nexit 1\n"
    )


def daemon_epilog() -> str:
    """End the daemon with its job."""
    return f"#!/bin/bash\ndocker rm --force {DAEMON} >/dev/null 2>&1 || true\n"
