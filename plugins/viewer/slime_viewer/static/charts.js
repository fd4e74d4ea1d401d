// Curves, which share one zoom and one cursor. A chart that is there is kept: new steps are added to it.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { html, short } from "slime/data";
import { colorOf, dashOf, drawLetters, letterOf, lettered, Swatch } from "slime/cues";
import { AXES, brief, lasting, look, resetZoom, smoothed, written, zoomTo } from "slime/axes";

const dark = matchMedia("(prefers-color-scheme: dark)");
export const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// With fewer steps there is nothing to smooth, and each has a point.
const FEW = 20;

// While a button is held on a chart, no chart changes: what is under the pointer stays what it was.
let held = false;
const waiting = new Set();
addEventListener("mousedown", event => (held = !!event.target.closest?.(".u-over")), true);
addEventListener("mouseup", () =>
  setTimeout(() => {
    held = false;
    for (const change of waiting) change();
    waiting.clear();
  }),
);

export function useSize() {
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
  return [ref, width, dark.matches];
}

// The columns of a plot, and what is drawn of them: a raw curve, pale behind its smoothed one; or points with ends.
function columnsOf(lines, { smooth, log }) {
  const xs = [...new Set(lines.flatMap(line => line.xs || line.steps))].sort((a, b) => a - b);
  const at = new Map(xs.map((x, i) => [x, i]));
  const spread = (line, values) => {
    const column = Array(xs.length).fill(null);
    (line.xs || line.steps).forEach((x, i) => (column[at.get(x)] = log && !(values[i] > 0) ? null : values[i]));
    return column;
  };
  const columns = [xs];
  for (const line of lines) {
    const soft = smooth && !line.dots;
    columns.push(spread(line, line.values));
    if (soft) columns.push(spread(line, line.steps.length < FEW ? line.values : smoothed(line.values, smooth)));
    if (line.low) columns.push(spread(line, line.high), spread(line, line.low));
  }
  return columns;
}

function seriesOf(lines, { smooth }, now) {
  const series = [{}],
    bands = [],
    letters = lettered(lines),
    many = lines.filter(line => !line.dots).length > 2;
  lines.forEach((line, i) => {
    const stroke = color(line.color || colorOf(i)),
      dash = dashOf(i),
      letter = letters && letterOf(i);
    const few = () => now.current.lines[i].steps.length < FEW;
    const soft = smooth && !line.dots;
    const points = { show: line.dots || few, size: line.dots ? 8 : 5, fill: line.dots ? stroke : undefined };
    const none = { show: false };
    if (line.dots) series.push({ stroke, paths: () => null, points, letter });
    else if (soft) {
      // Of many curves, only the smoothed ones can be followed.
      series.push({ show: !many, stroke: stroke + "66", width: 1, spanGaps: true, points: none });
      series.push({ stroke, dash, width: 2, spanGaps: true, points, letter });
    } else series.push({ stroke, dash, width: 1.8, spanGaps: true, points, letter });
    if (line.low) {
      const hidden = { stroke: "transparent", points: none, spanGaps: true };
      series.push(hidden, { ...hidden });
      if (!line.dots) bands.push({ series: [series.length - 2, series.length - 1], fill: stroke + "33" });
    }
  });
  return { series, bands };
}

// A constant is in the middle of its axis, wherever that is.
function room(low, high) {
  if (low == null) return [0, 1];
  if (low == high) return low ? [low - Math.abs(low) / 2, low + Math.abs(low) / 2] : [-1, 1];
  return uPlot.rangeNum(low, high, 0.1, true);
}

