// What the model says: a prompt of a rollout with its best and its worst answer. It stays while the run goes on.
import { useEffect, useState } from "preact/hooks";
import { address, html, short, Trouble, useData, useKeys } from "slime/data";
import { plain, visible } from "slime/signs";
import { Text } from "slime/texts";
import { Reward } from "slime/rewards";
import { Answer, FormatChoice, turnFormat } from "slime/turns";

export function Says({ id, run, version }) {
  const [step, setStep] = useState("");
  const [n, setN] = useState(0);
  const { data, error } = useData("says", { run: id, step, n }, version);
  // The newest rollout, once all are known, stays; newer ones are offered.
  const known = run.index.done >= run.index.total;
  useEffect(() => {
    if (step === "" && known && data?.step != null) setStep(data.step);
  }, [data?.step, known]);
  const turn = by => setN(now => (now + by + (data?.groups || 1)) % (data?.groups || 1));
  useKeys({
    n: ["next prompt of what it says", () => turn(1)],
    N: ["previous prompt", () => turn(-1)],
    f: ["Markdown and LaTeX, or as it is written", turnFormat],
  });
  const newer = () => {
    setN(0);
    setStep(data.newest);
  };
  const answer = (one, title) => html`
    <div class="answer" tabindex="0">
      <b>${title}</b>
      <span>reward <${Reward} of=${one.reward} />${one.status == "completed" ? "" : `, ${one.status}`}</span>
      <${Answer} row=${one.row} />
    </div>
  `;
  const row = data?.best?.row;
  const asked = Array.isArray(row?.prompt) ? row.prompt.findLast(one => one?.role != "assistant") : row?.prompt;
  const equal = !data?.worst || data.worst.reward === data.best.reward;
  const mean = data?.rewards?.length ? data.rewards.reduce((a, b) => a + b) / data.rewards.length : null;
  return html`
    <section class="says">
      <h2>
        What it says now
        ${data?.step != null && html`<small>rollout ${data.step}${data.step == data.newest ? ", the newest" : ""}</small>`}
        <span class="right">
          ${data?.newest > data?.step && html`<button onClick=${newer}>rollout ${data.newest}</button>`}
          ${
            data?.groups > 1 &&
            html`
              <button aria-label="previous prompt" onClick=${() => turn(-1)}>←</button>
              <span>${n + 1} of ${data.groups}</span>
              <button aria-label="next prompt" onClick=${() => turn(1)}>→</button>
            `
          }
        </span>
      </h2>
      ${error && html`<${Trouble} text=${error} />`} ${data && !data.groups && html`<p class="dim">No answers yet.</p>`}
      ${
        data?.groups > 0 &&
        html`
          <div class="asked" tabindex="0"><b>prompt</b><${Text} text=${plain(asked)} /></div>
          ${row?.label != null && html`<p class="dim">label: ${visible(plain(row.label))}</p>`}
          ${answer(data.best, equal ? "answer" : "best answer")}
          ${data.worst && answer(data.worst, equal ? "another answer" : "worst answer")}
          <p>
            <a href=${address("group", [id, data.key])}>All ${data.size} answers</a>
            ${mean != null && html`<span class="dim">, ${equal ? "all of reward" : "mean reward"} ${short(mean)}</span>`}
            <${FormatChoice} />
          </p>
        `
      }
    </section>
  `;
}
