"""An administrator of the test cluster, by the context that a GKE cluster has: runs `drillyard` and
the functions of `provision/kubernetes_stage.py` where the API server is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from tests.integration.kubernetes.cluster import Cluster, tool
from tests.integration.tiny_run import TIMEOUT_SECONDS

CONTEXT = "gke_p_us-central1_c"
_STAGE = """
import dataclasses, json, os, sys
from drillyard.config.load import load_cluster_config
from drillyard.errors import UserError
from drillyard.provision import kubernetes_stage as stage
from drillyard.provision.provisioner import plan_cluster
def plain(value):
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
def answer(expression, config, context):
    plan = plan_cluster(load_cluster_config(config)) if config else None
    names = {"plan": plan, "context": context or None, "said": []}
    names |= {"dataclasses": dataclasses, "stage": stage}
    try:
        found = eval(expression, names)
    except UserError as error:
        return {"refused": str(error), "said": names["said"]}
    made = [plain(each) for each in found] if isinstance(found, list) else plain(found)
    return {"found": made, "said": names["said"]}
for line in sys.stdin:
    asked = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    os.environ.update(asked["environment"])
    print(json.dumps(answer(asked["expression"], asked["config"], asked["context"])), flush=True)
"""


class Admin:
    """`directory` is where its files are."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.directory = cluster, directory
        kubeconfig = yaml.safe_load(cluster.kubeconfig.read_text())
        kubeconfig["contexts"][0]["name"] = CONTEXT
        kubeconfig["current-context"] = ""
        path = directory / "kubeconfig"
        path.write_text(yaml.safe_dump(kubeconfig))
        programs = directory / "bin"
        programs.mkdir()
        for name in ("helm", "kubectl"):
            (programs / name).symlink_to(tool(name))
        homes = {f"XDG_{name}_HOME": str(directory / name) for name in ("CONFIG", "STATE")}
        helm = {
            f"HELM_{name}_HOME": str(directory / "helm") for name in ("CACHE", "CONFIG", "DATA")
        }
        self.environment = {
            **os.environ,
            **homes,
            **helm,
            "KUBECONFIG": str(path),
            "KUBECACHEDIR": str(directory / "kube-cache"),
            "PATH": f"{programs}:{os.environ['PATH']}",
        }

    def run(self, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program where the API server is."""
        done = subprocess.run(
            self.cluster.enter(*argv),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            env=self.environment,
            cwd=self.directory,
        )
        said = f"{argv[-3:]}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert not check or done.returncode == 0, said
        return done

    def drillyard(self, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "drillyard", *map(str, arguments), check=check)

    def stage_process(self) -> subprocess.Popen[str]:
        """A process that answers expressions, one line each."""
        argv = (sys.executable, "-c", _STAGE)
        return subprocess.Popen(
            self.cluster.enter(*argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self.environment,
            cwd=self.directory,
            text=True,
        )

    @cached_property
    def _process(self) -> subprocess.Popen[str]:
        return self.stage_process()

    def close(self) -> None:
        """End the process that answers: its input ends."""
        self._process.communicate()

    def ask(
        self,
        process: subprocess.Popen[str],
        expression: str,
        config: Path | str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        """Give a process an expression of `stage`, `plan`, `context` and `said`, a list."""
        assert process.stdin is not None
        asked = {"expression": expression, "config": str(config), "context": CONTEXT}
        process.stdin.write(json.dumps({**asked, "environment": environment or {}}) + "\n")
        process.stdin.flush()

    def answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Its value as `found` or its error as `refused`, and the notices in `said`."""
        assert process.stdout is not None
        found: dict[str, Any] = json.loads(process.stdout.readline())
        return found

    def stage(self, expression: str, config: Path | str = "", **environment: str) -> dict[str, Any]:
        """The answer to an expression."""
        self.ask(self._process, expression, config, environment)
        return self.answer(self._process)

    def value(self, expression: str, config: Path | str = "", **environment: str) -> Any:
        """The value of an expression."""
        found = self.stage(expression, config, **environment)
        assert "found" in found, found
        return found["found"]
