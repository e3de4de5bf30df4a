"""`drillyard metrics`: the screen, JSON, gates, comparison, gpu-recipes, and what bad input
gets."""

from __future__ import annotations

import gzip
import json
import os
import sys

import pytest
from tests.facts import says
from tests.module_time import set_time

from drillyard.cli import main as cli

LINES = [
    f"INFO 2025-09-09T16:{10 + index // 4:02}:{index % 4 * 15:02}.5Z"
    f" [resource.labels.containerName: job] Step: {index + 1} | Time:"
    f" {27.02 if index == 0 else 14.54}s | TFLOPs/s/GPU: 954.0 | Tokens/s/GPU: 2254 | Loss:"
    f" {1.4 - index / 20:.4f}\n"
    for index in range(12)
]
FLAGS = [
    *("--accelerator", "b200", "--num-gpus", "16", "--params", "70.55B"),
    *("--batch-size-per-gpu", "8", "--sequence-length", "4096"),
]


@pytest.fixture
def run(capfd):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(["metrics", *map(str, arguments)])
        written = capfd.readouterr()
        return int(ended.value.code or 0), written.out, written.err

    return run


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("".join(LINES))
    return path


def test_the_screen_names_every_condition(run, log):
    code, out, err = run(log, *FLAGS, "--price-per-gpu-hour", 8.05)
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "14.54 s median" in text
    assert "2254 tokens/s/GPU on 16 GPUs" in text
    assert "by 6N of 70.55B parameters" in text
    assert "42.40% by 6N (peak 2250 TFLOP/s: b200, bf16 (assumed))" in text
    assert "$0.5202 a step" in text
    assert "Goodput" in text and "productive" in text
    assert max(map(len, out.splitlines())) <= 80


def test_what_is_not_known_is_said_with_its_flag(run, log):
    _, out, _ = run(log)
    text = " ".join(out.split())
    assert says(text, "mfu, peak_tflops: ... accelerator ... --accelerator")
    assert "--price-per-gpu-hour or --price-per-node-hour" in text


def test_json_and_several_sources(run, log, tmp_path):
    packed = tmp_path / "run.log.gz"
    packed.write_bytes(gzip.compress(log.read_bytes()))
    code, out, _ = run(packed, *FLAGS, "--json")
    document = json.loads(out)
    assert (code, document["version"], document["format"]) == (0, 1, "perflogger")
    assert document["mfu"] == pytest.approx(0.4240, abs=0.0002)


def test_gates_decide_the_exit_code(run, log):
    assert run(log, *FLAGS, "--fail-if", "mfu<0.38", "--json")[0] == 0
    code, out, err = run(
        log, *FLAGS, "--fail-if", "mfu<0.38", "--fail-if", "step_seconds.p50>14", "--json"
    )
    assert code == 1
    assert json.loads(out)["mfu"] is not None
    assert err == "failed: step_seconds.p50 is 14.54: --fail-if 'step_seconds.p50>14'\n"
    code, _, err = run(log, "--fail-if", "mfu<0.38")
    assert code == 1
    assert says(err, "mfu ... not known")


def test_a_gate_with_a_mistake_is_an_error_before_anything_is_read(run):
    code, out, err = run("no-such-file", "--fail-if", "mfu is low")
    assert (code, out) == (2, "")
    assert says(err, "--fail-if ... FIELD<NUMBER")


def test_runs_side_by_side(run, log, tmp_path):
    other = tmp_path / "other.log"
    other.write_text(
        "".join(LINES)
        .replace("14.54s", "13.00s")
        .replace("954.0", "1067.0")
        .replace("2254", "2521")
    )
    code, out, _ = run(log, other, "--compare", *FLAGS)
    assert code == 0
    assert "run.log" in out and "other.log" in out
    assert "Loss at" in out and "step 12" in out
    document = json.loads(run(log, other, "--compare", "--json", *FLAGS)[1])
    assert document["against_the_first"][0]["faster"]["value"] == pytest.approx(14.54 / 13 - 1)
    code, _, err = run(log, "--compare")
    assert (code, says(err, "two runs")) == (2, True)


