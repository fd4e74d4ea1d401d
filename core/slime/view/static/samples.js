// Samples: the table with its filter, a group with its siblings, one conversation, one prompt through the run.
import { useEffect, useRef, useState } from "preact/hooks";
import { address, fixed, go, html, place, restate, short, Trouble, useData, useKeys } from "slime/data";
import { plain, Text, visible } from "slime/texts";
import { Chart } from "slime/charts";

const PAGE = 50;
const COLUMNS = [["step", "step"], ["kind", ""], ["grp", "grp"], ["reward", "reward"], ["status", "status"],
  ["tokens", "tokens"], ["question", ""], ["answer", ""]];
const TITLES = { grp: "group", question: "prompt" };

// --- the table -----------------------------------------------------------------------------------------

export function Samples({ id, run, version }) {
  const { q = fixed ? "" : "kind:train", sort = "step", page = "0" } = place().params;
  const offset = +page * PAGE;
  const { data, error, waiting } = useData("samples", { run: id, q, sort, offset, limit: PAGE }, version);
  const [at, setAt] = useState(0);
  const rows = data?.rows || [], pages = Math.ceil((data?.total || 0) / PAGE);
  // What is in the address now: keys may come faster than this is drawn.
  const turn = by => restate({ page: Math.max(0, Math.min(pages - 1, +(place().params.page || 0) + by)) || "" });
  const order = by => restate({ sort: place().params.sort == by ? "-" + by : by, page: "" });
  const open = n => rows[n] && go(address("group", [id, rows[n].group_key], { at: rows[n].key }));
  useEffect(() => document.querySelector("tr.at")?.scrollIntoView({ block: "nearest" }), [at]);
  useKeys({
    ...(fixed ? {} : { "/": ["filter", () => document.querySelector("#filter").select()],
      e: ["export as a file", () => document.querySelector("#export").click()] }),
    j: ["next row", () => setAt(n => Math.min(n + 1, rows.length - 1))],
    k: ["previous row", () => setAt(n => Math.max(n - 1, 0))],
    Enter: ["open the group", () => open(at)],
    c: ["open the conversation", () => rows[at] && go(address("sample", [id, rows[at].key]))],
    p: ["follow the prompt", () => rows[at] && go(address("prompt", [id, rows[at].prompt]))],
    "]": ["next page", () => turn(1)],
    "[": ["previous page", () => turn(-1)],
    r: ["sort by reward", () => order("reward")],
    s: ["sort by step", () => order("step")],
    t: ["sort by tokens", () => order("tokens")],
  });
  const [done, total] = [run.index.done, run.index.total];
  return html`<section>
    ${!fixed && html`<form class="filter" onSubmit=${event => { event.preventDefault(); restate({ q: event.target.q.value, page: "" }); }}>
      <input id="filter" name="q" key=${q} defaultValue=${q} aria-label="filter" spellcheck="false" autocomplete="off"
        placeholder='reward<0.5 step>20 status:truncated "carry the"' />
      <button>Filter</button>
      <a id="export" class="button" href=${"api/export?" + new URLSearchParams({ run: id, q, sort })} download>Export</a>
    </form>
    <p class="chips">${[["all", "-kind:failed"], ["training", "kind:train"], ["worst", "kind:train reward<=0"], ["cut off", "status:truncated"],
      ["failed", "status:failed"], ["dropped", "kind:dropped"], ["evaluation", "kind:eval"]].map(([name, line]) => html`
      <a class=${line == q ? "on" : ""} href=${address("samples", [id], { q: line, sort })}>${name}</a>`)}
      <span class="right dim">${data ? `${data.total.toLocaleString()} samples` : "searching"}${done < total ? `, ${Math.floor((100 * done) / total)} % of the files are indexed` : ""}</span></p>`}
    ${fixed && html`<p class="dim">${fixed.note}</p>`}
    ${error && html`<${Trouble} text=${error} />`}
    <div class="scroll"><table class=${"samples" + (waiting ? " old" : "")}>
      <thead><tr>${COLUMNS.map(([name, by]) => html`<th aria-sort=${sort == by ? "ascending" : sort == "-" + by ? "descending" : "none"}>
        ${by ? html`<button class="plain" onClick=${() => order(by)}>${TITLES[name] || name}${sort == by ? " ↑" : sort == "-" + by ? " ↓" : ""}</button>` : TITLES[name] || name}</th>`)}</tr></thead>
      <tbody>${rows.map((row, n) => html`<tr key=${row.key} class=${n == at ? "at" : ""} onClick=${() => open(n)}>
        <td>${row.step ?? "·"}</td><td>${row.kind}${row.name && ` ${row.name}`}</td><td>${short(row.grp)}</td>
        <td><${Reward} of=${row.reward} /></td><td class=${row.status}>${row.status ?? "·"}</td><td>${short(row.tokens)}</td>
        <td class="cut">${visible(row.question)}</td>
        <td class="cut">${row.failure ? html`<i>${visible(row.failure)}</i>` : visible(row.answer)}</td></tr>`)}</tbody>
    </table></div>
    ${data && !rows.length && html`<p class="dim">No sample fits.</p>`}
    ${pages > 1 && html`<p class="pages"><button disabled=${page == 0} onClick=${() => turn(-1)}>Previous</button>
      page ${+page + 1} of ${pages.toLocaleString()} <button disabled=${+page + 1 >= pages} onClick=${() => turn(1)}>Next</button></p>`}
  </section>`;
}

