// LaTeX formulas as MathML, which the browser draws: what answers to questions of mathematics use. A command that is not
// known is shown as it is written.
import { h } from "preact";
import { useMemo } from "preact/hooks";
import { visible } from "slime/signs";

const [MOST, DEPTH] = [4000, 40];
const pairs = text => new Map(
  text.split(" ").flatMap((name, i, all) => (i % 2 ? [] : [[name, all[i + 1]]])),
);
const SIGNS = pairs(
  "alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ " +
    "sigma σ tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω " +
    "infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ emptyset ∅ varnothing ∅ angle ∠ triangle △ square □ degree ° circ ∘ prime ′ Re ℜ Im ℑ aleph ℵ",
);
const OPERATORS = pairs(
  "cdot ⋅ times × div ÷ pm ± mp ∓ ast ∗ star ⋆ le ≤ leq ≤ leqslant ⩽ ge ≥ geq ≥ geqslant ⩾ ne ≠ neq ≠ approx ≈ equiv ≡ sim ∼ simeq ≃ cong ≅ " +
    "propto ∝ ll ≪ gg ≫ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ cup ∪ cap ∩ setminus ∖ land ∧ wedge ∧ lor ∨ vee ∨ neg ¬ lnot ¬ " +
    "forall ∀ exists ∃ to → rightarrow → leftarrow ← Rightarrow ⇒ implies ⟹ Leftarrow ⇐ iff ⟺ Leftrightarrow ⇔ leftrightarrow ↔ mapsto ↦ " +
    "sum ∑ prod ∏ int ∫ iint ∬ oint ∮ bigcup ⋃ bigcap ⋂ oplus ⊕ otimes ⊗ mid ∣ nmid ∤ parallel ∥ perp ⊥ vdots ⋮ cdots ⋯ ldots … dots … ddots ⋱ " +
    "langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lvert | rvert | vert | Vert ‖ lbrace { rbrace } therefore ∴ because ∵ colon : bmod mod",
);
const LIMITS = new Set(["∑", "∏", "⋃", "⋂", "lim", "max", "min", "sup", "inf", "argmax", "argmin"]);
const FUNCTIONS = new Set(
  "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp lim max min sup inf det dim ker gcd lcm deg arg argmax argmin Pr".split(" "),
);
const SPACES = new Map(Object.entries({ ",": "0.17em", ":": "0.22em", ";": "0.28em", "!": "0", " ": "0.3em", quad: "1em", qquad: "2em" }));
const ACCENTS = new Map(Object.entries({ hat: "^", widehat: "^", bar: "‾", overline: "‾", vec: "→", overrightarrow: "→", dot: "˙", ddot: "¨", tilde: "~", widetilde: "~" }));
const LETTERS = new Map(Object.entries({ mathbb: "double-struck", mathcal: "script", mathfrak: "fraktur", mathbf: "bold", boldsymbol: "bold", bm: "bold" }));
const WORDS = new Set(["text", "textbf", "textit", "textrm", "mathrm", "operatorname", "mbox", "mathsf", "mathit", "texttt"]);
// Commands that change nothing that is drawn here.
const NOTHING = new Set(["displaystyle", "textstyle", "limits", "nolimits", "big", "Big", "bigg", "Bigg", "bigl", "bigr", "Bigl", "Bigr", "hline", "nonumber", "notag"]);
const FENCES = new Map(Object.entries({ matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], cases: ["{", ""] }));
const PARTS = /\\([a-zA-Z]+|[^])|[0-9]+(?:[.,][0-9]+)*|[^\s]/gu;

export function Formula({ source, block }) {
  const drawn = useMemo(() => (source.length > MOST ? null : new Reader(source).all()), [source]);
  if (!drawn) return h("code", null, visible(source));
  return h("math", { display: block ? "block" : "inline", title: visible(source.trim()) }, h("mrow", null, drawn));
}

class Reader {
  constructor(source) {
    this.source = source;
    this.parts = [...source.matchAll(PARTS)];
    this.at = 0;
    this.depth = 0;
  }

  peek = () => this.parts[this.at]?.[0];
  all = () => {
    const made = [];
    while (this.peek() !== undefined) {
      made.push(...this.row(new Set()));
      // A sign that closes what was never opened.
      if (this.peek() !== undefined) made.push(h("mo", null, visible(this.parts[this.at++][0])));
    }
    return made;
  };

  // Formulas up to one of the signs that end it.
  row(ends) {
    const made = [];
    if (this.depth > DEPTH) {
      const rest = this.parts.slice(this.at).map(part => part[0]).join(" ");
      this.at = this.parts.length;
      return [h("mtext", null, visible(rest))];
    }
    this.depth++;
    for (let part = this.peek(); part !== undefined && !ends.has(part) && part != "}"; part = this.peek()) {
      const before = this.at;
      const one = this.scripts(this.atom());
      if (one) made.push(one);
      if (this.at == before) this.at++;
    }
    this.depth--;
    return made;
  }

