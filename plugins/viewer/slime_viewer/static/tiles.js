// The line of state, and five numbers that say how a run is.
import { useEffect, useMemo, useState } from "preact/hooks";
import { html, short } from "slime/data";
import { lasting, smoothed } from "slime/axes";
import { Spark } from "slime/charts";
import { counted, stateWords } from "slime/verdict";

const three = value => short(+value.toPrecision(3));
const mean = values => values.reduce((a, b) => a + b, 0) / values.length;

export function State({ run }) {
  const { progress } = run;
  const { done, total, left_s, spent_s, quiet_s } = progress;
  const part = total ? Math.min(1, done / total) : null;
  const goes = ["running", "elsewhere"].includes(run.state);
  // The server's clock says how long ago it wrote; this one, which may be another machine's, counts on from there.
  const asked = useMemo(() => performance.now(), [progress]);
  const [, tick] = useState(0);
  useEffect(() => {
    const timer = goes ? setInterval(() => tick(n => n + 1), 1000) : 0;
    return () => clearInterval(timer);
  }, [goes]);
  const ago = quiet_s == null ? null : quiet_s + (performance.now() - asked) / 1000;
  return html`
    <p class="progress">
      <b class=${"state " + run.state}>${stateWords(run.state)}</b>
      <span>${counted(progress)}</span>
      ${
        part != null &&
        html`<span class="bar" role="progressbar" aria-label="steps done" aria-valuenow=${Math.round(100 * part)} aria-valuemin="0" aria-valuemax="100"><i style=${{ width: 100 * part + "%" }}></i></span>`
      }
      ${spent_s > 0 && html`<span>${goes ? "" : "took "}${lasting(spent_s)}${goes ? " so far" : ""}</span>`}
      ${left_s != null && html`<span>about ${lasting(left_s)} left</span>`}
      ${goes && ago != null && html`<span class="dim">last written ${lasting(Math.max(1, ago))} ago</span>`}
    </p>
  `;
}

const ends = values => {
  const kept = values.filter(value => value != null);
  const window = Math.max(1, Math.min(10, Math.floor(kept.length / 3)));
  return kept.length ? [mean(kept.slice(0, window)), mean(kept.slice(-window))] : null;
};

// "held-out", with the name of the set if that says more.
export const heldOutName = name => {
  const set = name.replace("eval/", "");
  return /^held[-_]?out$/.test(set) ? "held-out" : `held-out: ${set}`;
};

// The first evaluation set: its first and its newest value, with the newest one's interval.
function heldOut(data, [name]) {
  const values = data.values[name] || [],
    kept = values.map((value, i) => [value, i]).filter(([value]) => value != null);
  if (!kept.length) return null;
  const [[first], [last, i]] = [kept[0], kept.at(-1)];
  const [low, high] = ["low", "high"].map(end => data.values[`${name}/${end}`]?.[i]);
  const change = kept.length > 1 ? `from ${three(first)}` : `after ${data.steps[i]} rollouts`;
  return {
    value: three(last),
    change: low != null ? `${change}; 95 %: ${three(low)} to ${three(high)}` : change,
    spark: kept.map(([value]) => value),
    what: heldOutName(name),
  };
}

export function Tiles({ run, data }) {
  const number = (name, what, write = short) => {
    const values = data.values[name] || [],
      found = ends(values);
    if (!found) return null;
    const [, unit = "", factor = 1] = run.words[name] || [];
    const [first, last] = found.map(value => value * factor);
    const moved = last - first;
    const sign = moved > 0 ? "+" : "−";
    const size = Math.max(Math.abs(first), Math.abs(last)) || 1;
    return {
      what,
      name,
      value: write(last) + (unit == "%" ? " %" : ""),
      change: Math.abs(moved) < 1e-3 * size ? "unchanged" : `${sign}${write(Math.abs(moved))}${unit == "%" ? " points" : ""} since the beginning`,
      spark: smoothed(values, 0.6),
    };
  };
  const evaluations = run.panels.find(panel => panel.band)?.metrics || [];
  const speed = number("time/step", "time of a step", value => `${three(value)} s`);
  const rate = ends(data.values["rollout/tokens_per_s"] || []);
  if (speed && rate) speed.change = `${three(rate[1])} tokens/s`;
  const tiles = [
    heldOut(data, evaluations),
    number("rollout/reward_mean", "reward", three) || number("train/loss", "loss", three),
    number("rollout/truncated_ratio", "answers cut off", three),
    number("train/logprob_gap_mean", "log-prob gap", three),
    speed,
  ].filter(Boolean);
  if (!tiles.length) return null;
  return html`
    <ul class="tiles">
      ${tiles.map(
        one => html`
          <li title=${one.name}>
            <span class="dim">${one.what}</span>
            <b>${one.value}</b>
            <${Spark} values=${one.spark} />
            <span class="dim">${one.change}</span>
          </li>
        `,
      )}
    </ul>
  `;
}
