"""The exercises of notebook 12: cases, bounds on traffic, caches and memory, hints, and the wrong answers that each check
must recognise."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading.exercise import Case, FunctionExercise, KernelExercise, Label, Misconception, Traffic, Variant

if TYPE_CHECKING:
    from torch import Tensor

    from gpukit.grading.evidence import Evidence
    from gpukit.grading.messages import LaunchFacts

NOTEBOOK = "12_matmul"


# ------------------------------------------------------------------------------------------------------------ inputs
class _Matrices:
    """Seeded matrices and cases named after them."""

    def __init__(self, rng: Random):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))

    def normal(self, *shape: int, dtype: str = "float32") -> Tensor:
        return self.torch.randn(shape, generator=self.generator).to(getattr(self.torch, dtype))

    def pair(self, M: int, N: int, K: int, dtype: str = "float32") -> tuple[Tensor, Tensor]:
        return self.normal(M, K, dtype=dtype), self.normal(K, N, dtype=dtype)


def _case(x: Tensor, y: Tensor, *rest: Any, tags: str = "", note: str = "") -> Case:
    dtype = str(x.dtype).removeprefix("torch.")
    name = f"{list(x.shape)} times {list(y.shape)} {dtype}" + (f", {note}" if note else "")
    return Case(name, (x, y, *rest), frozenset({dtype, *tags.split()}))


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _blocks(a: Tensor, b: Tensor, step: int) -> list[Tensor]:
    """The product of each block of K."""
    return [x @ y for x, y in zip(a.split(step, -1), b.split(step, -2), strict=True)]


# -------------------------------------------------------------------------------------------------------- matmul.tiles
def _tiles_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)
    cases = []
    for M, N, K, BLOCK, tags in (
        (1, 1, 1, 16, ""),
        (32, 32, 16, 16, ""),
        (32, 48, 64, 16, "long-k"),
        (37, 16, 32, 16, "ragged long-k"),
        (16, 53, 33, 16, "ragged long-k"),
        (3, 70, 100, 32, "ragged long-k"),
        (16, 16, 1024, 16, "long-k deep"),
        (160, 176, 16, 16, "wide"),  # a whole row of tiles is more than eight
    ):
        cases.append(_case(*make.pair(M, N, K, "bfloat16"), BLOCK, tags=tags, note=f"BLOCK {BLOCK}"))
    return cases


def _exact(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    return (a.double() @ b.double()).float()


def _whole(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    M, N = a.shape[0] // BLOCK * BLOCK, b.shape[1] // BLOCK * BLOCK
    c = _exact(a, b, BLOCK)
    c[M:], c[:, N:] = 0, 0
    return c


def _tiles_memory(case: Case, peak_bytes: int) -> tuple[str, str] | None:
    a, b, BLOCK = case.args
    beyond, tile = peak_bytes - 4 * a.shape[0] * b.shape[1], 4 * BLOCK * BLOCK
    if beyond <= 8 * tile:
        return None
    return (
        "memory",
        f"{beyond:,} bytes were held at once besides c, and eight tiles are {8 * tile:,}. Which of your tensors grows with K, "
        "M or N?",
    )


def _rounded(evidence: Evidence) -> bool:
    """Off by what bfloat16 loses, and not by more."""
    y, right = evidence.outputs.double(), evidence.expected.double()
    return bool(((y - right).abs().max() < 0.03 * right.abs().max()).all())


_T_SUM = "                acc += a[m : m + BLOCK, k : k + BLOCK].float() @ b[k : k + BLOCK, n : n + BLOCK].float()\n"
_T_K = "            for k in range(0, K, BLOCK):\n"
_T_ACC = "            acc = c[m : m + BLOCK, n : n + BLOCK]  # a view: what is added to it is added to c\n"
_T_M = "    for m in range(0, M, BLOCK):\n"
_T_N = "        for n in range(0, N, BLOCK):\n"

TILES = FunctionExercise(
    id="matmul.tiles",
    title="A tiled product in PyTorch",
    notebook=NOTEBOOK,
    function="matmul_tiles",
    label=Label(2, 20, "three loops over tiles; in which dtype products are added; what is held at a time"),
    hints=(
        "c falls into tiles along M and N. Which part of a and which part of b does one tile need, and may they be held whole?",
        "Three loops: over the rows of tiles, over the columns, and inside along K, a block at a time. Slices that reach over "
        "the edge are cut off by PyTorch. A product of two bfloat16 tensors is bfloat16.",
        "For each tile of c: for each block of K, take the tile of a and the tile of b, convert both to float32, and add "
        "their product to that slice of c.",
    ),
    cases=_tiles_cases,
    expected=_exact,
    tolerance=2e-5,
    memory_rule=_tiles_memory,
    misconceptions=(
        Misconception(
            "last-block-wins",
            "those are the products of the last block of K alone: each block takes the place of those before it. What "
            "should it do to them?",
            gives=lambda a, b, BLOCK: _blocks(a.float(), b.float(), BLOCK)[-1],
        ),
        Misconception(
            "first-block-only",
            "those are the products of the first block of K. Who adds the others?",
            gives=lambda a, b, BLOCK: _blocks(a.float(), b.float(), BLOCK)[0],
        ),
        Misconception(
            "last-block-dropped",
            "the last block of K, which is not full, is missing. How many blocks cover K?",
            gives=lambda a, b, BLOCK: (
                a[:, : a.shape[1] // BLOCK * BLOCK].float() @ b[: a.shape[1] // BLOCK * BLOCK].float()
            ),
        ),
        Misconception(
            "edge-tiles",
            "the tiles at the edge of c, which are not full, are still 0. How many tiles cover M, and how many N?",
            gives=_whole,
        ),
        Misconception(
            "rounded-sums",
            "every element is off by a rounding: something was rounded to 16 bits on the way. What is the dtype of a product of "
            "two 16-bit tiles, and of your sum?",
            when=lambda evidence: evidence.kind == "values" and _rounded(evidence),
        ),
    ),
    wrong=(
        Variant("assigned", ((_T_SUM, _T_SUM.replace("acc +=", "acc[:] =")),), diagnosis="last-block-wins"),
        Variant(
            "one block",
            ((_T_K, "            for k in range(0, min(K, BLOCK), BLOCK):\n"),),
            diagnosis="first-block-only",
        ),
        Variant(
            "whole blocks of K",
            ((_T_K, "            for k in range(0, K // BLOCK * BLOCK, BLOCK):\n"),),
            diagnosis="last-block-dropped",
        ),
        Variant(
            "whole tiles of c",
            ((_T_M, _T_M.replace("M,", "M // BLOCK * BLOCK,")), (_T_N, _T_N.replace("N,", "N // BLOCK * BLOCK,"))),
            diagnosis="edge-tiles",
        ),
        Variant(
            "products in bfloat16",
            ((_T_SUM, _T_SUM.replace(".float() @", " @").replace("BLOCK].float()", "BLOCK]")),),
            diagnosis="rounded-sums",
        ),
        Variant(
            "sum in bfloat16",
            (
                (_T_ACC, "            acc = torch.zeros_like(c[m : m + BLOCK, n : n + BLOCK], dtype=a.dtype)\n"),
                (_T_SUM, _T_SUM + "            c[m : m + BLOCK, n : n + BLOCK] = acc\n"),
            ),
            diagnosis="rounded-sums",
        ),
        Variant("all at once", ((_T_M, "    return a.float() @ b.float()\n" + _T_M),), diagnosis="memory"),
        Variant(
            "whole rows of a",
            (
                (_T_K, "            if True:\n"),
                (_T_SUM, "                acc += a[m : m + BLOCK].float() @ b[:, n : n + BLOCK].float()\n"),
            ),
            diagnosis="memory",
        ),
        Variant(
            "strips put together",
            source="""import torch


def matmul_tiles(a, b, BLOCK):
    rows = []
    for strip in a.split(BLOCK, 0):
        row = torch.zeros(strip.shape[0], b.shape[1])
        for part, below in zip(strip.split(BLOCK, 1), b.split(BLOCK, 0)):
            for column, out in zip(below.split(BLOCK, 1), row.split(BLOCK, 1)):
                out.addmm_(part.float(), column.float())
        rows.append(row)
    c = torch.empty(a.shape[0], b.shape[1])
    for i, row in enumerate(rows):
        c[i * BLOCK : i * BLOCK + row.shape[0]] = row
    return c
""",
            diagnosis="memory",
        ),
        Variant("the library", ((_T_M, "    return (a @ b).float()\n" + _T_M),), diagnosis="rounded-sums"),
        Variant("products in float16", ((_T_SUM, _T_SUM.replace(".float()", ".half()")),), diagnosis="rounded-sums"),
        Variant(
            "no loop over N",
            (
                (_T_N, "        for _ in range(1):\n"),
                (_T_ACC, "            acc = c[m : m + BLOCK]\n"),
                (
                    _T_SUM,
                    "                acc.addmm_(a[m : m + BLOCK, k : k + BLOCK].float(), b[k : k + BLOCK].float())\n",
                ),
            ),
            diagnosis="memory",
        ),
        Variant(
            "no loop over M",
            (
                (_T_M, "    for _ in range(1):\n"),
                (_T_ACC, "            acc = c[:, n : n + BLOCK]\n"),
                (
                    _T_SUM,
                    "                acc.addmm_(a[:, k : k + BLOCK].float(), b[k : k + BLOCK, n : n + BLOCK].float())\n",
                ),
            ),
            diagnosis="memory",
        ),
    ),
    right=(
        Variant(
            "tiles of its own",
            source="""import torch


