// Draws a chart as SVG: axes, curves, marks, levels and the cursor. All charts of the page show the
// same range of steps and have one cursor; each has its own scale of values and its own hidden
// curves. Colours are the style sheet's, so dark mode and paper need no drawing.

const charts = JSON.parse(document.getElementById("charts").textContent).map(findChart);
const run = wholeRun();
let view = run;
let cursorStep = null;

const LEFT = 78;
const RIGHT = 22;
const TOP = 12;
const BOTTOM = 40;
// Dots on the edge of the plot are drawn beyond it by this much.
const EDGE = 6;

function findChart(spec) {
  const figure = document.getElementById(spec.name);
  return {
    spec,
    figure,
    svg: figure.querySelector(".plot svg"),
    tip: figure.querySelector(".tip"),
    unit: UNITS[spec.unit],
    logarithmic: spec.logarithmic,
    hidden: new Set(),
    width: 0,
  };
}

function wholeRun() {
  const ends = ({ x }) => (x.length ? [x[0], x[x.length - 1]] : []);
  const steps = charts.flatMap(({ spec }) => spec.series.flatMap(ends));
  const low = Math.min(...steps);
  const high = Math.max(...steps);
  return { low, high: high > low ? high : low + 1 };
}

function shape(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function shownSeries(chart) {
  return chart.spec.series.filter((_, index) => !chart.hidden.has(index));
}

// The range of values of a chart: what is in view, with room above and below. Step times start at
// zero, so that their height compares; the first level is kept in view.
function valueRange(chart) {
  const extents = shownSeries(chart).map((series) => extent(series, view));
  let low = Math.min(...extents.map(([value]) => value));
  let high = Math.max(...extents.map(([, value]) => value));
  if (low > high) return chart.logarithmic ? [0.1, 1] : [0, 1];
  if (chart.logarithmic) {
    return [Math.max(low * 0.8, Number.MIN_VALUE), Math.min(high * 1.25, Number.MAX_VALUE)];
  }
  if (chart.spec.levels.length) high = Math.max(high, chart.spec.levels[0].value * 1.5);
  if (chart.spec.unit === "seconds") low = Math.min(0, low);
  const room = (high / 2 - low / 2) * 0.12 || Math.abs(high) * 0.05 || 1;
  low = low === 0 && chart.spec.unit === "seconds" ? 0 : Math.max(low - room, -Number.MAX_VALUE);
  return [low, Math.min(high + room, Number.MAX_VALUE)];
}

// On paper a chart has the size of its place there, which a script cannot ask for beforehand.
function sizeOf(chart, onPaper) {
  const wide = chart.figure.classList.contains("wide");
  if (onPaper) return { width: wide ? 680 : 340, height: 190 };
  const width = chart.svg.parentElement.clientWidth;
  return { width, height: innerWidth <= 640 ? 210 : wide ? 300 : 235 };
}

function drawChart(chart, onPaper = false) {
  const { svg } = chart;
  Object.assign(chart, sizeOf(chart, onPaper));
  chart.xScale = makeScale(view.low, view.high, LEFT, chart.width - RIGHT, false);
  chart.yScale = makeScale(...valueRange(chart), chart.height - BOTTOM, TOP, chart.logarithmic);
  svg.setAttribute("viewBox", `0 0 ${chart.width} ${chart.height}`);
  chart.cursor = shape("g", { class: "cursor" });
  svg.replaceChildren(...axes(chart), plotArea(chart), chart.cursor);
  drawCursor(chart);
}

function line(className, x1, x2, y1, y2) {
  return shape("line", { class: className, x1, x2, y1, y2 });
}

function label(className, text, x, y, anchor, more = {}) {
  return shape("text", { class: className, x, y, "text-anchor": anchor, ...more }, text);
}

function valueTicks({ yScale, logarithmic, height }) {
  const room = Math.max(2, Math.floor((height - TOP - BOTTOM) / 36));
  const ticks = logarithmic ? logarithmicTicks(yScale.low, yScale.high, room) : [];
  // A logarithmic scale over less than a decade may have no such tick.
  if (ticks.length >= 2) return ticks;
  const { ticks: values, step } = linearTicks(yScale.low, yScale.high, room);
  return values.map((value) => ({ value, step }));
}

function axes(chart) {
  const { spec, width, height, xScale, yScale, unit } = chart;
  const right = width - RIGHT;
  const base = height - BOTTOM;
  const shapes = [line("axis", LEFT, right, base, base)];
  for (const { value, step } of valueTicks(chart)) {
    const y = yScale.pixel(value).toFixed(1);
    shapes.push(line("gridline", LEFT, right, y, y));
    shapes.push(label("tick value", unit.tick(value, step), LEFT - 8, y, "end", { dy: "0.35em" }));
  }
  const room = Math.max(2, Math.floor((right - LEFT) / 80));
  const steps = linearTicks(view.low, view.high, room, 1);
  for (const value of steps.ticks) {
    const x = xScale.pixel(value).toFixed(1);
    shapes.push(line("axis", x, x, base, base + 4));
    shapes.push(label("tick step", tickText(value, steps.step), x, base + 17, "middle"));
  }
  const title = spec.axis + (chart.logarithmic ? ", log scale" : "");
  const turned = { transform: `translate(13 ${(TOP + base) / 2}) rotate(-90)` };
  shapes.push(label("axis-title", "Step", (LEFT + right) / 2, height - 5, "middle"));
  shapes.push(label("axis-title", title, 0, 0, "middle", turned));
  return shapes;
}

// The curves, levels and marks, clipped: a nested svg clips by itself.
function plotArea(chart) {
  const x = LEFT - EDGE;
  const y = TOP - EDGE;
  const width = chart.width - RIGHT + EDGE - x;
  const height = chart.height - BOTTOM + EDGE - y;
  const area = shape("svg", { x, y, width, height, viewBox: `${x} ${y} ${width} ${height}` });
  area.append(...marks(chart), ...curves(chart), ...levels(chart));
  return area;
}

// The steps that later attempts resumed from.
function marks({ spec, width, height, xScale }) {
  const shapes = [];
  let labelled = -Infinity;
  for (const step of spec.marks.filter((each) => each >= view.low && each <= view.high)) {
    const x = xScale.pixel(step);
    const mark = line("mark", x, x, TOP, height - BOTTOM);
    const text = `A later attempt resumed from step ${step.toLocaleString("en-US")}`;
    mark.append(shape("title", {}, text));
    shapes.push(mark);
    // Labels of marks that are close together would hide each other.
    if (x - labelled < 90) continue;
    labelled = x;
    const [place, anchor] = x > width - 90 ? [x - 5, "end"] : [x + 5, "start"];
    shapes.push(label("mark-label", "resumed", place, TOP + 9, anchor));
  }
  return shapes;
}

function curves({ spec, hidden, xScale, yScale }) {
  const shapes = [];
  spec.series.forEach((series, index) => {
    if (hidden.has(index)) return;
    const add = (className, d) => {
      const path = shape("path", { class: className, d, "data-series": index });
      path.style.setProperty("--curve", `var(${series.colour})`);
      shapes.push(path);
    };
    if (series.style !== "points") {
      add(`curve ${series.style}`, linePath(series, view, xScale, yScale));
    }
    if (series.style === "joined" || series.style === "points") {
      const dots = dotsPath(series, view, xScale, yScale);
      add("dots", dots);
      if (series.style === "joined") add("dots hollow", dots);
    }
  });
  return shapes;
}

function levels({ spec, width, height, yScale, unit }) {
  const shapes = [];
  for (const level of spec.levels) {
    const y = yScale.pixel(level.value);
    if (!(y > TOP && y < height - BOTTOM)) continue;
    const text = `${level.label} ${unit.value(Number(level.value.toPrecision(4)))}`;
    shapes.push(line("level", LEFT, width - RIGHT, y, y));
    shapes.push(label("level-label", text, width - RIGHT - 4, y - 5, "end"));
  }
  return shapes;
}

// A small HTML element of the readout.
function piece(name, text, className = "") {
  return Object.assign(document.createElement(name), { textContent: text, className });
}

// The vertical line at the cursor's step, a dot on each curve and their values beside it: each
// curve's at its point nearest to the cursor.
function drawCursor(chart) {
  const { cursor, tip, xScale, yScale, unit } = chart;
  const stepText = (step) => step.toLocaleString("en-US");
  const shown = cursorStep !== null && cursorStep >= view.low && cursorStep <= view.high;
  cursor.replaceChildren();
  tip.hidden = !shown;
  if (!shown) return;
  const x = xScale.pixel(cursorStep);
  cursor.append(line("crosshair", x, x, TOP, chart.height - BOTTOM));
  const rows = [piece("b", `Step ${stepText(cursorStep)}`)];
  for (const series of shownSeries(chart)) {
    const index = nearestPoint(series, cursorStep);
    const [step, value] = [series.x[index], series.y[index]];
    if (index === -1 || step < view.low || step > view.high) continue;
    const dot = shape("circle", { cx: xScale.pixel(step), cy: yScale.pixel(value), r: 4.5 });
    const row = piece("span", "");
    const swatch = piece("i", "", "swatch");
    for (const one of [dot, swatch]) one.style.setProperty("--curve", `var(${series.colour})`);
    const elsewhere = step === cursorStep ? "" : ` (step ${stepText(step)})`;
    row.append(swatch, `${series.label} `, piece("b", unit.value(value)), elsewhere);
    cursor.append(dot);
    rows.push(row);
  }
  tip.replaceChildren(...rows);
  const onRight = x + 14 + tip.offsetWidth <= chart.width;
  tip.style.left = `${Math.max(0, onRight ? x + 14 : x - 14 - tip.offsetWidth)}px`;
}
