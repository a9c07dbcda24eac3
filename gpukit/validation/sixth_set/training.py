"""Training and sampling: losses in chunks, labels of a teacher, norms of many tensors, steps, states, taps, routes, nuclei."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import BF16, FLOAT, HALF, INT32, KI, Work, empty, known, normal, place
from gpukit.validation.sixth_set.case import case

CHUNKS, TEACHERS, CLIPPED = "losses in chunks", "labels of a teacher", "norms of many tensors"
SCALED, STATES, TAPS = "steps with a scale of gradients", "chunks of a state space", "taps along time"
GROUPS, NUCLEUS = "routes by groups", "nuclei of distributions"


@triton.jit
def loss_chunk(x_ptr, largest_ptr, total_ptr, V, BLOCK: tl.constexpr):
    """The largest logit of a chunk of a row, and the sum of exponentials below it."""
    row, chunk = tl.program_id(1), tl.program_id(0)
    i = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * V + i, mask=i < V, other=-float("inf")).to(tl.float32)
    largest = tl.max(x, 0)
    tl.store(largest_ptr + row * tl.num_programs(0) + chunk, largest)
    tl.store(total_ptr + row * tl.num_programs(0) + chunk, tl.sum(tl.exp(x - largest), 0))


@triton.jit
def loss_of_chunks(
    x_ptr, label_ptr, largest_ptr, total_ptr, loss_ptr, V, CHUNKS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr
):
    """Rows' losses from their chunks and their labels, and a small share of the square of the log of the sum."""
    row, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    at, live = row[:, None] * CHUNKS + i, i < CHUNKS
    part = tl.load(largest_ptr + at, mask=live, other=-float("inf"))
    largest = tl.max(part, 1)
    total = tl.sum(tl.load(total_ptr + at, mask=live, other=0.0) * tl.exp(part - largest[:, None]), 1)
    lse, label = largest + tl.log(total), tl.load(label_ptr + row)
    x = tl.load(x_ptr + row * V + label, mask=label >= 0, other=0.0).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(label >= 0, lse - x + 1e-4 * lse * lse, 0.0))


@case(
    "losses of 4096 rows of 128,256 bf16 in 16 chunks, with a share of squares, two launches",
    CHUNKS,
    dict(M=4096, V=128_256, block=8192),
    dict(M=32, V=300, block=128),
)
def _(device, M, V, block):
    chunks = triton.cdiv(V, block)
    x, loss, label = normal(device, M, V), empty(device, M, dtype=FLOAT), known(device, V, M, dtype=torch.int64)
    label[::7] = -100
    largest, total = empty(device, M, chunks, dtype=FLOAT), empty(device, M, chunks, dtype=FLOAT)

    def run():
        loss_chunk[(chunks, M)](x, largest, total, V, BLOCK=block, num_warps=8)
        loss_of_chunks[(M // 32,)](
            x, label, largest, total, loss, V, CHUNKS=chunks, WIDTH=triton.next_power_of_2(chunks), ROWS=32
        )

    def want():
        squares = 1e-4 * x.float().logsumexp(1) ** 2
        return F.cross_entropy(x.float(), label, reduction="none") + squares * (label >= 0)

    return Work(run, loss, want)


@triton.jit
def teacher_loss(x_ptr, lse_ptr, id_ptr, teacher_ptr, y_ptr, V, K: tl.constexpr):
    """The divergence of a row from the K labels that a teacher gave it, with their logs of probabilities."""
    at = tl.program_id(0) * K + tl.arange(0, K)
    x = tl.load(x_ptr + tl.program_id(0) * V + tl.load(id_ptr + at)).to(tl.float32)
    teacher = tl.load(teacher_ptr + at)
    loss = tl.exp(teacher) * (teacher - x + tl.load(lse_ptr + tl.program_id(0)))
    tl.store(y_ptr + tl.program_id(0), tl.sum(loss, 0))


@case("256 labels of a teacher for 32768 rows of 32,003 fp16", TEACHERS, dict(M=32_768, V=32_003), dict(M=4, V=999))
def _(device, M, V):
    x, y, lse = normal(device, M, V, dtype=HALF), empty(device, M, dtype=FLOAT), normal(device, M, dtype=FLOAT) + 10
    label, teacher = known(device, V, M, 256), normal(device, M, 256, dtype=FLOAT) - 8

    def want():
        return (teacher.exp() * (teacher - x.gather(1, label.long()).float() + lse[:, None])).sum(1)

    return Work(lambda: teacher_loss[(M,)](x, lse, label, teacher, y, V, K=256, num_warps=2), y, want)


@triton.jit
def clear_squares(square_ptr, N: tl.constexpr):
    """The sums of all tensors become 0."""
    tl.store(square_ptr + tl.arange(0, N), tl.zeros((N,), tl.float32))


@triton.jit
def tensor_squares(x_ptr, tensor_ptr, first_ptr, size_ptr, square_ptr, BLOCK: tl.constexpr):
    """The squares of a piece of a tensor, which begins and ends anywhere, are added to those of the tensor."""
    first, size = tl.load(first_ptr + tl.program_id(0)), tl.load(size_ptr + tl.program_id(0))
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(0, size, BLOCK):
        at = i + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + first + at, mask=at < size, other=0.0).to(tl.float32)
        total += x * x
    tl.atomic_add(square_ptr + tl.load(tensor_ptr + tl.program_id(0)), tl.sum(total, 0), sem="relaxed")