const Reward = ({ of }) => html`<span class=${of == null ? "dim" : of > 0 ? "good" : "bad"}>${short(of)}</span>`;

// --- a group -------------------------------------------------------------------------------------------

export function Group({ id, parts: [key], version }) {
  const { data, error } = useData("group", { run: id, key }, version);
  const { at, d = "1" } = place().params;
  const samples = data?.samples || [];
  const best = samples.reduce((a, b) => ((b.reward ?? -1e9) > (a?.reward ?? -1e9) ? b : a), samples[0]);
  const number = key => Math.max(0, samples.findIndex(one => one.key == key));
  const now = number(at);
  const move = by => restate({ at: samples[Math.max(0, Math.min(samples.length - 1, number(place().params.at) + by))]?.key });
  useEffect(() => document.querySelector("article.at")?.scrollIntoView({ block: "nearest" }), [at, samples.length]);
  const file = key.split("/")[0];
  useKeys({
    j: ["next answer", () => move(1)], k: ["previous answer", () => move(-1)],
    d: ["mark differences or not", () => restate({ d: d == "1" ? "0" : "" })],
    Enter: ["open the conversation", () => samples[now] && go(address("sample", [id, samples[now].key]))],
    p: ["follow the prompt", () => samples[0] && go(address("prompt", [id, samples[0].prompt]))],
    u: ["back to the step", () => go(address("samples", [id], { q: stepOf(samples[0]) }))],
  });
  if (!data) return error ? html`<${Trouble} text=${error} />` : html`<p class="dim">loading</p>`;
  const rewards = samples.map(one => one.reward).filter(value => value != null);
  const mean = rewards.reduce((a, b) => a + b, 0) / (rewards.length || 1);
  const equal = rewards.length > 1 && rewards.every(value => value == rewards[0]);
  return html`<section>
    <h2>Group ${samples[0].grp} of step ${samples[0].step} <small>${samples.length} answers in ${file}.jsonl</small>
      <span class="right"><a href=${address("prompt", [id, samples[0].prompt])}>this prompt through the run</a></span></h2>
    <p>${rewards.length ? html`Mean reward <b>${short(mean)}</b>, highest ${short(Math.max(...rewards))}, lowest ${short(Math.min(...rewards))}.` : "No rewards."}
      ${equal && html` <b class="bad">All rewards are equal: compared with each other,
      these answers teach nothing.</b>`}
      ${samples[0].dropped && html` <b class="bad">Dropped by a filter: ${visible(samples[0].dropped)}.</b>`}</p>
    <${Prompt} row=${samples[0].row} />
    <p class="chips"><label><input type="checkbox" checked=${d == "1"} onChange=${() => restate({ d: d == "1" ? "0" : "" })} />
      mark what differs from ${equal ? "the first answer" : "the best answer"}</label></p>
    <div class="siblings">${samples.map(one => html`<article key=${one.key} class=${one.key == samples[now].key ? "at" : ""}>
      <header><b><${Reward} of=${one.reward} /></b> ${!equal && one.key == best.key && "best"} <span class=${one.status}>${one.status}</span> ${short(one.tokens)} tokens
        <a class="right" href=${address("sample", [id, one.key])}>conversation</a></header>
      <${Parts} row=${one.row} />
      ${one.failure && html`<p class="bad">${visible(one.failure)}</p>`}
      <${Text} text=${one.row?.response} other=${d == "1" && one.key != best.key ? plain(best.row?.response) : null} />
    </article>`)}</div>
  </section>`;
}

