"""Matrix products in 8 bits, c = a @ b, for training and inference: twice the tensor cores' rate of 16 bits.

The same kernel, to be read first: `matmul_ordered` in solutions/matmul.py.

Eight bits hold 3 bits of mantissa (e4m3, up to 448) or 2 (e5m2, up to 57,344), so each operand is first divided by a factor
that brings its largest element to the format's largest number, and the product is multiplied by both factors. A factor
belongs to a whole matrix ("tensor") or to a row of a and a column of b ("row"), which keeps the others' digits where one row
is much larger. gpukit.kernels._cast_transpose makes the factors and the operands, gpukit.kernels._fp8_hopper is the product
on Hopper, and `fp8_matmul_kernel` the product anywhere else.

Sums: on Hopper the tensor cores add 8-bit products with about 14 bits. Every PROMOTED products the sums therefore go into
others, in float32, and those of the tensor cores begin at 0 again.

Gradients: two more products in 8 bits, of dc, in e5m2 ("tensor": gradients need its range) or e4m3 ("row"), with what the
forward pass has kept of a and b in 8 bits. Limits: no second derivative.
Sources: https://arxiv.org/abs/2209.05433 (the formats); https://arxiv.org/abs/2412.19437, section 3.3 (14 bits)
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check_device, check_runs, check_tensors
from gpukit.kernels._autograd import differentiable, operator
from gpukit.kernels._cast_transpose import scaled_copies
from gpukit.kernels._device import for_hopper, multiprocessors, properties
from gpukit.kernels._launch import interpreted, launch
from gpukit.kernels._tiles import tile_at

SCALINGS = ("tensor", "row")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PROMOTED = 128
GROUP_M = 8


@triton.jit
def fp8_matmul_kernel(
    a_ptr, b_ptr, a_factor_ptr, b_factor_ptr, c_ptr,
    stride_a_factor, stride_b_factor, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """One tile of c [M, N] per program, of a [M, K] and b [N, K], all contiguous: tensor cores read 8 bits along K."""
    pid_m, pid_n = tile_at(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + offs_m[:, None] * K + offs_k[None, :]
    b_ptrs = b_ptr + offs_n[None, :] * K + offs_k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        mask_k = offs_k < K - k
        a = tl.load(a_ptrs, mask=(offs_m < M)[:, None] & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=(offs_n < N)[None, :] & mask_k[:, None], other=0.0)
        # No more than a block of K with the tensor cores' 14 bits.
        acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K
    a_factor = tl.load(a_factor_ptr + offs_m * stride_a_factor, mask=offs_m < M, other=0.0)
    b_factor = tl.load(b_factor_ptr + offs_n * stride_b_factor, mask=offs_n < N, other=0.0)
    # One after the other: the product of two small factors may be no float32.
    acc = acc * a_factor[:, None] * b_factor[None, :]
    tl.store(c_ptr + offs_m[:, None] * N + offs_n[None, :], acc, mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


# ------------------------------------------------------------------------------------------------------------ launchers
def product(a: Tensor, b: Tensor, a_factors: Tensor, b_factors: Tensor, dtype: torch.dtype) -> Tensor:
    """c [M, N] in dtype, 16 bits, of a [M, K] and b [N, K] in 8 bits, contiguous, and their factors, float32 [1] or [M], [N]."""
    (M, K), N = a.shape, b.shape[0]
    c = a.new_empty((M, N), dtype=dtype)
    if c.numel() == 0 or K == 0:
        return c.zero_()
    a_factors, b_factors = a_factors.expand(M), b_factors.expand(N)
    # The TMA unit takes rows of whole 16 bytes. Fewer rows than a tile's are too little work for it.
    hopper = for_hopper("_fp8_hopper", a.device) if K % 16 == 0 and N % 8 == 0 and min(M, N) >= 128 else None
    if hopper is not None:
        hopper.fp8_hopper(a, b, c, a_factors, b_factors, multiprocessors(a.device), PROMOTED)
        return c
    BLOCK = 32 if interpreted() else 128 if min(M, N) > 64 else 64
    launch(
        fp8_matmul_kernel, -(-M // BLOCK) * -(-N // BLOCK), a, b, a_factors, b_factors, c,
        a_factors.stride(0), b_factors.stride(0), M, N, K,
        BLOCK_M=BLOCK, BLOCK_N=BLOCK, BLOCK_K=PROMOTED, GROUP_M=GROUP_M,
        num_warps=8 if BLOCK == 128 else 4, num_stages=3,
    )  # fmt: skip
    return c


def fp8_matmul_fwd(
    a: Tensor, b: Tensor, by_row: bool, for_a: bool, for_b: bool
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """c [M, N] of a [M, K] and b [K, N]; and for the gradient of b a's columns [K, M] in 8 bits, with their factors, and for
    that of a b's rows [K, N]. Copies are uint8, the bits of E4M3: much of PyTorch has no arithmetic in 8 bits."""
    gpu = properties(a.device)
    if gpu is not None and gpu.compute_capability < (8, 9):
        major, minor = gpu.compute_capability
        raise ValueError(f"fp8_matmul: products in 8 bits need compute capability 8.9 or later, got {major}.{minor}")
    left = scaled_copies(a, E4M3, by_row, rows=True, columns=for_b)
    right = scaled_copies(b, E4M3, by_row, rows=for_a, columns=True)
    c = product(left.rows, right.columns, left.row_factors, right.column_factors, result_dtype(a.dtype))
    of_a, of_b = (None if x is None else x.view(torch.uint8) for x in (left.columns, right.rows))
    return c, of_a, left.column_factors, of_b, right.row_factors


