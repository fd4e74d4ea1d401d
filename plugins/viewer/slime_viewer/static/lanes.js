// Phases of the steps, which share the zoom of the curves.
import { useEffect, useRef, useState } from "preact/hooks";
import { html, short } from "slime/data";
import { look, resetZoom } from "slime/axes";
import { color, useSize } from "slime/charts";

// Seconds of each step by phase, one lane each on one scale: who worked, and who waited for whom.
// `xs`: where the steps are on the x axis of the curves.
export function Lanes({ lanes, steps, values, xs }) {
  const [ref, width, theme] = useSize();
  const { zoom } = look();
  const [read, setRead] = useState("");
  const canvas = useRef();
  const [label, row] = [width < 600 ? 120 : 190, 26];
  const shown = () =>
    steps.map((step, i) => [step, i]).filter(([, i]) => !zoom || (xs[i] >= zoom[0] - 0.5 && xs[i] <= zoom[1] + 0.5));
  useEffect(() => {
    if (!width) return;
    const draw = () => {
      const c = canvas.current,
        ratio = devicePixelRatio || 1,
        part = shown();
      c.width = width * ratio;
      c.height = lanes.length * row * ratio;
      const g = c.getContext("2d");
      g.scale(ratio, ratio);
      g.font = "12px system-ui";
      g.textBaseline = "middle";
      // One slow step, usually the first, would flatten all others.
      const all = part.flatMap(([, i]) => lanes.map(lane => values[lane.metric]?.[i] || 0)).sort((a, b) => a - b);
      const top = all[Math.floor(all.length * 0.99)] || all.at(-1) || 1;
      const wide = (width - label) / Math.max(1, part.length);
      lanes.forEach((lane, n) => {
        const base = (n + 1) * row - 3;
        g.fillStyle = color("--ink");
        g.fillText(lane.title, 0, base - row / 2 + 4, label - 8);
        g.fillStyle = color("--line");
        g.fillRect(label, base, width - label, 1);
        g.fillStyle = color(lane.kind == "wait" ? "--c2" : "--c1");
        part.forEach(([, i], k) => {
          const high = Math.min(1, (values[lane.metric]?.[i] || 0) / top) * (row - 6);
          g.fillRect(label + k * wide, base - high, Math.max(0.7, wide - (wide > 3 ? 1 : 0)), high);
        });
      });
    };
    draw();
  }, [width, theme, steps, values, JSON.stringify([lanes, zoom])]);
  const move = event => {
    const part = shown(),
      box = canvas.current.getBoundingClientRect();
    const k = Math.floor((event.clientX - box.left - label) / ((width - label) / Math.max(1, part.length)));
    const lane = lanes[Math.floor((event.clientY - box.top) / row)];
    const [step, i] = part[k] || [];
    setRead(lane && step != null ? `step ${step}, ${lane.title}: ${short(values[lane.metric]?.[i])} s` : "");
  };
  return html`
    <figure class="chart lanes">
      <figcaption>
        <b>Phases</b>
        <span class="dim">seconds of each step</span>
        <span class="wait">red: waiting for another part</span>
        <span class="read">${read}</span>
      </figcaption>
      <div ref=${ref}>
        <canvas
          ref=${canvas}
          style=${{ width: width + "px", height: lanes.length * row + "px" }}
          onMouseMove=${move}
          onMouseLeave=${() => setRead("")}
          onDblClick=${resetZoom}
          role="img"
          aria-label="Seconds of each step by phase"></canvas>
      </div>
    </figure>
  `;
}
