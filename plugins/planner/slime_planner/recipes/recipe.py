"""A recipe: whose it is, and its options as written there. From shell scripts, YAML files and scripts of TRL."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from slime.config.flag_table import find_flag
from slime.errors import ConfigError
from slime.registry.original_names import original_names
from slime_planner.recipes.shell import read_script

Framework = Literal["TRL", "verl", "OpenRLHF", "THUDM's slime"]
FRAMEWORKS: tuple[Framework, ...] = ("TRL", "verl", "OpenRLHF", "THUDM's slime")
#: words that name the program, by framework
_PROGRAMS: dict[Framework, str] = {
    "TRL": r"trl|trl\.scripts\.\w+",
    "verl": r"verl\.\S+|\S*main_ppo(\.py)?",
    "OpenRLHF": r"openrlhf\.cli\.\w+",
    "THUDM's slime": r"(\S*/)?train(_async)?\.py|slime",
}
#: parts of TRL, of which only the first is a reinforcement-learning run
_TRL_PARTS = ("grpo", "sft", "dpo", "kto", "reward", "rloo")
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_LARGEST = 1 << 20


@dataclass(frozen=True)
class Option:
    """An option and its values, as the recipe has them."""

    name: str
    values: tuple[str, ...]
    stated: bool = True  #: whether the recipe says so; otherwise it is the framework's default

    @property
    def value(self) -> str:
        """Its values as one text."""
        return " ".join(self.values)

    @property
    def is_on(self) -> bool:
        """Whether a switch is on."""
        return self.value.lower() not in ("false", "0", "no", "off", "none", "null")


@dataclass
class Recipe:
    """A run of another framework."""

    framework: Framework
    path: Path
    options: list[Option] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    program: tuple[str, ...] = ()  #: the words of the command before its options
    processes: int = 1  #: training processes that its launcher starts


def read_recipe(path: Path) -> Recipe:
    """Read a recipe. Raises `ConfigError` if the file is not one."""
    text = _text(path)
    if path.suffix == ".toml":
        raise ConfigError(f"--from-recipe {path}: this is a run file of slime already: slime train {path}")
    if path.suffix in (".yaml", ".yml"):
        options = _of_yaml(path, text)
        return _checked(Recipe(_most_likely(path, options), path, options))
    if path.suffix == ".py":
        return _checked(_of_python(path, text))
    return _checked(_of_shell(path, text))


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            raise ConfigError(
                f"--from-recipe {path}: expected a file: a shell script, YAML, or a script with GRPOConfig"
            )
        if path.stat().st_size > _LARGEST:
            raise ConfigError(f"--from-recipe {path}: a file of more than 1 MiB is no script")
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--from-recipe {path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ConfigError(f"--from-recipe {path} cannot be read: {error.strerror}") from None


def _checked(recipe: Recipe) -> Recipe:
    """The recipe, its options under the names of the tables; of an option that is there twice, the last."""
    other = {part for part in _TRL_PARTS[1:] for word in recipe.program if word in (part, f"trl.scripts.{part}")}
    if recipe.framework == "TRL" and other:
        raise ConfigError(f"--from-recipe {recipe.path}: `trl {min(other)}` is not read, only `trl grpo`")
    if recipe.framework == "THUDM's slime":
        return recipe
    kept = {
        name: replace(option, name=name)
        for option in recipe.options
        for name in [known_name(option.name, recipe.framework)]
    }
    return replace(recipe, options=list(kept.values()))


def known_name(name: str, framework: Framework) -> str:
    """The name under which the tables have an option: with underscores, and in OpenRLHF before its names had dots."""
    from slime_planner.recipes.work import renamed

    return renamed(framework).get(name, name if framework == "verl" else name.replace("-", "_"))


def _of_shell(path: Path, text: str) -> Recipe:
    script = read_script(path, text)
    found: list[tuple[int, Recipe]] = []
    for command in script.commands:
        for framework in FRAMEWORKS:
            first, program = _options_begin(command, framework)
            if first is None:
                continue
            options = [*_of_words(command[first:], framework, path)]
            score = _known(options, framework) + (1000 if program and options else 0)
            recipe = Recipe(framework, path, options, [*script.notes], tuple(command[:first]))
            recipe.processes = _processes(command[:first])
            found.append((score, recipe))
    if not found or max(score for score, _ in found) == 0:
        raise ConfigError(
            f"--from-recipe {path}: no command with options of {', '.join(FRAMEWORKS[:-1])} or {FRAMEWORKS[-1]}"
        )
    return max(found, key=lambda one: one[0])[1]


def _options_begin(words: Sequence[str], framework: Framework) -> tuple[int | None, bool]:
    """The index of the first word after the program, and whether the program's name is the framework's."""
    for index, word in enumerate(words):
        if re.fullmatch(_PROGRAMS[framework], word):
            after = index + 1
            while after < len(words) and words[after] in (*_TRL_PARTS, "train"):
                after += 1
            return after, True
    scripts = [index for index, word in enumerate(words) if word.endswith(".py")]
    return (scripts[-1] + 1 if scripts else None), False


def _processes(words: Sequence[str]) -> int:
    """How many processes `accelerate launch` or `torchrun` starts."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.lstrip("-").replace("-", "_") in ("num_processes", "nproc_per_node"):
            number = value if equals else "".join(words[index + 1 : index + 2])
            return int(number) if number.isdigit() and int(number) else 1
    return 1


