"""Fusion: fewer trips to memory for the same arithmetic.

Seven exercises. notebooks/08_fusion.ipynb explains them, and there fusion.detective, the last one here, comes before
fusion.recompute and fusion.epilogue. The first is arithmetic in plain Python. The others are kernels, one of them in CUDA C++.
They compute in float32 and write in the dtype of their first input. A bound counts reading or writing one whole tensor as one
access. All tensors are contiguous. Blocks are powers of two, and no size has to be a multiple of its block.
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import torch
import triton
import triton.language as tl
from torch import Tensor


# ----------------------------------------------------------------------------------------------------- fusion.accesses
def accesses(ops: dict[str, list[str]], kernels: list[list[str]], needed: list[str]) -> tuple[int, int]:
    """(tensors read, tensors written) by all kernels of a graph, added up. All tensors have the same size.

    ops      tensor -> the tensors that it is computed from, in the order in which the operations run. A name that appears
             in one of these lists and is not a key is an input of the graph; it is in memory from the start.
    kernels  which tensors are computed together: one list per kernel, in the order in which the kernels run. The names
             within a list are in any order. A kernel can use what it has computed itself without memory. Every key of ops
             is in exactly one of the lists.
    needed   the tensors that are still needed when all kernels have run

    A kernel reads no tensor twice, and it neither reads nor writes a tensor that it could leave alone. It runs all operations
    of its list, even one whose result nobody uses: the tensors that this operation needs count as read, and its result is not
    written.
    """
    # BEGIN SOLUTION
    reads = writes = 0
    for i, made in enumerate(kernels):
        wanted = {tensor for output in made for tensor in ops[output]}
        reads += len(wanted - set(made))
        later = {tensor for kernel in kernels[i + 1 :] for output in kernel for tensor in ops[output]}
        writes += len(set(made) & (later | set(needed)))
    return reads, writes
    # END SOLUTION


# ------------------------------------------------------------------------------------------------------ fusion.sin_cos
@triton.jit
def sin_cos_kernel(x_ptr, y_ptr, a, b, n, BLOCK: tl.constexpr):
    """Program 0 computes the first BLOCK elements, program 1 the next BLOCK, and so on. a and b are numbers, not pointers."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # BEGIN SOLUTION
    x = tl.load(x_ptr + offs, mask=offs < n).to(tl.float32)
    sine, cosine = tl.sin(x), tl.cos(x)
    tl.store(y_ptr + offs, a * sine * sine + b * cosine * cosine, mask=offs < n)
    # END SOLUTION


def sin_cos(x: Tensor, a: float, b: float, BLOCK: int = 1024) -> Tensor:
    """x of any shape -> y of the same shape, y = a sin(x)**2 + b cos(x)**2. Bound: one launch; x read once, y written once."""
    n = x.numel()
    y = torch.empty_like(x)
    sin_cos_kernel[(triton.cdiv(n, BLOCK),)](x, y, a, b, n, BLOCK=BLOCK)
    return y


# --------------------------------------------------------------------------------------------------------- fusion.gate
@triton.jit
def gate_kernel(x_ptr, y_ptr, N, BLOCK_N: tl.constexpr):
    """One program computes one row. BLOCK_N is the smallest power of two that is not less than N."""
    row = tl.program_id(0).to(tl.int64) * N
    offs_n = tl.arange(0, BLOCK_N)
    # BEGIN SOLUTION
    mask_n = offs_n < N
    # sigmoid(-inf) is 0: a lane past the end of the row adds nothing to its sum.
    x = tl.load(x_ptr + row + offs_n, mask=mask_n, other=-float("inf")).to(tl.float32)
    score = 1 / (1 + tl.exp(-x))
    tl.store(y_ptr + row + offs_n, score / tl.sum(score, axis=0), mask=mask_n)
    # END SOLUTION


