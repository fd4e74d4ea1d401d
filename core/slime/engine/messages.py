"""What goes to an engine's /generate and comes back: JSON, with token ids and their log-probs.

No Python loop runs over tokens: orjson builds the request and decodes the answer.
"""

from __future__ import annotations

import random
from binascii import a2b_base64
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import orjson
from yarl import URL

from slime.errors import EngineError, GarbledAnswerError
from slime.plugin import Generation, SamplingParams

#: the fields of a request to /generate
Request = dict[str, Any]
#: the fields of its answer, and who gave it
Answer = tuple[Any, URL]

#: characters of an answer in messages
EXCERPT = 500
_SEED_BITS = 63


def generation_of(answer: Any, url: URL) -> Generation:
    """The generation that the fields of an answer tell. Raises `GarbledAnswerError` or `EngineError`."""
    try:
        meta = answer["meta_info"]
        rows = meta.get("output_token_logprobs") or ()  # T rows of (log-prob, token id, text or None)
        flat = list(chain.from_iterable(rows))
        log_probs, tokens = flat[0::3], flat[1::3]
        reason = meta["finish_reason"]["type"]
        spans = meta.get("weight_versions")
        versions = list(dict.fromkeys(span["version"] for span in spans)) if spans else [meta["weight_version"]]
        if not tokens:  # aborted before the first one: no weights were used
            versions = []
    except (ValueError, KeyError, TypeError) as error:
        raise _garbled(url, error, str(answer)) from error
    if None in log_probs:
        raise EngineError(
            f"POST {url}: log-prob of response token {log_probs.index(None)} is not a number; "
            f"the model's weights or activations have overflowed"
        )
    return Generation(tokens=tokens, log_probs=log_probs, finish_reason=reason, weight_versions=versions, meta=meta)


def fields_of(answer: bytes, url: URL) -> Any:
    """What an answer holds."""
    try:
        return orjson.loads(answer)
    except ValueError as error:
        raise _garbled(url, error, answer[:EXCERPT].decode(errors="replace")) from error


def names_of(answers: Any) -> Any:
    """The names of the requests that were answered in one message, or what was answered instead."""
    try:
        return [answer["meta_info"]["id"] for answer in answers]
    except (KeyError, TypeError):
        return str(answers)[:EXCERPT]


def _garbled(url: URL, error: Exception, text: str) -> GarbledAnswerError:
    return GarbledAnswerError(
        f"POST {url}: the answer is not one of SGLang's /generate with log-probs "
        f"({type(error).__name__}: {error}): {text[:EXCERPT]}",
        str(url.origin()),
    )


def with_routed_experts(answer: Generation, prompt_length: int, start: int, layers: int, url: URL) -> Generation:
    """The answer with the routed experts that its `meta` holds encoded: base64 of int32, here in fewer bytes.

    They are those of the tokens from `start` on.
    """
    meta = dict(answer.meta)
    encoded = meta.pop("routed_experts", None)
    if encoded is None and answer.finish_reason == "abort":
        return answer  # whoever continues it gets those of all tokens
    rows = prompt_length + len(answer.tokens) - 1 - start
    if rows < 1:  # aborted before the first new token
        return replace(answer, meta=meta)
    experts = np.frombuffer(a2b_base64(encoded or ""), dtype=np.int32)
    if experts.size == 0 or experts.size % (rows * layers):
        raise EngineError(
            f"POST {url}: the answer has the routed experts of {experts.size} places, expected a multiple of {rows}"
            f" tokens x {layers} layers; the engine needs --enable-return-routed-experts and a model with experts"
        )
    kind = np.uint8 if experts.max() < 256 else np.int16
    return replace(answer, meta=meta, routed_experts=experts.reshape(rows, layers, -1).astype(kind), routed_from=start)


def request_of(tokens: Sequence[int], sampling: SamplingParams, rid: str | None, *, routed: bool) -> Request:
    """The fields of a request; `routed`: ask which experts compute each token."""
    parameters: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }
    if sampling.stop:
        parameters["stop"] = sampling.stop
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = sampling.stop_token_ids
    # An engine with seeded sampling gives all requests without a seed the same one, and so the same response to all
    # samples of a prompt.
    seed = sampling.sampling_seed
    parameters["sampling_seed"] = random.getrandbits(_SEED_BITS) if seed is None else seed
    request: Request = {"input_ids": tokens, "sampling_params": parameters, "return_logprob": True}
    if rid is not None:
        request["rid"] = rid
    if routed:
        request["return_routed_experts"] = True
        request["routed_experts_start_len"] = sampling.routed_from
    return request


def encoded(request: Request) -> bytes:
    """A request as JSON."""
    return orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY)
