"""What an exercise's text may name: nothing honest is refused, ways around the check are, by classes."""

import ast
import importlib
import inspect
import symtable
import sys
import textwrap
import types
import warnings

import pytest

from gpukit.course import root
from gpukit.grading import judge as judging
from gpukit.grading import lint as lint_module
from gpukit.grading import registry, stubs
from gpukit.grading.lint import importable, lint
from gpukit.grading.names import INSTEAD, MODULES, NEVER, TENSOR, VALUES
from gpukit.grading.stubs import clear
from tests.grading.test_judge import ADD, DOUBLE, DOUBLE_SOURCE

ROOT = root(__file__)
KINDS = {"function": {}, "kernel": {"kernel": True}, "memory": {"counted": True}}

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
    for kind in KINDS.values():
        assert lint(HONEST, **kind) is None


# Odd, and honest.
ODD = [
    "import statistics\nm = statistics.median([1, 2])",
    "from fractions import Fraction\nx = Fraction(1, 3).limit_denominator(10).numerator",
    "from decimal import Decimal, getcontext, ROUND_HALF_EVEN\nx = Decimal('1.5').quantize(Decimal(1), rounding=ROUND_HALF_EVEN)",
    "import operator\nf = operator.itemgetter(1)\ntotal = operator.mul(2, 3)",
    "import struct\nbits = struct.unpack('<I', struct.pack('<f', 1.5))[0]",
    "import copy\ny = copy.deepcopy([1, [2]])",
    "import random\nr = random.Random(0)\nx = r.choice([1, 2]) + r.gauss(0, 1)",
    "import bisect, heapq\nh = []\nheapq.heappush(h, 1)\ni = bisect.bisect_left(h, 1)",
    "from itertools import accumulate, chain, product, pairwise\nx = list(chain.from_iterable(pairwise([1, 2, 3])))",
    "from functools import reduce, lru_cache, partial, cache\nf = partial(max, 3)\n@cache\ndef g(n): return n\ng.cache_clear()",
    "from numbers import Number\nisinstance(1, Number)",
    "import string\nx = string.digits.find('3')",
    "from enum import Enum, auto\nclass Kind(Enum):\n    ROW = auto()\nx = Kind.ROW.value, Kind.ROW.name",
    "from typing import NamedTuple, Optional\nclass P(NamedTuple):\n    rows: int\np = P(3)._replace(rows=4)\np.rows",
    "from collections import namedtuple\nP = namedtuple('P', 'width height')\nP(1, 2).height",
    "from collections import namedtuple\nP = namedtuple('P', ['width', 'height'], defaults=(0,))\nP(1).width",
    "from collections import Counter, defaultdict, deque\nd = deque(maxlen=3)\nd.appendleft(1)\nCounter('aab').most_common(1)",
    "from types import SimpleNamespace\ns = SimpleNamespace(tiles=3)\ns.tiles += 1",
    "from dataclasses import dataclass, field, replace\n@dataclass\nclass C:\n    xs: list = field(default_factory=list)\nC().xs.append(1)",
    "print('{} of {:>8.3f}'.format(1, 2.0), '%d' % 3, f'{1:08b}', format(3, 'b'), '{a!r}'.format(a=1))",
    "'{0:{1}}'.format(1, 5)",
    "def f(input, vars=(), id=0):\n    return input + id\n",
    "def f(x):\n    open = x + 1\n    def g():\n        return open\n    return g()",
    "f = lambda input: input * 2",
    "import torch.nn.functional as F\ndef g(x):\n    B, F = x.shape\n    return range(F)\nF.softmax",
    "import triton.language as tl\ndef f(tl):\n    return tl.bit_length()",
    "import torch\nF = torch.nn.functional\ny = F.softmax(torch.ones(3), 0)",
    "import torch\nx = torch.ones(3)\nx.data\nx.add_(1).mul_(2).clamp_min_(0)\nx[0] = 2\ndel x",
    "import torch\nx = torch.ones(3, requires_grad=True)\nx.grad = None\nx.requires_grad = False",
    "import torch\nwith torch.no_grad(), torch.autocast('cpu'):\n    pass",
    "import torch\ntorch.finfo(torch.float16).eps, torch.iinfo(torch.int8).max, torch.float32.itemsize, torch.__version__",
    "import torch\nassert isinstance(torch.Size((1,)), tuple) and type(torch.ones(1)) is torch.Tensor",
    "import torch\ng = torch.Generator().manual_seed(3)\ntorch.randn(3, generator=g)",
    "import torch\nx = torch.linalg.vector_norm(torch.ones(3)) + torch.special.expit(torch.ones(1))",
    "import torch\nclass Fn(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        ctx.shape = x.shape\n        return x\ny = Fn.apply(1)",
    "import torch\nm = torch.nn.Linear(3, 4)\nm.weight.grad, m.in_features, list(m.named_parameters()), m.state_dict().keys()",
    "import torch\no = torch.optim.SGD([torch.ones(1)], lr=1)\no.param_groups[0]['lr'] = 3\no.step()\no.zero_grad()",
    "import torch\ntorch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 1",
    "import torch\nx = torch.ones(3).to('cpu', torch.float64).type(torch.int8)",
    "import triton\nfrom triton.tools.tensor_descriptor import TensorDescriptor\ntriton.set_allocator(lambda size, align, stream: None)",
    "import triton.language as tl\nfrom triton.language.extra import libdevice\ntl.extra.libdevice.tanh\nlibdevice.tanh\ntl.math.exp2",
    "from triton.language.extra.cuda import libdevice\nlibdevice.fast_expf",
    "import triton.language.math as tlm\ntlm.erf",
    "import triton\n@triton.heuristics({'B': lambda args: triton.next_power_of_2(args['N'])})\n@triton.jit\ndef k(x, N): pass",
    "match (1, 'a'):\n    case int(), str(text):\n        print(text)\n    case {'a': 1, **rest}:\n        pass\n    case [1, *_]:\n        pass",
    "class P:\n    __slots__ = ('x',)\n    def __init__(self):\n        self.x = 1\nmatch P():\n    case P(x=1):\n        pass",
    "class V:\n    def __init__(self, n):\n        self._n = n\n    def __add__(self, other):\n        return V(self._n + other.n)\n    @property\n    def n(self):\n        return self._n",
    "class A:\n    def f(self):\n        return 1\nclass B(A):\n    def f(self):\n        return super().f() + 1\n    def __init__(self):\n        super().__init__()",
    "class A:\n    count = 0\n    @classmethod\n    def make(cls):\n        cls.count += 1\n        return cls()\nA.make()\nA.count = 3",
    "class State:\n    m = 0\ns = State()\ns.m = 1\nfor x in [s]:\n    x.m += 1\nState.m = 2",
    "def gen():\n    x = yield 1\n    yield from [x]\ng = gen()\nnext(g)\ng.send(3)\ng.close()",
    "try:\n    1 / 0\nexcept (ZeroDivisionError, OverflowError) as error:\n    print(error, error.args)\nexcept BaseException:\n    raise ValueError('x') from None\nfinally:\n    pass",
    "x = getattr(3, 'real')\nhasattr(x, 'anything at all')",
    "from math import *\nx = sqrt(2)",
    "if __name__ == '__main__':\n    print(__doc__)",
    "x: 'list[int]' = []\ny: type[int] = int\nz = isinstance(int, type)",
    "class P:\n    pass\ndef f(x, y):\n    return type(x) in [int, P] or type(x) == type(y) or type(x) is not y",
    "x = 1\nprint(type(x), repr(type(x)), f'{type(x)}', isinstance(2, (type(x), str)), type(x).__name__)",
    "class A:\n    def __init__(self, n=0):\n        self.n = n\nclass B(A):\n    def __init__(self):\n        A.__init__(self, 1)",
    "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    print(e)\nmatch [1, 2]:\n    case [a, *b]:\n        print(a, b)",
    "a = b = 3\na, *b = [1, 2, 3]\n(c := a)\nassert c == a, 'text'\nglobal_x = [i for i in range(3) if i]\n",
    "def f():\n    global n\n    n = 3\n    def g():\n        nonlocal_x = 1\n        return nonlocal_x\n    return g",
    "'abc'.join(['1']).encode().decode().zfill(3).split('1')\n(3).bit_length()\n(0.5).as_integer_ratio()\nfloat.fromhex('0x1p3')",
    "{1, 2}.symmetric_difference({3})\n{'a': 1}.setdefault('b', 2)\n[3, 1].sort(key=lambda x: -x)\n(1, 2).count(1)\nb'12'.hex()",
    "from collections.abc import Callable, Iterator, Mapping\ndef f(x: Callable[[int], int]) -> Iterator[int]: ...",
    "import math\nmath.fsum([1, 2])\nmath.ldexp(1.0, -3)\nmath.frexp(3)\nmath.nextafter(1.0, math.inf)",
    "import torch as t\nx = t.zeros(3).softmax(0).argmax().item()",
    "from torch import nn, Tensor, float16\nclass M(nn.Module):\n    def forward(self, x):\n        return self.weight * x",
    "import torch\nx = torch.func.vmap(torch.exp)(torch.ones(3))",
    "def f(x, *, cuda=3, handle_count=1):\n    return x",
    "x = '\\N{GREEK SMALL LETTER ALPHA}'\n\u03b1 = 1\nprint(\u03b1)",
    "import torch.nn.functional as F\ndef f(x):\n    B, F = x.shape\n    return [F for _ in range(F)], (lambda y: y + F), {F: F for F in x}",
    "import torch.nn.functional as F\ndef f(q, F):\n    def g(y):\n        return y * F\n    return g(F)",
    "import torch\nimport torch.nn.functional as F\nfrom torch.nn import functional as F\nF.relu",
    "def f():\n    import math\n    return math.pi\ndef g():\n    import math\n    return math.e",
    "import torch\ndef f(x):\n    F = torch.nn.functional\n    return [F.relu(y) for y in x]",
    "from types import SimpleNamespace\ndef f(s: SimpleNamespace) -> SimpleNamespace:\n    return SimpleNamespace(a=s.a)\nisinstance(1, SimpleNamespace)",
    "import enum\nclass K(enum.IntEnum):\n    A = 1\nx: enum.Enum = K.A\nK(1), isinstance(x, enum.Enum)",
    "from dataclasses import dataclass\nfrom functools import total_ordering\n@total_ordering\n@dataclass(frozen=True)\nclass C:\n    x: int\n    def __lt__(self, other):\n        return self.x < other.x",
    "import dataclasses\n@dataclasses.dataclass(eq=False)\nclass C:\n    x: int = 1\ndataclasses.replace(C(), x=2)",
    "import torch\nclass A:\n    def __init__(self, x):\n        self.sum, self._x = x, x\n    @property\n    def x(self):\n"
    "        return self._x\n    @torch.no_grad()\n    def step(self):\n"
    "        self.mean = 1\n    @classmethod\n    def of(cls, x):\n        made = cls(x)\n        made.step()\n        return made\n"
    "def f(a: A) -> A:\n    return A.of(a.x) if isinstance(a, A) else A(1)",
    "class Wrong(ValueError):\n    def note(self):\n        self.sum = 1\ntry:\n    raise Wrong\nexcept Wrong as wrong:\n    wrong.note()",
    "import torch\nclass M(torch.nn.Module):\n    def __init__(self):\n        super(M, self).__init__()\n    def __call__(self, x):\n        return super().__call__(x)",
    "class D(dict):\n    def __getitem__(self, key):\n        return super().__getitem__(key) + 1\n    def __setitem__(self, key, value):\n        super(D, self).__setitem__(key, value)",
    "import torch\nlayers = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Sequential()])\nlayers[0].register_buffer('b', None)",
    "def f(x):\n    return type(x)(3) if type(x) in (int, float) else type(x)(4)",
]


