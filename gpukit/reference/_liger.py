"""Liger's kernels written in NVIDIA's CuTe DSL, as providers of a benchmark.

Liger has two implementations of an operation. Each module of this folder calls the one in Triton under the name
"liger-triton"; the one in CuTe is "liger-cutedsl". Left alone, Liger chooses by what can be imported, so a row that said no
more than "liger" could be either.
"""

import os
from collections.abc import Callable


def cutedsl(name: str, *after, first: bool = False, **options) -> Callable:
    """`liger_kernel.functional.<name>` in CuTe, a function of the reference's arguments.

    after    arguments that follow those
    first    take the first of several results: the losses return what they may also report, here None
    options  arguments by name
    The function raises ModuleNotFoundError where Liger or CuTe is not installed.
    """

    def call(*inputs):
        import cutlass  # noqa: F401, which Liger itself would only miss with a message of its own
        from liger_kernel import functional

        os.environ["LIGER_KERNEL_STRICT"] = "1"  # else what CuTe does not take goes to Triton, under this name
        result = getattr(functional, name)(*inputs, *after, **options, impl="nvidia-cutedsl")
        return result[0] if first and isinstance(result, tuple) else result

    return call
