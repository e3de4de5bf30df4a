"""What a cluster that somebody else has made (platform `kubernetes`) has of what our chart
installs: what is ours, what is somebody else's and is used as it is, what will be added, and what
conflicts.

The chart itself says what it installs: it is rendered, and each object looked up. An object is ours
if Helm's annotations or the installed release say so. Everything else of that name is never changed
or taken over: a run can use it, and then the chart leaves it out (values `existing` and
`pools[].clusterQueue`), or it cannot, and `up` is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from drillyard.errors import UserError
from drillyard.programs import Programs
from drillyard.provision.cluster_chart import OWN_CHART
from drillyard.provision.cluster_plan import ChartRelease, ClusterPlan
from drillyard.provision.foreign_queues import queue_fit
from drillyard.provision.helm_releases import (
    Helm,
    age_problem,
    installed_objects,
    is_foreign,
    own_release,
    records,
    rendered_objects,
    require_own_cluster,
)

if TYPE_CHECKING:
    from drillyard.launch.kubernetes.cluster_api import ApiServer

State = Literal["ours", "used", "add", "missing", "conflict"]
Key = tuple[str, str, str]
"""Kind, namespace (empty: in none) and name."""
Object = Mapping[str, Any]
_MARK = "meta.helm.sh/release"
"""Of the annotations by which Helm knows an object of a release."""
LEVEL = "pod-security.kubernetes.io/enforce"
_CORE, _RBAC, _KUEUE = "/api/v1", "/apis/rbac.authorization.k8s.io/v1", ""
_PLACES = {
    "Namespace": (_CORE, "namespaces"),
    "ServiceAccount": (_CORE, "serviceaccounts"),
    "Role": (_RBAC, "roles"),
    "ResourceFlavor": (_KUEUE, "resourceflavors"),
    "ClusterQueue": (_KUEUE, "clusterqueues"),
    "LocalQueue": (_KUEUE, "localqueues"),
    "WorkloadPriorityClass": (_KUEUE, "workloadpriorityclasses"),
}
"""Group and plural of the kinds that the chart has for such a cluster; empty: Kueue's group."""


@dataclass(frozen=True)
class ObjectState:
    """An object, or a Helm release: `ours` (installed by an earlier `up`), `used` (somebody else's,
    and it fits), `add`, `missing` (the file names it, so the user makes it), `conflict`."""

    kind: str
    name: str
    """NAMESPACE/NAME where it is in one."""
    state: State
    why: str = ""

    @property
    def text(self) -> str:
        return f"{self.kind} {self.name}: {self.why}"


@dataclass(frozen=True)
class ComparedCluster:
    """The plan of what is to be installed, and the state of every object."""

    plan: ClusterPlan
    states: tuple[ObjectState, ...]

    @property
    def refusals(self) -> list[str]:
        """What keeps `up` from completing the cluster, one line each."""
        return [each.text for each in self.states if each.state in ("missing", "conflict")]


def compare_existing(
    plan: ClusterPlan, context: str | None, *, programs: Programs | None = None
) -> ComparedCluster:
    """Compare the plan with the cluster that a context reaches. Raises UserError where the cluster
    cannot be asked, or Helm is missing."""
    from drillyard.launch.kubernetes.cluster_api import ApiServer

    api, helm = ApiServer(context), Helm(context, programs or Programs())
    release = own_release(plan.releases)
    releases = [_release_state(api, helm, each) for each in plan.releases]
    installed = installed_objects(helm, release) if records(api, release) else []
    mine = {key_of(each) for each in installed}
    wanted = {key_of(each): each for each in rendered_objects(helm, release, _kueue(api))}

    def find(key: Key) -> Object | None:
        return api.one(_path(api, key))

    found = {key: find(key) for key in wanted}
    unmarked = {
        key: body
        for key, body in found.items()
        if body is not None and not _is_annotated(body, release)
    }
    # Helm would change it, and delete it where it is left out.
    lost = [_lost(key, release) for key in unmarked if key in mine]
    foreign = {key: body for key, body in unmarked.items() if key not in mine}
    values, states = adapted(release.values, foreign, find)
    states += lost
    adapted_release = replace(release, values=values)
    named = {(each.kind, each.name) for each in states}
    for each in rendered_objects(helm, adapted_release, _kueue(api)):
        key = key_of(each)
        if (key[0], shown(key)) not in named:
            states.append(ObjectState(key[0], shown(key), "ours" if found[key] else "add"))
    own = [adapted_release if each is release else each for each in plan.releases]
    return ComparedCluster(replace(plan, releases=tuple(own)), (*releases, *states))