  // What follows a command: a group in braces, or one sign.
  group() {
    if (this.peek() == "{") {
      this.at++;
      const made = this.row(new Set());
      if (this.peek() == "}") this.at++;
      return h("mrow", null, made);
    }
    if (this.depth > DEPTH) return h("mrow");
    this.depth++;
    const one = this.atom() ?? h("mrow");
    this.depth--;
    return one;
  }

  // The text of a group as it is written.
  words() {
    const open = this.parts[this.at];
    if (open?.[0] != "{") return open ? this.parts[this.at++][0] : "";
    let deep = 0;
    for (let i = this.at; i < this.parts.length; i++) {
      if (this.parts[i][0] == "{") deep++;
      if (this.parts[i][0] == "}" && --deep == 0) {
        this.at = i + 1;
        return this.source.slice(open.index + 1, this.parts[i].index);
      }
    }
    this.at = this.parts.length;
    return this.source.slice(open.index + 1);
  }

  scripts(base) {
    let [low, high] = [null, null];
    let primes = "";
    for (let part = this.peek(); part == "_" || part == "^" || part == "'"; part = this.peek()) {
      this.at++;
      if (part == "'") primes += "′";
      else if (part == "_") low = this.group();
      else high = this.group();
    }
    if (primes) high = h("mrow", null, h("mo", null, primes), high);
    if (!low && !high) return base;
    base ??= h("mrow");
    const around = LIMITS.has(base.props?.children);
    if (low && high) return h(around ? "munderover" : "msubsup", null, base, low, high);
    return low ? h(around ? "munder" : "msub", null, base, low) : h(around ? "mover" : "msup", null, base, high);
  }

  atom() {
    const part = this.parts[this.at++];
    if (!part) return null;
    const [sign, command] = part;
    if (command === undefined) {
      if (sign == "{") {
        this.at--;
        return this.group();
      }
      if (sign == "^" || sign == "_" || sign == "'") {
        this.at--;
        return h("mrow");
      }
      if (sign == "&" || sign == "~") return h("mspace", { width: "0.3em" });
      if (/\d/.test(sign)) return h("mn", null, sign);
      return h(/\p{L}/u.test(sign) ? "mi" : "mo", null, visible(sign == "-" ? "−" : sign));
    }
    if (SIGNS.has(command)) return h("mi", null, SIGNS.get(command));
    if (OPERATORS.has(command)) return h("mo", null, OPERATORS.get(command));
    if (FUNCTIONS.has(command)) return h("mi", null, command);
    if (SPACES.has(command)) return h("mspace", { width: SPACES.get(command) });
    if (command == "left" || command == "right") {
      if (this.peek() == ".") this.at++;
      return null;
    }
    if (NOTHING.has(command)) return null;
    if (WORDS.has(command)) return h("mtext", null, visible(this.words()));
    if (ACCENTS.has(command)) return h("mover", { accent: "true" }, this.group(), h("mo", null, ACCENTS.get(command)));
    if (LETTERS.has(command)) return h("mrow", { class: LETTERS.get(command) }, this.group());
    if (["frac", "dfrac", "tfrac", "cfrac"].includes(command)) return h("mfrac", null, this.group(), this.group());
    if (["binom", "dbinom", "tbinom"].includes(command))
      return h("mrow", null, h("mo", null, "("), h("mfrac", { linethickness: "0" }, this.group(), this.group()), h("mo", null, ")"));
    if (command == "boxed" || command == "fbox") return h("mrow", { class: "boxed" }, this.group());
    if (command == "underline") return h("munder", null, this.group(), h("mo", null, "_"));
    if (command == "pmod") return h("mrow", null, h("mtext", null, " (mod "), this.group(), h("mo", null, ")"));
    if (command == "sqrt") return this.root();
    if (command == "begin") return this.environment();
    if (command == "\\") return h("mspace", { linebreak: "newline" });
    if ("{}%$#&_|".includes(command)) return h("mo", null, command == "|" ? "‖" : command);
    return h("mtext", { class: "unknown" }, visible(sign));
  }

  root() {
    if (this.peek() != "[") return h("msqrt", null, this.group());
    this.at++;
    const degree = this.row(new Set(["]"]));
    if (this.peek() == "]") this.at++;
    const inner = this.group();
    return h("mroot", null, inner, h("mrow", null, degree));
  }

  environment() {
    const name = this.words().replace("*", "");
    if (name == "array" && this.peek() == "{") this.words();
    const [rows, ends] = [[[]], new Set(["&", "\\\\", "\\end"])];
    while (this.peek() !== undefined) {
      rows.at(-1).push(h("mtd", null, h("mrow", null, this.row(ends))));
      const end = this.parts[this.at++]?.[0];
      if (end == "\\\\") rows.push([]);
      else if (end == "\\end") {
        this.words();
        break;
      } else if (end != "&") break;
    }
    const [left, right] = FENCES.get(name) || ["", ""];
    const table = h("mtable", { columnalign: FENCES.has(name) && name != "cases" ? "center" : "left" }, rows.filter(row => row.length).map(row => h("mtr", null, row)));
    return h("mrow", null, left && h("mo", { stretchy: "true" }, left), table, right && h("mo", { stretchy: "true" }, right));
  }
}
