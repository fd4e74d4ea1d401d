"""The page of `slime view`: served in parts, or as one file that needs nothing else.

It consists of ES modules that import each other by name; an import map says where each one is. In a file they are data
addresses. Nothing is loaded from anywhere else, which the page's content security policy enforces.
"""

from __future__ import annotations

import base64
import hashlib
import html
from pathlib import Path
from typing import Any

import orjson

from slime_viewer.lines import dumped, readable

STATIC = Path(__file__).with_name("static")
#: name in an import -> file
MODULES = {
    "preact": "vendor/preact.mjs",
    "preact/hooks": "vendor/hooks.mjs",
    "htm": "vendor/htm.mjs",
    **{f"slime/{path.stem}": path.name for path in sorted(STATIC.glob("*.js"))},
}
_PLOT = "vendor/uPlot.iife.min.js"
_STYLES = ("vendor/uPlot.min.css", "style.css", "views.css", "texts.css")
_TYPES = {".js": "text/javascript", ".mjs": "text/javascript", ".css": "text/css"}
_ENTRY = 'import "slime/app";'
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<link rel="icon" href="data:,">
{head}
</head>
<body>
<div id="app"><noscript>This page needs JavaScript; `slime show` prints the same in the terminal.</noscript></div>
{body}
</body>
</html>
"""


def static_files() -> dict[str, tuple[Path, str]]:
    """The files of the page by name, each with its content type."""
    names = [*MODULES.values(), _PLOT, *_STYLES]
    return {name: (STATIC / name, _TYPES[Path(name).suffix]) for name in names}


def _policy(scripts: list[str], **more: str) -> str:
    """A content security policy that allows `scripts` and nothing from outside."""
    rules = {
        "default-src": "'none'",
        "script-src": " ".join(scripts),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        **{name.replace("_", "-"): value for name, value in more.items()},
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def live_page() -> tuple[str, str]:
    """The page that a server sends, and its content security policy. Its files are at `static/`."""
    places = orjson.dumps({"imports": {name: f"./static/{file}" for name, file in MODULES.items()}}).decode()
    head = [f'<link rel="stylesheet" href="static/{name}">' for name in _STYLES]
    head += [f'<script type="importmap">{places}</script>', f'<script src="static/{_PLOT}"></script>']
    # All at once: a browser would ask for a module only when it has read the one that imports it.
    head += [f'<link rel="modulepreload" href="static/{file}">' for file in MODULES.values()]
    body = '<script type="module" src="static/app.js"></script>'
    policy = _policy(
        ["'self'", _hash(places)],
        style_src="'self'",
        connect_src="'self'",
        frame_ancestors="'none'",
        # No text of a sample can become markup, whatever the code does.
        require_trusted_types_for="'script'",
    )
    return _PAGE.format(title="slime", head="\n".join(head), body=body), policy


def static_page(title: str, content: dict[str, Any]) -> str:
    """The page as one file, with the data that it shows."""
    sources = {name: (STATIC / file).read_bytes() for name, file in MODULES.items()}
    addresses = {
        name: f"data:text/javascript;base64,{base64.b64encode(source).decode()}" for name, source in sources.items()
    }
    places = orjson.dumps({"imports": addresses}).decode()
    plot = (STATIC / _PLOT).read_text(encoding="utf-8")
    styles = [(STATIC / name).read_text(encoding="utf-8") for name in _STYLES]
    allowed = ["data:", *map(_hash, (places, plot, _ENTRY))]
    policy = _policy(allowed, style_src=" ".join(map(_hash, styles)), require_trusted_types_for="'script'")
    head = [f'<meta http-equiv="Content-Security-Policy" content="{policy}">']
    head += [f"<style>{style}</style>" for style in styles]
    head += [f'<script type="importmap">{places}</script>', f"<script>{plot}</script>"]
    # Within the element, only these signs could end it or begin another.
    data = dumped(content).decode().replace("<", "\\u003c").replace(">", "\\u003e")
    body = f'<script type="application/json" id="data">{data}</script>\n<script type="module">{_ENTRY}</script>'
    return _PAGE.format(title=html.escape(readable(title)), head="\n".join(head), body=body)
