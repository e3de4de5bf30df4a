"""Whether a VPC of the user's, also a shared one, has what a cluster needs (`cluster.network`).

Firewall rules are those in effect, of the VPC and of policies. A rule that lets something in counts
where it holds for all machines; one that keeps it out is not looked for. Rights of others are
looked for in the policies of subnet and host project; one that a group or a folder grants is not
seen, so what is missing there is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from ipaddress import IPv4Network
from typing import Any

from drillyard.hardware.cloud_limits import limit
from drillyard.provision.cluster_plan import ClusterPlan, ExistingNetwork
from drillyard.provision.gcp.node_network import PEERING
from drillyard.provision.google.api import ApiError, GoogleApis
from drillyard.provision.google.findings import known
from drillyard.provision.project_findings import ProjectFinding

_USE, _USE_OUTSIDE = "compute.subnetworks.use", "compute.subnetworks.useExternalIp"
_USER_ROLES = (
    *("roles/compute.networkUser", "roles/compute.networkAdmin", "roles/compute.instanceAdmin.v1"),
    *("roles/compute.admin", "roles/editor", "roles/owner"),
)
"""Roles that may use a subnet (https://cloud.google.com/compute/docs/access/iam)."""
_AGENT_ROLES = ("roles/container.hostServiceAgentUser",)
_PROTOCOLS = ("tcp", "udp", "icmp")
_GKE_RULES = 8
"""What GKE makes of its own in the VPC of a cluster
(https://cloud.google.com/kubernetes-engine/docs/concepts/firewall-rules)."""


def check_network(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    """What of the user's VPC is missing, or too small."""
    network = plan.network
    if network is None:
        return
    if network.project != plan.project:
        key = "cluster.network.project"
        check = partial(_attached, plan, apis, key, network.project)
        yield from known("host of the shared VPC", check)
    vpc = _get(
        apis, "networks.get", project=network.project, network=network.name, what=network.path
    )
    if isinstance(vpc, ProjectFinding):
        yield vpc
        return
    subnet = _get(
        apis,
        "subnetworks.get",
        project=network.project,
        region=network.region,
        subnetwork=network.subnet,
        what=network.subnet_path,
    )
    yield from _of_vpc(network, vpc)
    if isinstance(subnet, ProjectFinding):
        yield subnet
        return
    yield from _of_subnet(plan, network, subnet)
    yield from known("rights on the subnet", partial(_own_rights, network, apis))
    if network.users or network.agents:
        yield from known("rights of others on the subnet", partial(_others, network, apis))
    if network.private_nodes:
        yield from known("NAT of the subnet", partial(_nat, network, apis))
    if network.own_firewall:
        cidr = str(subnet.get("ipCidrRange"))
        yield from known("firewall rules", partial(_firewall, network, cidr, apis))
    elif network.project != plan.project:
        yield from known("quota of firewall rules", partial(_rules_quota, network, apis))


def check_job_network(plan: ClusterPlan, apis: GoogleApis) -> Iterator[ProjectFinding]:
    """What is missing of the VPC of the user's that jobs of a service use."""
    if not plan.job_network:
        return
    _, host, _, _, name = plan.job_network.split("/")
    try:
        vpc = apis.call("compute", "networks.get", project=host, network=name)
    except ApiError as error:
        if error.refusal != "absent":
            raise
        yield ProjectFinding(
            "error",
            f"vertex.network: there is no {plan.job_network}",
            f"gcloud compute networks list --project={host}",
        )
        return
    if PEERING not in [each.get("name") for each in vpc.get("peerings") or ()]:
        yield ProjectFinding(
            "error",
            f"vertex.network: {name} has no private services access, by which jobs are in it",
            "gcloud services vpc-peerings connect --service=servicenetworking.googleapis.com"
            f" --network={name} --project={host} --ranges=RANGE",
        )
    number = apis.number()
    if number is None or host in (number, plan.project):
        return
    shared = str(vpc.get("selfLink")).partition("/projects/")[2].partition("/")[0] or host
    yield from _attached(plan, apis, "vertex.network", shared)


def _get(
    apis: GoogleApis, method: str, *, what: str, **parameters: str
) -> Mapping[str, Any] | ProjectFinding:
    try:
        return apis.call("compute", method, **parameters)
    except ApiError as error:
        if error.refusal == "absent":
            listed = "networks" if method == "networks.get" else "networks subnets"
            return ProjectFinding(
                "error",
                f"cluster.network: there is no {what}",
                f"gcloud compute {listed} list --project={parameters['project']}",
            )
        return ProjectFinding("unknown", f"cluster.network: {what}: {error}")


def _attached(plan: ClusterPlan, apis: GoogleApis, key: str, host: str) -> Iterator[ProjectFinding]:
    """The project is attached to the host: else nothing of it can be in a VPC there."""
    found = apis.call("compute", "projects.getXpnHost", project=plan.project).get("name")
    if found != host:
        attached = f"is attached to {found}" if found else "is attached to no host project"
        yield ProjectFinding(
            "error",
            f"{key}: {plan.project} {attached}, not to {host}",
            f"gcloud compute shared-vpc associated-projects add {plan.project}"
            f" --host-project={host}",
        )


def _of_vpc(network: ExistingNetwork, vpc: Mapping[str, Any]) -> Iterator[ProjectFinding]:
    peerings = [each.get("name") for each in vpc.get("peerings") or ()]
    if network.needs_peering and PEERING not in peerings:
        yield ProjectFinding(
            "error",
            f"cluster.network: {network.name} has no private services access, by which /home is"
            " reached",
            "gcloud services vpc-peerings connect --service=servicenetworking.googleapis.com"
            f" --network={network.name} --project={network.project} --ranges=RANGE",
        )
    # The default of Compute Engine (https://cloud.google.com/vpc/docs/mtu).
    mtu = int(vpc.get("mtu") or 1460)
    if mtu < network.mtu:
        yield ProjectFinding(
            "warning",
            f"cluster.network: {network.name} has an MTU of {mtu}; with {network.mtu} storage and"
            " logs are faster, data NICs are the same",
        )


def _of_subnet(
    plan: ClusterPlan, network: ExistingNetwork, subnet: Mapping[str, Any]
) -> Iterator[ProjectFinding]:
    look = (
        f"gcloud compute networks subnets describe {network.subnet} --region={network.region}"
        f" --project={network.project}"
    )
    if (vpc := str(subnet.get("network")).rpartition("/")[2]) != network.name:
        yield ProjectFinding(
            "error", f"cluster.network.subnet: {network.subnet} is one of {vpc}", look
        )
        return
    if network.private_nodes and not subnet.get("privateIpGoogleAccess"):
        yield ProjectFinding(
            "error",
            f"cluster.network.subnet: {network.subnet} has no Private Google Access, without which"
            " nodes do not reach Google's services",
            f"gcloud compute networks subnets update {network.subnet} --region={network.region}"
            f" --project={network.project} --enable-private-ip-google-access",
        )
    given = [("the nodes", str(subnet.get("ipCidrRange")), network.addresses)]
    listed = {
        str(each.get("rangeName")): str(each.get("ipCidrRange"))
        for each in subnet.get("secondaryIpRanges") or ()
    }
    for name, needed in network.ranges.items():
        if name in listed:
            given.append((f"secondary range {name}", listed[name], needed))
            continue
        has = ", ".join(sorted(listed)) or "none"
        yield ProjectFinding(
            "error", f"cluster.network: {network.subnet} has no secondary range {name}: {has}", look
        )
    kept = limit("addresses-kept-of-a-subnet").least or 0
    for what, text, needed in given:
        cidr = IPv4Network(text)
        free = cidr.num_addresses - (kept if what == "the nodes" else 0)
        if free < needed:
            yield ProjectFinding(
                "error",
                f"cluster.network.subnet: {cidr} of {network.subnet} has {free} addresses, and"
                f" {what} need {needed}",
                "take another subnet, fewer nodes, or a smaller cluster.max_pods_per_node",
            )
        for name, own in _own_ranges(plan).items():
            if cidr.overlaps(own):
                yield ProjectFinding(
                    "error",
                    f"cluster.ranges.data: {own} of {name} overlaps {cidr} of {network.subnet}; a"
                    " node cannot have NICs in both",
                    "set cluster.ranges.data to a range that nothing has",
                )


def _own_ranges(plan: ClusterPlan) -> dict[str, IPv4Network]:
    """The ranges of the data NICs' subnets, which the cluster makes."""
    subnets = plan.terraform.get("resource", {}).get("google_compute_subnetwork", {}).values()
    found = {str(each["name"]): str(each["ip_cidr_range"]) for each in subnets}
    if plan.toolkit is not None:
        found.update(plan.toolkit.ranges)
    return {name: IPv4Network(text) for name, text in found.items()}


def _own_rights(network: ExistingNetwork, apis: GoogleApis) -> Iterator[ProjectFinding]:
    wanted = [_USE, *([] if network.private_nodes else [_USE_OUTSIDE])]
    body = apis.call(
        "compute",
        "subnetworks.testIamPermissions",
        project=network.project,
        region=network.region,
        resource=network.subnet,
        body={"permissions": wanted},
    )
    lacking = [each for each in wanted if each not in (body.get("permissions") or ())]
    if lacking:
        member = apis.account() or "user:EMAIL"
        yield ProjectFinding(
            "error",
            f"cluster.network: {member} lacks {', '.join(lacking)} on {network.subnet_path}",
            _grant(network, member),
        )


def _others(network: ExistingNetwork, apis: GoogleApis) -> Iterator[ProjectFinding]:
    number = apis.number()
    host = apis.call(
        "cloudresourcemanager", "projects.getIamPolicy", resource=f"projects/{network.project}"
    )
    of_subnet = apis.call(
        "compute",
        "subnetworks.getIamPolicy",
        project=network.project,
        region=network.region,
        resource=network.subnet,
    )
    for user in network.users:
        member = user.format(number=number)
        if not _has_role(member, _USER_ROLES, host, of_subnet):
            yield ProjectFinding(
                "warning",
                f"cluster.network: {member} is not among those who may use {network.subnet_path}",
                _grant(network, member),
            )
    for agent in network.agents:
        member = agent.format(number=number)
        if not _has_role(member, _AGENT_ROLES, host):
            yield ProjectFinding(
                "warning",
                f"cluster.network: {member} lacks {_AGENT_ROLES[0]} on {network.project}, with"
                " which GKE manages a cluster in a shared VPC",
                f"gcloud projects add-iam-policy-binding {network.project} --member={member}"
                f" --role={_AGENT_ROLES[0]} --condition=None",
            )


def _has_role(member: str, roles: Sequence[str], *policies: Mapping[str, Any]) -> bool:
    return any(
        binding.get("role") in roles and member in (binding.get("members") or ())
        for policy in policies
        for binding in policy.get("bindings") or ()
    )


def _grant(network: ExistingNetwork, member: str) -> str:
    return (
        f"gcloud compute networks subnets add-iam-policy-binding {network.subnet}"
        f" --project={network.project} --region={network.region} --member={member}"
        " --role=roles/compute.networkUser"
    )


def _nat(network: ExistingNetwork, apis: GoogleApis) -> Iterator[ProjectFinding]:
    for page in apis.pages(
        "compute", "routers.list", project=network.project, region=network.region
    ):
        for router in page.get("items") or ():
            of_vpc = str(router.get("network")).rpartition("/")[2] == network.name
            if of_vpc and any(_covers(nat, network.subnet) for nat in router.get("nats") or ()):
                return
    yield ProjectFinding(
        "warning",
        f"cluster.network: no Cloud NAT of {network.name} in {network.region} covers"
        f" {network.subnet}; without another way to the internet nodes reach no hub and no package"
        " index",
        f"gcloud compute routers list --project={network.project} --regions={network.region}",
    )


def _covers(nat: Mapping[str, Any], subnet: str) -> bool:
    if nat.get("sourceSubnetworkIpRangesToNat") != "LIST_OF_SUBNETWORKS":
        return True
    names = [str(each.get("name")).rpartition("/")[2] for each in nat.get("subnetworks") or ()]
    return subnet in names


def _firewall(network: ExistingNetwork, cidr: str, apis: GoogleApis) -> Iterator[ProjectFinding]:
    found = apis.call(
        "compute",
        "networks.getEffectiveFirewalls",
        project=network.project,
        network=network.name,
    )
    rules = [*_allowed(found)]
    create = f"gcloud compute firewall-rules create NAME --project={network.project}"
    create += f" --network={network.name} --direction=INGRESS"
    lacking = [
        each
        for each in _PROTOCOLS
        if not any(_lets_in(rule, cidr, each, "1-65535") for rule in rules)
    ]
    if lacking:
        yield ProjectFinding(
            "warning",
            f"cluster.network: no rule of {network.name} lets nodes of {cidr} reach each other by"
            f" {', '.join(lacking)}; a run on several of them does not start",
            f"{create} --source-ranges={cidr} --allow={','.join(_PROTOCOLS)}",
        )
    for source in network.ssh_from:
        if not any(_lets_in(rule, source, "tcp", "22") for rule in rules):
            yield ProjectFinding(
                "warning",
                f"cluster.network: no rule of {network.name} lets {source} reach port 22 of the"
                " nodes, so nobody can log in",
                f"{create} --source-ranges={source} --allow=tcp:22",
            )


def _allowed(found: Mapping[str, Any]) -> Iterator[tuple[list[str], str, list[str]]]:
    """Source ranges, protocol and ports of each rule that lets something in, for all machines."""
    for rule in found.get("firewalls") or ():
        narrowed = any(
            rule.get(key)
            for key in ("targetTags", "targetServiceAccounts", "sourceTags", "disabled")
        )
        if rule.get("direction", "INGRESS") != "INGRESS" or narrowed:
            continue
        for each in rule.get("allowed") or ():
            yield rule.get("sourceRanges") or [], str(each.get("IPProtocol")), each.get("ports", [])
    for policy in found.get("firewallPolicys") or ():
        for rule in policy.get("rules") or ():
            match = rule.get("match") or {}
            narrowed = any(
                rule.get(key) for key in ("targetSecureTags", "targetServiceAccounts", "disabled")
            )
            if rule.get("action") != "allow" or rule.get("direction") != "INGRESS" or narrowed:
                continue
            for each in match.get("layer4Configs") or ():
                ports = each.get("ports", [])
                yield match.get("srcIpRanges") or [], str(each.get("ipProtocol")), ports


def _lets_in(rule: tuple[list[str], str, list[str]], source: str, protocol: str, port: str) -> bool:
    sources, allowed, ports = rule
    if allowed not in (protocol, "all") or not any(_within(source, each) for each in sources):
        return False
    first, _, last = port.partition("-")
    return not ports or any(
        int(begin) <= int(first) and int(last or first) <= int(end or begin)
        for begin, _, end in (each.partition("-") for each in ports)
    )


def _within(source: str, wider: str) -> bool:
    return ":" not in wider and IPv4Network(source).subnet_of(IPv4Network(wider))


def _rules_quota(network: ExistingNetwork, apis: GoogleApis) -> Iterator[ProjectFinding]:
    """GKE's rules for the cluster are made in the host project."""
    body = apis.call("compute", "projects.get", project=network.project)
    for each in body.get("quotas") or ():
        free = float(each.get("limit") or 0) - float(each.get("usage") or 0)
        if each.get("metric") == "FIREWALLS" and free < _GKE_RULES:
            yield ProjectFinding(
                "error",
                f"quota FIREWALLS (global) of {network.project}: {free:,.0f} are free, and GKE"
                f" makes up to {_GKE_RULES} for a cluster in its VPC",
                f"https://console.cloud.google.com/iam-admin/quotas?project={network.project}",
            )
