"""`python -m gpukit.train` is `gpukit train`; torchrun needs the former: torchrun --nproc-per-node 2 -m gpukit.train ..."""

import os
import sys

from gpukit.cli import main
from gpukit.train.ranks import started

status = main(["train", *sys.argv[1:]])
if started().world > 1:
    # Everything is written, and the processes have parted. When Python takes its modules down after that, a thread of PyTorch's
    # that is still there aborts the process now and then ("terminate called without an active exception"), and torchrun takes
    # the whole run for failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
sys.exit(status)
