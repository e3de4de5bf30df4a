"""`drillyard estimate --build`: a family whose shapes nobody wrote down, built by the installed
transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.facts import says

RUN = """\
name: built
model:
  init: random
  config: {architecture: helium, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 3, num_attention_heads: 4,
           num_key_value_heads: 4, head_dim: 16, vocab_size: 1000, tie_word_embeddings: true}
data: {source: builtin:python-stdlib, sequence_length: 128, tokenizer: tokenizer}
training: {steps: 10, optimizer: {learning_rate: 1.0e-3}}
"""  # noqa: E501
# By hand, h = 64: a block has 4 h^2 of attention, 3 x 128 h of the gated MLP and two norms; then
# embedding, last norm.
PARAMETERS = 3 * (4 * 64**2 + 3 * 128 * 64 + 2 * 64) + 1000 * 64 + 64


def estimate(run: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "drillyard",
        "estimate",
        str(run),
        "--machine",
        "a3-megagpu-8g",
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_a_family_that_is_not_known_is_refused_and_can_be_built(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(RUN)
    refused = estimate(run)
    assert refused.returncode == 2
    assert says(refused.stderr, "model_type 'helium' ... --build")
    built = estimate(run, "--build", "--json")
    assert built.returncode == 0, built.stderr
    value = json.loads(built.stdout)
    assert value["model"]["parameters"] == PARAMETERS
    assert value["verdict"] == "fits" and value["step_time"] is not None
