// Numbers of one value a token: a heat map over an answer, and the most extreme tokens of a run.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { address, fixed, go, html, place, restate, reveal, short, Trouble, useData, useKeys } from "slime/data";
import { visible } from "slime/signs";
import { Reward } from "slime/rewards";

// What the columns that slime writes mean; others are named by plugins.
const MEANING = {
  loss_mask: "trained on or not",
  source: "who wrote it",
  weight_version: "version of the weights that sampled it",
  engine_logprob: "log-prob under the engine",
  trainer_logprob: "log-prob under the trainer",
  ref_logprob: "log-prob under the reference",
  gap: "trainer's log-prob minus the engine's",
  entropy: "entropy of the policy, nats",
  ratio: "importance ratio, policy to old policy",
  clipped: "a bound took its gradient away",
  kl: "KL to the reference",
  correction: "off-policy weight of its loss",
  advantage: "advantage",
  value: "the critic's value",
  returns: "the critic's target",
};
const SOURCES = { 0: "policy", 1: "tool", 2: "template", "-1": "unknown" };
// The value that means nothing special; the colour is the distance from it.
const NEUTRAL = { ratio: 1, correction: 1, loss_mask: 1, source: 0 };
// What is smaller is no gap: rounding makes some.
const LEAST = { gap: 0.01 };
const SHOWN = 4000;
// How much of the scale is far.
const FAR = 0.5;

// From where colours begin, and the distance from it that has the full colour: one scale for all answers of a run.
function scaleOf(name, values, scales) {
  const known = [...values.filter(value => value != null), ...(scales?.[name] || [])];
  const middle = name == "weight_version" ? known.reduce((a, b) => Math.max(a, b), 0) : (NEUTRAL[name] ?? 0);
  return [middle, known.reduce((most, value) => Math.max(most, Math.abs(value - middle)), LEAST[name] || 0)];
}

// For each token [-1..1]: how far its value is from the neutral one.
function strengths(values, [middle, most]) {
  return values.map(value => (value == null || !most ? null : (value - middle) / most));
}

const written = (name, value) =>
  value == null ? "no value" : name == "source" ? (SOURCES[value] ?? value) : short(value);

// A token's text: what is invisible in it is shown by signs, and a line break by one too.
const piece = text => visible(text).replaceAll("\n", "⏎\n") || "∅";

// What the colours mean: one scale for all answers of the run. `known`: the values that are shown.
function Legend({ name, scale: [middle, most], known }) {
  const ends = known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  return html`
    <span class="scale right">
      ${written(name, middle - most)}<i class="low"></i>${written(name, middle)}<i class="high"></i>
      ${written(name, middle + most)}
      <span>one scale for the run; here ${written(name, ends[0])} to ${written(name, ends[1])}</span>
    </span>
  `;
}

// Besides its colour, a token that is far above the middle has a line over it, and one far below a line under it.
const classOf = value => (!value ? "" : (value > 0 ? "high" : "low") + (Math.abs(value) >= FAR ? " far" : ""));
const shade = value => (value ? { "--w": `${Math.round(12 + 68 * Math.abs(value))}%` } : {});

const meaning = name => MEANING[name] || "named by a plugin";

// The column that an answer is coloured by: the chosen one, if its tokens have it.
const columnOf = (names, chosen) =>
  names.includes(chosen) ? chosen : names.find(one => one == "advantage" || one == "entropy") || names[0];

// The column that is `by` places after another one, in a circle.
const turned = (names, name, by) => names[(names.indexOf(name) + by + names.length) % names.length];

// The choice of a column; `own`: those that a plugin has named, `none`: how to say that no column is chosen, if one may.
function Columns({ names, own, column, choose, none }) {
  return html`
    <select aria-label="column of tokens" value=${column} onChange=${event => choose(event.target.value)}>
      ${none && html`<option value="" selected=${!column}>${none}</option>`}
      ${names.map(
        one => html`<option value=${one} selected=${one == column}>${visible(one)}${own.includes(one) ? " (plugin)" : ""}</option>`,
      )}
    </select>
  `;
}

// The first tokens of an answer in the colours of a column; `at`: the chosen one, `move`: chooses another, if one can.
function Colours({ tokens, column, strong, end, at, move }) {
  const values = tokens.values[column] || [];
  const mask = tokens.values.loss_mask || [];
  return html`
    <pre class=${"heat" + (move ? "" : " still")} tabindex="0">
${tokens.pieces
        .slice(0, end)
        .map(
          (text, i) =>
            html`<span
              class=${`${classOf(strong[i])}${mask[i] === 0 ? " masked" : ""}${i === at ? " at" : ""}`}
              style=${shade(strong[i])}
              title=${`${i}: ${written(column, values[i])}`}
              onClick=${move && (() => move(i))}
              >${piece(text)}</span
            >`,
        )}</pre>
  `;
}

