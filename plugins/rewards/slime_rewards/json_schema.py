"""Reward for JSON that a schema allows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jsonschema
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from slime.errors import ConfigError
from slime.plugin import Context, Reward, Sample
from slime_rewards.extraction import describe, last_fenced, without_thinking
from slime_rewards.options import JsonSchemaOptions


class JsonSchema:
    """1.0 for JSON that the schema allows, `parses` for other JSON, 0.0 for anything else.

    The document is the last fenced block behind the thinking, or all that is there if it has none. NaN, Infinity and
    comments are not JSON, and a document nested too deeply to check does not count as JSON. Part `parses`: 1 if the
    document is JSON.

    The schema is the file `path`, or else the sample's own, in `metadata[metadata_key]` as an object or as text; for a
    sample without schema any JSON is accepted. Formats (`date`, `email`) are not checked, and references to other
    documents are never fetched. An invalid schema in metadata raises `ValueError`, and the sample fails.
    """

    def __init__(self, options: JsonSchemaOptions, context: Context) -> None:  # noqa: ARG002 - the factory contract
        """Initialize.

        Raises:
            ConfigError: The file at `path` cannot be read or is not a schema.
        """
        self._options = options
        self._schema: Any = None
        if options.path is not None:
            try:
                self._schema = _validator(json.loads(Path(options.path).read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                raise ConfigError(f"path {options.path}: {error}") from None

    def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Reward:
        validator = self._schema or self._own_schema(sample)
        try:
            document = self._document(sample.response)
            valid = validator is None or validator.is_valid(document)
        except (ValueError, RecursionError):
            return Reward(0.0, {"parses": 0.0})
        except OverflowError:  # 1e999 is valid JSON, but fails a check with `multipleOf`
            valid = False
        except Unresolvable as error:
            raise ValueError(f"{describe(sample)}: the schema refers to {error}, which it does not contain") from None
        return Reward(1.0 if valid else self._options.parses, {"parses": 1.0})

    def _document(self, response: str) -> Any:
        """The document in a response. Raises `ValueError` or `RecursionError` if there is none."""
        try:  # a response of JSON alone has no thinking, whatever its strings say
            return json.loads(response, parse_constant=_no_constant)
        except ValueError:
            answer = without_thinking(response)
        text = last_fenced(answer) if self._options.fenced else None
        return json.loads(answer if text is None else text, parse_constant=_no_constant)

    def _own_schema(self, sample: Sample) -> Any:
        schema = sample.metadata.get(self._options.metadata_key)
        if schema is None:
            return None
        try:
            return _validator(json.loads(schema) if isinstance(schema, str) else schema)
        except ValueError as error:
            raise ValueError(
                f"{describe(sample)}: metadata {self._options.metadata_key!r} is not a JSON schema: {error}"
            ) from None


def _validator(schema: Any) -> Any:
    """A validator of documents. Raises `ValueError` if `schema` is not valid."""
    if not isinstance(schema, dict | bool):
        raise ValueError(f"it is a {type(schema).__name__}, expected an object")
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(error.message) from None
    return kind(schema, registry=Registry())


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
