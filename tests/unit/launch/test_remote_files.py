"""Files of a run directory as they are listed."""

from __future__ import annotations

from pathlib import Path

from drillyard.launch.remote_files import LocalFiles, artifacts_of


def test_artifacts_are_what_a_run_made_and_was_made_from_without_secrets_and_what_agents_keep_order_with(  # noqa: E501
    tmp_path: Path,
) -> None:
    made = [
        "final/model.safetensors",
        "launch/exits/0001-0000.node-0.json",
        "launch/job.json",
        "launch/node-0.log",
    ]
    others = [
        "launch/agent/leader.py",
        "launch/agents/h0.node-0.json",
        "launch/cancelled",
        "launch/cancelled.12_0",
        "launch/claim",
        "launch/epochs/0001.node-0.alive",
        "launch/secret",
        "launch/secrets.json",
    ]
    for name in [*made, *others]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    assert artifacts_of(LocalFiles(), str(tmp_path)) == [(name, len(name)) for name in made]