def gate(x: Tensor) -> Tensor:
    """x [M, N], N <= 65536 -> y [M, N]: sigmoid(x), divided by the sum of its row. Each row has an x above -80.

    The router of a mixture-of-experts model weights its experts like this. Bound: one launch; x read once, y written once.
    """
    M, N = x.shape
    y = torch.empty_like(x)
    gate_kernel[(M,)](x, y, N, BLOCK_N=triton.next_power_of_2(N))
    return y


# --------------------------------------------------------------------------------------------------------- fusion.cuda
def swiglu_cuda() -> str:
    """The text of a kernel in CUDA C++: y[i] = silu(gate[i]) * up[i] for each i below n, where silu(z) = z / (1 + exp(-z)).

    gate, up and y are arrays of n floats in memory of their own. Each begins at an address that is a multiple of 16 bytes. n is
    any number, even one beyond 2**34. The kernel is launched with any number of blocks and any number of threads per block: there
    may be more threads than elements, or so few that each thread computes many, and there may be more than 2**32 of them.
    Bound: gate and up are read once and y is written once, by instructions that move 16 bytes for a thread. Only the last
    n % 4 elements may be moved one by one.

    This is the kernel of an MLP as in Llama. C++ needs no #include here: float4, make_float4, threadIdx and the others are known.
    """
    # BEGIN SOLUTION
    # STUB: raise NotImplementedError("fusion.cuda")
    # STUB: return r"""__device__ float silu(float z) { return z / (1.0f + expf(-z)); }
    # STUB:     extern "C" __global__ void swiglu(const float* gate, const float* up, float* y, long long n) {
    # STUB:         // what one thread does
    # STUB:     }
    # STUB: """
    return r"""__device__ float silu(float z) { return z / (1.0f + expf(-z)); }

        extern "C" __global__ void swiglu(const float* gate, const float* up, float* y, long long n) {
            long long step = (long long)gridDim.x * blockDim.x;
            long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
            for (long long i = first; i < n / 4; i += step) {
                float4 g = ((const float4*)gate)[i];
                float4 u = ((const float4*)up)[i];
                ((float4*)y)[i] = make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w);
            }
            for (long long i = n / 4 * 4 + first; i < n; i += step) y[i] = silu(gate[i]) * up[i];
        }
    """
    # END SOLUTION


# ---------------------------------------------------------------------------------------------------- fusion.recompute
@triton.jit
def sigmoid(x):
    """For use in kernels."""
    return 1 / (1 + tl.exp(-x))


@triton.jit
def three_sigmoids_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    """y = sigmoid(sigmoid(sigmoid(x))). This kernel is complete."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n).to(tl.float32)
    tl.store(y_ptr + offs, sigmoid(sigmoid(sigmoid(x))), mask=offs < n)


@triton.jit
def three_sigmoids_backward_kernel(saved_ptr, dy_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    """dx from dy and the one tensor that the forward pass saved. The derivative of s = sigmoid(z) is s (1 - s)."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # BEGIN SOLUTION
    x = tl.load(saved_ptr + offs, mask=offs < n).to(tl.float32)
    dy = tl.load(dy_ptr + offs, mask=offs < n).to(tl.float32)
    s1 = sigmoid(x)
    s2 = sigmoid(s1)
    y = sigmoid(s2)
    tl.store(dx_ptr + offs, dy * y * (1 - y) * s2 * (1 - s2) * s1 * (1 - s1), mask=offs < n)
    # END SOLUTION


class ThreeSigmoidsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        three_sigmoids_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
        # BEGIN SOLUTION
        ctx.save_for_backward(x)
        # END SOLUTION
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        dy = dy.contiguous()  # the gradient of y.sum() is one number, expanded
        dx = torch.empty_like(dy)
        three_sigmoids_backward_kernel[(triton.cdiv(dy.numel(), 1024),)](saved, dy, dx, dy.numel(), BLOCK=1024)
        return dx


def three_sigmoids(x: Tensor) -> Tensor:
    """x of any shape -> y of the same shape, differentiable.

    Bound for both passes together: 5 accesses, 3 of them reads, and one launch per pass. Forward keeps one tensor of x's
    size for backward.
    """
    return ThreeSigmoidsFunction.apply(x)