// An answer with each token coloured by a column; the keys and a click move one token on.
export function Heat({ tokens, scales, column, at, choose, move }) {
  const names = Object.keys(tokens.values);
  const values = tokens.values[column] || [];
  const [middle, most] = scaleOf(column, values, scales);
  const strong = useMemo(() => strengths(values, [middle, most]), [column, tokens, middle, most]);
  const [all, setAll] = useState(false);
  const known = values.filter(value => value != null);
  const end = all ? tokens.pieces.length : SHOWN;
  const now = at >= 0 && at < tokens.pieces.length ? at : -1;
  useEffect(() => reveal(".heat .at"), [now]);
  if (!names.length) return html`<p class="dim">No column of this sample's tokens was written.</p>`;
  return html`
    <div class="tokens">
      <p class="chips">
        <label>
          Colour by
          <${Columns} names=${names} own=${tokens.own} column=${column} choose=${choose} />
        </label>
        <span class="dim">${meaning(column)}</span>
        ${
          known.length > 0 &&
          html`<${Legend} name=${column} scale=${[middle, most]} known=${known} />`
        }
      </p>
      <${Colours} tokens=${tokens} column=${column} strong=${strong} end=${end} at=${now} move=${move} />
      ${tokens.pieces.length > end && html`<button onClick=${() => setAll(true)}>${tokens.pieces.length - end} more tokens</button>`}
      ${
        now >= 0
          ? html`
              <dl class="token">
                <div>
                  <dt>token ${now}</dt>
                  <dd><code>${piece(tokens.pieces[now])}</code></dd>
                </div>
                ${
                  tokens.ids &&
                  html`<div>
                    <dt>id</dt>
                    <dd>${tokens.ids[now]}</dd>
                  </div>`
                }
                ${names.map(
                  one => html`
                    <div class=${one == column ? "on" : ""}>
                      <dt>${visible(one)}</dt>
                      <dd>${written(one, tokens.values[one][now])}</dd>
                    </div>
                  `,
                )}
              </dl>
            `
          : html`<p class="dim">
              Click a token, or use the arrow keys, for all its numbers. Underlined with dots: not trained on.
            </p>`
      }
    </div>
  `;
}

// The choice of a column for all answers of a group, with its legend; `data`: that of the question "group_tokens".
export function GroupColours({ data, column, choose }) {
  const known = Object.values(data?.tokens || {}).flatMap(one => (one.values[column] || []).filter(value => value != null));
  if (!data?.columns.length) return null;
  return html`
    <label>
      Colour tokens by
      <${Columns} names=${data.columns} own=${data.own} column=${column} choose=${choose} none="nothing" />
    </label>
    ${known.length > 0 && html`<span class="dim">${meaning(column)}</span><${Legend} name=${column} scale=${scaleOf(column, known, data.scales)} known=${known} />`}
  `;
}

// One answer of a group in the colours of a column.
export function Coloured({ tokens, scales, column }) {
  const values = tokens.values[column];
  const strong = strengths(values, scaleOf(column, values, scales));
  return html`
    <${Colours} tokens=${tokens} column=${column} strong=${strong} end=${SHOWN} />
    ${tokens.pieces.length > SHOWN && html`<p class="dim">The conversation has ${tokens.pieces.length - SHOWN} more tokens.</p>`}
  `;
}

// The keys of a heat map: the state is in the address, as `col` and `tok`.
export function useTokens(tokens) {
  const { col, tok } = place().params;
  const names = Object.keys(tokens?.values || {});
  const size = tokens?.pieces.length || 0;
  const at = tok === undefined ? -1 : +tok;
  const to = n => size && restate({ tok: Math.max(0, Math.min(size - 1, n)) });
  const step = by => to((place().params.tok === undefined ? (by > 0 ? -1 : size) : +place().params.tok) + by);
  // The column in the address now: keys may come faster than this is drawn.
  const shown = () => columnOf(names, place().params.col);
  const turn = by => names.length && restate({ col: turned(names, shown(), by) });
  const worst = () => {
    const name = shown();
    const own = tokens?.values[name] || [];
    const strong = strengths(own, scaleOf(name, own)).map(value => Math.abs(value ?? -1));
    const order = strong.map((_, i) => i).sort((a, b) => strong[b] - strong[a]);
    const i = order.indexOf(+(place().params.tok ?? -1));
    if (order.length) to(order[(i + 1) % order.length]);
  };
  useKeys(
    size
      ? {
          ArrowRight: ["next token", () => step(1)],
          ArrowLeft: ["previous token", () => step(-1)],
          h: ["colour tokens by the next column", () => turn(1)],
          H: ["colour tokens by the previous column", () => turn(-1)],
          x: ["the most extreme token, then the next", worst],
        }
      : {},
  );
  return { column: columnOf(names, col), at, choose: col => restate({ col }), move: tok => restate({ tok }) };
}