@pytest.mark.parametrize("source", ODD)
@pytest.mark.parametrize("kind", KINDS)
def test_odd_and_honest(source, kind):
    assert lint(source, **KINDS[kind]) is None


def test_numpy_and_lists_are_for_what_counts_no_memory():
    numpy = "import numpy as np\nnp.array([1.0]).sum() + np.linalg.norm(np.ones(3)) + np.random.default_rng(0).normal()\nnp.add.reduce([1])"
    assert lint(numpy) is None and lint(numpy, kernel=True) is None
    assert lint(numpy, counted=True).text == "import numpy"
    assert lint("x = 0\nx.numpy()") is None
    assert lint("x = 0\nx.numpy()", kernel=True).text == lint("x = 0\nx.numpy()", counted=True).text == ".numpy"
    assert lint("x = 0\nx.tolist()") is None and lint("x = 0\nx.tolist()", kernel=True) is None
    assert lint("x = 0\nx.tolist()", counted=True).text == ".tolist"


CONCEPTS = sorted({exercise.concept for exercise in registry.exercises().values()})


@pytest.mark.parametrize("concept", CONCEPTS)
def test_what_the_course_hands_out_is_accepted(concept):
    """Solutions and stubs, for each kind of exercise in the file. `gpukit integrity` has the known answers read."""
    text = (ROOT / "solutions" / f"{concept}.py").read_text()
    exercises = [e for e in registry.exercises().values() if e.concept == concept]
    kinds = {(e.kernel, e.watched): e for e in exercises}
    sources = [(e, source) for e in kinds.values() for source in (text, clear(text))]
    for exercise, source in sources:
        try:
            finding = lint(source, kernel=exercise.kernel, counted=exercise.watched and not exercise.kernel)
        except SyntaxError:
            continue
        assert finding is None, (exercise.id, finding)


