"""Google Cloud, for `up`, `down`, `status`, `leaks` and `plan --check`."""

from __future__ import annotations

from drillyard.hardware.catalog import Catalog
from drillyard.provision.adoption import google_import_id
from drillyard.provision.clouds import Cloud
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google import api
from drillyard.provision.google.state_bucket import DataBuckets, GoogleStateBucket
from drillyard.provision.leak_report import LeakReport
from drillyard.provision.project_findings import ProjectFinding
from drillyard.provision.provider_errors import KINDS


def _check_project(plan: ClusterPlan) -> list[ProjectFinding]:
    from drillyard.provision.google.preflight import check_project

    return check_project(plan, api.google_apis(plan.project))


def _find_leaks(plan: ClusterPlan, owned: frozenset[str], facts: Catalog) -> LeakReport:
    from drillyard.provision.google.leaks import find_leaks

    return find_leaks(plan, api.google_apis(plan.project), owned, facts)


def _owned_by_state(plan: ClusterPlan) -> frozenset[str]:
    from drillyard.provision.google.terraform_state import owned_by_state

    return owned_by_state(plan, api.google_apis(plan.project))


CLOUD = Cloud(
    state_bucket=GoogleStateBucket,
    data_stores=DataBuckets,
    check_project=_check_project,
    find_leaks=_find_leaks,
    owned_by_state=_owned_by_state,
    import_id=google_import_id,
    provider_environment=dict,
    error_kinds=KINDS,
)
