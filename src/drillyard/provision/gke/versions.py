"""Versions of GKE, such as 1.34.1-gke.1829001, and the first ones that something needs.

A fix is brought to several minor versions, so what is needed is a list: the first version of each
minor version. A minor version after all of them has the fix from its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


def version_numbers(version: str) -> tuple[int, ...]:
    """1.34.1-gke.1829001 as (1, 34, 1, 1829001); the beginning of a version as fewer numbers."""
    return tuple(int(number) for number in re.findall(r"[0-9]+", version))


def reaches(version: str, first_versions: Sequence[str]) -> bool:
    """Whether `version` has what `first_versions` brought; always where they are empty.

    The beginning of a version stands for the newest that begins so: GKE takes that.
    """
    given = version_numbers(version)
    first = sorted(version_numbers(each) for each in first_versions)
    same_minor = [each for each in first if each[:2] == given[:2]]
    if same_minor:
        return given >= same_minor[0][: len(given)]
    return not first or given[:2] > first[-1][:2]
