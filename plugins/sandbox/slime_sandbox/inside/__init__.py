"""What runs between slime and an untrusted program: standard library only, started afresh for each program."""
