// How curves are looked at, all of it in the address: what the x axis counts, the zoom, smoothing, a logarithmic axis.
import { html, place, restate, short } from "slime/data";

export const AXES = { step: "step", samples: "samples", tokens: "tokens", time: "time" };

export const brief = value => {
  const size = Math.abs(value);
  for (const [big, sign] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= big) return `${short(+(value / (big == 1e4 ? 1e3 : big)).toPrecision(3))}${sign}`;
  return short(value);
};

export function lasting(seconds) {
  if (seconds == null) return "·";
  if (seconds < 10) return `${+seconds.toPrecision(2)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 120 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export const written = (by, x) => (by == "time" ? lasting(x) : by == "step" ? `step ${x}` : `${brief(x)} ${by}`);

// What the address says: `zoom` is [first, last] of the x axis, or null for all.
export function look() {
  const { by, s, log, x } = place().params;
  const [low, high] = (x || "").split("_").map(Number);
  const smooth = s === undefined || !isFinite(+s) ? 0.6 : Math.max(0, Math.min(0.98, +s));
  return { by: AXES[by] ? by : "step", smooth, log: log == "1", zoom: high > low ? [low, high] : null };
}

export const zoomTo = range => restate({ x: range ? range.map(value => +value.toPrecision(5)).join("_") : "" });
export const resetZoom = () => zoomTo(null);

// An exponential mean; what comes before the first values does not pull it down.
export function smoothed(values, weight) {
  let [sum, mass] = [0, 0];
  return values.map(value => {
    if (value == null) return null;
    [sum, mass] = [weight * sum + (1 - weight) * value, weight * mass + 1 - weight];
    return sum / mass;
  });
}

const made = new WeakMap();
// One metric as a curve, in its unit: {label, name, xs, steps, values, low, high}; the same one while the data is.
export function curve(data, name, by, words, banded) {
  if (!made.has(data)) made.set(data, new Map());
  const known = made.get(data),
    key = JSON.stringify([name, by, words, banded]);
  if (!known.has(key)) known.set(key, make(data, name, by, words, banded));
  return known.get(key);
}

function make(data, name, by, [title, , factor] = [name, "", 1], banded = false) {
  const all = data.values[name] || [];
  const kept = data.steps.map((_, i) => i).filter(i => all[i] != null);
  const pick = column => column && kept.map(i => (column[i] == null ? null : column[i] * factor));
  const xs = data.axes?.[by] || data.steps;
  return {
    label: title,
    name,
    xs: kept.map(i => xs[i]),
    steps: kept.map(i => data.steps[i]),
    values: pick(all),
    ...(banded ? { low: pick(data.values[`${name}/low`]), high: pick(data.values[`${name}/high`]) } : {}),
  };
}

// The first and the last of what all curves have, so that one step is at one place in each.
export const extent = (data, by) => {
  const xs = data.axes?.[by] || data.steps;
  return xs.length ? [xs[0], xs.at(-1)] : null;
};

export function Looks({ axes }) {
  const { by, smooth, log, zoom } = look();
  return html`
    <span class="looks right">
      ${zoom && html`<button onClick=${resetZoom}>Show all</button>`}
      <label>
        x
        <select aria-label="x axis" value=${by} onChange=${event => restate({ by: event.target.value, x: "" })}>
          ${Object.keys(AXES).map(
            name =>
              (name == "step" || axes?.[name]) && html`<option value=${name} selected=${name == by}>${AXES[name]}</option>`,
          )}
        </select>
      </label>
      <label>
        smooth
        <input
          type="range"
          min="0"
          max="0.95"
          step="0.05"
          value=${smooth}
          onInput=${event => restate({ s: event.target.value })} />
      </label>
      <label>
        <input type="checkbox" checked=${log} onChange=${() => restate({ log: log ? "" : "1" })} />
        log
      </label>
    </span>
  `;
}
