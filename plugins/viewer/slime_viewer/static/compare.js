// Runs beside each other: what differs in their configuration, plugins, curves and answers.
import { address, go, html, place, restate, said, short, Trouble, useData, useKeys } from "slime/data";
import { visible } from "slime/signs";
import { curve, look, Looks } from "slime/axes";
import { heldOutName } from "slime/tiles";
import { Chart } from "slime/charts";
import { Swatch } from "slime/cues";

// Runs that differ in their seeds alone as one curve: their mean, and the lowest and the highest as a band.
function banded(lines, label) {
  const some = lines.filter(line => line.steps.length);
  if (some.length < 2) return { ...(some[0] || lines[0]), label };
  const at = some.map(line => new Map(line.steps.map((step, i) => [step, line.values[i]])));
  const kept = some[0].steps.map((_, i) => i).filter(i => at.every(one => one.has(some[0].steps[i])));
  const steps = kept.map(i => some[0].steps[i]),
    values = steps.map(step => at.map(one => one.get(step)));
  return {
    ...some[0],
    ...{ label, steps, xs: kept.map(i => some[0].xs[i]) },
    values: values.map(all => all.reduce((a, b) => a + b) / all.length),
    low: values.map(all => Math.min(...all)),
    high: values.map(all => Math.max(...all)),
  };
}

// Curves stay the same objects while their data does, so that charts need not be made anew.
const kept = new WeakMap();
function overlaid(lines, sets) {
  const key = lines.find(line => line.steps.length) || lines[0];
  const told = JSON.stringify(sets);
  const known = kept.get(key);
  if (known?.told == told && known.lines.every((line, i) => line.values === lines[i].values)) return known.made;
  const made = sets.map(set => banded(set.runs.map(n => lines[n]), set.label));
  kept.set(key, { told, lines, made });
  return made;
}

// Which runs these are: the colour of each, what sets it apart, and the way to leave it out or to add others.
function Chosen({ runs, parts, labels, sets, band }) {
  const to = numbers => go(address("compare", numbers, place().params));
  const others = runs.map((_, n) => n).filter(n => !parts.includes(n));
  const setOf = i => sets?.findIndex(set => set.runs.includes(i)) ?? i;
  return html`
    <ul class="chosen">
      ${parts.map(
        (run, i) => html`
          <li key=${run}>
            <${Swatch} n=${band ? setOf(i) : i} />
            <a href=${address("run", [run])} title=${runs[run].name}>${visible(labels?.[i] ?? runs[run].name)}</a>
            ${labels && labels[i] != runs[run].name && html`<span class="dim"> ${visible(runs[run].name)}</span>`}
            ${
              parts.length > 2 &&
              html`
                <button class="plain" aria-label=${`leave out ${runs[run].name}`} onClick=${() => to(parts.filter(n => n != run))}>
                  ×
                </button>
              `
            }
          </li>
        `,
      )}
      ${
        others.length > 0 &&
        html`
          <li>
            <select aria-label="add a run" value="" onChange=${({ target }) => target.value && to([...parts, target.value])}>
              <option value="">add a run</option>
              ${others.map(n => html`<option value=${n}>${visible(runs[n].name)}</option>`)}
            </select>
          </li>
        `
      }
    </ul>
  `;
}

function Differ({ title, rows, heads }) {
  return html`
    <h2>${title} ${!rows.length && html`<small>the same</small>`}</h2>
    ${
      rows.length > 0 &&
      html`
        <div class="scroll" tabindex="0">
          <table class="entries many">
            <thead>
              <tr>
                <th>name</th>
                ${heads}
              </tr>
            </thead>
            ${rows.map(
              row => html`
                <tr>
                  <td>${row.name}</td>
                  ${row.values.map(value => html`<td class="wrap">${value == null ? "·" : said(value)}</td>`)}
                </tr>
              `,
            )}
          </table>
        </div>
      `
    }
  `;
}

