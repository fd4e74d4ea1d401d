"""Draws the pictures of docs/concepts/ as SVG; they follow light and dark.

python -m scripts.docs.pictures        # writes docs/pictures/*.svg
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
#: ink, faint ink, paper of boxes, trained on, not trained on, attention. docs/assets/site.css has the same for the site
_LIGHT = "--ink:#1f2328;--faint:#59636e;--box:#f3f5f4;--yes:#b9e3d0;--no:#e3e6e8;--warn:#f6d4b8"
_DARK = "--ink:#e6edf3;--faint:#9aa4ae;--box:#1d2523;--yes:#1f6b50;--no:#3a4249;--warn:#7a4a22"
_STYLE = (
    f"svg.picture{{{_LIGHT}}}"
    f"@media (prefers-color-scheme:dark){{svg.picture{{{_DARK}}}}}"
    ".picture text{font:14px system-ui,'Segoe UI','DejaVu Sans',sans-serif;fill:var(--ink)}"
    ".picture .small{font-size:12px;fill:var(--faint)}"
    ".picture .mono{font-family:ui-monospace,'DejaVu Sans Mono',monospace;font-size:13px}"
    ".picture .line{stroke:var(--faint);stroke-width:1.5;fill:none}"
    ".picture .head{fill:var(--faint)}"
    ".picture rect{stroke:var(--faint);stroke-width:1}"
    ".picture .box{fill:var(--box)}.picture .yes{fill:var(--yes)}.picture .no{fill:var(--no)}"
    ".picture .warn{fill:var(--warn)}"
)


class Drawing:
    """A picture that grows element by element. Lengths are pixels; y grows downwards."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="picture" viewBox="0 0 {width} {height}" width="{width}"'
            f' role="img"><title>{escape(title)}</title><style>{_STYLE}</style>'
        )
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str = "box", text: str = "") -> None:
        """A rectangle of a kind (`box`, `yes`, `no`, `warn`), with a text in its middle."""
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>')
        if text:
            self.text(x + width / 2, y + height / 2 + 5, text, anchor="middle")

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A line of text; `kind` is `small`, `mono` or nothing."""
        style = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text{style} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """A horizontal or vertical line with a head at its end."""
        self._parts.append(f'<path class="line" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>')
        if x == to_x:
            tip = 7 if to_y > y else -7
            points = f"{to_x - 5:g},{to_y - tip:g} {to_x + 5:g},{to_y - tip:g} {to_x:g},{to_y:g}"
        else:
            tip = 7 if to_x > x else -7
            points = f"{to_x - tip:g},{to_y - 5:g} {to_x - tip:g},{to_y + 5:g} {to_x:g},{to_y:g}"
        self._parts.append(f'<polygon class="head" points="{points}"/>')

    def svg(self) -> str:
        """The file."""
        return f"{self._head}{''.join(self._parts)}</svg>\n"


def batch() -> Drawing:
    """4 prompts x 4 answers are 2 steps of 8 samples."""
    picture = Drawing(720, 300, "4 prompts with 4 answers each are 16 samples, trained on in 2 steps of 8")
    picture.text(20, 24, "a rollout")
    picture.text(110, 50, "n_samples_per_prompt = 4", "small")
    picture.text(20, 255, "rollout_batch_size = 4", "small")
    for row in range(4):
        y = 62 + 44 * row
        picture.text(20, y + 23, f"prompt {row + 1}")
        for column in range(4):
            picture.box(110 + 44 * column, y, 36, 36, "yes" if row < 2 else "no")
    picture.arrow(304, 146, 396, 146)
    picture.text(350, 132, "16 samples", "small", "middle")
    for step in range(2):
        y = 56 + 100 * step
        picture.box(410, y, 290, 84)
        picture.text(424, y + 24, f"optimizer step {step + 1}")
        for column in range(8):
            picture.box(424 + 33 * column, y + 38, 27, 27, "no" if step else "yes")
    picture.text(410, 24, "training")
    picture.text(410, 255, "global_batch_size = 8,  num_steps_per_rollout = 2", "small")
    picture.text(360, 288, "4 × 4 = 8 × 2", "mono", "middle")  # noqa: RUF001
    return picture


def trained_on() -> Drawing:
    """One conversation with a tool: which tokens have a loss."""
    picture = Drawing(720, 240, "A conversation as tokens: only those that the policy wrote are trained on")
    parts = [("prompt", 5, "no"), ("answer with a call", 5, "yes"), ("tool's result", 4, "no"), ("answer", 4, "yes")]
    rows = [("tokens", 44), ("loss mask", 92), ("engine's log-prob", 132), ("advantage", 172)]
    for name, y in rows:
        picture.text(12, y + 20, name, "small")
    x = 138.0
    for name, count, kind in parts:
        width = 31.0 * count
        picture.text(x + width / 2 - 4, 32, name, "small", "middle")
        for _ in range(count):
            picture.box(x, 44, 27, 30, kind)
            trained = kind == "yes"
            picture.text(x + 13, 112, "1" if trained else "0", "mono", "middle")
            picture.text(x + 13, 152, "•" if trained else "", "mono", "middle")
            picture.text(x + 13, 192, "A" if trained else "", "mono", "middle")
            x += 31
        x += 8
    picture.text(138, 226, "response tokens begin after the prompt; the loss is a sum over the 1s", "small")
    return picture


def staleness() -> Drawing:
    """Synchronous and asynchronous runs as lanes."""
    picture = Drawing(
        720, 330, "In a synchronous run engines and trainer take turns; in an asynchronous one they overlap"
    )
    wide = 118

    def lanes(top: int, title: str, engines: list[tuple[int, str]], trainer: list[tuple[int, str]]) -> None:
        picture.text(12, top, title)
        for name, y in (("engines", top + 14), ("trainer", top + 60)):
            picture.text(12, y + 25, name, "small")
        for slot, text in engines:
            picture.box(90 + (wide + 6) * slot, top + 14, wide, 38, "yes", text)
        for slot, text in trainer:
            picture.box(90 + (wide + 6) * slot, top + 60, wide, 38, "no", text)

    lanes(
        24,
        "synchronous: every sample has staleness 0",
        [(0, "rollout 0, v0"), (2, "rollout 1, v1"), (4, "rollout 2, v2")],
        [(1, "train 0 → v1"), (3, "train 1 → v2")],
    )
    lanes(
        180,
        "--async --async-buffer-size 1: rollouts 1, 2, 3 have staleness 1",
        [(0, "rollout 0, v0"), (1, "rollout 1, v0"), (2, "rollout 2, v1"), (3, "rollout 3, v2")],
        [(1, "train 0 → v1"), (2, "train 1 → v2"), (3, "train 2 → v3"), (4, "train 3 → v4")],
    )
    picture.text(90, 306, "v0, v1, …: the version of the weights that generate", "small")
    picture.arrow(90, 316, 700, 316)
    picture.text(12, 320, "time", "small")
    return picture


def exact_tokens() -> Drawing:
    """Tokens that go through text, and tokens that do not."""
    picture = Drawing(720, 290, "Tokens that go through text may come back as other tokens")
    picture.text(12, 24, "through text")
    for x, text, kind in ((12, "engine", "box"), (188, "'4' '2'", "yes"), (330, '"42"', "no"), (472, "'42'", "warn")):
        picture.box(x, 40, 100, 44, kind, text)
    picture.box(610, 40, 98, 44, "box", "trainer")
    for x in (114, 290, 432, 574):
        picture.arrow(x, 62, x + (72 if x == 114 else 38 if x < 574 else 34), 62)
    for x, label in ((238, "generated"), (380, "decoded"), (522, "encoded again")):
        picture.text(x, 102, label, "small", "middle")
    picture.text(472, 122, "a token that was never sampled", "small")
    picture.text(12, 168, "slime")
    picture.box(12, 184, 100, 44, "box", "engine")
    picture.box(188, 184, 100, 44, "yes", "'4' '2'")
    picture.box(610, 184, 98, 44, "box", "trainer")
    picture.arrow(114, 206, 186, 206)
    picture.arrow(290, 206, 608, 206)
    picture.text(238, 246, "generated", "small", "middle")
    picture.text(450, 198, "ids and log-probs, unchanged", "small", "middle")
    picture.arrow(380, 208, 380, 240)
    picture.text(380, 258, "text, for rewards and tools only", "small", "middle")
    return picture


PICTURES = {"batch": batch, "trained-on": trained_on, "staleness": staleness, "exact-tokens": exact_tokens}


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