def fp8_matmul_bwd(
    dc: Tensor, a: Tensor | None, a_factors: Tensor | None, b: Tensor | None, b_factors: Tensor | None, by_row: bool,
    b_lies_in_columns: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """da [M, K] = dc b^T and db [K, N] = a^T dc, for as many of a [K, M] and b [K, N] as there are."""
    there = scaled_copies(dc, E4M3 if by_row else E5M2, by_row, rows=b is not None, columns=a is not None)
    da = db = None
    if b is not None:
        da = product(there.rows, b.view(E4M3), there.row_factors, b_factors, dc.dtype)
    if a is not None and b_lies_in_columns:  # db lies in memory as b does
        db = product(there.columns, a.view(E4M3), there.column_factors, a_factors, dc.dtype).mT
    elif a is not None:
        db = product(a.view(E4M3), there.columns, a_factors, there.column_factors, dc.dtype)
    return da, db


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of a product of operands that came in dtype."""
    return torch.bfloat16 if dtype == torch.float32 else dtype


def _fwd_like(a: Tensor, b: Tensor, by_row: bool, for_a: bool, for_b: bool) -> tuple:
    (M, K), N = a.shape, b.shape[1]
    factors = lambda n: a.new_empty(n if by_row else 1, dtype=torch.float32)  # noqa: E731
    of_a = (a.new_empty((K, M), dtype=torch.uint8), factors(K)) if for_b else (None, None)
    of_b = (a.new_empty((K, N), dtype=torch.uint8), factors(K)) if for_a else (None, None)
    return a.new_empty((M, N), dtype=result_dtype(a.dtype)), *of_a, *of_b


def _bwd_like(dc, a, a_factors, b, b_factors, by_row, b_lies_in_columns) -> tuple:
    M, N = dc.shape
    da = None if b is None else dc.new_empty((M, b.shape[0]))
    if a is None:
        return da, None
    K = a.shape[0]
    return da, dc.new_empty((N, K)).mT if b_lies_in_columns else dc.new_empty((K, N))


def _keep(inputs: tuple, results: tuple) -> tuple:
    a, b, by_row, *_ = inputs
    return results[1:], (a.dtype, by_row, b.stride(0) == 1 != b.stride(1))


def _gradients(backward, ctx, dc: Tensor) -> tuple:
    a, a_factors, b, b_factors = ctx.saved_tensors
    dtype, by_row, b_lies_in_columns = ctx.settings
    need_a, need_b, *_ = ctx.needs_input_grad
    of_a = (a, a_factors) if need_b else (None, None)
    of_b = (b, b_factors) if need_a else (None, None)
    da, db = backward(dc, *of_a, *of_b, by_row, b_lies_in_columns)
    return da.to(dtype) if need_a else None, db.to(dtype) if need_b else None


_fp8_matmul = differentiable(
    operator("fp8_matmul", fp8_matmul_fwd, like=_fwd_like),
    operator("fp8_matmul_bwd", fp8_matmul_bwd, like=_bwd_like),
    keep=_keep,
    gradients=_gradients,
)


# --------------------------------------------------------------------------------------------------------------- public
def _check(a: Tensor, b: Tensor, scaling: str) -> None:
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise TypeError(f"fp8_matmul: {name} must be float16, bfloat16 or float32, got {x.dtype}")
    if a.dtype != b.dtype:
        raise TypeError(f"fp8_matmul: a and b must have one dtype, got {a.dtype} and {b.dtype}")
    if a.ndim < 1 or b.ndim != 2 or a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"fp8_matmul: a [..., K] and b [K, N] must agree in K, got {list(a.shape)} and {list(b.shape)}"
        )
    if scaling not in SCALINGS:
        raise ValueError(f"fp8_matmul: scaling must be {' or '.join(map(repr, SCALINGS))}, got {scaling!r}")


def fp8_matmul(a: Tensor, b: Tensor, scaling: str = "tensor") -> Tensor:
    """a @ b of operands that are rounded to 8 bits, and gradients that are made the same way.

    a [..., K] and b [K, N]: float16, bfloat16 or float32, any strides. A linear layer's b is weight.mT.
    scaling  what has a factor of its own: "tensor", each matrix; "row", each row of a and each column of b. An infinity or
             a NaN makes NaN of all that shares its factor
    Each element is rounded to about 2^-4 of itself, or, where it is small, to 2^-18 of the largest one beside it.

    Returns c [..., N], contiguous, in a's dtype; of float32 in bfloat16, whose digits are more than enough. Under autocast a
    and b are first cast, as by torch.matmul. Raises TypeError for a dtype, and ValueError for a shape, a device or a
    scaling that does not fit.
    """
    check_tensors("fp8_matmul", a=a, b=b)
    for name, x in (("a", a), ("b", b)):
        check_runs("fp8_matmul", name, x)
    check_device("fp8_matmul", "b", b, "a", a)
    if torch.is_autocast_enabled(a.device.type):
        to = torch.get_autocast_dtype(a.device.type)
        a, b = (x.to(to) if x.dtype in (torch.float16, torch.bfloat16, torch.float32) else x for x in (a, b))
    _check(a, b, scaling)
    shape, K = a.shape, a.shape[-1]
    grad = torch.is_grad_enabled()
    rows = a if a.ndim == 2 else a.reshape(shape[:-1].numel(), K)
    c = _fp8_matmul(rows, b, scaling == "row", grad and a.requires_grad, grad and b.requires_grad)
    return c if a.ndim == 2 else c.view(*shape[:-1], b.shape[1])


def fp8_matmul_by_row(a: Tensor, b: Tensor) -> Tensor:
    """fp8_matmul with scaling="row": what benchmarks compare."""
    return fp8_matmul(a, b, "row")


def prepared_product(a: Tensor, b: Tensor, by_row: bool = False) -> Callable[[], Tensor]:
    """The product of a [M, K] and b [N, K] in 16 bits, to be called when both are in 8: what benchmarks time of it alone."""
    left, right = (scaled_copies(x, E4M3, by_row, rows=True, columns=False) for x in (a, b))
    return lambda: product(left.rows, right.rows, left.row_factors, right.row_factors, result_dtype(a.dtype))


def prepared_product_by_row(a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """`prepared_product` with a factor for each row."""
    return prepared_product(a, b, by_row=True)
