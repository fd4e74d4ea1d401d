// One run: how it is, what it says, its curves by theme, its phases, its configuration.
import { useMemo, useRef, useState } from "preact/hooks";
import { address, fixed, go, html, place, restate, short, Trouble, useData, useKeys } from "slime/data";
import { curve, extent, look, Looks, resetZoom } from "slime/axes";
import { visible } from "slime/signs";
import { Chart } from "slime/charts";
import { Lanes } from "slime/lanes";
import { Says } from "slime/says";
import { heldOutName, State, Tiles } from "slime/tiles";
import { Verdict } from "slime/verdict";

const band = name => [name, `${name}/low`, `${name}/high`];
const THEMES = [
  ["learning", "Learning"],
  ["answers", "Answers"],
  ["speed", "Speed"],
];
const MAIN = "rollout/reward_mean";

// The reward, large: raw and smoothed, the held-out sets with their intervals, checkpoints and alerts as marks.
function Main({ id, run, data, reach }) {
  const { by } = look();
  const main = run.names.includes(MAIN) ? MAIN : "train/loss";
  const held = main == MAIN ? run.panels.find(panel => panel.band)?.metrics || [] : [];
  const colors = ["--c2", "--c4", "--c3", "--c5"];
  const lines = [
    { ...curve(data, main, by, run.words[main]), color: "--c1" },
    ...held.slice(0, 4).map((name, i) => {
      const line = curve(data, name, by, run.words[name], true);
      return { ...line, label: heldOutName(name), dots: true, color: colors[i] };
    }),
  ].filter(line => line.values.length);
  const xs = data.axes?.[by] || data.steps;
  const marks = (steps, name, peaked) =>
    steps.map(step => ({ x: xs[data.steps.indexOf(step)], color: name, peaked })).filter(({ x }) => x !== undefined);
  const saved = marks(run.progress.checkpoints, "--c5"),
    alerted = marks(run.verdict.alerts.filter(one => one.step != null).map(one => one.step), "--bad", true);
  const open = fixed ? undefined : step => go(address("samples", [id], { q: `kind:train step=${step}` }));
  return html`
    <${Chart}
      title=${main == MAIN ? "Reward" : "Loss"}
      hint=${main}
      lines=${lines}
      height=${360}
      reach=${reach}
      ticks=${[...saved, ...alerted]}
      open=${open}
      legend=${html`
        ${saved.length > 0 && html`<span><i class="tick" style=${{ background: "var(--c5)" }}></i>checkpoint</span>`}
        ${alerted.length > 0 && html`<span><b class="bad" aria-hidden="true">▲ </b>alert</span>`}
        ${open && html`<span class="dim">click: the step's samples; drag: zoom</span>`}
      `} />
  `;
}

