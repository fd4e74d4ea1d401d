"""The `slime` command: one file a subcommand."""
