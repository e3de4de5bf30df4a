"""Output of a run about itself (events, metrics, console lines, trackers), and its readers."""

from drillyard.telemetry.events import append_event, read_events
from drillyard.telemetry.metrics import StepRecord, describe_model, read_metrics
from drillyard.telemetry.runlog import RunLog

__all__ = ["RunLog", "StepRecord", "append_event", "describe_model", "read_events", "read_metrics"]
