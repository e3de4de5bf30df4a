"""A cloud project whose parts agree, for the commands as a user types them: what Terraform makes in
the provider is at Google's APIs, and its buckets are the bucket server's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.integration.provision import made_at_google
from tests.integration.provision.made_at_google import REGION, MadeAtGoogle
from tests.integration.provision.project import Project
from tests.unit.provision.google.google_cloud import PROJECT, GoogleCloud, LocalServer


class ProjectAtGoogle(Project):
    """`settings`: of cluster.yaml, over a small cluster's."""

    state_bucket = f"{PROJECT}-c-tfstate"

    def __init__(self, directory: Path, **settings: Any) -> None:
        place = {"project": PROJECT, "region": REGION, "zone": f"{REGION}-b"}
        super().__init__(directory, location=place, **settings)
        self.google = GoogleCloud(page_size=60)
        self._at_google = MadeAtGoogle(self.google)
        self._server = LocalServer()
        self._server.serve(self.google)
        self.cloud.on_change = self._joined
        self.cloud.computed = self._computed
        homes = {f"XDG_{name}_HOME": str(directory / name) for name in ("CONFIG", "STATE")}
        self.environment |= {**homes, "DRILLYARD_GOOGLE_ENDPOINT": self._server.address}
        self._ready()

    def close(self) -> None:
        super().close()
        self._server.stop()

    def _command(self, verb: str) -> list[str]:
        return [sys.executable, "-m", "drillyard", "cluster", verb, str(self.config)]

    def leaks(self) -> dict[str, Any]:
        """What `leaks --json` prints; its exit code is in it."""
        ended = self.run("leaks", "--json")
        found: dict[str, Any] = json.loads(ended.stdout)
        assert ended.returncode == found["exit_code"], ended.stderr
        return found

    def require_nothing(self) -> None:
        super().require_nothing()
        assert list(self.google.things) == self._others and self.google.bindings == []

    def _joined(self, verb: str, kind: str, value: dict[str, Any]) -> str | None:
        if kind == "google_storage_bucket":
            return self._storage(verb, kind, value)
        return self._at_google.change(verb, kind, value)

    def _computed(self, kind: str, value: dict[str, Any]) -> dict[str, Any]:
        return made_at_google.computed(kind, value)

    def _ready(self) -> None:
        """What the checks of `up` ask for: machines, quotas and versions."""
        plan = self.plan
        for pool in plan.pools:
            zone = f"zones/{pool.zone}"
            self.google.add("compute", f"{zone}/machineTypes/{pool.machine.name}")
            kind = pool.machine.accelerator_type
            self.google.add("compute", f"{zone}/acceleratorTypes/{kind}")
        for quota in plan.quotas:
            limit = {"effectiveLimit": "-1", "dimensions": quota.dimensions}
            if quota.dimensions:
                buckets = [{**limit, "dimensions": {**quota.dimensions, "region": quota.region}}]
                self.google.quota_metrics[f"compute.googleapis.com/{quota.metric.lower()}"] = {
                    "consumerQuotaLimits": [{"quotaBuckets": buckets}]
                }
            else:
                metric = {"metric": quota.metric, "limit": quota.amount, "usage": 0.0}
                self.google.quotas.setdefault(quota.region or "global", []).append(metric)
        version = {"defaultVersion": "1.35.2-gke.100", "validVersions": ["1.35.2-gke.100"]}
        self.google.server_config = {"channels": [{"channel": "REGULAR", **version}]}
        self.google.add("compute", f"global/networkProfiles/{REGION}-b-vpc-roce")
        self._others = list(self.google.things)
