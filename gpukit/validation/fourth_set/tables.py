"""Where numbers say what is read or where it goes: segments, neighbors, histograms, experts, adapters, blocks that are there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from gpukit.validation.fourth_set.case import case
from gpukit.validation.new_kernels.case import FLOAT, HALF, INT32, KI, UINT8, Work, empty, known, normal, place

SEGMENTS, HISTOGRAMS, ROUTES, ADAPTERS, SPARSE = (
    "segments",
    "histograms in parts",
    "routes",
    "adapters by name",
    "sparse weights",
)


@triton.jit
def segment_sums(x_ptr, order_ptr, first_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """A row of y is the sum of those rows of x whose positions its segment of `order` holds, of any number of them."""
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.load(first_ptr + tl.program_id(0)), tl.load(first_ptr + tl.program_id(0) + 1)):
        total += tl.load(x_ptr + tl.load(order_ptr + i).to(tl.int64) * N + cols).to(tl.float32)
    tl.store(y_ptr + tl.program_id(0) * N + cols, total.to(y_ptr.dtype.element_ty))


@case(
    "gradients of 32,000 embeddings of 2048, 64 Ki tokens in order bf16",
    SEGMENTS,
    dict(tokens=64 * KI, words=32_000, N=2048),
    dict(tokens=50, words=20, N=256),
    sample=16,
)
def _(device, tokens, words, N):
    """Words are drawn so that the first are the most frequent ones, as they are in a text."""
    ids = (known("cpu", 1 << 20, tokens).double() / (1 << 20)).pow(2).mul(words).to(INT32)
    order = place(device, ids.argsort(stable=True).to(INT32))
    first = torch.zeros(words + 1, dtype=INT32)
    first[1:] = torch.bincount(ids, minlength=words).cumsum(0)
    first = place(device, first)
    dy, dw = normal(device, tokens, N), empty(device, words, N)

    def run():
        return segment_sums[(words, N // 256)](dy, order, first, dw, N, BLOCK=256, num_warps=2)

    return Work(
        run, dw, lambda: torch.zeros(words, N, device=dy.device).index_add(0, ids.long().to(dy.device), dy.float())
    )


@triton.jit
def embedding_gradient(dy_ptr, id_ptr, dw_ptr, N, BLOCK: tl.constexpr):
    """Each token adds its row to that of its word: a word that is frequent is where many meet."""
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(id_ptr + tl.program_id(0))
    dy = tl.load(dy_ptr + tl.program_id(0) * N + cols).to(tl.float32)
    tl.atomic_add(dw_ptr + word * N + cols, dy)


@case(
    "gradients of 50,257 embeddings of 1024, 32 Ki tokens add fp32",
    SEGMENTS,
    dict(tokens=32 * KI, words=50_257, N=1024),
    dict(tokens=50, words=20, N=256),
    sample=16,
)
def _(device, tokens, words, N):
    """The result is not cleared by what is measured: a gradient adds to what is there."""
    ids = (known("cpu", 1 << 20, tokens).double() / (1 << 20)).pow(3).mul(words).to(INT32)
    placed = place(device, ids)
    dy, dw = normal(device, tokens, N), empty(device, words, N, dtype=FLOAT)

    def run():
        return embedding_gradient[(tokens, N // 256)](dy, placed, dw, N, BLOCK=256)

    return Work(
        run, dw, lambda: torch.zeros(words, N, device=dy.device).index_add(0, ids.long().to(dy.device), dy.float())
    )


@triton.jit
def neighbor_maxima(x_ptr, neighbor_ptr, y_ptr, N: tl.constexpr, DEGREE: tl.constexpr, NODES: tl.constexpr):
    """The largest of each feature over the DEGREE neighbors of a node, less its own: NODES nodes side by side."""
    node, f = tl.program_id(0) * NODES + tl.arange(0, NODES), tl.arange(0, N)
    best = tl.full((NODES, N), -float("inf"), tl.float32)
    for i in range(DEGREE):
        other = tl.load(neighbor_ptr + node * DEGREE + i)
        best = tl.maximum(best, tl.load(x_ptr + other[:, None] * N + f[None, :]).to(tl.float32))
    at = node[:, None] * N + f[None, :]
    tl.store(y_ptr + at, (best - tl.load(x_ptr + at).to(tl.float32)).to(y_ptr.dtype.element_ty))


@case(
    "maxima over 20 neighbors of 256 Ki nodes of 64 fp16",
    SEGMENTS,
    dict(nodes=256 * KI, degree=20),
    dict(nodes=64, degree=5),
)
def _(device, nodes, degree):
    x, y = normal(device, nodes, 64, dtype=HALF), empty(device, nodes, 64, dtype=HALF)
    neighbors = known(device, nodes, nodes, degree)

    def run():
        return neighbor_maxima[(nodes // 16,)](x, neighbors, y, N=64, DEGREE=degree, NODES=16)

    return Work(run, y, lambda: torch.stack([x[n.long()] for n in neighbors.t()]).amax(0).float() - x.float())


@triton.jit
def histograms(x_ptr, part_ptr, N, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """A histogram per program, counted in shared memory and stored."""
    x_ptr += tl.program_id(0) * N
    counts = tl.zeros((BINS,), tl.int32)
    for start in range(0, N, BLOCK):
        counts += tl.histogram(tl.load(x_ptr + start + tl.arange(0, BLOCK)).to(tl.int32), BINS)
    tl.store(part_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@case("histograms of 4096 stretches of 16384 bytes", HISTOGRAMS, dict(M=4096, N=16 * KI), dict(M=3, N=4096))
def _(device, M, N):
    x, y = known(device, 256, M, N, dtype=UINT8), empty(device, M, 256, dtype=INT32)

    def want():
        rows = torch.arange(M, device=x.device)[:, None] * 256
        return torch.bincount((x.long() + rows).view(-1), minlength=M * 256).view(M, 256)

    return Work(lambda: histograms[(M,)](x, y, N, BINS=256, BLOCK=2048), y, want)


@triton.jit
def route(x_ptr, which_ptr, weight_ptr, N: tl.constexpr, ROWS: tl.constexpr):
    """The two largest of a row's N logits, and the softmax over these two."""
    rows, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + n[None, :])
    best, first = tl.max(x, 1), tl.argmax(x, 1)
    x = tl.where(n[None, :] == first[:, None], -float("inf"), x)
    second = tl.argmax(x, 1)
    share = 1 / (1 + tl.exp(tl.max(x, 1) - best))
    tl.store(which_ptr + 2 * rows, first)
    tl.store(which_ptr + 2 * rows + 1, second)
    tl.store(weight_ptr + 2 * rows, share)
    tl.store(weight_ptr + 2 * rows + 1, 1 - share)