export function Run({ id, run, version }) {
  const { params } = place();
  const more = (params.m || "").split(",").filter(Boolean);
  const names = [
    ...new Set([
      ...run.panels.flatMap(p => (p.band ? p.metrics.flatMap(band) : p.metrics)),
      ...run.lanes.map(lane => lane.metric),
      ...more,
    ]),
  ].filter(n => run.names.includes(n));
  const { data, error } = useData("series", { run: id, names: names.join("\n") }, version);
  const [at, setAt] = useState(-1);
  // Keys may come faster than this is drawn.
  const now = useRef(-1);
  const { alerts } = run.verdict;
  const move = by => setAt((now.current = Math.max(0, Math.min(now.current + by, alerts.length - 1))));
  const open = n => alerts[n]?.filter && go(address("samples", [id], { q: alerts[n].filter }));
  useKeys({
    z: ["show all steps", resetZoom],
    m: ["find a metric", () => document.querySelector("#metric")?.focus()],
    j: ["next alert", () => move(1)],
    k: ["previous alert", () => move(-1)],
    Enter: ["samples of the alert", () => open(Math.max(0, now.current))],
  });
  const { by } = look();
  const phases = useMemo(() => data && timed(data, by, run.lanes), [data, by, run.lanes.length]);
  if (error && !data) return html`<${Trouble} text=${error} />`;
  const reach = data && extent(data, by);
  const line = (name, banded) => curve(data, name, by, run.words[name], banded);
  const chart = (title, metrics, banded, close) => html`
    <${Chart}
      key=${title}
      title=${title}
      hint=${metrics.join(", ")}
      unit=${run.words[metrics[0]]?.[1] || ""}
      lines=${metrics.map(name => line(name, banded)).filter(one => one.values.length)}
      reach=${reach}
      close=${close} />
  `;
  const values = name => (data.values[name] || []).filter(value => value != null);
  const still = name => values(name).length > 1 && new Set(values(name)).size == 1;
  const quiet = data ? run.panels.flatMap(p => (p.band ? [] : p.metrics)).filter(still) : [];
  const drawn = data
    ? run.panels
        .map(p => ({ ...p, metrics: p.metrics.filter(name => values(name).length && !quiet.includes(name)) }))
        .filter(p => p.metrics.length && !p.metrics.includes(MAIN))
    : [];
  const said = name => {
    const [title, unit, factor] = run.words[name];
    return html`<span title=${name}>${title} ${short(values(name)[0] * factor)}${unit && ` ${unit}`}</span>`;
  };
  return html`
    <section>
      <${State} run=${run} />
      <${Verdict} id=${id} run=${run} at=${at} />
      ${run.problems.map(text => html`<${Trouble} text=${"Left out: " + text} />`)}
      ${fixed?.note && html`<p class="dim">${fixed.note}</p>`}
    </section>
    ${!data && html`<p class="dim">loading</p>`}
    ${
      data?.steps.length > 0 &&
      html`
        <${Tiles} run=${run} data=${data} />
        <div class="first">
          <section>
            <h2>Curve <${Looks} axes=${data.axes} /></h2>
            <${Main} id=${id} run=${run} data=${data} reach=${reach} />
          </section>
          <${Says} id=${id} run=${run} version=${version} />
        </div>
        ${THEMES.map(([theme, title]) => {
          const some = drawn.filter(panel => panel.theme == theme);
          const lanes = theme == "speed" ? run.lanes : [];
          return (
            (some.length > 0 || lanes.length > 0) &&
            html`
              <section key=${theme}>
                <h2>${title}</h2>
                <div class="charts">${some.map(panel => chart(panel.title, panel.metrics, panel.band))}</div>
                ${lanes.length > 0 && html`<${Lanes} lanes=${lanes} ...${phases} />`}
              </section>
            `
          );
        })}
        ${
          quiet.length > 0 &&
          html`<p class="dim quiet">Never changed: ${quiet.map((name, n) => html`${n ? ", " : ""}${said(name)}`)}.</p>`
        }
      `
    }
    <${Panels} id=${id} version=${version} />
    ${run.names.length > 0 && html`<${Metrics} run=${run} more=${more} />`}
    <div class="charts">
      ${
        data &&
        more
          .filter(name => run.names.includes(name))
          .map(name =>
            chart(run.words[name][0], [name], false, () => restate({ m: more.filter(o => o != name).join(",") })),
          )
      }
    </div>
    <section class="two">
      <${Entries} title="Configuration" rows=${run.config} />
      <div>
        <${Entries} title="Plugins" rows=${run.plugins} />
        ${
          run.events.length > 0 &&
          html`
            <h2>Warnings and errors of the log</h2>
            <table class="entries log">
              ${run.events.map(
                event => html`
                  <tr>
                    <td class="dim">${event.time}</td>
                    <td>${event.level}</td>
                    <td class="wrap">${event.text}</td>
                  </tr>
                `,
              )}
            </table>
          `
        }
        <h2>Run it again</h2>
        <pre>${run.command}</pre>
        ${
          !fixed &&
          html`<p class="dim">${run.index.samples.toLocaleString()} samples; their index: ${run.index.path}</p>`
        }
      </div>
    </section>
  `;
}

