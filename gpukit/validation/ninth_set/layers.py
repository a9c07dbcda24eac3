"""Parts of layers: four streams, states, words that a grammar allows, and recurrences with products in each step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from gpukit.validation.new_kernels.case import FLOAT, INT32, KI, Work, empty, known, normal, place
from gpukit.validation.ninth_set.case import case

STREAMS, ONE, GRAMMARS = "mixes of four streams", "states that one token changes", "words that a grammar allows"
DELTA, GATED = "states that are corrected", "recurrent units with products in each step"


@triton.jit
def mix_streams(x_ptr, y_ptr, mix_ptr, gate_ptr, z_ptr, N, BLOCK: tl.constexpr):
    """Each new stream of a token is a mix of its four streams and a share of what a layer computed."""
    token, i, col = tl.program_id(0), tl.arange(0, 4), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = col < N
    at = (token * 4 + i)[:, None] * N + col[None, :]
    x = tl.load(x_ptr + at, mask=mask[None, :], other=0.0).to(tl.float32)
    y = tl.load(y_ptr + token * N + col, mask=mask, other=0.0).to(tl.float32)
    for j in tl.static_range(4):
        row = tl.load(mix_ptr + token * 16 + j * 4 + i)
        z = tl.sum(row[:, None] * x, 0) + tl.load(gate_ptr + token * 4 + j) * y
        tl.store(z_ptr + (token * 4 + j) * N + col, z.to(z_ptr.dtype.element_ty), mask=mask)


@case(
    "mixes of 4 streams of 12288 tokens of 2560 bf16 and a layer's output, 1024 columns per program",
    STREAMS,
    dict(T=12 * KI, N=2560),
    dict(T=3, N=1100),
)
def _(device, T, N):
    x, y, z = normal(device, T, 4, N), normal(device, T, N), empty(device, T, 4, N)
    mix, gate = normal(device, T, 4, 4, dtype=FLOAT), normal(device, T, 4, dtype=FLOAT)

    def run():
        mix_streams[(T, triton.cdiv(N, 1024))](x, y, mix, gate, z, N, BLOCK=1024)

    return Work(run, z, lambda: mix @ x.float() + gate[:, :, None] * y.float()[:, None])


@triton.jit
def change_state(
    state_ptr,
    slot_ptr,
    x_ptr,
    gate_ptr,
    dt_ptr,
    rate_ptr,
    b_ptr,
    c_ptr,
    skip_ptr,
    new_ptr,
    y_ptr,
    H,
    G,
    P: tl.constexpr,
    N: tl.constexpr,
    BP: tl.constexpr,
):
    """One token of a sequence changes BP rows of a head's state of P x N, which lies in the sequence's slot."""
    p, n = tl.program_id(0) * BP + tl.arange(0, BP), tl.arange(0, N)
    sequence, head = tl.program_id(1), tl.program_id(2)
    place, slot = sequence * H + head, tl.load(slot_ptr + sequence).to(tl.int64)
    dt = tl.load(dt_ptr + place)
    dt = tl.where(dt <= 20.0, tl.log(1 + tl.exp(dt)), dt)
    x, gate = tl.load(x_ptr + place * P + p).to(tl.float32), tl.load(gate_ptr + place * P + p).to(tl.float32)
    group = (sequence * G + head // (H // G)) * N + n
    at = (slot * H + head) * P * N + p[:, None] * N + n[None, :]
    state = tl.load(state_ptr + at).to(tl.float32) * tl.exp(dt * tl.load(rate_ptr + head))
    state += (dt * x)[:, None] * tl.load(b_ptr + group).to(tl.float32)[None, :]
    tl.store(new_ptr + at, state.to(new_ptr.dtype.element_ty))
    y = tl.sum(state * tl.load(c_ptr + group).to(tl.float32)[None, :], 1) + tl.load(skip_ptr + head) * x
    tl.store(y_ptr + place * P + p, (y * gate * tl.sigmoid(gate)).to(y_ptr.dtype.element_ty))


@case(
    "one token changes states of 64 x 128 bf16, 80 heads of 200 sequences in 256 slots, 16 rows per program",
    ONE,
    dict(B=200, slots=256, H=80, G=8, P=64, N=128),
    dict(B=3, slots=5, H=4, G=2, P=16, N=32),
)
def _(device, B, slots, H, G, P, N):
    state, new = normal(device, slots, H, P, N), empty(device, slots, H, P, N)
    slot = place(device, torch.randperm(slots, generator=torch.Generator().manual_seed(0), dtype=INT32)[:B].clone())
    x, gate, y = normal(device, B, H, P), normal(device, B, H, P), empty(device, B, H, P)
    dt, rate, skip = (normal(device, *shape, dtype=FLOAT) for shape in ((B, H), (H,), (H,)))
    rate = -rate.abs()
    b, c = normal(device, B, G, N), normal(device, B, G, N)

    def run():
        change_state[(P // 16, B, H)](
            state, slot, x, gate, dt, rate, b, c, skip, new, y, H, G, P=P, N=N, BP=16, num_warps=4
        )

    def want():
        step, keys, readers = (
            F.softplus(dt)[:, :, None, None],
            *(z.float().repeat_interleave(H // G, 1) for z in (b, c)),
        )
        s = state[slot.long()].float() * (step * rate[:, None, None]).exp()
        s = s + step * x.float()[..., None] * keys[:, :, None]
        out = ((s * readers[:, :, None]).sum(3) + skip[:, None] * x.float()) * F.silu(gate.float())
        return torch.zeros_like(state).index_copy_(0, slot.long(), s.to(state.dtype)), out

    return Work(run, (new, y), want)


@triton.jit
def allowed_logits(x_ptr, bit_ptr, row, first, N, heat, BLOCK: tl.constexpr):
    """BLOCK logits of a row over its temperature, or minus infinity for words whose bit is not set."""
    word, col = first // 32 + tl.arange(0, BLOCK // 32), first + tl.arange(0, BLOCK)
    bits = tl.load(bit_ptr + row * (N // 32) + word, mask=word * 32 < N, other=0)
    allowed = tl.reshape((bits[:, None] >> tl.arange(0, 32)[None, :]) & 1, (BLOCK,)) == 1
    return tl.load(x_ptr + row * N + col, mask=allowed, other=float("-inf")).to(tl.float32) / heat


@triton.jit
def allowed_words(x_ptr, bit_ptr, heat_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """Probabilities of the words whose bits are set. Logits of other words are not read."""
    row = tl.program_id(0)
    heat = tl.load(heat_ptr + row)
    largest, total = tl.full((BLOCK,), -1e30, tl.float32), tl.zeros((BLOCK,), tl.float32)
    for first in range(0, N, BLOCK):
        x = allowed_logits(x_ptr, bit_ptr, row, first, N, heat, BLOCK)
        new = tl.maximum(largest, x)
        total, largest = total * tl.exp(largest - new) + tl.exp(x - new), new
    high = tl.max(largest, 0)
    low = tl.sum(total * tl.exp(largest - high), 0)
    for first in range(0, N, BLOCK):
        x = allowed_logits(x_ptr, bit_ptr, row, first, N, heat, BLOCK)
        col = first + tl.arange(0, BLOCK)
        tl.store(y_ptr + row * N + col, tl.exp(x - high) / low, mask=col < N)


@case(
    "softmax over words that bits allow, 768 rows of 151,936 fp32, 16 warps",
    GRAMMARS,
    dict(M=768, N=151_936),
    dict(M=4, N=9_024),
)
def _(device, M, N):
    """In every second row half of the words are allowed; in the others, only some of every 64th group of 32 words are."""
    bits = known("meta", (1 << 31) - 1, M, N // 32)
    bits[1::2] *= (torch.arange(N // 32) % 64 == 0).int()
    bits[:, 0] |= 1
    bits = place(device, bits)
    x, y = normal(device, M, N, dtype=FLOAT) * 4, empty(device, M, N, dtype=FLOAT)
    heat = normal(device, M, dtype=FLOAT).sigmoid() + 0.5

    def want():
        allowed = ((bits[:, :, None] >> torch.arange(32, device=x.device)) & 1).view(M, N) == 1
        return (x / heat[:, None]).masked_fill(~allowed, float("-inf")).softmax(1)

    return Work(lambda: allowed_words[(M,)](x, bits, heat, y, N, BLOCK=4096, num_warps=16), y, want)


@triton.jit
def corrected_states(
    q_ptr, k_ptr, v_ptr, decay_ptr, rate_ptr, o_ptr, T, H, D: tl.constexpr, E: tl.constexpr, BE: tl.constexpr
):
    """A state of D x E, of which a program keeps BE columns: it decays, what it says of a key moves toward the key's value,
    and a query reads it."""
    d, e = tl.arange(0, D), tl.program_id(0) * BE + tl.arange(0, BE)
    state = tl.zeros((D, BE), tl.float32)
    for t in range(T):
        at = (tl.program_id(2) * T + t) * H + tl.program_id(1)
        q, k = tl.load(q_ptr + at * D + d).to(tl.float32), tl.load(k_ptr + at * D + d).to(tl.float32)
        k *= tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        state *= tl.exp(tl.load(decay_ptr + at))
        v = tl.load(v_ptr + at * E + e).to(tl.float32) - tl.sum(state * k[:, None], 0)
        state += k[:, None] * (v * tl.load(rate_ptr + at))[None, :]
        tl.store(o_ptr + at * E + e, tl.sum(state * q[:, None], 0).to(o_ptr.dtype.element_ty))


@case(
    "delta rule with decay, token by token, 4 sequences of 700, 32 heads of 64 x 64 bf16, 16 columns, 1 warp",
    DELTA,
    dict(B=4, T=700, H=32, D=64, E=64),
    dict(B=1, T=20, H=2, D=16, E=32),
)
def _(device, B, T, H, D, E):
    q, k, v, o = (
        normal(device, B, T, H, D),
        normal(device, B, T, H, D),
        normal(device, B, T, H, E),
        empty(device, B, T, H, E),
    )
    decay, rate = -normal(device, B, T, H, dtype=FLOAT).abs() / 8, normal(device, B, T, H, dtype=FLOAT).sigmoid()

    def run():
        corrected_states[(E // 16, H, B)](q, k, v, decay, rate, o, T, H, D=D, E=E, BE=16, num_warps=1)

    def want():
        keys, state, out = k.float(), torch.zeros(B, H, D, E, device=q.device), []
        keys = keys * (keys.square().sum(3, keepdim=True) + 1e-6).rsqrt()
        for t in range(T):
            state = state * decay[:, t, :, None, None].exp()
            key = keys[:, t, :, None]
            away = (v[:, t, :, None].float() - key @ state) * rate[:, t, :, None, None]
            state = state + key.mT * away
            out.append((q[:, t, :, None].float() @ state)[:, :, 0])
        return torch.stack(out, 1)

    return Work(run, o, want)


@triton.jit
def gated_units(x_ptr, r_ptr, h_ptr, T, B, H, D: tl.constexpr, BB: tl.constexpr):
    """Gated recurrent units: BB sequences of one head take T steps, with three products by D x D in each."""
    head, b, d, e = tl.program_id(0), tl.program_id(1) * BB + tl.arange(0, BB), tl.arange(0, D), tl.arange(0, D)
    at = head * 3 * D * D + d[:, None] * D + e[None, :]
    reset, keep, move = tl.load(r_ptr + at), tl.load(r_ptr + D * D + at), tl.load(r_ptr + 2 * D * D + at)
    h = tl.zeros((BB, D), tl.float32)
    for t in range(T):
        place = ((t * B + b) * H + head)[:, None] * D
        x = x_ptr + place * 3 + e[None, :]
        last = h.to(r_ptr.dtype.element_ty)
        r = tl.sigmoid(tl.load(x).to(tl.float32) + tl.dot(last, reset))
        z = tl.sigmoid(tl.load(x + D).to(tl.float32) + tl.dot(last, keep))
        n = 2 * tl.sigmoid(2 * (tl.load(x + 2 * D).to(tl.float32) + r * tl.dot(last, move))) - 1
        h = n + z * (h - n)
        tl.store(h_ptr + place + e[None, :], h.to(h_ptr.dtype.element_ty))


@case(
    "gated recurrent units, 300 steps of 96 sequences, 16 heads of 64 bf16, 16 sequences per program of 2 warps",
    GATED,
    dict(T=300, B=96, H=16, D=64),
    dict(T=6, B=32, H=2, D=16),
)
def _(device, T, B, H, D):
    x, r, h = normal(device, T, B, H, 3, D), normal(device, H, 3, D, D) / D**0.5, empty(device, T, B, H, D)

    def run():
        gated_units[(H, B // 16)](x, r, h, T, B, H, D=D, BB=16, num_warps=2)

    def want():
        state, out, weights = torch.zeros(B, H, D, device=x.device), [], r.float()
        for t in range(T):
            moved = torch.einsum("bhd,hgde->bhge", state.to(x.dtype).float(), weights)
            gate, inside = (x[t, :, :, :2].float() + moved[:, :, :2]).sigmoid(), x[t, :, :, 2].float()
            n = (inside + gate[:, :, 0] * moved[:, :, 2]).tanh()
            state = n + gate[:, :, 1] * (state - n)
            out.append(state)
        return torch.stack(out)

    return Work(run, h, want)
