"""The scripts that make a Slurm node's image and run at its start, and those of its prolog and
epilog, in a Debian of debootstrap's.

What asks Google or the kernel is a stand-in that notes its arguments: apt-get, curl, docker and the
like. Shell, files, and apt's reading of the sources are real. To install the packages needs
Google's registries, and the daemon needs a GPU.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.launch.image_build import base_tree
from tests.unit.provision.slurm_clusters import config, plan, settings_of

STAND_INS = (
    *("add-nvidia-repositories", "ansible-galaxy", "ansible-pull", "apt-get", "apt-mark"),
    *("curl", "docker", "gcloud", "modprobe", "nvidia-ctk", "update-initramfs"),
)
READY = "Buffer manager initialization complete"
_STAND_IN = f"""\
#!/bin/sh
echo "${{0##*/}} $*" >>/calls
[ "${{0##*/}} $1" != "docker logs" ] || echo "{READY}"
! grep -qx "${{0##*/}}" /fails
"""


class Node:
    """A Debian in memory, over the tree of debootstrap's; all below it is removed with its tree."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        upper, work = directory / "layers" / "upper", directory / "layers" / "work"
        self.root.mkdir()
        upper.parent.mkdir()
        run("mount", "-t", "tmpfs", "layers", str(upper.parent))
        for each in (upper, work):
            each.mkdir()
        layers = f"lowerdir={base_tree()},upperdir={upper},workdir={work}"
        run("mount", "-t", "overlay", "-o", layers, "node", str(self.root))
        for name in STAND_INS:
            path = self.root / "usr/local/bin" / name
            path.write_text(_STAND_IN)
            path.chmod(0o755)
        # Of udev, which a machine has and this tree does not need.
        (self.root / "etc/udev/rules.d").mkdir(parents=True)
        self.fail()

    def close(self) -> None:
        for each in (self.root, self.root.with_name("layers")):
            subprocess.run(["umount", str(each)], capture_output=True, check=False)

    def fail(self, *programs: str) -> None:
        """Have these programs fail."""
        (self.root / "fails").write_text("".join(f"{each}\n" for each in programs))

    def calls(self) -> list[str]:
        """What was called since the last look."""
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def run(self, text: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a script as root of the node."""
        (self.root / "script").write_text(text)
        (self.root / "script").chmod(0o755)
        path = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        return subprocess.run(
            ["chroot", str(self.root), "/script"],
            env=path | environment,
            capture_output=True,
            text=True,
            check=False,
        )


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("machine", ["a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g"])
def test_the_scripts_of_image_and_start_do_all_that_needs_no_google(
    machine: str, node: Node, tmp_path: Path
) -> None:
    found = plan(tmp_path, config(machine, "spot"))
    start = settings_of(found, "node-startup").get("runners", [])
    runners = [*settings_of(found, "image-script")["runners"], *start]
    scripts = {each["destination"]: each["content"] for each in runners if each["type"] == "shell"}
    stack = "tcpxo" if machine == "a3-megagpu-8g" else "gib"
    assert f"install_{stack}.sh" in scripts
    for name, text in scripts.items():
        if name == "install_plugin.sh":
            # Its last line looks for what the container has put there.
            assert node.run(text).returncode != 0
            (node.root / "var/lib/tcpxo/lib64").mkdir(parents=True)
            text = text.replace("rm -rf ", "test -d ")
        done = node.run(text)
        assert done.returncode == 0, (name, done.stderr)
        assert node.calls(), name
        # A step that fails ends the script.
        first = {"install_plugin.sh": "gcloud", "install_containers.sh": "add-nvidia-repositories"}
        failing = first.get(name, "curl" if "curl" in text else "apt-get")
        node.fail(failing)
        assert node.run(text).returncode != 0, name
        assert node.calls()[-1].split()[0] == failing, name
        node.fail()
    # The real apt takes each line for a source; its transport comes with a package of Google's.
    (node.root / "usr/lib/apt/methods/ar+https").symlink_to("https")
    asked = ["chroot", str(node.root), "/usr/bin/apt-get", "update", "--print-uris"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listed = done.stdout
    assert "'https://packages.cloud.google.com/apt/dists/" in listed
    assert (
        f"'ar+https://us-apt.pkg.dev/projects/gce-ai-infra/dists/gpudirect-{stack}-apt/" in listed
    )
    if stack == "tcpxo":
        rules = (node.root / "etc/udev/rules.d/00-a3-megagpu.rules").read_text()
        assert rules.count("RUN+=") == 3 and rules[-1] == "\n" and rules.count("\n") == 1
        unit = node.root / "etc/systemd/system/slurmd.service.d/aperture.conf"
        assert unit.read_text().startswith("[Service]\nExecCondition=")


def test_prolog_and_epilog_start_and_end_the_daemon(node: Node, tmp_path: Path) -> None:
    controller = settings_of(plan(tmp_path, config("a3-megagpu-8g", "spot")), "controller")
    (prolog,) = controller["prolog_scripts"]
    (epilog,) = controller["epilog_scripts"]
    done = node.run(prolog["content"], SLURM_JOB_NUM_NODES="2")
    assert done.returncode == 0, done.stderr
    verbs = [" ".join(line.split()[:2]) for line in node.calls()]
    assert verbs == ["modprobe import-helper", "docker rm", "docker run", "docker logs"]
    for failing in ("modprobe", "docker"):
        node.fail(failing)
        assert node.run(prolog["content"], SLURM_JOB_NUM_NODES="2").returncode != 0
        # An epilog that fails would drain the node: there may be no daemon.
        assert node.run(epilog["content"]).returncode == 0
    assert node.run(prolog["content"], SLURM_JOB_NUM_NODES="1").returncode == 0
