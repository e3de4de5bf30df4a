"""summary.json and summary.txt: what a run achieved, computed from its metrics.jsonl and
events.jsonl alone.

`measurement` reads the steps and decides which of them count, as for `drillyard metrics` and the
report. Speed is the median over logged steps, as the run itself logged it, without the first one of
each attempt and without steps that compiled. Every MFU has its formula, peak and precision, or the
reason why there is none.
"""

from __future__ import annotations

import json
import shlex
import statistics
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from drillyard.errors import UserError
from drillyard.formatting import count, significant
from drillyard.guarded_files import is_there, read_json
from drillyard.redaction import redact
from drillyard.safe_files import describe_os_error, replace_file
from drillyard.telemetry.console import HEADLINES, flatten
from drillyard.telemetry.events import EVENTS_FILE, goodput, read_events
from drillyard.telemetry.jsonlines import encode
from drillyard.telemetry.metrics import read_steps

if TYPE_CHECKING:
    from drillyard.measurement.run_result import RunResult

SUMMARY_VERSION: Final = 1


def summarize(run_directory: Path) -> dict[str, Any]:
    """The contents of summary.json; figures that the logs do not give are None.

    Raises UserError for a directory without an events.jsonl.
    """
    if not is_there(run_directory / EVENTS_FILE):
        raise UserError(
            f"{run_directory}: no {EVENTS_FILE}: this is not the directory of a run that has"
            " started."
        )
    # Imported here: these load numpy, which is not needed to write the log.
    import numpy as np

    from drillyard.measurement.read_logs import read_logs
    from drillyard.measurement.run_result import measure
    from drillyard.measurement.step_times import last_rows, total_tokens

    events = read_events(run_directory)
    result = measure(read_logs([run_directory], framework="drillyard"))
    last_line = next(iter(deque(read_steps(run_directory), maxlen=1)), {})
    status, logged, done = run_status(events), result.log.steps, last_line.get("step", 0)
    if status == "completed":
        # A start that went back to an earlier checkpoint and ended there logged no step.
        done = last_event(events, "end").get("step", done)
        logged = logged.select(np.flatnonzero(logged.step <= done))
    steps = logged.select(last_rows(logged))
    parameters = last_event(events, "parameters")
    account = goodput(events)
    return {
        "version": SUMMARY_VERSION,
        "name": run_directory.resolve().name,
        "status": status,
        "steps": done,
        "first_loss": float(steps.loss[0]) if len(steps) else None,
        "final_loss": float(steps.loss[-1]) if len(steps) else None,
        "data_notes": last_event(events, "data").get("notes") or [],
        "held_out": _held_out(events),
        "failed_evaluations": failed_evaluations(events),
        "last_evaluation_step": last_event(events, "evaluation_begin").get("step"),
        "model": last_event(events, "export_end").get("directory"),
        "tokens": total_tokens(logged) or 0,
        "sequences": next(
            (event["sequences"] for event in reversed(events) if "sequences" in event), None
        ),
        "skipped_steps": last_line.get("skipped_steps", 0),
        "num_gpus": last_line.get("num_gpus"),
        "num_gpus_changes": list(result.speed.num_gpus_changes),
        "parameters": parameters.get("count"),
        "trainable_parameters": parameters.get("trainable"),
        **_speed(result),
        "formula": parameters.get("formula"),
        "flops_per_token": parameters.get("flops_per_token"),
        "accelerator": parameters.get("accelerator"),
        "precision": parameters.get("precision"),
        "peak_flops": parameters.get("peak_flops"),
        "wall_seconds": account.wall_microseconds / 1e6,
        "goodput": account.goodput,
        "seconds_by_category": account.seconds(),
        "restarts": account.restarts,
        "failures": sum(event["event"] == "failure" for event in events),
        "steps_redone": account.steps_redone,
        "clock_steps_back": account.clock_steps_back,
    }


def write_summary(run_directory: Path) -> dict[str, Any]:
    """Write summary.txt and summary.json into the run directory, each replaced atomically; returns
    the latter.

    The JSON comes last: a run that has it is finished. Raises UserError when they cannot be
    written.
    """
    summary = summarize(run_directory)
    _replace(run_directory / "summary.txt", format_summary(summary))
    _replace(
        run_directory / "summary.json", json.dumps(json.loads(encode(summary)), indent=2) + "\n"
    )
    return summary


def _replace(path: Path, text: str) -> None:
    try:
        replace_file(path, redact(text).encode(), draft=path.with_name(f"{path.name}.tmp"))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written: {describe_os_error(error)}, then run the same command"
            " again"
        ) from error


def run_status(events: Iterable[dict[str, Any]]) -> str:
    """Status with which the last attempt ended; without an `end` it is running or was killed."""
    return str(last_event(events, "end", "round_start").get("status", "running or killed"))


