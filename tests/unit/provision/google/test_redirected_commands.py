"""Commands where two variables of the environment say where Google's services are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.provision.clusters import config, plan

from drillyard.cli.main import main
from drillyard.provision.google.state_bucket import GoogleStateBucket

ENDPOINT, EMULATOR = "DRILLYARD_GOOGLE_ENDPOINT", "STORAGE_EMULATOR_HOST"
LOCAL, PRIVATE = "http://127.0.0.1:9", "https://{service}-lab.p.googleapis.com"


def test_the_state_is_where_leaks_looks_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from google.cloud import storage

    monkeypatch.setenv(ENDPOINT, PRIVATE)
    monkeypatch.delenv(EMULATOR, raising=False)
    made = dict[str, object]()
    monkeypatch.setattr(storage, "Client", lambda **options: made.update(options))
    GoogleStateBucket(plan(tmp_path, config()))
    assert made.get("client_options") == {"api_endpoint": "https://storage-lab.p.googleapis.com"}


@pytest.mark.parametrize("endpoint", [None, PRIVATE])
@pytest.mark.parametrize("command", ["up --yes", "down --yes", "leaks", "plan --check"])
def test_a_state_in_an_emulator_of_things_at_google_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    endpoint: str | None,
    command: str,
) -> None:
    plan(tmp_path, config())
    monkeypatch.setenv(EMULATOR, LOCAL)
    monkeypatch.delenv(ENDPOINT, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if endpoint is not None:
        monkeypatch.setenv(ENDPOINT, endpoint)
    name, *options = command.split()
    with pytest.raises(SystemExit) as ended:
        main(["cluster", name, str(tmp_path / "cluster.yaml"), *options])
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and f"unset {EMULATOR}" in printed, printed
