// Curves and lanes over the steps, which share one zoom.
import { useEffect, useRef, useState } from "preact/hooks";
import { html, place, restate, short } from "slime/data";

const dark = matchMedia("(prefers-color-scheme: dark)");
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const COLORS = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];
const plots = new Set();
let zoom = null;

// The steps that are shown, [first, last], or null for all; it is in the address.
function setZoom(range) {
  zoom = range;
  for (const redraw of plots) redraw();
  restate({ x: range ? range.map(step => +step.toFixed(1)).join("_") : "" });
}
export const resetZoom = () => setZoom(null);
export function zoomOfAddress() {
  const [low, high] = (place().params.x || "").split("_").map(Number);
  zoom = high > low ? [low, high] : null;
}

function useSize() {
  const ref = useRef();
  const [width, set] = useState(0);
  const [, setTheme] = useState(0);
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => set(Math.floor(entry.contentRect.width)));
    watch.observe(ref.current);
    const turned = () => setTheme(n => n + 1);
    dark.addEventListener("change", turned);
    return () => {
      watch.disconnect();
      dark.removeEventListener("change", turned);
    };
  }, []);
  return [ref, width];
}

// `lines`: [{label, steps, values, low, high}]; `low` and `high` make a band. `range`: of the values, if it is fixed.
// `alone`: it stands below something else, not in a grid.
export function Chart({ title, lines, height = 150, close, range, alone }) {
  const [ref, width] = useSize();
  const plot = useRef();
  const theme = dark.matches;
  useEffect(() => {
    if (!width) return;
    const steps = [...new Set(lines.flatMap(line => line.steps))].sort((a, b) => a - b);
    const columns = [steps],
      series = [{}],
      bands = [];
    const column = (line, values) => {
      const at = new Map(line.steps.map((step, i) => [step, values[i]]));
      columns.push(steps.map(step => at.get(step) ?? null));
    };
    lines.forEach((line, i) => {
      const stroke = color(COLORS[i % COLORS.length]);
      const few = line.steps.length < 25;
      column(line, line.values);
      series.push({ label: line.label, stroke, width: 1.6, spanGaps: true, points: { show: few, size: 5 } });
      if (line.low) {
        column(line, line.high);
        column(line, line.low);
        const hidden = { stroke: "transparent", points: { show: false }, spanGaps: true };
        series.push({ ...hidden, label: "high" }, { ...hidden, label: "low" });
        bands.push({ series: [columns.length - 2, columns.length - 1], fill: stroke + "33" });
      }
    });
    const axis = {
      stroke: color("--dim"),
      grid: { stroke: color("--line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui",
      size: 26,
    };
    const read = ref.current.parentNode.querySelector(".read");
    const made = new uPlot(
      {
        width,
        height,
        series,
        bands,
        legend: { show: false },
        padding: [10, 14, 0, 0],
        scales: {
          x: { time: false, range: (u, low, high) => zoom || (low == high ? [low - 1, high + 1] : [low, high]) },
          y: {
            range: (u, low, high) =>
              range ||
              (low == null
                ? [0, 1]
                : low == high
                  ? [Math.min(0, low), Math.max(1, 2 * low)]
                  : uPlot.rangeNum(low, high, 0.1, true)),
          },
        },
        axes: [
          { ...axis, values: (u, ticks) => ticks.map(t => (Number.isInteger(t) ? t : "")) },
          { ...axis, size: 56, values: (u, ticks) => ticks.map(short) },
        ],
        cursor: { y: false, sync: { key: "steps" }, drag: { x: true, y: false, setScale: false } },
        hooks: {
          setSelect: [
            u => {
              if (u.select.width > 4)
                setZoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
              u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            },
          ],
          setCursor: [
            u => {
              const i = u.cursor.idx;
              read.textContent =
                i == null
                  ? ""
                  : `step ${steps[i]}: ` +
                    lines.map(line => short(line.values[line.steps.indexOf(steps[i])])).join(", ");
            },
          ],
          ready: [u => u.over.addEventListener("dblclick", resetZoom)],
        },
      },
      columns,
      ref.current,
    );
    plot.current = made;
    const redraw = () => made.setData(columns);
    plots.add(redraw);
    return () => {
      plots.delete(redraw);
      made.destroy();
    };
  }, [width, theme, JSON.stringify(lines)]);
  return html`
    <figure class=${"chart" + (alone ? " alone" : "")}>
      <figcaption>
        <b>${title}</b>
        <span class="read"></span>
        ${close && html`<button class="plain" title="Remove" onClick=${close}>×</button>`}
      </figcaption>
      <div ref=${ref} style=${{ height: height + "px" }}></div>
      ${
        lines.length > 1 &&
        html`
          <div class="legend">
            ${lines.map(
              (line, i) => html`
                <span style=${{ color: `var(${COLORS[i % COLORS.length]})` }}>${line.label.split("/").at(-1)}</span>
              `,
            )}
          </div>
        `
      }
    </figure>
  `;
}

// Seconds of each step by phase, one lane each on one scale: who worked, and who waited for whom.
export function Lanes({ lanes, steps, values }) {
  const [ref, width] = useSize();
  const [read, setRead] = useState("");
  const canvas = useRef();
  const [label, row] = [width < 600 ? 120 : 190, 26];
  const shown = () =>
    steps.map((step, i) => [step, i]).filter(([step]) => !zoom || (step >= zoom[0] - 0.5 && step <= zoom[1] + 0.5));
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
    plots.add(draw);
    return () => plots.delete(draw);
  }, [width, dark.matches, JSON.stringify([lanes, steps, values])]);
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
        <span class="dim">seconds of each step;</span>
        <span class="wait">waiting for somebody else</span>
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