// The ends of intervals, and marks of steps at the lower edge.
function drawMore(u, { lines, ticks }) {
  const g = u.ctx,
    { left, top, width, height } = u.bbox,
    thick = devicePixelRatio || 1;
  g.save();
  g.beginPath();
  g.rect(left, top, width, height);
  g.clip();
  g.lineWidth = 1.5 * thick;
  for (const line of lines.filter(line => line.dots && line.low)) {
    g.strokeStyle = color(line.color);
    line.xs.forEach((x, i) => {
      if (line.low[i] == null || line.high[i] == null) return;
      const across = u.valToPos(x, "x", true);
      g.beginPath();
      g.moveTo(across, u.valToPos(line.low[i], "y", true));
      g.lineTo(across, u.valToPos(line.high[i], "y", true));
      g.stroke();
    });
  }
  for (const { x, color: name, peaked } of ticks) {
    const across = u.valToPos(x, "x", true),
      [wide, from] = [peaked ? 6 * thick : thick, top + height - 12 * thick];
    g.fillStyle = color(name);
    g.beginPath();
    g.moveTo(across - (peaked ? 0 : wide), from);
    g.lineTo(across + (peaked ? 0 : wide), from);
    g.lineTo(across + wide, top + height);
    g.lineTo(across - wide, top + height);
    g.fill();
  }
  g.restore();
  drawLetters(u, color("--ink"), color("--page"));
}

const said = (lines, unit) =>
  lines
    .filter(line => line.values.length)
    .map(line => {
      const [low, high] = [Math.min(...line.values), Math.max(...line.values)];
      const ends = `${short(line.values[0])} at step ${line.steps[0]}, ${short(line.values.at(-1))} at step ${line.steps.at(-1)}`;
      return `${line.label}: ${ends}; lowest ${short(low)}, highest ${short(high)}${unit && ` ${unit}`}`;
    })
    .join(". ") || "no values";

