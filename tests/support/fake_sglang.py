"""Fault injection: an HTTP server that answers as SGLang does, until a test says otherwise."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Thread
from typing import Any

from transformers import AutoTokenizer


class FakeSGLang:
    """What an engine of this model would say of itself; it computes nothing."""

    def __init__(self, model: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)
        config = json.loads((model / "config.json").read_text())
        self.info: dict[str, Any] = {
            "version": version("sglang"), "model_path": str(model), "tp_size": 1, "pp_size": 1, "dp_size": 1,
            "ep_size": 1, "quantization": None, "dtype": "float32", "skip_tokenizer_init": False,
            "disable_radix_cache": False, "enable_return_routed_experts": False,
        }  # fmt: skip
        self.model: dict[str, Any] = {name: config[name] for name in ("model_type", "architectures")}
        self.model["weight_version"] = "default"
        self.tokens: list[int] | None = None
        self.context = 512
        #: what it asks for: of requests, and of what changes it
        self.api_key: str | None = None
        self.admin_key: str | None = None
        self.url = ""

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/server_info":
            return self.info
        if path == "/model_info":
            return self.model
        if path == "/tokenize":
            own = self.tokens
            tokens = [self.tokenizer(text)["input_ids"] if own is None else own for text in body["prompt"]]
            return {"tokens": tokens, "max_model_len": self.context}
        return {}


@contextlib.contextmanager
def serving(fake: FakeSGLang) -> Iterator[FakeSGLang]:
    """Let it answer at a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            key = fake.admin_key or fake.api_key if self.path == "/abort_request" else fake.api_key
            allowed = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            text = json.dumps(
                fake.answer(self.path, json.loads(body or "{}")) if allowed else {"error": "key"}
            ).encode()
            self.send_response(200 if allowed else 401)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        fake.url = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield fake
        finally:
            server.shutdown()
