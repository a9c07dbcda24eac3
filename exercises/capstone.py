"""A GPT, trained: six parts of it, in the order of notebooks/17_capstone.ipynb, which explains them.

One step of the tokenizer's training, the learning rate, gradients that are added up over micro-batches, the bytes that GPUs
send each other, and attention with its gradients, as the model in gpukit/train/model.py calls it. The code outside the gaps
is complete.
"""

# What may be imported: torch, triton, einops, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import math
from collections import Counter
from itertools import pairwise

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


# ------------------------------------------------------------------------------------------------------- capstone.pair
def join_most_frequent(
    pieces: list[list[int]], times: list[int], new: int
) -> tuple[tuple[int, int] | None, list[list[int]]]:
    """One step of byte-pair training. Returns the pair that was joined, and the pieces after the join.

    pieces  the different pieces of the text (words, mostly), each as a list of token numbers; a piece may be empty
    times   how often each piece occurs in the text
    new     the number of the token that this step makes

    The pair is the two neighboring tokens that occur most often in the whole text. No pair reaches from one piece into the
    next. In [7, 7, 7] the pair (7, 7) occurs twice, although only one of the two can be joined. Of pairs that occur equally
    often the smaller one is taken: the smaller first number, then the smaller second one. In the result every occurrence of
    the pair, from left to right, is the token `new`. Where there is no pair at all, the first result is None. The caller's
    lists stay as they are.
    """
    raise NotImplementedError("capstone.pair")  # your code here


# ------------------------------------------------------------------------------------------------------- capstone.rate
def learning_rate(step: int, steps: int, warmup: int, peak: float, final: float) -> float:
    """The learning rate of step number `step`, where 0 is the first step.

    warmup  The rate rises in equal amounts over this many steps. The first step already has a rate above 0, and the last
            step of the warm-up has the rate `peak`. warmup may be 0.
    steps   From `peak` at step `warmup` the rate falls along half a wave of the cosine, slowly at first, fast in the middle
            and slowly at the end, and reaches its lowest value at step `steps`. After that it does not change any more.
            steps may be equal to warmup; then the rate has its lowest value from step `warmup` on.
    final   the lowest value, as a share of `peak`
    """
    raise NotImplementedError("capstone.rate")  # your code here


# ------------------------------------------------------------------------------------------------- capstone.accumulate
def step_gradient(
    weight: Tensor, micro_batches: list[tuple[Tensor, Tensor]], counted: int, gpus: int
) -> tuple[Tensor, Tensor]:
    """One GPU's part of a training step: its loss and its gradient of weight [V, D], from one micro-batch at a time.

    micro_batches  (x [n, D], targets [n]) each, with logits x @ weight.T. A target of -100 is padding and does not count;
                   micro-batches hold different numbers of targets that count, and some hold none.
    counted        how many targets count in this step, in all micro-batches of all GPUs together; at least 1
    gpus           how many GPUs take part. Afterwards their losses and their gradients are averaged, as DDP does it: added
                   up and divided by `gpus`.

    After this average the loss is the mean cross-entropy over all targets of the step that count, and the gradient is the
    gradient of this mean. Memory: what one micro-batch needs, and not what all of them need. weight is not changed.
    """
    raise NotImplementedError("capstone.accumulate")  # your code here
    return total, gradient


# ------------------------------------------------------------------------------------------------------- capstone.ring
def bytes_sent(
    parameters: int, gpus: int, engine: str, micro_batches: int,
    weight_bytes: int, gradient_bytes: int, reshard: bool,
) -> int:  # fmt: skip
    """Bytes that each GPU sends in one training step of `micro_batches` micro-batches.

    engine "ddp"   Every GPU has all weights. After the last backward pass of the step the gradients are all-reduced: each
                   GPU then has the sum over all GPUs.
    engine "fsdp"  Every GPU keeps an equal share of the weights. In each micro-batch all weights are gathered for the
                   forward pass. reshard: they are freed after it and gathered a second time for the backward pass;
                   otherwise they stay until the backward pass is done. Then the gradients are reduce-scattered: each GPU
                   gets the sum over all GPUs for its own share.

    A weight travels as weight_bytes bytes, a gradient as gradient_bytes bytes; `reshard` is for "fsdp" only. The GPUs form a
    ring. A tensor is cut into `gpus` shares of equally many elements, the last one filled up where it is shorter, and in each
    round of a ring every GPU sends one share to its neighbor.
    """
    raise NotImplementedError("capstone.ring")  # your code here


