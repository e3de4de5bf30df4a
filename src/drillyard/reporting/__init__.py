"""The report and the watch: a run as people like to look at it, in one HTML file or live in the terminal.

Nothing is measured here: figures come from telemetry's summary (a run directory) or from measure (any log). Both
screens are functions of a value: `content.py` for the report, `watch/live_run.py` for the watch.
"""