# Ways around the check, by what they reach for.
WAYS = {
    "modules": """
        import os
        import gpukit
        from gpukit.kernels import softmax
        from solutions.softmax import softmax_fused
        from . import softmax
        import torch.utils.cpp_extension
        from torch import _C
        from torch import ops
        import threading
        import importlib
        import numpy.ctypeslib
        import torch.multiprocessing as mp
        import triton.runtime.driver
        from triton import knobs
        from torch import *
        import ctypes
        import typing; typing.sys.modules
        import dataclasses; dataclasses.sys.modules
        import enum; enum.bltns.exec('1')
        from enum import bltns
        import collections.abc as c; c.sys
        import statistics; statistics.sys.exit()
        import random; random._os.system('true')
        import random; random.SystemRandom()
        import torch.nn as nn; nn.importlib
        import torch.nn as nn; m = nn.functional; m.importlib
        import torch.nn.functional as F; F.torch.utils
        import torch; torch.functional.F.np.exp(1)
        import torch; torch.nn.parallel.parallel_apply
        import triton.language as tl; tl.core.os
        import triton.language as tl; tl.target_info.current_target
        import einops; einops.parsing
        import operator; operator.attrgetter('__globals__')(print)
        import operator; operator.methodcaller('numpy')(1)
        import functools; functools.wraps
        import functools; functools.update_wrapper(int, int)
        from functools import singledispatch
        import typing; typing.get_type_hints(int)
        from typing import ForwardRef
        from dataclasses import make_dataclass
        from types import FunctionType
        import types; types.CodeType
    """,
    "functions of libraries": """
        import torch; torch.compile(print)
        import torch; torch.ops.aten.softmax
        import torch; torch.load('x')
        import torch; torch.save(1, 'x')
        import torch; torch.hub.load('x', 'y')
        import torch; torch.library.custom_op
        import torch; torch.set_printoptions(precision=17)
        import torch; torch.set_default_device('meta')
        import torch; torch.use_deterministic_algorithms(True)
        import torch; torch.utils.data
        import torch; torch.overrides
        import torch; torch.from_file('x')
        import torch; torch.frombuffer(b'1')
        import torch; torch.jit.script(print)
        import triton; triton.runtime.interpreter
        import triton; triton.testing.do_bench(print)
        import triton; triton.compile
    """,
    "modules as values": """
        import torch; t = torch
        import torch; print(torch)
        import torch; getattr(torch, 'load')
        import torch; [torch][0].load
        import torch; (lambda m: m.load)(torch)
        import torch.nn.functional as F; g = [F]
        import torch; [torch.nn.functional]
        import torch; def_ = {'a': torch.cuda}
        import torch.nn as nn, functools; functools.partial(getattr, nn)
    """,
    "changes to what others made": """
        import torch; torch.equal = print
        import torch; torch.Tensor.sum = print
        import torch; del torch.equal
        import torch; torch.Tensor.item += 1
        import torch; F = torch.nn.functional; F.softmax = print
        import torch; T, x = torch.Tensor, 0; T.clone = print
        import triton.language as tl; m = tl.math; m.exp = print
        import triton; triton.jit = print
        from torch import Tensor; Tensor.sum = print
        x = 0; type(x).name = print
        x = 0; t = type(x); t.name = print
        import torch; [torch.Tensor][0].item = print
        import torch; (torch.Tensor if 1 else 0).item = print
        import torch; setattr(torch.Tensor, 'item', print)
        import torch; delattr(torch.Tensor, 'item')
        x = 0; x.handle = 1
        x = 0; x.__class__ = int
        x = 0; x.shape = 3
        import torch, dataclasses; dataclasses.dataclass(torch.Tensor)
        import torch; from dataclasses import dataclass; dataclass(eq=True)(torch.Tensor)
        from dataclasses import dataclass; d = dataclass
        import dataclasses; d = dataclasses.dataclass
        import dataclasses; list(map(dataclasses.dataclass, [int]))
        import torch; from functools import total_ordering; total_ordering(torch.Tensor)
        for x.item in [print]: pass
        with open('x') as x.item: pass
        import torch; [0 for torch.equal in [print]]
        import torch; (torch.equal, y) = print, 1
        import torch; from math import sqrt as torch; from torch import ops
        f = lambda: 0; f.__code__ = 1
        (lambda: 0).__defaults__ = ()
    """,
    "names as strings": """
        getattr(1, 'real' + 'x')
        getattr(1, '__class__')
        getattr('{}', 'format')('x')
        g = getattr
        next(map(getattr, [print], ['__self__']))
        vars()
        globals()['x']
        locals()
        ().__class__.__bases__
        '{0.real}'.format(1)
        '{0[a]}'.format({})
        '{:{0.real}}'.format(1)
        s = '{0.real}'; s.format(1)
        ('{0' + '.real}').format(1)
        str.format('{0.real}', 1)
        '{}'.format_map({})
        list(map('{0.real}'.format, [1]))
        dir(1)
        import torch; torch.nn.ParameterDict()['__dict__']
        import torch; torch.nn.ParameterList()[0]
        import torch; torch.nn.LSTM(3, 4)
        import torch; torch.nn.Linear(3, 4).get_parameter('weight')
        import torch; torch.nn.Module.set_submodule
        from torch import nn; nn.ModuleList.__getitem__(0, 1)
        import torch; torch.nn.Module.__call__(0)
        import torch; L = torch.nn.ModuleList; L.__getitem__
        import torch; [torch.nn.ModuleList][0].__getitem__
        import torch; type(torch.nn.ModuleList()).__setitem__
        import torch; torch.nn.ModuleList().__setitem__(0, 1)
        list.__len__([])
    """,
    "text that is run": """
        eval('1')
        exec('1')
        compile('1', '', 'eval')
        __import__('os')
        f = eval
        [eval][0]('1')
        eval = eval
        \uff45val('1')
        x = __builtins__
        __loader__
        __spec__
        interpreter_semantic.builder
        type('X', (), {})
        t = type; t('X', (), {})
        breakpoint()
        help()
        exit()
        memoryview(b'1')
        print(__file__)
    """,
    "files": """
        open('x')
        input()
        x = 0; x.tofile('y')
        import numpy as np; np.load('x')
        import numpy as np; np.fromfile('x')
        import numpy as np; np.memmap('x')
        import numpy as np; np.lib.format
        import numpy as np; np.genfromtxt('x')
        import numpy as np; np.core.multiarray
        import numpy as np; np.test()
    """,
    "frames and code": """
        (lambda: 0).__globals__
        (lambda: 0).__code__.co_consts
        (x for x in []).gi_frame.f_back
        (x for x in []).gi_code
        ValueError().__traceback__.tb_frame
        ValueError().with_traceback(None).tb_next
        import functools; functools.partial(print).func.__globals__
        print.__self__
        int.mro()
        int.__subclasses__()
        int.__mro__
        x = 0; x.__dict__
        x = 0; x.__reduce__()
        (x for x in []).throw(ValueError)
    """,
    "what lies under a tensor": """
        x = 0; x.handle.data
        x = 0; x.untyped_storage()
        x = 0; x.storage()
        x = 0; x.set_(x)
        x = 0; x.resize_(3)
        x = 0; x.apply_(abs)
        x = 0; x.map_(x, abs)
        x = 0; x.register_hook(print)
        x = 0; x._backward_hooks
        x = 0; x._make_subclass
        x = 0; x.__array_interface__
        x = 0; x.__cuda_array_interface__
        x = 0; x.__dlpack__()
        x = 0; x.cuda()
        x = 0; x.pin_memory()
        x = 0; x.ctypes
        x = 0; x.__setstate__(1)
        x = 0; x.module_load
    """,
}
LINES = [(kind, line.strip()) for kind, lines in WAYS.items() for line in lines.strip().splitlines()]
BLOCKS = [
    "import torch\nmatch torch.relu:\n    case object(__globals__=g):\n        pass",
    "match 1:\n    case complex(real=x, gi_frame=y):\n        pass",
    "import torch\nmatch 1:\n    case torch.Tensor(x):\n        pass",
    "import torch\nclass T(torch.Tensor):\n    @classmethod\n    def __torch_dispatch__(cls, func, types): pass",
    "class A:\n    def __getattr__(self, name): pass",
    "class A:\n    def __class_getitem__(cls, x): pass",
    "class A:\n    def __init_subclass__(cls): pass",
    "class A:\n    def __reduce__(self): pass",
    "class A:\n    def __del__(self): pass",
    "class A:\n    __eq__ = print\n    __getattr__ = print",
    "class A:\n    __match_args__ = ('__globals__',)",
    "class A(metaclass=print): pass",
    "class A(type): pass",
    "class A(**{'metaclass': print}): pass",
    "def f():\n    yield g.gi_frame.f_back\ng = f()",
    "async def f():\n    pass\nf().cr_frame",
    "async def f():\n    await g",
    "def __getattr__(name): pass",
    "class A:\n    def f(self):\n        self.sum = print\nimport torch\nA.f(torch.Tensor)",
    "class A:\n    @staticmethod\n    def f(x):\n        x.sum = print\nimport torch\nA.f(torch.Tensor)",
    "import torch\ndef f(self):\n    self.sum = print\nf(torch.Tensor)",
    "class A:\n    handle = 1\n    def f(self):\n        self.gi_frame = 2\nx = 0\nx.handle",
    "class A:\n    f_globals = 1\nx = 0\nx.f_globals",
    "class A:\n    _gpu = 1\nx = 0\nmatch x:\n    case object(_gpu=g): pass",
    "class A:\n    def f(self):\n        self.p = 2\nclass B(A): pass\nB.f(0)",
    # A method that sets attributes, with an object that is not of its class.
    *(
        f"import torch\nclass A:\n    def f(self):\n        self.sum = print\n{way}"
        for way in (
            "B = A\nB.f(torch.Tensor)",
            "for k in [A]:\n    k.f(torch.Tensor)",
            "[A][0].f(torch.Tensor)",
            "getattr(A, 'f')(torch.Tensor)",
            "def g():\n    return A\ng().f(torch.Tensor)",
            "def g(k):\n    k.f(torch.Tensor)\ng(A)",
            "def g(k=A):\n    k.f(torch.Tensor)\ng()",
            "list(map(lambda k: k.f(torch.Tensor), (A,)))",
            "match A:\n    case k:\n        k.f(torch.Tensor)",
            "(k := A).f(torch.Tensor)",
            "    g = f\nA.g(torch.Tensor)",
            "    @classmethod\n    def g(cls):\n        cls.f(torch.Tensor)\nA.g()",
            "    @classmethod\n    def g(cls):\n        return cls\nA.g().f(torch.Tensor)",
            "class B:\n    class C(A): pass\nB.C.f(torch.Tensor)",
            "class B:\n    class C(A): pass\nD = B.C\nD.f(torch.Tensor)",
            "super(A, A()).f.__func__(torch.Tensor)",
        )
    ),
    "import torch\nclass A:\n    def __init__(self):\n        self.sum = print\nA.__init__(torch.Tensor)",
    "import torch\nclass A:\n    def __init__(self):\n        self.sum = print\nf = A.__init__\nf(torch.Tensor)",
    "import torch\nclass A(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        ctx.sum = x\n"
    "A.forward(torch.Tensor, print)",
    "import torch\nclass A:\n    @staticmethod\n    def f(self):\n        self.sum = print\nA().f(torch.Tensor)",
    "import torch\ndef d(g):\n    g(torch.Tensor)\nclass A:\n    @d\n    def f(self):\n        self.sum = print",
    "import torch\nclass P:\n    def setter(self, g):\n        g(torch.Tensor)\np = P()\nclass A:\n    @p.setter\n"
    "    def f(self):\n        self.sum = print",
    "import torch\ndef property(g):\n    g(torch.Tensor)\nclass A:\n    @property\n    def f(self):\n        self.sum = print",
    "class A:\n    def f(self):\n        self.p = 2\ntype(A()).f(0)",
    "class A:\n    def _C(self): pass\nx = 0\nx._C",
    "if 0:\n    eval = 1\neval('1')",
    "class A:\n    if 0:\n        eval = 1\n    eval('1')",
    "def f():\n    global open\n    open = 1\ndel open\nopen('x')",
    "def f(eval):\n    return eval\neval('1')",
    "def eval(x): return x\ndel eval\neval('1')",
    "try:\n    pass\nexcept Exception as open:\n    pass\nopen('x')",
    "import torch\ndef f():\n    torch = 1\n    return torch\ntorch.load('x')",
    "import torch\nF = torch.nn.functional\nif 0:\n    F = 1\nF.torch.ops",
    "try:\n    1 / 0\nexcept Exception as e:\n    e.__traceback__.tb_frame.f_back",
    "import torch\nT = torch.Tensor\nT.grad, T.sum = 1, 2",
    "import torch\nfor T in [torch.Tensor]:\n    T.sum = print",
    "import torch\ndef f(T):\n    T.sum = print\nf(torch.Tensor)",
    "import torch\nwith torch.no_grad() as torch.equal:\n    pass",
    "x = (y for y in [])\r\nx.gi_frame",
    "x = 0\rx.untyped_storage()",
    "\x0cimport os",
    # A name that was imported is another one in some scope, and the module in the scope where it is used.
    *(
        f"import torch.nn.functional as F\n{rest}"
        for rest in (
            "def f():\n    [F for F in ()]\n    return F.importlib",
            "def f():\n    return [F.importlib for x in [F for F in ()]]",
            "def f():\n    def g():\n        F = 1\n    return F.importlib",
            "def f():\n    class A:\n        F = 1\n    return F.importlib",
            "def f(c):\n    class A:\n        if c:\n            F = 1\n        y = F.importlib",
            "def f():\n    g = lambda F: 0\n    return [F]",
            "x = (lambda F=F: F.importlib)()",
            "def f(F=F):\n    return F.importlib",
            "def f(*, F=F):\n    return F.importlib",
            "@(lambda m: lambda f: m.importlib)(F)\ndef f(F):\n    return 1",
            "def f(F: F):\n    return f",
            "class F(F.importlib): pass",
            "def f():\n    def g():\n        nonlocal F\n        F = 1\n    from torch.nn import functional as F\n    return [F]",
            "def f():\n    from math import pi as F\nx = [F]",
            "from math import pi as F\nF.importlib",
        )
    ),
    "import torch\nimport math\nz = math.pi\nz = torch.nn.functional\n[z]",
    "import torch\n[(y := torch.nn.functional)]",
    "import torch\n(y := torch.nn.functional).importlib",
    "import torch\nb = [0]\na = b[0] = torch.nn.functional",
    "import torch\n*b, a, c = 1, torch.nn.functional, 2, 3",
    "class C:\n    import torch.nn.functional as F\nC.F",
    "class C:\n    from torch.nn import functional\nC().functional",
    "import torch\nclass C:\n    F = torch.nn.functional\nC.F",
    "from math import *\nsin.__self__.__loader__",
    "match '{0.__globals__}':\n    case str(format=f):\n        f(1)",
    "from types import SimpleNamespace\nSimpleNamespace(**{'__array_interface__': {}})",
    "from types import SimpleNamespace\nSimpleNamespace(__array_interface__={})",
    "import types\nS = types.SimpleNamespace\nS(**{'__reduce_ex__': print})",
    "from types import SimpleNamespace\nclass S(SimpleNamespace): pass\nS(**{'__copy__': print})",
    "from types import SimpleNamespace\ntype(SimpleNamespace())(**{'__copy__': print})",
    "from enum import Enum\nEnum('E', {'A': 1, '__getattr__': print})",
    "from enum import Enum\nclass E(Enum): pass\nE('F', {'A': 1, '__getattr__': print})",
    "import enum\nE = enum.Enum",
    *(
        f"import math\nclass E:\n    def __eq__(self, t):\n        return t('X', (), {{}})\n{way}"
        for way in (
            "t = type(int)",
            "t, u = type(int), 1",
            "(t := type(int))",
            "for t in [type(int)]: pass",
            "for t in map(type, [int]): pass",
            "def f(t=type(int)): pass",
            "(lambda t: t)(type(int))",
            "match type(int):\n    case t: pass",
            "def f(x): return type(x)",
            "(type(int) if 1 else 0)('X', (), {})",
            "(0 or type(int))('X', (), {})",
            "[type(int)][0]('X', (), {})",
            "[t for t in [type(int)]]",
            "@type(int)\ndef f(): pass",
            "type(int) == E()",
            "type(int) in (int, E())",
            "int = E()\ntype(float) != int",
            "E()[type(int)]",
        )
    ),
    *(
        f"class A:\n    {way}"
        for way in (
            "class __getattr__: pass",
            "try:\n        1 / 0\n    except Exception as __getattr__: pass",
            "match print:\n        case __getattr__: pass",
            "match [print]:\n        case [*__getattr__]: pass",
            "match {}:\n        case {**__getattr__}: pass",
        )
    ),
    "import math as __builtins__",
    "def f(__class__): pass",
    "from types import SimpleNamespace\nt = type(SimpleNamespace())\nt(**{'__copy__': print})",
    "from types import SimpleNamespace\nSimpleNamespace().__init__(**{'__copy__': print})",
    "from types import SimpleNamespace\ngetattr(SimpleNamespace(), '__init__')(**{'__copy__': print})",
    "from types import SimpleNamespace as S\nmatch S():\n    case S(__init__=f):\n        f(**{'__copy__': print})",
    "from types import SimpleNamespace\nSimpleNamespace({'__copy__': print})",
    "from types import SimpleNamespace\ntype(SimpleNamespace())({'__copy__': print})",
    "type(int)('X', (), {'__getattr__': print})",
    "type(int)(*['X', (), {}])",
    "type[int]('X', (), {'__getattr__': print})",
    "class A(type(int)):\n    def __call__(cls): return 1",
    "import torch\nfrom functools import total_ordering\n@total_ordering(torch.Tensor)\nclass A: pass",
    "import torch\nfrom functools import total_ordering\n@total_ordering(cls=torch.Tensor)\nclass A: pass",
    "import torch\nfrom functools import total_ordering\n@total_ordering(**{'cls': torch.Tensor})\nclass A: pass",
    "from dataclasses import dataclass\n@(lambda c: dataclass(int))\nclass A: pass",
    "from dataclasses import dataclass\n@dataclass\ndef f(): pass",
    "from dataclasses import dataclass as sqrt\nfrom math import sqrt\nsqrt(int)",
    # Text that a list of modules would take for an attribute's name.
    *(
        f"import torch\nclass L(torch.nn.ModuleList):\n    {way}\nL()[0] = {{}}"
        for way in (
            "def _get_abs_string_index(self, i):\n        return '__array_interface__'",
            "_get_abs_string_index = lambda self, i: '__array_interface__'",
            "def f(self):\n        self._get_abs_string_index = lambda i: '__array_interface__'",
            "from math import sqrt as _get_abs_string_index",
            "class _get_item_by_idx: pass",
        )
    ),
    "import torch\nclass K:\n    _buffers = {'__getattribute__'}\nclass M(torch.nn.Module):\n    def get_submodule(self, t):\n"
    "        return K\nM().get_buffer('__getattribute__')",
    "import torch\nclass A:\n    def __call__(self):\n        self.sum = print\nA.__call__(torch.Tensor)",
    "import torch\ndef super():\n    return torch.nn.ModuleList\nsuper().__setitem__",
    "from types import SimpleNamespace\ndef super():\n    return SimpleNamespace()\nsuper().__init__(**{'__copy__': print})",
    "import torch\nclass A(torch.nn.ModuleList):\n    pass\nsuper(A, A).__setitem__",
    # Functions of the file's with the names of Python's.
    "def print(t):\n    return t('X', (), {})\nprint(type(int))",
    "def isinstance(x, t):\n    return t('X', (), {})\nisinstance(1, type)",
    "class A:\n    def print(self, t):\n        return t('X', (), {})\nA().print(type(int))",
]


