"""The order in which a run reads its prompts, and the processes that read ahead."""
