// One run: what stands out, its curves, its phases, its configuration.
import { useRef, useState } from "preact/hooks";
import { address, fixed, go, html, place, restate, short, Trouble, useData, useKeys } from "slime/data";
import { visible } from "slime/texts";
import { Verdict } from "slime/verdict";
import { Chart, Lanes, resetZoom, zoomOfAddress } from "slime/charts";

const band = name => [name, `${name}/low`, `${name}/high`];

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
  useState(zoomOfAddress);
  const [at, setAt] = useState(-1);
  // Keys may come faster than this is drawn.
  const now = useRef(-1);
  const move = by => setAt((now.current = Math.max(0, Math.min(now.current + by, run.verdict.alerts.length - 1))));
  const open = n => run.verdict.alerts[n]?.filter && go(address("samples", [id], { q: run.verdict.alerts[n].filter }));
  useKeys({
    z: ["show all steps", resetZoom],
    m: ["add a metric", () => document.querySelector("#metric")?.focus()],
    j: ["next alert", () => move(1)],
    k: ["previous alert", () => move(-1)],
    Enter: ["samples of the alert", () => open(Math.max(0, now.current))],
  });
  if (error && !data) return html`<${Trouble} text=${error} />`;
  const line = (name, banded) => {
    const all = data.values[name] || [];
    const kept = data.steps.map((step, i) => i).filter(i => all[i] != null);
    const pick = other => data.values[other] && kept.map(i => data.values[other][i]);
    const ends = banded ? { low: pick(`${name}/low`), high: pick(`${name}/high`) } : {};
    return { label: name, steps: kept.map(i => data.steps[i]), values: kept.map(i => all[i]), ...ends };
  };
  const add = event => {
    const name = event.target.value;
    if (run.names.includes(name) && !more.includes(name)) restate({ m: [...more, name].join(",") });
    event.target.value = "";
  };
  return html`
    <section>
      <${Verdict} id=${id} run=${run} at=${at} />
      ${run.problems.map(text => html`<${Trouble} text=${"Left out: " + text} />`)}
      ${fixed?.note && html`<p class="dim">${fixed.note}</p>`}
    </section>
    <section>
      <h2>
        Curves
        <small>drag to zoom, double-click to see all</small>
        <label class="right">
          Any metric
          <input id="metric" list="names" placeholder="train/lr" onChange=${add} />
        </label>
        <datalist id="names">${run.names.map(name => html`<option value=${name} />`)}</datalist>
      </h2>
      ${
        !data
          ? html`<p class="dim">loading</p>`
          : html`
              <div class="charts">
                ${run.panels.map(
                  panel => html`
                    <${Chart}
                      key=${panel.title}
                      title=${panel.title}
                      lines=${panel.metrics.map(name => line(name, panel.band))} />
                  `,
                )}
                ${more.map(
                  name => html`
                    <${Chart}
                      key=${name}
                      title=${name}
                      lines=${[line(name)]}
                      close=${() => restate({ m: more.filter(other => other != name).join(",") })} />
                  `,
                )}
              </div>
              ${run.lanes.length > 0 && html`<${Lanes} lanes=${run.lanes} ...${timed(data)} />`}
            `
      }
    </section>
    <${Panels} id=${id} version=${version} />
    <section class="two">
      <${Entries} title="Configuration" rows=${run.config} />
      <div>
        <${Entries} title="Plugins" rows=${run.plugins} />
        ${
          run.events.length > 0 &&
          html`
            <h2>Warnings and errors of the log</h2>
            <table class="entries">
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
        <h2>Again</h2>
        <pre>${run.command}</pre>
        ${
          !fixed &&
          html`<p class="dim">${run.index.samples.toLocaleString()} samples; their index: ${run.index.path}</p>`
        }
      </div>
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
      <div class="scroll">
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
function timed({ steps, values }) {
  const kept = steps
    .map((_, i) => i)
    .filter(i => Object.keys(values).some(n => n.startsWith("time/") && values[n][i] != null));
  return {
    steps: kept.map(i => steps[i]),
    values: Object.fromEntries(Object.entries(values).map(([n, v]) => [n, kept.map(i => v[i])])),
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
      <div class="tall">
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
