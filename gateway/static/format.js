// Numbers as people read them. Nothing known is a dash.

export const NONE = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  if (!isNumber(value)) return NONE;
  if (value >= 1e6) return `${(value / 1e6).toFixed(value < 1e7 ? 2 : 1)} M`;
  if (value >= 1e5) return `${(value / 1e3).toFixed(0)} k`;
  return Math.round(value).toLocaleString("en");
}

// Three digits, in the unit that fits: 0.4 ms, 41 ms, 1.24 s, 2 min 05 s.
export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value < 0.00995) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 0.9995) return `${(value * 1e3).toFixed(0)} ms`;
  if (value < 9.995) return `${value.toFixed(2)} s`;
  if (value < 99.5) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${twoDigits(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${twoDigits((value % 3600) / 60)} min`;
}

const twoDigits = (value) => String(Math.floor(value)).padStart(2, "0");

// The same of a round number: 5 s, not 5.00 s.
export const roundSeconds = (value) => seconds(value).replace(/\.0+ /, " ");

export function rate(value) {
  if (!isNumber(value)) return NONE;
  if (value >= 1e4) return count(value);
  return value >= 100 ? value.toFixed(0) : value >= 1 ? value.toFixed(1) : value.toFixed(2);
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 || value >= 99.5 ? value.toFixed(0) : value.toFixed(1)} ${units[unit]}`;
}

export function share(value) {
  return isNumber(value) ? `${(100 * value).toFixed(0)} %` : NONE;
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

// Long ids by their ends: both tell requests apart.
export function shortId(id, most = 14) {
  const tail = most < 10 ? 2 : 4;
  return id.length <= most ? id : `${id.slice(0, Math.max(most - tail - 1, 1))}…${id.slice(-tail)}`;
}
