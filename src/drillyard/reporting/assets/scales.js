"use strict";
// Numbers as text, ticks, and the mapping between values and pixels.

// Up to six significant digits and no exponent for what people call numbers; thousands are grouped.
function numberText(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-5 || size >= 1e15)) return value.toExponential(4);
  const digits = Math.max(6, Math.trunc(Math.log10(size || 1)) + 1);
  return value.toLocaleString("en-US", { maximumSignificantDigits: digits });
}

// A tick's value with as many decimals as the distance `step` between ticks needs.
function tickText(value, step) {
  const power = (x) => Math.floor(Math.log10(Math.abs(x)) + 1e-9);
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(2);
  const letters = [[1e12, 1e12, "T"], [1e9, 1e9, "B"], [1e6, 1e6, "M"], [1e4, 1e3, "K"]];
  for (const [limit, unit, suffix] of letters) {
    if (size < limit) continue;
    const digits = Math.max(0, Math.min(8, -power(step / unit)));
    return (value / unit).toLocaleString("en-US", { maximumFractionDigits: digits }) + suffix;
  }
  if (size !== 0 && size < 1e-4) {
    const digits = Math.max(0, Math.min(8, power(size) - power(step)));
    return value.toExponential(digits).replace(/\.0+e/, "e");
  }
  const digits = Math.max(0, Math.min(8, -power(step)));
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

// A duration; below a second in milliseconds. `write` turns a number and its multiplier into text.
function secondsText(value, write) {
  const short = value !== 0 && Math.abs(value) < 0.9995;
  return short ? `${write(value * 1e3, 1e3)} ms` : `${write(value, 1)} s`;
}

// How each unit writes a value, and the value of a tick.
const UNITS = {
  number: { value: numberText, tick: tickText },
  seconds: {
    value: (value) => secondsText(value, numberText),
    tick: (value, step) => secondsText(value, (scaled, factor) => tickText(scaled, step * factor)),
  },
  fraction: {
    value: (value) => `${numberText(value * 100)}%`,
    tick: (value, step) => `${tickText(value * 100, step * 100)}%`,
  },
};

// At most about `most` ticks from low to high, one, two or five times a power of ten apart, and
// that distance. The number of rounds is bounded because adding a small step to a large value may
// not change it.
function linearTicks(low, high, most, smallestStep = 0) {
  const rough = (high / 2 - low / 2) / Math.max(1, most) * 2;
  const power = 10 ** Math.floor(Math.log10(rough));
  const digit = [1, 2, 5, 10].find((each) => each * power >= rough * 0.999);
  const step = Math.max(smallestStep, digit * power);
  const ticks = [];
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.min(high + step * 1e-9, Number.MAX_VALUE);
  for (let n = 0; n <= most + 1 && (first + n) * step <= last; n++) ticks.push((first + n) * step);
  return { ticks, step };
}

// One, two and five of each decade; only powers of ten where those are too many.
function logarithmicTicks(low, high, most) {
  const from = Math.floor(Math.log10(low));
  const to = Math.ceil(Math.log10(high));
  const digits = (to - from) * 3 <= most * 1.5 ? [1, 2, 5] : [1];
  const every = digits.length > 1 ? 1 : Math.max(1, Math.ceil((to - from) / most));
  const ticks = [];
  for (let decade = from; decade <= to; decade += every) {
    for (const digit of digits) {
      const value = Number(`${digit}e${decade}`);
      if (value >= low && value <= high) ticks.push({ value, step: 10 ** decade });
    }
  }
  return ticks;
}

// The mapping of [low, high] to the pixels [from, to]. Halves keep the difference of two finite
// numbers finite.
function makeScale(low, high, from, to, logarithmic) {
  const bend = logarithmic ? Math.log10 : (value) => value / 2;
  const unbend = logarithmic ? (value) => 10 ** value : (value) => value * 2;
  const start = bend(low);
  const span = bend(high) - start;
  return {
    low,
    high,
    pixel: (value) => from + ((bend(value) - start) / span) * (to - from),
    value: (pixel) => unbend(start + ((pixel - from) / (to - from)) * span),
  };
}