@triton.jit
def scale_tensors(x_ptr, first_ptr, size_ptr, square_ptr, y_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """The same piece, times what makes the norm of all tensors 1 where it is more."""
    first, size = tl.load(first_ptr + tl.program_id(0)), tl.load(size_ptr + tl.program_id(0))
    factor = 1 / tl.maximum(tl.sqrt(tl.sum(tl.load(square_ptr + tl.arange(0, N)), 0)), 1.0)
    for i in range(0, size, BLOCK):
        at = i + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + first + at, mask=at < size, other=0.0).to(tl.float32)
        tl.store(y_ptr + first + at, (x * factor).to(y_ptr.dtype.element_ty), mask=at < size)


@case(
    "64 tensors of odd sizes, 90 M bf16, clipped to a norm in pieces of 32,768, three launches",
    CLIPPED,
    dict(step=43_391, piece=32_768),
    dict(step=13, piece=512),
)
def _(device, step, piece):
    sizes = [step * i + 1 for i in range(1, 65)]
    firsts = [sum(sizes[:i]) for i in range(64)]
    pieces = [(i, firsts[i] + at, min(piece, n - at)) for i, n in enumerate(sizes) for at in range(0, n, piece)]
    tensor, first, size = (place(device, torch.tensor(x, dtype=INT32)) for x in zip(*pieces, strict=True))
    x, y, square = normal(device, sum(sizes)), empty(device, sum(sizes)), empty(device, 64, dtype=FLOAT)
    grid = (len(pieces),)

    def run():
        clear_squares[(1,)](square, N=64, num_warps=1)
        tensor_squares[grid](x, tensor, first, size, square, BLOCK=2048)
        scale_tensors[grid](x, first, size, square, y, N=64, BLOCK=2048)

    def want():
        squares = torch.stack([z.float().square().sum() for z in x.split(sizes)])
        return squares, x.float() / squares.sum().sqrt().clamp(min=1)

    return Work(run, (square, y), want)