def refused(source: str) -> None:
    for kind in KINDS.values():
        finding = lint(source, **kind)
        assert finding is not None, source
        assert finding.line >= 1 and finding.text and finding.instead.strip()


@pytest.mark.parametrize(("way", "line"), LINES, ids=[line for _, line in LINES])
def test_ways_around_the_check_are_refused(way, line):
    refused(line.replace("; ", "\n"))


@pytest.mark.parametrize("source", BLOCKS)
def test_longer_ways_around_the_check_are_refused(source):
    refused(source)


def test_the_sentence_says_what_to_use_instead():
    assert "files" in lint("open('x')").instead
    assert "x.device" in lint("x = 0\nx.cuda()").instead
    assert "f-string" in lint("'{0.real}'.format(1)").instead
    assert "isinstance" in lint("from functools import singledispatch").instead
    finding = lint("import math\n\n\nimport subprocess.run")
    assert (finding.line, finding.text) == (4, "import subprocess") and "process" in finding.instead
    for key, sentence in INSTEAD.items():
        assert key.strip() and not sentence[0].isupper() and not sentence.endswith(".") and len(sentence) < 120


def _listed():
    """What the lists name, each with its module and name."""
    for module, names in MODULES.items():
        try:
            found = importlib.import_module(module)
        except ImportError:  # einops need not be there
            continue
        for name in names:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield module, name, getattr(found, name, None)


