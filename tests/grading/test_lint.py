"""What an exercise's text may and may not contain: no honest solution is refused, the usual ways around the check are."""

import pytest

from gpukit.course import root
from gpukit.grading.lint import lint
from gpukit.grading.stubs import clear

HONEST = """
from __future__ import annotations
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

@dataclass
class Config:
    warps: int = 4
    def __post_init__(self):
        self.warps = max(self.warps, 1)
        self._cache = {}

@triton.autotune([triton.Config({"B": 64}, num_warps=4)], key=["N"])
@triton.jit
def kernel(x_ptr, N, B: tl.constexpr):
    offs = tl.arange(0, B)
    tl.store(x_ptr + offs, tl.math.exp(tl.load(x_ptr + offs)), mask=offs < N)

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx._n = x.shape[-1]
        return x

class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.zeros(3)

def run(x: Tensor) -> Tensor:
    "a docstring with __dunder__ and {braces}"
    print(f"{x.shape=} {x.dtype}", x.select(0, 0), getattr(x, "ndim"))
    if not isinstance(x, torch.Tensor):
        raise TypeError(type(x).__name__)
    grid = lambda meta: (triton.cdiv(x.numel(), meta["B"]),)
    kernel[grid](x, x.numel(), **{"num_stages": 2})
    return x.to(torch.float32)
"""


def test_honest_code_is_accepted():
    assert lint(HONEST, numpy=False) is None


@pytest.mark.parametrize("path", sorted((root(__file__) / "solutions").glob("*.py")), ids=lambda path: path.name)
def test_solutions_and_stubs_are_accepted(path):
    assert lint(path.read_text()) is None
    assert lint(clear(path.read_text())) is None


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "import gpukit",
        "from gpukit.kernels import softmax",
        "from solutions.softmax import softmax_fused",
        "from . import softmax",
        "import torch.utils.cpp_extension",
        "from torch import _C",
        "from torch import ops",
        "import torch\ntorch.compile(print)",
        "import torch\ntorch.ops.aten.softmax",
        "import torch\nt = torch\n",
        "import torch\nprint(torch)",
        "import torch\ntorch.equal = print",
        "import torch\ntorch.Tensor.sum = print",
        "import torch\ndel torch.equal",
        "import torch.nn as nn\nm = nn.functional\nm.importlib",
        "import triton\ntriton.runtime.interpreter",
        "import triton\ntriton.testing.do_bench(print)",
        "import triton.language as tl\ntl.core.os",
        "import dataclasses\ndataclasses.sys.modules",
        "import functools\nx = functools.partial\nx.func.__globals__",
        "x = 0\nx.numpy()",
        "x = 0\nx.tolist()",
        "x = 0\nx.handle.data",
        "x = 0\nx.untyped_storage()",
        "().__class__.__bases__",
        "getattr(1, 'real' + 'x')",
        "getattr(1, '__class__')",
        "eval('1')",
        "open('x')",
        "__import__('os')",
        "f = eval",
        "globals()['x']",
        "breakpoint()",
        "import numpy as np",
        "from numpy import exp",
        "import threading",
        "import torch\ntorch.set_printoptions(precision=17)",
        "import torch\ng = getattr\ng(torch.relu, '__globals__')",
        "next(map(getattr, [print], ['__self__']))",
        "import torch\nmatch torch.relu:\n    case object(__globals__=g):\n        pass",
        "import enum\nenum.bltns.exec('1')",
        "from enum import bltns",
        "import typing\nclass C:\n    x: 'print(1)'\ntyping.get_type_hints(C)",
        "from functools import singledispatch",
        "import functools, torch\nfunctools.update_wrapper(torch.Tensor, int, assigned=('real',), updated=())",
        "def f():\n    yield g.gi_frame.f_back\ng = f()",
        "from torch import *",
        "import torch\nF = torch.nn.functional\nF.softmax = print",
        "import torch\nT, x = torch.Tensor, 0\nT.clone = print",
        "import triton.language as tl\nm = tl.math\nm.exp = print",
        "x = 0\ntype(x).name = print",
        "x = 0\nt = type(x)\nt.name = print",
        "import torch\nclass T(torch.Tensor):\n    @classmethod\n    def __torch_dispatch__(cls, func, types): pass",
        "import torch.nn.functional as F\nF.torch.utils",
        "import torch.nn.functional as F\nF.torch.ops",
        "import torch\ntorch.zeros(3).apply_(abs)",
        "import torch\ntorch.functional.F.np.exp(1)",
        "import torch\ntorch.nn.parallel.parallel_apply",
    ],
)
def test_ways_around_the_check_are_refused(line):
    finding = lint(line, numpy=False)
    assert finding is not None
    assert finding.line >= 1
    assert finding.text


def test_objects_of_ones_own_may_change():
    assert lint("class State:\n    m = 0\ns = State()\ns.m = 1\nfor x in [s]:\n    x.m += 1\nState.m = 2") is None
    assert lint("import torch\np = torch.zeros(3)\np.grad = None\n[p][0].requires_grad = True") is None
    assert lint("from math import *\nmatch (1, 2):\n    case (a, b) if a < b:\n        pass") is None
    assert lint("import torch\nx = torch.zeros(3)\nif type(x) is torch.Tensor:\n    f = torch.exp\nf(x)") is None


def test_numpy_is_for_plain_functions():
    assert lint("import numpy as np\nnp.float32(1)") is None
    assert lint("import numpy as np\nnp.array([1.0]).sum()") is None