@triton.jit
def scaled_step(
    p_ptr, g_ptr, m_ptr, v_ptr, scale_ptr, overflow_ptr, new_p_ptr, weight_ptr, new_m_ptr, new_v_ptr, rate, n,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """AdamW with float32 masters and gradients that a scale in memory was multiplied into; skipped where one overflowed."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < n
    g = tl.load(g_ptr + at, mask=live, other=0.0).to(tl.float32) / tl.load(scale_ptr)
    old_m = tl.load(m_ptr + at, mask=live, other=0.0).to(tl.float32)
    old_v = tl.load(v_ptr + at, mask=live, other=0.0).to(tl.float32)
    p = tl.load(p_ptr + at, mask=live, other=0.0)
    rate = tl.where(tl.load(overflow_ptr) == 0, rate, 0.0)
    m, v = 0.9 * old_m + 0.1 * g, 0.95 * old_v + 0.05 * g * g
    p -= rate * (m / (tl.sqrt(v) + 1e-8) + 0.1 * p)
    tl.store(new_p_ptr + at, p, mask=live)
    tl.store(weight_ptr + at, p.to(tl.bfloat16), mask=live)
    tl.store(new_m_ptr + at, m.to(tl.bfloat16), mask=live)
    tl.store(new_v_ptr + at, v.to(tl.bfloat16), mask=live)


@case(
    "AdamW of 40,000,001 fp32 masters, gradients fp16 with a scale, 8 streams", SCALED, dict(n=40_000_001), dict(n=3001)
)
def _(device, n):
    p, g, m, v = (
        normal(device, n, dtype=FLOAT),
        normal(device, n, dtype=HALF),
        normal(device, n),
        normal(device, n).sigmoid(),
    )
    scale, overflow = normal(device, 1, dtype=FLOAT).sigmoid() + 7, empty(device, 1, dtype=INT32)
    out = [empty(device, n, dtype=dtype) for dtype in (FLOAT, BF16, BF16, BF16)]

    def run():
        scaled_step[(triton.cdiv(n, 1024),)](p, g, m, v, scale, overflow, *out, 0.01, n, BLOCK=1024)

    def want():
        a = 0.9 * m.float() + 0.1 * g.float() / scale
        b = 0.95 * v.float() + 0.05 * (g.float() / scale) ** 2
        w = p - 0.01 * (a / (b.sqrt() + 1e-8) + 0.1 * p)
        return w, w, a, b

    return Work(run, tuple(out), want)


@triton.jit
def state_chunk(
    x_ptr,
    decay_ptr,
    b_ptr,
    c_ptr,
    state_ptr,
    y_ptr,
    T,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """C tokens of one head: what they say to each other, decayed, and what the state before them says to each."""
    chunk, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    t, p, n = chunk * C + tl.arange(0, C), tl.arange(0, P), tl.arange(0, N)
    fall = tl.cumsum(tl.load(decay_ptr + (batch * H + head) * T + t), 0)
    token = batch * T + t
    c = tl.load(c_ptr + token[:, None] * N + n[None, :])
    s = tl.dot(c, tl.load(b_ptr + token[None, :] * N + n[:, None]))
    s = tl.where(t[:, None] >= t[None, :], s * tl.exp(fall[:, None] - fall[None, :]), 0.0)
    at = (token * H + head)[:, None] * P + p[None, :]
    x = tl.load(x_ptr + at)
    state = ((batch * tl.num_programs(0) + chunk) * H + head) * N * P
    y = tl.dot(c, tl.load(state_ptr + state + n[:, None] * P + p[None, :])) * tl.exp(fall)[:, None]
    tl.store(y_ptr + at, tl.dot(s.to(x.dtype), x, y).to(y_ptr.dtype.element_ty))


@case(
    "chunks of 64 tokens of 4 sequences of 4096, 64 heads of 64 with states of 128 x 64 bf16",
    STATES,
    dict(B=4, T=4096, H=64, N=128),
    dict(B=1, T=128, H=2, N=16),
)
def _(device, B, T, H, N):
    x, y, b, c = (
        normal(device, B, T, H, 64),
        empty(device, B, T, H, 64),
        normal(device, B, T, N),
        normal(device, B, T, N),
    )
    decay, state = -normal(device, B, H, T, dtype=FLOAT).sigmoid() / 8, normal(device, B, T // 64, H, N, 64)

    def run():
        state_chunk[(T // 64, H, B)](x, decay, b, c, state, y, T, H=H, P=64, N=N, C=64, num_warps=4)

    def want():
        d, e = (z.float().view(B, T // 64, 64, N) for z in (b, c))
        fall = decay.view(B, H, T // 64, 64).cumsum(3).transpose(1, 2)  # [B, chunks, H, 64]
        live = torch.ones(64, 64, dtype=torch.bool, device=x.device).tril()
        out = torch.empty_like(y, dtype=FLOAT).view(B, T // 64, 64, H, 64)
        for h in range(H):
            f = fall[:, :, h]
            s = (e @ d.transpose(2, 3) * (f[..., None] - f[:, :, None]).exp()).masked_fill(~live, 0)
            own = s @ x.view(B, T // 64, 64, H, 64)[:, :, :, h].float()
            out[:, :, :, h] = own + e @ state[:, :, h].float() * f.exp()[..., None]
        return out.view(B, T, H, 64)

    return Work(run, y, want)


@triton.jit
def taps(x_ptr, w_ptr, bias_ptr, seq_ptr, y_ptr, D, T, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A channel's numbers along time, each with the WIDTH - 1 before it that are of its own sequence, then SiLU."""
    channel, batch = tl.program_id(1), tl.program_id(2)
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seq = tl.load(seq_ptr + batch * T + t, mask=t < T, other=-1)
    total = tl.zeros((BLOCK,), tl.float32) + tl.load(bias_ptr + channel)
    for i in tl.static_range(WIDTH):
        before = t + (i - WIDTH + 1)
        live = (before >= 0) & (t < T)
        live &= tl.load(seq_ptr + batch * T + before, mask=live, other=-2) == seq
        x = tl.load(x_ptr + (batch * D + channel) * T + before, mask=live, other=0.0).to(tl.float32)
        total += x * tl.load(w_ptr + channel * WIDTH + i)
    y = total * tl.sigmoid(total)
    tl.store(y_ptr + (batch * D + channel) * T + t, y.to(y_ptr.dtype.element_ty), mask=t < T)


@case(
    "4 taps along 4093 tokens of packed sequences, 8 times 3072 channels fp16",
    TAPS,
    dict(B=8, D=3072, T=4093),
    dict(B=2, D=3, T=77),
)
def _(device, B, D, T):
    x, y = normal(device, B, D, T, dtype=HALF), empty(device, B, D, T, dtype=HALF)
    w, bias, seq = (
        normal(device, D, 4, dtype=FLOAT),
        normal(device, D, dtype=FLOAT),
        known("meta", 9, B, T).sort(1).values,
    )
    seq = place(device, seq)

    def run():
        taps[(triton.cdiv(T, 1024), D, B)](x, w, bias, seq, y, D, T, WIDTH=4, BLOCK=1024)

    def want():
        total = x.float() * w[:, 3:] + bias[:, None]
        for by in range(1, 4):
            same = (seq[:, by:] == seq[:, :-by])[:, None]
            total[:, :, by:] += x[:, :, :-by].float() * w[:, 3 - by, None] * same
        return F.silu(total)

    return Work(run, y, want)


@triton.jit
def group_routes(x_ptr, bias_ptr, y_ptr, GROUPS: tl.constexpr, SIZE: tl.constexpr, LEFT: tl.constexpr, K: tl.constexpr):
    """K experts of the LEFT groups whose two best are best together, and their shares of the sum; 0 for the others."""
    group, member = tl.arange(0, GROUPS), tl.arange(0, SIZE)[None, :]
    at = group[:, None] * SIZE + member
    x = tl.load(x_ptr + tl.program_id(0) * GROUPS * SIZE + at)
    score = x + tl.load(bias_ptr + at)
    first = member == tl.argmax(score, 1)[:, None]
    best = tl.max(score, 1) + tl.max(tl.where(first, -float("inf"), score), 1)
    alive = tl.zeros((GROUPS,), tl.int32)
    for _ in tl.static_range(LEFT):
        hit = group == tl.argmax(best, 0)
        alive, best = tl.where(hit, 1, alive), tl.where(hit, -float("inf"), best)
    score = tl.where(alive[:, None] == 1, score, -float("inf"))
    chosen = tl.zeros((GROUPS, SIZE), tl.int32)
    for _ in tl.static_range(K):
        hit = (group == tl.argmax(tl.max(score, 1), 0))[:, None] & (member == tl.argmax(score, 1)[:, None])
        chosen, score = tl.where(hit, 1, chosen), tl.where(hit, -float("inf"), score)
    y = tl.where(chosen == 1, tl.sigmoid(x), 0.0)
    y = y / tl.sum(tl.sum(y, 1), 0)
    tl.store(y_ptr + tl.program_id(0) * GROUPS * SIZE + at, y.to(y_ptr.dtype.element_ty))


@case("8 of 256 experts in 4 of 8 groups for 64 Ki tokens fp32, 1 warp", GROUPS, dict(T=64 * KI), dict(T=5))
def _(device, T):
    x, bias, y = (
        normal(device, T, 256, dtype=FLOAT),
        normal(device, 256, dtype=FLOAT),
        empty(device, T, 256, dtype=HALF),
    )

    def run():
        group_routes[(T,)](x, bias, y, GROUPS=8, SIZE=32, LEFT=4, K=8, num_warps=1)

    def best(scores, count):
        """The first of equal ones comes first."""
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]

    def want():
        score = (x + bias).view(T, 8, 32)
        left = best(score.topk(2, 2).values.sum(2), 4)
        dead = torch.ones(T, 8, dtype=torch.bool, device=x.device).scatter(1, left, False)
        chosen = best(score.masked_fill(dead[:, :, None], -torch.inf).view(T, 256), 8)
        share = x.sigmoid().gather(1, chosen)
        return torch.zeros_like(x).scatter(1, chosen, share / share.sum(1, keepdim=True))

    return Work(run, y, want)


