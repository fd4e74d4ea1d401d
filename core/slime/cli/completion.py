"""`slime completion`: what a shell needs to complete commands, flags and their choices, from their declarations."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slime.cli.main import COMMAND_GROUP, COMMANDS, module_of
from slime.cli.output import write
from slime.cli.train_help import choices_of
from slime.config.flag_table import flags_of
from slime.config.flags import MEGATRON, SGLANG
from slime.config.run_config import SECTIONS
from slime.errors import ConfigError, SlimeError, did_you_mean
from slime.registry.kinds import KINDS
from slime.registry.plugin_set import survey_plugins

_HELP = """\
usage: slime completion bash|zsh|fish

Print a script with which the shell completes commands, flags and their choices.

Write it where the shell looks for such scripts:
  bash    ~/.local/share/bash-completion/completions/slime
  zsh     ~/.zfunc/_slime; and in ~/.zshrc, before compinit: fpath+=(~/.zfunc)
  fish    ~/.config/fish/completions/slime.fish

It knows the plugins that are installed when it is printed: print it again after
installing others.
"""
#: an option of a help text: at the beginning of its line, perhaps after a short one
_OPTION = re.compile(r"^  (?:-\w, )?(--[\w-]+)(.*)$", re.MULTILINE)
#: characters of a description
_LONGEST = 70


@dataclass(frozen=True)
class _Command:
    """What may follow a command."""

    summary: str
    #: option -> what it does
    options: Mapping[str, str]
    #: words of its own, such as `show` of `slime plugins show`
    words: Sequence[str]
    #: whether it takes the flags of a run besides
    takes_flags: bool


@dataclass(frozen=True)
class _Declared:
    """Everything that is completed."""

    commands: Mapping[str, _Command]
    #: slime's own flags and its components', then the engines'; flag -> what it does
    flags: Mapping[str, str]
    engine_flags: Mapping[str, str]
    #: flag -> its values
    choices: Mapping[str, Sequence[str]]


def run(argv: Sequence[str]) -> int:
    """The command; returns its exit code. Raises `ConfigError`."""
    if not argv or {"-h", "--help"} & set(argv):
        write(_HELP)
        return 0 if argv else 2
    if len(argv) > 1 or argv[0] not in _SCRIPTS:
        shells = ", ".join(_SCRIPTS)
        raise ConfigError(
            f"slime completion takes one of {shells}, got {shlex.join(argv)!r}.{did_you_mean(argv[0], _SCRIPTS)}"
        )
    print("\n".join(_SCRIPTS[argv[0]](_declared())))
    return 0


def _declared() -> _Declared:
    others = {entry.name: "of another package" for entry in importlib.metadata.entry_points(group=COMMAND_GROUP)}
    summaries = {name: summary for name, (_, summary) in COMMANDS.items()} | others
    commands = {name: _command(name, summary) for name, summary in summaries.items()}
    own, choices = {}, {}
    for section in SECTIONS:
        for flag in flags_of(section):
            if not flag.file_only:
                own[flag.spelled] = flag.help
                choices[flag.spelled] = choices_of(flag)
    for component in survey_plugins().registered:
        for slot in KINDS[component.kind].slots:
            own |= {
                f"--{slot.prefixes[0]}.{name.replace('_', '-')}": info.description or ""
                for name, info in component.spec.options.model_fields.items()
            }
    engines = {flag.spelled: flag.help for target in (MEGATRON, SGLANG) for flag in flags_of(target)}
    choices |= {flag.spelled: choices_of(flag) for target in (MEGATRON, SGLANG) for flag in flags_of(target)}
    return _Declared(commands, own, engines, {flag: values for flag, values in choices.items() if values})


def _command(name: str, summary: str) -> _Command:
    """A command as its help text has it: that is where the options of those without flags of a run are declared."""
    printed = io.StringIO()
    try:
        # The parser of another package's command may end the process when it has printed its help.
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            module_of(name).run(["--help"])
    except SlimeError:  # a shop that is not installed
        return _Command(summary, {"--help": ""}, (), False)
    text = printed.getvalue()
    usage = text.partition("\n\n")[0]
    options = dict.fromkeys(re.findall(r"(?<=[ \[])--[a-z][\w-]+", usage), "")
    for match in _OPTION.finditer(text):
        options[match[1]] = match[2].partition("  ")[2].strip()
        # A line may have several: `--partition, --account, --time`.
        options |= dict.fromkeys(re.findall(r"(?<=[,;] )--[\w-]+", match[2]), "")
    options.pop("--flag", None)
    words = dict.fromkeys(re.findall(rf"slime {re.escape(name)} ([a-z]+(?:\|[a-z]+)*)\b", usage))
    return _Command(
        summary,
        {"--help": "describe this command", **(_TRAIN if name == "train" else options)},
        [word for one in words for word in one.split("|")],
        name == "train" or "[--flag value]" in usage,
    )


def _short(text: str) -> str:
    """The first words of a description, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1].rpartition(' ')[0]}…"