def test_no_name_leads_to_a_module_that_is_not_listed():
    """torch.functional leads to NumPy's files, statistics.sys to everything."""
    for module, name, value in _listed():
        assert not isinstance(value, types.ModuleType) or f"{module}.{name}" in MODULES, f"{module}.{name}"


# What reads or sets attributes whose names it is given as text, and why nobody can choose them in an exercise.
BY_TEXT = {
    **dict.fromkeys(
        (f"Module.{kind}" for kind in ("get_submodule", "set_submodule", "get_parameter", "get_buffer")), "NEVER"
    ),
    **dict.fromkeys((f"ModuleList.{name}" for name in ("__setitem__", "__delitem__")), "LOOKUPS"),
    **dict.fromkeys((f"Sequential.{name}" for name in ("__setitem__", "__delitem__")), "LOOKUPS"),
    "Module._load_from_state_dict": "sets tensors, of the module itself",
    "Tensor.__deepcopy__": "__slots__ of a class of the file's",
    "autocast.__init__": "the name of a backend, PyTorch's own",
    "finfo.__str__": "names that stand in it",
    "fields": "a name that stands in it",
    "replace": "the fields of a class of the file's",
    "total_ordering": "a decorator of a class of the file's",
}


def _by_text(function: types.FunctionType) -> bool:
    """Whether a function gives getattr, setattr or delattr a name that is no text written out in it."""
    asked = {"getattr", "setattr", "delattr"}
    if not asked & {*function.__code__.co_names}:
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except OSError:  # written by a program, as dataclass's methods are
        return False
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") in asked)
    return any(not isinstance(call.args[1], ast.Constant) for call in calls)


