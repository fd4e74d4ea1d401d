"""`python -m slime.engine.launch_router <JSON of router arguments>`: the stock router, ended with its parent.

Takes the fields of sglang-router's `RouterArgs` as one JSON object, since its command line does not
offer all policies.
"""

from __future__ import annotations

import importlib
import json
import sys

from slime.engine.parent_watch import end_with_parent


def main() -> None:
    """Entry point of `python -m slime.engine.launch_router`."""
    end_with_parent()
    router_args = importlib.import_module("sglang_router.router_args").RouterArgs(**json.loads(sys.argv[1]))
    # Not `sglang_router.launch_router`: that module imports SGLang (seconds) for a balancer not used here.
    importlib.import_module("sglang_router.router").Router.from_args(router_args).start()


if __name__ == "__main__":
    main()
