// A group with its siblings, and one sample with its conversation.
import { useEffect } from "preact/hooks";
import { address, go, html, place, restate, reveal, said, short, Trouble, useData, useKeys } from "slime/data";
import { plain, Text, visible } from "slime/texts";
import { Heat, useTokens } from "slime/tokens";

export const Reward = ({ of }) => html`
  <span class=${of == null ? "dim" : of > 0 ? "good" : "bad"}>${short(of)}</span>
`;

// How many samples an answer lacks: too many for it, or not in a file.
export const LeftOut = ({ of, what }) =>
  of == null
    ? html`<p class="dim">These are the samples in this file; the run may have more.</p>`
    : of > 0 && html`<p class="bad">${of.toLocaleString()} more samples of ${what} are left out here.</p>`;

export function Group({ id, parts: [key], version }) {
  const { data, error } = useData("group", { run: id, key }, version);
  const { at, d = "1" } = place().params;
  const samples = data?.samples || [];
  const best = samples.reduce((a, b) => ((b.reward ?? -1e9) > (a?.reward ?? -1e9) ? b : a), samples[0]);
  const number = key =>
    Math.max(
      0,
      samples.findIndex(one => one.key == key),
    );
  const now = number(at);
  const move = by =>
    restate({ at: samples[Math.max(0, Math.min(samples.length - 1, number(place().params.at) + by))]?.key });
  useEffect(() => reveal("article.at"), [at, samples.length]);
  const file = key.split("/")[0];
  useKeys({
    j: ["next answer", () => move(1)],
    k: ["previous answer", () => move(-1)],
    d: ["mark differences or not", () => restate({ d: d == "1" ? "0" : "" })],
    Enter: ["open the conversation", () => samples[now] && go(address("sample", [id, samples[now].key]))],
    p: ["follow the prompt", () => samples[0] && go(address("prompt", [id, samples[0].prompt]))],
    u: ["back to the step", () => go(address("samples", [id], { q: stepOf(samples[0]) }))],
  });
  if (!data) return error ? html`<${Trouble} text=${error} />` : html`<p class="dim">loading</p>`;
  const rewards = samples.map(one => one.reward).filter(value => value != null);
  const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
  const equal = rewards.length > 1 && rewards.every(value => value == rewards[0]);
  return html`
    <section>
      <h2>
        Group ${samples[0].grp} of step ${samples[0].step}
        <small>${samples.length} answers in ${file}.jsonl</small>
        <span class="right"><a href=${address("prompt", [id, samples[0].prompt])}>this prompt through the run</a></span>
      </h2>
      <${LeftOut} of=${data.left_out} what="this group" />
      <p>
        ${
          data.left_out
            ? ""
            : rewards.length
              ? html`Mean reward <b>${short(mean)}</b>, highest ${short(Math.max(...rewards))}, lowest
                  ${" " + short(Math.min(...rewards))}.`
              : "No rewards."
        }
        ${
          equal &&
          !data.left_out &&
          html` <b class="bad">All rewards are equal: compared with each other, these answers teach nothing.</b>`
        }
        ${samples[0].dropped && html` <b class="bad">Dropped by a filter: ${visible(samples[0].dropped)}.</b>`}
      </p>
      <${Prompt} row=${samples[0].row} />
      <p class="chips">
        <label>
          <input type="checkbox" checked=${d == "1"} onChange=${() => restate({ d: d == "1" ? "0" : "" })} />
          mark what differs from ${equal ? "the first answer" : "the best answer"}
        </label>
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
                <a class="right" href=${address("sample", [id, one.key])}>conversation</a>
              </header>
              <${Parts} row=${one.row} />
              <${Trained} of=${one} tokens=${data.tokens?.[one.key]} />
              ${one.failure && html`<p class="bad">${visible(one.failure)}</p>`}
              <${Text}
                text=${one.row?.response}
                other=${d == "1" && one.key != best.key ? plain(best.row?.response) : null} />
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

export function Prompt({ row }) {
  if (!row) return html`<${Trouble} text="The file of this sample was deleted or has changed." />`;
  const label =
    row.label != null &&
    html`
      <div class="turn label">
        <b>label</b>
        <${Text} text=${row.label} />
      </div>
    `;
  return html`
    <div class="turns">
      ${(Array.isArray(row.prompt) ? row.prompt : [row.prompt]).map(
        one => html`
          <div class="turn">
            <b>${visible(one?.role || "prompt")}</b>
            <${Text} text=${one} />
          </div>
        `,
      )}${label}
    </div>
  `;
}

// The parts of a reward, if it has any.
function Parts({ row }) {
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

const whyNoTokens = one =>
  one.kind == "train"
    ? "The numbers of its tokens were not logged: a budget chooses samples (--log-token-columns all writes those of every sample)."
    : "Numbers of tokens are logged of samples that were trained on.";

// Where the ledger of prompts has a sample: what became of it, and why.
export function Life({ of: one }) {
  const weights = [one.row?.weight_versions].flat().filter(Boolean).map(said).map(Number);
  const made = weights.length && weights.every(Number.isFinite) ? `weights ${[...new Set(weights)].join(", ")}` : "";
  const steps = [
    ["prompt", one.grp == null ? "drawn" : `group ${one.grp} of the run`],
    [
      "generated",
      [made, one.turns > 1 ? `${one.turns} turns` : "", one.row?.finish_reason && said(one.row.finish_reason)]
        .filter(Boolean)
        .join(", "),
    ],
    one.failure ? ["failed", one.failure] : ["scored", one.reward == null ? "no reward" : short(one.reward)],
    one.kind == "dropped"
      ? ["dropped", `${one.dropped}, for rollout ${one.step}; never trained on`]
      : one.kind == "eval"
        ? ["evaluated", `${one.name}, after ${one.step} rollouts`]
        : one.kind == "failed" || one.status == "failed" || one.status == "aborted"
          ? ["not trained on", one.step == null ? `kept as evidence of ${one.name}` : `rollout ${one.step}`]
          : [one.reused ? "trained on again" : "trained on", `rollout ${one.step}`],
  ];
  if (one.reused) steps.splice(3, 0, ["used before", `in ${one.reused} earlier rollout${one.reused > 1 ? "s" : ""}`]);
  return html`
    <ol class="life" aria-label="its way through the ledger">
      ${steps.map(
        ([what, more]) => html`
          <li class=${{ dropped: "bad", failed: "bad", "not trained on": "bad" }[what] || ""}>
            <b>${what}</b> ${more && html`<span>${visible(more)}</span>`}
          </li>
        `,
      )}
    </ol>
  `;
}

// --- a conversation ------------------------------------------------------------------------------------

const WRITERS = { assistant: "policy", tool: "tool" };
const FACTS = [
  "status",
  "finish_reason",
  "prompt_tokens",
  "response_tokens",
  "trained_tokens",
  "weight_versions",
  "dropped",
  "attempt",
  "passed",
  "routed_tokens",
];

export function Conversation({ id, parts: [key], version }) {
  const { data, error } = useData("sample", { run: id, key }, version);
  const one = data?.sample,
    row = one?.row;
  const logged = useData("tokens", { run: id, key }, version);
  const tokens = logged.data?.tokens;
  const heat = useTokens(tokens);
  const messages = Array.isArray(row?.messages) ? row.messages : null;
  // A prompt of plain text is no message.
  const asked = typeof row?.prompt == "string" && !messages?.some(one => plain(one) == row.prompt);
  const beside = by => {
    const [file, line] = key.split(":");
    +line + by >= 0 && go(address("sample", [id, `${file}:${+line + by}`]));
  };
  useKeys({
    j: ["next sample of the file", () => beside(1)],
    k: ["previous sample", () => beside(-1)],
    u: ["its group", () => one && go(address("group", [id, one.group_key], { at: key }))],
    p: ["follow the prompt", () => one && go(address("prompt", [id, one.prompt]))],
  });
  if (!one) return error ? html`<${Trouble} text=${error} />` : html`<p class="dim">loading</p>`;
  const facts = FACTS.filter(name => row?.[name] != null && row[name] !== "");
  const [trained, written] = [row?.trained_tokens, row?.response_tokens];
  const counted = Number.isInteger(trained) && Number.isInteger(written);
  return html`
    <section>
      <h2>
        Sample ${short(one.idx)} of step ${short(one.step)}
        <small>line ${+key.split(":")[1] + 1} of the objects in ${key.split(":")[0]}.jsonl</small>
        <span class="right">
          <a href=${address("group", [id, one.group_key], { at: key })}>its group</a>
          <a href=${address("prompt", [id, one.prompt])}>its prompt through the run</a>
        </span>
      </h2>
      <p class="facts">
        <span
          >reward <b><${Reward} of=${one.reward} /></b
        ></span>
        <${Parts} row=${row} />
      </p>
      <${Life} of=${one} />
      ${row?.failure && html`<${Trouble} text=${visible(row.failure)} />`}
      ${(!messages || asked) && html`<${Prompt} row=${messages ? { prompt: row.prompt } : row} />`}
      ${
        messages
          ? html`
              <div class="turns">
                ${messages.map(
                  message => html`
                    <div class=${"turn " + ((typeof message?.role == "string" && WRITERS[message.role]) || "")}>
                      <b>${visible(message?.role ?? "message")}${message?.name ? ` ${visible(message.name)}` : ""}</b>
                      <div>
                        <${Text} text=${message} />
                        ${
                          Array.isArray(message?.tool_calls) &&
                          message.tool_calls.map(
                            call => html`<pre class="call">${visible(plain(call?.function ?? call))}</pre>`,
                          )
                        }
                      </div>
                    </div>
                  `,
                )}
                ${
                  row.label != null &&
                  html`
                    <div class="turn label">
                      <b>label</b>
                      <${Text} text=${row.label} />
                    </div>
                  `
                }
              </div>
            `
          : row &&
            html`
              <div class="turns">
                <div class="turn policy">
                  <b>answer</b>
                  <${Text} text=${row.response} />
                </div>
              </div>
            `
      }
      <h2>
        Tokens of the answer
        ${
          counted &&
          html`
            <small>
              ${
                trained < written
                  ? `${trained} of ${written} tokens of the answer were trained on; the rest was` +
                    " written by tools or a template, or is masked."
                  : one.kind == "train"
                    ? "All tokens of the answer count in training."
                    : `${written} tokens`
              }
            </small>
          `
        }
      </h2>
      ${
        tokens
          ? html`<${Heat} tokens=${tokens} scales=${logged.data.scales} ...${heat} />`
          : logged.error
            ? html`<${Trouble} text=${logged.error} />`
            : logged.data && html`<p class="dim">${whyNoTokens(one)}</p>`
      }
      <h2>Numbers</h2>
      <table class="entries">
        ${facts.map(
          name => html`
            <tr>
              <td>${name}</td>
              <td class="wrap">${visible([row[name]].flat().map(said).join(", "))}</td>
            </tr>
          `,
        )}
        ${Object.entries(row?.metrics && typeof row.metrics == "object" ? row.metrics : {}).map(
          ([name, value]) => html`
            <tr>
              <td>${visible(name)}</td>
              <td>${short(value)}</td>
            </tr>
          `,
        )}
      </table>
      ${
        row?.traceback &&
        html`
          <h2>Traceback</h2>
          <${Text} text=${row.traceback} />
        `
      }
    </section>
  `;
}
