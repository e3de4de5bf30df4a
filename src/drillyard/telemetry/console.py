"""The lines a run prints: for people in the PerfLogger's format, for machines as JSON.

    [PerfLogger] Using 70.55B parameters for TFLOPs calculation. Formula 6N: 423.3 GFLOPs per token.
    Step: 5 | Time: 14.54s | TFLOPs/s/GPU: 954.0 | Tokens/s/GPU: 2254 | Loss: 0.6620

Tools that read the PerfLogger's lines read these. Numbers have at least four significant digits (a
step of 0.06712 s, a CPU's 0.01234 TFLOP/s), never an exponent.
"""

from __future__ import annotations

from typing import Any

from drillyard.formatting import count, significant


def format_parameters_line(parameters: int, formula: str, flops_per_token: float) -> str:
    """The parameter count and formula that every TFLOP/s below is based on."""
    return (
        f"[PerfLogger] Using {count(parameters)} parameters for TFLOPs calculation"
        f". Formula {formula}: {significant(flops_per_token / 1e9)} GFLOPs per token."
    )


def format_step_line(record: dict[str, Any]) -> str:
    """One line of metrics.jsonl in the PerfLogger's format; a non-finite loss is printed as nan or
    inf."""
    loss = record["loss"]
    return (
        f"Step: {record['step']}"
        f" | Time: {significant(record['step_seconds'])}s"
        f" | TFLOPs/s/GPU: {significant(record['tflops_per_gpu'])}"
        f" | Tokens/s/GPU: {significant(record['tokens_per_second_per_gpu'])}"
        f" | Loss: {f'{loss:.4f}' if not abs(loss) < 0.1 else significant(loss)}"
    )


ACCURACIES = {"sql_execution": "SQL execution accuracy", "function_call": "function-call accuracy"}
"""The shares of right answers among the figures of an evaluation, in words."""
HEADLINES = {
    "loss": "Loss: {:.4f}",
    "bits_per_byte": "Bits per byte: {:.4f}",
    **{name: f"{label}: {{:.1%}}" for name, label in ACCURACIES.items()},
}


def format_evaluation_line(step: int, results: dict[str, Any]) -> str:
    """The results of an evaluation, a line per held-out part: its figures of `HEADLINES`, else all
    its numbers."""
    lines = [f"Evaluation after step {step}"]
    for part, result in results.items():
        numbers = flatten(result if isinstance(result, dict) else {part: result})
        shown = {name: value for name, value in numbers.items() if name in HEADLINES} or numbers
        figures = [
            HEADLINES.get(name, f"{name} {{:.4g}}").format(value) for name, value in shown.items()
        ]
        lines.append(f"  {part} | " + " | ".join(figures))
    return "\n".join(lines)


_EVENTS = {
    "resume": "Resumed: after step {step} from {path}",
    "checkpoint": "Checkpoint: step {step} saved to {path}",
    "warning": "WARNING: {text}",
    "checkpoint_failed": "WARNING: the checkpoint of step {step} was not saved: {reason}",
    "evaluation_failed": "WARNING: {metric} of {part} was not measured after step {step}: {reason}",
    "checkpoint_damaged": "WARNING: skipped a damaged checkpoint: {reason}",
    "checkpoint_incomplete": "WARNING: skipped an incomplete checkpoint: {reason}",
    "checkpoint_not_removed": "WARNING: {path}: cannot be deleted: {reason}",
}


def format_event(event: str, step: int | None, fields: dict[str, Any]) -> str | None:
    """The console line of an event; None for events that are not printed."""
    text = _EVENTS.get(event)
    return None if text is None else text.format(step=step, **fields)


def flatten(results: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of nested results under dotted names; other values are dropped."""
    flat: dict[str, float] = {}
    for name, value in results.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[f"{prefix}{name}"] = value
    return flat
