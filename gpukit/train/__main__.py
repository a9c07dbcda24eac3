"""`python -m gpukit.train` is `gpukit train`; torchrun needs the former: torchrun --nproc-per-node 2 -m gpukit.train ..."""

import sys

from gpukit.cli import main

sys.exit(main(["train", *sys.argv[1:]]))
