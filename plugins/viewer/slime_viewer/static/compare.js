// Two runs: what differs in their configuration, plugins, curves and answers.
import { address, html, place, restate, said, short, Trouble, useData, useKeys } from "slime/data";
import { visible } from "slime/texts";
import { curve, look, Looks } from "slime/axes";
import { Chart } from "slime/charts";

export function Compare({ runs, parts: [first, second], version }) {
  const { kind = "eval", every } = place().params;
  const [one, other] = [runs[first], runs[second]];
  const { data, error } = useData("compare", { run: first, other: second, kind }, version);
  const names = [...new Set([one, other].flatMap(run => run.panels.flatMap(panel => panel.metrics)))];
  const curves = [first, second].map(id => useData("series", { run: id, names: names.join("\n") }, version).data);
  useKeys({
    a: ["all metrics or the main ones", () => restate({ every: every ? "" : "1" })],
    t: ["prompts of training or of evaluations", () => restate({ kind: kind == "eval" ? "train" : "" })],
  });
  if (!data) return error ? html`<${Trouble} text=${error} />` : html`<p class="dim">loading</p>`;
  const { by } = look();
  const line = (n, name) => ({ ...curve(curves[n], name, by, [one, other][n].words[name]), label: [one, other][n].name });
  const table = (title, rows) => html`
    <h2>${title} ${!rows.length && html`<small>the same</small>`}</h2>
    ${
      rows.length > 0 &&
      html`
        <table class="entries">
          <thead>
            <tr>
              <th>name</th>
              <th>${one.name}</th>
              <th>${other.name}</th>
            </tr>
          </thead>
          ${rows.map(
            row => html`
              <tr>
                <td>${row.name}</td>
                <td class="wrap">${row.first == null ? "·" : said(row.first)}</td>
                <td class="wrap">${row.second == null ? "·" : said(row.second)}</td>
              </tr>
            `,
          )}
        </table>
      `
    }
  `;
  const wordsOf = name => one.words[name] || other.words[name] || [name, "", 1];
  const drawn = curves[0] && curves[1] ? names.map(name => [name, [line(0, name), line(1, name)]]) : [];
  // A curve that is the same number everywhere in both needs no room.
  const constant = lines =>
    lines.every(one => one.steps.length) && new Set(lines.flatMap(one => one.values)).size == 1;
  const still = drawn.filter(([, lines]) => constant(lines));
  const differ = data.prompts.filter(row => row.first.reward != row.second.reward);
  const ends = data.ends.filter(row => every || names.includes(row.name));
  const clear = ends.filter(row => row.clear).length;
  const asLong = one.progress.done == other.progress.done;
  return html`
    <section>
      ${
        data.identical != null &&
        html`
          <div class="verdict">
            <h1>Identical${asLong ? "" : ` up to step ${data.identical}, where the shorter one ends`}</h1>
            <p>Every reward, loss and evaluation of both runs is the same number at every step.</p>
          </div>
        `
      }
      <div class="two">
        <div>${table("Configuration", data.config)}</div>
        <div>${table("Plugins", data.plugins)}</div>
      </div>
    </section>
    <section>
      <h2>Curves <${Looks} axes=${curves[0]?.axes} /></h2>
      <div class="charts">
        ${drawn
          .filter(([, lines]) => !constant(lines))
          .map(
            ([name, lines]) =>
              html`
                <${Chart}
                  key=${name}
                  title=${wordsOf(name)[0]}
                  hint=${name}
                  unit=${wordsOf(name)[1]}
                  lines=${lines.filter(one => one.steps.length)} />
              `,
          )}
      </div>
      ${
        still.length > 0 &&
        html`
          <p class="dim">
            The same at every step of both:
            ${" " + still.map(([name, lines]) => `${wordsOf(name)[0]} ${short(lines.flatMap(one => one.values)[0])}`).join(", ")}
          </p>
        `
      }
    </section>
    <section>
      <h2>
        Metrics at the end
        <small>
          means of the last ten steps that both have; evaluations at the
          last${clear > 0 ? "; bold: larger than the 95 % interval of the difference" : ""}
        </small>
        <span class="right">
          <a href=${address("compare", [first, second], { kind, every: every ? "" : "1" })}>
            ${every ? "main ones" : "all"}
          </a>
        </span>
      </h2>
      <table class="entries">
        <thead>
          <tr>
            <th>name</th>
            <th>${one.name}</th>
            <th>${other.name}</th>
            <th>difference</th>
            <th>95 %</th>
            <th>until step</th>
          </tr>
        </thead>
        ${ends.map(
          row => html`
            <tr>
              <td title=${row.name}>${every ? row.name : wordsOf(row.name)[0]}</td>
              <td>${short(row.first)}</td>
              <td>${short(row.second)}</td>
              <td>${row.clear ? html`<b>${short(row.second - row.first)}</b>` : short(row.second - row.first)}</td>
              <td>${row.margin == null ? "·" : `± ${short(+row.margin.toPrecision(2))}`}</td>
              <td>${row.step}</td>
            </tr>
          `,
        )}
      </table>
    </section>
    <section>
      <h2>
        Prompts that differ most
        <small>mean reward of the last visit</small>
        <span class="right">
          ${["eval", "train"].map(
            name => html`
              <a class=${name == kind ? "on" : ""} href=${address("compare", [first, second], { kind: name })}>
                ${name}
              </a>
            `,
          )}
        </span>
      </h2>
      ${
        differ.length
          ? html`
              <div class="scroll" tabindex="0"><table class="samples">
                <thead>
                  <tr>
                    <th>prompt</th>
                    <th>${one.name}</th>
                    <th>${other.name}</th>
                  </tr>
                </thead>
                ${differ.map(
                  row => html`
                    <tr>
                      <td class="cut">${visible(row.question)}</td>
                      ${[
                        ["first", first],
                        ["second", second],
                      ].map(
                        ([side, id]) => html`
                          <td>
                            <a href=${address("group", [id, row[side].group])}>${short(row[side].reward)}</a>
                            <a class="dim visits" href=${address("prompt", [id, row.prompt])}>
                              ${row[side].visits == 1 ? "1 visit" : `${row[side].visits} visits`}
                            </a>
                          </td>
                        `,
                      )}
                    </tr>
                  `,
                )}
              </table></div>
            `
          : !data.prompts.length && html`<p class="dim">The runs have no prompt of this kind in common.</p>`
      }
      ${
        data.prompts.length > differ.length &&
        html`<p class="dim">Every other prompt of both runs has the same reward in both.</p>`
      }
    </section>
  `;
}
