"""Releases of the chart `drillyard-run`: one per run, installed, read and removed with Helm.

A release is never upgraded: a JobSet cannot be changed. Helm's record, a Secret, keeps a cancelled
run's chart and values. Helm finds a release by its name alone, so each change first compares the
record with the one that was read.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from drillyard.errors import UserError
from drillyard.launch.kubernetes.config import KubernetesConfig
from drillyard.launch.kubernetes.release import CLUSTER_LABEL, RUN_LABEL, helm_argv
from drillyard.launch.run_status import Handle
from drillyard.launch.submit_lock import being_launched_error
from drillyard.plan_files import PlanFile
from drillyard.programs import Programs, Result, defer_interrupt, require_success

if TYPE_CHECKING:
    from drillyard.launch.kubernetes.cluster_api import ClusterApi

OF_HELM = "owner=helm"
"""The label of Helm's records."""
_POLL_SECONDS = 0.5
_SUBMISSION_LABEL = "drillyard/submission"
"""On Helm's record: the submission that made it, a random number that no plan has."""
_NO_RELEASE = "release: not found"
"""In Helm's error where there is no release of a name (helm, pkg/storage/driver)."""
_UNINSTALLED = "is already deleted"
"""In that of `uninstall --keep-history` where another cancel has done it (pkg/action)."""


def run_helm(programs: Programs, argv: Sequence[str], files: Sequence[PlanFile] = ()) -> Result:
    """Run Helm in a directory with these files."""
    with tempfile.TemporaryDirectory(prefix="drillyard-") as directory:
        for file in files:
            path = Path(directory, file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(file.mode)
            path.write_text(file.content, encoding="utf-8")
        return programs.run(argv, directory=Path(directory))


def uid_of(record: dict[str, Any] | None) -> str | None:
    """The uid of Helm's record; None where there is none."""
    return None if record is None else str(record["metadata"]["uid"])


@dataclass(frozen=True)
class HelmReleases:
    """The releases of one cluster config, in its namespace."""

    cluster: str
    section: KubernetesConfig
    api: ClusterApi
    programs: Programs

    def record(self, name: str, *, needed: bool = True) -> dict[str, Any] | None:
        """Metadata of Helm's record of this name, of whichever launch made it. Not `needed`: None,
        too, where this user may not list Secrets."""
        from drillyard.launch.kubernetes.cluster_api import CORE

        selector = f"{OF_HELM},name={name}"
        found = self.api.listed(CORE, "secrets", selector, metadata=True, needed=needed)
        return found[-1] if found else None

    def controller(self, run: str) -> dict[str, Any] | None:
        """The JobSet or Job of a run as Helm's record has it: that of a cancelled run too. None
        where another command has removed it since it was listed."""
        asked = run_helm(self.programs, helm_argv(self.section, "get", "manifest", run))
        if asked.returncode != 0 and _NO_RELEASE in asked.stderr:
            return None
        objects = yaml.safe_load_all(require_success(asked, f"{run}: helm get manifest").stdout)
        kinds = ("JobSet", "Job")
        found: dict[str, Any] = next(each for each in objects if each and each["kind"] in kinds)
        return found

    def values(self, handle: Handle) -> str:
        """The values of a release, as JSON."""
        argv = helm_argv(self.section, "get", "values", handle.run, "--output", "json")
        result = run_helm(self.programs, argv)
        return require_success(result, f"{handle}: helm get values").stdout

    def install(self, handle: Handle, argv: Sequence[str], files: Sequence[PlanFile]) -> None:
        """Install a release. Raises UserError, also where another launch has its name; then nothing
        of this one is left."""
        submission = secrets.token_hex(8)
        *words, labels = argv[: argv.index("--labels") + 2]
        own = f"{labels},{_SUBMISSION_LABEL}={submission}"
        with defer_interrupt(str(handle)):
            result = run_helm(self.programs, (*words, own, *argv[len(words) + 1 :]), files)
        if result.returncode == 0:
            return
        record = self.record(handle.run)
        if record is not None and record["metadata"]["labels"].get(_SUBMISSION_LABEL) != submission:
            raise self.taken_error(handle, record)
        if record is not None:
            # A failed installation of ours leaves its record and perhaps objects.
            argv = helm_argv(self.section, "uninstall", handle.run, "--ignore-not-found")
            run_helm(self.programs, argv)
        require_success(result, f"{handle}: nothing was submitted: helm install")

    def taken_error(self, handle: Handle, record: dict[str, Any]) -> UserError:
        """The error where the release of a run's name is another launch's."""
        namespace = self.section.namespace
        release = f"Helm release {handle.run} of namespace {namespace}"
        cluster = record["metadata"].get("labels", {}).get(CLUSTER_LABEL)
        if cluster == handle.cluster:
            return being_launched_error(handle, release)
        whose = f"of cluster config {cluster}" if cluster else "which Drillyard did not make"
        return UserError(
            f"{handle}: its name is that of {release}, {whose}; nothing was submitted\n"
            f"give this run another name; helm status {handle.run} --namespace {namespace} shows"
            " that one"
        )

    def uninstall(self, handle: Handle, uid: str | None, *options: str) -> None:
        """Uninstall the release whose record has this uid. Raises UserError where another one has
        its name now."""
        if (record := self.record(handle.run)) is not None and uid_of(record) != uid:
            raise UserError(
                f"{handle}: has been launched again since it was read; nothing was removed\n"
                f"see drillyard runs status {handle}, then give the same command again"
            )
        argv = helm_argv(self.section, "uninstall", handle.run, *options, "--ignore-not-found")
        result = run_helm(self.programs, argv)
        if _UNINSTALLED not in result.stderr:
            require_success(result, f"{handle}: helm uninstall")

    def await_gone(self, run: str) -> None:
        """Wait until the run has neither JobSet nor pods: a lost node's pods end once it is back or
        released."""
        from drillyard.launch.kubernetes.cluster_api import CORE, JOBS, JOBSETS

        selector = f"{CLUSTER_LABEL}={self.cluster},{RUN_LABEL}={run}"
        deadline = time.monotonic() + self.section.grace_seconds + 120.0
        kinds = ((JOBSETS, "jobsets"), (JOBS, "jobs"), (CORE, "pods"))
        while left := [
            each
            for group, kind in kinds
            for each in self.api.listed(group, kind, selector, metadata=True)
        ]:
            if time.monotonic() > deadline:
                names = ", ".join(each["metadata"]["name"] for each in left[:4])
                raise UserError(
                    f"{run}: {names} cannot end; its node may be lost: kubectl -n"
                    f" {self.section.namespace} get pods -l {RUN_LABEL}={run} -o wide"
                )
            time.sleep(_POLL_SECONDS)