# --------------------------------------------------------------------------------------------------------- capstone.dq
@triton.jit
def load_rows(ptr, first, T, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Complete: rows first, first + 1, ... of a contiguous matrix [T, D], as [ROWS, BLOCK_D]. What lies outside the matrix is 0."""
    rows = first + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    return tl.load(ptr + rows.to(tl.int64) * D + columns, mask=(rows < T) & (columns < D), other=0.0)


@triton.jit
def store_rows(ptr, x, first, T, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Complete: the counterpart, x [ROWS, BLOCK_D] into the same places."""
    rows = first + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_D)[None, :]
    tl.store(ptr + rows.to(tl.int64) * D + columns, x, mask=(rows < T) & (columns < D))


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    T, group, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head of q. `group` heads of q in a row share one head of k and v: with group = 2
    the heads 0 and 1 of q use head 0, the heads 2 and 3 use head 1. All tensors are contiguous."""
    start_m, head = tl.program_id(0) * BLOCK_M, tl.program_id(1).to(tl.int64)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + head * T * D, start_m, T, D, BLOCK_M, BLOCK_D)
    do = load_rows(do_ptr + head * T * D, start_m, T, D, BLOCK_M, BLOCK_D)
    lse = tl.load(lse_ptr + head * T + offs_m, mask=offs_m < T, other=0.0)
    delta = tl.load(delta_ptr + head * T + offs_m, mask=offs_m < T, other=0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    raise NotImplementedError("capstone.dq")  # your code here
    store_rows(dq_ptr + head * T * D, dq, start_m, T, D, BLOCK_M, BLOCK_D)


def query_gradient(q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dq of causal attention. q, do [H, T, D] and k, v [H_kv, T, D] of one dtype, lse and delta = sum(o do) [H, T] in
    float32, all contiguous -> dq [H, T, D]. A query sees the keys up to its own place; H_kv divides H; scale 1 / sqrt(D).

    Sums are kept in float32; give tl.dot input_precision="ieee". Bound: what belongs to the queries is loaded once, and dq is
    stored once. Load a block of 16 keys, and of their values, only if at least one query of the program sees one of them.
    """
    H, T, D = q.shape
    dq = torch.empty_like(q)
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    grid = (triton.cdiv(T, 16), H)
    dq_kernel[grid](q, k, v, do, lse, delta, dq, T, H // k.shape[0], 1 / math.sqrt(D), D=D, **blocks)
    return dq


# -------------------------------------------------------------------------------------------------- capstone.attention
@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    T, group, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M queries of one head of q. o [BLOCK_M, BLOCK_D] and lse = log(sum(exp(s))) [BLOCK_M] are stored."""
    start_m, head = tl.program_id(0) * BLOCK_M, tl.program_id(1).to(tl.int64)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr + head * T * D, start_m, T, D, BLOCK_M, BLOCK_D)
    k_ptr += head // group * T * D
    v_ptr += head // group * T * D
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    m = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    raise NotImplementedError("capstone.attention")  # your code here
    store_rows(o_ptr + head * T * D, o, start_m, T, D, BLOCK_M, BLOCK_D)
    tl.store(lse_ptr + head * T + offs_m, lse, mask=offs_m < T)


@triton.jit
def delta_kernel(o_ptr, do_ptr, delta_ptr, rows, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Complete: delta = sum(o do) for each of the rows of o and do, which are [rows, D]."""
    start = tl.program_id(0).to(tl.int64) * ROWS
    o = load_rows(o_ptr, start, rows, D, ROWS, BLOCK_D).to(tl.float32)
    do = load_rows(do_ptr, start, rows, D, ROWS, BLOCK_D).to(tl.float32)
    offs = start + tl.arange(0, ROWS)
    tl.store(delta_ptr + offs, tl.sum(o * do, axis=1), mask=offs < rows)


@triton.jit
def dk_dv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    T, group, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one head of k and v, which `group` heads of q use."""
    start_n, shared = tl.program_id(0) * BLOCK_N, tl.program_id(1).to(tl.int64)
    keys = start_n + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr + shared * T * D, start_n, T, D, BLOCK_N, BLOCK_D)
    v = load_rows(v_ptr + shared * T * D, start_n, T, D, BLOCK_N, BLOCK_D)
    dk = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for head in range(shared * group, shared * group + group):
        raise NotImplementedError("capstone.attention")  # your code here
    store_rows(dk_ptr + shared * T * D, dk * scale, start_n, T, D, BLOCK_N, BLOCK_D)
    store_rows(dv_ptr + shared * T * D, dv, start_n, T, D, BLOCK_N, BLOCK_D)


def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Launches forward_kernel: q [H, T, D], k and v [H_kv, T, D], contiguous -> o [H, T, D], lse [H, T] in float32."""
    H, T, D = q.shape
    o, lse = torch.empty_like(q), torch.empty((H, T), dtype=torch.float32, device=q.device)
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    forward_kernel[(triton.cdiv(T, 16), H)](q, k, v, o, lse, T, H // k.shape[0], 1 / math.sqrt(D), D=D, **blocks)
    return o, lse


def deltas(o: Tensor, do: Tensor) -> Tensor:
    """Launches delta_kernel: o, do [H, T, D], contiguous -> delta [H, T] in float32."""
    (H, T, D), delta = o.shape, torch.empty(o.shape[:2], dtype=torch.float32, device=o.device)
    delta_kernel[(triton.cdiv(H * T, 16),)](
        o, do, delta, H * T, D=D, ROWS=16, BLOCK_D=max(16, triton.next_power_of_2(D))
    )
    return delta


def key_value_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Launches dk_dv_kernel; arguments as query_gradient's -> dk, dv [H_kv, T, D]."""
    (H, T, D), (dk, dv) = q.shape, (torch.empty_like(k), torch.empty_like(v))
    blocks = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": max(16, triton.next_power_of_2(D))}
    grid = (triton.cdiv(T, 16), k.shape[0])
    dk_dv_kernel[grid](q, k, v, do, lse, delta, dk, dv, T, H // k.shape[0], 1 / math.sqrt(D), D=D, **blocks)
    return dk, dv


class CausalAttention(torch.autograd.Function):
    """Attention that autograd knows how to differentiate."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, lse = forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError("capstone.attention")  # your code here


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [H, T, D], k and v [H_kv, T, D], contiguous, of one dtype, H_kv divides H -> o [H, T, D], differentiable.

    The gradient of o may have any strides: `o.sum().backward()` gives strides of 0. Copy it only if it is not contiguous; the
    copy counts as traffic.
    Sums are kept in float32, two runs agree in every bit (no atomics), and no matrix of scores is in memory.
    Bound: four launches. Blocks of 16 queries and of 16 keys of which no query sees a key are not loaded; in each kernel what
    a program holds is loaded once, and results are stored once. Forward keeps q, k, v, o and one number per query for
    backward.
    """
    return CausalAttention.apply(q, k, v)


def attention_for_gpt(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Complete: what gpukit.train.model.Operations wants, q [B, H, T, D], k and v [B, H_kv, T, D] of any strides. Sequences
    become heads: head h of sequence b is head b H + h, and its head of k is b H_kv + h // group, which is (b H + h) // group."""
    if not causal:
        raise ValueError("attention_for_gpt: causal must be True")
    heads = (x.contiguous().flatten(0, 1) for x in (q, k, v))
    return causal_attention(*heads).view(q.shape)
