// Rewards on the run's own scale: a number with a bar, those of a group, and how they are spread over the steps.
import { createContext } from "preact";
import { useContext } from "preact/hooks";
import { html, short } from "slime/data";

// The lowest and the highest reward of the run's training, once its samples are counted.
export const Scale = createContext(null);

// Where a reward is on the scale [0..1]; unknown without one, or if all rewards are equal.
function placed(value, scale) {
  if (value == null || !scale || scale[0] == scale[1]) return null;
  return Math.max(0, Math.min(1, (value - scale[0]) / (scale[1] - scale[0])));
}

const tone = at => (at == null ? "" : at > 0.99 ? "good" : at < 0.01 ? "bad" : "between");

// The bar says the same as the colour: empty is the run's lowest reward, full its highest.
export function Reward({ of }) {
  const scale = useContext(Scale),
    at = placed(of, scale);
  return html`
    <span class=${"reward " + (of == null ? "dim" : tone(at))}>
      ${at != null && html`<i class="level" title=${`from ${short(scale[0])} to ${short(scale[1])} in this run`}><i style=${{ height: `${Math.round(100 * at)}%` }}></i></i>`}${short(of)}
    </span>
  `;
}

// The rewards of a group side by side.
export function Rewards({ values, size }) {
  const scale = useContext(Scale);
  return html`
    <span class="levels" role="img" aria-label=${`rewards: ${values.map(short).join(", ")}`} title=${`rewards: ${values.map(short).join(", ")}`}>
      ${values.map(value => {
        const at = placed(value, scale);
        return html`<i class=${"level " + tone(at)}>${at != null && html`<i style=${{ height: `${Math.round(100 * at)}%` }}></i>`}</i>`;
      })}
      ${size > values.length && html`<span class="dim">and ${size - values.length} more</span>`}
    </span>
  `;
}

const between = ([low, high]) => (low == high ? short(low) : `${short(+low.toPrecision(3))} to ${short(+high.toPrecision(3))}`);
const [ROW, LABEL] = [14, 64];

// Columns are steps, rows are rewards; the darker, the larger the share of the column's samples. `pick`: steps clicked on.
export function Histogram({ data, pick }) {
  const { steps, levels, counts, every } = data;
  if (steps.length < 2 || levels.length < 2) return null;
  const [wide, high] = [100 / steps.length, levels.length * ROW];
  const sums = counts.map(column => column.reduce((a, b) => a + b, 0));
  const shares = n => counts.map((column, i) => (sums[i] ? column[n] / sums[i] : null)).filter(one => one != null);
  const percent = share => `${Math.round(100 * share)} %`;
  const told = levels.map((level, n) => `${between(level)}: ${percent(shares(n)[0])}, in the end ${percent(shares(n).at(-1))}`);
  const where = ([first, last]) => (first == last ? `step ${first}` : `steps ${first} to ${last}`);
  return html`
    <figure class="chart histogram">
      <figcaption><b>Rewards over the steps</b> <span class="dim">share of what the filter finds${every > 1 ? `, of which one in ${every} is counted` : ""}: the stronger the colour, the more${pick ? "; a click filters" : ""}</span></figcaption>
      <div class="grid" style=${{ height: `${high}px` }}>
        <div class="marks" aria-hidden="true" style=${{ width: `${LABEL}px` }}>
          ${[...levels].reverse().map(level => html`<span style=${{ height: `${ROW}px` }}>${between(level).replace(/ to .*/, "+")}</span>`)}
        </div>
        <svg viewBox=${`0 0 100 ${high}`} preserveAspectRatio="none" role="img" aria-label=${`Rewards over the steps. ${told.join("; ")}`}>
          ${steps.map((range, i) =>
            levels.map((level, n) => {
              const share = sums[i] ? counts[i][n] / sums[i] : 0;
              return html`
                <rect
                  x=${i * wide}
                  y=${(levels.length - 1 - n) * ROW}
                  width=${wide * 0.96}
                  height=${ROW - 1}
                  fill-opacity=${share ? 0.12 + 0.88 * share : 0.03}
                  onClick=${pick && (() => pick(range))}>
                  <title>${`${where(range)}, reward ${between(level)}: ${counts[i][n].toLocaleString()} of ${sums[i].toLocaleString()} (${percent(share)})`}</title>
                </rect>
              `;
            }),
          )}
        </svg>
      </div>
      <p class="ends dim" style=${{ marginLeft: `${LABEL}px` }}><span>step ${steps[0][0]}</span><span>${steps.at(-1)[1]}</span></p>
    </figure>
  `;
}
