"""What the matmul kernels share: the order of the tiles, who of several programs finishes a tile, and what becomes of a
tile of sums before it is stored."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._launch import current_stream, interpreted
from gpukit.kernels.gelu import _gelu, _sigmoid


@triton.jit
def tile_at(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of tile number pid, going down GROUP_M rows of tiles before going right.

    Programs that run at the same time then form a block, not a line, and a block of tiles shares more of its operands in
    L2: 64 tiles read 8 strips of a and 8 of b, as a line they would read 1 and 64.
    """
    # The tiles of a group lie one after the other; the last group may have fewer rows.
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
        # Before the bias, which is not part of the scaled product.
        acc *= scale
        if GATED:
            up *= scale
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N).to(acc.dtype)
        if GATED:
            up += tl.load(bias_ptr + N + offs_n, mask=offs_n < N).to(acc.dtype)
    if z_ptr is not None:
        if GATED:
            # As the product of a with all of b's columns would lie: gate, then up.
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


@triton.jit
def added(ptrs, stride, mask, PARTS: tl.constexpr):
    """ptrs[0] + ptrs[stride] + ...: tiles that `PARTS` programs have stored, for the last of them, always in this order."""
    total = tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
    for i in tl.static_range(1, PARTS):
        # Float sums depend on their order: this one is the shares', not that in which programs end.
        total += tl.load(ptrs + i * stride, mask=mask, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def is_last(counter_ptr, programs):
    """Whether this program is the last of the `programs` that share a counter and call this once, each after it has stored
    its part of a result. The last program can load all parts, with cache_modifier=".cg": the L1 of its SM knows nothing of
    what others store. It leaves the counter at 0, for the next launch.

    A second kernel that adds the parts would wait until all programs are done, and cost a launch."""
    tl.debug_barrier()  # One thread counts for all: what the others have stored must come before.
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == programs - 1
    if last:
        # Nobody else counts here any more in this launch; the next one begins after it.
        tl.store(counter_ptr, 0)
    return last


_counters: dict[tuple[int, int], Tensor] = {}


def counters(number: int, device: torch.device, keep: bool) -> Tensor:
    """At least `number` zeros for `is_last` in a launch on the current stream: int32.

    keep: they are kept for the next launch on this stream, which finds them at 0 again. Not in a CUDA graph, since two of
    them may be replayed at a time, nor below torch.compile, which makes graphs of its own and takes back their memory."""
    if interpreted() or not keep:
        return torch.zeros(number, dtype=torch.int32, device=device)
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return counters(number, device, keep)
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(number, dtype=torch.int32, device=device)
    key = device.index, current_stream()(device.index)
    known = _counters.get(key)
    if known is None or len(known) < number:
        known = _counters[key] = torch.zeros(max(number, 4096), dtype=torch.int32, device=device)
    return known
