"""Rendezvous of the ranks of an attempt, in a store that may still hold entries of dead attempts.

torchrun's agent keeps one store over all restarts of its ranks, and with several hosts no number
distinguishes its attempts. So the ranks agree on a number of their own before anything else is
exchanged:

1. Every rank takes the next ticket and writes a hello under its number, with a nonce that no other
   process has.
2. Rank 0 waits for the hellos of all, opens a new attempt over them, and leaves its number in the
   mailbox of each nonce. A hello of a dead process has a mailbox that is never read.
3. Every rank that finds the number acknowledges it. With the last acknowledgement the attempt is
   agreed.
4. Where a hello comes meanwhile, a rank had died: rank 0 opens a further attempt and gives up the
   one before. Both ends of an attempt are one compare-and-set, so no two ranks see different ones.

Everything later is stored under the attempt's own prefix. A ticket newer than all of an attempt's
is a restarted process: the attempt of the one that it replaces is over. Cost: ten requests per
rank. Limits: a rank that dies between the agreement and the first collective is missed there; a
launcher must end the old process of a rank before it starts the new one.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from datetime import timedelta
from textwrap import shorten
from typing import Any

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistStoreError

from drillyard.formatting import number_list

_AGREED = "agreed"
_GIVEN_UP = "given up"
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 5.0


class JoinError(RuntimeError):
    """Raised if a rank is missing at the deadline or this one was replaced. Not a user error: a
    restart may succeed."""


@dataclass(frozen=True)
class JoinedAttempt:
    """An attempt that all its ranks have agreed on: its number from 1 and its own store.

    restarts: number of earlier starts of these ranks, as far as the store or any rank's launcher
    knows.
    """

    number: int
    store: Any
    restarts: int
    _hall: Any
    _newest_ticket: int

    def is_over(self) -> bool:
        """Whether a rank has been restarted since, which ends this attempt."""
        return int(self._hall.add("tickets", 0)) > self._newest_ticket


def join_attempt(
    store: Any, rank: int, world_size: int, restarts: int, timeout: timedelta
) -> JoinedAttempt:
    """Wait for the other ranks in `store`; returns the attempt that all `world_size` are in.

    `restarts` is what this rank's launcher counts. Raises JoinError when a rank is missing after
    `timeout`.
    """
    # If a launcher continues with another number of ranks, those of the other number are dead.
    hall = PrefixStore(f"drillyard/join-{world_size}", store)
    own = _Rank(
        hall,
        rank,
        world_size,
        secrets.token_hex(16),
        time.monotonic() + timeout.total_seconds(),
        timeout,
    )
    # Before the hello, so that each rank of an attempt has a ticket of it; rank 0 looks only when
    # `hellos` has changed.
    ticket = hall.add("tickets", 1)
    hall.set(own.hello, f"{own.nonce} {restarts} {ticket}")
    hall.add("hellos", 1)
    number = own.open_attempts() if rank == 0 else own.follow()
    about = json.loads(hall.get(f"about/{number}"))
    hall.delete_key(own.hello)
    return JoinedAttempt(
        number,
        PrefixStore(f"round-{number}", hall),
        about["restarts"],
        hall,
        about["newest_ticket"],
    )


@dataclass(frozen=True)
class _Rank:
    """One rank in the store in which the ranks meet (`hall`). `deadline`: seconds of
    time.monotonic."""

    hall: Any
    rank: int
    world_size: int
    nonce: str
    deadline: float
    timeout: timedelta

    @property
    def hello(self) -> str:
        return f"hello/{self.rank}"

    def open_attempts(self) -> int:
        """Rank 0: open attempts until one is agreed; returns its number."""
        everyone = [f"hello/{rank}" for rank in range(self.world_size)]
        seen, newest, pause = -1, 0, _FIRST_PAUSE_SECONDS
        while True:
            hellos = self.hall.add("hellos", 0)
            if hellos != seen and self.hall.check(everyone):
                number = self._open(self.hall.multi_get(everyone))
                if newest and not self._give_up(newest):
                    return newest
                if newest:
                    # Hellos of a dead attempt are replaced one after the other: not each is worth
                    # an attempt.
                    pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                else:
                    for earlier in range(1, number):
                        self._give_up(earlier)
                newest = number
                self._acknowledge(number)
            seen = hellos
            if newest and self.hall.check([f"outcome/{newest}"]):
                return newest
            if time.monotonic() > self.deadline:
                missing = [rank for rank, key in enumerate(everyone) if not self.hall.check([key])]
                ranks = shorten(number_list(missing), 80, placeholder=" ...")
                listed = f"{'rank' if len(missing) == 1 else 'ranks'} {ranks}"
                raise self._timed_out(listed if missing else "none, but not all have answered")
            time.sleep(pause)

    def _open(self, hellos: list[bytes]) -> int:
        """Open an attempt over the processes that said `hellos`, in the order of their ranks;
        returns its number."""
        nonces, restarts, tickets = zip(*(hello.decode().split() for hello in hellos), strict=True)
        if nonces[0] != self.nonce:
            raise JoinError(
                "rank 0: a newer process has taken its place in the store of the rendezvous"
            )
        number = int(self.hall.add("rounds", 1))
        started_before = max(*map(int, restarts), int(self.hall.add("agreed", 0)))
        about = {"newest_ticket": max(map(int, tickets)), "restarts": started_before}
        self.hall.set(f"about/{number}", json.dumps(about))
        self.hall.multi_set([f"mailbox/{nonce}" for nonce in nonces], [str(number)] * len(nonces))
        return number

    def _give_up(self, number: int) -> bool:
        """Close an attempt that is not agreed yet; False when it is."""
        outcome: bytes = self.hall.compare_set(f"outcome/{number}", "", _GIVEN_UP)
        return outcome.decode() == _GIVEN_UP

    def follow(self) -> int:
        """Any other rank: acknowledge the attempts that it is in until one is agreed; returns its
        number."""
        mailbox = f"mailbox/{self.nonce}"
        self._await(mailbox)
        number = int(self.hall.get(mailbox))
        while True:
            self._acknowledge(number)
            self._await(f"outcome/{number}")
            if self.hall.get(f"outcome/{number}").decode() == _AGREED:
                return number
            given_up, number = number, int(self.hall.get(mailbox))
            if number == given_up:
                raise JoinError(
                    f"rank {self.rank}: a newer process has taken its place in the rendezvous"
                )

    def _acknowledge(self, number: int) -> None:
        if self.hall.add(f"acknowledged/{number}", 1) == self.world_size:
            outcome: bytes = self.hall.compare_set(f"outcome/{number}", "", _AGREED)
            if outcome.decode() == _AGREED:
                self.hall.add("agreed", 1)

    def _await(self, key: str) -> None:
        try:
            self.hall.wait([key], timedelta(seconds=max(0.001, self.deadline - time.monotonic())))
        except DistStoreError:
            rank_0_came = self.hall.check(["hello/0"])
            raise self._timed_out(
                "see rank 0's log" if rank_0_came else "rank 0, perhaps others"
            ) from None

    def _timed_out(self, missing: str) -> JoinError:
        return JoinError(
            f"timed out waiting {self.timeout.total_seconds():.0f} s for all {self.world_size}"
            f" ranks to join; missing: {missing}. Read their logs, and see whether their hosts"
            " reach this one"
        )
