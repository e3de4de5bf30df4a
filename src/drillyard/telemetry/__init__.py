"""What a run writes about itself: events, metrics, the console line, trackers, summary; and their readers."""

from drillyard.telemetry.events import append_event, read_events
from drillyard.telemetry.metrics import StepRecord, read_metrics
from drillyard.telemetry.runlog import RunLog
from drillyard.telemetry.summary import write_summary
from drillyard.telemetry.throughput import describe_model

__all__ = ["RunLog", "StepRecord", "append_event", "describe_model", "read_events", "read_metrics", "write_summary"]