def test_no_name_that_is_listed_reads_attributes_by_text():
    values = [value for _, _, value in _listed()]
    owners = {owner for value in values if isinstance(value, type) for owner in value.__mro__}
    methods = [getattr(m, "__func__", getattr(m, "fget", m)) for owner in owners for m in vars(owner).values()]
    functions = {f for f in (*values, *methods) if isinstance(f, types.FunctionType)}
    found = {function.__qualname__ for function in functions if _by_text(function)}
    assert found <= BY_TEXT.keys(), found - BY_TEXT.keys()
    assert "Module.get_submodule" in found


def test_what_is_never_allowed_is_in_no_list():
    tensor = {f"{name}_" for name in TENSOR} | TENSOR
    assert not NEVER & (VALUES | tensor)
    assert not {"cuda", "numpy", "pin_memory", "register_forward_hook", "share_memory"} & (VALUES | tensor)


@pytest.mark.parametrize("concept", CONCEPTS)
def test_a_stub_says_what_may_be_imported(concept):
    counted = any(e.watched and not e.kernel for e in registry.exercises().values() if e.concept == concept)
    assert stubs.may_import(counted) in (ROOT / "exercises" / f"{concept}.py").read_text()
    for name in importable(counted):
        assert lint(f"import {name}", counted=counted) is None


