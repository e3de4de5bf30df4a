"""What is advised about an answer 403 of the API server: by its cause."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes.client.exceptions import ApiException

from drillyard.errors import UserError
from drillyard.launch.kubernetes.cluster_api import CORE, ClusterApi

POD = 'pods "d-w-0-0" is forbidden: '
WORDS = {
    POD + 'violates PodSecurity "restricted:latest": privileged': "run_as_user",
    POD + "exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1": (
        "kubectl -n team describe resourcequotas"
    ),
    POD + "failed quota: q: must specify requests.cpu for: train": "kubernetes.resources",
    POD + 'error looking up service account team/x: serviceaccount "x" not found': (
        "kubectl -n team get serviceaccounts"
    ),
    'pods is forbidden: User "a b" cannot list resource "pods" in API group "" in the namespace'
    ' "team": requires one of ["container.pods.list"] permission(s).': "--explain",
}


class Forbids:
    """A client to which the API server answers 403 with a message."""

    def __init__(self, said: str) -> None:
        self._said = said

    def call_api(self, *_: Any, **__: Any) -> None:
        error = ApiException(status=403, reason="Forbidden")
        error.body = json.dumps({"message": self._said})
        raise error


def refusal(said: str) -> str:
    """The message about such an answer."""
    api = object.__new__(ClusterApi)
    api.namespace, api.title, api._client = "team", "https://c, namespace team", Forbids(said)
    with pytest.raises(UserError) as refused:
        api.dry_run(CORE, "pods", {})
    return str(refused.value)


@pytest.mark.parametrize("said", WORDS)
def test_each_cause_of_a_refusal_has_words_of_its_own(said: str) -> None:
    advice = refusal(said).partition(said)[2]
    assert [word for word in WORDS.values() if word in advice] == [WORDS[said]]


@pytest.mark.parametrize(
    "said",
    [
        POD + "no PriorityClass with name x was found",
        POD + "maximum cpu usage per Container is 1, but limit is 2",
        "unable to create new content in namespace t because it is being terminated",
    ],
)
def test_a_message_that_says_it_all_gets_no_advice(said: str) -> None:
    assert refusal(said).endswith(said)
