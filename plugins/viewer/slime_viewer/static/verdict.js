// The verdict on a run, with its reasons, the way to the evidence, and the command that goes on with it.
import { address, fixed, html, place } from "slime/data";
import { visible } from "slime/signs";
import { Copy } from "slime/texts";

// The one count of steps: "37 of 400 steps".
export const counted = ({ done, total }) =>
  `${done.toLocaleString()}${total == null ? "" : ` of ${total.toLocaleString()}`} step${(total ?? done) == 1 ? "" : "s"}`;

// A run's state as people say it.
export const stateWords = state =>
  ({ elsewhere: "running on another machine", killed: "ended early", unknown: "state unknown" })[state] ||
  state;

const SIGNS = { healthy: "✓", look: "!", unknown: "?", unfinished: "×" };

export function Verdict({ id, run, at }) {
  const { verdict } = run;
  return html`
    <div class=${"verdict " + verdict.state}>
      <h1><span class="sign" aria-hidden="true">${SIGNS[verdict.state]}</span>${verdict.title}</h1>
      ${verdict.reasons.map(text => html`<p>${visible(text)}</p>`)}
      ${verdict.command && html`<div class="command"><code>${visible(verdict.command)}</code><${Copy} text=${verdict.command} what="the command" /></div>`}
      ${verdict.command_note && html`<p class="dim">${visible(verdict.command_note)}</p>`}
      ${
        verdict.alerts.length > 0 &&
        verdict.state != "look" &&
        html`<p><b>Worth a look: ${verdict.alerts.length}</b></p>`
      }
      <ol class="alerts">
        ${verdict.alerts.map((alert, n) => html`<${Alert} id=${id} run=${run} alert=${alert} at=${n == at} />`)}
      </ol>
    </div>
  `;
}

function Alert({ id, run, alert, at }) {
  const { params } = place();
  const more = (params.m || "").split(",").filter(Boolean);
  const drawn = run.panels.some(panel => panel.metrics.includes(alert.metric));
  return html`
    <li class=${at ? "at" : ""}>
      <b>${visible(alert.text[0].toUpperCase() + alert.text.slice(1))}.</b>
      ${" " + visible(alert.advice) + " "}
      ${
        !drawn &&
        run.names.includes(alert.metric) &&
        html`<a href=${address("run", [id], { ...params, m: [...more, alert.metric].join(",") })}>Curve</a> `
      }
      ${
        alert.filter &&
        (fixed
          ? html`<code>${alert.filter}</code>`
          : html`
              <a href=${address("samples", [id], { q: alert.filter })}>
                Samples${alert.step != null ? ` from step ${alert.step}` : ""}
              </a>
            `)
      }
    </li>
  `;
}