@triton.jit
def nucleus(x_ptr, y_ptr, mass, coldness, N, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    """The likeliest words that have a mass together, found by halving the range of the least likely one's share."""
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * N + i, mask=i < N, other=-float("inf")).to(tl.float32) * coldness
    p = tl.exp(x - tl.max(x, 0))
    wanted = tl.sum(p, 0) * mass
    low, high = 0.0, 1.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        enough = tl.sum(tl.where(p >= middle, p, 0.0), 0) >= wanted
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    p = tl.where(p >= low, p, 0.0)
    tl.store(y_ptr + tl.program_id(0) * N + i, p / tl.sum(p, 0), mask=i < N)


@case(
    "nuclei of 0.9 of 4096 rows of 32,000 bf16, 24 steps, 16 warps", NUCLEUS, dict(M=4096, N=32_000), dict(M=3, N=500)
)
def _(device, M, N):
    x, y = normal(device, M, N), empty(device, M, N, dtype=FLOAT)

    def run():
        nucleus[(M,)](x, y, 0.9, 2.5, N, STEPS=24, BLOCK=triton.next_power_of_2(N), num_warps=16)

    def want():
        p = (x.float() * 2.5).softmax(1)
        mass = p.sort(1, descending=True).values
        least = mass.gather(1, ((mass.cumsum(1) < 0.9).sum(1, keepdim=True)).clamp(max=N - 1))
        p = p * (p >= least)  # all that are as likely as the last one
        return p / p.sum(1, keepdim=True)

    return Work(run, y, want)
