// Markdown and LaTeX, as models write them. What is drawn are nodes that are made here, each with a text in it: no text of
// a sample becomes markup, a link or a picture; those are shown as what they say.
import { useMemo } from "preact/hooks";
import { html } from "slime/data";
import { visible } from "slime/signs";
import { Formula } from "slime/math";

// Longer texts stay as they are written.
const MOST = 100_000;
// How deep lists, quotes and emphasis may lie in each other.
const DEPTH = 6;

export function Formatted({ text }) {
  const drawn = useMemo(() => (text.length > MOST ? null : blocks(text.split("\n"), DEPTH)), [text]);
  if (!drawn) return html`<p class="dim">too long to be formatted</p><pre tabindex="0">${visible(text)}</pre>`;
  return html`<div class="formatted">${drawn}</div>`;
}

const [FENCE, HEADING, RULE] = [/^\s{0,3}(```+|~~~+)\s*(\S*)/, /^\s{0,3}(#{1,6})\s+(.*?)\s*#*$/, /^\s{0,3}([-*_])(\s*\1){2,}\s*$/];
const [QUOTE, ITEM] = [/^\s{0,3}> ?/, /^(\s*)([-*+]|\d{1,9}[.)])\s+/];
const ROW = /^\s*\|.*\|\s*$/;
const BETWEEN = /^[\s|:-]+$/;
// What opens a formula of its own lines -> what closes it.
const FORMULAS = [["$$", "$$"], ["\\[", "\\]"]];

function blocks(lines, depth) {
  const made = [];
  let open = [];
  const paragraph = () => {
    if (open.length) made.push(html`<p>${spans(open.join("\n"), depth)}</p>`);
    open = [];
  };
  for (let i = 0; i < lines.length;) {
    const line = lines[i];
    const [fence, heading, item] = [FENCE.exec(line), HEADING.exec(line), depth > 0 && ITEM.exec(line)];
    const formula = FORMULAS.find(([begin]) => line.trimStart().startsWith(begin));
    const starts = fence || heading || item || formula || RULE.test(line) || QUOTE.test(line) || !line.trim();
    if (starts) paragraph();
    if (fence) {
      let end = i + 1;
      while (end < lines.length && !lines[end].trimStart().startsWith(fence[1])) end++;
      made.push(html`<pre class="code" tabindex="0">${visible(lines.slice(i + 1, end).join("\n"))}</pre>`);
      i = end + 1;
    } else if (heading) {
      made.push(html`<p class="heading">${spans(heading[2], depth)}</p>`);
      i++;
    } else if (formula) {
      i = display(made, lines, i, formula, depth);
    } else if (RULE.test(line)) {
      made.push(html`<hr />`);
      i++;
    } else if (depth > 0 && QUOTE.test(line)) {
      let end = i;
      while (end < lines.length && QUOTE.test(lines[end])) end++;
      made.push(html`<blockquote>${blocks(lines.slice(i, end).map(one => one.replace(QUOTE, "")), depth - 1)}</blockquote>`);
      i = end;
    } else if (item) i = list(made, lines, i, item, depth);
    else if (ROW.test(line) && BETWEEN.test(lines[i + 1] || "")) {
      paragraph();
      i = table(made, lines, i, depth);
    } else {
      if (line.trim()) open.push(line);
      i++;
    }
  }
  paragraph();
  return made;
}

// A formula that begins in line `i`, to the line that closes it; what is behind that is text again.
function display(made, lines, i, [begin, close], depth) {
  const all = lines.slice(i, i + 60).join("\n").trimStart().slice(begin.length);
  const end = all.indexOf(close);
  if (end < 0) {
    made.push(html`<p>${visible(lines[i])}</p>`);
    return i + 1;
  }
  made.push(html`<${Formula} source=${all.slice(0, end)} block />`);
  const used = all.slice(0, end).split("\n").length;
  const rest = all.slice(end + close.length).split("\n")[0];
  if (rest.trim()) made.push(html`<p>${spans(rest, depth)}</p>`);
  return i + used;
}

function list(made, lines, i, [, indent, sign], depth) {
  const items = [];
  const numbers = /\d/.test(sign);
  while (i < lines.length) {
    const found = ITEM.exec(lines[i]);
    if (!found || found[1].length < indent.length || /\d/.test(found[2]) != numbers) break;
    const own = [lines[i].slice(found[0].length)];
    i++;
    // What is indented further belongs to it, empty lines in between too.
    while (i < lines.length && (/^\s/.test(lines[i]) ? lines[i].search(/\S/) > indent.length : !lines[i].trim() && /^\s{2,}\S/.test(lines[i + 1] || "")))
      own.push(lines[i++].slice(Math.min(found[0].length, Math.max(0, lines[i - 1].search(/\S/)))));
    const [first, ...rest] = own;
    items.push(html`<li>${rest.length ? blocks([first, ...rest], depth - 1) : spans(first, depth)}</li>`);
    while (i + 1 < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1])) i++;
  }
  made.push(numbers ? html`<ol start=${parseInt(sign)}>${items}</ol>` : html`<ul>${items}</ul>`);
  return i;
}

function table(made, lines, i, depth) {
  const cells = line => line.trim().slice(1, -1).split("|").map(one => one.trim());
  let end = i + 2;
  while (end < lines.length && ROW.test(lines[end])) end++;
  const row = (line, tag) => html`<tr>${cells(line).map(one => (tag == "th" ? html`<th>${spans(one, depth)}</th>` : html`<td>${spans(one, depth)}</td>`))}</tr>`;
  made.push(html`
    <div class="scroll" tabindex="0"><table class="entries">
      <thead>${row(lines[i], "th")}</thead>
      <tbody>${lines.slice(i + 2, end).map(line => row(line, "td"))}</tbody>
    </table></div>
  `);
  return end;
}

// Code; formulas in a line or of their own; strong, emphasised and struck text; links and pictures. All have a longest
// length, so that no text takes long to read. A dollar sign before a space, or with a digit behind it, is money.
const SPAN =
  /(`+)([^`]{1,2000}?)\1|\\\(([^]{1,1000}?)\\\)|\\\[([^]{1,2000}?)\\\]|\$\$([^$]{1,2000})\$\$|\$(?!\s)([^$\n]{0,999}[^$\s])\$(?!\d)|(\\boxed\{[^{}\n]{0,300}(?:\{[^{}\n]{0,100}\}[^{}\n]{0,300})?\})|(\*\*|__)(?!\s)([^\n]{1,1000}?)\8|(\*)(?![\s*])([^*\n]{1,1000})\*|~~([^~\n]{1,1000})~~|!?\[([^\]\n]{0,500})\]\(([^)\s]{1,1000})\)/g;

function spans(text, depth) {
  const made = [];
  let from = 0;
  for (const hit of text.matchAll(SPAN)) {
    if (hit.index > from) made.push(visible(text.slice(from, hit.index)));
    from = hit.index + hit[0].length;
    const [all, , code, ...rest] = hit;
    const [round, square, dollars, dollar, boxed, , strong, , slanted, struck, label, target] = rest;
    const formula = round ?? square ?? dollars ?? dollar ?? boxed;
    const inner = part => (depth > 0 ? spans(part, depth - 1) : visible(part));
    if (code !== undefined) made.push(html`<code>${visible(code)}</code>`);
    else if (formula !== undefined) made.push(html`<${Formula} source=${formula} block=${(square ?? dollars) !== undefined} />`);
    else if (strong !== undefined) made.push(html`<strong>${inner(strong)}</strong>`);
    else if (slanted !== undefined) made.push(html`<em>${inner(slanted)}</em>`);
    else if (struck !== undefined) made.push(html`<s>${inner(struck)}</s>`);
    else if (target !== undefined) made.push(html`${all[0] == "!" ? "picture " : ""}${visible(label)} (<code>${visible(target)}</code>)`);
  }
  if (from < text.length) made.push(visible(text.slice(from)));
  return made;
}
