"""What the matmul kernels share: the order of the tiles, and what becomes of a tile of sums before it is stored."""

import triton
import triton.language as tl

from gpukit.kernels.gelu import _gelu, _sigmoid


@triton.jit
def tile_at(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of tile number pid, going down GROUP_M rows of tiles before going right.

    Programs that run at the same time then form a block, not a line, and a block of tiles shares more of its operands in
    L2: 64 tiles read 8 strips of a and 8 of b, as a line they would read 1 and 64.
    """
    width = GROUP_M * tiles_n
    first_m = pid // width * GROUP_M
    rows = min(tiles_m - first_m, GROUP_M)
    return first_m + pid % width % rows, pid % width // rows


@triton.jit
def epilogue(
    acc, up,
    z_ptr, bias_ptr, residual_ptr, scale_ptr,
    offs_m, offs_n,
    M, N,
    ACTIVATION: tl.constexpr, FINE: tl.constexpr,
):  # fmt: skip
    """activation(acc scale + bias) + residual, in registers: each would be a pass over memory after the matmul.

    acc [BLOCK_M, BLOCK_N]; up: the same tile of columns N to 2 N - 1, which only "swiglu" reads. Pointers are None where
    there is nothing to do. z: what went into the activation, for the backward pass. All tensors are contiguous. FINE: the
    result is not rounded to 16 bits.
    """
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    mask = (offs_m < M) & (offs_n < N)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr).to(acc.dtype)
        acc *= scale
        if GATED:
            up *= scale
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N).to(acc.dtype)
        if GATED:
            up += tl.load(bias_ptr + N + offs_n, mask=offs_n < N).to(acc.dtype)
    if z_ptr is not None:
        if GATED:
            tl.store(z_ptr + offs_m * 2 * N + offs_n, acc, mask=mask)
            tl.store(z_ptr + offs_m * 2 * N + N + offs_n, up, mask=mask)
        else:
            tl.store(z_ptr + offs_m * N + offs_n, acc, mask=mask)
    if ACTIVATION == "gelu":
        acc = _gelu(acc, False, FINE)
    elif ACTIVATION == "gelu_tanh":
        acc = _gelu(acc, True, FINE)
    elif GATED:
        acc = acc * _sigmoid(acc) * up
    if residual_ptr is not None:
        acc += tl.load(residual_ptr + offs_m * N + offs_n, mask=mask).to(acc.dtype)
    return acc