def _of_words(words: Sequence[str], framework: Framework, path: Path) -> Iterator[Option]:
    """The options of a command line."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            values = [value] if equals else []
            while not equals and rest and not re.match(r"--\w", rest[0]) and framework != "verl":
                values.append(rest.pop(0))
            if framework == "TRL" and name == "config":
                yield from _of_yaml(file := path.parent / " ".join(values), _text(file))
            else:
                yield Option(name, tuple(values))
        elif framework == "verl" and (match := _OVERRIDE.fullmatch(word)) is not None:
            yield Option(match[1], tuple(_of_hydra(match[2])))


def _of_hydra(value: str) -> list[str]:
    """The words of a value of Hydra: a list has several."""
    bare = value.strip()
    if bare.startswith("[") and bare.endswith("]"):
        return [one.strip().strip("'\"") for one in bare[1:-1].split(",") if one.strip()]
    return [bare.strip("'\"")]


def _of_yaml(path: Path, text: str) -> list[Option]:
    import yaml

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--from-recipe {path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict) or not tree:
        raise ConfigError(f"--from-recipe {path}: expected YAML with options by name, got {type(tree).__name__}")
    return [*_flat(tree, "")]


def _flat(tree: dict[Any, Any], before: str) -> Iterator[Option]:
    for key, value in tree.items():
        name = f"{before}{key}"
        if isinstance(value, dict) and value and before.count(".") < 8:
            yield from _flat(value, f"{name}.")
        elif value is not None:
            yield Option(name, tuple(map(_word, value)) if isinstance(value, list) else (_word(value),))


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _of_python(path: Path, text: str) -> Recipe:
    """The keyword arguments of `GRPOConfig` and `GRPOTrainer` in a script of TRL."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"--from-recipe {path} is not valid Python: {error}") from None
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    constants = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    recipe = Recipe("TRL", path)
    for call in ast.walk(tree):
        name = ast.unparse(call.func).rpartition(".")[2] if isinstance(call, ast.Call) else ""
        if not isinstance(call, ast.Call) or name not in ("GRPOConfig", "GRPOTrainer", "LoraConfig"):
            continue
        for keyword in call.keywords:
            if keyword.arg is None or (name == "GRPOTrainer" and keyword.arg in ("args", "processing_class")):
                continue
            option = {"r": "lora_r", "target_modules": "lora_target_modules"}.get(keyword.arg, keyword.arg)
            values = _literal(keyword.value, constants, own, path)
            if values is not None:
                recipe.options.append(Option(option, values))
            elif option != "peft_config":
                recipe.notes.append(f"{option} = {ast.unparse(keyword.value)}: only Python knows its value")
    if not recipe.options:
        raise ConfigError(f"--from-recipe {path}: no GRPOConfig(...) or GRPOTrainer(...) of TRL is in it")
    return recipe


def _literal(node: ast.expr, constants: dict[str, ast.expr], own: Iterable[str], path: Path) -> tuple[str, ...] | None:
    """The value of an expression as words; None if it is no literal and no function of the file."""
    if isinstance(node, ast.Name):
        if node.id in own:
            return (f"{path}:{node.id}",)
        return _literal(constants[node.id], {}, own, path) if node.id in constants else None
    if isinstance(node, ast.List | ast.Tuple):
        found = [_literal(one, constants, own, path) for one in node.elts]
        return None if None in found else tuple(word for words in found if words for word in words)
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "load_dataset" and node.args:
        return _literal(node.args[0], constants, own, path)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return None
    return () if value is None else (_word(value),)


def _most_likely(path: Path, options: Sequence[Option]) -> Framework:
    scores = {framework: _known(options, framework) for framework in FRAMEWORKS}
    best = max(FRAMEWORKS, key=lambda framework: scores[framework])
    if scores[best] == 0:
        raise ConfigError(f"--from-recipe {path}: none of its options is one of {', '.join(FRAMEWORKS)}")
    return best


def _known(options: Iterable[Option], framework: Framework) -> int:
    """How many of the options are the framework's."""
    if framework == "THUDM's slime":
        return sum(find_flag(option.name) is not None for option in options)
    return sum(known_name(option.name, framework) in original_names()[framework] for option in options)
