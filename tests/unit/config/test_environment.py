"""`${env:NAME}`: resolved where it is used, a reference wherever it is shown."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.facts import each_says

from drillyard.config.load import load_run_config, save_resolved
from drillyard.config.run import RunConfig
from drillyard.errors import UserError

from .conftest import RUN, Load, Refuse

# Begins with what no config holds, so that finding it anywhere is a leak and not a word of the
# config.
SECRETS = st.text("abcdefghijABCDEFGHIJ0123456789-_%:{}'\"\\ \n", max_size=40).map(
    lambda text: f"Zq9!{text}"
)
PLACES = {
    "logging:\n  wandb: {key: '${env:DRILLYARD_TEST_SECRET}'}": lambda run: run.logging.wandb[
        "key"
    ],
    "logging:\n  mlflow: {headers: [x, {auth: 'Bearer ${env:DRILLYARD_TEST_SECRET}'}]}": (
        lambda run: run.logging.mlflow["headers"][1]["auth"].removeprefix("Bearer ")
    ),
    "output: ${env:DRILLYARD_TEST_SECRET}": lambda run: run.output,
    "checkpoint: {resume: '${env:DRILLYARD_TEST_SECRET}'}": lambda run: run.checkpoint.resume,
}


@pytest.mark.slow
@given(secret=SECRETS, place=st.sampled_from(list(PLACES)))
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=40,
)
def test_a_secret_is_there_to_be_used_and_nowhere_to_be_seen(
    secret: str, place: str, load: Load, tmp_path: Path
) -> None:
    os.environ["DRILLYARD_TEST_SECRET"] = secret
    try:
        run = load(f"{RUN}{place}\n")
        assert PLACES[place](run) == secret
        save_resolved(run, tmp_path / "saved.yaml")
        shown = {
            "file": (tmp_path / "saved.yaml").read_text(),
            "repr": repr(run) + str(run),
            "dump": repr(run.model_dump()) + repr(run.model_dump(mode="json")),
            "json": run.model_dump_json(),
            "pickle": pickle.dumps(run).decode("latin-1"),
        }
        for kind, text in shown.items():
            assert secret not in text and repr(secret)[1:-1] not in text, kind
            assert "${env:DRILLYARD_TEST_SECRET}" in text, kind
        for again in (
            load_run_config(tmp_path / "saved.yaml"),
            pickle.loads(pickle.dumps(run)),
            copy.deepcopy(run),
            RunConfig.model_validate(run.model_dump()),
        ):
            assert PLACES[place](again) == secret
    finally:
        del os.environ["DRILLYARD_TEST_SECRET"]


def test_a_secret_is_in_no_error_of_its_config(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRILLYARD_TEST_SECRET", "hunter2hunter2")
    message = refuse(RUN + "logging:\n  tensorboard: ${env:DRILLYARD_TEST_SECRET}\n")
    assert each_says(
        message,
        ["run.yaml:16: logging.tensorboard: ... '${env:DRILLYARD_TEST_SECRET}' ... true ... false"],
    )


def test_a_missing_variable_is_reported_with_file_line_key_and_name(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRILLYARD_TEST_SECRET", raising=False)
    monkeypatch.setenv("DRILLYARD_TEST_SECRETS", "x")
    message = refuse(RUN + "logging:\n  wandb:\n    key: ${env:DRILLYARD_TEST_SECRET}\n")
    assert each_says(
        message,
        [
            "run.yaml:17: logging.wandb.key: ... DRILLYARD_TEST_SECRET ... DRILLYARD_TEST_SECRETS"
            " ... export DRILLYARD_TEST_SECRET="
        ],
    )


def test_a_missing_variable_in_an_override_is_reported_there(
    refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRILLYARD_TEST_SECRET", raising=False)
    output = refuse(RUN, "output=${env:DRILLYARD_TEST_SECRET}")
    assert output[0].startswith(
        "--set output=${env:DRILLYARD_TEST_SECRET}: output: environment variable"
    )


@pytest.mark.parametrize("reference", ["${env:}", "${env:1A}", "${env:A B}", "${env:A"])
def test_a_malformed_reference_is_an_error_and_not_text(reference: str, refuse: Refuse) -> None:
    assert "${env:NAME}" in refuse(RUN + f"output: '{reference}'\n")[0]


def test_a_finished_run_is_read_without_its_secrets(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRILLYARD_TEST_SECRET", "x")
    save_resolved(load(RUN + "output: ${env:DRILLYARD_TEST_SECRET}\n"), tmp_path / "saved.yaml")
    monkeypatch.delenv("DRILLYARD_TEST_SECRET")
    run = load_run_config(tmp_path / "saved.yaml", resolve_environment=False)
    assert run.output == "${env:DRILLYARD_TEST_SECRET}"
    with pytest.raises(UserError, match=r"DRILLYARD_TEST_SECRET .*not set"):
        load_run_config(tmp_path / "saved.yaml")
