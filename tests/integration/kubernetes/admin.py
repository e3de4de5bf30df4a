"""An administrator of the test cluster, by the context that a GKE cluster has: runs `drillyard` and
the functions of `provision/kubernetes_stage.py` where the API server is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from tests.integration.kubernetes.cluster import ROOT, Cluster, tool
from tests.integration.tiny_run import TIMEOUT_SECONDS

CONTEXT = "gke_p_us-central1_c"
_STAGE = """
import dataclasses, json, sys
from drillyard.config.load import load_cluster_config
from drillyard.errors import UserError
from drillyard.provision import kubernetes_stage as stage
from drillyard.provision.provisioner import plan_cluster
def plain(value):
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
plan = plan_cluster(load_cluster_config(sys.argv[1])) if sys.argv[1] else None
context = sys.argv[2] or None
try:
    found = eval(sys.argv[3])
except UserError as error:
    sys.exit(f"refused: {error}")
print(json.dumps([plain(each) for each in found] if isinstance(found, list) else plain(found)))
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
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
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

    def stage(self, expression: str, config: Path | str = "", context: str = CONTEXT) -> Any:
        """The value of an expression of `stage`, `plan` and `context`."""
        return json.loads(self.run(*self.stage_argv(expression, config, context)).stdout)

    def refused(self, expression: str, config: Path | str = "", context: str = CONTEXT) -> str:
        """The error that it ends with."""
        done = self.run(*self.stage_argv(expression, config, context), check=False)
        assert done.returncode == 1 and done.stderr.count("refused: ") == 1, done.stderr
        return done.stderr.partition("refused: ")[2]

    def stage_argv(
        self, expression: str, config: Path | str = "", context: str = CONTEXT
    ) -> tuple[str, ...]:
        return (sys.executable, "-c", _STAGE, str(config), context, expression)
