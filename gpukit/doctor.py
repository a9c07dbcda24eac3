"""`gpukit doctor`: what this machine has, whether the course can run on it, and which command installs what is missing.

What is needed is read from gpukit's own metadata (pyproject.toml), so it is written down once. torch is not imported
here: doctor must work where torch does not.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import gpukit
from gpukit import course, tables

OK, NOTE, MISSING = "ok", "note", "missing"
_PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


@dataclass(frozen=True)
class Row:
    """One line of the table. `mend` is a command or a sentence, "" where nothing is to be done."""

    name: str
    found: str
    needed: str = ""
    state: str = OK
    mend: str = ""


def examine() -> list[Row]:
    """Everything that decides whether and how the course runs here."""
    python_range, requirements = _needed()
    gpus = _gpus()
    rows = [_machine(), _python(python_range), *(_package(r, gpus) for r in requirements), _kernel(), _course()]
    return [row for row in [*rows, *_gpu_rows(gpus), _mode(), _fence()] if row is not None]


def as_text(rows: list[Row]) -> str:
    """A plain table, then what to do about each line that is not ok."""
    cells = [("", "", "needed", "found"), *((row.state, row.name, row.needed, row.found) for row in rows)]
    mends = [f"{row.name}: {row.mend}" for row in rows if row.mend]
    missing = sum(row.state == MISSING for row in rows)
    said = "Everything that the course needs is here." if not missing else f"{missing} missing or of another version."
    return "\n".join([*tables.aligned(cells), "", said, *mends])


def _needed() -> tuple[SpecifierSet, list[Requirement]]:
    """The supported Pythons, and gpukit's requirements on this system without extras."""
    try:
        python = metadata.metadata("gpukit")["Requires-Python"]
        names = metadata.requires("gpukit") or []
    except metadata.PackageNotFoundError:  # a checkout that is on PYTHONPATH and was never installed
        if not _PYPROJECT.exists():
            return SpecifierSet(), []
        project = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8"))["project"]
        python, names = project["requires-python"], project["dependencies"]
    requirements = [Requirement(name) for name in names]
    here = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return SpecifierSet(python or ""), here


def _range(versions: SpecifierSet) -> str:
    return ",".join(sorted(map(str, versions), reverse=True))  # the lower end first


def _machine() -> Row:
    memory = ""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = f", {os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB of memory"
    found = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores{memory}"
    if sys.platform == "linux":
        return Row("machine", found)
    mend = "Triton has Linux wheels only: work in WSL or a Linux container; without Triton, notebooks 00 to 04 work"
    return Row("machine", found, "Linux for kernels", NOTE, mend)


def _python(supported: SpecifierSet) -> Row:
    version = platform.python_version()
    fits = supported.contains(version, prereleases=True)
    mend = "" if fits else "install a supported Python, then: make lab"
    return Row("Python", version, _range(supported), OK if fits else MISSING, mend)


def _package(requirement: Requirement, gpus: list[str]) -> Row:
    name, needed = requirement.name, _range(requirement.specifier)
    mend = f'{Path(sys.executable).name} -m pip install "{name}{needed}"'
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Row(name, "not installed", needed, MISSING, mend)
    if not requirement.specifier.contains(version, prereleases=True):
        return Row(name, version, needed, MISSING, mend)
    if name == "torch" and gpus and version.endswith("+cpu"):
        return Row(name, version, needed, NOTE, "this build cannot use the GPU: install PyTorch's CUDA build")
    return Row(name, version, needed)


def _kernel() -> Row:
    name = "Jupyter kernel"
    install = f"{Path(sys.executable).name} -m ipykernel install --sys-prefix"
    try:
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
    except ImportError:
        return Row(name, "no jupyter_client", "python3", MISSING, "make lab")
    try:
        starts = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        return Row(name, "no python3", "python3", MISSING, install)
    if shutil.which(starts) is None:
        return Row(name, f"python3 starts {starts}, which is not there", "python3", MISSING, install)
    if os.path.isabs(starts) and Path(starts).resolve() != Path(sys.executable).resolve():
        return Row(name, f"python3 starts {starts}", f"python3 starting {sys.executable}", NOTE, install)
    return Row(name, "python3", "python3")


def _course() -> Row:
    try:
        root = course.root()
    except course.CourseNotFound as error:
        return Row("course", "not found", "notebooks/ and exercises/", MISSING, str(error))
    if not os.access(root / "exercises", os.W_OK):
        return Row("course", str(root), "a writable folder", NOTE, "answers cannot be saved: copy the course elsewhere")
    return Row("course", "here" if root in (Path.cwd(), *Path.cwd().parents) else str(root))


def _gpus() -> list[str]:
    """A line for each NVIDIA GPU: name, memory, driver. Empty where there is none or no driver."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    query = [smi, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _gpu_rows(gpus: list[str]) -> list[Row]:
    if not gpus:
        return [Row("GPU", "none", "", OK)]
    rows = [Row("GPU", f"{gpu} (name, memory, driver)") for gpu in gpus]
    probe = "import torch; print(torch.version.cuda if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True, text=True, cwd="/")
    if cuda := done.stdout.strip():
        rows.append(Row("CUDA in torch", cuda))
    else:
        mend = "the driver may be older than PyTorch's CUDA: update the driver, or install a PyTorch for an older CUDA"
        rows.append(Row("CUDA in torch", "torch does not reach the GPU", "", NOTE, mend))
    if not any(shutil.which(name) for name in (os.environ.get("CC") or "cc", "gcc", "clang")):
        rows.append(
            Row("C compiler", "none", "gcc or clang", NOTE, "Triton builds its launchers with it: apt install gcc")
        )
    return rows


def _mode() -> Row:
    """Where kernels run, as `import gpukit` chose or TRITON_INTERPRET said."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        chosen = "no GPU" if not gpukit._cuda_device_present() else "TRITON_INTERPRET=1"
        return Row(
            "kernels run", f"in Triton's interpreter on the CPU ({chosen}); GPU times shown are recorded or modelled"
        )
    return Row("kernels run", "on the GPU")


def _fence() -> Row:
    """What keeps learners' code from the rest of the machine when it is graded."""
    from gpukit.grading import fence

    return Row("fence", fence.active(), "", NOTE if "lacks" in fence.active() or "only" in fence.active() else OK)
