"""`python train_async.py ...` is `slime train --async ...`."""

import sys

from slime.cli.main import main

sys.exit(main(["train", "--async", *sys.argv[1:]]))