# ----------------------------------------------------------------------------------------------------- fusion.epilogue
@triton.jit
def epilogue_kernel(
    a_ptr, b_ptr, scale_ptr, residual_ptr, y_ptr,
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of y. The product is complete: acc [BLOCK_M, BLOCK_N] holds a @ b in float32."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # its rows of a, residual and y
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # its columns of b, residual and y
    offs_k = tl.arange(0, BLOCK_K)  # all of K: it is short here, so that no loop stands in the way
    inside_a, inside_b = (offs_m < M)[:, None] & (offs_k < K), (offs_k < K)[:, None] & (offs_n < N)
    a = tl.load(a_ptr + offs_m[:, None] * K + offs_k, mask=inside_a, other=0.0)
    b = tl.load(b_ptr + offs_k[:, None] * N + offs_n, mask=inside_b, other=0.0)
    acc = tl.dot(a, b, input_precision="ieee")
    # BEGIN SOLUTION
    mask = (offs_m[:, None] < M) & (offs_n[None, :] < N)
    tile = offs_m[:, None] * N + offs_n[None, :]
    scale = tl.load(scale_ptr + offs_n, mask=offs_n < N).to(tl.float32)
    residual = tl.load(residual_ptr + tile, mask=mask).to(tl.float32)
    tl.store(y_ptr + tile, tl.maximum(acc * scale[None, :] + residual, 0.0), mask=mask)
    # END SOLUTION


def epilogue(a: Tensor, b: Tensor, scale: Tensor, residual: Tensor, BLOCK: int = 32) -> Tensor:
    """a [M, K], b [K, N], scale [N], residual [M, N], all of one dtype, K <= 128 -> y [M, N].

    y[m, n] = max((a @ b)[m, n] * scale[n] + residual[m, n], 0), as in a linear layer with quantized weights.
    Bound: one launch. a is read N / BLOCK times and b M / BLOCK times, as in any tiled product. residual is read once and y
    is written once. scale is small and does not matter.
    """
    (M, K), N = a.shape, b.shape[1]
    y = torch.empty(M, N, dtype=a.dtype, device=a.device)
    grid = (triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK))
    BLOCK_K = max(16, triton.next_power_of_2(K))
    epilogue_kernel[grid](a, b, scale, residual, y, M, N, K, BLOCK_M=BLOCK, BLOCK_N=BLOCK, BLOCK_K=BLOCK_K)
    return y


# ---------------------------------------------------------------------------------------------------- fusion.detective
@triton.jit
def soft_cap_kernel(x_ptr, y_ptr, n, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """tanh(u) is computed as 1 - 2 / (exp(2 u) + 1). One program computes one block."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # BEGIN SOLUTION
    # STUB: x = tl.load(x_ptr + offs, mask=offs < n)
    x = tl.load(x_ptr + offs, mask=offs < n).to(tl.float32)
    # END SOLUTION
    tl.store(y_ptr + offs, CAP * (1 - 2 / (tl.exp(x * (2 / CAP)) + 1)), mask=offs < n)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """x of any shape -> y of its shape and dtype, y = cap tanh(x / cap). It keeps attention scores between -cap and cap.

    The kernel is one launch and its values are right, but for x in 16 bits the function moves five times the bytes that it
    should: fix that. Arithmetic is in float32 whatever the dtype of x. Bound: one launch; x read once, y written once.
    """
    n = x.numel()
    # BEGIN SOLUTION
    # STUB: x32 = x.float()  # an exponential in 16 bits would be too coarse
    # STUB: y = torch.empty_like(x32)
    # STUB: soft_cap_kernel[(triton.cdiv(n, 1024),)](x32, y, n, CAP=cap, BLOCK=1024)
    # STUB: return y.to(x.dtype)
    y = torch.empty_like(x)
    soft_cap_kernel[(triton.cdiv(n, 1024),)](x, y, n, CAP=cap, BLOCK=1024)
    return y
    # END SOLUTION