// The tokens of a run with the most extreme values of a column.
export function Tokens({ id, version }) {
  const { column = "", order = "size", q = "" } = place().params;
  const { data, error } = useData("extremes", { run: id, column, order, q }, version);
  const [at, setAt] = useState(0);
  const now = useRef(0);
  const rows = data?.rows || [];
  const move = by => setAt((now.current = Math.max(0, Math.min(now.current + by, rows.length - 1))));
  const to = row => address("sample", [id, row.key], { col: data.column, tok: row.at });
  useEffect(() => reveal("tr.at"), [at]);
  const next = by => data?.columns.length && restate({ column: turned(data.columns, data.column, by) });
  useKeys({
    "/": ["filter", () => document.querySelector("#filter")?.select()],
    j: ["next token", () => move(1)],
    k: ["previous token", () => move(-1)],
    Enter: ["open it in its conversation", () => rows[now.current] && go(to(rows[now.current]))],
    h: ["next column", () => next(1)],
    H: ["previous column", () => next(-1)],
    o: ["largest, highest or lowest", () => restate({ order: { size: "high", high: "low", low: "size" }[order] })],
  });
  if (fixed) return html`<p class="dim">The tokens of a whole run are not in a file; open the run with slime view.</p>`;
  return html`
    <section>
      <h2>
        Most extreme tokens
        <small>of those that the run has logged</small>
      </h2>
      <form
        class="filter"
        onSubmit=${event => {
          event.preventDefault();
          restate({ q: event.target.q.value });
        }}>
        <select aria-label="column" value=${data?.column} onChange=${event => restate({ column: event.target.value })}>
          ${(data?.columns || []).map(name => html`<option value=${name} selected=${name == data.column}>${visible(name)}</option>`)}
        </select>
        <select aria-label="order" value=${order} onChange=${event => restate({ order: event.target.value })}>
          ${[
            ["size", "largest in size"],
            ["high", "highest"],
            ["low", "lowest"],
          ].map(([value, name]) => html`<option value=${value} selected=${value == order}>${name}</option>`)}
        </select>
        <input
          id="filter"
          name="q"
          key=${q}
          defaultValue=${q}
          aria-label="filter"
          spellcheck="false"
          autocomplete="off"
          placeholder="of all samples; or a filter: step>20 reward<0.5" />
        <button>Filter</button>
      </form>
      ${error && html`<${Trouble} text=${error} />`}
      ${
        rows.length > 0
          ? html`
              <p class="dim">${visible(data.column)}: ${meaning(data.column)}</p>
              <div class="scroll" tabindex="0">
                <table class="samples">
                  <thead>
                    <tr>
                      <th class="number">${visible(data.column)}</th>
                      <th>token</th>
                      <th class="number wide">position</th>
                      <th class="number wide">step</th>
                      <th>reward</th>
                      <th>answer</th>
                    </tr>
                  </thead>
                  <tbody>
                    ${rows.map(
                      (row, n) => html`
                        <tr key=${row.key + " " + row.at} class=${n == at ? "at" : ""} onClick=${() => go(to(row))}>
                          <td class="number"><b>${short(row.value)}</b></td>
                          <td>
                            <a href=${to(row)} onClick=${event => event.stopPropagation()}><code>${piece(row.piece)}</code></a>
                          </td>
                          <td class="number wide">${row.at} of ${short(row.tokens)}</td>
                          <td class="number wide">${short(row.step)}</td>
                          <td><${Reward} of=${row.reward} /></td>
                          <td class="cut">${visible(row.answer)}</td>
                        </tr>
                      `,
                    )}
                  </tbody>
                </table>
              </div>
            `
          : data &&
            html`
              <p class="dim">
                ${
                  data.columns.length
                    ? "No token of such samples."
                    : "This run has logged no tokens. They are written to rollouts/*.tokens.parquet, unless --log-token-columns none says otherwise."
                }
              </p>
            `
      }
    </section>
  `;
}
