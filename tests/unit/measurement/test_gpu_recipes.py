"""`--format gpu-recipes`: the bytes of an independent re-implementation of the tool, on random
DLLogger files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.facts import says

from drillyard.errors import UserError
from drillyard.measurement.gpu_recipes import (
    FLOPS_PER_SAMPLE,
    PEAK_TFLOPS,
    GpuRecipesRequest,
    gpu_recipes_lines,
)


def as_the_tool_does(
    text: str, flops: float, batch: int, accelerators: int, peak: float, start: int, end: int
) -> str:
    """What process_training_results.py of gpu-recipes@2e1fd5e does with a file that it can read, in
    code of our own."""
    seconds, steps = 0, 0
    for line in text.splitlines():
        entry = json.loads(line[len("DLLL") :])
        if entry["step"] != "PARAMETER" and start <= entry["step"] <= end:
            seconds, steps = seconds + entry["data"]["train_step_timing in s"], steps + 1
    average = seconds / steps
    per_accelerator = flops * batch / average / accelerators / 1e12
    return "".join(
        "%s: %.8f\n" % pair  # noqa: UP031
        for pair in (
            ("Average step time", average),
            ("TFLOPS/Accelerator", per_accelerator),
            ("MFU", per_accelerator / peak),
        )
    )


def entry(step, seconds, kind="LOG") -> str:
    data = {"reduced_train_loss": 7.9, "train_step_timing in s": seconds, "epoch": 0}
    record = {
        "timestamp": "1728595441.95",
        "elapsedtime": "12.3",
        "type": kind,
        "step": step,
        "data": data,
    }
    return f"DLLL {json.dumps(record)}\n"


# Thirds have bits in every place: the last digits then show in which order the tool divides.
timings = st.one_of(st.integers(1, 10**9).map(lambda number: number / 3e5), st.integers(1, 300))
files = st.lists(
    st.one_of(st.tuples(st.integers(0, 60), timings), st.just(("PARAMETER", 1.0))), max_size=60
)


@given(
    entries=files,
    anchor=timings,
    batch=st.integers(1, 10_000),
    accelerators=st.integers(1, 20_000),
    model=st.one_of(
        st.sampled_from(sorted(FLOPS_PER_SAMPLE)),
        st.integers(10**12, 10**18).map(lambda number: number / 3),
    ),
    device=st.one_of(st.sampled_from(sorted(PEAK_TFLOPS)), st.floats(1, 1e4)),
    steps=st.one_of(st.just((None, None)), st.tuples(st.integers(0, 20), st.integers(20, 60))),
)
def test_the_bytes_are_those_of_the_tool(
    tmp_path_factory, entries, anchor, batch, accelerators, model, device, steps
):
    text = "".join(entry(*one) for one in [*entries, (20, anchor)])
    file = tmp_path_factory.mktemp("dllogger") / "dllogger.json"
    file.write_text(text)
    by_name, known = isinstance(model, str), isinstance(device, tuple)
    request = GpuRecipesRequest(
        file=str(file),
        batch_size=batch,
        num_accelerators=accelerators,
        model_type=model if by_name else None,
        model_flops=None if by_name else model,
        accelerator_type=device[0] if known else None,
        precision=device[1] if known else "bf16",
        max_flops=None if known else device,
        start_step=steps[0],
        end_step=steps[1],
    )
    flops, peak = (
        FLOPS_PER_SAMPLE[model][0] if by_name else model,
        PEAK_TFLOPS[device] if known else device,
    )
    start, end = (10, 30) if steps == (None, None) else steps
    assert gpu_recipes_lines(request)[0] == as_the_tool_does(
        text, flops, batch, accelerators, peak, start, end
    )


def ask(tmp_path, text: str, **flags) -> tuple[str, list[str]]:
    file = tmp_path / "dllogger.json"
    file.write_text(text)
    flags = {
        "model_type": "gpt3-175b",
        "accelerator_type": "h100",
        "batch_size": 1024,
        "num_accelerators": 128,
    } | flags
    return gpu_recipes_lines(GpuRecipesRequest(file=str(file), **flags))


def test_the_readmes_example_and_the_doubt_about_its_precision(tmp_path):
    lines, doubts = ask(
        tmp_path, entry(10, 17_600 / 692.98463368)
    )  # the README rounds the time that it prints
    assert (
        lines
        == "Average step time: 25.39738855\nTFLOPS/Accelerator: 692.98463368\nMFU: 0.70069225\n"
    )
    assert doubts == []
    lines, _ = ask(tmp_path, entry(10, 17_600 / 692.98463368), precision="fp8")
    assert lines.endswith("MFU: 0.35034612\n")


def test_lines_that_end_the_tool_are_passed_over_and_counted(tmp_path):
    odd = [
        'DLLL {"type": "METADATA", "step": null, "metric": "loss", "metadata": {}}\n',
        entry([1, 2], 1.0),
        'DLLL {"type": "LOG", "step": 12, "data": {"val_loss": 1.0}}\n',
        "Epoch 0: 100%\n",
        'DLLL {"type": "LOG", "step": 13, "da\n',
    ]
    lines, doubts = ask(
        tmp_path, "".join([odd[0], entry(11, 2.0), *odd[1:], "0: " + entry(14, 4.0)])
    )
    assert lines.startswith("Average step time: 3.00000000\n")
    assert says(doubts[0], "5 lines")


def test_what_cannot_be_right_is_said_beside_the_lines(tmp_path):
    _, doubts = ask(tmp_path, entry(10, 10.0), sequence_length=4096)
    assert "is more than" in doubts[0]
    assert says(doubts[1], "2048 tokens ... 4096")
    assert ask(tmp_path, entry(10, 25.0), sequence_length=2048)[1] == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"model_type": None}, "--model_type or --model_flops"),
        ({"model_type": "gpt5"}, "not in gpu-recipes' table"),
        ({"accelerator_type": None}, "--accelerator_type or --max_flops"),
        ({"accelerator_type": "a100", "precision": "fp8"}, "a100 at fp8"),
        ({"batch_size": None}, "needs --batch_size"),
        ({"num_accelerators": 0}, "give numbers above 0"),
        ({"start_step": 40, "end_step": 50}, r"DLLogger .*steps 40 to 50"),
    ],
)
def test_flags_that_cannot_be_answered_are_errors(tmp_path, flags, words):
    with pytest.raises(UserError, match=words):
        ask(tmp_path, entry(10, 25.0), **flags)


def test_times_of_zero_are_an_error_and_no_crash(tmp_path):
    with pytest.raises(UserError, match="average to 0 s"):
        ask(tmp_path, entry(10, 0))
