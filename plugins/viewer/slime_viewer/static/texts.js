// Texts of samples: shown as they are, with signs for what is invisible, and with their differences marked.
import { useMemo } from "preact/hooks";
import { html, said } from "slime/data";

const NAMES = {
  "\u202a": "LRE",
  "\u202b": "RLE",
  "\u202c": "PDF",
  "\u202d": "LRO",
  "\u202e": "RLO",
  "\u2066": "LRI",
  "\u2067": "RLI",
  "\u2068": "FSI",
  "\u2069": "PDI",
  "\u200b": "ZWSP",
  "\u200e": "LRM",
  "\u200f": "RLM",
  "\ufeff": "BOM",
};
const HIDDEN =
  /[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\u{e0000}-\u{e007f}]/gu;
const SHOWN = 6000;

export function visible(text) {
  return said(text).replace(HIDDEN, sign => {
    const code = sign.codePointAt(0);
    return NAMES[sign]
      ? `[${NAMES[sign]}]`
      : code < 32
        ? String.fromCharCode(0x2400 + code)
        : `[U+${code.toString(16)}]`;
  });
}

export function plain(content) {
  if (content == null) return "";
  if (typeof content == "string") return content;
  if (Array.isArray(content)) return content.map(part => plain(part?.content ?? part?.text ?? part)).join("\n");
  if (typeof content != "object") return String(content);
  return "content" in content ? plain(content.content) : JSON.stringify(content, null, 1);
}

// A text, with what is not in `other` marked, if that is given; a long text is folded.
export function Text({ text, other }) {
  const all = plain(text);
  const runs = useMemo(() => (other == null ? [[true, all]] : differences(all, other)), [all, other]);
  if (!all) return html`<pre class="dim">(empty)</pre>`;
  const shown = part => html`
    <pre tabindex="0">${part.map(([same, said]) => (same ? visible(said) : html`<mark>${visible(said)}</mark>`))}</pre>
  `;
  if (all.length <= SHOWN) return shown(runs);
  const [first, rest] = [[], []];
  let room = SHOWN;
  for (const [same, said] of runs) {
    if (room > 0) first.push([same, said.slice(0, room)]);
    if (said.length > room) rest.push([same, said.slice(Math.max(0, room))]);
    room -= said.length;
  }
  return html`
    ${shown(first)}
    <details>
      <summary>${(all.length - SHOWN).toLocaleString()} more characters</summary>
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
