"""`python train.py ...` is `slime train ...`."""

import sys

from slime.cli.main import command

command(["train", *sys.argv[1:]])
