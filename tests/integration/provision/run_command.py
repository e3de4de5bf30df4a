"""`up` and `down` as a process of their own, with stages of the tests in place of Google's and
Kubernetes' services:

    python -m tests.integration.provision.run_command VERB CLUSTER.yaml STAGES.json [OPTION...]

VERB is up, down, or drift, which prints what `status` says of it.

STAGES.json: {"log": FILE, "findings": [...], "runs": [...], "unreachable": bool, "leaks": CODE,
"registry": ADDRESS, "request": {"state": STATE, "hosts": COUNT}};
each call of a stage appends a line to the log. What there is of a request is read again each time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from drillyard.cli.main import print_error
from drillyard.config.load import load_cluster_config
from drillyard.errors import UnreachableError, UserError
from drillyard.provision import made_hosts, node_request, slurm_stage
from drillyard.provision.cluster_chart import images_of
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.cluster_session import Request, Stages, command_line
from drillyard.provision.cluster_status import drift_from_engine
from drillyard.provision.down import DownOptions, take_down
from drillyard.provision.image_registry import image_digest
from drillyard.provision.made_hosts import MadeHost
from drillyard.provision.node_request import NodeRequest
from drillyard.provision.provisioner import plan_cluster
from drillyard.provision.running_command import Limits
from drillyard.provision.up import bring_up, launch_config


@dataclass
class TestStages:
    """Stages that log their calls and answer what the file says."""

    settings: dict[str, Any]

    def _log(self, *words: str) -> None:
        with open(self.settings["log"], "a", encoding="utf-8") as file:
            file.write(" ".join(words) + "\n")

    def check_project(self, plan: ClusterPlan) -> list[Any]:
        return [SimpleNamespace(**each) for each in self.settings.get("findings", [])]

    def find_leaks(self, plan: ClusterPlan, owned: frozenset[str]) -> Any:
        self._log("leaks", *sorted(owned))
        return SimpleNamespace(text="leaks", exit_code=self.settings.get("leaks", 0))

    def write_context(self, plan: ClusterPlan, cluster: Mapping[str, Any]) -> str:
        return f"context-{cluster['name']}"

    def require_programs(self, plan: ClusterPlan) -> None:
        pass

    remove_context = require_programs

    def write_login(self, plan: ClusterPlan, hosts: Sequence[MadeHost]) -> Path:
        self._log("login", *(each.name for each in hosts))
        return made_hosts.write_login(plan, hosts)

    def remove_login(self, plan: ClusterPlan) -> None:
        made_hosts.remove_login(plan)

    def node_request(self, plan: ClusterPlan, group: Mapping[str, Any]) -> NodeRequest:
        """The request of a group, whose machines are named after it."""
        now = json.loads(Path(sys.argv[3]).read_text(encoding="utf-8")).get("request", {})
        made = [f"{group['name']}-{number}" for number in range(now.get("hosts", 0))]
        zone, key = group["zone"].rpartition("/")[2], "google_compute_instance_group_manager.nodes"
        hosts = [MadeHost(key, each, zone, "10.0.0.2", "", f"9-{each}", "") for each in made]
        return NodeRequest(now.get("state", ""), now.get("why", ""), tuple(hosts), len(hosts))

    def running_on_hosts(self, plan: ClusterPlan, hosts: Sequence[MadeHost]) -> list[str]:
        self._log("ask", *(each.name for each in hosts))
        return self.running_workloads("")

    def running_jobs(self, plan: ClusterPlan) -> list[str]:
        self._log("jobs", plan.name)
        return self.running_workloads("")

    def login_settings(self, plan: ClusterPlan) -> Mapping[str, Any]:
        section = {**(plan.launch_settings or {})["slurm"]}
        if not section["login_host"].startswith("USER@"):
            # The config has the login, so no service is asked for it.
            return slurm_stage.login_settings(plan)
        section["login_host"] = "ann@c-login-001"
        return {"slurm": {**section, "directory": "/home/ann/project"}}

    def has_image(self, plan: ClusterPlan) -> bool:
        found: bool = self.settings.get("image", False)
        return found

    def remove_left(self, plan: ClusterPlan, kinds: Sequence[str]) -> list[str]:
        self._log("remove left", *kinds)
        return []

    def compare_existing(self, plan: ClusterPlan, context: str | None) -> Any:
        raise AssertionError(f"{plan.platform}: clusters of these tests are created")

    def install_releases(self, plan: ClusterPlan, context: str) -> None:
        images = [image for each in plan.releases for image in images_of(each.values)]
        self._log("install", context, *images)

    def image_digest(self, image: str) -> str:
        return image_digest(f"{self.settings['registry']}/{image}")

    def write_secret(self, context: str, name: str) -> str:
        self._log("secret", name)
        return f"drillyard/{name}"

    def running_workloads(self, context: str) -> list[str]:
        if self.settings.get("unreachable"):
            raise UnreachableError("the API server does not answer")
        found: list[str] = self.settings.get("runs", [])
        return found

    def delete_workloads(self, context: str) -> None:
        self._log("delete workloads", context)


def main() -> int:
    verb, config, stages, *options = sys.argv[1:]
    node_request.PAUSE_SECONDS = 0.05
    settings = json.loads(Path(stages).read_text(encoding="utf-8"))
    plan = plan_cluster(load_cluster_config(Path(config), resolve_environment=False))
    made = TestStages(settings)
    named = {name: getattr(made, name) for name in Stages.__dataclass_fields__}
    request = Request(
        plan,
        command_line(verb, config),
        command_line("down", config),
        yes="--yes" in options,
        unlock=options[options.index("--unlock") + 1] if "--unlock" in options else None,
        limits=Limits(**settings.get("limits", {})),
    )
    try:
        if verb == "drift":
            print("\n".join(drift_from_engine(plan)))
            return 0
        if verb == "up":
            secrets = ["HF_TOKEN"] if "--secret" in options else []
            cluster = bring_up(request, Stages(**named), secrets)
            if cluster.hosts:
                print(made_hosts.launch_text_of_hosts(plan, cluster.hosts, config), end="")
            else:
                print(launch_config(Path(config), plan, cluster).text, end="")
            return 0
        chosen = DownOptions("--delete-data" in options, "--ignore-runs" in options, 0.05)
        return take_down(request, Stages(**named), chosen)
    except UserError as error:
        print_error(str(error))
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
