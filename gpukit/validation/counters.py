"""Nsight Compute's counters of the kernels: runs ncu and reads what it wrote.

https://docs.nvidia.com/nsight-compute/NsightComputeCli/  https://docs.nvidia.com/nsight-compute/ProfilingGuide/#metrics-reference
"""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from gpukit import hardware

# What the table shows -> the counters that hold it: the first that ncu knows, or of _SUMS all together.
JUDGED = {
    "l2_read_sectors": ("l1tex__m_xbar2l1tex_read_sectors.sum", "lts__t_sectors_srcunit_tex_op_read.sum"),
    "l2_write_sectors": (
        "lts__t_sectors_srcunit_tex_op_write.sum",
        "l1tex__m_l1tex2xbar_write_sectors_mem_lg_op_st.sum",
        "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    ),
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    "dram_bytes": ("dram__bytes_read.sum", "dram__bytes_write.sum"),
    "l1_read_sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",),
    "l1_write_sectors": ("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",),
    "l2_atomic_sectors": ("lts__t_sectors_op_red.sum", "lts__t_sectors_op_atom.sum"),
    "time_ns": ("gpu__time_duration.sum",),
}
_SUMS = ("dram_bytes", "l2_atomic_sectors")  # reductions and atomics that return a value are counted apart
ESSENTIAL = list(dict.fromkeys(names[0] for names in JUDGED.values()))
# For the model to be improved by, without a GPU.
_FURTHER = """
l1tex__m_xbar2l1tex_read_sectors_mem_lg_op_ld.sum l1tex__m_xbar2l1tex_read_sectors_mem_lg_op_atom.sum
l1tex__m_xbar2l1tex_read_sectors_mem_lg_op_red.sum l1tex__m_xbar2l1tex_read_sectors_mem_tma.sum
l1tex__m_l1tex2xbar_write_sectors.sum l1tex__m_l1tex2xbar_write_sectors_mem_lg_op_st.sum
l1tex__m_l1tex2xbar_write_sectors_mem_lg_op_red.sum l1tex__m_l1tex2xbar_write_sectors_mem_lg_op_atom.sum
l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum l1tex__t_requests_pipe_lsu_mem_global_op_st.sum
l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit.sum l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_miss.sum
l1tex__t_sectors_pipe_lsu_mem_global_op_st_lookup_hit.sum
l1tex__t_sectors_pipe_lsu_mem_global_op_red.sum l1tex__t_sectors_pipe_lsu_mem_global_op_atom.sum
l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts.sum l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_access.sum
l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_bypass.sum
l1tex__t_sector_hit_rate.pct lts__t_sector_hit_rate.pct
lts__t_sectors.sum lts__t_sectors_op_read.sum lts__t_sectors_op_write.sum lts__t_sectors_op_atom.sum
lts__t_sectors_op_red.sum lts__t_sectors_srcunit_tex.sum lts__t_sectors_srcunit_tex_lookup_hit.sum
lts__t_sectors_srcunit_tex_lookup_miss.sum lts__t_sectors_srcunit_ltcfabric.sum lts__t_requests_srcunit_tex.sum
lts__t_sectors_srcunit_tex_op_read_lookup_hit.sum lts__t_sectors_srcunit_tex_op_read_lookup_miss.sum
lts__t_sectors_srcunit_tex_op_write_lookup_hit.sum lts__t_sectors_srcunit_tex_op_write_lookup_miss.sum
dram__sectors_read.sum dram__sectors_write.sum dram__bytes.sum
sm__cycles_elapsed.max sm__cycles_active.avg sm__warps_active.avg.pct_of_peak_sustained_active
smsp__inst_executed.sum dram__throughput.avg.pct_of_peak_sustained_elapsed
lts__throughput.avg.pct_of_peak_sustained_elapsed l1tex__throughput.avg.pct_of_peak_sustained_active
sm__throughput.avg.pct_of_peak_sustained_elapsed sm__inst_executed_pipe_tensor.sum
launch__registers_per_thread launch__shared_mem_per_block_dynamic launch__shared_mem_per_block_static
launch__shared_mem_config_size launch__occupancy_limit_registers launch__occupancy_limit_shared_mem
launch__occupancy_limit_warps launch__occupancy_limit_blocks launch__waves_per_multiprocessor
launch__grid_size launch__block_size
"""
# How busy each unit was, and what warps waited for: what ncu shows as the breakdown of its throughputs, and its stalls.
_UNITS = """
sm__inst_issued sm__issue_active sm__inst_executed sm__inst_executed_pipe_lsu sm__inst_executed_pipe_xu
sm__inst_executed_pipe_adu sm__inst_executed_pipe_uniform sm__inst_executed_pipe_alu sm__inst_executed_pipe_fma
sm__inst_executed_pipe_fmaheavy sm__inst_executed_pipe_fp16 sm__pipe_alu_cycles_active sm__pipe_fma_cycles_active
sm__pipe_fmaheavy_cycles_active sm__pipe_shared_cycles_active sm__pipe_fp64_cycles_active sm__pipe_tensor_cycles_active
sm__mio_inst_issued sm__mio2rf_writeback_active sm__mio_pq_read_cycles_active sm__mio_pq_write_cycles_active
l1tex__data_bank_reads l1tex__data_bank_writes l1tex__data_pipe_lsu_wavefronts l1tex__f_wavefronts l1tex__lsuin_requests
l1tex__lsu_writeback_active l1tex__m_l1tex2xbar_req_cycles_active l1tex__m_xbar2l1tex_read_sectors l1tex__throughput
lts__d_sectors lts__d_sectors_fill_device lts__d_atomic_input_cycles_active lts__lts2xbar_cycles_active
lts__xbar2lts_cycles_active lts__t_sectors lts__t_tag_requests lts__throughput dram__cycles_active dram__throughput
"""
_STALLS = """
barrier branch_resolving dispatch_stall drain gmma imc_miss lg_throttle long_scoreboard math_pipe_throttle membar
mio_throttle no_instruction not_selected selected short_scoreboard sleeping tex_throttle wait
"""
_OF_UNITS = (".avg.pct_of_peak_sustained_elapsed", "_per_issue_active.ratio")
WANTED = list(
    dict.fromkeys(
        [
            *(n for names in JUDGED.values() for n in names),
            *_FURTHER.split(),
            *(f"{unit}{_OF_UNITS[0]}" for unit in _UNITS.split()),
            *(f"smsp__average_warps_issue_stalled_{why}{_OF_UNITS[1]}" for why in _STALLS.split()),
        ]
    )
)
COUNTED = "gpukit.validation.counted_kernels"  # the module whose CASES are meant where none is named
_FLAGS = "--profile-from-start off --cache-control all --clock-control none --csv --page raw --print-units base".split()
_AT_ONCE = 30  # cases in one process: what it has seen is printed when it ends
_ATTEMPTS = 4  # processes that may break


