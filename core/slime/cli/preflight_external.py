"""Compares the engines of --rollout-external-engine-addrs with what the run would have started itself.

They are asked over HTTP. What differs would be seen much later otherwise: as a gap between the log-probs of engine and
trainer, or as a weight sync that fails, or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from slime.cli.preflight_model import has_tokenizer
from slime.config import RunConfig
from slime.engine.control import EngineControl, EngineKeys, call
from slime.engine.external import external_engine_args, external_keys
from slime.engine.server import EngineSpec, server_arguments
from slime.errors import ConfigError, EngineRefusedError, SlimeError

_TIMEOUT_S = 30.0
#: of scripts, digits and white space that vocabularies cut in different ways
_PROBE = "The 3 quick foxes: naïve café, 你好 мир\n\tdef f(x): return x**2 # 1234567"
#: tokens of the vocabulary, evenly spread over it, whose text is compared too
_SPREAD = 64
#: keys of config.json that say nothing about the tensors and how they are computed
_INCIDENTAL = {"_name_or_path", "transformers_version", "use_cache", "torch_dtype", "dtype", "architectures"}


def external_problems(config: RunConfig) -> list[str]:
    """How the engines differ from those that the run would have started; each sentence names one of them."""
    flag = "--rollout-external-engine-addrs"
    try:
        keys = external_keys(config) or EngineKeys("", "")  # which engines without keys ignore
    except ConfigError as error:
        return [str(error)]
    ask = partial(_differences, _Wanted(config), keys)
    urls = [url for url, *_ in external_engine_args(config, keys)]
    with ThreadPoolExecutor(min(32, len(urls))) as pool:
        return [f"{flag}: {url}: {one}" for url, found in zip(urls, pool.map(ask, urls), strict=True) for one in found]


class _Wanted:
    """What the run needs of an engine."""

    def __init__(self, config: RunConfig) -> None:
        self.compared = config.sync.check_weight_update_equal
        self.folder = Path(str(config.checkpoint.hf_checkpoint))
        self.model: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        #: text -> the tokens that this run's tokenizer makes of it; none if it is only planned, without a tokenizer
        self.tokens: dict[str, list[int]] = {}
        if has_tokenizer(self.folder):
            self.tokens = _tokens(self.folder, trusted=config.checkpoint.trust_remote_code)
        self.longest = config.rollout.rollout_max_context_len
        #: SGLang's options by field name, with the flags that set them
        self.options: dict[str, Any] = {
            "tp_size": config.cluster.rollout_num_gpus_per_engine,
            "pp_size": 1,
            "dp_size": 1,
            "ep_size": 1,
            "quantization": None,
            "dtype": _dtype(config),
            "skip_tokenizer_init": False,
            **config.sglang,
        }
        if config.rollout.use_rollout_routing_replay:
            self.options["enable_return_routed_experts"] = True
        if config.sync.inflight_kv == "keep":
            self.options["disable_radix_cache"] = True
        if config.run.deterministic:
            self.options["enable_deterministic_inference"] = True
        if self.compared and config.on_gpu:
            self.options["disable_shared_experts_fusion"] = True


def _dtype(config: RunConfig) -> str:
    """What SGLang's --dtype would be for an engine of the run's own."""
    spec = EngineSpec(str(config.checkpoint.hf_checkpoint), Path(os.devnull), device=config.device)
    words = server_arguments(spec, port=1)
    return words[words.index("--dtype") + 1] if "--dtype" in words else "auto"


def _tokens(folder: Path, *, trusted: bool) -> dict[str, list[int]]:
    """Texts with which two tokenizers of different vocabularies, or of different special tokens, tell themselves."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    size = len(tokenizer)
    spread = [tokenizer.decode([size * number // _SPREAD]) for number in range(min(_SPREAD, size))]
    texts = (_PROBE, "".join(tokenizer.all_special_tokens), " ".join([*spread, tokenizer.decode([size - 1])]))
    return {text: list(tokenizer(text)["input_ids"]) for text in texts if text}


def _differences(wanted: _Wanted, keys: EngineKeys, url: str) -> list[str]:
    engine = EngineControl(url, keys, timeout_s=_TIMEOUT_S)
    try:
        info = engine.server_info()
        model = call("GET", url, "/model_info", timeout_s=_TIMEOUT_S, key=keys.api)
        found = [*_of_server(wanted, info), *_of_model(wanted, model, info)]
        if not info.get("skip_tokenizer_init"):
            found += _of_tokenizer(wanted, url, keys)
        # Changes nothing, since no request has this name; refused without the key for what changes an engine.
        call("POST", url, "/abort_request", {"rid": "slime-none"}, timeout_s=_TIMEOUT_S, key=keys.admin)
    except EngineRefusedError as error:
        about = "" if "status 40" not in str(error) else ". --rollout-external-engine-keys names the file of its keys"
        return [f"it refuses the run: {error}{about}"]
    except SlimeError as error:
        return [f"it does not answer: {error}"]
    return found


def _of_server(wanted: _Wanted, info: Mapping[str, Any]) -> Iterator[str]:
    got, expected = str(info.get("version")), version("sglang")
    if got.partition("+")[0] != expected.partition("+")[0]:
        yield f"SGLang's version: got {got}, expected {expected}, which is installed here"
    for name, expected_value in wanted.options.items():
        if name not in info or info[name] == expected_value:
            continue
        shown = f"--{name.replace('_', '-')}"
        yield f"{shown}: got {info[name]!r}, expected {expected_value!r}. Start it with the run's value"


def _of_model(wanted: _Wanted, model: Mapping[str, Any], info: Mapping[str, Any]) -> Iterator[str]:
    for name in ("model_type", "architectures"):
        if model.get(name) != wanted.model.get(name):
            yield f"{name}: got {model.get(name)}, expected {wanted.model.get(name)}, as in {wanted.folder}/config.json"
            return
    path = Path(str(info.get("model_path")), "config.json")
    try:
        theirs: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        if not wanted.compared:
            yield (
                f"its model folder {path.parent} cannot be read here, so that sizes were not compared. Use"
                " --check-weight-update-equal, which compares every tensor after every update"
            )
        return
    for name in sorted((theirs.keys() | wanted.model.keys()) - _INCIDENTAL):
        if theirs.get(name) != wanted.model.get(name):
            yield f"{path}: {name}: got {theirs.get(name)!r}, expected {wanted.model.get(name)!r}"
    ours, kind = (one.get("dtype", one.get("torch_dtype")) for one in (wanted.model, theirs))
    if wanted.options["dtype"] == "auto" and ours != kind:
        yield f"{path}: dtype: got {kind!r}, expected {ours!r}"


def _of_tokenizer(wanted: _Wanted, url: str, keys: EngineKeys) -> Iterator[str]:
    texts = [*wanted.tokens]
    answer = call("POST", url, "/tokenize", {"prompt": texts}, timeout_s=_TIMEOUT_S, key=keys.api)
    theirs = answer.get("tokens")
    found = theirs if isinstance(theirs, list) and len(theirs) == len(texts) else [theirs] * len(texts)
    for text, got in zip(texts, found, strict=True):
        if got != wanted.tokens[text]:
            yield (
                f"its tokenizer makes other tokens of {text!r}: got {got}, expected {wanted.tokens[text]}, as the one"
                f" in {wanted.folder}"
            )
            break
    context = answer.get("max_model_len")
    if wanted.longest is not None and isinstance(context, int) and context < wanted.longest:
        yield f"--context-length: got {context} tokens, expected at least {wanted.longest} (--rollout-max-context-len)"
