"""The spellings of LaTeX, Unicode and plain text, brought to one."""

from __future__ import annotations

import re

from slime_rewards.denials import TAKEN_BACK
from slime_rewards.mathematics.units import unit_of

#: symbols of Unicode, and how LaTeX writes them
_SYMBOLS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\ufe63\uff0d", "-"),
        **dict.fromkeys("\u00d7\u22c5\u00b7\u2217", r"\times "),
        **dict.fromkeys("£¥₹…", " "),
        **dict.fromkeys("°º", r"\degree "),
        "¢": " cents ",
        **dict.fromkeys("\u2032\u2019", "'"),
        **dict.fromkeys("≤⩽", r"\leq "),
        **dict.fromkeys("≥⩾", r"\geq "),
        "≠": r"\neq ",
        "\u00f7": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "\u222a": r"\cup ",
        "\u2229": r"\cap ",
        "∈": r"\in ",
        "±": r"\pm ",
        "∅": r"\emptyset ",
        "≈": "=",
        "⟨": "(",
        "⟩": ")",
        "\uff05": "%",
        "\uff08": "(",
        "\uff09": ")",
        "\uff0c": ",",
        "\u3001": ",",
        "\uff1b": ";",
        "\uff1a": ":",
        "\uff1d": "=",
        "\uff0b": "+",
        "\uff5c": "|",
        "\u3002": ".",
    }
)
#: commands that set words in a style
STYLES = (
    "text|textbf|textit|textrm|texttt|textnormal|mathrm|mathbf|mathit|mathsf|mathtt|mbox|operatorname|boldsymbol|bm"
)
#: spellings of the same thing, applied in this order
_SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"(?<!\\)\$|\\\$|\\[()\[\]]", " "),
        (r"\\(?:displaystyle|textstyle|limits|nolimits|bf|rm|it)(?![A-Za-z])", " "),
        (r"\\(?:large|Large|LARGE|huge|Huge|small|normalsize)(?![A-Za-z])|\\color\s*\{[^{}]*\}", " "),
        (r"\\(?:textcolor\s*\{[^{}]*\}|underline(?=\s*\{[\d.,-]+\}))\s*\{([^{}]*)\}", r"{\1}"),
        (r"€\s*([\d.,]*\d)(?![\d\s]*[A-Za-z])|(?<=\d)\s*+€", r"\1 euros "),
        ("€", " "),
        (r"\\[bB]ig{1,2}[lrm]?(?![A-Za-z])|\\(?:left|right|middle)(?![A-Za-z])\s*\.?(?=\s*(?:[^A-Za-z]|$))", ""),
        (r"\\(?:[dtcs]|nice)frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
        (r"(?:\{\s*\}|^)_\{?(\d+)\}?\s*C_\{?(\d+)\}?", r"\\binom{\1}{\2}"),
        (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}|^([^{}]*)\\over(?![A-Za-z])([^{}]*)$", r"\\frac{\1\3}{\2\4}"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
        (r"\\(?:leqslant|leq|le)(?![A-Za-z])", r"\\leq "),
        (r"\\(?:geqslant|geq|ge)(?![A-Za-z])", r"\\geq "),
        (r"\\(?:neq|ne)(?![A-Za-z])", r"\\neq "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\lbrack(?![A-Za-z])", "["),
        (r"\\rbrack(?![A-Za-z])", "]"),
        (r"\\[lr]?vert(?![A-Za-z])|\\\|", "|"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
        (r"\\degree(?![A-Za-z])|\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))", r"\\degree "),
        (r"\^\s*(?:\{\s*\\prime\s*\}|\\prime(?![A-Za-z]))", "'"),
        (r"\^\s*\{\s*\\prime\s*\\prime\s*\}", "''"),
        (r"\\%", "%"),
        (r"\\(?:text)?cent(?![A-Za-z])", " cents "),
        (r"\\colon(?![A-Za-z])", ":"),
        (r"^(-?[\d.,]+\s+)l$", r"\1L"),  # 5 l
        (r"\\(?:ldots|dots|cdots)(?![A-Za-z])", " "),
        (r"(?<=\d\.)\((\d+)\)|(?<=[\d.])\s*+\\(?:overline|bar)\s*(?:\{(\d+)\}|(\d))", r"\\overline{\1\2\3}"),
        (r"\\approx(?![A-Za-z])|\\doteq(?![A-Za-z])", "="),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"(?<=\.)(\d*)\\dot\s*\{?(\d)\}?", r"\1\\overline{\2}"),
        # 3 x 10^5
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        # 7^{\text{th}}, 2 (two), and the letter of a choice, \textbf{(D) }5
        (r"(?<=\d)\s*\^\s*+(?:\{\s*)?\\(?:text|mathrm)\s*\{\s*(?:st|nd|rd|th)\s*\}\s*\}?", ""),
        (rf"(?<=\d)\s*+(?!{TAKEN_BACK.pattern})\((?:\\text\s*\{{)?[a-z]{{3,}}(?:[ -][a-z]+)*\}}?\)\s*$", ""),
        (r"^\s*(?:\\(?:text|textbf|mathbf|mathrm)\s*\{\s*\([A-J]\)\s*\}|\([A-J]\))\s*(?:\\[ ,;:]\s*)?(?=[\d\\(-])", ""),
        (r"(?<=\d)(?:st|nd|rd|th)\b", ""),
        (r"\\mid(?![A-Za-z])", "|"),
        (r"\\(?:long)?rightarrow(?![A-Za-z])|→", r"\\to "),
        (r"\^\s*([+-])(?=\s*\})", r"^{\1}"),  # 0^+
        (r"\\big(cup|cap)(?![A-Za-z])", r"\\\1"),
        (r"\\\{\s*\\\}", r"\\emptyset "),
        # {x | x > 1}
        (r"^\s*\\\{\s*([a-z])\s*(?:\\in\s*(?:\\mathbb\s*\{R\}|R)\s*)?[|:]([^{}|]*)\\\}\s*$", r"\2"),
        (r"(?:\\!)?:(?:\\!)?", ":"),
        # 101 (base 2), 3:45 p.m., 2\mathrm{\pi}
        (r"^\s*([0-9A-Z]+)\s*+(?:\\text\s*\{)?[\s(]*base\s*(\d{1,2})\s*\)?\s*\}?\s*\.?\s*$", r"\1_{\2}"),
        (r"(:\d\d)\s*+(?:\\text\s*\{\s*)?([AaPp])\.?\s?[Mm]\b\.?\}?", r"\1 \2m"),
        (rf"\\(?:{STYLES})\s*\{{\s*(\\[A-Za-z]+)\s*\}}", r"\1 "),
        (r"^\s*(?:\\text\s*\{\s*)?[Aa]ll (?:real numbers|reals)\.?\s*\}?\.?\s*$", r"\\mathbb{R}"),
        (r"\s+", " "),
    )
)
_FRACTIONS = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅛": "1/8"} | {
    "⅖": "2/5", "⅗": "3/5", "⅘": "4/5", "⅙": "1/6", "⅚": "5/6", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8",
}  # fmt: skip
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
#: styles within each other that are removed from words
_MOST_STYLES = 10
#: 1 000, if it is the only number
_SPACED_THOUSANDS = re.compile(r"(\D*)([1-9]\d{0,2}(?: \d{3})+)(?=(?:\.\d+)?[^\d/_^]*$)")
#: \mathrm{m\,s^{-1}}
_RAISED_UNIT = re.compile(rf"\\(?:{STYLES})\s*\{{(?:[^{{}}^]|\^-?\d|\^\{{-?\d+\}})*\}}")
#: a unit with brackets or a fraction behind the number at the end: \frac{m}{s^2}, J/(mol K)
_COMPOUND_UNIT = re.compile(
    rf"(?<=[\d}}])((?:\s|\\[,;: ])*)(?![}}^/])"
    rf"((?:\\(?:frac|cdot|times|{STYLES})(?![A-Za-z])|\\[,;: ]|[A-Za-z/(){{}}\s]|\^\{{?-?\d){{3,60}})$"
)


