"""What is advised about an answer 403 of the API server: by its cause."""

from __future__ import annotations

import pytest

from drillyard.launch.kubernetes.cluster_api import forbidden_advice

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


@pytest.mark.parametrize("said", WORDS)
def test_each_cause_has_words_of_its_own(said: str) -> None:
    advice = str(forbidden_advice(said, "team"))
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
    assert forbidden_advice(said, "team") is None
