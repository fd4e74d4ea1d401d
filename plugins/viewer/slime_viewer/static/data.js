// Where the data comes from (the server, or the file itself), and the state that is in the address.
import { h } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import htm from "htm";

export const html = htm.bind(h);
const embedded = document.getElementById("data");
// What a static file contains: its run, all its curves and some samples.
export const fixed = embedded && JSON.parse(embedded.textContent);

// Rows in an order like "step" or "-step"; those without a value are last in both.
export function ordered(rows, sort) {
  const by = sort.replace("-", ""),
    turn = sort[0] == "-" ? -1 : 1;
  return [...rows].sort((a, b) => {
    if (a[by] == null || b[by] == null) return (a[by] == null) - (b[by] == null);
    return turn * (a[by] < b[by] ? -1 : a[by] > b[by] ? 1 : 0);
  });
}

// The groups that are in the file as a whole; of others, nothing is said.
const groupsInFile = () =>
  Object.fromEntries(
    Object.entries(Object.groupBy(fixed.samples, one => one.group_key))
      .filter(([key, some]) => some.length == fixed.sizes[key])
      .map(([key, some]) => {
        const rewards = some.map(one => one.reward).filter(value => value != null);
        const mean = rewards.length ? rewards.reduce((a, b) => a + b) / rewards.length : null;
        const passed = rewards.filter(value => value >= fixed.run.best).length;
        return [key, { size: some.length, scored: rewards.length, mean, passed, rewards: some.map(one => one.reward) }];
      }),
  );

const inFile = {
  runs: () => ({ runs: [fixed.run] }),
  run: () => fixed.run,
  series: ({ names }) => ({
    steps: fixed.series.steps,
    axes: fixed.series.axes,
    values: Object.fromEntries(
      names
        .split("\n")
        .filter(n => n in fixed.series.values)
        .map(n => [n, fixed.series.values[n]]),
    ),
  }),
  samples: ({ sort = "step", offset = 0, limit = 50 }) => {
    const rows = ordered(fixed.samples, sort);
    return { q: "", total: rows.length, more: false, groups: groupsInFile(), rows: rows.slice(+offset, +offset + +limit) };
  },
  place: ({ sort, key }) => ({ place: ordered(fixed.samples, sort).findIndex(one => one.key == key) }),
  beside: ({ sort, key, back }) => {
    const rows = ordered(fixed.samples, sort);
    return { beside: rows[rows.findIndex(one => one.key == key) + (back ? -1 : 1)] };
  },
  group: ({ key }) => {
    const samples = fixed.samples.filter(s => s.group_key == key);
    return { samples, left_out: (fixed.sizes[key] || 0) - samples.length };
  },
  says: ({ n = 0 }) => {
    const train = fixed.samples.filter(s => s.kind == "train");
    const newest = train.length ? Math.max(...train.map(s => s.step)) : null;
    const groups = Object.entries(Object.groupBy(train.filter(s => s.step == newest), s => s.group_key));
    if (!groups.length) return { newest, step: newest, groups: 0 };
    const [key, some] = groups[n % groups.length];
    const rising = ordered(some, "reward");
    const sorted = [...rising.filter(s => s.reward == null), ...rising.filter(s => s.reward != null)];
    return {
      ...{ newest, step: newest, groups: groups.length, key, size: fixed.sizes[key] },
      ...{ rewards: some.map(s => s.reward).filter(r => r != null), best: sorted.at(-1), worst: sorted[1] && sorted[0] },
    };
  },
  sample: ({ key }) => ({ sample: fixed.samples.find(s => s.key == key) }),
  panels: () => ({ panels: fixed.panels || [] }),
  group_tokens: ({ key, column }) => {
    const some = fixed.samples.filter(one => one.group_key == key && fixed.tokens?.[one.key]).map(one => [one.key, fixed.tokens[one.key]]);
    const columns = [...new Set(some.flatMap(([, tokens]) => Object.keys(tokens.values)))];
    const tokens = Object.fromEntries(some.filter(([, tokens]) => tokens.values[column]));
    return { column, columns, own: some.flatMap(([, tokens]) => tokens.own), tokens, scales: fixed.scales };
  },
  tokens: ({ key }) => ({ tokens: fixed.tokens?.[key] || null, scales: fixed.scales }),
  // How many the run has is not known here.
  prompt: ({ key }) => ({ samples: fixed.samples.filter(s => s.prompt == key), left_out: null }),
};

