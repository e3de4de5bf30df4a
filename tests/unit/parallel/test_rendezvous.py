"""Ranks agree on an attempt of their own in a store that dead attempts have used, in any order,
whichever dies."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, Store

from drillyard.parallel.rendezvous import JoinedAttempt, JoinError, join_attempt

LONG = timedelta(seconds=120)


class Died(Exception):
    """The process was killed at this request."""


class Mortal(Store):
    """A store whose user dies at its `requests`-th request."""

    def __init__(self, store: Any, requests: int) -> None:
        super().__init__()
        self._store = store
        self._left = requests

    def _request(self, name: str, *arguments: Any) -> Any:
        self._left -= 1
        if self._left <= 0:
            raise Died
        return getattr(self._store, name)(*arguments)


class Held(Mortal):
    """A store whose user is held up before its `requests`-th request."""

    def _request(self, name: str, *arguments: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            time.sleep(0.3)
        return getattr(self._store, name)(*arguments)


def _forward(name: str) -> Any:
    return lambda self, *arguments: self._request(name, *arguments)


for _name in (
    "set",
    "get",
    "add",
    "wait",
    "check",
    "compare_set",
    "delete_key",
    "multi_get",
    "multi_set",
):
    setattr(Mortal, _name, _forward(_name))
setattr(Mortal, "deleteKey", _forward("delete_key"))  # noqa: B010 (what torch calls it from C++)


class Ranks:
    """Processes of ranks that join in one store, as threads."""

    def __init__(self, world_size: int = 3, store: Any = None) -> None:
        self.store = store or HashStore()
        self.world_size = world_size
        self._pool = ThreadPoolExecutor(16)

    def start(
        self, rank: int, *, restarts: int = 0, timeout: timedelta = LONG, store: Any = None
    ) -> Future[Any]:
        return self._pool.submit(
            join_attempt, store or self.store, rank, self.world_size, restarts, timeout
        )

    def all(self, order: tuple[int, ...] = (0, 1, 2), **options: Any) -> list[JoinedAttempt]:
        """Start all in `order`, a moment apart; the attempts they are in."""
        coming = []
        for rank in order:
            coming.append(self.start(rank, **options))
            time.sleep(0.03)
        return [future.result() for future in coming]


def agreed(attempts: list[JoinedAttempt]) -> int:
    """The one attempt that all are in."""
    (number,) = {joined.number for joined in attempts}
    return number


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_attempts_in_one_store_are_distinguished_and_counted(order: tuple[int, ...]) -> None:
    ranks = Ranks()
    attempts = [ranks.all(order) for _ in range(3)]
    assert len({agreed(of_one_attempt) for of_one_attempt in attempts}) == 3
    assert [{joined.restarts for joined in of_one_attempt} for of_one_attempt in attempts] == [
        {0},
        {1},
        {2},
    ]


def test_the_highest_count_of_any_launcher_is_the_count_of_all() -> None:
    ranks = Ranks()
    futures = [ranks.start(rank, restarts=restarts) for rank, restarts in enumerate((0, 4, 1))]
    assert {future.result().restarts for future in futures} == {4}


def test_what_a_dead_attempt_left_is_not_seen_in_the_next() -> None:
    ranks = Ranks()
    ranks.all()[1].store.set("address", "of the dead")
    assert not ranks.all()[0].store.check(["address"])


@pytest.mark.parametrize("dying", [0, 1, 2])
def test_a_rank_that_dies_at_any_request_is_replaced(dying: int) -> None:
    with ThreadPoolExecutor(16) as pool:
        came_through = list(pool.map(lambda at: replaced_after_death(dying, at), range(1, 26)))
    assert came_through[0] is False and came_through[-1] is True, (
        "deaths from the first request to the last"
    )


def replaced_after_death(dying: int, at: int) -> bool:
    """Let a rank die at its request number `at`, then its successor join; whether it came to the
    end of joining."""
    ranks = Ranks()
    first = {rank: ranks.start(rank) for rank in range(3) if rank != dying}
    time.sleep(0.03)
    with suppress(Died):
        victim = ranks.start(dying, store=Mortal(ranks.store, at)).result()
        assert agreed([victim, *(future.result() for future in first.values())])
        return True
    replacement = ranks.start(dying)
    while not replacement.done():
        for rank, future in first.items():
            # A rank that shares an attempt with the dead one finds that out and joins again.
            if future.done() and future.result().is_over():
                first[rank] = ranks.start(rank)
        time.sleep(0.02)
    assert agreed([replacement.result(), *(future.result() for future in first.values())])
    return False


def test_hellos_of_an_attempt_that_died_while_it_met_hold_nobody_up() -> None:
    ranks = Ranks()
    for rank in (1, 2):
        with pytest.raises(Died):
            ranks.start(rank, store=Mortal(ranks.store, 4)).result()
    for order in ((0, 1, 2), (2, 0, 1)):
        assert agreed(ranks.all(order))


def test_the_ranks_that_are_missing_are_named() -> None:
    ranks = Ranks(world_size=4)
    rank_2 = ranks.start(2, timeout=timedelta(seconds=1))
    while not ranks.store.check(["drillyard/join-4/hello/2"]):
        time.sleep(0.01)
    with pytest.raises(JoinError, match=r"0 s .*4 ranks .*missing: ranks 1, 3\."):
        ranks.start(0, timeout=timedelta(seconds=0.1)).result()
    with pytest.raises(JoinError, match="see rank 0's log"):
        rank_2.result()
    with pytest.raises(JoinError, match="missing: rank 0"):
        Ranks().start(1, timeout=timedelta(seconds=0.1)).result()


def test_an_attempt_is_over_when_one_of_its_ranks_comes_again() -> None:
    ranks = Ranks()
    attempts = ranks.all()
    assert not any(joined.is_over() for joined in attempts)
    with suppress(Died):
        ranks.start(2, store=Mortal(ranks.store, 3)).result()
    assert all(joined.is_over() for joined in attempts)


@pytest.mark.parametrize("request_number", [1, 2, 3, 4])
def test_an_attempt_is_not_over_because_a_rank_was_slow_to_join(request_number: int) -> None:
    ranks = Ranks()
    held = Held(ranks.store, request_number)
    slow = ranks.start(2, store=held)
    others = [ranks.start(1)]
    time.sleep(0.1)
    others.append(ranks.start(0))
    attempts = [slow.result(), *(future.result() for future in others)]
    assert agreed(attempts)
    assert not any(joined.is_over() for joined in attempts)


def test_a_process_whose_rank_has_come_again_leaves() -> None:
    ranks = Ranks()
    old = ranks.start(1, timeout=timedelta(seconds=1))
    time.sleep(0.05)
    new = ranks.start(1)
    others = [ranks.start(0), ranks.start(2)]
    assert agreed([new.result(), *(future.result() for future in others)])
    with pytest.raises(JoinError):
        old.result()


def test_another_number_of_ranks_meets_apart_from_the_hellos_of_the_earlier() -> None:
    store = HashStore()
    with pytest.raises(JoinError):
        Ranks(4, store).start(1, timeout=timedelta(seconds=0.1)).result()
    assert agreed(Ranks(3, store).all())
