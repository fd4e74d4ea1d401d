"""`python train.py ...` is `slime train ...`."""

import sys

from slime.cli.main import main

sys.exit(main(["train", *sys.argv[1:]]))
