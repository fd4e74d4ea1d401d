// The runs of a folder: one row each, new ones by themselves; a click opens one, and any number can be compared.
import { useEffect, useRef, useState } from "preact/hooks";
import { address, get, go, html, ordered, place, restate, reveal, rowOf, short, Sorting, Trouble, useData, useKeys } from "slime/data";
import { lasting } from "slime/axes";
import { counted, stateWords } from "slime/verdict";
import { visible } from "slime/signs";

// Name, title, and whether a phone leaves it out.
const COLUMNS = [
  ["name", "run"],
  ["state", "state"],
  ["held", "held-out"],
  ["reward", "reward", "wide"],
  ["done", "steps"],
  ["when", "last written", "wide"],
];
const EVERY_MS = 4000;

export function Runs() {
  const { sort = "-when", at } = place().params;
  const [look, again] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || again(n => n + 1), EVERY_MS);
    return () => clearInterval(timer);
  }, []);
  const { data, error } = useData("folder", {}, look);
  const [trouble, setTrouble] = useState("");
  const [checked, setChecked] = useState([]);
  const rows = ordered(data?.rows || [], sort);
  const now = useRef(rows);
  now.current = rows;
  const number = () => rowOf(now.current, place().params.at, "path");
  const opened = path => get("open", { path }).then(answer => answer.run);
  const open = path =>
    opened(path).then(
      run => go(address("run", [run])),
      error => setTrouble(error.message),
    );
  const compare = () =>
    Promise.all(checked.map(opened)).then(
      runs => go(address("compare", runs)),
      error => setTrouble(error.message),
    );
  const move = step =>
    restate({ at: now.current[Math.max(0, Math.min(number() + step, now.current.length - 1))]?.path });
  const order = name => restate({ sort: sort == name ? "-" + name : name });
  const check = path =>
    setChecked(old => (old.includes(path) ? old.filter(one => one != path) : [...old, path]));
  const all = rows.length > 0 && rows.every(row => checked.includes(row.path));
  useEffect(() => reveal("tr.at"), [at]);
  useKeys({
    j: ["next run", () => move(1)],
    k: ["previous run", () => move(-1)],
    x: ["choose it for a comparison", () => now.current.length && check(now.current[number()].path)],
    c: ["compare the chosen ones", () => checked.length > 1 && compare()],
    Enter: ["open the run", () => now.current.length && open(now.current[number()].path)],
  });
  if (!data) return error ? html`<${Trouble} text=${error} />` : html`<p class="dim">loading</p>`;
  return html`
    <section>
      <h1>
        Runs <small class="dim">${data.roots.map(visible).join(", ")}</small>
        <button disabled=${checked.length < 2} onClick=${compare}>
          ${checked.length < 2 ? "Compare: choose two or more" : `Compare ${checked.length}`}
        </button>
      </h1>
      ${trouble && html`<${Trouble} text=${trouble} />`}
      ${!rows.length && html`<p class="dim">No runs yet; new ones appear by themselves.</p>`}
      ${
        rows.length > 0 &&
        html`
          <div class="scroll" tabindex="0">
            <table class="samples runs">
              <thead>
                <tr>
                  <td>
                    <input
                      type="checkbox"
                      aria-label="compare all"
                      checked=${all}
                      onChange=${() => setChecked(all ? [] : rows.map(row => row.path))} />
                  </td>
                  ${COLUMNS.map(([by, title, room]) => html`<${Sorting} ...${{ title, by, sort, order, room }} />`)}
                </tr>
              </thead>
              <tbody>
                ${rows.map(
                  row => html`
                    <tr key=${row.path} class=${row.path == at ? "at" : ""}>
                      <td>
                        <input
                          type="checkbox"
                          aria-label=${`compare ${row.name}`}
                          checked=${checked.includes(row.path)}
                          onChange=${() => check(row.path)} />
                      </td>
                      <td><button class="plain link" onClick=${() => open(row.path)}>${visible(row.name)}</button></td>
                      <td><span class=${"state " + row.state}>${stateWords(row.state)}</span></td>
                      <td>${row.held == null ? "·" : short(+row.held.toPrecision(3))}</td>
                      <td class="wide">${row.reward == null ? "·" : short(+row.reward.toPrecision(3))}</td>
                      <td>${counted(row)}</td>
                      <td class="wide">${row.ago_s == null ? "·" : `${lasting(Math.max(1, row.ago_s))} ago`}</td>
                    </tr>
                  `,
                )}
              </tbody>
            </table>
          </div>
        `
      }
    </section>
  `;
}