#: the options of `slime train` that are no flags of a run
_TRAIN = {
    "--resume": "continue a run",
    "--dry-run": "check what is there and print the plan",
    "--from-recipe": "print the run of another framework's script as a run file",
}


def _words(words: Iterable[str]) -> str:
    return shlex.quote(" ".join(words))


# --- shells ------------------------------------------------------------------------------------------


def _bash(declared: _Declared) -> Iterator[str]:
    yield "_slime() {"
    yield "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} flags= more= words="
    yield f"    local run={_words(declared.flags)}"
    yield f"    local engines={_words(declared.engine_flags)}"
    yield "    COMPREPLY=()"
    yield "    if ((COMP_CWORD == 1)); then"
    yield f'        COMPREPLY=($(compgen -W {_words([*declared.commands, "--help", "--version"])} -- "$word"))'
    yield "        return"
    yield "    fi"
    yield "    case $before in"
    for flag, values in declared.choices.items():
        yield f'        {flag}) COMPREPLY=($(compgen -W {_words(values)} -- "$word")); return ;;'
    yield "    esac"
    yield "    case ${COMP_WORDS[1]} in"
    for name, command in declared.commands.items():
        run, more = ('"$run "', " more=$engines") if command.takes_flags else ("", "")
        yield f"        {name}) flags={run}{_words(command.options)} words={_words(command.words)}{more} ;;"
    yield "    esac"
    yield "    if [[ $word == -* ]]; then"
    yield '        COMPREPLY=($(compgen -W "$flags" -- "$word"))'
    yield "        # The engines have hundreds of flags: only where none of slime's own begins so."
    yield '        ((${#COMPREPLY[@]})) || COMPREPLY=($(compgen -W "$more" -- "$word"))'
    yield "    elif ((COMP_CWORD == 2)); then"
    yield '        COMPREPLY=($(compgen -W "$words" -- "$word"))'
    yield "    fi"
    yield "}"
    yield "complete -o default -F _slime slime"


def _zsh(declared: _Declared) -> Iterator[str]:
    def described(options: Mapping[str, str]) -> str:
        return " ".join(shlex.quote(f"{name}:{_short(text)}" if text else name) for name, text in options.items())

    yield "#compdef slime"
    yield "_slime() {"
    yield "    local -a found more run engines"
    yield "    if ((CURRENT == 2)); then"
    commands = {name: command.summary for name, command in declared.commands.items()}
    yield f"        found=({described(commands)})"
    yield "        _describe command found"
    yield "        return"
    yield "    fi"
    yield "    case $words[CURRENT-1] in"
    for flag, values in declared.choices.items():
        yield f"        {flag}) compadd -- {' '.join(map(shlex.quote, values))}; return ;;"
    yield "    esac"
    yield f"    run=({described(declared.flags)})"
    yield f"    engines=({described(declared.engine_flags)})"
    yield "    case $words[2] in"
    for name, command in declared.commands.items():
        both = "$run " if command.takes_flags else ""
        more = " more=($engines)" if command.takes_flags else ""
        words = f" compadd -- {' '.join(command.words)};" if command.words else ""
        first = f" ((CURRENT == 3)) && [[ $PREFIX != -* ]] && {words.strip()}" if words else ""
        yield f"        {name}) found=({both}{described(command.options)}){more};{first or ' :'} ;;"
    yield "    esac"
    yield "    if [[ $PREFIX == -* ]]; then"
    yield "        _describe -o option found || _describe -o option more"
    yield "    else"
    yield "        _files"
    yield "    fi"
    yield "}"
    yield 'if [[ $funcstack[1] == _slime ]]; then _slime "$@"; else compdef _slime slime; fi'


def _fish(declared: _Declared) -> Iterator[str]:
    def quoted(text: str) -> str:
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"

    for name, command in declared.commands.items():
        yield f"complete -c slime -f -n __fish_use_subcommand -a {name} -d {quoted(command.summary)}"
    for name, command in declared.commands.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        if command.words:
            yield f"complete -c slime {seen} -a {quoted(' '.join(command.words))}"
        for option, text in command.options.items():
            yield f"complete -c slime {seen} -l {option.removeprefix('--')} -d {quoted(_short(text))}"
    takers = " ".join(name for name, command in declared.commands.items() if command.takes_flags)
    for option, text in {**declared.flags, **declared.engine_flags}.items():
        values = declared.choices.get(option)
        chosen = f" -x -a {quoted(' '.join(values))}" if values else ""
        told = f" -d {quoted(_short(text))}" if text else ""
        name = option.removeprefix("--")
        yield f"complete -c slime -n '__fish_seen_subcommand_from {takers}' -l {name}{chosen}{told}"


_SCRIPTS: dict[str, Callable[[_Declared], Iterator[str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
