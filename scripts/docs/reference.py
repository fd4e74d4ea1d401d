"""The pages of the reference, made from the code: every option, every hook, every public name."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from slime.config.flag_table import flags_of
from slime.config.flags import MEGATRON, SGLANG, Flag
from slime.config.run_config import SECTIONS
from slime.config.value_types import Arity
from slime.plugin import hooks as hookspecs
from slime.registry.kinds import KINDS
from slime.registry.plugin_set import survey_plugins

CORE = Path(__file__).parents[2] / "core"
#: module -> what is said about it
LIBRARIES = {
    "slime.kit.chat": "Conversations as exact tokens, chat templates, tools and the parsers of their calls.",
    "slime.kit.sessions": "Conversations as the engine generated them, and an endpoint that speaks OpenAI's API.",
    "slime.kit.sandbox": "Programs with limits, isolated from the machine.",
    "slime.kit.readers": "Rows of prompt files.",
    "slime.kit.context_length": "How many tokens a prompt and a conversation may have.",
    "slime.kit.processes": "Worker processes with deadlines.",
    "slime.kit.models": "Building blocks of model families.",
}
_OPTIONS = """\
# Options of slime

Every option is a flag of `slime train` and a key of the run file, in the table that its heading names:
`--rollout-batch-size 32` is `rollout_batch_size = 32` in `[rollout]`. Flags override the file. A switch takes no value;
`--no-NAME` turns it off. This page is made from the code; `slime train --help WORD` searches the same texts.

Options of estimators, rewards and other components are on [a page of their own](components.md).

## What passes through

[Megatron-core's options](megatron.md) keep their names, and [SGLang's server options](sglang.md) have the prefix
`--sglang-`. Both are read from the installed packages, so an option that a newer release adds is there without a change
to slime. An option that slime sets itself, for example because it follows from the model, is refused with the reason.
An unknown flag is refused with the nearest known one.
"""
_ENGINE = """\
---
search:
  boost: 0.2
---

# Options of {name}

Read from the {name} that was installed where this site was built. {names} For example {example}; in a run file they are
keys of `{table}`. The texts are {name}'s own.
"""
#: characters of a flag or default that stay on one line
_LONG = 36
_SPELLED = {
    MEGATRON: {"names": "The names are Megatron's own.", "example": "`--tensor-model-parallel-size 2`"},
    SGLANG: {"names": "The names have the prefix `--sglang-`.", "example": "`--sglang-mem-fraction-static 0.8`"},
}
_COMPONENTS = """\
# Components and their options

