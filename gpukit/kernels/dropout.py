"""Dropout whose random numbers are a function of the seed and an element's place, and its gradient: the same kernel.

The same kernel, to be read first: `dropout` in solutions/triton_basics.py.

    y = x / (1 - p) where the element's random number is p or more, else 0          dx = dropout(dy), with the same numbers

Traffic: one read and one write, forward and backward, the least possible. No mask is kept: the backward pass computes the
random numbers again, from the seed.

An element's number depends on the seed and on its index in the flattened tensor, on nothing else: not on strides, dtype,
device or how the kernel is launched. One Philox call makes four numbers of 32 bits, of which the upper 24 are compared
with p 2^24. A call for each element, as tl.rand makes it, is more arithmetic than memory gives time for: 200 µs for
16384 x 4096 bf16 on an H200. Four elements to a call: 91 µs. With 7 rounds instead of 10, the fewest that pass the tests
of the source: 76 µs, where a copy takes 68 and PyTorch's dropout, which also writes a mask, 115.

Sources: Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html; Philox: Salmon et al. 2011,
https://doi.org/10.1145/2063384.2063405
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check, check_device
from gpukit.kernels._autograd import differentiable, operator
from gpukit.kernels._dtypes import acc_dtype
from gpukit.kernels._launch import launch
from gpukit.kernels._rows import as_rows, empty

# Elements LANES apart share a Philox call of so many rounds, and BITS of its words are compared: what a seed means, so not
# to be tuned. The kernel reads them itself, since every argument costs the CPU time at each launch.
LANES, ROUNDS, BITS = tl.constexpr(1024), tl.constexpr(7), tl.constexpr(24)
NUM_WARPS = 4


@triton.jit(do_not_specialize=["seed", "threshold"])
def dropout_kernel(
    x_ptr, y_ptr, seed_ptr,
    seed, threshold,
    stride_xm, stride_xn,
    total, N,
    FLAT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """4 LANES elements per program. seed_ptr: None, or where the seed lies. FLAT: x is contiguous,
    without need of strides and N."""
    block = tl.program_id(0)
    lane = tl.arange(0, LANES)
    start = block.to(tl.int64) * (4 * LANES)
    if seed_ptr is not None:
        seed = tl.load(seed_ptr)
    words = tl.philox(seed, lane, block, 0, 0, ROUNDS)
    # 1 / (1 - p) for the p that the comparison makes of it, so that the mean stays exactly; at p = 1 nothing is kept.
    scale = 2.0**BITS / tl.maximum((threshold - 2**BITS) * -1, 1).to(ACC)
    for i in tl.static_range(4):
        offs = start + i * LANES + lane
        mask = offs < total
        if FLAT:
            x_offs = offs
        else:
            # One division of 64 bits a program; those of each element are of 32 bits, a quarter of the work.
            n = (start % N).to(tl.uint32) + (lane + i * LANES).to(tl.uint32)
            columns = tl.cast(N, tl.uint32)
            x_offs = (start // N + (n // columns).to(tl.int64)) * stride_xm + (n % columns).to(tl.int64) * stride_xn
        x = tl.load(x_ptr + x_offs, mask=mask).to(ACC)
        keep = (words[i] >> (32 - BITS)).to(tl.int32) >= threshold
        tl.store(y_ptr + offs, tl.where(keep, x * scale, 0.0), mask=mask)


def dropout_fwd(x: Tensor, p: float, seed: int, seed_tensor: Tensor | None) -> Tensor:
    y = empty(x)
    total = x.numel()
    if total == 0:
        return y
    flat = x.is_contiguous()
    x = x if flat else as_rows(x, copy_interleaved=True)
    strides, N = ((0, 0), 0) if flat else (x.stride(), x.shape[1])
    launch(
        dropout_kernel, -(-total // (4 * LANES.value)),
        x, y, seed_tensor, seed, round(p * 2**BITS.value), *strides, total, N, FLAT=flat, ACC=acc_dtype(x.dtype), num_warps=NUM_WARPS,
    )  # fmt: skip
    return y


# The gradient is the same kernel over dy: forward and backward are one operator, and the second derivative is there.
_operator = operator("dropout", dropout_fwd, like=lambda x, p, seed, seed_tensor: empty(x))
_dropout = differentiable(
    _operator,
    _operator,
    # The seed's tensor is saved, so that autograd notices when it has been changed before the backward pass.
    keep=lambda inputs, y: (inputs[3:], inputs[1:3]),
    gradients=lambda backward, ctx, dy: backward(dy, *ctx.settings, *ctx.saved_tensors),
    again=lambda ctx, dy: _dropout(dy, *ctx.settings, *ctx.saved_tensors),
)


def dropout(x: Tensor, p: float, seed: int | Tensor) -> Tensor:
    """x / (1 - p) with probability 1 - p and 0 with probability p, for each element.

    x       any shape and strides, float16, bfloat16, float32 or float64; computed in float32 (float64 for float64)
    p       in [0, 1], rounded to a multiple of 2^-24. A dropped element is 0 even where x is infinite or NaN
    seed    0 to 2^63 - 1; the same seed drops the same elements. Each layer and each step needs its own. Or an int64 tensor
            of one element on x's device, which a CUDA graph reads whenever it is replayed; it must not be changed between
            a forward pass and its backward pass
    Returns y, contiguous, in x's shape and dtype. Unlike torch.nn.functional.dropout it leaves PyTorch's random numbers
    alone. Raises TypeError for another dtype, ValueError for p or a seed out of range, a tensor without dimensions or one
    on a device that Triton cannot use.
    """
    check("dropout", x=x)
    if not (isinstance(p, float | int) and 0 <= p <= 1):
        raise ValueError(f"dropout: p must be a number in [0, 1], got {p!r}")
    number, seed_tensor = 0, None
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                "dropout: seed must be an integer or an int64 tensor of one element, got a tensor of "
                f"{seed.dtype} {list(seed.shape)}"
            )
        check_device("dropout", "seed", seed, "x", x)
        seed_tensor = seed
    elif not isinstance(seed, int):
        raise TypeError(f"dropout: seed must be an integer or an int64 tensor of one element, got {seed!r}")
    elif not 0 <= seed < 2**63:
        raise ValueError(f"dropout: seed must be 0 to 2^63 - 1, got {seed}")
    else:
        number = seed
    return _dropout(x, p, number, seed_tensor)
