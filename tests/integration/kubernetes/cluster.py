"""A real Kubernetes cluster: etcd, API server, scheduler, JobSet, Kueue and two nodes that run
pods.

    python tests/integration/kubernetes/cluster.py DIRECTORY     (as root; `make cluster`)

Everything runs in network, mount and process namespaces of its own, so ports are fixed, two
clusters do not meet, and after SIGKILL of the first process no process, mount or bridge is left.
DIRECTORY gets the kubeconfig, logs and state. A command reaches the API server through
`Cluster.enter`. Pods see this machine's /usr, this Python and this checkout, read-only, so that no
image is built; a persistent volume is a directory that both nodes have.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
TOOLS = Path(os.environ.get("DRILLYARD_TOOLS", Path.home() / ".cache/drillyard/tools"))
NODES = ("node1", "node2")
IMAGE = "localhost/host:1"
"""An empty image: what a pod runs is bound into it."""
BRIDGE, NETWORK = "pods0", "10.222.0"
API, ETCD, ETCD_PEER, MANAGER, SCHEDULER = 6443, 2379, 2380, 10257, 10259
JOBSET, JOBSET_HEALTH, KUEUE, KUEUE_HEALTH, KUBELET = 9443, 9444, 9543, 9544, 10250
KUEUES = {"kueue": "v1beta1", "recent-kueue": "v1beta2"}
"""The programs of Kueue, and the version of the objects that each is configured with."""
WEBHOOKS = {"jobset": JOBSET, "kueue": KUEUE}
START_SECONDS = 300
GRACE_SECONDS = 50
"""Kubernetes' default. The nodes of kwok, which speak seldom, need it."""
LONGEST_PATH = 107 - len("/node1/kubelet/pod-resources/1234567890")
"""A socket's path has at most 107 characters (unix(7)); without this one a node never becomes
ready."""


def tool(name: str) -> str:
    """The program that .ci/tools/kubernetes has built; its version is not asked for: there is
    one."""
    found = sorted(path for path in TOOLS.glob(f"{name}-v*") if path.suffix != ".yaml")
    if not found:
        raise FileNotFoundError(f"{TOOLS}/{name}-v*: run `sh .ci/tools/kubernetes`")
    return str(found[-1])


def objects(name: str) -> Path:
    """The YAML that .ci/tools/kubernetes has extracted."""
    return sorted(TOOLS.glob(f"{name}-v*.yaml"))[-1]


def _kubectl_program(kubeconfig: Path) -> list[str]:
    # What it has read of another cluster's API at the same address would be used here.
    cache = str(kubeconfig.with_name("kubectl-cache"))
    return [tool("kubectl"), "--cache-dir", cache, "--kubeconfig", str(kubeconfig)]


