"""Launches the kernels on a GPU, one by one; `python -m gpukit.validation.under_ncu MODULE LOG HOW NAMES` runs under ncu.

MODULE has the CASES, and the file NAMES those to launch; HOW is `warm` or `measure`.

Only the launches between cudaProfilerStart and cudaProfilerStop are measured, one for each line `begin` of the log. A
kernel that fails costs itself; if it takes the CUDA context with it, the rest are left to a second process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"


def main(module: str, log: Path, names: list[str], measure: bool) -> int:
    import torch

    cases = importlib.import_module(module).CASES

    def note(**entry) -> None:
        with log.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    cudart = torch.cuda.cudart()
    for name in names:
        try:
            launch = cases[name].prepare("cuda")
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
    given, log_file, how, chosen = sys.argv[1:]
    sys.exit(main(given, Path(log_file), json.loads(Path(chosen).read_text()), how == "measure"))
