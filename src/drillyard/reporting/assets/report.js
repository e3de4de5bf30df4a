(() => {
  "use strict";
  // Draws the charts of the page from the JSON in it; tables of the same figures are there without this script.
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const plots = new Map();
  const printing = matchMedia("print");

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Up to six significant digits and no exponent for what people call numbers; thousands are grouped.
  const number = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-5 || size >= 1e15)) return value.toExponential(4);
    return value.toLocaleString("en-US", { maximumSignificantDigits: Math.max(6, Math.trunc(Math.log10(size || 1)) + 1) });
  };
  const short = (value, step) => {
    const size = Math.abs(value);
    for (const [limit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "K"]]) {
      const scale = suffix === "K" ? 1e3 : limit;
      if (size >= limit) return (value / scale).toLocaleString("en-US", { maximumFractionDigits: 2 }) + suffix;
    }
    const power = (x) => Math.floor(Math.log10(x) + 1e-9);
    if (size !== 0 && size < 1e-4) return value.toExponential(step ? Math.max(0, power(size) - power(step)) : 1).replace(/\.0+e/, "e");
    const digits = Math.max(0, Math.min(8, -power(step || size || 1)));
    return value.toLocaleString("en-US", { maximumFractionDigits: digits });
  };
  const seconds = (value, write) => value !== 0 && Math.abs(value) < 0.9995 ? `${write(value * 1e3)} ms` : `${write(value)} s`;
  const units = {
    number: { value: number, tick: short },
    seconds: { value: (v) => seconds(v, number), tick: (v, step) => seconds(v, (x) => short(x, x === v ? step : step * 1e3)) },
    fraction: { value: (v) => `${number(v * 100)}%`, tick: (v, step) => `${short(v * 100, step * 100)}%` },
  };

  const styles = {
    line: { width: 1.75, points: { show: false } },
    faint: { width: 1, points: { show: false } },
    joined: { width: 1.5, points: { show: true, size: 7 } },
    points: { width: 0, paths: () => null, points: { show: true, size: 8 } },
  };

  const drawSeries = (item, unit) => {
    const style = styles[item.style];
    const stroke = colour(item.colour);
    return {
      label: item.label,
      stroke,
      width: style.width,
      paths: style.paths,
      spanGaps: true,
      points: { ...style.points, fill: item.style === "points" ? stroke : colour("--card"), stroke },
      value: (_, value) => (value == null ? "" : unit.value(value)),
    };
  };

  // Levels (the median and its multiple) and the steps at which a later round of ranks went on.
  const drawLines = (spec, unit) => (plot) => {
    const { ctx, bbox } = plot;
    const pixel = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineWidth = pixel;
    ctx.font = `${11 * pixel}px system-ui, sans-serif`;
    ctx.setLineDash([4 * pixel, 4 * pixel]);
    for (const step of spec.marks) {
      const x = Math.round(plot.valToPos(step, "x", true)) + 0.5;
      ctx.strokeStyle = colour("--warning");
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.setLineDash([2 * pixel, 3 * pixel]);
    ctx.lineJoin = "round";
    ctx.textAlign = "right";
    for (const level of spec.levels) {
      const y = Math.round(plot.valToPos(level.value, "y", true)) + 0.5;
      if (!(y > bbox.top && y < bbox.top + bbox.height)) continue;
      ctx.strokeStyle = ctx.fillStyle = colour("--muted");
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      const label = [`${level.label} ${unit.value(Number(level.value.toPrecision(4)))}`, bbox.left + bbox.width - 4 * pixel, y - 5 * pixel];
      ctx.setLineDash([]);
      ctx.lineWidth = 4 * pixel;
      ctx.strokeStyle = colour("--card");
      ctx.strokeText(...label);
      ctx.fillText(...label);
      ctx.lineWidth = pixel;
      ctx.setLineDash([2 * pixel, 3 * pixel]);
    }
    ctx.restore();
  };

  // Zooming one chart zooms all; a chart with fewer steps shows what it has of the range.
  let zooming = false;
  const zoomAll = (min, max) => {
    zooming = true;
    for (const plot of plots.values()) plot.setScale("x", { min, max });
    zooming = false;
    const whole = min <= first && max >= last;
    for (const button of document.querySelectorAll(".reset")) button.hidden = whole;
  };
  const first = Math.min(...specs.map((spec) => spec.x[0]));
  const last = Math.max(...specs.map((spec) => spec.x[spec.x.length - 1]));

  const range = (spec) => (_, low, high) => {
    if (low == null) return spec.logarithmic ? [0.1, 1] : [0, 1];
    if (spec.logarithmic) return [low * 0.8, high * 1.25];
    const shown = spec.levels.length ? Math.max(high, spec.levels[0].value * 1.5) : high;
    const bottom = spec.unit === "seconds" ? 0 : low;
    const room = (shown - bottom) * 0.06 || Math.abs(shown) * 0.05 || 1;
    return [spec.unit === "seconds" ? 0 : bottom - room, shown + room];
  };

  const draw = (spec) => {
    const place = document.querySelector(`.plot[data-chart="${spec.name}"]`);
    const unit = units[spec.unit];
    const axis = { stroke: colour("--muted"), font: "12px system-ui, sans-serif", ticks: { show: false }, grid: { stroke: colour("--grid"), width: 1 } };
    const steps = { ...axis, grid: { show: false }, size: 28, gap: 4, space: 70, values: (_, splits, __, ___, step) => splits.map((v) => short(v, Math.max(1, step))), incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6] };
    const values = { ...axis, size: 62, gap: 6, space: 34, values: (_, splits, __, ___, step) => splits.map((v) => (v == null ? "" : unit.tick(v, step))) };
    if (spec.logarithmic) {
      // One, two and five of each decade.
      values.splits = (_, __, low, high) => {
        const ticks = [];
        for (let decade = Math.floor(Math.log10(low)); decade <= Math.log10(high); decade++)
          for (const digit of [1, 2, 5]) if (digit * 10 ** decade >= low && digit * 10 ** decade <= high) ticks.push(digit * 10 ** decade);
        return ticks;
      };
      values.filter = (_, splits) => splits;
      values.values = (_, splits) => splits.map((v) => unit.tick(v, 0));
    }
    const plot = new uPlot(
      {
        width: place.clientWidth,
        height: height(place),
        padding: [10, 26, 0, 0],
        cursor: { y: false, points: { size: 9, width: 0, fill: (_, index) => colour(spec.series[index - 1].colour) }, sync: { key: "step" }, focus: { prox: 24 }, drag: { setScale: true, x: true, y: false } },
        focus: { alpha: 1 },
        legend: { markers: { width: 0, fill: (_, index) => (index ? colour(spec.series[index - 1].colour) : null) } },
        scales: { x: { time: false, range: (_, low, high) => [low ?? first, high === low ? low + 1 : high] }, y: { distr: spec.logarithmic ? 3 : 1, range: range(spec) } },
        axes: [steps, values],
        series: [{ label: "Step", value: (_, value) => (value == null ? "" : value.toLocaleString("en-US")) }, ...spec.series.map((item) => drawSeries(item, unit))],
        hooks: {
          draw: [drawLines(spec, unit)],
          setScale: [(self, key) => { if (key === "x" && !zooming && plots.has(spec.name)) zoomAll(self.scales.x.min, self.scales.x.max); }],
        },
      },
      [spec.x, ...spec.series.map((item) => item.values)],
      place,
    );
    plots.set(spec.name, plot);
  };

  const height = (place) => (printing.matches ? 170 : place.closest(".wide") && innerWidth > 640 ? 300 : innerWidth > 640 ? 230 : 200);

  const drawAll = () => {
    for (const plot of plots.values()) plot.destroy();
    plots.clear();
    for (const spec of specs) draw(spec);
    zoomAll(first, last);
  };

  // The arrow keys move the cursor of the chart that has the focus.
  const onKey = (event, spec) => {
    const plot = plots.get(spec.name);
    const by = { ArrowRight: 1, ArrowLeft: -1, PageDown: 20, PageUp: -20 }[event.key];
    if (event.key === "Escape") return zoomAll(first, last);
    if (!by || !plot) return;
    event.preventDefault();
    const from = plot.cursor.idx ?? (by > 0 ? -1 : spec.x.length);
    const index = Math.max(0, Math.min(spec.x.length - 1, from + by));
    plot.setCursor({ left: plot.valToPos(spec.x[index], "x"), top: 0 });
  };

  for (const spec of specs) {
    const place = document.querySelector(`.plot[data-chart="${spec.name}"]`);
    place.addEventListener("keydown", (event) => onKey(event, spec));
    const reset = Object.assign(document.createElement("button"), { type: "button", className: "reset", textContent: "Whole run", hidden: true });
    reset.addEventListener("click", () => zoomAll(first, last));
    place.parentElement.querySelector("figcaption").append(reset);
  }
  for (const details of document.querySelectorAll("details")) details.open = false;
  drawAll();

  new ResizeObserver(() => {
    for (const [name, plot] of plots) {
      const place = document.querySelector(`.plot[data-chart="${name}"]`);
      if (place.clientWidth && place.clientWidth !== plot.width) plot.setSize({ width: place.clientWidth, height: height(place) });
    }
  }).observe(document.querySelector("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  printing.addEventListener("change", drawAll);
  addEventListener("beforeprint", drawAll);
  addEventListener("afterprint", drawAll);
  window.drillyard = { plots, specs };
})();