class Cluster:
    """A started cluster, seen from outside of its namespaces."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.kubeconfig = directory / "kubeconfig"
        self._process: subprocess.Popen[bytes] | None = None
        self._init = 0

    def start(self, grace_seconds: int = GRACE_SECONDS, kueue: str = "kueue") -> None:
        """Start it; what an earlier cluster left in the directory is removed. A node that says
        nothing for `grace_seconds` is lost. `kueue`: the program and its objects (KUEUES); empty:
        neither Kueue nor JobSet.

        FileExistsError for a directory that is not a cluster's; ValueError for a path too long for
        the kubelet's sockets; RuntimeError with the end of the log if it does not become ready.
        """
        if len(str(self.directory)) > LONGEST_PATH:
            raise ValueError(f"{self.directory}: longer than {LONGEST_PATH} characters")
        self.directory.mkdir(parents=True, exist_ok=True)
        if any(self.directory.iterdir()) and not (self.directory / "cluster.log").exists():
            raise FileExistsError(f"{self.directory} is not empty and no cluster's")
        shutil.rmtree(self.directory)
        self.directory.mkdir()
        unshare = [
            "unshare",
            "--mount",
            "--net",
            "--pid",
            "--fork",
            "--mount-proc",
            "--kill-child=KILL",
        ]
        log = (self.directory / "cluster.log").open("wb")
        argv = [
            *unshare,
            sys.executable,
            __file__,
            str(self.directory),
            "--inside",
            str(grace_seconds),
            kueue,
        ]
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
        )
        end = time.monotonic() + START_SECONDS
        while not (self.directory / "ready").exists():
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                raise RuntimeError((self.directory / "cluster.log").read_text()[-4000:])
            time.sleep(0.1)
        children = (
            Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        )
        self._init = int(children[0])

    @property
    def pid(self) -> int:
        """The process whose end is the end of everything."""
        assert self._process is not None
        return self._process.pid

    def stop(self) -> None:
        """End all processes and wait for it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for directory in Path("/sys/fs/cgroup").glob(f"*/{cgroup(self.directory, '*')}"):
            _remove_cgroups(directory)

    def enter(self, *argv: str, into: Sequence[str] = ("net",)) -> list[str]:
        """The command line that runs `argv` where the API server is reached. `into`: the cluster's
        namespaces; in that of its processes (pid) a command ends with it, and what one mounts
        (mount) its nodes see."""
        files = {"net": "net", "pid": "pid", "mount": "mnt"}
        return [
            "nsenter",
            *(f"--{name}=/proc/{self._init}/ns/{files[name]}" for name in into),
            "--",
            *argv,
        ]

    def kubectl(self, *argv: str, stdin: str | None = None, check: bool = True) -> str:
        """What kubectl prints. RuntimeError if it fails."""
        command = self.enter(*_kubectl_program(self.kubeconfig), *argv)
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise RuntimeError(f"kubectl {' '.join(argv)}: {done.stderr}")
        return done.stdout

    def get(self, *argv: str) -> dict[str, Any]:
        """Objects as `kubectl get` has them."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *argv, "--output", "json"))
        return found

    def apply(self, *documents: dict[str, Any]) -> None:
        """Create or change objects."""
        self.kubectl(
            "apply", "--server-side", "--filename", "-", stdin=yaml.safe_dump_all(documents)
        )


def cgroup(directory: Path, node: str) -> str:
    """The name of a node's control groups, which no other cluster has."""
    return f"drillyard-{hashlib.sha256(str(directory).encode()).hexdigest()[:8]}-{node}"


def _remove_cgroups(directory: Path) -> None:
    for path in sorted((path for path in directory.rglob("*") if path.is_dir()), reverse=True):
        with contextlib.suppress(OSError):
            path.rmdir()
    with contextlib.suppress(OSError):
        directory.rmdir()