def find_ncu() -> str:
    """The path of ncu. Raises RuntimeError if there is none."""
    found = shutil.which("ncu")
    if found is None:
        places = [*Path("/usr/local").glob("cuda*/bin/ncu"), *Path("/opt/nvidia/nsight-compute").glob("*/ncu")]
        found = str(sorted(places)[-1]) if places else None
    if found is None:
        raise RuntimeError("measuring needs Nsight Compute: no ncu is on the PATH, in /usr/local/cuda or /opt/nvidia")
    return found


def known_counters(ncu: str, say: Callable[[str], None]) -> list[str]:
    """Those of WANTED that this ncu has for this GPU; all of them where it does not say."""
    try:
        done = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        return WANTED
    names = set(re.findall(r"\b((?:l1tex|lts|dram|sm|smsp|gpu|launch)__\w+)", done.stdout))
    if len(names) < 50:
        say("ncu --query-metrics said little; asking for every counter")
        return WANTED
    known = [w for w in WANTED if w.split(".")[0] in names or w.startswith("launch__") or w in ESSENTIAL]
    missing = [w for w in WANTED if w not in known]
    if missing:
        say(f"this ncu does not list {len(missing)} of {len(WANTED)} counters: {' '.join(missing)}")
    return known


def environment(*first: Path) -> dict[str, str]:
    """Of a process that finds the modules which this one does; those in `first` before them."""
    path = os.pathsep.join([*map(str, first), *(p or os.getcwd() for p in sys.path)])
    return {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}


def warm(names: list[str], workers: int, say: Callable[[str], None], module: str = COUNTED) -> None:
    """Compile everything once, side by side, into Triton's own cache: under ncu it is one process."""

    def run(i: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            chosen = Path(folder) / "todo.json"
            chosen.write_text(json.dumps(names[i::workers]))
            command = [
                sys.executable,
                "-m",
                "gpukit.validation.under_ncu",
                module,
                f"{folder}/log",
                "warm",
                str(chosen),
            ]
            subprocess.run(command, env=environment(), capture_output=True, timeout=240)

    begin = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(run, range(workers)))
    say(f"compiled and launched once: {time.monotonic() - begin:.0f} s")


