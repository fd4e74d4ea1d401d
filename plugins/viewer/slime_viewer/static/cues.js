// What tells curves apart besides colour: dashes, and a letter at the end.
import { html } from "slime/data";

const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [4, 4], [14, 3, 2, 3, 2, 3]];
// Letters of more curves would lie over each other.
const MOST_LETTERS = 10;
const APART = 12;

export const colorOf = n => COLORS[n % COLORS.length];
// Where colours begin again, patterns are shifted: no two of 36 curves have both in common.
export const dashOf = n => DASHES[(n + Math.floor(n / COLORS.length)) % DASHES.length];
export const letterOf = n => String.fromCharCode(65 + (n % 26)) + (Math.floor(n / 26) || "");

// A line and points are told apart by their shape.
export const lettered = lines => lines.length > new Set(lines.map(line => !!line.dots)).size;

// The sign of the n-th curve, as it is drawn.
export function Swatch({ n, tone = colorOf(n), letter = true, dots }) {
  return html`
    <span class="swatch">
      ${letter && html`<b>${letterOf(n)} </b>`}
      <svg viewBox="0 0 24 8" aria-hidden="true" style=${{ color: `var(${tone})` }}>
        ${dots ? html`<circle cx="12" cy="4" r="1.5" />` : html`<line x1="0" x2="24" y1="4" y2="4" stroke-dasharray=${dashOf(n).join(" ")} />`}
      </svg>
    </span>
  `;
}

// Letters where the curves of a plot end, moved apart where they end at one height.
export function drawLetters(u, ink, paper) {
  const g = u.ctx,
    ratio = devicePixelRatio || 1,
    { min, max } = u.scales.x;
  const xs = u.data[0],
    ends = [];
  u.series.forEach((one, n) => {
    if (!one.letter) return;
    let i = xs.length - 1;
    while (i >= 0 && (u.data[n][i] == null || xs[i] > max)) i--;
    if (i < 0 || xs[i] < min) return;
    ends.push({ letter: one.letter, x: u.valToPos(xs[i], "x", true), y: u.valToPos(u.data[n][i], "y", true) });
  });
  if (ends.length > MOST_LETTERS) return;
  ends.sort((a, b) => a.y - b.y);
  const bottom = u.bbox.top + u.bbox.height - (APART / 2) * ratio;
  ends.forEach((one, i) => (one.y = Math.max(one.y, i ? ends[i - 1].y + APART * ratio : u.bbox.top + 4 * ratio)));
  for (let i = ends.length - 1, most = bottom; i >= 0; i--, most -= APART * ratio) ends[i].y = Math.min(ends[i].y, most);
  g.save();
  g.font = `bold ${11 * ratio}px system-ui`;
  g.textBaseline = "middle";
  g.lineWidth = 3 * ratio;
  g.strokeStyle = paper;
  g.fillStyle = ink;
  for (const { letter, x, y } of ends) {
    g.strokeText(letter, x + 5 * ratio, y);
    g.fillText(letter, x + 5 * ratio, y);
  }
  g.restore();
}
