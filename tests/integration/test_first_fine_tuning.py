"""A stranger's first fine-tuning: a local model, a file of chats, seven commands and no editor."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from tests.integration.tiny_run import drillyard
from tests.unit.cli.test_init import talk, write_model, write_rows
from tests.unit.data.chat_templates import FILES, plain


def test_seven_commands_from_a_model_and_a_file_to_a_model_that_answers(tmp_path: Path) -> None:
    write_model(tmp_path / "base", plain(FILES["chatml"]))
    write_rows(tmp_path / "chats.jsonl", [{"messages": talk(number)} for number in range(60)])
    typed = """\
init small --model base --data chats.jsonl
train small/run.yaml --dry-run
train small/run.yaml
generate runs/small --prompt "What is 7?" --max-new-tokens 8 --json
eval runs/small
export runs/small exported
generate exported --prompt "What is 7?" --max-new-tokens 8 --json
"""
    printed = []
    for line in typed.splitlines():
        ended = drillyard(*shlex.split(line), cwd=tmp_path)
        assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
        printed.append(ended.stdout)
    assert "drillyard generate runs/small/final" in printed[2]
    assert "chats/held_out" in printed[4]
    answered, exported = json.loads(printed[3]), json.loads(printed[6])
    assert answered["answer"] == exported["answer"]
    assert (tmp_path / "exported" / "model.safetensors").is_file()
