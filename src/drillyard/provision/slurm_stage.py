"""The part of `up` and `down` that asks the cloud and the login node of a Slurm cluster: how one
logs in, which jobs go on, whether the image is there, and the removal of what Slurm's controller
made and no state has."""

from __future__ import annotations

import getpass
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from drillyard.errors import UnreachableError, UserError
from drillyard.programs import Host, Programs, require_success
from drillyard.provision.cluster_plan import ClusterPlan
from drillyard.provision.google.api import ApiError, GoogleApis, google_apis
from drillyard.provision.google.leaks import find_leaks
from drillyard.provision.google.resource_marks import plain_kind, region_of
from drillyard.provision.leak_report import Leak, kind_title
from drillyard.provision.made_hosts import CONFIG, KNOWN_HOSTS, ssh_directory
from drillyard.safe_files import replace_file

_NEEDED = {
    "terraform": "https://developer.hashicorp.com/terraform/install",
    "packer": "https://developer.hashicorp.com/packer/install",
    "gcloud": "https://cloud.google.com/sdk/docs/install",
    "ssh": "apt-get install openssh-client",
}
"""Programs that gcluster starts, or by which the login node is reached, and where they are from."""
_COLLECTIONS = {
    "google_compute_instance_group_manager": ("instanceGroupManagers", "instanceGroupManager"),
    "google_compute_instance": ("instances", "instance"),
    "google_compute_disk": ("disks", "disk"),
    "google_compute_resource_policy": ("resourcePolicies", "resourcePolicy"),
    "google_compute_image": ("images", "image"),
}
"""Of each kind: the collection of the API, and the parameter that names one."""
_GROUPS = "instanceGroupManagers"
_WAITING = ("ACCEPTED", "CREATING")
_USER = "USER@"
_SQUEUE = ("squeue", "--noheader", "--all", "--format=%i|%u|%j")
_SECONDS = 60.0
_DELETE_SECONDS = 1800.0


def require_programs(plan: ClusterPlan) -> None:
    """Raise UserError where a program is missing that makes the cluster or reaches it."""
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        raise UserError(
            "\n".join(f"{name}: is not installed: {_NEEDED[name]}" for name in missing)
            + "\nNothing was changed."
        )


def login_settings(plan: ClusterPlan) -> Mapping[str, Any]:
    """The plan's settings for `launch`, with the login that the project's OS Login has for the
    user, where the config has none; writes the ssh configuration. Raises UserError."""
    settings = {key: dict(value) for key, value in (plan.launch_settings or {}).items()}
    section = settings[plan.platform]
    if section["login_host"].startswith(_USER):
        section["login_host"] = section["login_host"].replace(_USER, f"{_login_of(plan)}@", 1)
    user, named, _ = section["login_host"].rpartition("@")
    # As ssh does where the login names no user.
    user = user if named else getpass.getuser()
    section["directory"] = section["directory"].replace("/USER/", f"/{user}/", 1)
    if section["config_file"] == "ssh_config":
        assert plan.toolkit is not None
        path = ssh_directory(plan) / CONFIG
        path.parent.mkdir(parents=True, exist_ok=True)
        # Keys go with the cluster: the next one of this name has others.
        text = plan.toolkit.files["ssh_config"][0]
        text += f'    UserKnownHostsFile "{path.with_name(KNOWN_HOSTS)}"\n'
        replace_file(path, text.encode(), mode=0o600)
        section["config_file"] = str(path)
    return settings


def _login_of(plan: ClusterPlan) -> str:
    """The user's name on the nodes
    (https://cloud.google.com/compute/docs/oslogin/rest/v1/users/getLoginProfile)."""
    apis = google_apis(plan.project)
    account = (apis.account() or "").partition(":")[2]
    why, profile = "the account of this machine's credentials is not known", dict[str, Any]()
    if account:
        why = f"{account} has no profile there"
        try:
            profile = apis.call("oslogin", "users.getLoginProfile", name=f"users/{account}")
        except ApiError as error:
            why = str(error)
    accounts = list(profile.get("posixAccounts") or ())
    accounts.sort(key=lambda each: not each.get("primary"))
    if not accounts:
        host = (plan.launch_settings or {})[plan.platform]["login_host"].removeprefix(_USER)
        raise UserError(
            f"slurm.login_host: missing, and OS Login has no name for you ({why})\nFind it: gcloud"
            " compute os-login describe-profile --format='value(posixAccounts[0].username)', then"
            f" write slurm: {{login_host: YOU@{host}}}"
        )
    return str(accounts[0]["username"])