The components that ship with slime, by kind. An option is a flag that begins with the component's slot, or a key of the
slot's table in the run file. `slime plugins` lists those of other packages, `slime plugins show NAME` their options.
"""


def pages() -> dict[str, str]:
    """Path below reference/ -> Markdown."""
    return {
        "options.md": _options_page(),
        "components.md": _components_page(),
        "megatron.md": _engine_page("Megatron-core", MEGATRON),
        "sglang.md": _engine_page("SGLang", SGLANG),
        "hooks.md": _hooks_page(),
        "plugin.md": _module_page("slime.plugin", "What a plugin author imports."),
        "data.md": _module_page("slime.data", "Samples, and base classes of data sources."),
        "testing.md": _module_page("slime.testing", "The contract kit and what tests of plugins need."),
        "kit.md": _kit_page(),
    }


def public_names(module: str) -> list[str]:
    """The names in a module's `__all__`, read from its source."""
    file = CORE / Path(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return [str(name) for name in ast.literal_eval(node.value)]
    raise ValueError(f"{file}: expected a list __all__ of the public names")


# --- options -----------------------------------------------------------------------------------------


def _cell(text: str) -> str:
    """Text of a table's cell: on one line, nothing of it read as Markdown or HTML except code."""
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
    text = re.sub(r"(?<!`)\*", "\\*", text)
    return re.sub(r"\bdocs/([\w/-]+)\.md", r"[\1](../\1.md)", text)


def _code(text: str) -> str:
    """Code in a cell; the style sheet breaks long ones into lines, and no others."""
    return f"`{_cell(text)}`{'{ .long }' * (len(text) > _LONG)}" if text else ""


def _values(flag: Flag) -> str:
    if flag.type.arity is Arity.SWITCH:
        return "switch"
    many = {Arity.ONE: "", Arity.OPTIONAL: ", or nothing", Arity.PAIRS: ", in pairs"}.get(
        flag.type.arity, ", one or more"
    )
    return flag.type.describe() + many


def _flag_rows(flags: Iterable[Flag]) -> list[str]:
    """A table of flags; other spellings stand with the main one."""
    by_name = {flag.name: flag for flag in flags}
    rows = ["| flag | value | default | meaning |", "| --- | --- | --- | --- |"]
    for flag in by_name.values():
        if flag.alias_of in by_name:
            continue
        spelled = [flag.spelled, *(other.spelled for other in by_name.values() if other.alias_of == flag.name)]
        default = {"None": "", "True": "true", "False": "false"}.get(flag.default, flag.default)
        names = "<br>".join(map(_code, spelled))
        rows.append(f"| {names} | {_cell(_values(flag))} | {_code(default)} | {_cell(flag.help)} |")
    return rows


def _options_page() -> str:
    lines = [_OPTIONS]
    for section, options in SECTIONS.items():
        lines += [
            f"## [{section}]",
            "",
            inspect.cleandoc(options.__doc__ or ""),
            "",
            *_flag_rows(flags_of(section)),
            "",
        ]
    return "\n".join(lines)


def _engine_page(name: str, target: str) -> str:
    head = _ENGINE.format(name=name, table=f"[{target}]", **_SPELLED[target])
    return "\n".join([head, *_flag_rows(flags_of(target))])


def _default(value: object) -> str:
    """A default as it is written in a run file."""
    if value is None or value in ((), [], {}, ""):
        return ""
    return _code(str(value).lower() if isinstance(value, bool) else str(value))


def _components_page() -> str:
    lines = [_COMPONENTS]
    registered = survey_plugins().registered
    for kind, row in KINDS.items():
        lines += [f"## {kind.replace('_', ' ').capitalize()}", ""]
        for component in (one for one in registered if one.kind == kind):
            lines += [f"### `{component.name}` {{ #{kind}-{component.name} }}", "", _cell(component.spec.summary), ""]
            fields = component.spec.options.model_fields
            if not fields:
                continue
            lines += ["| option | default | meaning |", "| --- | --- | --- |"]
            for name, info in fields.items():
                flag = f"--{row.slots[0].prefixes[0]}.{name.replace('_', '-')}"
                default = (
                    "required" if info.is_required() else f"`{_cell(str(info.get_default(call_default_factory=True)))}`"
                )
                lines.append(f"| `{flag}` | {default} | {_cell(info.description or '')} |")
            lines.append("")
    return "\n".join(lines)


# --- Python ------------------------------------------------------------------------------------------


def hooks() -> Mapping[str, str]:
    """Name of every hook -> its signature."""
    return {
        name: f"{name}{inspect.signature(hook)}"
        for name, hook in vars(hookspecs).items()
        if name.startswith("slime_") and callable(hook)
    }


def _hooks_page() -> str:
    lines = [
        "# Hooks",
        "",
        inspect.cleandoc(hookspecs.__doc__ or "").partition("\n\n")[2],
        "",
        "[Plugins](../plugins/index.md) explains when each is called, and walks through a plugin of each kind.",
        "",
    ]
    for name, signature in hooks().items():
        text = inspect.cleandoc(getattr(hookspecs, name).__doc__ or "")
        lines += [f"## `{name}`", "", "```python", signature, "```", "", text, ""]
    return "\n".join(lines)


def _names(module: str) -> list[str]:
    return [line for name in public_names(module) for line in (f"::: {module}.{name}", "")]


def _module_page(module: str, about: str) -> str:
    return "\n".join([f"# `{module}`", "", about, "", *_names(module)])


def _kit_page() -> str:
    lines = [
        "# `slime.kit`",
        "",
        "Libraries for plugin authors, beyond `slime.plugin`. The loop works without most of them.",
        "",
    ]
    for module, about in LIBRARIES.items():
        lines += [f"## `{module}`", "", about, ""]
        for name in public_names(module):
            lines += [f"::: {module}.{name}", "    options:", "      heading_level: 3", ""]
    return "\n".join(lines)
