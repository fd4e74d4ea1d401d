"""Rules of the architecture: allowed imports, names the kernel must not contain, and file size."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE = ROOT / "core" / "slime"
PLUGIN_PACKAGES = sorted(path for path in ROOT.glob("plugins/*/slime_*") if path.is_dir())
SOURCES = sorted(
    path
    for folder in ("core", "plugins", "tests", "proofs", "examples", "benchmarks", "scripts")
    for path in (ROOT / folder).rglob("*.py")
)
CORE_SOURCES = sorted(CORE.rglob("*.py"))

#: the bottom: the data, what is raised, and the face for authors of plugins
_BASE = frozenset({"types", "errors", "plugin", "shops"})
_CONFIGURED = _BASE | {"registry", "config"}
_ENGINES = _CONFIGURED | {"observe", "platform", "kit.readers", "kit.processes"}
#: Folder (or module) -> the folders that it may import at run time. Imports under `if TYPE_CHECKING` are not checked,
#: because they load nothing. `registry` may not import `config`, so that plugins can be loaded without a run.
KERNEL: dict[str, frozenset[str]] = {
    "types": frozenset(),
    "platform": frozenset({"errors"}),
    "shops": frozenset({"errors"}),
    "errors": frozenset(),
    "plugin": frozenset({"types", "errors"}),
    "registry": _BASE,
    "config": _BASE | {"registry"},
    "observe": _CONFIGURED,
    "engine": _ENGINES,
    "weights": _ENGINES | {"engine"},
    "rollout": _CONFIGURED | {"observe", "engine", "kit.readers", "kit.processes", "kit.context_length"},
    "train": _ENGINES | {"engine", "weights", "rollout"},
    "run": _ENGINES | {"engine", "weights", "train", "rollout", "loop"},
    "loop": frozenset(),
}
KIT: dict[str, frozenset[str]] = {
    "kit.processes": _BASE,
    "kit.sandbox": _BASE,
    "kit.models": _BASE,
    "kit.chat": _BASE | {"registry", "platform", "kit.readers"},
    "kit.sessions": _BASE | {"kit.chat"},
    "kit.context_length": _BASE,
    "kit.readers": _BASE | {"kit.processes", "kit.context_length"},
    "data": frozenset({"types", "kit.readers"}),
    "testing": _CONFIGURED | {"kit.chat", "weights", "train", "rollout", "engine"},
}
EDGE: dict[str, frozenset[str]] = {
    "utils": frozenset({"types"}),
    "compat": _CONFIGURED | {"kit.chat", "kit.sessions", "kit.readers", "kit.context_length"},
    "cli": frozenset(KERNEL) | frozenset(KIT) | {"compat"},
}
ALLOWED = KERNEL | KIT | EDGE
#: what slime's own plugins may use of slime: what a third party may
PUBLIC = frozenset(
    {
        "plugin",
        "types",
        "errors",
        "platform",
        "shops",
        "data",
        "kit.context_length",
        "kit.sandbox",
        "kit.chat",
        "kit.sessions",
        "kit.readers",
        "kit.processes",
        "kit.models",
    }
)

#: what a shop may use of the street besides
SHOPS: dict[str, frozenset[str]] = {
    "slime_viewer": frozenset(
        {"cli.arguments", "cli.output", "cli.text_layout", "observe.metrics", "observe.terminal", "registry.plugin_set"}
    ),
    # subclasses of the trainer's layers
    "slime_fused": frozenset({"train.attention", "train.experts", "train.layers", "train.output_layer"}),
    # the run that is launched, and its checks; the cluster that it would join
    "slime_launch": frozenset(
        {
            "config",
            "config.assemble",
            "config.demand",
            "config.run_file",
            "cli.arguments",
            "cli.output",
            "cli.run_folders",
            "cli.train",
            "run.ray_session",
        }
    ),
    # formats of the weights that engines get, and the trainer's gap to them
    "slime_quantised": frozenset({"weights.fp8", "weights.verify", "weights.shards"}),
    "slime_planner": frozenset(
        {
            "config",
            "config.assemble",
            # `slime plan`: the checks of a layout
            "config.layer_backend",
            "config.megatron_checks",
            "registry.plugin_set",
            "observe.sizes",
            # predictions: the arithmetic of what they predict
            "config.defaults",
            "weights.lora",
            "weights.operations",
            # `slime train --from-recipe`: slime's flags, and the tables of other frameworks' names
            "config.flag_table",
            "config.flags",
            "config.value_types",
            "registry.original_names",
            # `slime doctor`
            "engine.ports",
            "cli.output",
            "cli.text_layout",
            # `slime convert`: checkpoints and model folders
            "cli.eval",
            "cli.preflight",
            "cli.preflight_model",
            "cli.run_folders",
            "cli.train",
            "run.checkpoint.files",
            "run.checkpoint.read",
            "run.entry",
            "train.checkpoint_reader",
            "weights.hf_config",
            "weights.hf_load",
            "weights.hf_save",
            "weights.mapping",
            "weights.models",
            "weights.shards",
            "weights.stored",
        }
    ),
}

HEAVY = frozenset({"torch", "ray", "sglang", "sglang_router", "megatron", "transformers"})
#: folders that import none of those until they need them
LIGHT = frozenset(
    {
        "types",
        "errors",
        "utils",
        "plugin",
        "platform",
        "shops",
        "testing",
        "registry",
        "compat",
        "kit",
        "config",
        "data",
        "cli",
        "observe",
        "rollout",
        "loop",
    }
)
LIGHT_FILES = [path for path in CORE_SOURCES if path.relative_to(CORE).parts[0].removesuffix(".py") in LIGHT] + [
    path for package in PLUGIN_PACKAGES for path in sorted(package.glob("*.py")) if path.stem in ("__init__", "options")
]

#: names of algorithms, rewards and model families, which the kernel must not know
NAMES = re.compile(
    r"(?<![a-z])(grpo|gspo|cispo|dapo|rloo|ppo|reinforce|exact_match"
    r"|qwen|llama|glm|deepseek|kimi|moonlight|mistral|gemma)(?![a-z])",
    re.IGNORECASE,
)
#: where in the kernel such names may stand, with the reason
NAMES_ALLOWED = {
    "kit.models": "cites papers, and names a scaling of rotary positions as config.json does",
}

#: public names that several classes have, with the reason
SHARED_CLASS_NAMES = {
    "Counts": "of tokens in a session, and of what the page shows",
    "Panel": "the protocol of plugins, and the page's own panels, which follow it",
    "PromptFile": "the file, and what a checkpoint says of it",
    "RewardModel": "the protocol of rewards, and the reward that asks a model",
}

#: classes of libraries that comments name, and one of an example
FOREIGN_CLASS_NAMES = frozenset(
    {"AsyncRequest", "PeftModel", "RotaryEmbedding", "RouterReplay", "Fp8Config", "Fp8LinearMethod", "Fp8MoEMethod"}
    | {"MyReward"}
)

MAX_LINES = 500


def folder_of(path: Path) -> str:
    return folder_named(path.relative_to(CORE).with_suffix("").parts)


def folder_named(parts: Sequence[str]) -> str:
    """The folder of the module `slime.PARTS`; in the kit, the subfolder."""
    return ".".join(parts[:2]) if parts[0] == "kit" else parts[0]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and any(
        isinstance(part, ast.Name | ast.Attribute) and "TYPE_CHECKING" in ast.unparse(part)
        for part in ast.walk(node.test)
    )


def imports(node: ast.AST, *, module_level: bool = False) -> Iterator[str]:
    """Modules that the code below `node` imports when it runs (or, `module_level`, when it is imported)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = child.module or ""
            yield from (f"{module}.{alias.name}" for alias in child.names)
        elif is_type_checking(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield from imports(other, module_level=module_level)
        elif not (module_level and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield from imports(child, module_level=module_level)


@cache
def imported(path: Path) -> tuple[str, ...]:
    """Modules that the code of a file imports when it runs."""
    return tuple(imports(ast.parse(path.read_text(encoding="utf-8"))))


def imported_folders(path: Path) -> set[str]:
    """Folders of the kernel that a file imports."""
    folders = {path.stem if path.is_file() else path.name for path in CORE.iterdir()}
    parts = (name.split(".") for name in imported(path))
    return {folder_named(part[1:]) for part in parts if part[0] == "slime" and len(part) > 1 and part[1] in folders}


def imported_modules(path: Path) -> set[str]:
    """Modules of slime that a file imports, without `slime.`; a package if a name of its own is imported."""
    found = set()
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "slime":
            while parts[1:] and not is_module(parts[1:]):
                parts.pop()
            found.add(".".join(parts[1:]))
    return found - {""}


def is_module(parts: Sequence[str]) -> bool:
    path = CORE.joinpath(*parts)
    return path.is_dir() or path.with_suffix(".py").is_file()


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_folder_is_in_the_table() -> None:
    folders = {folder_of(path) for path in CORE_SOURCES} - {"__init__", "kit.__init__"}
    assert folders <= set(ALLOWED), f"folders missing in ALLOWED: {sorted(folders - set(ALLOWED))}"


def test_the_table_has_no_cycles() -> None:
    left = dict(ALLOWED)
    while left:
        free = [folder for folder, needs in left.items() if not needs & set(left)]
        assert free, f"these folders import each other in a circle: {sorted(left)}"
        for folder in free:
            del left[folder]


def test_imports_follow_the_table() -> None:
    wrong = [
        f"{relative(path)} ({folder_of(path)}) imports {folder}"
        for path in CORE_SOURCES
        for folder in sorted(imported_folders(path) - {folder_of(path)} - ALLOWED.get(folder_of(path), frozenset()))
    ]
    assert wrong == []


def test_core_imports_no_plugin_package() -> None:
    packages = {path.name for path in PLUGIN_PACKAGES}
    assert len(packages) == 14
    wrong = [
        f"{relative(path)} imports {name}"
        for path in CORE_SOURCES
        for name in imported(path)
        if name.split(".")[0] in packages
    ]
    assert wrong == []


def test_first_party_plugins_use_only_public_modules() -> None:
    wrong = [
        f"{relative(path)} imports {folder}"
        for package in PLUGIN_PACKAGES
        for path in sorted(package.rglob("*.py"))
        if package.name not in SHOPS
        for folder in sorted(imported_folders(path) - PUBLIC)
    ]
    assert wrong == []


def test_shops_use_only_what_the_table_names() -> None:
    packages = {package.name: package for package in PLUGIN_PACKAGES}
    wrong = [
        f"{relative(path)} imports slime.{module}"
        for shop, named in SHOPS.items()
        for path in sorted(packages[shop].rglob("*.py"))
        for module in sorted(imported_modules(path) - named)
        if folder_named(module.split(".")) not in PUBLIC
    ]
    assert wrong == []


def test_the_kernel_names_no_algorithm_reward_or_model_family() -> None:
    wrong = [
        f"{relative(path)}:{number}: {match.group()}"
        for path in CORE_SOURCES
        if folder_of(path) not in NAMES_ALLOWED and str(path.relative_to(CORE)) not in NAMES_ALLOWED
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for match in NAMES.finditer(line)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "text", ["--advantage-estimator grpo", "GRPO", "DAPO", "reinforce_plus_plus", "qwen3", "is_llama"]
)
def test_the_name_search_finds_forbidden_names(text: str) -> None:
    assert NAMES.search(text)


@pytest.mark.parametrize("text", ["reinforcement learning", "support", "supported", "appointment"])
def test_the_name_search_ignores_ordinary_words(text: str) -> None:
    assert not NAMES.search(text)


def test_light_folders_import_nothing_heavy_at_module_level() -> None:
    wrong = [
        f"{relative(path)} imports {name}"
        for path in LIGHT_FILES
        for name in imports(ast.parse(path.read_text(encoding="utf-8")), module_level=True)
        if name.split(".")[0] in HEAVY
    ]
    assert wrong == []


def test_every_package_has_a_docstring() -> None:
    packages = [path for path in SOURCES if path.name == "__init__.py" and not path.is_relative_to(ROOT / "tests")]
    assert [relative(p) for p in packages if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))] == []


