// A group: the answers to one prompt beside each other.
import { useEffect } from "preact/hooks";
import { address, go, html, place, restate, reveal, rowOf, short, Trouble, useData, useKeys } from "slime/data";
import { plain, visible } from "slime/signs";
import { Copy } from "slime/texts";
import { Reward, Rewards } from "slime/rewards";
import { Coloured, GroupColours } from "slime/tokens";
import { Answer, FormatChoice, formats, Prompt, turnFormat } from "slime/turns";
import { Found, leftAt, useWalk } from "slime/walk";

// How many samples an answer lacks: too many for it, or not in a file.
export const LeftOut = ({ of, what }) =>
  of == null
    ? html`<p class="dim">These are the samples in this file; the run may have more.</p>`
    : of > 0 && html`<p class="bad">${of.toLocaleString()} more samples of ${what} are left out here.</p>`;

export function Group({ id, run, parts: [key], version }) {
  const { at, d = "1", q = "", sort, col = "" } = place().params;
  const { data, error } = useData("group", { run: id, key, q }, version);
  const colours = useData("group_tokens", { run: id, key, column: col }).data;
  const samples = data?.samples || [];
  const best = samples.reduce((a, b) => ((b.reward ?? -1e9) > (a?.reward ?? -1e9) ? b : a), samples[0]);
  const now = rowOf(samples, at);
  const move = by =>
    restate({ at: samples[Math.max(0, Math.min(samples.length - 1, rowOf(samples, place().params.at) + by))]?.key });
  useEffect(() => reveal("article.at"), [at, samples.length]);
  const file = key.split("/")[0];
  const walk = useWalk("group", id, samples[now]?.key, key);
  // Back from conversations, it is the group of the one that was read last.
  useEffect(() => {
    const last = leftAt(id, q, sort);
    if (last && last.key != at) location.replace(address("group", [id, last.group], { ...place().params, at: last.key }));
  }, []);
  const there = one => address("sample", [id, one.key], { q, sort, f: formats() ? 1 : "", col });
  const turn = by => {
    const columns = ["", ...(colours?.columns || [])];
    restate({ col: columns[(columns.indexOf(place().params.col || "") + by + columns.length) % columns.length] });
  };
  useKeys({
    ...(walk || {
      j: ["next answer", () => move(1)],
      k: ["previous answer", () => move(-1)],
    }),
    ...(colours?.columns.length
      ? {
          h: ["colour tokens by the next column", () => turn(1)],
          H: ["colour tokens by the previous column", () => turn(-1)],
        }
      : {}),
    d: ["mark differences or not", () => restate({ d: d == "1" ? "0" : "" })],
    f: ["Markdown and LaTeX, or as it is written", turnFormat],
    Enter: ["open the conversation", () => samples[now] && go(there(samples[now]))],
    p: ["follow the prompt", () => samples[0] && go(address("prompt", [id, samples[0].prompt]))],
    u: ["back to the step", () => go(address("samples", [id], { q: stepOf(samples[0]) }))],
  });
  if (!data) return error ? html`<${Trouble} text=${error} />` : html`<p class="dim">loading</p>`;
  const rewards = samples.map(one => one.reward).filter(value => value != null);
  const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
  const passed = rewards.filter(value => value >= run.best).length;
  const equal = rewards.length > 1 && rewards.every(value => value == rewards[0]);
  return html`
    <section>
      <h2>
        Group ${samples[0].grp} of step ${samples[0].step}
        <small>${samples.length} answers in ${file}.jsonl</small>
        <span class="right"><a href=${address("prompt", [id, samples[0].prompt])}>this prompt through the run</a></span>
      </h2>
      <${Found} id=${id} at=${samples[now].key} />
      <${LeftOut} of=${data.left_out} what="this group" />
      <p>
        ${
          data.left_out
            ? ""
            : rewards.length
              ? html`<${Rewards} values=${samples.map(one => one.reward)} size=${samples.length} />
                  Mean reward <b>${short(mean)}</b>, highest ${short(Math.max(...rewards))}, lowest
                  ${" " + short(Math.min(...rewards))}${run.best != null && html`; <b>${passed} of ${rewards.length}</b> have the run's highest`}.`
              : "No rewards."
        }
        ${
          equal &&
          !data.left_out &&
          html` <b class="bad">All rewards are equal: compared with each other, these answers teach nothing.</b>`
        }
        ${samples[0].dropped && html` <b class="bad">Dropped by a filter: ${visible(samples[0].dropped)}.</b>`}
      </p>
      <${Prompt} row=${samples[0].row} hits=${data.hits} />
      <p class="chips">
        <label>
          <input type="checkbox" checked=${d == "1"} disabled=${formats() || col} onChange=${() => restate({ d: d == "1" ? "0" : "" })} />
          mark what differs from ${equal ? "the first answer" : "the best answer"}
        </label>
        <${FormatChoice} />
        <${GroupColours} data=${colours} column=${col} choose=${name => restate({ col: name })} />
      </p>
      <div class="siblings">
        ${samples.map(
          one => html`
            <article key=${one.key} class=${one.key == samples[now].key ? "at" : ""}>
              <header>
                <b><${Reward} of=${one.reward} /></b>
                ${!equal && !data.left_out && one.key == best.key && "best"}
                <span class=${one.status}>${one.status}</span>
                ${short(one.tokens)} tokens
                <span class="right">
                  ${!Array.isArray(one.row?.messages) && html`<${Copy} text=${plain(one.row?.response)} what="the answer" />`}
                  <a href=${there(one)} aria-label="open the conversation">open</a>
                </span>
              </header>
              <${Parts} row=${one.row} />
              <${Trained} of=${one} tokens=${data.tokens?.[one.key]} />
              ${one.failure && html`<p class="bad">${visible(one.failure)}</p>`}
              ${
                colours?.tokens[one.key]?.values[col]
                  ? html`<${Coloured} tokens=${colours.tokens[one.key]} scales=${colours.scales} column=${col} />`
                  : html`
                      ${col && colours?.column == col && html`<p class="dim">The numbers of its tokens were not logged.</p>`}
                      <${Answer} row=${one.row} hits=${data.hits} other=${d == "1" && one.key != best.key ? best.row : null} />
                    `
              }
            </article>
          `,
        )}
      </div>
    </section>
  `;
}

