// Texts of samples: shown as they are, with signs for what is invisible; differences and what was searched for are marked.
import { useMemo, useState } from "preact/hooks";
import { html, said } from "slime/data";
import { Formatted } from "slime/markdown";
import { plain, visible } from "slime/signs";

// Characters of a text before it is folded; those and the lines of what a tool wrote; and characters of a thought that is
// folded as a whole.
const SHOWN = 6000;
const SHOWN_OF_A_TOOL = [800, 12];
const THOUGHT = 100;

export function Copy({ text, what = "" }) {
  const [done, set] = useState(false);
  const copy = () => navigator.clipboard?.writeText(text).then(() => set(true), () => set(false));
  return html`<button class="copy" aria-label=${`copy ${what}`} onClick=${copy}>${done ? "copied" : "copy"}</button>`;
}

// --- what was searched for -----------------------------------------------------------------------------

// Signs of scripts without spaces are words of their own.
const ALONE = /^[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]/;
const finders = new Map();

// What finds words as the index does: without regard to case, in a row, whatever signs and spaces are between them.
function finder(words = []) {
  const key = JSON.stringify(words);
  if (finders.has(key)) return finders.get(key);
  const rows = words
    .map(one => one.match(/[\p{L}\p{N}]+/gu))
    .filter(Boolean)
    .map(parts => parts.join("[^\\p{L}\\p{N}]+"))
    .map(row => (ALONE.test(row) ? row : `(?<![\\p{L}\\p{N}])${row}(?![\\p{L}\\p{N}])`));
  finders.set(key, rows.length ? new RegExp(rows.join("|"), "giu") : null);
  return finders.get(key);
}

// Parts of a text, [class, part], with the class "hit" where something finds.
function withHits(parts, finds) {
  if (!finds) return parts;
  const made = [];
  let from = 0;
  const all = parts.map(([, said]) => said).join("");
  for (const hit of all.matchAll(finds)) {
    made.push(...cut(parts, from, hit.index), ["hit", hit[0]]);
    from = hit.index + hit[0].length;
  }
  return [...made, ...cut(parts, from, all.length)];
}

const drawn = parts =>
  parts.map(([sort, said]) => (sort ? html`<mark class=${sort}>${visible(said)}</mark>` : visible(said)));

// How much of what a tool wrote is shown before the rest is folded.
export function shownOfTool(text) {
  const [most, lines] = SHOWN_OF_A_TOOL;
  const first = text.slice(0, most).split("\n", lines).join("\n");
  return first.length < text.length - 100 ? first.length : text.length;
}

// A line of text with what was searched for marked.
export const Marked = ({ text, hits }) => drawn(withHits([["", said(text)]], finder(hits)));

// --- a whole text --------------------------------------------------------------------------------------

const [BEGINS, ENDS] = ["<think>", "</think>"];

// A text as [from, to, is it thinking]: between the tags, before a lone closing one, or behind one that is not closed.
function thoughts(text) {
  const parts = [];
  let at = 0;
  const [opens, closes] = [text.indexOf(BEGINS), text.indexOf(ENDS)];
  if (closes >= 0 && (opens < 0 || closes < opens)) parts.push([0, (at = closes + ENDS.length), true]);
  while (at < text.length) {
    const begin = text.indexOf(BEGINS, at);
    if (begin != at) parts.push([at, begin < 0 ? text.length : begin, false]);
    if (begin < 0) break;
    const end = text.indexOf(ENDS, begin);
    parts.push([begin, (at = end < 0 ? text.length : end + ENDS.length), true]);
  }
  return parts;
}

// Those parts of `runs`, [class, text], that are between two places of the whole.
function cut(runs, from, to) {
  const kept = [];
  let at = 0;
  for (const [sort, said] of runs) {
    const [start, end] = [Math.max(from, at), Math.min(to, at + said.length)];
    if (start < end) kept.push([sort, said.slice(start - at, end - at)]);
    at += said.length;
  }
  return kept;
}

