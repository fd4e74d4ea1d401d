// The turns of a conversation: who says what; thinking and long tool results folded; calls as a name with arguments.
import { html, place, restate, said, Trouble } from "slime/data";
import { plain, visible } from "slime/signs";
import { Copy, shownOfTool, Text } from "slime/texts";

const WRITERS = { assistant: "policy", tool: "tool" };
const listed = prompt => (Array.isArray(prompt) ? prompt : [prompt]);

// Whether Markdown and LaTeX are drawn: it is in the address.
export const formats = () => place().params.f == "1";
export const turnFormat = () => restate({ f: formats() ? "" : "1" });

export const FormatChoice = () => html`
  <label>
    <input type="checkbox" checked=${formats()} onChange=${turnFormat} />
    Markdown and LaTeX
  </label>
`;

export function Prompt({ row, hits }) {
  if (!row) return html`<${Trouble} text="The file of this sample was deleted or has changed." />`;
  return html`
    <div class="turns">
      ${listed(row.prompt).map(one => html`<${Turn} of=${one} who=${one?.role || "prompt"} hits=${hits} />`)}
      <${Label} row=${row} />
    </div>
  `;
}

export const Label = ({ row }) =>
  row?.label != null &&
  html`
    <div class="turn label">
      <b>label</b>
      <div><${Text} text=${row.label} /></div>
    </div>
  `;

// One message. `other`: the text that differences are marked from.
export function Turn({ of: one, who, hits, other }) {
  const by = (typeof one?.role == "string" && WRITERS[one.role]) || "";
  const calls = Array.isArray(one?.tool_calls) ? one.tool_calls : [];
  const text = plain(one);
  const thought = plain(one?.reasoning_content ?? one?.reasoning ?? null);
  return html`
    <div class=${"turn " + by}>
      <b>
        ${visible(who ?? one?.role ?? "message")}${one?.name ? ` ${visible(one.name)}` : ""}
        ${text && html`<${Copy} text=${text} what=${`what ${by || "it"} says`} />`}
      </b>
      <div>
        ${thought && html`<${Text} text=${`<think>${thought}</think>`} hits=${hits} formatted=${formats()} />`}
        ${
          (text || !calls.length) &&
          html`<${Text} text=${one} hits=${hits} other=${other} formatted=${formats() && by != "tool"} most=${by == "tool" ? shownOfTool(text) : undefined} />`
        }
        ${calls.map(call => html`<${Call} of=${call} />`)}
      </div>
    </div>
  `;
}

// A call: its name, and each argument by name; what is no object of arguments is shown as it is.
function Call({ of: call }) {
  const { name, arguments: given = null } = call?.function ?? call ?? {};
  let values = given;
  if (typeof given == "string")
    try {
      values = JSON.parse(given);
    } catch {
      // It stays a text.
    }
  const named = values !== null && typeof values == "object" && !Array.isArray(values) ? Object.entries(values) : null;
  const whole = typeof given == "string" ? given : said(given);
  return html`
    <div class="call">
      <p>calls <b>${visible(name ?? "a tool")}</b> <${Copy} text=${whole} what="its arguments" /></p>
      ${
        named
          ? html`
              <dl>
                ${named.map(
                  ([key, value]) => html`
                    <dt>${visible(key)}</dt>
                    <dd><pre tabindex="0">${visible(value)}</pre></dd>
                  `,
                )}
              </dl>
            `
          : given != null && html`<pre tabindex="0">${visible(whole)}</pre>`
      }
    </div>
  `;
}

// What a sample adds to its prompt: the turns behind it, or one answer.
function turnsOf(row) {
  if (!Array.isArray(row?.messages)) return row ? [{ role: "assistant", content: row.response }] : [];
  const [asked, all] = [listed(row.prompt), row.messages];
  const same = (one, other) => plain(one) == plain(other) && (one?.role ?? "user") == (other?.role ?? "user");
  // The conversation may begin with the whole prompt, or leave out what a template adds in front of it.
  for (let from = 0; from < asked.length; from++) {
    const rest = asked.slice(from);
    if (rest.length <= all.length && rest.every((one, n) => same(one, all[n]))) return all.slice(rest.length);
  }
  return all;
}

// The turns of an answer; of a single one, only its text. `other`: those that differences are marked from.
export function Answer({ row, hits, other }) {
  const turns = turnsOf(row);
  const against = other && turnsOf(other);
  const textOf = n => (against ? plain(against[n] ?? "") : null);
  if (!Array.isArray(row?.messages)) return html`<${Text} text=${row?.response} hits=${hits} other=${other && plain(other.response)} formatted=${formats()} />`;
  return html`
    <div class="turns inner">
      ${turns.map((one, n) => html`<${Turn} of=${one} hits=${hits} other=${textOf(n)} />`)}
    </div>
  `;
}
