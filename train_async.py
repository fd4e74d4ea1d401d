"""`python train_async.py ...` is `slime train --async ...`."""

import sys

from slime.cli.main import command

command(["train", "--async=true", *sys.argv[1:]])
