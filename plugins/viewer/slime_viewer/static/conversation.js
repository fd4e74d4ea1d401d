// One sample: its conversation, its way through the ledger of prompts, its tokens and its numbers.
import { address, go, html, place, said, short, Trouble, useData, useKeys } from "slime/data";
import { plain, visible } from "slime/signs";
import { Text } from "slime/texts";
import { Parts } from "slime/group";
import { Reward } from "slime/rewards";
import { Heat, useTokens } from "slime/tokens";
import { FormatChoice, Label, Prompt, Turn, turnFormat } from "slime/turns";
import { Found, useWalk } from "slime/walk";

const whyNoTokens = one =>
  one.kind == "train"
    ? "The numbers of its tokens were not logged: a budget chooses samples (--log-token-columns all writes those of every sample)."
    : "Numbers of tokens are logged of samples that were trained on.";

// Where the ledger of prompts has a sample: what became of it, and why.
function Life({ of: one }) {
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
  const { q = "", sort } = place().params;
  const { data, error } = useData("sample", { run: id, key, q }, version);
  const one = data?.sample,
    row = one?.row;
  const logged = useData("tokens", { run: id, key }, version);
  const tokens = logged.data?.tokens;
  const heat = useTokens(tokens);
  const messages = Array.isArray(row?.messages) ? row.messages : null;
  // A prompt of plain text is no message.
  const asked = typeof row?.prompt == "string" && !messages?.some(one => plain(one) == row.prompt);
  const group = one && address("group", [id, one.group_key], { at: key, q, sort });
  const beside = by => {
    const [file, line] = key.split(":");
    +line + by >= 0 && go(address("sample", [id, `${file}:${+line + by}`]));
  };
  const walk = useWalk("sample", id, key, one?.group_key);
  useKeys({
    ...(walk || {
      j: ["next sample of the file", () => beside(1)],
      k: ["previous sample", () => beside(-1)],
    }),
    f: ["Markdown and LaTeX, or as it is written", turnFormat],
    u: ["its group", () => one && go(group)],
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
          <a href=${group}>its group</a>
          <a href=${address("prompt", [id, one.prompt])}>its prompt through the run</a>
        </span>
      </h2>
      <${Found} id=${id} at=${key} />
      <p class="facts">
        <span
          >reward <b><${Reward} of=${one.reward} /></b
        ></span>
        <${Parts} row=${row} />
      </p>
      <${Life} of=${one} />
      ${row?.failure && html`<${Trouble} text=${visible(row.failure)} />`}
      <p class="chips"><${FormatChoice} /></p>
      ${(!messages || asked) && html`<${Prompt} row=${messages ? { prompt: row.prompt } : row} hits=${data.hits} />`}
      ${
        row &&
        html`
          <div class="turns">
            ${(messages || [{ role: "assistant", content: row.response }]).map(
              message => html`<${Turn} of=${message} who=${messages ? undefined : "answer"} hits=${data.hits} />`,
            )}
            ${messages && html`<${Label} row=${row} />`}
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