class Inside:
    """The same cluster, seen from inside: it starts the processes."""

    def __init__(self, directory: Path, *, grace_seconds: int, kueue: str) -> None:
        self.directory, self.grace_seconds, self.kueue = directory, grace_seconds, kueue
        self.keys, self.logs = directory / "keys", directory / "logs"
        for path in (self.keys, self.logs):
            path.mkdir(exist_ok=True)
        self.kubeconfig = directory / "kubeconfig"
        from cluster_keys import ClusterKeys

        self._signed = ClusterKeys(self.keys, f"https://127.0.0.1:{API}")

    def run(self) -> None:
        """Start everything, in the order in which it needs each other."""
        _run("ip", "link", "set", "lo", "up")
        self._release_mounts()
        # What is mounted here appears on every node, and what a node mounts stays its own.
        _run("mount", "--make-rshared", "/")
        self._signed.make(self.kubeconfig, WEBHOOKS)
        self._control_plane()
        if self.kueue:
            self._controllers()
        self._network()
        for number, node in enumerate(NODES, 1):
            self._node(number, node)
        for node in NODES:
            self._wait(
                120,
                "kubectl",
                "wait",
                "--for",
                "condition=Ready",
                f"node/{node}",
                "--timeout",
                "1s",
            )
            gpus = json.dumps(
                {"status": {key: {"nvidia.com/gpu": "8"} for key in ("capacity", "allocatable")}}
            )
            self._kubectl(
                "patch", f"node/{node}", "--subresource=status", "--type=merge", "--patch", gpus
            )

    def _release_mounts(self) -> None:
        """Unmount here what others have mounted on temporary directories: it stays in use while a
        namespace has it."""
        mounted = [
            line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ]
        for place in reversed(mounted):
            if place.startswith(f"{tempfile.gettempdir()}/") and not self.directory.is_relative_to(
                place
            ):
                _run("umount", "--lazy", place)

    def _start(self, name: str, *argv: str) -> int:
        """Start a process; its number."""
        log = (self.logs / name).open("wb")
        started = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        return started.pid

    def _kubectl(self, *argv: str, stdin: str | None = None) -> None:
        command = [*_kubectl_program(self.kubeconfig), *argv]
        subprocess.run(command, input=stdin, text=True, check=True, stdout=subprocess.DEVNULL)

    def _wait(self, seconds: float, *argv: str) -> None:
        """Repeat a command (`kubectl` or another) until it succeeds. TimeoutError."""
        command = (
            [*_kubectl_program(self.kubeconfig), *argv[1:]] if argv[0] == "kubectl" else list(argv)
        )
        end = time.monotonic() + seconds
        while True:
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return
            if time.monotonic() > end:
                raise TimeoutError(f"not in {seconds:g} s: {' '.join(argv)}")
            time.sleep(0.3)

    # Control plane
    # ----------------------------------------------------------------------------------------------

    def _control_plane(self) -> None:
        client, peer = f"http://127.0.0.1:{ETCD}", f"http://127.0.0.1:{ETCD_PEER}"
        self._start(
            "etcd",
            *(
                tool("etcd"),
                "--name",
                "t",
                "--data-dir",
                str(self.directory / "etcd"),
                "--unsafe-no-fsync",
            ),
            *(
                "--listen-client-urls",
                client,
                "--advertise-client-urls",
                client,
                "--log-level",
                "warn",
            ),
            *(
                "--listen-peer-urls",
                peer,
                "--initial-advertise-peer-urls",
                peer,
                "--initial-cluster",
                f"t={peer}",
            ),
        )
        key = self.keys
        self._start(
            "kube-apiserver",
            *(tool("kube-apiserver"), "--etcd-servers", client, "--bind-address", "127.0.0.1"),
            *(
                "--advertise-address",
                "127.0.0.1",
                "--secure-port",
                str(API),
                "--endpoint-reconciler-type",
                "none",
            ),
            *(
                "--tls-cert-file",
                f"{key}/apiserver.crt",
                "--tls-private-key-file",
                f"{key}/apiserver.key",
            ),
            *(
                "--client-ca-file",
                f"{key}/ca.crt",
                "--kubelet-preferred-address-types",
                "InternalIP",
            ),
            *("--kubelet-client-certificate", f"{key}/kubelet-client.crt"),
            *("--kubelet-client-key", f"{key}/kubelet-client.key"),
            "--allow-privileged",
            *("--service-account-issuer", "https://kubernetes.default.svc"),
            *("--service-account-key-file", f"{key}/accounts.key"),
            *("--service-account-signing-key-file", f"{key}/accounts.key"),
            *("--service-cluster-ip-range", "10.96.0.0/16", "--authorization-mode", "Node,RBAC"),
        )
        self._wait(90, "kubectl", "get", "--raw", "/readyz")
        for name, port, more in (
            (
                "kube-controller-manager",
                MANAGER,
                [
                    *(
                        "--service-account-private-key-file",
                        f"{key}/accounts.key",
                        "--root-ca-file",
                        f"{key}/ca.crt",
                    ),
                    "--use-service-account-credentials",
                    f"--node-monitor-grace-period={self.grace_seconds}s",
                ],
            ),
            ("kube-scheduler", SCHEDULER, []),
        ):
            config = f"{key}/{name}.kubeconfig"
            self._start(
                name,
                *(
                    tool(name),
                    "--bind-address",
                    "127.0.0.1",
                    "--secure-port",
                    str(port),
                    "--leader-elect=false",
                ),
                *("--kubeconfig", config, "--authentication-kubeconfig", config),
                *(
                    "--authorization-kubeconfig",
                    config,
                    "--kube-api-qps",
                    "300",
                    "--kube-api-burst",
                    "600",
                    *more,
                ),
            )
        self._wait(60, "kubectl", "--namespace", "default", "get", "serviceaccount", "default")

    def _controllers(self) -> None:
        """JobSet and Kueue beside the API server: definitions first, the webhooks, which fail
        closed, last."""
        definitions, webhooks = [], []
        authority = base64.b64encode((self.keys / "ca.crt").read_bytes()).decode()
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        for name, port in WEBHOOKS.items():
            program = self.kueue if name == "kueue" else name
            text = objects(f"{program}-objects").read_text()
            for document in yaml.load_all(text, Loader=loader):
                if document["kind"] in ("Namespace", "CustomResourceDefinition"):
                    conversion = document.get("spec", {}).get("conversion", {}).get("webhook")
                    if conversion:
                        url = f"https://127.0.0.1:{port}/convert"
                        conversion["clientConfig"] = {"url": url, "caBundle": authority}
                    definitions.append(document)
                elif document["kind"].endswith("WebhookConfiguration"):
                    for each in document["webhooks"]:
                        url = f"https://127.0.0.1:{port}{each['clientConfig']['service']['path']}"
                        each["clientConfig"] = {"url": url, "caBundle": authority}
                    webhooks.append(document)
        self._kubectl(
            "apply", "--server-side", "--filename", "-", stdin=yaml.safe_dump_all(definitions)
        )
        self._kubectl("apply", "--server-side", "--filename", str(objects("provisioning-request")))
        self._kubectl("wait", "--for", "condition=Established", "crd", "--all", "--timeout", "60s")
        serving = self.directory / "serving"
        serving.mkdir()
        for end in ("key", "crt"):
            shutil.copy(self.keys / f"webhook.{end}", serving / f"tls.{end}")
        secret = [
            "--from-file",
            str(serving),
            *(f"--from-file={self.keys}/ca.{end}" for end in ("crt", "key")),
        ]
        self._kubectl(
            "--namespace",
            "kueue-system",
            "create",
            "secret",
            "generic",
            "kueue-webhook-server-cert",
            *secret,
        )
        for name, port, health, version, more in (
            (
                "jobset",
                JOBSET,
                JOBSET_HEALTH,
                "v1alpha1",
                {"internalCertManagement": {"enable": False}},
            ),
            (
                *("kueue", KUEUE, KUEUE_HEALTH, KUEUES[self.kueue]),
                {
                    "internalCertManagement": {"enable": True},
                    "clientConnection": {"qps": 300, "burst": 600},
                    "featureGates": {"VisibilityOnDemand": False, "MultiKueue": False},
                    "integrations": {"frameworks": ["batch/job", "jobset.x-k8s.io/jobset"]},
                },
            ),
        ):
            config = {
                "apiVersion": f"config.{name}.x-k8s.io/{version}",
                "kind": "Configuration",
                "leaderElection": {"leaderElect": False},
                "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
                "metrics": {"bindAddress": "0"},
                "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(serving)},
                **more,
            }
            path = self.directory / f"{name}.yaml"
            path.write_text(yaml.safe_dump(config))
            os.environ["KUBECONFIG"] = str(self.kubeconfig)
            program = self.kueue if name == "kueue" else name
            self._start(name, tool(program), "--config", str(path))
        for health in (JOBSET_HEALTH, KUEUE_HEALTH):
            self._wait(90, "curl", "--silent", "--fail", f"http://127.0.0.1:{health}/readyz")
        self._kubectl(
            "apply",
            "--server-side",
            "--force-conflicts",
            "--filename",
            "-",
            stdin=yaml.safe_dump_all(webhooks),
        )

    # Nodes
    # ----------------------------------------------------------------------------------------------

    def _network(self) -> None:
        """The bridge of all pods, an address on it for each kubelet, and the DNS of services on the
        first."""
        _run("ip", "link", "add", BRIDGE, "type", "bridge")
        for number in range(1, len(NODES) + 1):
            _run("ip", "addr", "add", f"{NETWORK}.{number}/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        zone = (
            f"kubernetes cluster.local {{\n kubeconfig {self.kubeconfig} test\n pods insecure\n ttl"
            " 1\n }"
        )
        (self.directory / "Corefile").write_text(
            f".:53 {{\n bind {NETWORK}.1\n errors\n {zone}\n}}\n"
        )
        self._start("coredns", tool("coredns"), "-conf", str(self.directory / "Corefile"))

    def _node(self, number: int, node: str) -> None:
        """A containerd and a kubelet, in a mount namespace of their own."""
        from node_files import containerd_toml, kubelet_config, pod_network
        from pod_image import base_spec, write_image

        place = self.directory / node
        for name in ("root", "state", "cni", "tls"):
            (place / name).mkdir(parents=True)
        socket = place / "containerd.sock"
        (place / "spec.json").write_text(json.dumps(base_spec(ROOT)))
        (place / "containerd.toml").write_text(containerd_toml(place, socket))
        (place / "cni/10-pods.conflist").write_text(pod_network(place, BRIDGE, NETWORK, number))
        own_mounts = ("unshare", "--mount", "--propagation", "slave")
        containerd = self._start(
            f"containerd-{node}", *own_mounts, "containerd", "-c", f"{place}/containerd.toml"
        )
        self._wait(60, "ctr", "-a", str(socket), "version")
        for tag, command in (
            ("localhost/pause:1", ["/busybox", "sleep", "2147483647"]),
            (IMAGE, []),
        ):
            archive = place / "image.tar"
            write_image(archive, tag, command)
            _run(
                "ctr", "-a", str(socket), "--namespace", "k8s.io", "images", "import", str(archive)
            )
        group = cgroup(self.directory, node)
        _make_cgroups(group)
        self._signed.certificate(
            node, f"system:node:{node}", "system:nodes", f"IP:{NETWORK}.{number},DNS:{node}"
        )
        self._signed.kubeconfig(node, self.keys / f"{node}.kubeconfig")
        own = {
            "clusterDNS": [f"{NETWORK}.1"],
            "address": f"{NETWORK}.{number}",
            "port": KUBELET,
            "cgroupRoot": f"/{group}",
        }
        (place / "kubelet.yaml").write_text(kubelet_config(place, socket, self.keys, node, own))
        self._start(
            f"kubelet-{node}",
            *("nsenter", f"--mount=/proc/{containerd}/ns/mnt", "--"),
            *(
                tool("kubelet"),
                "--config",
                f"{place}/kubelet.yaml",
                "--root-dir",
                f"{place}/kubelet",
            ),
            *("--kubeconfig", f"{self.keys}/{node}.kubeconfig", "--hostname-override", node),
            *("--node-ip", f"{NETWORK}.{number}"),
        )


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)