def adapted(
    values: Mapping[str, Any],
    foreign: Mapping[Key, Object],
    find: Callable[[Key], Object | None],
) -> tuple[dict[str, Any], list[ObjectState]]:
    """The values of the chart that leave out what of `foreign`, the objects of others among those
    that it would make, can be used; and the state of each of them. `find` looks up an object."""
    states = [*_namespaces(values, foreign, find), *_accounts(values, foreign, find)]
    pools = []
    for pool in values["pools"]:
        queue, rows = _queue_of(pool, values["namespaces"], foreign, find)
        states += rows
        pools.append({**pool, "clusterQueue": queue} if queue else pool)
        if not queue:
            states += _flavor(pool, foreign)
    for (kind, namespace, name), body in foreign.items():
        if kind == "Role":
            states.append(_used(kind, f"{namespace}/{name}", "its rights stay as they are"))
        if kind == "WorkloadPriorityClass":
            states.append(_used(kind, name, f"its value stays {body.get('value')}"))
    taken = [f"{each.kind}/{each.name}" for each in states if each.state == "used"]
    existing = [each for each in taken if not each.startswith("ClusterQueue/")]
    return {**values, "pools": pools, "existing": existing}, states


def level_of(namespace: Object) -> str:
    """The level of Pod Security that a namespace enforces; one without the label, all pods."""
    labels = namespace["metadata"].get("labels") or {}
    return str(labels.get(LEVEL) or "privileged")


def _namespaces(
    values: Mapping[str, Any],
    foreign: Mapping[Key, Object],
    find: Callable[[Key], Object | None],
) -> Iterator[ObjectState]:
    for row in values["namespaces"]:
        name, key = row["name"], ("Namespace", "", row["name"])
        body = foreign.get(key) if row["create"] else find(key)
        if body is None:
            if not row["create"]:
                yield ObjectState(
                    "Namespace", name, "missing", f"make it: kubectl create namespace {name}"
                )
        elif body["metadata"].get("deletionTimestamp"):
            yield ObjectState("Namespace", name, "conflict", "is being deleted: wait until it is")
        elif row["create"] and row["level"] == "privileged" != level_of(body):
            yield ObjectState(
                "Namespace",
                name,
                "conflict",
                f"is not Drillyard's, and its level of Pod Security, {level_of(body)}, does not"
                " take what its runs need: name another one by kubernetes.namespace",
            )
        else:
            yield _used("Namespace", name, f"its level of Pod Security stays {level_of(body)}")


def _accounts(
    values: Mapping[str, Any],
    foreign: Mapping[Key, Object],
    find: Callable[[Key], Object | None],
) -> Iterator[ObjectState]:
    account, create = values["serviceAccount"]["name"], values["serviceAccount"]["create"]
    for row in values["namespaces"]:
        key = ("ServiceAccount", row["name"], account)
        if key in foreign or (not create and find(key) is not None):
            yield _used("ServiceAccount", shown(key), "stays as it is")
        elif not create and account != "default":
            command = f"kubectl -n {row['name']} create serviceaccount {account}"
            yield ObjectState("ServiceAccount", shown(key), "missing", f"make it: {command}")


def _queue_of(
    pool: Mapping[str, Any],
    namespaces: Sequence[Mapping[str, Any]],
    foreign: Mapping[Key, Object],
    find: Callable[[Key], Object | None],
) -> tuple[str, list[ObjectState]]:
    """The ClusterQueue of somebody else that the LocalQueues use; empty: one of ours."""
    name = pool["queue"]
    local = {
        row["name"]: str(body["spec"]["clusterQueue"])
        for row in namespaces
        if (body := foreign.get(("LocalQueue", row["name"], name))) is not None
    }
    queue = ""
    if ("ClusterQueue", "", name) in foreign:
        queue = name
    elif find(("ClusterQueue", "", name)) is None:
        queue = next((each for each in local.values() if each != name), "")
    states = [
        _used("LocalQueue", f"{namespace}/{name}", f"is of ClusterQueue {target}")
        for namespace, target in local.items()
    ]
    of_others = dict.fromkeys([*([queue] if queue else []), *local.values()])
    for target in of_others:
        users = [row for row in namespaces if local.get(row["name"], queue) == target]
        if not users or (target == name and not queue):
            continue
        body = find(("ClusterQueue", "", target))
        if body is None:
            why = f"no ClusterQueue has that name: name another queue than {name} by"
            states.append(
                ObjectState("ClusterQueue", target, "conflict", f"{why} kubernetes.queue")
            )
            continue
        labels = {row["name"]: _labels(row, find) for row in users}
        problems, notes = queue_fit(body, pool["resources"], labels)
        if problems:
            why = f"is not Drillyard's, and {', '.join(problems)}"
            fix = "name another queue by kubernetes.queue"
            states.append(ObjectState("ClusterQueue", target, "conflict", f"{why}: {fix}"))
        else:
            states.append(_used("ClusterQueue", target, ", ".join(notes) or "its quota stays"))
    return queue, states


