"""Which long rows are kept on an SM of a Hopper GPU (gpukit.kernels._norms_hopper), and which several programs share
(gpukit.kernels._rows_shared, and with a loss gpukit.kernels._cross_entropy_shared).

Chosen are the rows for which this was measured to be faster, and no others, but for those that are longer than all measured ones.
The times in µs are of bf16 and 4,096 rows. Those of an H100 are from gpukit/results/h100-sxm/long_rows.csv, where each way to cut
the rows has its line: bytes of a piece, slots, pieces held in registers, warps, programs on an SM. "kept" is by such kernels,
"others" by those that every other GPU gets too:

    operation                columns   kept  others
    softmax                  131,072    758     775    (a copy takes 717) not chosen: there is no such kernel any more
    softmax                   65,536    383     372    nor for these
    its gradient              65,536    556     557    nor for these
    cross-entropy in place   128,256    758     991    nor for these, since programs share them
    cross-entropy in place    50,304    306     384
    cross-entropy in place    32,000    391     436    (8,192 rows)
    LayerNorm                 16,384    101      98    not chosen: there is no such kernel
    its gradients             16,384    170     330

Rows that several programs share ("parts" in the file: numbers of a part, warps; "masked" with a mask for full parts, too),
beside the same others:

    operation                columns  parts  others
    softmax's gradient        49,152    408     445    (a sum of two tensors takes 396)
    softmax's gradient        65,536    546     557
    log-softmax's gradient    65,536    544     572
    softmax's gradient        65,664    544     593
    softmax's gradient       131,072   1083    1439    (a sum of two tensors takes 1,052)
    softmax's gradient     1,048,576   1173    1807    (512 rows)
    log-softmax's gradient   131,072   1083    1154

On an H200 (gpukit/results/h200/long_rows.csv), whose memory is faster, parts of 32,768 numbers take 207 µs and the others 194; of
40,960, 259 and 305; of 65,536, 407 and 398, in both functions; log-softmax's gradient with fewer has no gain there: 49,152 take
312 and 290. Softmax, and cross-entropy in place, of rows that are shared have been measured on an H200 alone. "pieces" are parts
that are held in 16 bits ("pieces" in the file: of a part, warps), "parts" those that were held in float32 before. Those with 50,304
and 131,072 columns were timed in calls and the others in a CUDA graph, but for cross-entropy, which always was:

    operation                columns  pieces  parts   kept  others
    softmax                   50,304     204    220    222     271
    softmax                   65,536     253    266    285     297    (a copy takes 255)
    softmax                  131,072     509    530    567
    cross-entropy in place    32,000     260           299            (8,192 rows)
    cross-entropy in place    50,304     204           295
    cross-entropy in place   128,256     518           600

What was tried before is there, too. "shared in Triton" is by programs with a part each (programs of a row, warps, registers; counted:
parts are taken in the order in which programs begin), "shared in Gluon" by SMs that keep parts in shared memory
(SMs of a row, rows ahead, then as above). "without waits" is a bound and no candidate: each word was there before. "package" is what ran
in the package on that day.
"""

from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from gpukit.kernels._device import for_hopper, multiprocessors

KIB = 1024


class RowsConfig(NamedTuple):
    """Bytes of a slot, which holds a row, how many slots, and warps that compute."""

    BYTES: int
    STAGES: int
    WARPS: int


class Choice(NamedTuple):
    """For rows of `least` to `most` bytes, if there are `rows` or more for each SM: they are dealt out, and the SMs with one row
    more than others are waited for."""

    least: int
    most: int
    rows: int
    config: RowsConfig


LAYER_NORM_BACKWARD = Choice(32 * KIB, 32 * KIB, 8, RowsConfig(32 * KIB, 2, 8))


def _describable(x: Tensor) -> bool:
    """Whether the TMA unit can copy pieces of x [M, N]: its addresses are multiples of 16 bytes. Rows are whole blocks of 128
    numbers."""
    N, (stride_m, stride_n) = x.shape[1], x.stride()
    return stride_n == 1 and N % 128 == 0 and stride_m >= N and (2 * stride_m) % 16 == 0 and x.data_ptr() % 16 == 0


def chosen(module: str, choice: Choice, *tensors: Tensor) -> tuple[ModuleType, RowsConfig] | None:
    """The module of that name and how it takes the rows of tensors [M, N], or None: it is not for them, or not for their GPU."""
    M, N = tensors[0].shape
    size = tensors[0].element_size()
    if size != 2 or not choice.least <= size * N <= choice.most or not all(map(_describable, tensors)):
        return None
    if M < choice.rows * multiprocessors(tensors[0].device):
        return None
    found = for_hopper(module, tensors[0].device)
    return (found, choice.config) if found else None


# From where it pays off: forward, for softmax and for log-softmax, whose rows stay in one program's registers up to 64 KiB, and
# for their gradients; that of 65,536 numbers on an H100 alone, on an H200 it costs 2%. No longer than 128 programs' parts: of 528
# that run at the same time, 4 on an SM, or forward of 1,188, or of 924 for cross-entropy in place.
SHARED_BYTES = {
    "forward": range(64 * KIB + 1, 2048 * KIB + 1),
    "softmax": range(80 * KIB, 2048 * KIB + 1),
    "log_softmax": range(128 * KIB, 2048 * KIB + 1),
    "cross_entropy": range(62 * KIB, 2048 * KIB + 1),
}


def shared(which: str, *tensors: Tensor) -> ModuleType | None:
    """The module where several programs share a row of tensors [M, N] in one of SHARED_BYTES, if they are to, or None."""
    x = tensors[0]
    if x.element_size() != 2 or 2 * x.shape[1] not in SHARED_BYTES[which] or not all(map(_describable, tensors)):
        return None
    return for_hopper("_cross_entropy_shared" if which == "cross_entropy" else "_rows_shared", x.device)
