"""The kit: what plugin authors use beyond `slime.plugin`.  The loop works without it.

`chat` keeps conversations token for token, `sessions` is an OpenAI-compatible endpoint over them, `sandbox` runs
untrusted programs, `readers` reads prompt files, `processes` is child processes and pools of workers.
"""
