// The table of samples, with its filter.
import { useEffect, useState } from "preact/hooks";
import { address, fixed, get, go, html, place, restate, reveal, rowOf, short, Sorting, Trouble, useData, useKeys } from "slime/data";
import { visible } from "slime/signs";
import { Marked } from "slime/texts";
import { Histogram, Reward, Rewards } from "slime/rewards";
import { lastSeen } from "slime/walk";

const PAGE = 50;
// In these orders the samples of a group are together, and its prompt stands above them, once.
const TOGETHER = ["step", "grp"];
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

// The rewards of a whole group, also of those samples that the filter does not find.
function About({ of: group, label }) {
  const said = label !== "" && label != null && html`<span class="dim">label ${visible(label)}</span>`;
  if (!group?.scored || group.size == 1) return said;
  return html`
    ${said}
    <${Rewards} values=${group.rewards} size=${group.size} />
    <span>${group.passed} of ${group.scored} pass</span>
    <span class="dim">mean ${short(+group.mean.toPrecision(3))}</span>
  `;
}

export function Samples({ id, run, version }) {
  const { q = fixed ? "" : "kind:train", sort = fixed ? "step" : "-step", page = "0", at } = place().params;
  const offset = +page * PAGE;
  // Rows stay while they are read; what a run that goes on adds is offered.
  const [seen, setSeen] = useState(version);
  const { data, error, waiting } = useData("samples", { run: id, q, sort, offset, limit: PAGE }, seen);
  const fresh = useData("samples", { run: id, q, sort, offset: 0, limit: 0 }, version).data;
  const spread = useData("histogram", fixed ? null : { run: id, q }, seen).data;
  // Whoever comes back finds the row on the page where it is now.
  useEffect(() => {
    const key = lastSeen(id, q, sort) || place().params.at;
    if (key)
      get("place", { run: id, q, sort, key }).then(
        found => found.place != null && restate({ at: key, page: Math.floor(found.place / PAGE) || "" }),
        () => {},
      );
  }, []);
  const more = data && fresh && fresh.q === data.q ? fresh.total - data.total : 0;
  const saturated = data?.more && data.indexed < (fresh?.indexed || 0);
  const rows = data?.rows || [],
    pages = data?.more ? Infinity : Math.ceil((data?.total || 0) / PAGE);
  useEffect(() => {
    if (!rows.length && more) setSeen(version);
  }, [version, more]);
  // The chosen row is known by its sample, which may move.
  const number = () => rowOf(rows, place().params.at);
  const chosen = () => rows[number()];
  const move = by => restate({ at: rows[Math.max(0, Math.min(number() + by, rows.length - 1))]?.key });
  // What is in the address now: keys may come faster than this is drawn.
  const turn = by => restate({ page: Math.max(0, Math.min(pages - 1, +(place().params.page || 0) + by)) || "", at: "" });
  const order = by => restate({ sort: place().params.sort == by ? "-" + by : by, page: "", at: "" });
  const there = row => address("group", [id, row.group_key], { at: row.key, q, sort });
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
    c: ["open the conversation", () => chosen() && go(address("sample", [id, chosen().key], { q, sort }))],
    p: ["follow the prompt", () => chosen() && go(address("prompt", [id, chosen().prompt]))],
    "]": ["next page", () => turn(1)],
    "[": ["previous page", () => turn(-1)],
    r: ["sort by reward", () => order("reward")],
    s: ["sort by step", () => order("step")],
    t: ["sort by tokens", () => order("tokens")],
  });
  const together = TOGETHER.includes(sort.replace("-", ""));
  const columns = COLUMNS.filter(([name]) => !together || !["question", "label"].includes(name));
  const asked = row => html`<${Marked} text=${row.question} hits=${data.hits} />`;
  // The rows of a page, with the groups that begin in it.
  const lines = rows.flatMap((row, n) => {
    const begins = together && row.group_key != rows[n - 1]?.group_key;
    return begins ? [{ head: row }, { row, n }] : [{ row, n }];
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
      ${
        !error &&
        spread &&
        html`
          <${Histogram}
            data=${spread}
            pick=${([first, last]) => restate({ q: `${q} step:${first}..${last}`.trim(), page: "", at: "" })} />
        `
      }
      ${fixed && html`<p class="dim">${fixed.note}</p>`} ${error && html`<${Trouble} text=${error} />`}
      <div class="scroll" tabindex="0">
        <table class=${"samples texts" + (waiting ? " old" : "") + (together ? " together" : "")}>
          <thead>
            <tr>
              ${columns.map(([name, by, room]) => {
                const title = TITLES[name] || name;
                return by
                  ? html`<${Sorting} ...${{ title, by, sort, order, room }} />`
                  : html`<th class=${room}>${title}</th>`;
              })}
            </tr>
          </thead>
          <tbody>
            ${lines.map(({ head, row, n }) =>
              head
                ? html`
                    <tr key=${"group " + head.key} class="head">
                      <th scope="rowgroup" colspan=${columns.length}>
                        <div>
                          <span class="cut">${asked(head)}</span>
                          <span class="about"><${About} of=${data.groups?.[head.group_key]} label=${head.label} /></span>
                        </div>
                      </th>
                    </tr>
                  `
                : html`
                    <tr key=${row.key} class=${"one" + (n == number() ? " at" : "")} onClick=${() => open(row)}>
                      <td><a href=${there(row)} onClick=${event => event.stopPropagation()}>${row.step ?? "·"}</a></td>
                      <td class="wide">${row.kind}${row.name && ` ${row.name}`}</td>
                      <td class="wide">${short(row.grp)}</td>
                      <td><${Reward} of=${row.reward} /></td>
                      <td class=${"wide " + row.status}>${row.status ?? "·"}</td>
                      <td class="wide">${short(row.tokens)}</td>
                      ${!together && html`<td class="cut">${asked(row)}</td>`}
                      <td class="cut">
                        ${row.failure ? html`<i>${visible(row.failure)}</i>` : html`<${Marked} text=${row.answer} hits=${data.hits} />`}
                      </td>
                      ${!together && html`<td class="wide label">${visible(row.label ?? "")}</td>`}
                    </tr>
                  `,
            )}
          </tbody>
        </table>
      </div>
      ${data && !rows.length && html`<p class="dim">${fixed || run.index.samples ? "No sample matches the filter." : "The run has no samples yet."}</p>`}
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
