"""`python train_async.py ...` is `slime train --async ...`."""

import sys

from slime.cli.main import main

sys.exit(main(["train", "--async=true", *sys.argv[1:]]))
