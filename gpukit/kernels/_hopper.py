"""What the kernels for Hopper share that say themselves, in Gluon, which warps do what and when they wait.

One warp fetches: it lets the TMA unit copy blocks into a ring of slots in shared memory, ahead of use. Groups of four warps
compute. Who waits for whom goes through barriers in shared memory (mbarriers). A barrier counts arrivals, of threads or of
bytes that the TMA unit has copied; when all have come, its phase, 0 or 1, changes, and the warps that waited for that phase go on.

gpukit.trace() sees the pointer kernels instead: a program here computes many tiles, which takes the interpreter long. Called
by themselves these kernels are interpreted too, and waits that are missing or never end are named (tests/simulator/test_gluon.py).
Source: https://docs.nvidia.com/cuda/parallel-thread-execution/ (mbarrier, cp.async.bulk.tensor, setmaxnreg)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Triton 3.6 and 3.7 have them under older names.
fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
put = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """One slot further in a ring. With every round the phase changes that its barriers are in."""
    slot += 1
    return gl.where(slot == STAGES, 0, slot), gl.where(slot == STAGES, phase ^ 1, phase)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def blocks_like(desc, COUNT: gl.constexpr):
    """Room in shared memory for as many blocks of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)  # noqa: RUF005 no star here


@gluon.jit
def put_tile(y, desc, smem, m, n, ME: gl.constexpr):
    """Begins the store of y at row m, column n, through the ME-th block of smem; what lies outside of the tensor is left out."""
    tma.store_wait(0)  # what was stored before has been read
    smem.index(ME).store(y)
    hopper.fence_async_shared()  # the TMA unit sees what threads wrote
    put(desc, [m, n], smem.index(ME))


def swizzled(rank: int, bits: int = 16) -> gl.NVMMASharedLayout:
    """Blocks of numbers of so many bits in shared memory as the tensor cores want them: rows in pieces of 128 bytes, their
    16-byte parts permuted."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=rank)


def registers(consumers: int, per_sm: int) -> tuple[int, int]:
    """Of a thread, where so many groups of four warps compute, beside the fetching one, in as many programs on an SM: what
    the compiler may count with on average, and what is left for a computing one when the fetching one keeps 24."""
    groups = consumers + 1  # one warp counts as four: registers are shared out by fours
    average = min(248, 2**16 // (per_sm * groups * 128) // 8 * 8)
    return average, min(240, (average * groups - 24) // consumers // 8 * 8)