def facts() -> dict[str, str]:
    """What this machine measures with: its GPU, by our name and its own, the versions of torch and triton, and the date."""
    import torch

    device = torch.cuda.get_device_name()
    return {
        "gpu": hardware.gpu(device).key,
        "device": device,
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def measure(names: list[str], say: Callable[[str], None], seconds: float = 240, module: str = COUNTED) -> list[dict]:
    """Run ncu over cases of a module. One dictionary for each process, of which there are several if a kernel breaks one: `log`,
    what was begun, ended and failed, and `rows`, the kernels that ncu saw, with every counter."""
    ncu = find_ncu()
    counters = known_counters(ncu, say)
    runs: list[dict] = []
    left, end, broken = list(names), time.monotonic() + seconds, 0
    while left and broken < _ATTEMPTS and time.monotonic() < end - 20:
        part, left = left[:_AT_ONCE], left[_AT_ONCE:]
        with tempfile.TemporaryDirectory() as folder:
            log, chosen = Path(folder) / "log.jsonl", Path(folder) / "todo.json"
            chosen.write_text(json.dumps(part))
            target = ["gpukit.validation.under_ncu", module, str(log), "measure", str(chosen)]
            begin = time.monotonic()
            status, output, text = profile(ncu, counters, target, max(20, end - begin))
            entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        rows = read_csv(text)
        runs.append({"log": entries, "rows": rows})
        say(f"ncu, {len(part)} cases: status {status}, {len(rows)} kernels in {time.monotonic() - begin:.0f} s")
        for entry in entries:
            if entry["what"] == "failed":
                say(f"  {entry['case']}: {entry['error']}")
        if status == 0 and rows:
            continue
        broken += 1
        if not rows and len(counters) > len(ESSENTIAL):
            of_units = [name for name in counters if name.endswith(_OF_UNITS)]
            less = "those of units and stalls left out" if of_units else "the essential ones only"
            say(f"{output}\n{text[-1500:]}\nno kernel was measured: asking for fewer counters, {less}")
            counters = [name for name in counters if name not in of_units] if of_units else ESSENTIAL
            left = part + left
            continue
        say(output)
        seen = [entry["case"] for entry in entries]
        left = (part[part.index(seen[-1]) + 1 :] if seen and seen[-1] in part else []) + left
    if left:
        say(f"not measured: {', '.join(left)}")
    return runs


def profile(
    ncu: str, counters: list[str], target: list[str], seconds: float, more: Sequence[str] = (), *first: Path
) -> tuple[int | str, str, str]:
    """Run a module of Python, `target`, under ncu: its exit status, the end of what was printed, and what ncu wrote, for
    read_csv. Only what is launched between cudaProfilerStart and cudaProfilerStop is measured. `more`: options of ncu's;
    `first`: as of environment."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "ncu.csv"
        command = [ncu, *_FLAGS, *more, "--metrics", ",".join(counters), "--log-file", str(raw)]
        command += [sys.executable, "-m", *target]
        try:
            done = subprocess.run(command, env=environment(*first), capture_output=True, text=True, timeout=seconds)
            status, output = done.returncode, (done.stdout + done.stderr)[-1500:].strip()
        except subprocess.TimeoutExpired:
            status, output = "out of time", ""
        return status, output, raw.read_text(errors="replace") if raw.exists() else ""


def read_csv(text: str) -> list[dict]:
    """The kernels in what ncu printed, one dictionary each: `kernel`, its name, and its counters. Lines that are no table
    are passed over, and values that are no numbers."""
    rows, header = [], None
    for cells in csv.reader(text.splitlines()):
        if cells[:1] == ["ID"]:
            header = [cell.split(" ")[0] for cell in cells]
            name = cells.index("Kernel Name")
        elif header and len(cells) == len(header) and cells[0].isdigit():
            row = {"kernel": cells[name].split("(")[0].strip()}
            for counter, cell in zip(header, cells, strict=True):
                if "__" in counter and (value := _number(cell)) is not None:
                    row[counter] = value
            rows.append(row)
    return rows


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def matched(runs: list[dict], kernels: dict[str, list[str]]) -> dict[str, dict[str, float]]:
    """Case -> counter -> value, summed over the kernels that the case launches. `kernels`: case -> their names, in order.
    Kernels of others, such as PyTorch's, may lie between; a case that has not left all of its own has no values."""
    found: dict[str, dict[str, float]] = {}
    known = {name for names in kernels.values() for name in names}
    for run in runs:
        rows = [row for row in run["rows"] if row["kernel"] in known]
        for case, own in _own(run["log"], rows, kernels):
            names = [name for name in own[0] if name != "kernel" and all(name in row for row in own)]
            found[case] = {name: sum(row[name] for row in own) for name in names}
    return found


def _own(log: list[dict], rows: list[dict], kernels: dict[str, list[str]]) -> Iterator[tuple[str, list[dict]]]:
    at = 0
    for case in [entry["case"] for entry in log if entry["what"] == "begin"]:
        expected = kernels.get(case, [])
        own = rows[at : at + len(expected)]
        if expected and [row["kernel"] for row in own] == expected:
            yield case, own
            at += len(expected)


def judged(values: dict[str, float], counter: str) -> float | None:
    """What the table shows under this name, None if nothing of it was measured."""
    parts = [values[name] for name in JUDGED[counter] if name in values]
    if not parts:
        return None
    return sum(parts) if counter in _SUMS else parts[0]