def _make_cgroups(group: str) -> None:
    """The kubelet's own control groups (version 1); cpuset begins empty and must be filled."""
    root = Path("/sys/fs/cgroup")
    for name in (
        "cpu",
        "cpuacct",
        "cpuset",
        "memory",
        "devices",
        "freezer",
        "blkio",
        "pids",
        "systemd",
    ):
        if (root / name).is_dir():
            (root / name / group).mkdir(exist_ok=True)
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (root / "cpuset" / name).exists():
            (root / "cpuset" / group / name).write_text((root / "cpuset" / name).read_text())


@contextlib.contextmanager
def started(
    directory: Path, grace_seconds: int = GRACE_SECONDS, kueue: str = "kueue"
) -> Iterator[Cluster]:
    """A cluster for the length of a `with`."""
    cluster = Cluster(directory)
    cluster.start(grace_seconds, kueue)
    try:
        yield cluster
    finally:
        cluster.stop()


def main(arguments: Sequence[str]) -> None:
    """Start a cluster and keep it: inside, until the standard input ends; for a person, until
    Ctrl-C."""
    directory = Path(arguments[0]).resolve()
    if "--inside" in arguments:
        Inside(directory, grace_seconds=int(arguments[-2]), kueue=arguments[-1]).run()
        (directory / "ready").touch()
        sys.stdin.read()
        return
    try:
        with started(directory) as cluster:
            shell = cluster.enter("env", f"KUBECONFIG={cluster.kubeconfig}", "sh")
            print(f"ready; for example:\n  {' '.join(shell)}", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
    except (ValueError, OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