const stepOf = one => (one ? `${one.step == null ? "" : `step=${one.step} `}kind:${one.kind}` : "");

function Prompt({ row }) {
  if (!row) return html`<${Trouble} text="The file of this sample was deleted or has changed." />`;
  const label = row.label != null && html`<div class="turn label"><b>label</b><${Text} text=${row.label} /></div>`;
  return html`<div class="turns">${(Array.isArray(row.prompt) ? row.prompt : [row.prompt]).map(one => html`
    <div class="turn"><b>${one?.role || "prompt"}</b><${Text} text=${one} /></div>`)}${label}</div>`;
}

// The parts of a reward, if it has any.
function Parts({ row }) {
  const reward = row?.reward;
  if (!reward || typeof reward != "object") return null;
  return html`<p class="parts">${Object.entries(reward).map(([name, value]) => html`<span>${visible(name)} <b>${short(value)}</b></span>`)}</p>`;
}

// --- a conversation ------------------------------------------------------------------------------------

const FACTS = ["status", "finish_reason", "prompt_tokens", "response_tokens", "trained_tokens", "weight_versions", "dropped", "attempt",
  "passed", "routed_tokens"];

export function Conversation({ id, parts: [key], version }) {
  const { data, error } = useData("sample", { run: id, key }, version);
  const one = data?.sample, row = one?.row;
  const messages = Array.isArray(row?.messages) ? row.messages : null;
  const beside = by => { const [file, line] = key.split(":"); +line + by >= 0 && go(address("sample", [id, `${file}:${+line + by}`])); };
  useKeys({
    j: ["next sample of the file", () => beside(1)], k: ["previous sample", () => beside(-1)],
    u: ["its group", () => one && go(address("group", [id, one.group_key], { at: key }))],
    p: ["follow the prompt", () => one && go(address("prompt", [id, one.prompt]))],
  });
  if (!one) return error ? html`<${Trouble} text=${error} />` : html`<p class="dim">loading</p>`;
  const facts = FACTS.filter(name => row?.[name] != null && row[name] !== "");
  const untrained = row?.trained_tokens < row?.response_tokens;
  return html`<section>
    <h2>Sample ${short(one.idx)} of step ${short(one.step)} <small>line ${+key.split(":")[1] + 1} of the objects in ${key.split(":")[0]}.jsonl</small>
      <span class="right"><a href=${address("group", [id, one.group_key], { at: key })}>its group</a>
      <a href=${address("prompt", [id, one.prompt])}>its prompt through the run</a></span></h2>
    <p>Reward <b><${Reward} of=${one.reward} /></b></p><${Parts} row=${row} />
    ${row?.failure && html`<${Trouble} text=${visible(row.failure)} />`}
    ${!messages && html`<${Prompt} row=${row} />`}
    ${messages ? html`<div class="turns">${messages.map(message => html`<div class=${"turn " + (message?.role == "assistant" ? "policy" : message?.role == "tool" ? "tool" : "")}>
        <b>${visible(message?.role ?? "message")}${message?.name ? ` ${visible(message.name)}` : ""}</b><div><${Text} text=${message} />
        ${Array.isArray(message?.tool_calls) && message.tool_calls.map(call => html`<pre class="call">${visible(plain(call?.function ?? call))}</pre>`)}</div></div>`)}
        ${row.label != null && html`<div class="turn label"><b>label</b><${Text} text=${row.label} /></div>`}</div>` :
      row && html`<div class="turns"><div class="turn policy"><b>answer</b><${Text} text=${row.response} /></div></div>`}
    ${row && html`<p class="dim">${untrained ? `${row.trained_tokens} of ${row.response_tokens} tokens of the answer were trained on; the rest was written by tools or a template, or is masked.` :
      "All tokens of the answer count in training."}</p>`}
    <table class="entries">${facts.map(name => html`<tr><td>${name}</td><td class="wrap">${visible([row[name]].flat().join(", "))}</td></tr>`)}
      ${Object.entries(row?.metrics || {}).map(([name, value]) => html`<tr><td>${visible(name)}</td><td>${short(value)}</td></tr>`)}</table>
    ${row?.traceback && html`<h2>Traceback</h2><${Text} text=${row.traceback} />`}
  </section>`;
}