@pytest.mark.parametrize("joined", [False, True])
def test_the_three_lines_of_gpu_recipes(run, tmp_path, joined):
    file = tmp_path / "dllogger.json"
    data = {"train_step_timing in s": 2.0}
    file.write_text(
        'DLLL {"type": "METADATA", "step": null}\n'
        + "".join(f"DLLL {json.dumps({'step': step, 'data': data})}\n" for step in range(40))
    )
    flags = {
        "--file": file,
        "--batch_size": 1024,
        "--num_accelerators": 128,
        "--model_type": "gpt3-175b",
        "--accelerator_type": "h100",
        "--start_step": 15,
        "--end_step": 40,
    }
    words = (
        [f"{flag}={value}" for flag, value in flags.items()]
        if joined
        else [w for pair in flags.items() for w in pair]
    )
    code, out, err = run("--format", "gpu-recipes", *words)
    assert code == 0
    assert (
        out == "Average step time: 2.00000000\nTFLOPS/Accelerator: 8800.00000000\nMFU: 8.89787664\n"
    )
    assert "1 lines" in err and "error of units" in err


def test_flags_of_one_tool_are_not_ignored_by_the_other(run, log):
    assert "only with --format gpu-recipes" in run(log, "--batch_size", 8)[2]
    assert "not with --format gpu-recipes" in run("--format", "gpu-recipes", "--json")[2]
    assert says(run("--format", "csv", log)[2], "--format csv ... gpu-recipes")


def test_the_schema_is_published(run):
    code, out, _ = run("--json-schema")
    assert code == 0
    assert {"step_seconds", "mfu", "goodput", "missing"} <= set(json.loads(out)["properties"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"nothing here\nthat is a step\n", "DLLogger JSON"),
        (bytes(range(256)) * 100, "binary"),
        (b"Step: 1 | Time: 14.5", "no step found"),
    ],
)
def test_a_log_without_a_step_is_an_error_that_says_what_was_tried(run, tmp_path, content, words):
    path = tmp_path / "run.log"
    path.write_bytes(content)
    code, out, err = run(path)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and words in err


@pytest.mark.parametrize(
    "flags",
    [
        ["--num-gpus", "0"],
        ["--price-per-gpu-hour", "-1"],
        ["--price-per-gpu-hour", "1", "--price-per-node-hour", "8"],
        ["--params", "many"],
        ["--active-params", "3B"],
        ["--formula", "7N"],
        ["--formula", "palm", "--params", "7B"],
        ["--start-step", "9", "--end-step", "3"],
        ["--job-start", "yesterday"],
        ["--job-start", "2030-01-01T00:00:00Z"],
        ["--timezone", "Atlantis"],
        ["--framework", "tensorflow"],
        ["--accelerator", "b2000"],
        ["--config", "missing.json"],
        ["--hardware", "missing.yaml"],
        ["--follow", "--compare"],
    ],
)
def test_mistakes_are_reported_in_a_line_or_two(run, log, flags):
    code, out, err = run(log, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert len(err.splitlines()) <= 3


def test_no_path_is_a_mistake_too(run):
    assert run()[0] == 2


def test_a_last_line_that_is_not_finished_is_left_out_and_counted(run, log):
    log.write_text("".join(LINES)[:-30])
    document = json.loads(run(log, "--json")[1])
    assert document["sources"][0]["unfinished_lines"] == 1
    assert document["step_seconds"]["last_step"] == 11


def test_what_is_behind_a_stream_that_is_always_ready_shows_it_in_parts_and_does_not_rest(
    run, monkeypatch
):
    reading, writing = os.pipe()
    with open(reading) as stdin, open(writing, "wb", buffering=0) as writer:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr("drillyard.loglines.followers._POLL_BYTES", 300)
        monkeypatch.setattr("drillyard.loglines.followers._PIECE", 300)
        rests = []
        set_time(monkeypatch, "drillyard.watch.log_screen", sleep=rests.append)
        writer.write("".join(LINES).encode())
        writer.close()
        code, out, err = run("-f", "-", "--json")
    lasts = [json.loads(line)["step_seconds"]["last_step"] for line in out.splitlines()]
    assert (code, err, rests) == (0, "", [])
    assert len(lasts) > 3 and lasts == sorted(lasts) and lasts[-1] == 12
