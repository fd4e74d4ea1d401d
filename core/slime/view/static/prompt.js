// One prompt through the run: its reward at every visit, and the answers of two visits.
import { address, go, html, place, restate, short, Trouble, useData, useKeys } from "slime/data";
import { plain, Text } from "slime/texts";
import { LeftOut, Prompt, Reward } from "slime/group";
import { Chart } from "slime/charts";

export function Visits({ id, parts: [key], version }) {
  const { data, error } = useData("prompt", { run: id, key }, version);
  const { params } = place();
  const visits = Object.values(Object.groupBy(data?.samples || [], one => one.group_key)).map(samples => {
    const rewards = samples.map(one => one.reward).filter(value => value != null);
    return {
      key: samples[0].group_key,
      step: samples[0].step,
      kind: samples[0].kind,
      name: samples[0].name,
      samples,
      rewards,
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
    Enter: ["open the group on the right", () => visits[b] && go(address("group", [id, visits[b].key]))],
  });
  if (!data) return error ? html`<${Trouble} text=${error} />` : html`<p class="dim">loading</p>`;
  const lines = Object.entries(
    Object.groupBy(
      visits.filter(one => one.step != null && one.mean != null),
      one => one.kind,
    ),
  ).map(([kind, some]) => ({
    label: kind,
    steps: some.map(one => one.step),
    values: some.map(one => one.mean),
    low: some.map(one => Math.min(...one.rewards)),
    high: some.map(one => Math.max(...one.rewards)),
  }));
  const side = (n, name) => html`
    <div>
      <label class="chips">
        Step
        <select value=${visits[n].key} onChange=${event => restate({ [name]: event.target.value })}>
          ${visits.map(
            one => html`
              <option value=${one.key} selected=${one.key == visits[n].key}>
                ${one.step} (${one.kind}${one.name && ` ${one.name}`}), reward ${short(one.mean)}
              </option>
            `,
          )}
        </select>
      </label>
      <a href=${address("group", [id, visits[n].key])}>group</a>
      ${visits[n].samples.map(
        (one, i) => html`
          <article>
            <header>
              <b><${Reward} of=${one.reward} /></b>
              <span class=${one.status}>${one.status}</span>
            </header>
            <${Text}
              text=${one.row?.response}
              other=${name == "b" && visits[a].samples[i] ? plain(visits[a].samples[i].row?.response) : null} />
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
        lines.length > 0 &&
        visits.length > 1 &&
        html`<${Chart} title="Mean reward of a visit, from its lowest to its highest" lines=${lines} />`
      }
      ${
        visits.length > 1
          ? html`
              <p class="dim">On the right, what differs from the answer beside it is marked.</p>
              <div class="two">${side(a, "a")}${side(b, "b")}</div>
            `
          : side(0, "a")
      }
    </section>
  `;
}