def plain_spelling(text: str) -> str:
    """The text in the one spelling that the rest of this package reads."""
    text = text.translate(_SYMBOLS)
    for letter, written in _FRACTIONS.items():
        if letter in text:
            text = text.replace(letter, rf"\frac{{{written[0]}}}{{{written[2]}}}")
    text = re.sub(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: f"^{{{found[0].translate(_RAISED)}}}", text)
    text = re.sub(r"[₀₁₂₃₄₅₆₇₈₉]+", lambda found: f"_{{{found[0].translate(_LOWERED)}}}", text)
    for pattern, plain in _SPELLINGS:
        text = pattern.sub(plain, text)
    if (spaced := _SPACED_THOUSANDS.match(text)) is not None:
        text = spaced[1] + spaced[2].replace(" ", "") + text[spaced.end() :]
    text = _RAISED_UNIT.sub(lambda found: re.sub(r"\^\{(-?\d+)\}", r"^\1", found[0]), text)
    text = text.strip().removeprefix("=").lstrip()
    while text.endswith((".", ",", ";", ":")) or text.endswith("\\"):
        text = text[:-1].rstrip()
    return _COMPOUND_UNIT.sub(_in_one_text, text) if r"\frac" in text or "/(" in text else text


def _in_one_text(found: re.Match[str]) -> str:
    r"""`\text{ m/(s^2)}` for `\frac{m}{s^2}` if it is a unit; letters in italics are one only behind a space."""
    plain = re.sub(r"\\(?:cdot|times)(?![A-Za-z])|\\[,;: ]", " ", found[2])
    is_upright = False
    for _ in range(_MOST_STYLES):
        plain, styles = re.subn(rf"\\(?:{STYLES})\s*\{{([^{{}}]*)\}}", r"\1", plain)
        plain = re.sub(r"\^\{(-?\d+)\}", r"^\1", plain)
        plain, fractions = re.subn(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/(\2)", plain)
        is_upright |= bool(styles)
        if not styles and not fractions:
            break
    letters = re.findall(r"[A-Za-z]+", plain)
    is_word = any(len(one) > 1 for one in letters) or (
        re.fullmatch(r"\s*m\s*/\(\s*s(?:\^2)?\s*\)\s*", plain) is not None
        and re.fullmatch(r"\s*-?[\d.,]+(?:\^\{?\d+\}?)?\s*", found.string[: found.start()]) is not None
    )
    if not is_upright and not (found[1] and is_word):
        return found[0]
    is_unit = "/(" in plain and not re.search(r"[{}\\]", plain) and unit_of(plain.split()) is not None
    return rf"\text{{ {plain}}}" if is_unit else found[0]


def as_words(text: str) -> str:
    """A text as it is compared with another: without styles, punctuation, spaces and letter case of words."""
    for _ in range(_MOST_STYLES):
        text, count = re.subn(rf"\\(?:{STYLES})\s*\{{([^{{}}]*)\}}", r"\1", text)
        if not count:
            break
    text = re.sub(r"\{(\w)\}", r"\1", re.sub(r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~", " ", text))
    plain = " ".join(text.split()).strip(" .\"'`")
    return plain.casefold() if "\\" not in plain and re.search(r"[A-Za-z]{2}", plain) else plain.replace(" ", "")


_OUTWARD = re.compile(r"\]([^\[\]]+)[,;]([^\[\]]+)([\[\]])|\[([^\[\]]+)[,;]([^\[\]]+)\[")


def brackets_inwards(text: str) -> str:
    """]0, 1[ as (0, 1)."""

    def inwards(found: re.Match[str]) -> str:
        if found[1] is not None:
            return f"({found[1]},{found[2]}{')' if found[3] == '[' else ']'}"
        return f"[{found[4]},{found[5]})"

    return _OUTWARD.sub(inwards, text)