def running_jobs(plan: ClusterPlan) -> list[str]:
    """The jobs of any user that Slurm has queued or runs: id, user and name. Raises UserError where
    the login node does not say."""
    section = login_settings(plan)[plan.platform]
    host = Host(section["login_host"], config_file=section["config_file"])
    result = Programs().run(host.argv(list(_SQUEUE)), timeout=_SECONDS)
    require_success(result, f"{section['login_host']}: the queue cannot be read")
    rows = [line.split("|", 2) for line in result.stdout.splitlines() if line.count("|") >= 2]
    return [f"job {number} of {user} ({name})" for number, user, name in rows]


def has_image(plan: ClusterPlan) -> bool:
    """Whether the family of the plan's image has one. Raises UserError."""
    family = next(each.name for each in plan.resources if each.kind == "google_compute_image")
    try:
        google_apis(plan.project).call(
            "compute", "images.getFromFamily", project=plan.project, family=family.split(" ")[0]
        )
    except ApiError as error:
        if error.refusal == "absent":
            return False
        raise
    return True


def remove_left(plan: ClusterPlan, kinds: Collection[str]) -> list[str]:
    """Delete what the cluster has of these kinds, as `leaks` finds it; what was deleted. Requests
    for nodes are cancelled with their group. Raises UserError."""
    apis = google_apis(plan.project)
    order = list(_COLLECTIONS)
    found = [each for each in find_leaks(plan, apis).leaks if plain_kind(each.kind) in kinds]
    removed = []
    for leak in sorted(found, key=lambda each: order.index(plain_kind(each.kind))):
        if _delete(apis, leak):
            removed.append(f"{kind_title(leak.kind)} {leak.name}")
    return removed


def _delete(apis: GoogleApis, leak: Leak) -> bool:
    """Delete one and wait until it is gone; False where it was gone already."""
    collection, parameter = _COLLECTIONS[plain_kind(leak.kind)]
    names = {"project": apis.project, parameter: leak.name, **_place(leak.location)}
    method = collection
    if collection == _GROUPS:
        method = "regionInstanceGroupManagers" if "region" in names else collection
        _cancel_requests(apis, f"{method.removesuffix('s')}ResizeRequests", names)
    try:
        apis.call("compute", f"{method}.delete", **names)
    except ApiError as error:
        if error.refusal == "absent":
            return False
        raise
    _wait(lambda: apis.call("compute", f"{method}.get", **names), leak)
    return True


def _cancel_requests(apis: GoogleApis, method: str, names: Mapping[str, Any]) -> None:
    """Cancel the requests of a group that still wait for nodes."""
    for page in apis.pages("compute", f"{method}.list", **names):
        for each in page.get("items") or ():
            if each.get("state") in _WAITING:
                apis.call("compute", f"{method}.cancel", **names, resizeRequest=each["name"])


def _place(location: str) -> dict[str, str]:
    if not location:
        return {}
    return {"zone" if region_of(location) != location else "region": location}


def _wait(get: Callable[[], object], leak: Leak) -> None:
    """Until the thing is gone: what it uses can be deleted only then."""
    deadline, pause = time.monotonic() + _DELETE_SECONDS, 0.1
    while time.monotonic() < deadline:
        try:
            get()
        except ApiError as error:
            if error.refusal == "absent":
                return
            raise
        time.sleep(pause)
        pause = min(2 * pause, 10.0)
    raise UnreachableError(f"{leak.name}: is not gone after {_DELETE_SECONDS:.0f} s")