def test_every_folder_of_code_is_a_package() -> None:
    folders = {path.parent for root in (CORE, *PLUGIN_PACKAGES) for path in root.rglob("*.py")}
    assert [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_no_file_is_too_long() -> None:
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def test_a_class_name_means_one_thing() -> None:
    places: dict[str, set[str]] = {}
    for path in [*CORE_SOURCES, *(path for package in PLUGIN_PACKAGES for path in package.rglob("*.py"))]:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(relative(path))
    shared = {name: found for name, found in places.items() if len(found) > 1 and name not in SHARED_CLASS_NAMES}
    assert shared == {}, "rename one, or say in SHARED_CLASS_NAMES why both have the name"


def test_classes_in_backticks_exist() -> None:
    """Docstrings and comments name classes in backticks. The name of one that is gone is nowhere in the code."""
    code = [path for path in SOURCES if relative(path).startswith(("core/", "plugins/", "benchmarks/", "examples/"))]
    texts = {relative(path): path.read_text(encoding="utf-8") for path in code}
    known = FOREIGN_CLASS_NAMES.union(*map(words_outside_backticks, texts.values()))
    assert [f"{path}: {name}" for path, text in texts.items() for name in classes_told(text) if name not in known] == []


def words_outside_backticks(text: str) -> list[str]:
    return re.findall(r"\b[A-Z]\w+", re.sub(r"`[^`\n]+`", "", text))


def classes_told(text: str) -> list[str]:
    """Names of several words in backticks, also with their module before them or a member behind."""
    return re.findall(r"`(?:\w+\.)*([A-Z][a-z0-9]+[A-Z][a-z]\w*)", text)


def test_the_search_for_class_names_reads_backticks() -> None:
    text = "`GoneAway`, `gone.AwayToo.ever()`, SeenHere, `Gone`, `VmRSS`"
    assert classes_told(text) == ["GoneAway", "AwayToo"]
    assert words_outside_backticks(text) == ["SeenHere"]


def test_benchmarks_and_examples_import_existing_names() -> None:
    """mypy does not read them, and most benchmarks run in no test."""
    wrong = [
        f"{relative(path)} imports {node.module}.{alias.name}"
        for folder in ("benchmarks", "examples")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "slime"
        for alias in node.names
        if not has_name(node.module or "", alias.name)
    ]
    assert wrong == []


def has_name(module: str, name: str) -> bool:
    """Whether a module of slime defines or imports `name` at module level, or has such a submodule."""
    path = CORE.parent.joinpath(*module.split("."))
    if any((path / name).with_suffix(suffix).exists() for suffix in ("", ".py")):
        return True
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return False
    body = ast.parse(file.read_text(encoding="utf-8")).body
    typed = [node for branch in body if isinstance(branch, ast.If) and is_type_checking(branch) for node in branch.body]
    for node in [*body, *typed]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == name:
            return True
        if isinstance(node, ast.Import | ast.ImportFrom) and name in {a.asname or a.name for a in node.names}:
            return True
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(part, ast.Name) and part.id == name for t in targets for part in ast.walk(t)):
                return True
    return False