@case("two of 128 experts for 512 Ki tokens fp32", ROUTES, dict(M=512 * KI, N=128), dict(M=32, N=16))
def _(device, M, N):
    """Weights are checked; which experts is stored too, and may differ where two logits are equal."""
    x, which, weights = (
        normal(device, M, N, dtype=FLOAT),
        empty(device, M, 2, dtype=INT32),
        empty(device, M, 2, dtype=FLOAT),
    )

    def run():
        return route[(M // 32,)](x, which, weights, N=N, ROWS=32)

    return Work(run, weights, lambda: x.topk(2, 1).values.softmax(1))


@triton.jit
def combine(x_ptr, place_ptr, weight_ptr, y_ptr, N, BLOCK: tl.constexpr):
    """A token's row from those that two experts made of it, which lie among the others of these experts."""
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(0)
    first, second = tl.load(place_ptr + 2 * token), tl.load(place_ptr + 2 * token + 1)
    y = tl.load(weight_ptr + 2 * token) * tl.load(x_ptr + first * N + cols).to(tl.float32)
    y += tl.load(weight_ptr + 2 * token + 1) * tl.load(x_ptr + second * N + cols).to(tl.float32)
    tl.store(y_ptr + token * N + cols, y.to(y_ptr.dtype.element_ty))


@case("rows of two experts combined, 64 Ki tokens of 2048 bf16", ROUTES, dict(M=64 * KI, N=2048), dict(M=9, N=1024))
def _(device, M, N):
    x, y = normal(device, 2 * M, N), empty(device, M, N)
    places = place(device, known("cpu", 1 << 30, 2 * M).argsort().to(INT32).view(M, 2))
    weights = normal(device, M, 2, dtype=FLOAT)

    def run():
        return combine[(M, N // 1024)](x, places, weights, y, N, BLOCK=1024)

    def want():
        return sum(weights[:, i, None] * x[places[:, i].long()].float() for i in range(2))

    return Work(run, y, want)


@triton.jit
def adapt(x_ptr, a_ptr, which_ptr, y_ptr, K, R: tl.constexpr, BLOCK: tl.constexpr):
    """One token times the R x K weights of the adapter that it names."""
    token, r = tl.program_id(0), tl.arange(0, R)
    a_ptr += tl.load(which_ptr + token) * R * K
    total = tl.zeros((R, BLOCK), tl.float32)
    for start in range(0, K, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + token * K + k).to(tl.float32)
        total += tl.load(a_ptr + r[:, None] * K + k[None, :]).to(tl.float32) * x[None, :]
    tl.store(y_ptr + token * R + r, tl.sum(total, 1))


@case(
    "4096 tokens, each by one of 512 adapters of 16 x 4096 bf16",
    ADAPTERS,
    dict(tokens=4096, adapters=512, K=4096),
    dict(tokens=9, adapters=3, K=512),
)
def _(device, tokens, adapters, K):
    x, a, y = normal(device, tokens, K), normal(device, adapters, 16, K), empty(device, tokens, 16, dtype=FLOAT)
    which = known(device, adapters, tokens)

    def run():
        return adapt[(tokens,)](x, a, which, y, K, R=16, BLOCK=256)

    def want():
        parts = zip(x.split(256), which.long().split(256), strict=True)
        return torch.cat([torch.einsum("tk,trk->tr", rows.float(), a[ids].float()) for rows, ids in parts])

    return Work(run, y, want)


@triton.jit
def sparse_product(x_ptr, w_ptr, block_ptr, y_ptr, N, K, THERE: tl.constexpr, BM: tl.constexpr, B: tl.constexpr):
    """Of each B columns of the weights THERE blocks of B x B are stored, and a table says where they belong."""
    column = tl.program_id(1)
    offs_m, offs = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, B)
    total = tl.zeros((BM, B), tl.float32)
    for i in range(THERE):
        k = tl.load(block_ptr + column * THERE + i) * B
        x = tl.load(x_ptr + offs_m[:, None] * K + k + offs[None, :])
        w = tl.load(w_ptr + ((column * THERE + i) * B + offs)[:, None] * B + offs[None, :])
        total = tl.dot(x, w, total)
    at = offs_m[:, None] * N + column * B + offs[None, :]
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty))


@case(
    "8192 rows by weights of 4096 x 4096 fp16, 16 of 64 blocks in a column are there",
    SPARSE,
    dict(M=8192, N=4096, K=4096, there=16),
    dict(M=128, N=128, K=256, there=2),
)
def _(device, M, N, K, there):
    x, y = normal(device, M, K, dtype=HALF), empty(device, M, N, dtype=HALF)
    w = normal(device, N // 64, there, 64, 64, dtype=HALF)
    drawn = known("cpu", 1 << 30, N // 64, K // 64).argsort(1)[:, :there].sort(1).values.to(INT32).contiguous()
    blocks = place(device, drawn)

    def run():
        return sparse_product[(M // 128, N // 64)](x, w, blocks, y, N, K, THERE=there, BM=128, B=64)

    def want():
        full = torch.zeros(N // 64, K // 64, 64, 64, device=x.device)
        full[torch.arange(N // 64)[:, None], drawn.long()] = w.float()
        return x.float() @ full.permute(1, 2, 0, 3).reshape(K, N)

    return Work(run, y, want)
