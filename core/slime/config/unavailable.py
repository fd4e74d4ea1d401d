"""Options that slime knows and this release does not perform: recognised, listed in the help, refused."""

from __future__ import annotations

from slime.config.flags import UNAVAILABLE, Flag
from slime.config.values import Arity, ValueType

_SWITCH, _SOME = ValueType(bool, Arity.SWITCH), ValueType(list[str], Arity.SOME)

#: name -> (what follows it, what it would do)
_OPTIONS: dict[str, tuple[ValueType, str]] = {
    "colocate": (_SWITCH, "training and inference share the devices"),
    "use-fault-tolerance": (_SWITCH, "restart dead engines and redo their work"),
    "spec": (_SOME, "model built by a function of the user's"),
    "post-self-attn-layernorm": (_SWITCH, "models with a norm after attention"),
    "post-mlp-layernorm": (_SWITCH, "models with a norm after the MLP"),
    "use-gated-attention": (_SWITCH, "models with gated attention"),
    "enable-experimental": (_SWITCH, "Megatron's experimental models"),
    "allgather-cp": (_SWITCH, "context parallelism by all-gather"),
}


def unavailable_flags() -> list[Flag]:
    """Their flags."""
    return [Flag(name, UNAVAILABLE, name.replace("-", "_"), kind, help=text) for name, (kind, text) in _OPTIONS.items()]


def refusal(flag: Flag, where: str, *, asynchronous: bool) -> str:
    """Why `flag`, written at `where`, stops the run."""
    if flag.name == "colocate" and asynchronous:
        return (
            f"{where}: asynchronous training does not support colocation: generation and training would need the"
            " same devices at the same time. Drop --async or --colocate."
        )
    return f"{where} is not in this release of slime ({flag.help}). Drop it."