// `lines`: [{label, steps, values, xs, low, high, dots, color}]: `xs` are places on the axis, `low` and `high` make a
// band, or with `dots` the ends of points. `range`: of the values, if it is fixed; `reach`: of the x axis.
// `ticks`: [{x, color, peaked}], triangles if `peaked`. `open`: is called with the step that is clicked on. `named`: what the curves are is said elsewhere.
export function Chart(given) {
  const { title, hint, unit = "", lines, height = 150, close, range, reach, alone, ticks = [], open, legend, named } = given;
  const [ref, width, theme] = useSize();
  const plot = useRef(),
    now = useRef();
  const looks = look();
  const { by, smooth, log, zoom } = looks;
  const columns = useMemo(
    () => columnsOf(lines, looks),
    [smooth, log, ...lines.flatMap(line => [line.xs || line.steps, line.values, line.low])],
  );
  now.current = { lines, ticks, open, range, reach, looks, columns };
  const form = JSON.stringify([
    ...[width, theme, height, by, !!smooth, log, unit],
    ...lines.map(line => [line.label, !!line.low, !!line.dots, line.color]),
  ]);
  const rebuilt = useRef("");
  const make = () => {
    plot.current?.destroy();
    rebuilt.current = form;
    const font = "11px system-ui";
    const axis = { stroke: color("--dim"), ticks: { show: false }, font, labelFont: font, labelSize: 15, labelGap: 0 };
    axis.grid = { stroke: color("--line"), width: 1 };
    const tell = u => {
      const { lines, columns, looks } = now.current,
        i = u.cursor.idx,
        x = i == null ? null : columns[0][i];
      const read = ref.current?.parentNode.querySelector(".read");
      if (!read) return;
      read.replaceChildren(x == null ? "" : `${written(looks.by, x)}: `);
      const letters = lettered(lines);
      lines.forEach((line, i) => {
        const value = line.values[(line.xs || line.steps).indexOf(x)];
        if (value == null) return;
        const said = document.createElement("span");
        said.textContent = `${letters ? letterOf(i) + " " : ""}${short(value)}`;
        if (lines.length > 1) said.style.color = `var(${line.color || colorOf(i)})`;
        read.append(read.children.length ? ", " : "", said);
      });
    };
    const stepAt = u => {
      const x = now.current.columns[0][u.cursor.idx];
      for (const line of now.current.lines) {
        const i = (line.xs || line.steps).indexOf(x);
        if (i >= 0) return line.steps[i];
      }
    };
    const made = new uPlot(
      {
        width,
        height,
        ...seriesOf(lines, looks, now),
        legend: { show: false },
        padding: [10, lettered(lines) ? 24 : 14, 0, 0],
        scales: {
          x: {
            time: false,
            range: (u, low, high) => {
              const { looks, reach } = now.current;
              const [first, last] = looks.zoom || reach || [low, high];
              return first == last ? [first - 1, last + 1] : [first, last];
            },
          },
          y: {
            distr: log ? 3 : 1,
            range: (u, low, high) =>
              log ? uPlot.rangeLog(low ?? 1, high ?? 10, 10, false) : now.current.range || room(low, high),
          },
        },
        axes: [
          {
            ...axis,
            size: 24,
            label: by == "step" ? "step" : AXES[by],
            values: (u, marks) =>
              marks.map(x => (by == "time" ? lasting(x) : by != "step" ? brief(x) : Number.isInteger(x) ? x : "")),
          },
          { ...axis, size: 48, label: unit || " ", values: (u, marks) => marks.map(y => (y == null ? "" : brief(y))) },
        ],
        cursor: { y: false, sync: { key: "steps" }, drag: { x: true, y: false, setScale: false } },
        hooks: {
          setSelect: [
            u => {
              if (u.select.width > 4)
                zoomTo([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
              u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            },
          ],
          setCursor: [tell],
          setData: [tell],
          draw: [u => drawMore(u, now.current)],
          ready: [
            u => {
              let down = 0;
              u.over.addEventListener("mousedown", event => (down = event.clientX));
              u.over.addEventListener("click", event => {
                const step = Math.abs(event.clientX - down) < 4 ? stepAt(u) : undefined;
                if (step !== undefined) now.current.open?.(step);
              });
              u.over.addEventListener("dblclick", () => now.current.open || resetZoom());
            },
          ],
        },
      },
      now.current.columns,
      ref.current,
    );
    plot.current = made;
  };
  useEffect(() => {
    if (!width) return;
    const change = () => {
      if (rebuilt.current != form) make();
      else plot.current.setData(now.current.columns);
    };
    if (held && plot.current) waiting.add(change);
    else change();
    return () => waiting.delete(change);
  }, [form, columns, JSON.stringify([zoom, reach, ticks])]);
  useEffect(() => () => plot.current?.destroy(), []);
  return html`
    <figure class=${"chart" + (alone ? " alone" : "")}>
      <figcaption title=${hint}>
        <b>${title}</b>
        <span class="read"></span>
        ${close && html`<button class="plain" aria-label=${`remove ${title}`} onClick=${close}>×</button>`}
      </figcaption>
      <div
        ref=${ref}
        role="img"
        class=${open ? "opens" : ""}
        aria-label=${`${title}. ${said(lines, unit)}`}
        style=${{ height: height + "px" }}></div>
      ${
        ((lines.length > 1 && !named) || legend) &&
        html`
          <div class="legend">
            ${lines.map(
              (line, i) => html`
                <span title=${line.name}>
                  <${Swatch} n=${i} tone=${line.color} letter=${lettered(lines)} dots=${line.dots} />${line.label}
                </span>
              `,
            )}
            ${legend}
          </div>
        `
      }
    </figure>
  `;
}

// A small curve beside a number.
export function Spark({ values }) {
  const kept = values.filter(value => value != null);
  if (kept.length < 2) return null;
  const [low, high] = [Math.min(...kept), Math.max(...kept)];
  // What only rounding has changed is flat.
  const moves = high - low > 1e-6 * Math.max(Math.abs(low), Math.abs(high));
  const every = Math.ceil(kept.length / 100);
  const part = kept.filter((_, i) => i % every == 0 || i == kept.length - 1);
  const at = (value, i) =>
    `${((100 * i) / (part.length - 1)).toFixed(1)},${(moves ? 22 - (20 * (value - low)) / (high - low) : 12).toFixed(1)}`;
  return html`
    <svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true">
      <polyline points=${part.map(at).join(" ")} />
    </svg>
  `;
}
