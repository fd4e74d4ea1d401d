// The table of samples, with its filter.
import { useEffect, useRef, useState } from "preact/hooks";
import { address, fixed, go, html, place, restate, reveal, short, Trouble, useData, useKeys } from "slime/data";
import { visible } from "slime/texts";
import { Reward } from "slime/group";

const PAGE = 50;
const COLUMNS = [
  ["step", "step"],
  ["kind", ""],
  ["grp", "grp"],
  ["reward", "reward"],
  ["status", "status"],
  ["tokens", "tokens"],
  ["question", ""],
  ["answer", ""],
  ["label", ""],
];
const TITLES = { grp: "group", question: "prompt" };

export function Samples({ id, run, version }) {
  const { q = fixed ? "" : "kind:train", sort = "step", page = "0" } = place().params;
  const offset = +page * PAGE;
  const { data, error, waiting } = useData("samples", { run: id, q, sort, offset, limit: PAGE }, version);
  const [at, setAt] = useState(0);
  const now = useRef(0);
  const move = by => setAt((now.current = Math.max(0, Math.min(now.current + by, rows.length - 1))));
  const rows = data?.rows || [],
    pages = data?.more ? Infinity : Math.ceil((data?.total || 0) / PAGE);
  // What is in the address now: keys may come faster than this is drawn.
  const turn = by => restate({ page: Math.max(0, Math.min(pages - 1, +(place().params.page || 0) + by)) || "" });
  const order = by => restate({ sort: place().params.sort == by ? "-" + by : by, page: "" });
  const open = n => rows[n] && go(address("group", [id, rows[n].group_key], { at: rows[n].key }));
  useEffect(() => reveal("tr.at"), [at]);
  useKeys({
    ...(fixed
      ? {}
      : {
          "/": ["filter", () => document.querySelector("#filter").select()],
          e: ["export as a file", () => document.querySelector("#export").click()],
        }),
    j: ["next row", () => move(1)],
    k: ["previous row", () => move(-1)],
    Enter: ["open the group", () => open(now.current)],
    c: ["open the conversation", () => rows[now.current] && go(address("sample", [id, rows[now.current].key]))],
    p: ["follow the prompt", () => rows[now.current] && go(address("prompt", [id, rows[now.current].prompt]))],
    "]": ["next page", () => turn(1)],
    "[": ["previous page", () => turn(-1)],
    r: ["sort by reward", () => order("reward")],
    s: ["sort by step", () => order("step")],
    t: ["sort by tokens", () => order("tokens")],
  });
  const { done, total } = run.index;
  const indexed = done < total ? `, ${Math.floor((100 * done) / total)} % of the files are indexed` : "";
  return html`
    <section>
      ${
        !fixed &&
        html`
          <form
            class="filter"
            onSubmit=${event => {
              event.preventDefault();
              restate({ q: event.target.q.value, page: "" });
            }}>
            <input
              id="filter"
              name="q"
              key=${q}
              defaultValue=${q}
              aria-label="filter"
              spellcheck="false"
              autocomplete="off"
              placeholder='reward<0.5 step>20 status:truncated "carry the"' />
            <button>Filter</button>
            <a id="export" class="button" href=${"api/export?" + new URLSearchParams({ run: id, q, sort })} download>
              Export
            </a>
          </form>
          <p class="chips">
            ${[
              ["all", "-kind:failed"],
              ["training", "kind:train"],
              ["worst", "kind:train reward<=0"],
              ["cut off", "status:truncated"],
              ["failed", "status:failed"],
              ["dropped", "kind:dropped"],
              ["evaluation", "kind:eval"],
            ].map(
              ([name, line]) => html`
                <a class=${line == q ? "on" : ""} href=${address("samples", [id], { q: line, sort })}>${name}</a>
              `,
            )}
            <span class="right dim">
              ${data ? `${data.more ? "more than " : ""}${data.total.toLocaleString()} samples` : "searching"}${indexed}
            </span>
          </p>
        `
      }
      ${fixed && html`<p class="dim">${fixed.note}</p>`} ${error && html`<${Trouble} text=${error} />`}
      <div class="scroll">
        <table class=${"samples" + (waiting ? " old" : "")}>
          <thead>
            <tr>
              ${COLUMNS.map(
                ([name, by]) => html`
                  <th aria-sort=${sort == by ? "ascending" : sort == "-" + by ? "descending" : "none"}>
                    ${
                      by
                        ? html`
                            <button class="plain" onClick=${() => order(by)}>
                              ${TITLES[name] || name}${sort == by ? " ↑" : sort == "-" + by ? " ↓" : ""}
                            </button>
                          `
                        : TITLES[name] || name
                    }
                  </th>
                `,
              )}
            </tr>
          </thead>
          <tbody>
            ${rows.map(
              (row, n) => html`
                <tr key=${row.key} class=${n == at ? "at" : ""} onClick=${() => open(n)}>
                  <td>${row.step ?? "·"}</td>
                  <td>${row.kind}${row.name && ` ${row.name}`}</td>
                  <td>${short(row.grp)}</td>
                  <td><${Reward} of=${row.reward} /></td>
                  <td class=${row.status}>${row.status ?? "·"}</td>
                  <td>${short(row.tokens)}</td>
                  <td class="cut">${visible(row.question)}</td>
                  <td class="cut">${row.failure ? html`<i>${visible(row.failure)}</i>` : visible(row.answer)}</td>
                  <td class="label">${visible(row.label ?? "")}</td>
                </tr>
              `,
            )}
          </tbody>
        </table>
      </div>
      ${data && !rows.length && html`<p class="dim">No sample matches the filter.</p>`}
      ${
        pages > 1 &&
        html`
          <p class="chips">
            <button disabled=${page == 0} onClick=${() => turn(-1)}>Previous</button>
            page ${+page + 1}${data.more ? "" : ` of ${pages.toLocaleString()}`}
            <button disabled=${+page + 1 >= pages} onClick=${() => turn(1)}>Next</button>
          </p>
        `
      }
    </section>
  `;
}
