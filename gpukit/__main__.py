"""`python -m gpukit` is `gpukit`."""

import sys

if (
    not sys.flags.safe_path
):  # the working folder comes first; a random.py of the learner's there is not the one to import
    sys.path[:] = [*sys.path[1:], sys.path[0]]

from gpukit.cli import main

sys.exit(main())