def matmul_tiles(a, b, BLOCK):
    M, K = a.shape
    N = b.shape[1]
    c = torch.empty((M, N))
    for tile in range(-(-M // BLOCK) * -(-N // BLOCK)):
        i, j = divmod(tile, -(-N // BLOCK))
        rows, columns = slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)
        total = 0.0
        k = 0
        while k < K:
            total = total + torch.mm(a[rows, k : k + BLOCK].to(torch.float32), b[k : k + BLOCK, columns].float())
            k += BLOCK
        c[rows, columns] = total
    return c
""",
        ),
        Variant(
            "outer products",
            source="""import torch


def matmul_tiles(a, b, BLOCK):
    c = torch.zeros(a.shape[0], b.shape[1])
    for i, j in torch.cartesian_prod(torch.arange(0, a.shape[0], BLOCK), torch.arange(0, b.shape[1], BLOCK)):
        acc = c[i : i + BLOCK, j : j + BLOCK]
        for k in range(a.shape[1]):
            acc += a[i : i + BLOCK, k, None].float() * b[k, j : j + BLOCK].float()
    return c
""",
        ),
    ),
)


# ------------------------------------------------------------------------------------------------------ matmul.strides
def _strides_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)
    normal = make.normal
    weight = normal(1, 40, 37)
    return [
        _case(normal(1, 16, 16), normal(1, 16, 16), 16),
        _case(normal(2, 32, 40), normal(2, 40, 48), 16, tags="batched", note="a batch of 2"),
        _case(normal(1, 37, 29), normal(1, 29, 53), 16, tags="ragged"),
        _case(normal(1, 24, 40).mT, normal(1, 24, 16), 16, tags="a-strides", note="a transposed"),
        _case(normal(1, 20, 33), normal(1, 50, 33).mT, 32, tags="b-strides", note="b transposed: a linear layer's weight"),
        _case(
            normal(2, 5, 3, 16, dtype="bfloat16").transpose(1, 2)[1], normal(3, 16, 7, dtype="bfloat16"), 16,
            tags="a-strides batched", note="heads of a [B, T, H, D]",
        ),
        _case(normal(3, 18, 40), weight.expand(3, 40, 37), 16, tags="b-strides batched", note="b expanded: stride 0"),
        _case(
            normal(2, 64, 96, dtype="float16")[:, ::2, ::3], normal(2, 32, 30, dtype="float16"), 16,
            tags="a-strides batched", note="every second row and third column of a",
        ),
        _case(normal(2, 96, 64), normal(2, 64, 96).mT.contiguous().mT, 32, tags="b-strides batched", note="b transposed"),
        # 32 x 1.8125 again and again: what rounding to bfloat16 takes away goes one way.
        _case(normal(1, 1, 512, dtype="bfloat16") * 0 + 1, normal(1, 512, 16, dtype="bfloat16") * 0 + 1.8125, 16,
              tags="many-blocks", note="all numbers alike"),
    ]  # fmt: skip


def _flat(x: Tensor) -> Tensor:
    """What a kernel reads that takes x for contiguous; beyond its storage is nothing."""
    return x.as_strided(x.shape, x.contiguous().stride())


def _still(a: Tensor, b: Tensor, BLOCK: int) -> Tensor:
    """Every step multiplies the first blocks, masked by what is left of K."""
    left = [min(32, a.shape[2] - k) for k in range(0, a.shape[2], 32)]
    return sum(a[..., :k] @ b[:, :k] for k in left)


_S_A = "    a_ptrs = a_ptr + batch * stride_ab + offs_m * stride_am + offs_k[None, :] * stride_ak\n"
_S_B = "    b_ptrs = b_ptr + batch * stride_bb + offs_k[:, None] * stride_bk + offs_n * stride_bn\n"
_S_MASK_A = "mask=(offs_m < M) & mask_k[None, :], other=0.0"
_S_MASK_B = "mask=mask_k[:, None] & (offs_n < N), other=0.0"
_S_STEP_A = "        a_ptrs += BLOCK_K * stride_ak\n"
_S_STEP_B = "        b_ptrs += BLOCK_K * stride_bk\n"
_S_C = "    c_ptrs = c_ptr + batch * M * N + offs_m * N + offs_n\n    tl.store(c_ptrs, acc, mask=(offs_m < M) & (offs_n < N))\n"
_S_DOT = '        acc = tl.dot(a, b, acc, input_precision="ieee")\n' + _S_STEP_A
_S_LOADS = "        a = tl.load(a_ptrs, " + _S_MASK_A + ")\n        b = tl.load(b_ptrs, " + _S_MASK_B + ")\n" + _S_DOT
_S_CALL = "    matmul_kernel[grid](a, b, c, *a.stride(), *b.stride(), M, N, K, **blocks)\n"


def _nearly(evidence: Evidence) -> bool:
    """Off by about 2^-11 of the terms, not by more."""
    y, right = evidence.outputs.double(), evidence.expected.double()
    return bool((y - right).abs().max() < 3e-3 * right.abs().max())


STRIDES = KernelExercise(
    id="matmul.strides",
    title="A batch of products, of any strides",
    notebook=NOTEBOOK,
    function="matmul",
    label=Label(3, 30, "addresses from strides alone: transposed, batched, expanded; ragged edges"),
    hints=(
        "A transposed matrix is the same memory with its two strides exchanged. If every address is made of indices times "
        "strides, what is left to be transposed?",
        "The address of an element of a is a sum of three products: batch, row and column, each with its stride. The block "
        "of a has an edge at M and one at K, that of b at K and at N. From step to step along K both blocks move: by how "
        "much does each?",
        "Offsets of rows, columns and k in 64 bits. Pointers of a: base, batch, rows as a column of numbers, k as a row of "
        "numbers, each times its stride; of b likewise with k down and columns across. In the loop: masks with what is left "
        "of K, two loads with zeros beyond, tl.dot, both pointers on by a block of k times its stride. Then the store into "
        "c, whose rows are N apart and whose matrices are M N apart.",
    ),
    cases=_strides_cases,
    returns=("c",),
    reference=lambda a, b, BLOCK: a @ b,
    # The largest case: two times a [96, 64] and b [64, 96] in tiles of 32: a 3 times, b 3 times, c once.
    traffic=Traffic(reads=3 + 3, writes=96 / 64),
    misconceptions=(
        Misconception(
            "low-precision-sums",
            "wrong only where K is long: sums that are rounded to 16 bits again and again lose what is added to them. Of which "
            "dtype is acc?",
            when=lambda evidence: evidence.tag("many-blocks"),
        ),
        Misconception(
            "a-contiguous",
            "a is read as if it were contiguous: a transposed matrix is then another one. Which three numbers say where "
            "element (i, j) of product p lies?",
            gives=lambda a, b, BLOCK: _flat(a) @ b,
        ),
        Misconception(
            "b-contiguous",
            "b is read as if it were contiguous: a transposed matrix is then another one. Which three numbers say where "
            "element (i, j) of product p lies?",
            gives=lambda a, b, BLOCK: a @ _flat(b),
        ),
        Misconception(
            "first-matrix",
            "every product of a batch is the first one's. Which id says which product a program works on?",
            gives=lambda a, b, BLOCK: (a[:1] @ b[:1]).expand(a.shape[0], -1, -1),
        ),
        Misconception(
            "first-matrix",
            "all products of a batch use the first matrix of a. How far apart are two of them?",
            gives=lambda a, b, BLOCK: a[:1] @ b,
        ),
        Misconception(
            "first-matrix",
            "all products of a batch use the first matrix of b. How far apart are two of them?",
            gives=lambda a, b, BLOCK: a @ b[:1],
        ),
        Misconception(
            "k-does-not-move",
            "every step adds the product of the first blocks again. What has to move between two steps?",
            gives=_still,
        ),
        Misconception(
            "first-block-only",
            "those are the products of the first block of K. How do the others get into the sum?",
            gives=lambda a, b, BLOCK: a[..., :32] @ b[:, :32],
        ),
        Misconception(
            "last-block-wins",
            "those are the products of the last block of K: each step takes the place of the sum so far",
            gives=lambda a, b, BLOCK: _blocks(a, b, 32)[-1],
        ),
        Misconception(
            "tf32",
            "the operands were cut to 10 bits of mantissa. Which argument of tl.dot says that float32 means float32?",
            when=lambda evidence: evidence.tag("float32") and _nearly(evidence),
        ),
        Misconception(
            "out-of-bounds",
            "each index goes with its own stride, and ends: a block of a at M and at K, one of b at K and at N, a tile of c "
            "at M and at N",
        ),
        Misconception("race", "each program has a tile of its own, of a matrix of its own: how far apart are c's rows, and its matrices?"),
        Misconception("traffic", "strides describe any view: no copy is needed, and a tile's rows and columns are read once"),
    ),
    wrong=(
        Variant("a contiguous", ((_S_A, _S_A.replace("stride_am", "K").replace("stride_ak", "1").replace("stride_ab", "M * K")),
                                 (_S_STEP_A, _S_STEP_A.replace("stride_ak", "1"))), diagnosis="a-contiguous"),
        Variant("b contiguous", ((_S_B, _S_B.replace("stride_bk", "N").replace("stride_bn", "1").replace("stride_bb", "K * N")),
                                 (_S_STEP_B, _S_STEP_B.replace("stride_bk", "N"))), diagnosis="b-contiguous"),
        Variant("the first a of a batch", ((_S_A, _S_A.replace("batch * stride_ab + ", "")),), diagnosis="first-matrix"),
        Variant("the first b of a batch", ((_S_B, _S_B.replace("batch * stride_bb + ", "")),), diagnosis="first-matrix"),
        Variant("c without its batch", ((_S_C, _S_C.replace("batch * M * N + ", "")),), diagnosis="race"),
        Variant("a does not move", ((_S_STEP_A, ""), (_S_STEP_B, "")), diagnosis="k-does-not-move"),
        Variant("no sum", ((_S_DOT, _S_DOT.replace("a, b, acc,", "a, b,")),), diagnosis="last-block-wins"),
        Variant(
            "one block", (("    for k in range(0, K, BLOCK_K):\n        mask_k", "    for k in range(0, 1):\n        mask_k"),),
            diagnosis="first-block-only",
        ),
        Variant("tf32", ((_S_DOT, _S_DOT.replace(', input_precision="ieee"', "")),), diagnosis="tf32"),
        Variant("sums in 16 bits", ((_S_DOT, _S_DOT.replace('"ieee")', '"ieee").to(a.dtype).to(tl.float32)')),), diagnosis="low-precision-sums"),
        Variant("no mask along K", ((_S_LOADS, _S_LOADS.replace(" & mask_k[None, :]", "").replace("mask_k[:, None] & ", "")),),
                diagnosis="out-of-bounds"),
        Variant("no mask on the store", ((_S_C, _S_C.replace(", mask=(offs_m < M) & (offs_n < N)", "")),),
                diagnosis="out-of-bounds"),
        Variant("copies first", ((_S_CALL, "    a, b = a.contiguous(), b.contiguous()\n" + _S_CALL),), diagnosis="traffic"),
        Variant("calls torch", ((_S_CALL, "    return torch.bmm(a, b)\n" + _S_CALL),), diagnosis="not-your-kernel"),
    ),
    right=(
        Variant(
            "addresses in the loop",
            (
                (_S_A + _S_B, "    a_ptr += batch * stride_ab\n    b_ptr += batch * stride_bb\n"),
                (_S_LOADS + _S_STEP_B,
                 "        ks = k + offs_k\n"
                 "        rows = tl.load(a_ptr + (offs_m * stride_am + ks[None, :] * stride_ak), (offs_m < M) & mask_k[None, :], 0)\n"
                 "        columns = tl.load(b_ptr + ks[:, None] * stride_bk + offs_n * stride_bn, (offs_n < N) & mask_k[:, None], 0)\n"
                 '        acc += tl.dot(rows, columns, input_precision="ieee")\n'),
            ),
        ),
        Variant(
            "rows wrapped around",
            (
                (_S_A, _S_A.replace("offs_m * stride_am", "(offs_m % M) * stride_am")),
                (_S_B, _S_B.replace("offs_n * stride_bn", "(offs_n % N) * stride_bn")),
                (_S_LOADS, _S_LOADS.replace("(offs_m < M) & mask_k", "mask_k").replace(" & (offs_n < N)", "")),
            ),
        ),
        Variant("turned round", ((_S_DOT, '        acc += tl.trans(tl.dot(tl.trans(b), tl.trans(a), input_precision="ieee"))\n' + _S_STEP_A),)),
        Variant(
            "what is left of K",
            (("    for k in range(0, K, BLOCK_K):\n        mask_k = k + offs_k < K\n",
              "    left = K\n    while left > 0:\n        mask_k = offs_k < left\n        left -= BLOCK_K\n"),),
        ),
    ),
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------- matmul.precision
WAYS = ("ieee", "tf32", "fp16", "bf16", "bf16 sums")


def _read(name: str, x: Tensor) -> Tensor:
    """x as the operands of `name` hold it, in float32."""
    import torch

    if name == "tf32":
        return (x.view(torch.int32) & -(2**13)).view(torch.float32)
    return x.half().float() if name == "fp16" else x.bfloat16().float() if name.startswith("bf16") else x


def _product(name: str, a: Tensor, b: Tensor) -> Tensor:
    a, b = _read(name, a), _read(name, b)
    if name != "bf16 sums":
        return sum(_blocks(a, b, 32))
    total = a[:, :0] @ b[:0]
    for part in _blocks(a, b, 16):
        total = (total + part).bfloat16().float()
    return total


def _precision_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)
    cases = []
    for name in WAYS:
        a, b = make.pair(8, 8, 256)
        cases.append(Case(f"{name}, K 256", (a, b, _product(name, a, b)), frozenset({name})))
        a, b = make.pair(4, 6, 1024)
        a, b = a.abs(), b.abs()
        cases.append(Case(f"{name}, K 1024, all positive", (a, b, _product(name, a, b)), frozenset({name, "positive"})))
    for name in ("ieee", "bf16"):
        a, b = make.pair(8, 8, 64)
        a, b = a * 1e3, b * 1e3
        cases.append(Case(f"{name}, numbers around 1e3", (a, b, _product(name, a, b)), frozenset({name, "scaled"})))
    a, b = make.pair(8, 8, 64)
    a, b = a.repeat(1, 2), b.repeat(2, 1)
    a[:, 64:] *= -1
    a += 1e-2 * make.normal(8, 128)
    cases.append(Case("ieee, terms that cancel", (a, b, _product("ieee", a, b)), frozenset({"ieee", "cancel"})))
    a, b = (x.bfloat16().float() for x in make.pair(8, 8, 128))
    fits = _product("bf16", a, b)
    cases.append(Case("numbers that bfloat16 holds exactly", (a, b, fits), frozenset({"ieee", "several"})))
    a, b = (_read("fp16", _read("tf32", x)) for x in make.pair(8, 8, 128))
    cases.append(
        Case("numbers that float16 holds exactly", (a, b, _product("fp16", a, b)), frozenset({"ieee", "several"}))
    )
    # A little above what float16 holds, cutting gives what rounding gives; a little below what bfloat16 holds, both round up.
    a, b = (_read("fp16", x) * (1 + 2**-13) for x in make.pair(8, 8, 128))
    cases.append(Case("tf32, and float16 reads the same", (a, b, _product("tf32", a, b)), frozenset({"several"})))
    a, b = (x.bfloat16().float() * (1 - 2**-13) for x in make.pair(8, 8, 128))
    cases.append(
        Case("fp16, and bfloat16 reads the same", (a, b, _product("fp16", a, b)), frozenset({"fp16", "several"}))
    )
    return cases


def _which(a: Tensor, b: Tensor, c: Tensor, reads: str = "ab") -> str:
    """reads: the operands that somebody converts."""
    terms = a.double().abs() @ b.double().abs()
    for name in WAYS[:-1]:
        left, right = (_read(name, x) if which in reads else x for x, which in ((a, "a"), (b, "b")))
        error = (c.double() - left.double() @ right.double()).abs()
        if bool((error <= 2**-20 * terms).all()):
            return name
    return WAYS[-1]


def _tf32_rounded(evidence: Evidence) -> bool:
    """tf32 is never recognised, and at most float16, which rounds to as many bits, is mistaken for it."""
    passed = any("tf32" in case.tags for case in evidence.passed)
    return not passed and all({"tf32", "fp16"} & case.tags for case in evidence.failed)


_P_LOOP = "        if bool((error <= 2**-20 * terms).all()):\n"
_P_TF32 = "lambda x: (x.view(torch.int32) & -(2**13)).view(torch.float32)"
_P_ORDER = '        "ieee": lambda x: x,\n'
_P_BODY = "    ways = {\n" + _P_ORDER

PRECISION = FunctionExercise(
    id="matmul.precision",
    title="Which error is which",
    notebook=NOTEBOOK,
    function="which",
    label=Label(
        3, 25, "what each precision does to operands and to sums; comparing with a model, not with a threshold"
    ),
    hints=(
        "With positive numbers and a long K the smallest format does not have the largest error. What can you compute "
        "yourself that c must equal, if it was made in a given way?",
        "Replay each way: give the operands the bits that it reads, multiply in float64, and compare with c. What is left is "
        "what float32 sums lose, and its size goes with the sizes of the terms that are added.",
        "For each of the first four ways: both operands as that way reads them, their product in float64, the distance of c "
        "from it. If all distances are below a millionth of the product of the absolute values, that is the way. If none "
        "fits, the sums were rounded.",
    ),
    cases=_precision_cases,
    expected=_which,
    misconceptions=(
        Misconception(
            "several-fit",
            "where bits are 0 anyway, cutting them off changes nothing and several ways fit. Which of them does the "
            "docstring ask for?",
            when=lambda evidence: all("several" in case.tags for case in evidence.failed),
        ),
        *(
            Misconception(
                "one-operand",
                "one operand was read as the tensor cores read it, the other as it is in memory. Which of them do they read?",
                gives=lambda a, b, c, reads=reads: _which(a, b, c, reads),
            )
            for reads in "ab"
        ),
        Misconception(
            "tf32-is-cut",
            "tf32 is not recognised. Are the last 13 bits rounded, or not looked at?",
            when=_tf32_rounded,
        ),
        Misconception(
            "absolute-error",
            "large numbers are misjudged. What should an error be measured against?",
            when=lambda evidence: (
                any("scaled" in case.tags for case in evidence.failed)
                and not any("tf32" in c.tags for c in evidence.failed)
            ),
        ),
        Misconception(
            "bitwise",
            "every answer is the last of the list: somebody else's float32 sums, added in another order, differ in their last bits",
            when=lambda evidence: {o.reply.output for o in evidence.outcomes} == {"bf16 sums"},
        ),
        Misconception(
            "size-alone",
            "the size of an error does not tell formats apart: it grows with K, and cutting off always errs in one direction. "
            "What exactly would each way give?",
            when=lambda evidence: evidence.kind == "values",
        ),
    ),
    wrong=(
        Variant(
            "an absolute bound", ((_P_LOOP, "        if bool((error <= 1e-3).all()):\n"),), diagnosis="absolute-error"
        ),
        Variant(
            "relative to the result",
            ((_P_LOOP, "        if bool((error <= 1e-3 * c.double().abs()).all()):\n"),),
            diagnosis="size-alone",
        ),
        Variant("equal to the bit", ((_P_LOOP, "        if bool((error == 0).all()):\n"),), diagnosis="bitwise"),
        Variant(
            "tf32 rounds",
            ((_P_TF32, "lambda x: ((x.view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)"),),
            diagnosis="tf32-is-cut",
        ),
        Variant(
            "coarsest first",
            (("    for name, read in ways.items():\n", "    for name, read in reversed(ways.items()):\n"),),
            diagnosis="several-fit",
        ),
        Variant(
            "float16 before tf32",
            (
                (
                    "    for name, read in ways.items():\n",
                    '    for name in ("ieee", "fp16", "tf32", "bf16"):\n        read = ways[name]\n',
                ),
            ),
            diagnosis="several-fit",
        ),
        Variant(
            "bfloat16 before float16",
            (
                (
                    "    for name, read in ways.items():\n",
                    '    for name in ("ieee", "tf32", "bf16", "fp16"):\n        read = ways[name]\n',
                ),
            ),
            diagnosis="several-fit",
        ),
        Variant(
            "a alone is read",
            (("read(a).double() @ read(b).double()", "read(a).double() @ b.double()"),),
            diagnosis="one-operand",
        ),
        Variant(
            "thresholds",
            source="""def which(a, b, c):
    exact = a.double() @ b.double()
    error = float(((c - exact).abs() / (a.double().abs() @ b.double().abs())).max())
    for bound, name in ((1e-6, "ieee"), (3e-4, "tf32"), (4e-4, "fp16"), (2e-3, "bf16")):
        if error < bound:
            return name
    return "bf16 sums"
""",
            diagnosis="size-alone",
        ),
        Variant("always ieee", source='def which(a, b, c):\n    return "ieee"\n', diagnosis="size-alone"),
    ),
    right=(
        Variant(
            "the nearest",
            source="""import torch


def which(a, b, c):
    def cut(x):
        bits = x.contiguous().view(torch.int32)
        return torch.bitwise_left_shift(torch.bitwise_right_shift(bits, 13), 13).view(torch.float32)

    size = a.abs().double() @ b.abs().double()
    found = {}
    for name, x, y in (
        ("ieee", a, b),
        ("tf32", cut(a), cut(b)),
        ("fp16", a.to(torch.float16), b.to(torch.float16)),
        ("bf16", a.to(torch.bfloat16), b.to(torch.bfloat16)),
    ):
        found[name] = ((x.double() @ y.double() - c).abs() / size).max().item()
    best = min(found.values())
    if best > 1e-5:
        return "bf16 sums"
    return next(name for name in found if found[name] <= 1e-5)
""",
        ),
        Variant(
            "one after the other",
            source="""import torch


def fits(x, y, a, b, c):
    scale = (a.norm(dim=1, keepdim=True) * b.norm(dim=0, keepdim=True)).double()
    return torch.all(torch.abs(x.double() @ y.double() - c.double()) < 4e-6 * scale).item()


def which(a, b, c):
    if fits(a, b, a, b, c):
        return "ieee"
    unit = torch.tensor(-8192, dtype=torch.int32)
    if fits((a.view(torch.int32) & unit).view(torch.float32), (b.view(torch.int32) & unit).view(torch.float32), a, b, c):
        return "tf32"
    if fits(a.half(), b.half(), a, b, c):
        return "fp16"
    return "bf16" if fits(a.bfloat16(), b.bfloat16(), a, b, c) else "bf16 sums"
""",
        ),
    ),
)


# -------------------------------------------------------------------------------------------------------- matmul.order
_SMS, _L2_BYTES = 16, 12 << 10


def _order_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)
    cases = []
    for tiles_m, tiles_n, K, GROUP_M, dtype in (
        (1, 1, 16, 1, "float32"),
        (2, 3, 16, 2, "float32"),
        (4, 2, 32, 2, "bfloat16"),
        (5, 2, 16, 2, "float16"),
        (3, 4, 16, 8, "float32"),
        (8, 16, 32, 4, "float16"),
    ):
        tags = "short-group" if tiles_m % GROUP_M else ""
        note = f"{tiles_m} x {tiles_n} tiles, GROUP_M {GROUP_M}"
        cases.append(_case(*make.pair(16 * tiles_m, 16 * tiles_n, K, dtype), GROUP_M, tags=tags, note=note))
    return cases


def _order_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    """64 KiB are what groups of 4 x 4 tiles read, 144 what rows of 16 do; a quarter more is somebody's own order."""
    a, b, _ = case.args
    if a.shape[0] * b.shape[1] < 128 * 256:
        return None
    read, enough = sum(launch.dram_read_bytes for launch in launches), 64 << 10
    loaded, tiles = (
        sum(launch.load_bytes for launch in launches),
        2 * a.numel() * b.shape[1] // 16 * a.element_size(),
    )
    if loaded < 0.95 * tiles:
        return (
            "tile-size",
            f"{loaded:,} bytes are loaded, where tiles of BLOCK = 16 load {tiles:,}: larger tiles help in any order. What does "
            "the order alone do?",
        )
    if read <= 1.25 * enough:
        return None
    return (
        "order",
        f"{read / 1024:.0f} KiB come from memory where {enough // 1024} are enough ({_SMS} programs at a time, an L2 of "
        f"{_L2_BYTES // 1024} KiB, modelled). Which tiles do the first {_SMS} programs compute, and how many strips of a and "
        "of b do they need together?",
    )


_O_M = "    pid_m = first + place % rows\n"
_O_N = "    pid_n = place // rows\n"
_O_ROWS = "    rows = min(tiles_m - first, GROUP_M)\n    place = pid % (GROUP_M * tiles_n)\n    pid_m = first + place % rows\n"
_O_FIRST = "    first = pid // (GROUP_M * tiles_n) * GROUP_M\n    rows = min(tiles_m - first, GROUP_M)\n    place = pid % (GROUP_M * tiles_n)\n    pid_m = first + place % rows\n"
_O_ALL = _O_FIRST + _O_N
_O_TILES = "    tiles_m, tiles_n = M // BLOCK, N // BLOCK\n    ordered"
_O_CALL = "    ordered_kernel[(tiles_m * tiles_n,)](a, b,"

ORDER = KernelExercise(
    id="matmul.order",
    title="A grouped order that saves nothing",
    notebook=NOTEBOOK,
    function="matmul_ordered",
    label=Label(3, 20, "detective: the order of tiles, judged by what L2 reads from memory"),
    hints=(
        "Write down the tiles of programs 0 to 15 for 8 x 16 tiles and GROUP_M = 4. How many different rows of tiles are "
        "among them, how many columns?",
        "Programs that run together should form a block. Inside a group one of the two numbers has to change from one "
        "program to the next, and the other after as many programs as the group has rows.",
        "The row inside the group is the remainder of the program's place by the group's rows, and the column is the quotient "
        "of the same two numbers.",
    ),
    cases=_order_cases,
    returns=("c",),
    reference=lambda a, b, GROUP_M: a @ b,
    traffic=Traffic(reads=16 + 8 * 2, writes=8.0),  # a [128, 32] and b [32, 256] in tiles of 16; c [128, 256]
    caches=(_SMS, _L2_BYTES),
    launch_rule=_order_rule,
    misconceptions=(
        Misconception(
            "short-group",
            "the last group has fewer rows than GROUP_M, and its programs fall outside c or on one another's tiles. How "
            "many rows does it have?",
            when=lambda evidence: evidence.tag("short-group"),
        ),
        Misconception(
            "out-of-bounds",
            "a program got a tile that c does not have. How many rows has a group, also the last one, and how many columns has c?",
        ),
        Misconception(
            "lost-tiles",
            "some tiles of c were never written: two programs computed one tile, so another one was nobody's. Is your map from "
            "ids to tiles one to one?",
            when=lambda evidence: evidence.kind == "nan",
        ),
    ),
    wrong=(
        Variant("as it was", ((_O_M, "    pid_m = first + place // tiles_n % rows\n"), (_O_N, "    pid_n = place % tiles_n\n")),
                diagnosis="order"),
        Variant("row by row", ((_O_ALL, "    pid_m, pid_n = pid // tiles_n, pid % tiles_n\n"),), diagnosis="order"),
        Variant("column by column", ((_O_ALL, "    pid_m, pid_n = pid % tiles_m, pid // tiles_m\n"),), diagnosis="order"),
        Variant("groups of one row", ((_O_CALL, "    GROUP_M = 1\n" + _O_CALL),), diagnosis="order"),
        Variant("one group", ((_O_CALL, "    GROUP_M = tiles_m\n" + _O_CALL),), diagnosis="order"),
        Variant("every group full", ((_O_ROWS, _O_ROWS.replace("min(tiles_m - first, GROUP_M)", "GROUP_M")),), diagnosis="out-of-bounds"),
        Variant("columns of full groups", ((_O_N, "    pid_n = place // GROUP_M\n"),), diagnosis="short-group"),
        Variant("row of the whole", ((_O_M, "    pid_m = place % rows\n"),), diagnosis="lost-tiles"),
        Variant("row and column exchanged", ((_O_M, "    pid_m = first + place // rows\n"), (_O_N, "    pid_n = place % rows\n")),
                diagnosis="out-of-bounds"),
        Variant(
            "row by row, with larger tiles",
            ((_O_ALL, "    pid_m, pid_n = pid // tiles_n, pid % tiles_n\n"),
             (_O_TILES, "    BLOCK = BLOCK if M % 32 or N % 32 or K % 32 else 32\n" + _O_TILES)),
            diagnosis="tile-size",
        ),
    ),
    right=(
        Variant(
            "groups counted",
            (
                (
                    _O_ALL,
                    "    each = GROUP_M * tiles_n\n"
                    "    group = pid // each\n"
                    "    height = tl.minimum(GROUP_M, tiles_m - group * GROUP_M)\n"
                    "    pid_n = (pid - group * each) // height\n"
                    "    pid_m = group * GROUP_M + (pid - group * each) - pid_n * height\n",
                ),
            ),
        ),
        Variant("id in place of the place", ((_O_M, "    pid_m = first + pid % rows\n"),)),
        Variant(
            "upwards",
            ((_O_M, "    pid_m = first + rows - 1 - place % rows\n"),),
        ),
        Variant("there and back", ((_O_N, _O_N + "    pid_n = tl.where(first // GROUP_M % 2 == 0, pid_n, tiles_n - 1 - pid_n)\n"),)),
        Variant("Triton's own", ((_O_ALL, "    pid_m, pid_n = tl.swizzle2d(pid // tiles_n, pid % tiles_n, tiles_m, tiles_n, GROUP_M)\n"),)),
    ),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------ matmul.split_k
def _split_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)
    cases = []
    for M, N, K, SPLIT_K, dtype in (
        (16, 32, 64, 1, "float32"),
        (4, 32, 128, 2, "float32"),
        (3, 50, 100, 3, "float32"),
        (17, 32, 96, 2, "bfloat16"),
        (2, 7, 160, 4, "float16"),
        (1, 33, 40, 4, "float32"),
        (1, 32, 480, 8, "float32"),
        (16, 32, 512, 8, "float16"),
    ):
        blocks = _up(K, 32)
        tags = "uneven" if blocks % SPLIT_K else ""
        tags += " empty" if _up(blocks, SPLIT_K) * (SPLIT_K - 1) >= blocks else ""
        note = f"SPLIT_K {SPLIT_K}"
        cases.append(_case(*make.pair(M, N, K, dtype), SPLIT_K, tags=tags, note=note))
    a, b = make.normal(4, 192, dtype="float16"), make.normal(192, 16, dtype="float16")
    a[:, :96], a[:, 96:], b = a[:, :96].abs() + 60, -(a[:, 96:].abs() + 60), b.abs() + 60
    cases.append(_case(a, b, 2, tags="large-sums", note="SPLIT_K 2, shares beyond 65,504"))
    a, b = make.pair(4, 32, 128, "bfloat16")
    a[:, 64:] = -a[:, :64]
    b[64:] = b[:64]
    b[0] += 1
    cases.append(_case(a, b, 2, tags="cancel", note="SPLIT_K 2, shares that cancel"))
    return cases


def _split_rule(case: Case, launches: tuple[LaunchFacts, ...]) -> tuple[str, str] | None:
    a, _, SPLIT_K = case.args
    blocks = _up(a.shape[1], 32)
    # Two loads for each block of K and a store; twice as many for those who take smaller blocks.
    enough = 2 * _up(blocks, SPLIT_K) + 1
    if launches and launches[0].longest > 2 * enough:
        return (
            "not-shared",
            f"one program makes {launches[0].longest} loads and stores, where {enough} do if SPLIT_K programs share a "
            "tile's K. Which part of K is share 1's?",
        )
    if not any(launch.atomic_bytes for launch in launches):
        stored, parts = sum(launch.store_bytes for launch in launches), 4 * SPLIT_K * len(a) * case.args[1].shape[1]
        if blocks % SPLIT_K or stored >= parts:
            return None
        return (
            "not-shared",
            f"{stored:,} bytes are stored, where {SPLIT_K} parts of each tile are {parts:,}: fewer than SPLIT_K programs share "
            "its K",
        )
    return (
        "atomics",
        "atomics add in whatever order the programs arrive, and another order rounds otherwise: two runs do not agree. Where "
        "can each share leave its sums so that somebody adds them in a fixed order?",
    )


def _share(a: Tensor, SPLIT_K: int) -> int:
    return _up(_up(a.shape[1], 32), SPLIT_K) * 32


def _overlapping(a: Tensor, b: Tensor, each: int) -> Tensor:
    """Shares of `each` elements of K, of which the last block is whole all the same."""
    firsts = range(0, a.shape[1], each)
    return sum(a[:, k : k + _up(each, 32) * 32] @ b[k : k + _up(each, 32) * 32] for k in firsts)


_K_FIRST = "    first = share * steps * BLOCK_K\n"
_K_STEPS = (
    "    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)  # whole blocks; the last shares may be shorter, or empty\n"
)
_K_FOR = "    for k in range(first, min(first + steps * BLOCK_K, K), BLOCK_K):\n        offs_k = k + tl.arange(0, BLOCK_K)\n        a ="
_K_STORE = "    tl.store(partial_ptr + (share * M + offs_m) * N + offs_n, acc, mask=(offs_m < M) & (offs_n < N))\n"
_K_ADD = "        total += tl.load(partial_ptr + share * size + offs, mask=offs < size, other=0.0)\n"
_K_SHARES = "    for share in range(SPLIT_K):  # always in this order, so that two runs agree to the bit\n"
_K_PARTIAL = "    partial = torch.empty(SPLIT_K, M, N, dtype=torch.float32, device=a.device)\n"
_K_GRID = "    grid = (triton.cdiv(M, 16), triton.cdiv(N, 32), SPLIT_K)\n"
_K_OUT = "    tl.store(c_ptr + offs, total, mask=offs < size)\n"

SPLIT_K = KernelExercise(
    id="matmul.split_k",
    title="Shares of K, without atomics",
    notebook=NOTEBOOK,
    function="matmul_split_k",
    label=Label(4, 35, "parallel sums over K in a fixed order; shares that do not come out even"),
    hints=(
        "One tile of c is all there is, and 132 SMs want work. Along which of M, N and K can the work still be divided, and "
        "what does that leave to be done?",
        "A share is some whole blocks of K. Each program leaves its sums at a place of its own; the second kernel adds the "
        "shares of an element in order. A share that begins beyond K has sums too: zeros. In which dtype may sums lie in "
        "memory before they are added?",
        "Blocks of K, divided by SPLIT_K, both rounded up, are the steps of a share. A program loops from its share's number "
        "times that to the same plus the steps, or to K if that comes first, and stores its tile into its own M by N plane of "
        "a float32 buffer. The second kernel loads its elements from each plane, adds, and stores.",
    ),
    cases=_split_cases,
    returns=("c",),
    reference=lambda a, b, SPLIT_K: a @ b,
    # The largest case, a [16, 512], b [512, 32] in 16 bits, 8 shares: a once, b once, 8 x 16 x 32 float32 written and read.
    traffic=Traffic(reads=1 + 2 + 1, writes=1 + 1 / 16, launches=2),
    launch_rule=_split_rule,
    misconceptions=(
        Misconception(
            "one-share-only",
            "that is one share of K. Who adds the others?",
            gives=lambda a, b, SPLIT_K: a[:, : _share(a, SPLIT_K)] @ b[: _share(a, SPLIT_K)],
        ),
        Misconception(
            "one-share-only",
            "that is the last share of K alone: it takes the place of those before. What should it do to them?",
            gives=lambda a, b, SPLIT_K: a[:, (SPLIT_K - 1) * _share(a, SPLIT_K) :] @ b[(SPLIT_K - 1) * _share(a, SPLIT_K) :],
        ),
        Misconception(
            "mean-of-shares", "that is the mean of the shares. What are they parts of?", gives=lambda a, b, SPLIT_K: a @ b / SPLIT_K,
        ),
        Misconception(
            "everyone-does-it-all",
            "the result is SPLIT_K times too large: every share summed over all of K. Where does a share end?",
            gives=lambda a, b, SPLIT_K: SPLIT_K * (a @ b),
        ),
        Misconception(
            "shares-overlap",
            "blocks of K count in several shares: each share begins where it should and ends at K. Where does it end?",
            gives=lambda a, b, SPLIT_K: sum(
                a[:, s * _share(a, SPLIT_K) :] @ b[s * _share(a, SPLIT_K) :] for s in range(SPLIT_K)
            ),
        ),
        Misconception(
            "shares-overlap",
            "the last block of a share reaches into the next share, and what lies there counts twice. Where does a share end, "
            "and where may a block read?",
            gives=lambda a, b, SPLIT_K: _overlapping(a, b, _up(a.shape[1], SPLIT_K)),
        ),
        Misconception(
            "tail-dropped",
            "the last blocks of K, those that are left when they are dealt out evenly, are in no share. How many blocks does a "
            "share have, so that SPLIT_K shares hold all?",
            gives=lambda a, b, SPLIT_K: (
                a[:, : _up(a.shape[1], 32) // SPLIT_K * SPLIT_K * 32] @ b[: _up(a.shape[1], 32) // SPLIT_K * SPLIT_K * 32]
            ),
        ),
        Misconception(
            "empty-share",
            "where K has fewer blocks than there are shares, some shares have nothing to add, and their part of the buffer "
            "was never written. What must they store?",
            when=lambda evidence: evidence.kind == "nan" and all("empty" in c.tags for c in evidence.failed),
        ),
        Misconception(
            "low-precision-parts",
            "the parts, or what they add up to on the way, were rounded to 16 bits. float16 ends at 65,504, and parts that cancel leave "
            "their rounding behind. What may they be stored as?",
            when=lambda evidence: any({"cancel", "large-sums"} & case.tags for case in evidence.failed)
            and not any("float32" in case.tags for case in evidence.failed),
        ),
        Misconception(
            "out-of-bounds",
            "a block of a ends at M and at K, one of b at K and at N, and each share has M N sums: which of these is beyond its end?",
        ),
        Misconception("race", "two shares of a tile may not store to one place: where does each leave its sums?"),
        Misconception("traffic", "each share reads its part of a and of b once, and its sums are stored and loaded once"),
    ),
    wrong=(
        Variant("first share only", ((_K_SHARES, "    for share in range(1):\n"),), diagnosis="one-share-only"),
        Variant("all of K in each", ((_K_FIRST, "    first, steps = 0, tl.cdiv(K, BLOCK_K)\n"),), diagnosis="everyone-does-it-all"),
        Variant("no end", ((_K_FOR, _K_FOR.replace("min(first + steps * BLOCK_K, K)", "K")),), diagnosis="shares-overlap"),
        Variant("rounded down", ((_K_STEPS, "    steps = tl.cdiv(K, BLOCK_K) // SPLIT_K\n"),), diagnosis="tail-dropped"),
        Variant(
            "shares of elements",
            (
                (_K_STEPS, "    each = tl.cdiv(K, SPLIT_K)\n"),
                (_K_FIRST, "    first = share * each\n"),
                (_K_FOR, _K_FOR.replace("first + steps * BLOCK_K", "first + each")),
            ),
            diagnosis="shares-overlap",
        ),
        Variant(
            "the first share does it all",
            (
                (_K_STEPS, "    steps = tl.cdiv(K, BLOCK_K)\n"),
                (_K_FIRST, "    first = share * steps * BLOCK_K\n"),
            ),
            diagnosis="not-shared",
        ),
        Variant(
            "the last share takes what is left",
            (
                (_K_STEPS, "    steps = tl.cdiv(K, BLOCK_K) // SPLIT_K\n"),
                (_K_FOR, _K_FOR.replace("min(first + steps * BLOCK_K, K)", "tl.where(share == SPLIT_K - 1, K, first + steps * BLOCK_K)")),
            ),
            diagnosis="not-shared",
        ),
        Variant("empty shares return", ((_K_FOR, "    if first >= K:\n        return\n" + _K_FOR),), diagnosis="empty-share"),
        Variant("parts in 16 bits", ((_K_PARTIAL, _K_PARTIAL.replace("torch.float32", "a.dtype")),), diagnosis="low-precision-parts"),
        Variant(
            "atomics",
            (
                (_K_STORE, "    tl.atomic_add(partial_ptr + offs_m * N + offs_n, acc, mask=(offs_m < M) & (offs_n < N))\n"),
                (_K_PARTIAL, "    partial = torch.zeros(M, N, dtype=torch.float32, device=a.device)\n"),
                (_K_SHARES + _K_ADD, "    total += tl.load(partial_ptr + offs, mask=offs < size, other=0.0)\n"),
            ),
            diagnosis="atomics",
        ),
        Variant("one place for all", ((_K_STORE, _K_STORE.replace("(share * M + offs_m)", "offs_m")),), diagnosis="race"),
        Variant("the last share alone", ((_K_ADD, _K_ADD.replace("+=", "=")),), diagnosis="one-share-only"),
        Variant("a mean", ((_K_OUT, _K_OUT.replace("total,", "total / SPLIT_K,")),), diagnosis="mean-of-shares"),
        Variant("summed in 16 bits", ((_K_ADD, _K_ADD + "        total = total.to(c_ptr.dtype.element_ty).to(tl.float32)\n"),),
                diagnosis="low-precision-parts"),
        Variant("half as many shares", ((_K_GRID, "    SPLIT_K = max(1, SPLIT_K // 2)\n" + _K_GRID),), diagnosis="not-shared"),
        Variant("added by torch", (("    add_kernel[(triton.cdiv(M * N, 256),)](partial, c, M * N, SPLIT_K=SPLIT_K, BLOCK=256)\n",
                                    "    c.copy_(partial.sum(0))\n"),), diagnosis="not-your-kernel"),
        Variant("no mask beyond the last share", ((_K_FOR, _K_FOR.replace("min(first + steps * BLOCK_K, K)", "first + steps * BLOCK_K"))
                                               , (_K_STORE, _K_STORE.replace(", mask=(offs_m < M) & (offs_n < N)", ""))),
                diagnosis="out-of-bounds"),
    ),
    right=(
        Variant(
            "blocks in turn",
            (
                (_K_FIRST, "    first = share * BLOCK_K\n"),
                (_K_FOR, _K_FOR.replace("min(first + steps * BLOCK_K, K), BLOCK_K", "K, BLOCK_K * SPLIT_K")),
            ),
        ),
        Variant(
            "shares innermost, added as a block",
            (
                (_K_STORE, "    at = (offs_m * N + offs_n) * SPLIT_K + share\n"
                           "    tl.store(partial_ptr + at, acc, mask=(offs_m < M) & (offs_n < N))\n"),
                (_K_ADD, "        total += tl.load(partial_ptr + offs * SPLIT_K + share, mask=offs < size, other=0.0)\n"),
                (_K_PARTIAL, "    partial = torch.empty(M, N, SPLIT_K, device=a.device)\n"),
            ),
        ),
        Variant("backwards", ((_K_SHARES, "    for share in range(SPLIT_K - 1, -1, -1):\n"),)),
        Variant("no minimum, masks do it", ((_K_FOR, _K_FOR.replace("min(first + steps * BLOCK_K, K)", "first + steps * BLOCK_K")),)),
    ),
)  # fmt: skip


# ----------------------------------------------------------------------------------------------------- matmul.epilogue
def _epilogue_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)
    cases = []
    for M, N, K, dtype, tags in (
        (32, 32, 32, "float32", ""),
        (32, 64, 64, "float32", ""),
        (5, 41, 70, "float32", "ragged"),
        (33, 32, 16, "bfloat16", "ragged"),
        (1, 7, 100, "float16", "ragged"),
        (64, 96, 128, "float16", ""),
    ):
        x, weight = make.normal(M, K, dtype=dtype), make.normal(N, K, dtype=dtype)
        bias = make.normal(N, dtype=dtype)
        cases.append(_case(x, weight / K**0.5, bias, tags=tags))
    x, weight, bias = make.normal(16, 32), make.normal(48, 32), make.normal(48)
    cases.append(_case(x, weight, bias * 30, tags="large", note="bias around 30"))
    return cases


def _gelu(z: Tensor) -> Tensor:
    import torch

    return 0.5 * z * (1 + torch.erf(z * 0.5**0.5))


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.mT + bias


def _after(finish: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """What comes of the product z and the bias by another epilogue."""
    return lambda x, weight, bias: finish(x @ weight.mT, bias)


def _tanh_form(z: Tensor) -> Tensor:
    import torch

    return 0.5 * z * (1 + torch.tanh(0.7978845608028654 * (z + 0.044715 * z**3)))


_E_Z = "    z = acc + tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)\n"
_E_Y = "    y = 0.5 * z * (1 + tl.erf(z * 0.7071067811865476))\n"
_E_STORE = "    tl.store(y_ptr + offs_m * N + offs_n, y, mask=(offs_m < M) & (offs_n < N))\n"
_E_CALL = "    linear_gelu_kernel[grid](x, weight, bias, y, M, N, K, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32)\n"
_E_LOOP = '        acc = tl.dot(x, w, acc, input_precision="ieee")\n'

EPILOGUE = KernelExercise(
    id="matmul.epilogue",
    title="Bias and GELU before the store",
    notebook=NOTEBOOK,
    function="linear_gelu",
    label=Label(2, 15, "an epilogue: what is done to sums in registers costs no traffic"),
    hints=(
        "When the loop ends, the sums of a whole tile are in registers, in float32. What else does a tile need, and how many "
        "numbers is that?",
        "The bias belongs to columns: a tile needs BLOCK_N of its elements, masked like the columns, and broadcasting does the "
        "rest. GELU takes each sum together with its bias.",
        "Load the bias at the tile's columns with their mask and add it to the sums; half of that times one plus the error "
        "function of that over the square root of two; one store with the mask of rows and columns.",
    ),
    cases=_epilogue_cases,
    reference=lambda x, weight, bias: _gelu(_linear(x, weight, bias)),
    # The largest case: x [64, 128] three times, weight [96, 128] twice, the bias for each tile.
    traffic=Traffic(reads=3 + 2 * 96 / 64 + 2 * 96 / (64 * 128), writes=96 / 128),
    misconceptions=(
        Misconception("no-bias", "the bias is missing", gives=_after(lambda z, bias: _gelu(z))),
        Misconception(
            "bias-after", "the bias was added to what GELU gave. In a linear layer it belongs to the product",
            gives=_after(lambda z, bias: _gelu(z) + bias),
        ),
        Misconception(
            "bias-by-rows", "row m of the result got element m of the bias. To which of M and N does a bias belong?",
            gives=_after(lambda z, bias: _gelu(z + bias[: len(z), None])),
        ),
        Misconception("no-activation", "that is the linear layer without its GELU", gives=_after(lambda z, bias: z + bias)),
        Misconception(
            "tanh-form", "that is GELU's other form, with tanh: up to 0.0005 off. Which one does the docstring ask for?",
            gives=_after(lambda z, bias: _tanh_form(z + bias)),
        ),
        Misconception(
            "quick-gelu", "that is z sigmoid(1.702 z), a third form: up to 0.02 off",
            gives=_after(lambda z, bias: (z + bias) * (1.702 * (z + bias)).sigmoid()),
        ),
        Misconception(
            "relu", "that is ReLU: negative numbers give 0", gives=_after(lambda z, bias: (z + bias).relu()),
        ),
        Misconception(
            "erf-argument", "the error function got z itself. What is z divided by in the formula?",
            gives=_after(lambda z, bias: 0.5 * (z + bias) * (1 + (z + bias).erf())),
        ),
        Misconception(
            "erf-argument", "the error function got z times sqrt(2). What is z divided by in the formula?",
            gives=_after(lambda z, bias: 0.5 * (z + bias) * (1 + (2**0.5 * (z + bias)).erf())),
        ),
        Misconception(
            "silu", "that is z sigmoid(z), SiLU", gives=_after(lambda z, bias: (z + bias) * (z + bias).sigmoid()),
        ),
        Misconception(
            "half-missing", "everything is twice as large as it should be: which factor is missing?",
            gives=_after(lambda z, bias: 2 * _gelu(z + bias)),
        ),
        Misconception(
            "bias-each-step", "the bias was added once for each block of K. Where does the loop end?",
            gives=lambda x, weight, bias: _gelu(x @ weight.mT + _up(x.shape[1], 32) * bias),
        ),
        Misconception("out-of-bounds", "the last tile has columns beyond N, where there is no bias, and rows beyond M: of y it has neither"),
        Misconception("traffic", "the tile is complete in registers when the loop ends: nothing has to be stored and loaded again"),
        Misconception("launches", "the sums are in registers when the loop ends: a second kernel would have to load them again"),
    ),
    wrong=(
        Variant("no bias", ((_E_Z, "    z = acc\n"),), diagnosis="no-bias"),
        Variant("bias after GELU", ((_E_Z, "    z = acc\n"), (_E_Y, _E_Y + "    y += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)\n")),
                diagnosis="bias-after"),
        Variant("no GELU", ((_E_Y, "    y = z\n"),), diagnosis="no-activation"),
        Variant("tanh", ((_E_Y, "    y = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))\n"),), diagnosis="tanh-form"),
        Variant("sigmoid", ((_E_Y, "    y = z * tl.sigmoid(1.702 * z)\n"),), diagnosis="quick-gelu"),
        Variant("ReLU", ((_E_Y, "    y = tl.maximum(z, 0.0)\n"),), diagnosis="relu"),
        Variant("erf of z", ((_E_Y, _E_Y.replace("z * 0.7071067811865476", "z")),), diagnosis="erf-argument"),
        Variant("erf of z sqrt(2)", ((_E_Y, _E_Y.replace("0.7071067811865476", "1.4142135623730951")),), diagnosis="erf-argument"),
        Variant("SiLU", ((_E_Y, "    y = z * tl.sigmoid(z)\n"),), diagnosis="silu"),
        Variant("no half", ((_E_Y, _E_Y.replace("0.5 * ", "")),), diagnosis="half-missing"),
        Variant("bias in the loop", ((_E_LOOP, _E_LOOP + "        acc += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)\n"),
                                     (_E_Z, "    z = acc\n")), diagnosis="bias-each-step"),
        Variant("bias down the rows", ((_E_Z, _E_Z.replace("offs_n", "offs_m").replace("< N", "< M")),), diagnosis="bias-by-rows"),
        Variant("bias without its mask", ((_E_Z, _E_Z.replace(", mask=offs_n < N, other=0.0", "")),), diagnosis="out-of-bounds"),
        Variant(
            "stored and loaded again",
            ((_E_Y, "    mask = (offs_m < M) & (offs_n < N)\n    tl.store(y_ptr + offs_m * N + offs_n, z, mask=mask)\n"
                    "    z = tl.load(y_ptr + offs_m * N + offs_n, mask=mask, other=0.0).to(tl.float32)\n" + _E_Y),),
            diagnosis="traffic",
        ),
        Variant("by torch", ((_E_CALL, _E_CALL + "    y = torch.nn.functional.gelu(y)\n"), (_E_Y, "    y = z\n")), diagnosis="not-your-kernel"),
    ),
    right=(
        Variant(
            "bias first in the sums",
            ((_E_Z, "    acc += tl.load(bias_ptr + offs_n, offs_n < N)\n    z = acc\n"),
             (_E_Y, "    half = z / 2\n    y = half + half * tl.erf(z / 1.4142135623730951)\n")),
        ),
        Variant(
            "a list of columns",
            ((_E_Z, "    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)\n"
                    "    bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0)\n"
                    "    z = acc + bias[None, :]\n"),
             (_E_Y, "    y = z * (0.5 + 0.5 * tl.math.erf(z * 0.7071067811865476))\n    y = y.to(y_ptr.dtype.element_ty)\n")),
        ),
    ),
)  # fmt: skip


# --------------------------------------------------------------------------------------------------------- matmul.int4
def _int4_cases(rng: Random) -> list[Case]:
    make = _Matrices(rng)
    cases = []
    for M, N, K, GROUP, dtype, tags in (
        (16, 32, 32, 32, "float32", ""),
        (16, 32, 64, 64, "float32", ""),
        (3, 45, 96, 32, "float32", "groups ragged"),
        (1, 32, 128, 64, "float16", "groups"),
        (17, 33, 128, 32, "bfloat16", "groups ragged"),
        (16, 64, 256, 64, "float16", "groups"),
    ):
        x = make.normal(M, K, dtype=dtype)
        packed = make.torch.randint(0, 256, (K // 2, N), generator=make.generator, dtype=make.torch.uint8)
        scales = make.normal(K // GROUP, N, dtype=dtype).abs() / 8
        cases.append(_case(x, packed, scales, tags=tags, note=f"groups of {GROUP}"))
    torch = make.torch
    alike = torch.ones(1, 768).bfloat16(), torch.full((384, 32), 255, dtype=torch.uint8)
    # 32 x 7 x 1.5 again and again: what rounding to bfloat16 takes away goes one way.
    cases.append(
        _case(
            *alike, torch.full((24, 32), 1.5).bfloat16(), tags="groups many-blocks", note="groups of 32, all weights 7"
        )
    )
    return cases


def _int4_gives(
    low: int = 0,
    offset: int = 8,
    scale: str = "own",
    signed: bool = False,
    block: bool = False,
    shift: int = 4,
    wraps: bool = False,
) -> Callable[..., Tensor]:
    """x times the weight as somebody reads it: which nibble comes first, what is taken away, whose scale."""

    def gives(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        import torch

        K, group = x.shape[1], x.shape[1] // scales.shape[0]
        nibbles = [packed & 15, packed >> 4 << 4 >> shift]
        pair = [(n.int() ^ 8) - 8 if signed else n.int() - offset for n in (nibbles[low], nibbles[1 - low])]
        if wraps:
            pair = [n % 256 for n in pair]
        if block:  # all low ones of a group, then all high ones
            parts = [part.reshape(-1, group // 2, part.shape[1]) for part in pair]
            q = torch.cat(parts, 1).reshape(K, -1)
        else:
            q = torch.stack(pair, 1).reshape(K, -1)
        factor = {
            "own": scales,
            "first": scales[:1].expand_as(scales),
            "none": torch.ones_like(scales),
        }[scale]
        return x @ (q.to(x.dtype) * factor.to(x.dtype).repeat_interleave(group, 0))

    return gives


def _group_by_group(x: Tensor, packed: Tensor, scales: Tensor, fault: str) -> Tensor:
    """The groups one after the other, with a fault in what each does to the sum so far."""
    parts = len(scales)
    groups = zip(x.chunk(parts, 1), packed.chunk(parts), scales.split(1), strict=True)
    acc = x.new_zeros(len(x), packed.shape[1])
    for columns, rows, scale in groups:
        part = _int4_gives()(columns, rows, scale)
        acc = part if fault == "last" else acc * scale + part
    return acc


_4_WORD = "        word = tl.load(packed_ptr + rows[:, None] * N + offs_n, mask=offs_n < N, other=0)\n"
_4_SCALE = "        scale = tl.load(scales_ptr + group * N + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)\n"
_4_EVEN = "        even = tl.load(x_ptr + offs_m * K + 2 * rows[None, :], mask=offs_m < M, other=0.0)\n"
_4_ODD = "        odd = tl.load(x_ptr + offs_m * K + 2 * rows[None, :] + 1, mask=offs_m < M, other=0.0)\n"
_4_BITS = "        low, high = (word & 15).to(tl.int32) - 8, (word >> 4).to(tl.int32) - 8\n"
_4_DOTS = (
    '        part = tl.dot(even, low.to(even.dtype), input_precision="ieee")\n'
    '        part = tl.dot(odd, high.to(odd.dtype), part, input_precision="ieee")\n'
)
_4_ACC = "        acc += part * scale  # one product for each sum of the group, not one for each weight\n"
_4_CALL = "    int4_kernel[grid](x, packed, scales, y, M, N, K, GROUP=K // scales.shape[0], BLOCK_M=16, BLOCK_N=32)\n"

INT4 = KernelExercise(
    id="matmul.int4",
    title="Weights of four bits",
    notebook=NOTEBOOK,
    function="int4_linear",
    label=Label(4, 40, "two weights in a byte; unpacking in registers; where a scale is multiplied in"),
    hints=(
        "A byte holds rows 2 j and 2 j + 1 of the weight. Which columns of x do they meet, and does the order matter in which "
        "a sum over k is added?",
        "The low halves of all bytes are the even rows, the high halves the odd ones: two smaller products, one with the even "
        "columns of x and one with the odd. What was stored as q + 8 has to become q before it is multiplied. A scale is the "
        "same for all rows of the group: it can wait for the sum.",
        "For the group: load its rows of packed once, and its row of scales. Mask out four bits and shift down the other four, "
        "take 8 from each as signed integers, convert to x's dtype. Load x at twice the row numbers, and at twice plus one. "
        "Two tl.dot into one sum that begins at zero; that sum times the scales is added to acc.",
    ),
    cases=_int4_cases,
    reference=_int4_gives(),
    # The largest case, x [16, 256] in 16 bits: x twice, packed [128, 64] once, 4 rows of scales; y [16, 64].
    traffic=Traffic(reads=2 + 1 + 4 * 64 * 2 / 8192, writes=0.25),
    misconceptions=(
        Misconception(
            "low-precision-sums",
            "wrong only after many groups: sums that are rounded to 16 bits again and again lose what is added to them. Of which "
            "dtype is acc?",
            when=lambda evidence: evidence.tag("many-blocks"),
        ),
        Misconception(
            "halves-exchanged", "the low four bits were taken for the odd rows. Which row comes first?", gives=_int4_gives(low=1)
        ),
        Misconception(
            "no-offset", "the integers are 0 to 15 in yours: 8 was added to each when they were stored",
            gives=_int4_gives(offset=0),
        ),
        Misconception(
            "twos-complement", "the four bits are read as a signed number. They were stored as q + 8: what is 0?",
            gives=_int4_gives(signed=True),
        ),
        Misconception("no-scale", "those are the integers' sums. What is each of them worth?", gives=_int4_gives(scale="none")),
        Misconception(
            "first-scale", "every group is multiplied by the scales of the first. Which row of scales is this group's?",
            gives=_int4_gives(scale="first"),
        ),
        Misconception(
            "rows-of-halves",
            "the low halves were taken for the first half of a group's rows, and the high ones for the second. Which rows lie in "
            "one byte?",
            gives=_int4_gives(block=True),
        ),
        Misconception(
            "last-group-wins", "that is the last group alone: what should the sums of a group do to those before?",
            gives=lambda *args: _group_by_group(*args, fault="last"),
        ),
        Misconception(
            "scaled-again", "all sums so far are multiplied by each group's scales. To which sums do they belong?",
            gives=lambda *args: _group_by_group(*args, fault="scaled"),
        ),
        Misconception(
            "not-shifted", "the high four bits were taken where they lie in the byte, and there they are worth 16 times as much",
            gives=_int4_gives(shift=0),
        ),
        Misconception(
            "wrapped",
            "8 was taken away from an unsigned byte: below zero it begins again at 255. In which type can a difference be "
            "negative?",
            gives=_int4_gives(wraps=True),
        ),
        Misconception("traffic", "packed holds two weights in each byte, and a group has one row of scales: each is loaded once"),
        Misconception("out-of-bounds", "x and y end at M, packed, scales and y at N; packed has K / 2 rows and scales K / GROUP: which are this group's?"),
    ),
    wrong=(
        Variant("halves exchanged", ((_4_BITS, _4_BITS.replace("low, high", "high, low")),), diagnosis="halves-exchanged"),
        Variant("8 not taken away", ((_4_BITS, _4_BITS.replace(" - 8", "")),), diagnosis="no-offset"),
        Variant("two's complement", ((_4_BITS, "        low, high = ((word & 15).to(tl.int32) ^ 8) - 8, ((word >> 4).to(tl.int32) ^ 8) - 8\n"),),
                diagnosis="twos-complement"),
        Variant("no scale", ((_4_ACC, "        acc += part\n"),), diagnosis="no-scale"),
        Variant("the first scales", ((_4_SCALE, _4_SCALE.replace("group * N + ", "")),), diagnosis="first-scale"),
        Variant(
            "halves of a group",
            ((_4_EVEN, _4_EVEN.replace("2 * rows[None, :]", "(group * GROUP + offs_j)[None, :]")),
             (_4_ODD, _4_ODD.replace("2 * rows[None, :] + 1", "(group * GROUP + GROUP // 2 + offs_j)[None, :]"))),
            diagnosis="rows-of-halves",
        ),
        Variant("last group", ((_4_ACC, "        acc = part * scale\n"),), diagnosis="last-group-wins"),
        Variant("all sums scaled", ((_4_ACC, "        acc = (acc + part) * scale\n"),), diagnosis="scaled-again"),
        Variant("high bits where they are", ((_4_BITS, _4_BITS.replace("word >> 4", "word & 240")),), diagnosis="not-shifted"),
        Variant("unsigned", ((_4_BITS, "        low, high = (word & 15) - 8, (word >> 4) - 8\n"),), diagnosis="wrapped"),
        Variant("sums in 16 bits", ((_4_ACC, _4_ACC + "        acc = acc.to(x_ptr.dtype.element_ty).to(tl.float32)\n"),),
                diagnosis="low-precision-sums"),
        Variant("loaded twice", ((_4_WORD, _4_WORD + _4_WORD),), diagnosis="traffic"),
        Variant("a scale for each row",
                ((_4_SCALE, "        all_rows = tl.zeros((GROUP // 2, 1), tl.int32)\n" + _4_SCALE.replace("group * N", "(all_rows + group) * N")),
                 (_4_DOTS + _4_ACC,
                  '        acc = tl.dot(even.to(tl.float32), low.to(tl.float32) * scale, acc, input_precision="ieee")\n'
                  '        acc = tl.dot(odd.to(tl.float32), high.to(tl.float32) * scale, acc, input_precision="ieee")\n')),
                diagnosis="traffic"),
        Variant("rows not halved", (("        rows = group * (GROUP // 2) + offs_j\n", "        rows = group * GROUP + offs_j\n"),),
                diagnosis="out-of-bounds"),
        Variant("unpacked by torch", ((_4_CALL, "    low = (packed & 15).to(x.dtype) - 8\n" + _4_CALL),), diagnosis="not-your-kernel"),
    ),
    right=(
        Variant(
            "scaled weights",
            ((_4_DOTS + _4_ACC,
              "        low, high = low.to(tl.float32) * scale, high.to(tl.float32) * scale\n"
              '        acc += tl.dot(even.to(tl.float32), low, input_precision="ieee")\n'
              '        acc += tl.dot(odd.to(tl.float32), high, input_precision="ieee")\n'),),
        ),
        Variant(
            "put together again",
            ((_4_EVEN + _4_ODD, "        offs_k = group * GROUP + tl.arange(0, GROUP)\n"
                                "        xs = tl.load(x_ptr + offs_m * K + offs_k[None, :], mask=offs_m < M, other=0.0)\n"),
             (_4_BITS, "        both = tl.join((word & 0xF).to(tl.int8), (word >> 4).to(tl.int8)) - 8\n"
                       "        q = tl.reshape(tl.permute(both, (0, 2, 1)), (GROUP, BLOCK_N)).to(xs.dtype)\n"),
             (_4_DOTS, '        part = tl.dot(xs, q, input_precision="ieee")\n')),
        ),
        Variant(
            "8 taken from the sums",
            ((_4_BITS, "        low, high = word & 15, word // 16\n"),
             (_4_DOTS, _4_DOTS + "        part -= 8.0 * tl.sum(even.to(tl.float32) + odd.to(tl.float32), axis=1)[:, None]\n")),
        ),
    ),
)  # fmt: skip

EXERCISES = [TILES, STRIDES, PRECISION, ORDER, SPLIT_K, EPILOGUE, INT4]
