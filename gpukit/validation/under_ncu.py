"""Launches the kernels on a GPU, one by one; `python -m gpukit.validation.under_ncu FOLDER [NAMES]` runs under ncu.

Only the launches between cudaProfilerStart and cudaProfilerStop are measured, one for each line `begin` of the log. A
kernel that fails costs itself; if it takes the CUDA context with it, the rest are left to a second process.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"


def main(log: Path, names: list[str], measure: bool) -> int:
    import torch

    from gpukit.validation.counted_kernels import CASES

    def note(**entry) -> None:
        with log.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    cudart = torch.cuda.cudart()
    for name in names:
        try:
            launch = CASES[name].prepare("cuda")
            for _ in range(1 + measure):
                launch()
            torch.cuda.synchronize()
            if measure:
                note(case=name, what="begin")
                cudart.cudaProfilerStart()
                launch()
                torch.cuda.synchronize()
                cudart.cudaProfilerStop()
                note(case=name, what="end")
            del launch
            torch.cuda.empty_cache()
        except Exception as error:
            note(case=name, what="failed", error=repr(error)[:500], trace=traceback.format_exc()[-2000:])
            try:
                cudart.cudaProfilerStop()
                torch.cuda.synchronize()
            except Exception:
                return 3  # the context is lost
    return 0


if __name__ == "__main__":
    folder, how, chosen = Path(sys.argv[1]), sys.argv[2], json.loads(Path(sys.argv[3]).read_text())
    sys.exit(main(folder, chosen, how == "measure"))