// --- one prompt through the run ------------------------------------------------------------------------

export function Visits({ id, parts: [key], version }) {
  const { data, error } = useData("prompt", { run: id, key }, version);
  const { params } = place();
  const visits = Object.values(Object.groupBy(data?.samples || [], one => one.group_key)).map(samples => {
    const rewards = samples.map(one => one.reward).filter(value => value != null);
    return { key: samples[0].group_key, step: samples[0].step, kind: samples[0].kind, name: samples[0].name, samples, rewards,
      mean: rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null };
  });
  const found = (name, otherwise) => Math.max(0, visits.findIndex((one, i) => (params[name] ? one.key == params[name] : i == otherwise)));
  const [a, b] = [found("a", 0), found("b", visits.length - 1)];
  const pick = (name, n) => visits[n] && restate({ [name]: visits[n].key });
  useKeys({
    j: ["later visit on the right", () => pick("b", b + 1)], k: ["earlier visit on the right", () => pick("b", b - 1)],
    J: ["later visit on the left", () => pick("a", a + 1)], K: ["earlier visit on the left", () => pick("a", a - 1)],
    Enter: ["open the group on the right", () => visits[b] && go(address("group", [id, visits[b].key]))],
  });
  if (!data) return error ? html`<${Trouble} text=${error} />` : html`<p class="dim">loading</p>`;
  const lines = Object.entries(Object.groupBy(visits.filter(one => one.step != null && one.mean != null), one => one.kind)).map(([kind, some]) => ({
    label: kind, steps: some.map(one => one.step), values: some.map(one => one.mean),
    low: some.map(one => Math.min(...one.rewards)), high: some.map(one => Math.max(...one.rewards)) }));
  const side = (n, name) => html`<div><label>Step <select value=${visits[n].key} onChange=${event => restate({ [name]: event.target.value })}>
      ${visits.map(one => html`<option value=${one.key} selected=${one.key == visits[n].key}>${one.step} (${one.kind}${one.name && ` ${one.name}`}), reward ${short(one.mean)}</option>`)}</select></label>
      <a href=${address("group", [id, visits[n].key])}>group</a>
      ${visits[n].samples.map((one, i) => html`<article><header><b><${Reward} of=${one.reward} /></b> <span class=${one.status}>${one.status}</span></header>
        <${Text} text=${one.row?.response} other=${name == "b" && visits[a].samples[i] ? plain(visits[a].samples[i].row?.response) : null} /></article>`)}</div>`;
  return html`<section><h2>One prompt through the run <small>${visits.length} ${visits.length == 1 ? "visit" : "visits"}, ${data.samples.length} samples</small></h2>
    <${Prompt} row=${data.samples[0].row} />
    ${lines.length > 0 && visits.length > 1 && html`<${Chart} title="Mean reward of a visit, from its lowest to its highest" lines=${lines} />`}
    ${visits.length > 1 ? html`<p class="dim">On the right, what differs from the answer beside it is marked.</p>
    <div class="two">${side(a, "a")}${side(b, "b")}</div>` : side(0, "a")}</section>`;
}
