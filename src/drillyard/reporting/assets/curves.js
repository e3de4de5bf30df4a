// The points of a curve: which are in view, which is nearest, and the path through them. A series
// has steps `x`, ascending, and values `y`, null where the line is broken.

// The first index whose step is at least `step`.
function indexFrom(x, step) {
  let low = 0;
  let high = x.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (x[middle] < step) low = middle + 1;
    else high = middle;
  }
  return low;
}

// The indices [start, end) of the points in the range `view` of steps.
function pointsInView(x, view) {
  const start = indexFrom(x, view.low);
  let end = indexFrom(x, view.high);
  while (end < x.length && x[end] === view.high) end++;
  return [start, end];
}

// The index of the point with a value that is nearest to `step`; -1 without any.
function nearestPoint(series, step) {
  const { x, y } = series;
  let after = indexFrom(x, step);
  let before = after - 1;
  while (after < x.length && y[after] === null) after++;
  while (before >= 0 && y[before] === null) before--;
  if (after >= x.length) return before;
  return before >= 0 && step - x[before] <= x[after] - step ? before : after;
}

// Lowest and highest value in view; of a series without a point there, those of its neighbours.
function extent(series, view) {
  let [start, end] = pointsInView(series.x, view);
  if (start === end) [start, end] = [Math.max(0, start - 1), Math.min(series.x.length, end + 1)];
  let low = Infinity;
  let high = -Infinity;
  for (let i = start; i < end; i++) {
    const value = series.y[i];
    if (value === null) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

function pair(series, index, xScale, yScale) {
  return `${xScale.pixel(series.x[index]).toFixed(1)} ${yScale.pixel(series.y[index]).toFixed(1)}`;
}

// The line through the points in view, and through one more on either side so that it runs to the
// edge. Of the points in one column of pixels only the first, lowest, highest and last are drawn:
// the same picture, and 100,000 points make a path no longer than the screen is wide. A null breaks
// the line, unless its column also has a value: that gap is narrower than a pixel.
function linePath(series, view, xScale, yScale) {
  const { x, y } = series;
  const [start, end] = pointsInView(x, view);
  const parts = [];
  let inColumn = null;
  let length = 0;

  const endLine = () => {
    // A point alone has no line: a very short one shows as a dot.
    if (length === 1) parts.push("h.1");
    length = 0;
  };
  const addColumn = () => {
    if (inColumn === null) return;
    if (inColumn.first === -1) return endLine();
    const { first, lowest, highest, last } = inColumn;
    for (const index of [...new Set([first, lowest, highest, last])].sort((a, b) => a - b)) {
      parts.push((length === 0 ? "M" : "L") + pair(series, index, xScale, yScale));
      length++;
    }
  };

  for (let i = Math.max(0, start - 1); i < Math.min(x.length, end + 1); i++) {
    const column = Math.floor(xScale.pixel(x[i]));
    if (inColumn === null || column !== inColumn.column) {
      addColumn();
      inColumn = { column, first: -1, lowest: -1, highest: -1, last: -1 };
    }
    if (y[i] === null) continue;
    if (inColumn.first === -1) inColumn.first = inColumn.lowest = inColumn.highest = i;
    if (y[i] < y[inColumn.lowest]) inColumn.lowest = i;
    if (y[i] > y[inColumn.highest]) inColumn.highest = i;
    inColumn.last = i;
  }
  addColumn();
  endLine();
  return parts.join("");
}

// A dot at each point in view: lines of no length, whose round ends show. One for each pixel.
function dotsPath(series, view, xScale, yScale) {
  const [start, end] = pointsInView(series.x, view);
  const places = new Set();
  for (let i = start; i < end; i++) {
    if (series.y[i] !== null) places.add(pair(series, i, xScale, yScale));
  }
  return [...places].map((place) => `M${place}h.1`).join("");
}
