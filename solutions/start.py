"""Notebook 00, the first check: fix one line, save the file, run the check again."""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.


# --------------------------------------------------------------------------------------------------- start.bytes_moved
def bytes_moved(M: int, N: int, itemsize: int) -> int:
    """The bytes that a good kernel moves between memory (HBM) and the SMs to make y [M, N] from x [M, N].

    M, N      the numbers of rows and columns
    itemsize  the bytes of one element, the same for x and for y

    A good kernel loads each element of x once and stores each element of y once. A copy, ReLU and GELU can do so, since
    each result needs one element of x. A well-written softmax along the rows can do so, too.
    """
    # BEGIN SOLUTION
    # STUB: return M * N * itemsize
    read_bytes = M * N * itemsize
    write_bytes = M * N * itemsize
    return read_bytes + write_bytes
    # END SOLUTION
