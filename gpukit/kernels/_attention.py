"""What the FlashAttention kernels share: blocks of one head, which of them see each other, and one step of a softmax that
goes over blocks."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Numbers that change from call to call: kernels are compiled once for all of them, not anew for those that 16 divides.
SIZES = ["H", "T_q", "T_k", "left", "right"]


def check_scale(op: str, scale: float) -> None:
    """Raise ValueError for a scale with which float32 scores become 0 or infinite on the way."""
    if not 1e-37 <= scale <= 1e37:
        raise ValueError(f"{op}: scale must be positive, 1e-37 to 1e37, got {scale}")


@triton.jit
def _sequence(cu_ptr, batch, T):
    """Where a sequence begins and how long it is. cu_ptr: the beginnings in a packed batch, or None if all have length T."""
    first = batch * 0
    if cu_ptr is not None:
        first = tl.load(cu_ptr + batch).to(tl.int64)
        T = (tl.load(cu_ptr + batch + 1) - first).to(tl.int32)
    return first, T


@triton.jit
def _load(
    ptr, first, stride_t, stride_d, T,
    MASKED: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows `first` and following of one head, [ROWS, BLOCK_D]. MASKED: those from T on are zeros."""
    offs_t = tl.arange(0, ROWS)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    # int64 up to the block; inside of it int32, which the launcher makes sure of, takes half the registers.
    ptrs = ptr + tl.cast(first, tl.int64) * stride_t + (offs_t * stride_t + offs_d * stride_d)
    if MASKED:
        return tl.load(ptrs, mask=(first + offs_t < T) & (offs_d < D), other=0.0)
    if D < BLOCK_D:
        return tl.load(ptrs, mask=offs_d < D, other=0.0)
    return tl.load(ptrs)


@triton.jit
def _store(
    ptr, x, first, stride_t, stride_d, T,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_t = tl.arange(0, ROWS)[:, None]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    ptrs = ptr + tl.cast(first, tl.int64) * stride_t + (offs_t * stride_t + offs_d * stride_d)
    tl.store(ptrs, x, mask=(first + offs_t < T) & (offs_d < D))


@triton.jit
def _ranges(first, last, left, right, size, BLOCK: tl.constexpr):
    """What x = first .. last see of 0 .. size - 1, if x sees x - left .. x + right, in whole blocks: it lies between `start`
    and `end`, and every x sees all of the `full` from `full_start` on."""
    # Down to a whole block: blocks begin at multiples of BLOCK, also those that begin before what is seen.
    start = tl.maximum(first - left, 0) // BLOCK * BLOCK
    end = tl.minimum(last + right + 1, size)
    # Full is what even the last x does not leave behind, and the first already sees.
    full_start = tl.cdiv(tl.maximum(last - left, 0), BLOCK) * BLOCK
    full_end = tl.maximum(tl.minimum(first + right + 1, size), 0) // BLOCK * BLOCK
    return start, end, full_start, tl.maximum(full_end - full_start, 0)


@triton.jit
def _beyond(i, hole_start, hole):
    """i, counted without the `hole` numbers from hole_start on: those blocks have a loop of their own."""
    return i + tl.where(i >= hole_start, hole, 0)


@triton.jit
def _seen(first, lowest, highest, BLOCK: tl.constexpr):
    """[R, BLOCK] which of first .. first + BLOCK - 1 lie between lowest and highest, [R] each."""
    offs = first + tl.arange(0, BLOCK)[None, :]
    return (offs >= lowest[:, None]) & (offs <= highest[:, None])


@triton.jit
def _load_mask(
    ptr, m, n, stride_m, stride_n, T_m, T_n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """What a mask adds to the scores [ROWS, COLUMNS] from row m and column n on, in powers of 2; 0 beyond its T_m x T_n. Of
    bytes, which stand for booleans, 0 is -inf and all else 0."""
    offs_m = tl.arange(0, ROWS)[:, None]
    offs_n = tl.arange(0, COLUMNS)[None, :]
    # As in `_load`: int64 up to the block, int32 inside.
    first = tl.cast(m, tl.int64) * stride_m + tl.cast(n, tl.int64) * stride_n
    inside = (m + offs_m < T_m) & (n + offs_n < T_n)
    x = tl.load(ptr + first + (offs_m * stride_m + offs_n * stride_n), mask=inside, other=1)
    if ptr.dtype.element_ty == tl.uint8:
        return tl.where(x != 0, 0.0, -float("inf"))
    x = tl.where(inside, x.to(tl.float32), 0.0)
    # The least number of a dtype, which models write for -inf, stays a number: a row of it alone sees all keys alike, as in
    # PyTorch. Times log2(e) it would be -inf.
    return tl.where(x == -float("inf"), x, tl.maximum(x * LOG2E, -3.4028234663852886e38))


@triton.jit
def _softmax_step(s, l, m, scale):
    """One more block of scores s [M, N], where the rows' maximum so far is m and their sum l: p = e^(scale s) as seen from
    the new maximum, the new sum and maximum, and what earlier sums have to be multiplied with.

    scale  times log2(e): e^x is 2^(x log2(e)), and the GPU computes powers of 2"""
    # scale is positive, so the maximum may be taken before the product with it: one product a row.
    m_new = tl.maximum(m, tl.max(s, axis=1) * scale)
    p = tl.exp2(s * scale - m_new[:, None])
    shrink = tl.exp2(m - m_new)
    return p, l * shrink + tl.sum(p, axis=1), m_new, shrink


@triton.jit
def _add_product(acc, p, v, PRECISION: tl.constexpr):
    """acc + p v. Without tensor cores a block's sums are made apart: each addition to numbers that have grown over thousands
    of keys would round them once more, 640 times in 640 keys instead of 20."""
    if v.dtype == tl.float32 and PRECISION == "ieee":
        # Triton makes one chain of dot and addition again unless there is a limit to how long a chain may be.
        return acc + tl.dot(p, v, input_precision=PRECISION, max_num_imprecise_acc=v.shape[0])
    return tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
