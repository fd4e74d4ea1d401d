// The table of samples, with its filter.
import { useEffect, useState } from "preact/hooks";
import { address, fixed, go, html, place, restate, reveal, short, Trouble, useData, useKeys } from "slime/data";
import { visible } from "slime/texts";
import { Reward } from "slime/group";

const PAGE = 50;
// Name, what sorts by it, and whether a phone, which has room for the texts, leaves it out.
const COLUMNS = [
  ["step", "step"],
  ["kind", "", "wide"],
  ["grp", "grp", "wide"],
  ["reward", "reward"],
  ["status", "status", "wide"],
  ["tokens", "tokens", "wide"],
  ["question", ""],
  ["answer", ""],
  ["label", "", "wide"],
];
const TITLES = { grp: "group", question: "prompt" };

export function Samples({ id, run, version }) {
  const { q = fixed ? "" : "kind:train", sort = fixed ? "step" : "-step", page = "0", at } = place().params;
  const offset = +page * PAGE;
  // Rows stay while they are read; what a run that goes on adds is offered.
  const [seen, setSeen] = useState(version);
  const { data, error, waiting } = useData("samples", { run: id, q, sort, offset, limit: PAGE }, seen);
  const fresh = useData("samples", { run: id, q, sort, offset: 0, limit: 0 }, version).data;
  const more = data && fresh && fresh.q === data.q ? fresh.total - data.total : 0;
  const saturated = data?.more && data.indexed < (fresh?.indexed || 0);
  const rows = data?.rows || [],
    pages = data?.more ? Infinity : Math.ceil((data?.total || 0) / PAGE);
  useEffect(() => {
    if (!rows.length && more) setSeen(version);
  }, [version, more]);
  // The chosen row is known by its sample, which may move.
  const number = key =>
    Math.max(
      0,
      rows.findIndex(row => row.key == key),
    );
  const chosen = () => rows[number(place().params.at)];
  const move = by =>
    restate({ at: rows[Math.max(0, Math.min(number(place().params.at) + by, rows.length - 1))]?.key });
  // What is in the address now: keys may come faster than this is drawn.
  const turn = by => restate({ page: Math.max(0, Math.min(pages - 1, +(place().params.page || 0) + by)) || "", at: "" });
  const order = by => restate({ sort: place().params.sort == by ? "-" + by : by, page: "", at: "" });
  const there = row => address("group", [id, row.group_key], { at: row.key });
  const open = row => {
    if (!row) return;
    restate({ at: row.key });
    go(there(row));
  };
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
    Enter: ["open the group", () => open(chosen())],
    c: ["open the conversation", () => chosen() && go(address("sample", [id, chosen().key]))],
    p: ["follow the prompt", () => chosen() && go(address("prompt", [id, chosen().prompt]))],
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
              restate({ q: event.target.q.value, page: "", at: "" });
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
              ${
                (more > 0 || saturated) &&
                html`
                  <button class="new" onClick=${() => setSeen(version)}>
                    ${more > 0 ? `${more.toLocaleString()} new` : "show new"}
                  </button>
                `
              }
              ${data ? `${data.more ? "more than " : ""}${data.total.toLocaleString()} sample${data.total == 1 ? "" : "s"}` : "searching"}${indexed}
            </span>
          </p>
        `
      }
      ${
        data?.means?.tokens != null &&
        html`
          <p class="dim means">
            ${data.means.reward != null && `mean reward ${short(+data.means.reward.toPrecision(3))}, `}
            ${short(+data.means.tokens.toPrecision(3))} tokens, ${short(+(100 * data.means.cut).toPrecision(3))} % cut off
          </p>
        `
      }
      ${fixed && html`<p class="dim">${fixed.note}</p>`} ${error && html`<${Trouble} text=${error} />`}
      <div class="scroll" tabindex="0">
        <table class=${"samples texts" + (waiting ? " old" : "")}>
          <thead>
            <tr>
              ${COLUMNS.map(
                ([name, by, room]) => html`
                  <th class=${room} aria-sort=${sort == by ? "ascending" : sort == "-" + by ? "descending" : "none"}>
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
                <tr key=${row.key} class=${n == number(at) ? "at" : ""} onClick=${() => open(row)}>
                  <td><a href=${there(row)} onClick=${event => event.stopPropagation()}>${row.step ?? "·"}</a></td>
                  <td class="wide">${row.kind}${row.name && ` ${row.name}`}</td>
                  <td class="wide">${short(row.grp)}</td>
                  <td><${Reward} of=${row.reward} /></td>
                  <td class=${"wide " + row.status}>${row.status ?? "·"}</td>
                  <td class="wide">${short(row.tokens)}</td>
                  <td class="cut">${visible(row.question)}</td>
                  <td class="cut">${row.failure ? html`<i>${visible(row.failure)}</i>` : visible(row.answer)}</td>
                  <td class="wide label">${visible(row.label ?? "")}</td>
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
