"""Passes over the same bytes, which show what L2 keeps: the kernels of gpukit/results/h200/l2_again.csv, to which the tests hold
gpukit.simulator.trace.levels. On a machine with a GPU:

ncu --csv --metrics dram__bytes_read.sum,dram__bytes_write.sum --clock-control none -k regex:read_|store_ \\
    python -m gpukit.validation.passes

counts one launch after another, in the order of `launches`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

MIB = 1 << 20
SMS, TURNS, BLOCK = 132, 8, 1024  # a chunk is BLOCK words


@triton.jit
def read_again(x_ptr, y_ptr, CHUNKS, SHIFT, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program reads its own chunks in every pass, or with a SHIFT those that another one read in the pass before."""
    total = tl.zeros((BLOCK,), tl.float32)
    for n in range(TURNS):
        for c in range(tl.program_id(0), CHUNKS, tl.num_programs(0)):
            total += tl.load(x_ptr + (c + n * SHIFT) % CHUNKS * BLOCK + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


@triton.jit
def read_by_two(x_ptr, y_ptr, CHUNKS, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    """Two programs read each chunk at about the same time."""
    total = tl.zeros((BLOCK,), tl.float32)
    half = tl.num_programs(0) // 2
    for _ in range(TURNS):
        for c in range(tl.program_id(0) % half, CHUNKS, half):
            total += tl.load(x_ptr + c * BLOCK + tl.arange(0, BLOCK))
    tl.store(y_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


@triton.jit
def read_beside(x_ptr, y_ptr, CHUNKS, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program reads its own chunks in every pass, and after each of them one that is read once."""
    total = tl.zeros((BLOCK,), tl.float32)
    for n in range(TURNS):
        for c in range(tl.program_id(0), CHUNKS, tl.num_programs(0)):
            total += tl.load(x_ptr + c * BLOCK + tl.arange(0, BLOCK))
            total += tl.load(y_ptr + (n * CHUNKS + c) * BLOCK + tl.arange(0, BLOCK))
    tl.store(x_ptr + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total, mask=total == 12345.0)  # never


@triton.jit
def store_again(x_ptr, CHUNKS, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    for n in range(TURNS):
        for c in range(tl.program_id(0), CHUNKS, tl.num_programs(0)):
            tl.store(x_ptr + c * BLOCK + tl.arange(0, BLOCK), n * 1.5 + tl.arange(0, BLOCK).to(tl.float32))


@triton.jit
def store_words(x_ptr, CHUNKS, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    """One word of each line of 128 bytes, and in the next pass the one after it."""
    for n in range(TURNS):
        for c in range(tl.program_id(0), CHUNKS, tl.num_programs(0)):
            at = (c * BLOCK + tl.arange(0, BLOCK)) * 32 + n
            tl.store(x_ptr + at, n * 1.5 + tl.arange(0, BLOCK).to(tl.float32))


def launches(device: str = "cuda") -> Iterator[tuple[str, int]]:
    """Launches the kernels; yields how the passes go, as in l2_again.csv, and over how many MiB."""
    x, y = (torch.randn(mebibytes * MIB // 4, device=device) for mebibytes in (128, 1024))
    same = {"TURNS": TURNS, "num_warps": 8}
    for n in (16, 20, 24, 28, 32, 36, 40, 44, 48, 56, 64, 80):
        chunks = n * MIB // (4 * BLOCK)
        read_again[(SMS,)](x, y, chunks, 0, BLOCK=BLOCK, **same)
        yield "each SM reads its own again", n
        read_again[(SMS,)](x, y, chunks, 37, BLOCK=BLOCK, **same)
        yield "another SM reads it in each pass", n
        read_by_two[(SMS,)](x, y, chunks, BLOCK=BLOCK, **same)
        yield "two SMs read it", n
        store_again[(SMS,)](x, chunks, BLOCK=BLOCK, **same)
        yield "each SM stores to its own again", n
        store_words[(SMS,)](x, n * MIB // (256 * 128), BLOCK=256, **same)
        yield "one word of each line is stored", n
        if n <= 48:
            read_beside[(SMS,)](x, y, chunks, BLOCK=BLOCK, **same)
            yield "each SM reads its own again and as much that is read once", n


if __name__ == "__main__":
    for launch in launches():
        torch.cuda.synchronize()
        print(*launch)