def _labels(row: Mapping[str, Any], find: Callable[[Key], Object | None]) -> dict[str, str]:
    """The labels of a namespace; of one that is not there yet those that it will have."""
    found = find(("Namespace", "", row["name"]))
    made = {"kubernetes.io/metadata.name": row["name"], LEVEL: row["level"]}
    return made if found is None else dict(found["metadata"].get("labels") or {})


def _flavor(pool: Mapping[str, Any], foreign: Mapping[Key, Object]) -> Iterator[ObjectState]:
    body = foreign.get(("ResourceFlavor", "", pool["name"]))
    if body is None:
        return
    spec = body.get("spec") or {}
    wanted = (dict(pool["nodeLabels"]), list(pool["tolerations"]))
    if (spec.get("nodeLabels") or {}, spec.get("tolerations") or []) == wanted:
        yield _used("ResourceFlavor", pool["name"], "selects the same nodes")
        return
    yield ObjectState(
        "ResourceFlavor",
        pool["name"],
        "conflict",
        f"is not Drillyard's, and selects other nodes ({spec.get('nodeLabels') or 'all'}): name"
        " another queue by kubernetes.queue",
    )


def _used(kind: str, name: str, how: str) -> ObjectState:
    return ObjectState(kind, name, "used", f"is not Drillyard's; {how}")


def _lost(key: Key, release: ChartRelease) -> ObjectState:
    kind, namespace, name = key
    marks = (f"{_MARK}-name={release.name}", f"{_MARK}-namespace={release.namespace}")
    command = ["kubectl", *(["-n", namespace] if namespace else []), "annotate", "--overwrite"]
    command += [kind.lower(), name, *marks]
    why = "was made by an earlier up and has lost its annotations, or somebody has made it again"
    return ObjectState(kind, shown(key), "conflict", f"{why}; if it is ours: {' '.join(command)}")


def _release_state(api: ApiServer, helm: Helm, release: ChartRelease) -> ObjectState:
    name = f"{release.name} {release.version}"
    if is_foreign(api, release):
        problem = age_problem(api, release.name)
        how = problem or "installed by somebody else; stays as it is"
        return ObjectState("chart", name, "conflict" if problem else "used", how)
    if not records(api, release):
        return ObjectState("chart", name, "add")
    if release.chart == OWN_CHART:
        try:
            require_own_cluster(helm, release)
        except UserError as error:
            return ObjectState("chart", name, "conflict", str(error).replace("\n", ". "))
    return ObjectState("chart", name, "ours")


def key_of(body: Object) -> Key:
    """The key of an object."""
    place = body["metadata"]
    return str(body["kind"]), str(place.get("namespace", "")), str(place["name"])


def shown(key: Key) -> str:
    """NAMESPACE/NAME, or NAME."""
    return "/".join(filter(None, key[1:]))


def states_text(states: Iterable[ObjectState]) -> Iterator[str]:
    """A line for each, in columns."""
    words = {"ours": "there", "used": "used", "add": "add", "missing": "missing"}
    rows = [(words.get(each.state, each.state), each.kind, each.name, each.why) for each in states]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        yield "  ".join([*cells, row[3]]).rstrip()


def _path(api: ApiServer, key: Key) -> str:
    kind, namespace, name = key
    group, plural = _PLACES[kind]
    return "/".join(
        [group or api.kueue, *(["namespaces", namespace] if namespace else []), plural, name]
    )


def _kueue(api: ApiServer) -> str:
    """The version of Kueue's objects: what the server has, or will have of the Kueue that `up`
    installs."""
    if api.one("/apis/kueue.x-k8s.io") is None:
        return "v1beta2"
    return api.kueue.rpartition("/")[2]


def _is_annotated(body: Object, release: ChartRelease) -> bool:
    marks = body["metadata"].get("annotations") or {}
    place = (marks.get(f"{_MARK}-name"), marks.get(f"{_MARK}-namespace"))
    return place == (release.name, release.namespace)
