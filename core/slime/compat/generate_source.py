"""What a user's generate function does about tokens, as far as its source shows before a run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from slime.compat.generators import needs_log_probs
from slime.config import RunConfig
from slime.registry.component import Component, LocalComponent

#: names whose use says that tokens come from the policy, or that the function sets them
_KEEPS_TOKENS = frozenset(("policy", "generate_single", "tokens", "rollout_log_probs"))
_TEXT_ALONE = (
    "neither has the parameter `policy`, nor calls slime.kit.sessions.generate_single, nor sets Sample.tokens: what it"
    " returns is text, which is tokenized"
)
_INSTEAD = (
    "Ask the policy with generate_single, or keep the tokens and log_probs of `policy` (docs: Functions given by path)"
)


def text_note(generator: Component, config: RunConfig) -> str | None:
    """A note about a generate function that returns text alone, or None."""
    if not isinstance(generator, LocalComponent):
        return None
    function = generator.function
    try:
        tree = ast.parse(function.path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # the probe has said so
        return None
    used, defined = set(_names(tree)), set(_defined(tree))
    # What is not certain is left to the run: a file of the user's beside it may do anything.
    if (
        function.reference.name not in defined
        or not _KEEPS_TOKENS.isdisjoint(used - defined)
        or any(_own_imports(tree, function.path.parent))
    ):
        return None
    if needed := needs_log_probs(config):
        return (
            f"{generator.title} {_TEXT_ALONE}, without the engine's log-probs, which {needed} needs: the run fails with"
            f" its first samples, unless what the function calls sets them. {_INSTEAD}"
        )
    return f"{generator.title} {_TEXT_ALONE}: the tokens trained on may differ from those sampled. {_INSTEAD}"


def _defined(tree: ast.Module) -> Iterator[str]:
    """What the file defines at its top level."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _names(tree: ast.AST) -> Iterator[str]:
    """Every name that the source uses: variables, attributes, parameters, imports and texts."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg | ast.keyword):
            yield str(node.arg)
        elif isinstance(node, ast.alias):
            yield node.name.rpartition(".")[2]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # setattr(sample, "tokens", ...)
            yield node.value


def _own_imports(tree: ast.AST, folder: Path) -> Iterator[str]:
    """Imports of files beside it, which may do anything."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.module or "."
        elif isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in (module.partition(".")[0] for module in modules):
                if (folder / f"{name}.py").is_file() or (folder / name).is_dir():
                    yield name
