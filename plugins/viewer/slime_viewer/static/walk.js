// From one sample to the next of what a filter has found: filter and order go along in the address, and the table returns
// to the sample that was seen last.
import { useEffect, useRef } from "preact/hooks";
import { address, get, html, place, useData } from "slime/data";

let seen = null;
const same = (id, q, sort) => seen?.id == id && seen.q == q && seen.sort == sort;

// The sample of a result that was seen last, once.
export function lastSeen(id, q, sort) {
  const key = same(id, q, sort) ? seen.key : null;
  seen = null;
  return key;
}

// The same with its group, for who comes back from conversations.
export const leftAt = (id, q, sort) => (same(id, q, sort) && seen.view == "sample" && seen.group ? seen : null);

// Keys that go to the next and the previous sample of the result; none without one in the address.
export function useWalk(view, id, key, group) {
  const { q = "", sort } = place().params;
  const busy = useRef(false);
  // A group that is opened anew learns first where its conversations were left.
  const shown = useRef(view == "sample");
  useEffect(() => {
    shown.current = true;
  }, []);
  if (!sort || !key) return null;
  if (shown.current) seen = { id, q, sort, key, group, view };
  const to = way => {
    // Keys may come faster than answers.
    if (busy.current) return;
    busy.current = true;
    const after = ({ beside }) => {
      if (!beside) return;
      const { f, d, col } = place().params;
      const [parts, at] = view == "group" ? [[id, beside.group_key], beside.key] : [[id, beside.key]];
      location.replace(address(view, parts, { at, q, sort, f, d, col }));
    };
    get("beside", { run: id, q, sort, key, ...way })
      .then(after, () => {})
      .finally(() => (busy.current = false));
  };
  return {
    j: ["next sample that the filter finds", () => to({})],
    k: ["previous one", () => to({ back: 1 })],
  };
}

// Which sample of the result this is, and the way back to it.
export function Found({ id, at }) {
  const { q = "", sort } = place().params;
  const { data } = useData("place", sort && at ? { run: id, q, sort, key: at } : null);
  if (!sort) return null;
  return html`
    <p class="dim found">
      ${data?.place == null ? "Beside" : `Sample ${(data.place + 1).toLocaleString()} of`}${" "}<a href=${address("samples", [id], { q, sort, at })}>${q || "all samples"}</a>${": "}
      <kbd>j</kbd> and <kbd>k</kbd> go through them, <kbd>b</kbd> goes back.
    </p>
  `;
}
