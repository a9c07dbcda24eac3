"""Makes the course's virtual environment: `python -I gpukit/bootstrap.py --help`. The Makefile calls it.

Standard library only, and nothing of gpukit: it runs before anything is installed. Whatever goes wrong on a learner's
machine is told in one sentence that says what to do.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MIN_FREE_GB = (
    8  # the environment with PyTorch's CUDA build takes 5 GB, with its CPU build 2 GB; the downloads come on top
)
CAUSES = (
    (
        r"No space left on device|Errno 28",
        "the disk is full: make room here and where temporary files go (TMPDIR)",
    ),
    (r"Read-only file system|Permission denied", "a folder cannot be written"),
    (
        r"connection|name resolution|timed out|Max retries|ProxyError|SSLError",
        "the package index cannot be reached: look at the network, or name another index in PIP_INDEX_URL",
    ),
    (r"No matching distribution|ResolutionImpossible", "the package index did not answer, or has no fitting version"),
)


class SetupError(Exception):
    """One sentence for the person at the keyboard."""


def fingerprint(root: Path) -> str:
    """Changes when the environment may no longer fit: other requirements, another Python, or the folder was moved."""
    digest = hashlib.sha256(f"{sys.version_info[:2]} {root}".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def installed_extras(venv: Path, key: str) -> set[str] | None:
    """The extras in `venv`, or None if it was not made for `key`. The stamp, written last, vouches for the rest."""
    try:
        made_for, *extras = (venv / "gpukit.stamp").read_text().split()
    except (OSError, ValueError):
        return None
    return set(extras) if made_for == key and (venv / "bin" / "python").exists() else None


def make(root: Path, venv: Path, extras: set[str], last_step: str) -> None:
    """Make `venv` and install the course into it, or do nothing if that was done. Raises SetupError, OSError."""
    key = fingerprint(root)
    installed = installed_extras(venv, key)
    if installed is not None and extras <= installed:
        return
    if is_usable(venv):
        step(f"1/3 keeping {venv.name}")
    else:
        check_machine(root, venv)
        step(f"1/3 creating {venv.name} with Python {sys.version.split()[0]}")
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], capture_output=True, text=True)
        if made.returncode:
            raise SetupError(f"{venv} could not be made: {cause(made.stdout + made.stderr)}")
    step("2/3 installing gpukit and what it needs (PyTorch is large: this takes some minutes)")
    extras |= installed or set()
    install(root, venv, extras)
    (venv / "gpukit.stamp").write_text(" ".join([key, *sorted(extras)]))
    step(f"3/3 {last_step}")


def is_usable(venv: Path) -> bool:
    """Whether `venv` is a whole environment of this Python, made where it lies now: then its packages are kept."""
    try:
        config = (venv / "pyvenv.cfg").read_text()
        pip = subprocess.run([venv / "bin" / "python", "-I", "-c", "import pip"], capture_output=True)
    except OSError:
        return False
    version = f"version = {sys.version_info[0]}.{sys.version_info[1]}."
    return pip.returncode == 0 and version in config and f"{venv}\n" in config


def check_machine(root: Path, venv: Path) -> None:
    """Find out before the long download what would stop it."""
    try:
        import ensurepip  # noqa: F401  (Debian and Ubuntu package it apart from Python)
        import venv as _  # noqa: F401
    except ImportError:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        raise SetupError(
            f"this Python cannot make virtual environments: install its venv module "
            f"(Debian, Ubuntu: sudo apt install {package}), then run make again"
        ) from None
    if not os.access(root, os.W_OK):
        raise SetupError(f"{root} cannot be written: copy the course into a folder of your own and run make there")
    at_least = float(os.environ.get("MIN_FREE_GB") or MIN_FREE_GB)
    free = shutil.disk_usage(venv.parent).free / 1e9
    if free < at_least:
        raise SetupError(
            f"{venv.parent} has {free:.1f} GB free and the environment needs {at_least:g} GB: make room, or install "
            "PyTorch's CPU build (README, «Without a GPU») with make lab MIN_FREE_GB=3"
        )


def install(root: Path, venv: Path, extras: set[str]) -> None:
    """pip's whole output goes to a log; the terminal gets a line for each large download."""
    target = f"{root}[{','.join(sorted(extras))}]" if extras else str(root)
    pip = [venv / "bin" / "python", "-m", "pip", "install", "--progress-bar=off", "--constraint", "constraints.txt"]
    log = venv / "install.log"
    call = [*pip, "--editable", target]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with log.open("w") as file, subprocess.Popen(call, cwd=root, **pipe) as process:
        for line in process.stdout:
            file.write(line)
            if re.search(r"^ *Downloading .*\((\d{2,}[\d.]* M|[\d.]+ G)B\)", line):  # 10 MB and more
                step("    downloading" + line.partition("Downloading")[2].rstrip())
            elif line.startswith("Installing collected packages"):
                step(f"    unpacking {line.count(',') + 1} packages")
    if process.returncode:
        raise SetupError(f"pip could not install the course: {cause(log.read_text())} (all it said: {log})")


def cause(output: str) -> str:
    """The likely reason for a failure of pip or venv, told from what it printed."""
    for pattern, sentence in CAUSES:
        if re.search(pattern, output, re.IGNORECASE):
            return sentence
    errors = re.findall(r"^(?:ERROR|error|Error): *(.+)", output, re.MULTILINE)
    return errors[-1] if errors else "no reason was given"


def step(line: str) -> None:
    print(line, flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Make the course's virtual environment, unless it is there and up to date."
    )
    parser.add_argument(
        "--venv", type=Path, default=Path(".venv"), help="its folder (default: .venv beside this course)"
    )
    parser.add_argument(
        "--extra", action="append", default=[], help="an extra of pyproject.toml, such as dev; repeatable"
    )
    parser.add_argument("--last-step", default="ready", help="what the caller does next, for the last progress line")
    args = parser.parse_args(argv)
    try:
        make(ROOT, ROOT / args.venv, set(args.extra), args.last_step)
    except SetupError as error:
        print(f"gpukit: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a full disk or a folder that turns out to be read-only
        print(f"gpukit: {cause(str(error))} ({error})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ngpukit: stopped; make starts again where it has to", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