// All metrics by name or by words; a click draws one.
function Metrics({ run, more }) {
  const [part, set] = useState("");
  const wanted = part.toLowerCase();
  const fits = name => `${name} ${run.words[name]?.[0]}`.toLowerCase().includes(wanted);
  const found = run.names.filter(fits);
  const turn = name =>
    restate({ m: (more.includes(name) ? more.filter(other => other != name) : [...more, name]).join(",") });
  const shown = part ? found.slice(0, 60) : more;
  return html`
    <section>
      <h2>
        All ${run.names.length} metrics
        <label class="right">
          <input
            id="metric"
            type="search"
            size="26"
            placeholder="find one: lr, gap, seconds"
            aria-label="find a metric"
            value=${part}
            onInput=${event => set(event.target.value)}
            onKeyDown=${event => event.key == "Enter" && found[0] && (turn(found[0]), set(""))} />
        </label>
      </h2>
      <p class="chips">
        ${shown.map(
          name => html`
            <button class=${more.includes(name) ? "on" : ""} aria-pressed=${more.includes(name)} onClick=${() => turn(name)} title=${name}>
              ${run.words[name]?.[0] || name}
            </button>
          `,
        )}
        ${part && !found.length && html`<span class="dim">No metric has such a name.</span>`}
        ${found.length > 60 && part && html`<span class="dim">${found.length - 60} more</span>`}
      </p>
    </section>
  `;
}

// What panels of plugins draw.
function Panels({ id, version }) {
  const { data, error } = useData("panels", { run: id }, version);
  if (error) return html`<${Trouble} text=${error} />`;
  return (data?.panels || []).map(
    panel => html`
      <section class="plugin">
        <h2>
          ${visible(panel.panel)}
          <small>panel of a plugin</small>
        </h2>
        ${panel.error && html`<${Trouble} text=${visible(panel.error)} />`}
        <div class="drawings">${(panel.drawings || []).map(one => html`<${Drawing} id=${id} one=${one} />`)}</div>
      </section>
    `,
  );
}

function Drawing({ id, one }) {
  if (one.type == "curves") return html`<${Chart} title=${visible(one.title)} lines=${one.curves} />`;
  if (one.type == "note")
    return html`<article>
      <b>${visible(one.title)}</b>
      <pre>${visible(one.text)}</pre>
    </article>`;
  return html`
    <article class="wide">
      <b>${visible(one.title)}</b>
      <div class="scroll" tabindex="0">
        <table class="entries">
          <thead>
            <tr>
              ${one.columns.map(name => html`<th>${visible(name)}</th>`)}
            </tr>
          </thead>
          ${one.rows.map(
            (row, n) => html`
              <tr>
                ${row.map(
                  (cell, i) => html`
                    <td class="wrap">
                      ${
                        i == 0 && one.filters[n] && !fixed
                          ? html`<a href=${address("samples", [id], { q: one.filters[n] })}>${short(cell)}</a>`
                          : typeof cell == "string"
                            ? visible(cell)
                            : short(cell)
                      }
                    </td>
                  `,
                )}
              </tr>
            `,
          )}
        </table>
      </div>
    </article>
  `;
}

// The steps in which something was timed; evaluations have rows of their own.
function timed({ steps, values, axes }, by, lanes) {
  const known = lanes.map(lane => lane.metric).filter(name => values[name]);
  const kept = steps.map((_, i) => i).filter(i => known.some(name => values[name][i] != null));
  const xs = axes?.[by] || steps;
  return {
    steps: kept.map(i => steps[i]),
    xs: kept.map(i => xs[i]),
    values: Object.fromEntries(known.map(name => [name, kept.map(i => values[name][i])])),
  };
}

function Entries({ title, rows }) {
  const [part, set] = useState("");
  const found = rows.filter(row => row.join(" ").toLowerCase().includes(part.toLowerCase()));
  return html`
    <div>
      <h2>
        ${title}
        <label class="right">
          <input
            placeholder="find"
            value=${part}
            onInput=${event => set(event.target.value)}
            aria-label=${"find in " + title} />
        </label>
      </h2>
      <div class="tall" tabindex="0">
        <table class="entries">
          ${found.map(
            ([name, value]) => html`
              <tr>
                <td>${name}</td>
                <td class="wrap">${value}</td>
              </tr>
            `,
          )}
        </table>
      </div>
    </div>
  `;
}