class _Counted(set):
    """A set that counts what goes into a union with it."""

    work = 0

    def __or__(self, other):
        _Counted.work += len(self) + len(other)
        return set.__or__(self, other)


def _work(source: str, monkeypatch) -> int:
    """How much reading a file takes: lines of Python that run, elements that unions copy, lines that symtable reads."""
    lines, before, symbols = 0, sys.gettrace(), symtable.symtable

    def trace(frame, event, arg):
        nonlocal lines
        lines += event == "line"
        return trace

    def counted(text, *where):
        nonlocal lines
        lines += text.count("\n")
        return symbols(text, *where)

    _Counted.work = 0
    with monkeypatch.context() as patch:
        patch.setattr(lint_module, "set", _Counted, raising=False)
        patch.setattr(symtable, "symtable", counted)
        sys.settrace(trace)
        try:
            finding = lint(source)
        finally:
            sys.settrace(before)
    assert finding is None, finding
    return lines + _Counted.work


LONG = {  # by what was read again for each use
    "a builtin's name": ("def g(input):\n", "    input\n"),
    "many functions": ("", "def g{i}(input):\n    return input\n"),
    "type(a) compared": ("def g(a, b):\n", "    type(a) is b\n"),
    "type(a) compared with classes": ("def g(a):\n", "    type(a) in (int, float)\n"),
    "type(a) called": ("def g(a):\n", "    type(a)()\n"),
    "a chain of attributes": ("def g(a):\n    a", ".T"),
    "a chain after a module": ("import torch\ntorch.pi", ".real"),
    "modules under other names": ("import torch\n", "F{i} = torch.nn.functional\n"),
    "classes with setters": (
        "",
        "class A{i}:\n    def f{i}(self):\n        self.x = 1\n    def g(self):\n        A{i}.g\n",
    ),
    "namespaces": ("from types import SimpleNamespace\n", "SimpleNamespace(a='text'[{i}])\n"),
}


