"""The first own model of the README, typed as it stands, with fewer steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parents[2] / "README.md"
STEPS = 4


def test_the_first_own_model_of_the_readme(tmp_path: Path) -> None:
    section = README.read_text("utf-8").partition("## Your first own model")[2]
    block = section.partition("```sh\n")[2].partition("```")[0]
    activate, typed = block.split("\n", 1)
    assert activate == ". .venv/bin/activate && mkdir first && cd first"
    for asked, fewer in (
        ("steps: 200", f"steps: {STEPS}"),
        ("warmup_steps: 20", "warmup_steps: 1"),
    ):
        assert asked in typed
        typed = typed.replace(asked, fewer)
    typed = typed.replace("step-00000200", f"step-{STEPS:08}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    subprocess.run(
        ["sh", "-e", "-c", typed], cwd=tmp_path, env={**os.environ, "PATH": path}, check=True
    )
    assert (tmp_path / "runs/sums/report.html").is_file()
    assert list((tmp_path / "model").glob("*.safetensors"))
    assert len(re.findall(r"(?m)^drillyard ", typed)) == 5
