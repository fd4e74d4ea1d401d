"""The inference engines: SGLang servers and the stock router as supervised child processes, a control client for one
engine, and the asynchronous client that generators use.

A run starts the fork server (CPU hosts only), then a `server` for each engine, then the `router`. `launch` runs in the
child processes.
"""
