// One prompt through the run: its pass rate and reward at every visit, and the answers of two visits.
import { address, go, html, place, restate, short, Trouble, useData, useKeys } from "slime/data";
import { LeftOut } from "slime/group";
import { Reward } from "slime/rewards";
import { Answer, FormatChoice, Prompt, turnFormat } from "slime/turns";
import { Chart } from "slime/charts";

export function Visits({ id, run, parts: [key], version }) {
  const { data, error } = useData("prompt", { run: id, key }, version);
  const { params } = place();
  const visits = Object.values(Object.groupBy(data?.samples || [], one => one.group_key)).map(samples => {
    const rewards = samples.map(one => one.reward).filter(value => value != null);
    const passed = rewards.filter(value => value >= run.best).length;
    return {
      key: samples[0].group_key,
      step: samples[0].step,
      kind: samples[0].kind,
      name: samples[0].name,
      samples,
      rewards,
      passed,
      // Unknown until the run's samples are counted.
      rate: rewards.length && run.best != null ? passed / rewards.length : null,
      mean: rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null,
    };
  });
  const found = (name, otherwise) =>
    Math.max(
      0,
      visits.findIndex((one, i) => (params[name] ? one.key == params[name] : i == otherwise)),
    );
  const [a, b] = [found("a", 0), found("b", visits.length - 1)];
  const pick = (name, n) => visits[n] && restate({ [name]: visits[n].key });
  useKeys({
    j: ["later visit on the right", () => pick("b", b + 1)],
    k: ["earlier visit on the right", () => pick("b", b - 1)],
    J: ["later visit on the left", () => pick("a", a + 1)],
    K: ["earlier visit on the left", () => pick("a", a - 1)],
    f: ["Markdown and LaTeX, or as it is written", turnFormat],
    Enter: ["open the group on the right", () => visits[b] && go(address("group", [id, visits[b].key]))],
  });
  if (!data) return error ? html`<${Trouble} text=${error} />` : html`<p class="dim">loading</p>`;
  const curves = (value, band) =>
    Object.entries(
      Object.groupBy(
        visits.filter(one => one.step != null && one[value] != null),
        one => one.kind,
      ),
    ).map(([kind, some]) => ({
      label: kind,
      steps: some.map(one => one.step),
      values: some.map(one => one[value]),
      ...(band && {
        low: some.map(one => Math.min(...one.rewards)),
        high: some.map(one => Math.max(...one.rewards)),
      }),
    }));
  const [rates, means] = [curves("rate"), curves("mean", true)];
  // Then the mean is the pass rate.
  const allOrNothing = run.best == 1 && visits.every(one => one.rewards.every(value => value == 0 || value == 1));
  const told = ({ step, kind, name, mean, rate, passed, rewards }) =>
    `${step} (${[kind, name].filter(Boolean).join(" ")}), ` +
    (rate == null ? `reward ${short(mean)}` : `${passed} of ${rewards.length} pass`) +
    (rate == null || allOrNothing ? "" : `, reward ${short(mean)}`);
  const side = (n, name) => html`
    <div>
      <p class="chips">
        <label for=${"visit-" + name}>Step</label>
        <select
          id=${"visit-" + name}
          value=${visits[n].key}
          onChange=${event => restate({ [name]: event.target.value })}>
          ${visits.map(
            one => html`<option value=${one.key} selected=${one.key == visits[n].key}>${told(one)}</option>`,
          )}
        </select>
        <a href=${address("group", [id, visits[n].key])}>group</a>
      </p>
      ${visits[n].samples.map(
        (one, i) => html`
          <article>
            <header>
              <b><${Reward} of=${one.reward} /></b>
              <span class=${one.status}>${one.status}</span>
            </header>
            <${Answer} row=${one.row} other=${name == "b" ? visits[a].samples[i]?.row : null} />
          </article>
        `,
      )}
    </div>
  `;
  return html`
    <section>
      <h2>
        One prompt through the run
        <small>${visits.length} ${visits.length == 1 ? "visit" : "visits"}, ${data.samples.length} samples</small>
      </h2>
      <${LeftOut} of=${data.left_out} what="this prompt" />
      <${Prompt} row=${data.samples[0].row} />
      ${
        means.length > 0 &&
        visits.length > 1 &&
        html`
          ${
            rates.length > 0 &&
            html`
              <${Chart}
                alone
                title=${`Pass rate of a visit: answers with the run's highest reward, ${short(run.best)}`}
                lines=${rates}
                range=${[-0.04, 1.04]} />
            `
          }
          ${
            !(rates.length && allOrNothing) &&
            html`<${Chart} alone title="Mean reward of a visit, from its lowest to its highest" lines=${means} />`
          }
        `
      }
      ${
        visits.length > 1
          ? html`
              <p class="chips">
                <span class="dim">On the right, what differs from the answer beside it is marked.</span>
                <${FormatChoice} />
              </p>
              <div class="two sides">${side(a, "a")}${side(b, "b")}</div>
            `
          : side(0, "a")
      }
    </section>
  `;
}
