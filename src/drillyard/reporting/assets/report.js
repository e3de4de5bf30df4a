// Draws the charts in place of the still pictures that are there without scripts, and answers the
// pointer, the keyboard and the buttons.

function drawAll(onPaper = false) {
  for (const chart of charts) drawChart(chart, onPaper);
  for (const button of document.querySelectorAll(".reset")) button.hidden = view === run;
}

function zoomTo(low, high) {
  low = Math.max(low, run.low);
  high = Math.min(high, run.high);
  // A range without a step shows nothing.
  if (high - low < 1) return;
  view = low === run.low && high === run.high ? run : { low, high };
  drawAll();
}

function showWholeRun() {
  zoomTo(run.low, run.high);
}

function moveCursor(step) {
  if (step === cursorStep) return;
  cursorStep = step;
  for (const chart of charts) drawCursor(chart);
}

// The step of the shown point that is nearest to a pixel; null where no curve is shown.
function stepAt(chart, pixel) {
  const step = chart.xScale.value(pixel);
  let nearest = null;
  for (const series of shownSeries(chart)) {
    const index = nearestPoint(series, step);
    if (index === -1) continue;
    const found = series.x[index];
    if (nearest === null || Math.abs(found - step) < Math.abs(nearest - step)) nearest = found;
  }
  return nearest;
}

// The step `by` points before or after the cursor, among the points of all shown curves.
function neighbour(chart, by) {
  const inView = ({ x, y }) =>
    x.filter((step, index) => y[index] !== null && step >= view.low && step <= view.high);
  const steps = [...new Set(shownSeries(chart).flatMap(inView))].sort((a, b) => a - b);
  if (!steps.length) return null;
  // Without a cursor the way starts before the first or behind the last point.
  const from = cursorStep ?? (by > 0 ? -Infinity : Infinity);
  const index = indexFrom(steps, from);
  // Between two points the next one is ahead already.
  const ahead = by > 0 && steps[index] !== from ? by - 1 : by;
  return steps[Math.max(0, Math.min(steps.length - 1, index + ahead))];
}

function onKey(event, chart) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const arrows = { ArrowRight: 1, ArrowLeft: -1 };
  const moves = { ...arrows, PageDown: 20, PageUp: -20, Home: -Infinity, End: Infinity };
  const zooms = { "+": 0.5, "=": 0.5, "-": 2 };
  if (event.key in moves) moveCursor(neighbour(chart, moves[event.key]));
  else if (event.key in zooms) {
    const centre = cursorStep ?? (view.low + view.high) / 2;
    const factor = zooms[event.key];
    zoomTo(centre - (centre - view.low) * factor, centre + (view.high - centre) * factor);
  } else if (event.key === "Escape") showWholeRun();
  else return;
  event.preventDefault();
}

function followPointer(chart) {
  const { svg } = chart;
  let dragFrom = null;
  const within = (event) => {
    const pixel = event.clientX - svg.getBoundingClientRect().left;
    return Math.max(LEFT, Math.min(chart.width - RIGHT, pixel));
  };
  svg.addEventListener("pointermove", (event) => {
    const pixel = within(event);
    moveCursor(stepAt(chart, pixel));
    svg.querySelector(".selection")?.remove();
    if (dragFrom === null) return;
    const [x, width] = [Math.min(pixel, dragFrom), Math.abs(pixel - dragFrom)];
    const height = chart.height - TOP - BOTTOM;
    svg.append(shape("rect", { class: "selection", x, y: TOP, width, height }));
  });
  svg.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    dragFrom = within(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointerup", (event) => {
    if (dragFrom === null) return;
    const pixels = [dragFrom, within(event)].sort((a, b) => a - b);
    dragFrom = null;
    svg.querySelector(".selection")?.remove();
    // A click that moved by a few pixels is not a selection.
    if (pixels[1] - pixels[0] > 5) zoomTo(...pixels.map(chart.xScale.value));
  });
  svg.addEventListener("pointercancel", () => {
    dragFrom = null;
    svg.querySelector(".selection")?.remove();
  });
  svg.addEventListener("pointerleave", () => moveCursor(null));
  svg.addEventListener("dblclick", showWholeRun);
}

function addButton(chart, className, text, onClick) {
  const button = piece("button", text, className);
  button.type = "button";
  button.addEventListener("click", () => onClick(button));
  chart.figure.querySelector(".tools").append(button);
  return button;
}

function makeInteractive(chart) {
  const { svg, spec, tip } = chart;
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("keydown", (event) => onKey(event, chart));
  // Of all charts that show the cursor, a screen reader reads the one with the focus.
  svg.addEventListener("focus", () => tip.setAttribute("role", "status"));
  svg.addEventListener("blur", () => {
    tip.removeAttribute("role");
    moveCursor(null);
  });
  followPointer(chart);
  addButton(chart, "reset", "Whole run", showWholeRun).hidden = true;
  // A logarithmic scale has no place for zero and below.
  if (spec.series.every(({ y }) => y.every((value) => value === null || value > 0))) {
    const button = addButton(chart, "log", "Log scale", () => {
      chart.logarithmic = !chart.logarithmic;
      button.setAttribute("aria-pressed", chart.logarithmic);
      drawChart(chart);
    });
    button.setAttribute("aria-pressed", chart.logarithmic);
  }
  chart.figure.querySelectorAll(".legend button").forEach((button, index) => {
    button.disabled = false;
    button.addEventListener("click", () => {
      if (!chart.hidden.delete(index)) chart.hidden.add(index);
      button.setAttribute("aria-pressed", !chart.hidden.has(index));
      drawChart(chart);
    });
  });
}

for (const chart of charts) makeInteractive(chart);
for (const details of document.querySelectorAll("details")) details.open = false;
for (const hint of document.querySelectorAll(".hint")) hint.hidden = false;
drawAll();
new ResizeObserver(() => {
  if (charts.some((chart) => chart.width !== chart.svg.parentElement.clientWidth)) drawAll();
}).observe(document.querySelector("main"));
addEventListener("beforeprint", () => drawAll(true));
addEventListener("afterprint", () => drawAll());
