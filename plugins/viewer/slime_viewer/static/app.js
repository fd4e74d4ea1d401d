// The frame of all views: runs, navigation, help, and what is new in a run that goes on.
import { Component, render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { address, allKeys, fixed, get, go, html, keysAreOn, place, Trouble, turnKeys, useData, useKeys } from "slime/data";
import { counted, stateWords } from "slime/verdict";
import { Run } from "slime/run";
import { Runs } from "slime/runs";
import { Samples } from "slime/samples";
import { Conversation } from "slime/conversation";
import { Group } from "slime/group";
import { Scale } from "slime/rewards";
import { Visits } from "slime/prompt";
import { Compare } from "slime/compare";
import { Tokens } from "slime/tokens";

const VIEWS = { run: Run, samples: Samples, group: Group, sample: Conversation, prompt: Visits, tokens: Tokens };
const TITLES = {
  samples: "Samples",
  group: "A group",
  sample: "A conversation",
  prompt: "One prompt",
  tokens: "Tokens",
  compare: "A comparison",
};
const EVERY_MS = 2000;

// What a view cannot draw is told in its place; the rest of the page goes on.
class Guard extends Component {
  static getDerivedStateFromError(error) {
    return { error };
  }
  render({ children }, { error }) {
    return error ? html`<${Trouble} text=${`This cannot be shown: ${error.message}`} />` : children;
  }
}

// A modal dialog of the browser: it takes the focus, keeps it, is closed by Escape, and gives it back.
function Help({ close }) {
  const dialog = useRef();
  const [on, set] = useState(keysAreOn());
  const setOn = value => {
    turnKeys(value);
    set(value);
  };
  useEffect(() => {
    const shown = dialog.current;
    shown.showModal();
    return () => shown.close();
  }, []);
  return html`
    <dialog ref=${dialog} class="help" aria-label="keys" onClose=${close} onClick=${event => event.target == dialog.current && dialog.current.close()}>
      <button onClick=${close}>Close</button>
      <label>
        <input type="checkbox" checked=${on} onChange=${() => setOn(!on)} />
        keys without Ctrl or Alt are on
      </label>
      <table>
        ${allKeys().map(
          ([key, [does]]) => html`
            <tr>
              <td><kbd>${key}</kbd></td>
              <td>${does}</td>
            </tr>
          `,
        )}
      </table>
    </dialog>
  `;
}

function App() {
  const [, moved] = useState(0);
  const [version, setVersion] = useState("");
  const [lost, setLost] = useState("");
  const [help, setHelp] = useState(false);
  useEffect(() => {
    const listen = () => moved(n => n + 1);
    addEventListener("hashchange", listen);
    let timer;
    // One question after another, however long an answer takes.
    const ask = async () => {
      if (!document.hidden)
        await get("state").then(
          state => {
            setVersion(state.version);
            setLost("");
          },
          error => setLost(error.message),
        );
      timer = setTimeout(ask, EVERY_MS);
    };
    if (!fixed) ask();
    return () => {
      removeEventListener("hashchange", listen);
      clearTimeout(timer);
    };
  }, []);
  const { data, error } = useData("runs", {}, version);
  const runs = data?.runs || [];
  const listed = data?.listed;
  const { view = "", parts } = place();
  const id = +(parts[0] || 0);
  const compared = view == "compare" && parts.length > 1 ? parts.map(Number) : [id, id ? 0 : 1];
  useKeys({
    1: ["the run", () => go(address("run", [id]))],
    2: ["samples", () => go(address("samples", [id]))],
    ...(fixed ? {} : { 4: ["most extreme tokens", () => go(address("tokens", [id]))] }),
    ...(runs.length > 1
      ? {
          3: ["runs compared", () => go(address("compare", compared))],
          w: ["next run", () => go(address("run", [(id + 1) % runs.length]))],
        }
      : {}),
    ...(listed ? { 0: ["all runs", () => go(address("runs", []))] } : {}),
    b: ["back", () => history.back()],
    "?": ["keys", () => setHelp(on => !on)],
  });
  const run = runs[id];
  useEffect(() => {
    document.title = run ? `${run.name} · slime` : "slime";
  }, [run?.name]);
  // A view is made anew for another run or sample, so that it begins at its top.
  useEffect(() => scrollTo(0, 0), [view, parts.join("/")]);
  if (!runs.length && !(listed && (view == "runs" || !view)))
    return error ? html`<main><${Trouble} text=${error} /></main>` : html`<main class="dim">loading</main>`;
  if (listed && (view == "runs" || !view))
    return html`
      <nav><b>slime</b></nav>
      <main><${Guard}><${Runs} version=${version} /><//></main>
    `;
  if (!run) return html`<main><${Trouble} text="There is no such run." /></main>`;
  const View = VIEWS[view] || Run;
  const link = (name, to, on) => html`<a class=${on ? "on" : ""} href=${to}>${name}</a>`;
  return html`
    <nav>
      <b>slime</b>
      ${
        view == "compare"
          ? ""
          : runs.length > 1
            ? html`
                <select
                  aria-label="run"
                  value=${id}
                  onChange=${event => go(address(["samples", "tokens"].includes(view) ? view : "run", [event.target.value]))}>
                  ${runs.map((one, n) => html`<option value=${n} selected=${n == id}>${one.name}</option>`)}
                </select>
              `
            : html`<span class="name">${run.name}</span>`
      }
      ${
        !["", "run", "compare"].includes(view) &&
        html`
          <span class=${"state " + run.state}>${stateWords(run.state)}, ${counted(run.progress)}</span>
        `
      }
      <span class="right">
        ${listed && link("Runs", address("runs", []), false)} ${link("Run", address("run", [id]), !view || view == "run")}
        ${link("Samples", address("samples", [id]), ["samples", "group", "sample", "prompt"].includes(view))}
        ${!fixed && link("Tokens", address("tokens", [id]), view == "tokens")}
        ${runs.length > 1 && link("Compare", address("compare", compared), view == "compare")}
        <button class="plain" title="Keys" onClick=${() => setHelp(!help)}>?</button>
      </span>
    </nav>
    <main>
      ${TITLES[view] && html`<h1 class="unseen">${TITLES[view]} of ${run.name}</h1>`}
      ${lost && html`<${Trouble} text=${lost} />`}
      <${Guard} key=${[view, ...parts].join("/")}
        >${
          view == "compare"
            ? compared.every(n => runs[n]) &&
              html`<${Compare} key=${compared.join()} runs=${runs} parts=${compared} version=${version} />`
            : html`
                <${Scale.Provider} value=${run.rewards}>
                  <${View}
                    key=${[view, ...parts].join("/")}
                    id=${id}
                    run=${run}
                    parts=${parts.slice(1)}
                    version=${version} />
                <//>
              `
        }<//
      >
    </main>
    ${
      help &&
      html`
        <${Help} close=${() => setHelp(false)} />
      `
    }
  `;
}

render(html`<${App} />`, document.getElementById("app"));
