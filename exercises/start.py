"""Notebook 00, the first check: mend one line, save, run the check again."""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.


# --------------------------------------------------------------------------------------------------- start.bytes_moved
def bytes_moved(M: int, N: int, itemsize: int) -> int:
    """Bytes that travel between memory and chip to turn x [M, N] into y [M, N].

    Each element of x and of y takes `itemsize` bytes. The kernel is a good
    one: it fetches what it needs once and stores what it makes once. Any
    function of one element at a time is like this (a copy, ReLU, GELU), and
    so is a softmax along the rows, if it is written well.
    """
    return M * N * itemsize  # your code here