// A text, with what is not in `other` marked, if that is given, and what was searched for. Thinking and the rest of a
// text of more than `most` characters are folded. `formatted`: Markdown and LaTeX instead.
export function Text({ text, other, hits, formatted, most = SHOWN }) {
  const all = plain(text);
  const runs = useMemo(() => {
    const compared = other == null ? [["", all]] : differences(all, other).map(([same, said]) => [same ? "" : "differs", said]);
    return withHits(compared, finder(hits));
  }, [all, other, JSON.stringify(hits)]);
  if (!all.trim()) return html`<pre class="dim">${all ? "(only spaces)" : "(empty)"}</pre>`;
  const parts = thoughts(all).filter(([from, to]) => all.slice(from, to).trim());
  const folds = ([from, to, thinks]) => thinks && parts.length > 1 && to - from >= THOUGHT;
  return parts.map((part, n) => {
    const [start, to] = part;
    // Empty lines behind what is folded would be a gap.
    const from = n && folds(parts[n - 1]) ? start + all.slice(start, to).search(/\S/) : start;
    const some = cut(runs, from, to);
    const shown = formatted
      ? html`<${Formatted} text=${all.slice(from, to).replace(/^<think>|<\/think>$/g, "")} />`
      : html`<${Folded} runs=${some} length=${to - from} most=${most} />`;
    if (!folds(part)) return shown;
    const marked = new Set(some.map(([sort]) => sort));
    const about = [
      `${(to - from).toLocaleString()} characters`,
      all.endsWith(ENDS, to) || to < all.length ? "" : "not finished",
      marked.has("hit") ? "with what was searched for" : "",
      marked.has("differs") ? "differs" : "",
    ];
    return html`
      <details class="thought" open=${marked.has("hit")}>
        <summary>thinking, ${about.filter(Boolean).join(", ")}</summary>
        ${shown}
      </details>
    `;
  });
}

function Folded({ runs, length, most }) {
  const shown = part => html`<pre tabindex="0">${drawn(part)}</pre>`;
  if (length <= most) return shown(runs);
  const rest = cut(runs, most, length);
  return html`
    ${shown(cut(runs, 0, most))}
    <details open=${rest.some(([sort]) => sort == "hit")}>
      <summary>${(length - most).toLocaleString()} more characters</summary>
      ${shown(rest)}
    </details>
  `;
}

const words = text => text.match(/\s+|[\p{L}\p{N}_]+|[^\p{L}\p{N}_\s]/gu) || [];
// Of longer parts all words count as different.
const MOST = 1500;

// The words of `text`, in runs of [is it in `other` too, words]: by their longest common subsequence.
function differences(text, other) {
  const [a, b] = [words(text), words(other)];
  let start = 0,
    end = 0;
  while (start < a.length && start < b.length && a[start] == b[start]) start++;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) == b.at(-1 - end)) end++;
  const [x, y] = [a.slice(start, a.length - end), b.slice(start, b.length - end)];
  const same = new Set();
  if (x.length <= MOST && y.length <= MOST) {
    const best = Array.from({ length: x.length + 1 }, () => new Uint16Array(y.length + 1));
    for (let i = x.length - 1; i >= 0; i--)
      for (let j = y.length - 1; j >= 0; j--)
        best[i][j] = x[i] == y[j] ? best[i + 1][j + 1] + 1 : Math.max(best[i + 1][j], best[i][j + 1]);
    for (let i = 0, j = 0; i < x.length && j < y.length;)
      if (x[i] == y[j]) {
        same.add(i++);
        j++;
      } else if (best[i + 1][j] >= best[i][j + 1]) i++;
      else j++;
  }
  const runs = [];
  a.forEach((word, i) => {
    const is = i < start || i >= a.length - end || same.has(i - start);
    runs.length && runs.at(-1)[0] == is ? (runs.at(-1)[1] += word) : runs.push([is, word]);
  });
  return runs;
}
