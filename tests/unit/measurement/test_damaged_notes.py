"""Lines beside the steps in which something else stands where a number should: they say nothing,
and break nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.measurement.lines import WHOLE, perf, read_bytes, write

from drillyard.measurement.read_logs import read_logs
from drillyard.measurement.run_result import measure

NOTES = {
    "megatron.log": [
        "validation loss at iteration {} | lm loss value: {} | lm loss PPL: {}",
        "using world size: {}, data-parallel size: {}",
        "  saving checkpoint at iteration {} to /ckpt",
        "  successfully loaded checkpoint from /ckpt at iteration {}",
        "  seq_length ...... {}",
        "  micro_batch_size ...... {}",
        "  global_batch_size ...... {}",
    ],
    "torchtitan.log": [
        "Model llama3 8B size: {} total parameters",
        "Peak FLOPS used for computing MFU: {}",
        "Finished saving the checkpoint in {} seconds.",
        "Building 1-D device mesh with ['dp'], [{}]",
        "validate step: {}  loss: {}",
        "local batch size: {}, global batch size: {}, sequence length: {}, total steps: {}",
    ],
    "hf_trainer.log": [
        "'eval_loss': {}",
        "'train_runtime': '{}'",
        "Total optimization steps = {}",
        "Total train batch size (w. parallel) = {}",
        "Number of trainable parameters = {}",
    ],
    "maxtext.log": [
        "number parameters: {} billion",
        "eval metrics after step: {}, loss={}",
        "Num_devices: {}",
        "Config param max_target_length: {}",
        "Config param global_batch_size_to_train_on: {}",
    ],
    "perflogger.log": ["[PerfLogger] Using {} parameters for TFLOPs calculation."],
    "nemo2.log": [
        "Starting with {} processes",
        "Global Checkpoint Save : Iteration: {} : Save duration: {}s",
    ],
}
ODD = st.one_of(
    st.sampled_from(
        [
            "",
            ".",
            "-",
            "e",
            "+E-",
            "1.2.3",
            ",",
            "0",
            "-1",
            "nan",
            "inf",
            "1e999",
            "9" * 400,
            "9" * 5000,
        ]
    ),
    st.text("0123456789.,+-eEnaif ", max_size=6),
)


@given(st.data(), st.sampled_from(sorted(NOTES)))
def test_a_note_without_its_number_changes_no_step(data: st.DataObject, sample: str) -> None:
    note = data.draw(st.sampled_from(NOTES[sample]))
    line = note.format(*(data.draw(ODD) for _ in range(4))).encode() + b"\n"
    whole = read_bytes(WHOLE[sample])
    log = read_bytes(line + WHOLE[sample] + line)
    # A line that tells of a start may begin another attempt, but no step is lost or made.
    assert log.steps.step.tolist() == whole.steps.step.tolist()
    json.dumps(measure(log).as_json(), allow_nan=False)


@pytest.mark.parametrize("size", ["0", "-4", "1e999"])
def test_sizes_that_no_run_has_are_not_known(size: str, tmp_path: Path) -> None:
    lines = [f"[PerfLogger] Using {size} parameters", *map(perf, range(1, 9))]
    assert (
        read_logs([write(tmp_path / "run.log", "\n".join(lines) + "\n")]).facts.parameters is None
    )


@pytest.mark.parametrize("moment", ["1e999", "1e300", "NaN", "-5", "now", ""])
def test_a_time_of_day_that_is_none_is_no_time(moment: str, tmp_path: Path) -> None:
    records = [
        {"timestamp": moment, "type": "LOG", "step": step, "data": {"loss": 1.0}}
        for step in range(3)
    ]
    text = "".join(f"DLLL {json.dumps(record)}\n" for record in records)
    log = read_logs([write(tmp_path / "dllogger.json", text)])
    assert log.steps.step.tolist() == [0, 1, 2] and not log.steps.has("time_us")