export function Compare({ runs, parts, version }) {
  const { kind = "eval", every, seeds } = place().params;
  const chosen = parts.map(n => runs[n]);
  const { data, error } = useData("compare", { runs: parts.join(), kind }, version);
  const names = [...new Set(chosen.flatMap(run => run.panels.flatMap(panel => panel.metrics)))];
  const curves = parts.map(run => useData("series", { run, names: names.join("\n") }, version).data);
  const several = data?.sets.some(set => set.runs.length > 1);
  const band = several && (seeds ?? (parts.length > 2 ? "1" : "0")) == "1";
  useKeys({
    a: ["all metrics or the main ones", () => restate({ every: every ? "" : "1" })],
    t: ["prompts of training or of evaluations", () => restate({ kind: kind == "eval" ? "train" : "" })],
    ...(several ? { s: ["seeds as a band, or each run", () => restate({ seeds: band ? "0" : "1" })] } : {}),
  });
  if (!data) return error ? html`<${Trouble} text=${error} />` : html`<p class="dim">loading</p>`;
  const { by } = look();
  const wordsOf = name => {
    const [title, ...rest] = chosen.find(run => run.words[name])?.words[name] || [name, "", 1];
    return [name.startsWith("eval/") && name.split("/").length == 2 ? heldOutName(name) : title, ...rest];
  };
  const heads = parts.map(
    (n, i) => html`<th title=${chosen[i].name}><${Swatch} n=${band ? data.sets.findIndex(set => set.runs.includes(i)) : i} />${visible(data.labels[i])}</th>`,
  );
  const line = (i, name) => ({ ...curve(curves[i], name, by, wordsOf(name)), label: data.labels[i] });
  const drawn = curves.every(Boolean) ? names.map(name => [name, parts.map((_, i) => line(i, name))]) : [];
  // A curve that is the same number everywhere in all needs no room.
  const constant = lines =>
    lines.every(one => one.steps.length) && new Set(lines.flatMap(one => one.values)).size == 1;
  const still = drawn.filter(([, lines]) => constant(lines));
  const differ = data.prompts.filter(row => new Set(row.runs.map(one => one.reward)).size > 1);
  const ends = data.ends.filter(row => every || names.includes(row.name));
  const evaluated = ends.find(row => row.name.startsWith("eval/"));
  const steps = ends.find(row => row.name == "rollout/reward_mean") || ends.find(row => row.since != row.step);
  const stepsOf = row => (row.since == row.step ? `step ${row.step}` : `steps ${row.since} to ${row.step}`);
  // What is of other steps than the heading says, says so itself.
  const other = row => row != evaluated && row != steps && ![evaluated, steps].some(one => one && one.step == row.step && one.since == row.since);
  const clear = ends.some(row => row.clear);
  const until = data.identical.every(step => step != null) ? Math.min(...data.identical) : null;
  const asLong = new Set(chosen.map(run => run.progress.done)).size == 1;
  const apart = (row, i) => {
    const [, , factor] = wordsOf(row.name),
      change = factor * (row.values[i] - row.values[0]),
      margin = row.margins[i - 1];
    if (!change && !margin) return html`<span class="dim">the same</span>`;
    const told = `${change > 0 ? "+" : ""}${short(+change.toPrecision(3))}`;
    return html`
      ${margin != null && Math.abs(row.values[i] - row.values[0]) > margin ? html`<b>${told}</b>` : told}
      ${margin != null && html`<span class="dim"> ± ${short(+(factor * margin).toPrecision(2))}</span>`}
    `;
  };
  return html`
    <section>
      <${Chosen} runs=${runs} parts=${parts} labels=${data.labels} sets=${data.sets} band=${band} />
      ${
        until != null &&
        html`
          <div class="verdict">
            <h1>Identical${asLong ? "" : ` up to step ${until}, where the shortest one ends`}</h1>
            <p>Every reward, loss and evaluation of ${parts.length == 2 ? "both" : "these"} runs is the same number at every step.</p>
          </div>
        `
      }
    </section>
    <section>
      <h2>
        Curves
        ${
          several &&
          html`
            <label class="seeds">
              <input type="checkbox" checked=${band} onChange=${() => restate({ seeds: band ? "0" : "1" })} />
              seeds as a band
            </label>
          `
        }
        <${Looks} axes=${curves[0]?.axes} />
      </h2>
      ${
        band &&
        html`
          <p class="dim">Lines are means over seeds, bands go from the lowest to the highest:
            ${data.sets.map((set, n) => html` <span class="setname"><${Swatch} n=${n} />${visible(set.label)} (${set.runs.length})</span>`)}
          </p>
        `
      }
      <div class="charts">
        ${drawn
          .filter(([, lines]) => !constant(lines))
          .map(([name, lines]) => {
            const [title, unit] = wordsOf(name);
            const shown = band ? overlaid(lines, data.sets) : lines;
            return html`<${Chart} key=${name} named title=${title} hint=${name} unit=${unit} lines=${shown} />`;
          })}
      </div>
      ${
        still.length > 0 &&
        html`
          <p class="dim">
            The same at every step of ${parts.length == 2 ? "both" : "all"}:
            ${" " + still.map(([name, lines]) => `${wordsOf(name)[0]} ${short(lines.flatMap(one => one.values)[0])}`).join(", ")}
          </p>
        `
      }
    </section>
    <section>
      <h2>
        Metrics at the end
        <small>
          ${steps && `means of ${stepsOf(steps)}, the last that all have; `}${evaluated && `held-out after ${evaluated.step} rollouts; `}differences
          from the first run, with their 95 % interval${clear ? "; bold: larger than that" : ""}
        </small>
        <span class="right">
          <a href=${address("compare", parts, { ...place().params, every: every ? "" : "1" })}>${every ? "main ones" : "all"}</a>
        </span>
      </h2>
      <div class="scroll" tabindex="0">
        <table class="entries many">
          <thead>
            <tr>
              <th>name</th>
              ${heads}
            </tr>
          </thead>
          ${ends.map(row => {
            const [title, unit, factor] = wordsOf(row.name);
            return html`
              <tr>
                <td title=${`${row.name}, ${stepsOf(row)}`}>
                  ${every ? row.name : title}${unit && html` <span class="dim">${unit}</span>`}${other(row) && html` <span class="dim">${stepsOf(row)}</span>`}
                </td>
                ${row.values.map(
                  (value, i) => html`<td>${short(+(factor * value).toPrecision(4))}${i > 0 && html`<div class="apart">${apart(row, i)}</div>`}</td>`,
                )}
              </tr>
            `;
          })}
        </table>
      </div>
      <${Differ} title="Configuration" rows=${data.config} heads=${heads} />
      <${Differ} title="Plugins" rows=${data.plugins} heads=${heads} />
    </section>
    <section>
      <h2>
        Prompts that differ most
        <small>mean reward of the last visit</small>
        <span class="right">
          ${["eval", "train"].map(
            name => html`
              <a class=${name == kind ? "on" : ""} href=${address("compare", parts, { ...place().params, kind: name })}>${name}</a>
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
                    ${heads}
                  </tr>
                </thead>
                ${differ.map(
                  row => html`
                    <tr>
                      <td class="cut">${visible(row.question)}</td>
                      ${row.runs.map(
                        (one, i) => html`
                          <td>
                            <a href=${address("group", [parts[i], one.group])}>${short(one.reward)}</a>
                            <a class="dim visits" href=${address("prompt", [parts[i], row.prompt])}>
                              ${one.visits == 1 ? "1 visit" : `${one.visits} visits`}
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
        html`<p class="dim">Every ${differ.length ? "other " : ""}prompt that all have has the same reward in all.</p>`
      }
    </section>
  `;
}
