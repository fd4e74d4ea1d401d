"""The inference engines: SGLang servers and the stock router as supervised child processes, a control
client for one engine, and the asynchronous client that generators see.

Started by a run: `fork_server` (CPU hosts only) → `server` (one per engine) → `router`.
Inside a child: `launch`, `launch_router`, `parent_watch`.
"""