// What training made of an answer: its advantage, and what was masked, clipped or left out, and why.
function Trained({ of: one, tokens }) {
  if (one.kind != "train") return null;
  const told = [];
  if (tokens?.advantage != null) told.push(html`advantage <b>${short(tokens.advantage)}</b>`);
  if (one.status == "failed" || one.status == "aborted")
    told.push(html`<b class="bad">not trained on: ${one.status}</b>`);
  else if (one.trained === 0) told.push(html`<b class="bad">masked as a whole</b>`);
  else if (one.trained < one.tokens) {
    const by = [
      [tokens?.by_tool, "by tools"],
      [tokens?.by_template, "by the template"],
    ].filter(([n]) => n > 0);
    told.push(
      html`${one.tokens - one.trained} tokens
      masked${by.length ? ` (${by.map(([n, who]) => `${n} ${who}`).join(", ")})` : ""}`,
    );
  }
  if (tokens?.clipped > 0) told.push(html`clipped <b>${Math.round(100 * tokens.clipped)} %</b>`);
  if (tokens?.gap != null) told.push(html`largest gap ${short(tokens.gap)}`);
  if (one.reused) told.push(html`used before in ${one.reused} rollout${one.reused > 1 ? "s" : ""}`);
  return told.length ? html`<p class="parts">${told.map(what => html`<span>${what}</span>`)}</p>` : null;
}

const stepOf = one => (one ? `${one.step == null ? "" : `step=${one.step} `}kind:${one.kind}` : "");

// The parts of a reward, if it has any.
export function Parts({ row }) {
  const reward = row?.reward;
  if (!reward || typeof reward != "object") return null;
  return html`
    <span class="parts">
      ${Object.entries(reward).map(
        ([name, value]) => html` <span> ${visible(name) + " "}<b>${short(value)}</b> </span> `,
      )}
    </span>
  `;
}