def last_event(events: Iterable[dict[str, Any]], *names: str) -> dict[str, Any]:
    """The last event with one of these names; {} without one."""
    return next((event for event in reversed(list(events)) if event["event"] in names), {})


def _held_out(events: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The last value and its step of each figure of the evaluations (dotted name); for losses also
    the lowest."""
    figures: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["event"] != "evaluation":
            continue
        for name, value in flatten(event.get("results", {})).items():
            figure = figures.setdefault(name, {})
            figure |= {"last": value, "last_step": event.get("step")}
            if name.split(".")[-1] == "loss" and value <= figure.get("best", value):
                figure |= {"best": value, "best_step": event.get("step")}
    return figures


def failed_evaluations(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step, part, metric and reason of failed evaluations; evaluating a step again replaces its
    failures."""
    failed: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "evaluation_begin":
            failed = [one for one in failed if one["step"] != event.get("step")]
        elif event["event"] == "evaluation_failed":
            failed.append({key: event.get(key) for key in ("step", "part", "metric", "reason")})
    return failed


def failure_text(failed: dict[str, Any]) -> str:
    """`sql-execution of rows after step 40: reason`, for one of a summary's
    `failed_evaluations`."""
    return f"{failed['metric']} of {failed['part']} after step {failed['step']}: {failed['reason']}"


def required_failure(run_directory: Path) -> str | None:
    """Reason why a finished run with `evaluation.required` counts as failed; None where it does
    not.

    Only the last evaluation counts, that of the finished model: earlier failures are gaps in a
    curve.
    """
    try:
        summary = read_json(run_directory / "summary.json")
    except (OSError, ValueError, RecursionError):
        return None
    # Earlier versions did not write the step of the last evaluation: then every failure counts.
    last = summary.get("last_evaluation_step")
    failed = [
        each
        for each in summary.get("failed_evaluations") or ()
        if last is None or each["step"] == last
    ]
    if not failed:
        return None
    more = f" (and {len(failed) - 1} more: see summary.json)" if len(failed) > 1 else ""
    return (
        f"evaluation.required: not measured: {failure_text(failed[0])}{more}\n"
        f"the model is complete; `drillyard eval {model_of(summary, run_directory)}` measures it"
    )


def _speed(result: RunResult) -> dict[str, Any]:
    """Medians over the logged steps that measurement keeps, of step times on the last number of
    GPUs; None where it had to keep the first step."""
    import numpy as np

    steps, speed = result.log.steps, result.speed
    kept = result.timing.of_last_gpus if result.timing.times.left_out else None
    seconds = [] if kept is None else np.repeat(kept.seconds, kept.weight).tolist()
    logged = int(steps.stands_for.sum())
    return {
        "step_seconds": {
            "median": statistics.median(seconds) if seconds else None,
            "p95": percentile_95(seconds),
            "logged_steps": logged,
            "left_out": logged - len(seconds),
            "window_steps": 1 if kept is None else int(steps.window_steps[kept.rows].max()),
        },
        "tokens_per_second_per_gpu": speed.printed_tokens_per_second_per_gpu if seconds else None,
        "tflops_per_gpu": speed.printed_tflops_per_gpu if seconds else None,
        "mfu": speed.printed_mfu if seconds else None,
    }


def percentile_95(values: list[float]) -> float | None:
    """The 95th percentile, linear between neighbours; None without values."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=20, method="inclusive")[18]


def format_summary(summary: dict[str, Any]) -> str:
    """summary.txt: the summary for people, within 80 columns."""
    rows = [("Run", f"{summary['name']}: {summary['status']}, {summary['steps']} steps")]
    if summary["final_loss"] is not None:
        rows.append(("Final loss", f"{summary['final_loss']:.4f}"))
    for part, text, figure in _headlines(summary):
        best = (
            f" (best {significant(figure['best'])} at step {figure['best_step']})"
            if "best" in figure
            else ""
        )
        rows.append((part, f"{text}{best}"))
    rows += [("Not measured", failure_text(failed)) for failed in summary["failed_evaluations"]]
    rows += [*_speed_rows(summary), *_size_rows(summary)]
    width = max(len(label) for label, _ in rows) + 2
    lines = [f"{label:<{width}}{value}" for label, value in rows]
    notes = [
        line
        for note in summary["data_notes"]
        for line in [
            "",
            *textwrap.wrap(f"Data: {note}", 80, break_long_words=False, break_on_hyphens=False),
        ]
    ]
    return "\n".join([*lines, *notes, "", *_goodput_lines(summary)]) + "\n"


def _headlines(summary: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Part, text and values of the held-out figures that fit in a line."""
    for name, figure in summary["held_out"].items():
        part, _, measure = name.rpartition(".")
        if measure in HEADLINES:
            yield part, HEADLINES[measure].format(figure["last"]), figure


def model_of(summary: dict[str, Any], run_directory: Path) -> Path:
    """The model of a completed run: in `final/`, or in another directory if that held other
    files."""
    return run_directory / (summary.get("model") or "final")


def closing_lines(summary: dict[str, Any], run_directory: Path) -> list[str]:
    """The last lines that a completed run prints: its losses, its model, and the next commands."""
    losses = ""
    if summary["final_loss"] is not None:
        first = "" if summary["first_loss"] is None else f"{significant(summary['first_loss'])} -> "
        losses = f", loss {first}{significant(summary['final_loss'])}"
    lines = [f"Completed: {summary['steps']} steps{losses}"]
    lines += [f"Held out:  {part} | {text}" for part, text, _ in _headlines(summary)]
    lines += [f"Failed:    {failure_text(failed)}" for failed in summary["failed_evaluations"]]
    model = shlex.quote(str(model_of(summary, run_directory)))
    return [
        *lines,
        f"Model:     {model}",
        f"Next:      drillyard report {shlex.quote(str(run_directory))}",
        *(
            [f"           drillyard eval {model}"]
            if summary["held_out"] or summary["failed_evaluations"]
            else []
        ),
        f"           drillyard generate {model}",
    ]


def _speed_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    times = summary["step_seconds"]
    if times["median"] is None:
        return [("Step time", "not known: fewer than two steps were logged")]
    kept = times["logged_steps"] - times["left_out"]
    windows = (
        f", means over {times['window_steps']} steps each" if times["window_steps"] > 1 else ""
    )
    ranks = "GPUs" if summary["accelerator"] else "ranks"
    from drillyard.measurement.gpu_counts import gpus_text

    numbers = gpus_text(summary["num_gpus_changes"]) or summary["num_gpus"]
    rows = [
        (
            "Step time",
            f"median {significant(times['median'])} s, p95 {significant(times['p95'])} s",
        ),
        ("", f"({kept} logged{windows}; {times['left_out']} first or compiling ones left out)"),
        (
            "Speed",
            (
                f"{significant(summary['tokens_per_second_per_gpu'])} tokens/s/GPU,"
                f" {significant(summary['tflops_per_gpu'])} TFLOP/s/GPU on {numbers}"
                f" {ranks}"
            ),
        ),
    ]
    if summary["mfu"] is None:
        reason = (
            f"no {summary['precision']} peak of {summary['accelerator']} is known"
            if summary["accelerator"]
            else "no peak is known for this device"
        )
        return [*rows, ("MFU", f"none: {reason} (TFLOP/s by formula {summary['formula']})")]
    peak = f"peak {significant(summary['peak_flops'] / 1e12)} TFLOP/s {summary['precision']}"
    return [
        *rows,
        (
            "MFU",
            (
                f"{summary['mfu']:.2%} (formula {summary['formula']}, {peak},"
                f" {summary['accelerator']})"
            ),
        ),
    ]


def _size_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("Tokens", count(summary["tokens"]))]
    if seen := summary["sequences"]:
        rows.append(
            (
                "Data",
                f"{seen['seen']:,} of {seen['of']:,} sequences seen, {seen['epochs']:.3g} epochs",
            )
        )
        # Earlier versions did not write how often each source was seen.
        for name, each in seen.get("sources", {}).items():
            rows.append(
                (
                    f"  {name}",
                    (
                        f"{each['seen']:,} of {each['of']:,} sequences seen, {each['epochs']:.3g}"
                        " epochs"
                    ),
                )
            )
    total, trainable = summary["parameters"], summary["trainable_parameters"]
    if total is not None:
        rows.append(
            (
                "Parameters",
                count(total)
                + ("" if trainable == total else f", {count(trainable)} of them trained"),
            )
        )
    if summary["skipped_steps"]:
        rows.append(
            (
                "Skipped",
                f"{summary['skipped_steps']} steps with a loss or gradient that was not finite",
            )
        )
    rows.append(
        (
            "Restarts",
            (
                f"{summary['restarts']} ({summary['failures']} failures, {summary['steps_redone']}"
                " steps done again)"
            ),
        )
    )
    return rows


def _goodput_lines(summary: dict[str, Any]) -> list[str]:
    """Goodput, and the categories of wall time, largest first."""
    wall = summary["wall_seconds"]
    if not wall:
        return ["Goodput: not known, the run has no duration"]
    lines = [
        f"Goodput {summary['goodput']:.1%} of {timedelta(seconds=round(wall))} wall time (h:mm:ss)"
    ]
    for name, seconds in sorted(summary["seconds_by_category"].items(), key=lambda item: -item[1]):
        if seconds:
            bar = "#" * round(40 * seconds / wall)
            lines.append(f"  {name:<14}{seconds:>12,.1f} s {seconds / wall:>7.1%}  {bar}".rstrip())
    if summary["clock_steps_back"]:
        lines.append(
            f"  The clock stepped back {summary['clock_steps_back']} times; hidden time is not"
            " counted."
        )
    return lines