@pytest.mark.parametrize("kind", LONG)
def test_a_file_twice_as_long_takes_twice_the_work(kind, monkeypatch):
    head, line = LONG[kind]
    short, long = (
        _work(head + "".join(line.replace("{i}", str(i)) for i in range(n)), monkeypatch) for n in (200, 400)
    )
    assert long < 2.2 * short


# Accepted, and harmless: what they change is their own process's, and the verdict is on what the function gives.
HARMLESS = [
    ("print('PASS')\nreturn a + b", "pass"),
    ("raise SystemExit(0)", "error"),
    ("return object()", "fail"),
    ("class N(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = None\nreturn N(0)", "fail"),
    ("class N:\n    def __eq__(self, other):\n        return True\nreturn N()", "fail"),
    ("import random\nrandom.seed(0)\nreturn a + b", "pass"),
    ("from fractions import Fraction\nreturn int(Fraction(a) + b)", "pass"),
    ("import numpy as np\nreturn int(np.add(a, b))", "pass"),
    ("import statistics\nreturn int(2 * statistics.fmean([a, b]))", "pass"),
    ("import torch\nreturn torch.tensor([a, b]).sum().item()", "pass"),
]


@pytest.mark.parametrize(("body", "state"), HARMLESS)
def test_what_is_accepted_is_harmless(body, state):
    indented = "\n".join(f"    {line}" for line in body.splitlines())
    verdict = judging.judge_source(ADD, f"def add(a, b):\n{indented}\n", seed=1)
    assert verdict.state == state, str(verdict)


def test_a_module_that_was_not_imported_is_no_way_around():
    """Python says that the name is not defined, also where Triton's interpreter has it: nothing lies about in the file."""
    assert lint("def f(x):\n    return np.linspace(x)") is None
    source = DOUBLE_SOURCE.replace("    return y\n", "    return inspect.currentframe() or y\n")
    verdict = judging.judge_source(DOUBLE, source, seed=1)
    assert verdict.diagnosis == "exception" and "NameError" in str(verdict), str(verdict)


def test_a_slip_in_a_name_is_told_as_one():
    assert lint("def f(x):\n    return x.shpae").instead == "is .shape meant?"
    assert "meant" not in lint("def f(x):\n    return x.read()").instead, "that is no slip for .real"
    assert (
        lint("import triton.language as tl\ndef f(x):\n    tl.sotre(x, 1)").instead == "is triton.language.store meant?"
    )
    assert "enough for every exercise" in lint("def f(x):\n    return x.frobnicate()").instead


def test_a_refusal_names_line_thing_and_way_out():
    text = str(judging.judge_source(ADD, "import pickle\n\n\ndef add(a, b):\n    return pickle.loads(a) + b\n", seed=1))
    assert "line 1 uses import pickle" in text and "files" in text


@pytest.mark.parametrize("text", ["x = " + "1+" * 20_000 + "1", "if 0: pass\n" + "elif 0: pass\n" * 3_000])
def test_what_is_nested_too_deeply_is_said_so(text):
    assert "nested too deeply" in str(judging.judge_source(ADD, f"def add(a, b):\n    return a + b\n{text}\n"))
