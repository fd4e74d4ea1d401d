"""What is secret, and what is shown instead of it: one rule for everything that slime writes or prints.

Secret are the values of options that are named like secrets (`api_key`, `password`, `auth_token`), and in addresses the
user and password (`http://USER:PASSWORD@host`) and parameters named like secrets (`?api_key=...`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

#: what stands in place of a secret
MARK = "<secret>"
#: a name that ends like this, after the beginning or a separator
_NAME = re.compile(
    r"(?:^|[._])"
    r"(?:api_?key|(?:secret_)?(?:access|private)_key|secret(?:_key)?|password|passwd|passphrase|credentials?"
    r"|(?:access|api|auth|bearer|refresh|session|hf|github|gitlab|openai|wandb|judge|service)_token"
    r"|(?:openai|wandb|judge|service)_key|authorization)$"
    r"|^token$",
    re.IGNORECASE,
)
_USER = re.compile(r"(?<=://)[^/?#\s]*@")
_PARAMETER = re.compile(r"([?&][^=&#\s]*(?:key|token|secret|password|signature|sig|auth)=)[^&#\s'\"]+", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether an option of this name holds a secret."""
    return _NAME.search(name.replace("-", "_")) is not None


def without_credentials(text: str) -> str:
    """The text with the credentials of all addresses in it replaced."""
    if "://" not in text:
        return text
    return _PARAMETER.sub(rf"\g<1>{MARK}", _USER.sub(f"{MARK}@", text))


def redacted(value: Any, name: str = "") -> Any:
    """A copy of a value, or of a tree of tables and lists, with all secrets replaced.

    Args:
        value: JSON or TOML values; others stay as they are.
        name: The name of the option that has the value.
    """
    if value is not None and is_secret(name):
        return MARK
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, Mapping):
        return {key: redacted(part, str(key)) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([redacted(part) for part in value])
    return value


def places_of_mark(value: Any, path: str = "") -> Iterator[str]:
    """Where in a tree a secret was replaced: `reward.url`, `reward.terms[0].options.url`."""
    if isinstance(value, str) and MARK in value:
        yield path
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from places_of_mark(part, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from places_of_mark(part, f"{path}[{index}]")
