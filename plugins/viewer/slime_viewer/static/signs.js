// Any value as a text that is safe to read: what is invisible in it is shown by signs.
import { said } from "slime/data";

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