export async function get(name, params = {}) {
  if (fixed) {
    if (!inFile[name]) throw Error("This file does not contain it; open the run with slime view.");
    return inFile[name](params);
  }
  let answer;
  try {
    answer = await fetch(`api/${name}?${new URLSearchParams(params)}`);
  } catch {
    throw Error("The server does not answer: slime view has ended. Start it again and reload its new address.");
  }
  const content = await answer.json().catch(() => ({ error: `status ${answer.status}` }));
  if (!answer.ok) throw Error(content.error);
  return content;
}

// The answer to a question, asked again when the question or `version` changes; the old one stays until then. What is
// asked again does not make an earlier answer worthless: of a run that goes on, none would ever come in time.
export function useData(name, params, version = 0) {
  const [state, set] = useState({});
  const key = JSON.stringify([name, params]);
  const now = useRef({ asked: 0, told: 0 });
  now.current.key = key;
  useEffect(() => () => (now.current.key = null), []);
  useEffect(() => {
    if (!params) return;
    const number = ++now.current.asked;
    const take = change => {
      if (now.current.key != key || number < now.current.told) return;
      now.current.told = number;
      set(change);
    };
    get(name, params).then(
      data => take({ key, data }),
      error => take(old => ({ key, data: old.key == key ? old.data : undefined, error: error.message })),
    );
  }, [key, version]);
  return { ...state, waiting: params && state.key != key };
}

// --- the address: #/view/run/key?name=value ------------------------------------------------------------

export function address(view, parts, params = {}) {
  const stated = Object.entries(params).filter(([, value]) => value !== "" && value != null);
  const tail = stated.length ? "?" + new URLSearchParams(stated) : "";
  return "#/" + [view, ...parts].map(encodeURIComponent).join("/") + tail;
}

export function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [view = "", ...parts] = path.split("/").map(part => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  return { view, parts, params: Object.fromEntries(new URLSearchParams(query || "")) };
}

// Change parameters of the present address, without a step to go back to.
export function restate(changed) {
  const { view, parts, params } = place();
  location.replace(address(view, parts, { ...params, ...changed }));
}

export const go = to => {
  location.hash = to;
};

// --- keys ----------------------------------------------------------------------------------------------

const bound = new Set();
// Keys of a view while it is shown: {key: [what it does, function]}.
export function useKeys(keys) {
  useLayoutEffect(() => {
    bound.add(keys);
    return () => bound.delete(keys);
  });
}
export const allKeys = () => [...bound].flatMap(keys => Object.entries(keys));

// Who speaks to the computer, or presses keys by accident, can turn them off; the browser remembers it.
let keys = true;
try {
  keys = localStorage.getItem("slime keys") != "off";
} catch {
  // It keeps nothing: they are on until they are turned off again.
}
export const keysAreOn = () => keys;
export function turnKeys(on) {
  keys = on;
  try {
    localStorage.setItem("slime keys", on ? "on" : "off");
  } catch {
    // See above.
  }
}

addEventListener("keydown", event => {
  const typing = event.target.matches("input, textarea, select");
  if (!keys || event.ctrlKey || event.metaKey || event.altKey) return;
  // An open dialog keeps the keys to itself, but for the one that opens and closes it.
  if (event.key != "?" && document.querySelector("dialog[open]")) return;
  if (typing) {
    if (event.key == "Escape") event.target.blur();
    return;
  }
  const found = allKeys().findLast(([key]) => key == event.key);
  if (found) {
    event.preventDefault();
    found[1][1]();
  }
});

// --- how things are written ------------------------------------------------------------------------------

// Any JSON value as a text: objects may say of themselves that they cannot be one.
export const said = value => (value !== null && typeof value == "object" ? JSON.stringify(value) : String(value));

export function short(value) {
  if (value == null) return "·";
  if (typeof value != "number") return said(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : value.toPrecision(4).replace(/\.?0+$/, "");
}

// Which of some rows has this key; the first, if none has.
export const rowOf = (rows, key, name = "key") => Math.max(0, rows.findIndex(row => row[name] == key));

// Scroll to something whose top is not in the window.
export function reveal(selector) {
  const found = document.querySelector(selector);
  const top = found?.getBoundingClientRect().top;
  if (top < 50 || top > innerHeight - 60) found.scrollIntoView({ block: "center" });
}

// The head of a column by which `order` sorts a table, which is now in the order `sort`.
export function Sorting({ title, by, sort, order, room }) {
  const [state, sign] = sort == by ? ["ascending", " ↑"] : sort == "-" + by ? ["descending", " ↓"] : ["none", ""];
  return html`
    <th class=${room} aria-sort=${state}>
      <button class="plain" onClick=${() => order(by)}>${title}${sign}</button>
    </th>
  `;
}

export const Trouble = ({ text }) => html`<p class="trouble" role="alert">${text}</p>`;
