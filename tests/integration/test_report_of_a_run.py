"""`drillyard report` and `drillyard watch` on a run that was really trained: they say what its
summary says."""

from __future__ import annotations

import json
import re

from tests.integration.tiny_run import STEPS, drillyard

from drillyard import formatting
from drillyard.reporting.summary import summarize


def test_report_and_watch_agree_with_the_summary_of_a_real_run(reference, tmp_path):
    run, page = reference.run, tmp_path / "report.html"
    goodput = formatting.percent(summarize(run.directory)["goodput"])
    written = drillyard("report", run.directory, "--output", page)
    assert written.returncode == 0, written.stderr
    text = page.read_text(encoding="utf-8")
    assert 'class="status good">completed<' in text
    assert f"<strong>{goodput}</strong>" in text and f"of {STEPS}; " in text
    charts = json.loads(re.search(r'id="charts">(.*?)</script>', text, re.S)[1])
    loss = next(chart for chart in charts if chart["name"] == "loss")
    curve = loss["series"][0]
    drawn = dict(zip(curve["x"], curve["y"], strict=True))
    assert {step: drawn[step] for step, _, _ in run.figures()} == {
        step: loss for step, loss, _ in run.figures()
    }
    assert "Estimate against actual" in text and "Setting left open" in text

    watched = drillyard("watch", run.directory)
    assert watched.returncode == 0, watched.stderr
    assert f"reference: completed, step {STEPS} of {STEPS}" in watched.stdout
    assert re.search(rf"^Goodput +{re.escape(goodput)}", watched.stdout, re.M)
