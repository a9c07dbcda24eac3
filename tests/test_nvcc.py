"""gpukit.nvcc without a GPU: a script stands in for nvcc, functions of the C library for what it would build."""

import ctypes
import json
import shutil

import pytest
import torch

from gpukit import course, nvcc

ROOT = course.root(__file__)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with a GPU whose nvcc is the given script."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    nvcc.build.cache_clear()

    def install(script: str) -> None:
        path = tmp_path / "nvcc"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    yield install
    nvcc.build.cache_clear()


def reason(source) -> str:
    with pytest.raises(nvcc.NotBuilt) as caught:
        nvcc.build(source)
    message = str(caught.value)
    assert message and "\n" not in message
    return message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path):
    assert reason(tmp_path / "a.cu") == "there is no GPU"


def test_without_nvcc(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(nvcc, "find", lambda: None)
    assert reason(tmp_path / "a.cu") == "nvcc, the compiler of the CUDA toolkit, was not found"


@pytest.mark.parametrize(
    ("script", "message"),
    (
        ("echo 'fusion.cu(7): error: what is this' >&2; exit 2", "nvcc failed: fusion.cu(7): error: what is this"),
        ("exit 3", "nvcc failed: exit status 3"),
        (":", "what nvcc built cannot be loaded: .*library.so"),
        ("for last in $@; do :; done; echo nonsense > $last", "what nvcc built cannot be loaded: "),
    ),
    ids=("error", "silent", "nothing", "nonsense"),
)
def test_nvcc_that_fails(machine, tmp_path, script, message):
    machine(script)
    with pytest.raises(nvcc.NotBuilt, match=message.replace("(", r"\(").replace(")", r"\)")):
        nvcc.build(tmp_path / "a.cu")


def test_nvcc_that_cannot_run(machine, tmp_path):
    machine("")
    (tmp_path / "nvcc").write_bytes(b"no program")
    assert reason(tmp_path / "a.cu").startswith("nvcc did not run: ")


def test_the_command_and_one_build_for_a_file(machine, tmp_path, monkeypatch):
    log = tmp_path / "a folder" / "log"
    log.parent.mkdir()
    machine(f'echo "$6" >> "{log}"')
    loaded = ctypes.CDLL(None)
    monkeypatch.setattr(nvcc.ctypes, "CDLL", lambda path: loaded)
    source = tmp_path / "a folder" / "a.cu"
    assert nvcc.build(source) is nvcc.build(source)
    assert log.read_text().splitlines() == [str(source)]  # a space in its name does no harm


def test_nvcc_is_found_in_cuda_home(machine, tmp_path):
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    machine(":")
    there = shutil.move(tmp_path / "nvcc", tmp_path / "cuda" / "bin" / "nvcc")
    assert nvcc.find() == str(there)


def test_launch_passes_addresses_and_reports_errors(monkeypatch):
    """memcmp takes two addresses and a length, ignores the stream, and returns 0 if the bytes are equal."""
    monkeypatch.setattr(nvcc, "_stream", lambda: 0)
    library = nvcc.Library(ctypes.CDLL(None))
    x = torch.arange(100.0)
    library.launch("memcmp", x, x.clone(), x.nbytes)
    with pytest.raises(RuntimeError, match=r"memcmp: the launch failed with CUDA error -?\d+"):
        library.launch("memcmp", x, x + 1, x.nbytes)
    with pytest.raises(AttributeError, match="no_such_function"):
        library.launch("no_such_function", x)


@pytest.mark.gpu
@pytest.mark.skipif(nvcc.find() is None, reason="no nvcc")
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("name", ("gelu", "gelu_vector"))
@pytest.mark.parametrize("n", (5000, 5001, 7))
def test_gelu_in_cuda(name, dtype, n):
    x = torch.randn(n, device="cuda", dtype=dtype)
    y = torch.empty_like(x)
    library = nvcc.build(ROOT / "gpukit" / "kernels" / "fusion.cu")
    library.launch(f"{name}_{str(dtype).removeprefix('torch.')}", x, y, x.numel())
    torch.testing.assert_close(y, torch.nn.functional.gelu(x, approximate="tanh"))


@pytest.mark.gpu
@pytest.mark.skipif(nvcc.find() is None, reason="no nvcc")
def test_loads_of_16_bytes_refuse_other_addresses():
    x = torch.randn(5001, device="cuda")[1:]
    library = nvcc.build(ROOT / "gpukit" / "kernels" / "fusion.cu")
    with pytest.raises(RuntimeError, match="the launch failed with CUDA error 716"):
        library.launch("gelu_vector_float32", x, torch.empty_like(x), x.numel())


def test_the_notebook_builds_with_the_options_its_source_names():
    source = (ROOT / "gpukit" / "kernels" / "fusion.cu").read_text()
    assert f"nvcc {' '.join(nvcc.OPTIONS)} fusion.cu" in source
    cells = json.loads((ROOT / "notebooks" / "08_fusion.ipynb").read_text(encoding="utf-8"))["cells"]
    assert any("nvcc.build(" in "".join(cell["source"]) for cell in cells)
