"""Kernels in PTX, interpreted: instructions one by one in PTX that is written here, and what NVRTC makes of C++, beside NumPy."""

import random

import numpy as np
import pytest

from gpukit.simulator.cuda import nvrtc, ptx
from gpukit.simulator.cuda.machine import MOST_STEPS, Array, KernelFault, Launch
from gpukit.simulator.cuda.ptx import PtxError

needs_nvrtc = pytest.mark.skipif(nvrtc.find() is None, reason="NVRTC is not installed")
HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
REGISTERS = """
    .reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<9>; .reg .f32 %f<9>; .reg .b64 %rd<9>; .reg .f64 %fd<9>;
    .loc 1 1 0
"""
# Thread t has the addresses of element t of three arrays of 8 bytes per element in %rd1, %rd2 and %rd3.
ADDRESSES = """
    ld.param.u64 %rd1, [k_param_0]; ld.param.u64 %rd2, [k_param_1]; ld.param.u64 %rd3, [k_param_2];
    mov.u32 %r8, %tid.x; mul.wide.u32 %rd8, %r8, 8;
    add.s64 %rd1, %rd1, %rd8; add.s64 %rd2, %rd2, %rd8; add.s64 %rd3, %rd3, %rd8;
"""


def kernel(body: str, params: int = 3, before: str = "") -> ptx.Kernel:
    named = ", ".join(f".param .u64 k_param_{i}" for i in range(params))
    (found,) = ptx.read(f"{HEAD}{before}.visible .entry k({named})\n{{{REGISTERS}{body}\n    ret;\n}}\n")
    return found


def array(name: str, data: np.ndarray) -> Array:
    return Array(name, data.nbytes, data.reshape(-1).view(np.uint8), data.itemsize)


def computed(instruction: str, kind: str, *operands: np.ndarray, wide: str = "") -> np.ndarray:
    """What an instruction makes of operands in %a and %b, of type `kind`, in %c of type `wide`."""
    letter = {"f32": "f", "f64": "fd", "pred": "p"}
    size = {"16": "rs", "32": "r", "64": "rd"}
    a, c = (letter.get(each) or size[each[1:]] for each in (kind, wide or kind))
    body = ADDRESSES
    slots = [np.zeros((len(operands[0]), 8), np.uint8) for _ in range(3)]
    for i, values in enumerate(operands):
        slots[i][:, : values.itemsize] = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
        body += f"    ld.global.{kind} %{a}{i + 4}, [%rd{i + 1}];\n"
    text = instruction.replace("%a", f"%{a}4").replace("%b", f"%{a}5").replace("%c", f"%{c}7")
    body += f"    {text};\n    st.global.{wide or kind} [%rd3], %{c}7;\n"
    Launch(
        kernel(body), 1, len(operands[0]), [array(name, slot) for name, slot in zip("xyz", slots, strict=True)]
    ).run()
    dtype = np.dtype(ptx.TYPES[wide or kind])
    return np.ascontiguousarray(slots[2][:, : dtype.itemsize]).view(dtype)[:, 0]


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def i32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


NAN, INF, TINY = float("nan"), float("inf"), 2.0**-149
INSTRUCTIONS = [
    ("add.s32 %c, %a, %b", "s32", i32(2**31 - 1, 5), i32(1, -7), i32(-(2**31), -2), ""),
    ("mul.lo.s32 %c, %a, %b", "s32", i32(1 << 20, -3), i32(1 << 20, 5), i32(0, -15), ""),
    ("mul.hi.s32 %c, %a, %b", "s32", i32(1 << 20, -3), i32(1 << 20, 5), i32(256, -1), ""),
    ("mul.wide.s32 %c, %a, %b", "s32", i32(1 << 20, -3), i32(1 << 20, 5), np.array([1 << 40, -15]), "s64"),
    ("mad.lo.s32 %c, %a, %b, 7", "s32", i32(3, -3), i32(5, 5), i32(22, -8), ""),
    ("div.s32 %c, %a, %b", "s32", i32(7, -7, 7, -7), i32(2, 2, -2, -2), i32(3, -3, -3, 3), ""),
    ("rem.s32 %c, %a, %b", "s32", i32(7, -7, 7, -7), i32(2, 2, -2, -2), i32(1, -1, 1, -1), ""),
    ("shr.s32 %c, %a, %b", "s32", i32(-8, -8, 8), i32(1, 40, 40), i32(-4, -1, 0), ""),
    ("shl.b32 %c, %a, %b", "b32", i32(3, 3), i32(4, 32), np.array([48, 0], np.uint32), ""),
    ("shr.u32 %c, %a, %b", "u32", i32(-1, -1), i32(28, 32), np.array([15, 0], np.uint32), ""),
    ("shf.l.wrap.b32 %c, %a, %b, 8", "b32", i32(0x11223344), i32(0x55667788), np.array([0x66778811], np.uint32), ""),
    ("bfe.u32 %c, %a, 8, 4", "u32", i32(0xABC00), i32(0), np.array([0xC], np.uint32), ""),
    ("bfe.s32 %c, %a, 8, 4", "s32", i32(0xABC00), i32(0), i32(-4), ""),
    ("bfi.b32 %c, %a, %b, 8, 4", "b32", i32(0xFF, 5), i32(0, -1), np.array([0xF00, 0xFFFFF5FF], np.uint32), ""),
    ("prmt.b32 %c, %a, %b, 0x0924", "b32", i32(0x33228811), i32(0x77665544), np.array([0x11FF2244], np.uint32), ""),
    ("clz.b32 %c, %a", "b32", i32(1, 0, -1), i32(0, 0, 0), np.array([31, 32, 0], np.uint32), ""),
    ("not.b32 %c, %a", "b32", i32(0), i32(0), np.array([2**32 - 1], np.uint32), ""),
    ("min.s32 %c, %a, %b", "s32", i32(-1), i32(1), i32(-1), ""),
    ("min.u32 %c, %a, %b", "u32", i32(-1), i32(1), np.array([1], np.uint32), ""),
    ("min.f32 %c, %a, %b", "f32", f32(NAN, 2), f32(1, 3), f32(1, 2), ""),
    ("fma.rn.f32 %c, %a, %b, 0fBF800000", "f32", f32(1 + 2**-12), f32(1 - 2**-12), f32(-(2**-24)), ""),
    ("fma.rn.sat.f32 %c, %a, %b, 0f00000000", "f32", f32(2, -1, NAN), f32(1, 1, 1), f32(1, 0, 0), ""),
    ("add.rm.f32 %c, %a, %b", "f32", f32(1, -1), f32(2**-30, -(2**-30)), f32(1, -1 - 2**-23), ""),
    ("add.rz.f32 %c, %a, %b", "f32", f32(1, -1), f32(-(2**-30), -(2**-30)), f32(1 - 2**-24, -1), ""),
    ("add.ftz.f32 %c, %a, %b", "f32", f32(TINY, 1), f32(TINY, TINY), f32(0, 1), ""),
    ("add.f32 %c, %a, %b", "f32", f32(TINY), f32(TINY), f32(2 * TINY), ""),
    ("div.rn.f32 %c, %a, %b", "f32", f32(1, 1, 0), f32(3, 0, 0), f32(1 / 3, INF, NAN), ""),
    ("div.approx.f32 %c, %a, %b", "f32", f32(1, 3, 3), f32(2**126, 2**127, INF), f32(2**-126, 0, 0), ""),
    ("div.full.f32 %c, %a, %b", "f32", f32(3), f32(2**127), f32(3 * 2**-127), ""),
    ("ex2.approx.ftz.f32 %c, %a", "f32", f32(3, -200, INF), f32(0, 0, 0), f32(8, 0, INF), ""),
    ("copysign.f32 %c, %a, %b", "f32", f32(-1, 1), f32(2, -3), f32(-2, 3), ""),
    ("cvt.rni.s32.f32 %c, %a", "f32", f32(2.5, -2.5, 3.5), f32(0, 0, 0), i32(2, -2, 4), "s32"),
    ("cvt.rzi.s32.f32 %c, %a", "f32", f32(-2.9, 3e9, NAN), f32(0, 0, 0), i32(-2, 2**31 - 1, 0), "s32"),
    ("cvt.rn.f32.s32 %c, %a", "s32", i32(2**24 + 1, -3), i32(0, 0), f32(2**24, -3), "f32"),
    ("cvt.sat.f32.f32 %c, %a", "f32", f32(7, NAN, 0.5), f32(0, 0, 0), f32(1, 0, 0.5), ""),
    ("cvt.s64.s32 %c, %a", "s32", i32(-5), i32(0), np.array([-5]), "s64"),
    ("cvt.u64.u32 %c, %a", "u32", i32(-1), i32(0), np.array([2**32 - 1], np.uint64), "u64"),
    ("cvt.s32.s16 %c, %a", "s16", np.array([-5], np.int16), np.array([0], np.int16), i32(-5), "s32"),
    ("setp.ltu.f32 %p1, %a, %b; selp.f32 %c, %a, %b, %p1", "f32", f32(NAN, 2, 1), f32(1, 1, 2), f32(NAN, 1, 1), ""),
    ("setp.lt.f32 %p1, %a, %b; selp.f32 %c, %a, %b, %p1", "f32", f32(NAN, 2, 1), f32(1, 1, 2), f32(1, 1, 1), ""),
    ("setp.ne.f32 %p1, %a, %a; selp.f32 %c, 0f3F800000, 0f00000000, %p1", "f32", f32(NAN, 2), f32(0, 0), f32(0, 0), ""),
    ("setp.nan.f32 %p1, %a, %a; selp.f32 %c, 0f3F800000, 0f00000000, %p1", "f32", f32(NAN, 2), f32(0, 0), f32(1, 0), ""),
]  # fmt: skip


@pytest.mark.parametrize(
    "instruction, kind, a, b, expected, wide", INSTRUCTIONS, ids=[each[0] for each in INSTRUCTIONS]
)
def test_an_instruction(instruction, kind, a, b, expected, wide):
    result = computed(instruction, kind, a, b, wide=wide)
    assert result.dtype == expected.dtype
    np.testing.assert_array_equal(result, expected)


def test_each_thread_goes_its_own_way():
    """A loop that each thread leaves when it has gone round as often as its number says."""
    rounds = np.full((70, 2), 9, np.uint32)
    body = f"""{ADDRESSES}
    mov.u32 %r1, 0;
$L_round:
    setp.ge.u32 %p1, %r1, %r8;
    @%p1 bra $L_end;
    add.u32 %r1, %r1, 1;
    bra.uni $L_round;
$L_end:
    st.global.u32 [%rd1], %r1;
"""
    Launch(kernel(body), 1, 70, [array(name, rounds) for name in "xyz"]).run()
    np.testing.assert_array_equal(rounds[:, 0], np.arange(70))


COPY = """
    ld.param.u64 %rd1, [k_param_0]; ld.param.u64 %rd2, [k_param_1];
    mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %tid.x;
    mad.lo.s32 %r4, %r1, %r2, %r3; mul.wide.s32 %rd3, %r4, BYTES;
    add.s64 %rd4, %rd1, %rd3; add.s64 %rd5, %rd2, %rd3;
    .loc 1 7 5
    LOAD, [%rd4];
    .loc 1 8 5
    STORE;
"""
WIDE = (
    COPY.replace("BYTES", "16")
    .replace("LOAD", "ld.global.v4.f32 {%f1, %f2, %f3, %f4}")
    .replace("STORE", "st.global.v4.f32 [%rd5], {%f1, %f2, %f3, %f4}")
)
NARROW = (
    COPY.replace("BYTES", "4").replace("LOAD", "ld.global.nc.f32 %f1").replace("STORE", "st.global.f32 [%rd5], %f1")
)


def copies(body: str, n: int, blocks: int, threads: int):
    x, y = np.arange(n, dtype=np.float32), np.zeros(n, np.float32)
    return y, Launch(kernel(body, 2), blocks, threads, [array("x", x), array("y", y)])


def test_bytes_and_sectors_are_counted_by_line_array_and_width():
    for body, threads, width in ((WIDE, 64, 16), (NARROW, 256, 4)):
        y, launch = copies(body, 512, 2, threads)
        load, store = launch.run()
        assert (load.kind, load.array, load.line, load.width) == ("load", "x", 7, width)
        assert (store.kind, store.array, store.line, store.width) == ("store", "y", 8, width)
        assert load.bytes == store.bytes == 2048 and load.sectors == store.sectors == 64
        np.testing.assert_array_equal(y, np.arange(512))


def test_a_stride_touches_more_sectors():
    _, launch = copies(NARROW.replace("%r4, 4", "%r4, 32"), 256, 1, 32)
    load, _ = launch.run()
    assert load.bytes == 128 and load.sectors == 32


def test_an_access_outside_an_array_has_its_line_and_its_thread():
    _, launch = copies(WIDE, 510, 2, 64)
    with pytest.raises(KernelFault, match=r"thread 63 of block 1: 16 bytes at index 508 of x \[510\]") as raised:
        launch.run()
    assert (raised.value.what, raised.value.kind, raised.value.tensor, raised.value.line) == (
        "out-of-bounds",
        "load",
        "x",
        7,
    )
    with pytest.raises(
        KernelFault, match=r"64 threads, the first is thread 0 of block 0: 4 bytes at index -64, before the start of x"
    ):
        copies(NARROW.replace("add.s64 %rd4", "sub.s64 %rd3, %rd3, 256; add.s64 %rd4"), 64, 1, 64)[1].run()


def test_a_wide_access_must_be_aligned():
    _, launch = copies(WIDE.replace("[%rd5]", "[%rd5+4]"), 1024, 1, 32)
    with pytest.raises(KernelFault, match="an access of 16 bytes at byte 4, which is no multiple of 16") as raised:
        launch.run()
    assert (raised.value.what, raised.value.kind, raised.value.tensor, raised.value.line) == (
        "misaligned",
        "store",
        "y",
        8,
    )


def test_a_kernel_that_does_not_end():
    with pytest.raises(KernelFault, match="thread 0 of block 0 is still running after") as raised:
        copies("\n.loc 1 5 1\n$L_0:\n    add.u32 %r1, 1, 1;\n    bra.uni $L_0;", 4, 1, 32)[1].run()
    assert raised.value.what == "endless" and raised.value.line == 5 and MOST_STEPS < 1_000_000


def test_arrays_without_memory():
    """Addresses beyond 2^31 elements, in the first and the last block of many."""
    n = (3 << 30) + 4
    blocks = n // 256

    def launch(body: str) -> Launch:
        return Launch(kernel(body, 2), blocks, 256, [Array(name, 4 * n, None, 4) for name in "xy"], [0, blocks - 1])

    far = NARROW.replace("mad.lo.s32 %r4, %r1, %r2, %r3; mul.wide.s32 %rd3, %r4, 4;", "mul.wide.u32 %rd6, %r1, %r2; cvt.u64.u32 %rd7, %r3; add.s64 %rd6, %rd6, %rd7; shl.b64 %rd3, %rd6, 2;")  # fmt: skip
    assert [access.bytes for access in launch(far).run()] == [2048, 2048]
    with pytest.raises(
        KernelFault, match=r"at index -1,073,74\d,\d+, before the start of x"
    ):  # the index wraps in 32 bits
        launch(NARROW).run()


def test_shared_memory_and_its_barrier():
    body = f"""{ADDRESSES}
    .shared .align 4 .b8 box[256];
    mov.u32 %r1, box; shl.b32 %r2, %r8, 2; add.u32 %r3, %r1, %r2; st.shared.u32 [%r3], %r8;
    bar.sync 0;
    sub.u32 %r4, 252, %r2; add.u32 %r5, %r1, %r4; ld.shared.u32 %r6, [%r5];
    st.global.u32 [%rd1], %r6;
"""
    y = np.zeros((64, 2), np.uint32)
    Launch(kernel(body), 1, 64, [array(name, y) for name in "xyz"]).run()
    np.testing.assert_array_equal(y[:, 0], np.arange(64)[::-1])
    with pytest.raises(KernelFault, match=r"4 bytes at index 252 of shared memory \[252\]"):
        Launch(kernel(body.replace("box[256]", "box[252]")), 1, 64, [array(name, y) for name in "xyz"]).run()


@pytest.mark.parametrize(
    "body, said",
    [
        ("call.uni f;", "call.uni, which is not interpreted"),
        ("atom.global.add.u32 %r1, [%rd1], 1;", "atom.global.add.u32, which is not interpreted"),
        ("mma.sync.whatever %r1, %r2;", "mma.sync.whatever, which is not interpreted"),
        ("add.f32 %f1, %f2, %f3;", "uses a variable that was never given a value"),
        ("mov.u64 %rd1, %clock64;", "reads %clock64"),
        (".shared .align 4 .b8 box[65536];", "65,536 bytes of shared memory"),
        (".local .align 4 .b8 box[1073741824];", "arrays of 1,073,741,824 bytes in each thread"),
    ],
)
def test_what_is_not_interpreted_is_said(body, said):
    with pytest.raises(PtxError, match=said):
        Launch(kernel(body, 0), 1, 32, []).run()


@pytest.mark.parametrize("blocks, threads", [(1, 0), (1, 1025), (0, 32), (1 << 31, 32)])
def test_launches_that_no_gpu_takes(blocks, threads):
    with pytest.raises(PtxError, match="which no GPU takes"):
        Launch(kernel("", 0), blocks, threads, []).run()


def test_texts_that_are_none():
    assert ptx.read("") == [] == ptx.read(HEAD)
    for broken in (".visible .entry k() {", ".visible .entry k(.param .b512 x) { ret; }", ".global .align 4 .q9 a[4];"):
        with pytest.raises(PtxError):
            list(map(lambda k: Launch(k, 1, 32, [0]).run(), ptx.read(broken)))
    with pytest.raises(PtxError, match="1,073,741,824 bytes outside the kernel"):
        ptx.read(".global .align 4 .b8 a[1073741824];")


# ------------------------------------------------------------------------------------------------------- what NVRTC makes
def run(text: str, blocks: int, threads: int, **arguments) -> list:
    (found,) = ptx.read(nvrtc.to_ptx('extern "C" __global__ void ' + text))
    given = [array(name, x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()]
    return Launch(found, blocks, threads, given).run()


@pytest.fixture
def noise():
    return np.random.default_rng(0)


@needs_nvrtc
def test_a_softmax_with_shuffles_and_shared_memory(noise):
    x = noise.normal(size=(5, 333)).astype(np.float32) * 3
    y = np.full_like(x, np.nan)
    text = """softmax(const float* __restrict__ x, float* __restrict__ y, int n) {
        __shared__ float part[32];
        const float* row = x + (long long)blockIdx.x * n;
        float m = -1e30f, l = 0.f;
        for (int i = threadIdx.x; i < n; i += blockDim.x) m = fmaxf(m, row[i]);
        for (int o = 16; o; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = m;
        __syncthreads();
        m = part[0];
        for (int w = 1; w < blockDim.x / 32; ++w) m = fmaxf(m, part[w]);
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += blockDim.x) l += expf(row[i] - m);
        for (int o = 16; o; o >>= 1) l += __shfl_down_sync(~0u, l, o);
        if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = l;
        __syncthreads();
        l = 0.f;
        for (int w = 0; w < blockDim.x / 32; ++w) l += part[w];
        for (int i = threadIdx.x; i < n; i += blockDim.x) y[(long long)blockIdx.x * n + i] = expf(row[i] - m) / l; }"""
    run(text, 5, 128, x=x, y=y, n=333)
    expected = np.exp(x.astype(float) - x.max(1, keepdims=True))
    np.testing.assert_allclose(y, expected / expected.sum(1, keepdims=True), rtol=2e-6, atol=1e-12)


@needs_nvrtc
def test_a_transposition_through_shared_memory(noise):
    x = noise.normal(size=(64, 64)).astype(np.float32)
    y = np.zeros_like(x)
    text = """transpose(const float* x, float* y, int n) {
        __shared__ float tile[32][33];
        int i = threadIdx.x % 32, j = threadIdx.x / 32, c = blockIdx.x % (n / 32) * 32, r = blockIdx.x / (n / 32) * 32;
        for (int k = j; k < 32; k += 8) tile[k][i] = x[(r + k) * n + c + i];
        __syncthreads();
        for (int k = j; k < 32; k += 8) y[(c + k) * n + r + i] = tile[i][k]; }"""
    accesses = run(text, 4, 256, x=x, y=y, n=64)
    np.testing.assert_array_equal(y, x.T)
    assert [(a.bytes, a.sectors) for a in accesses] == [(64 * 64 * 4, 512)] * 2


@needs_nvrtc
def test_functions_of_floats_are_as_exact_as_numpys(noise):
    """Among them the sines of large numbers, which need a table and arrays of the thread's own."""
    x = np.concatenate([noise.normal(size=200) * 3, noise.normal(size=50) * 1e6, [0.0, 1e-40, 1e30]]).astype(np.float32)
    wide = x.astype(np.float64)
    for name, expected in {
        "sinf(v)": np.sin(wide), "cosf(v)": np.cos(wide), "tanhf(v)": np.tanh(wide), "expf(-fabsf(v))": np.exp(-np.abs(wide)),
        "logf(fabsf(v) + 1)": np.log(np.abs(wide).astype(np.float32) + np.float32(1)), "erff(v)": None, "rsqrtf(fabsf(v) + 1)": None,
        "sqrtf(fabsf(v))": np.sqrt(np.abs(wide)), "powf(fabsf(v), 0.25f)": np.abs(wide) ** 0.25, "floorf(v)": np.floor(wide),
        "(float)((double)v * v)": wide * wide, "(float)(int)v": None,
    }.items():  # fmt: skip
        y = np.zeros_like(x)
        run(
            f"f(const float* x, float* y) {{ float v = x[threadIdx.x]; y[threadIdx.x] = {name}; }}", 1, len(x), x=x, y=y
        )
        if expected is not None:
            with np.errstate(over="ignore"):
                right = expected.astype(np.float32)
            np.testing.assert_allclose(y, right, rtol=1e-6, atol=1e-44, err_msg=name)
        else:
            assert np.isfinite(y).all(), name


@needs_nvrtc
def test_integers(noise):
    rng = random.Random(0)
    a = np.array([rng.randrange(-(1 << 62), 1 << 62) >> rng.randrange(60) for _ in range(200)])
    b = np.array([rng.choice((-1, 1)) * rng.randrange(1, 1 << rng.randrange(2, 40)) for _ in range(200)])
    y = np.zeros((7, 200), np.int64)
    text = """f(const long long* a, const long long* b, long long* y) { int t = threadIdx.x; long long p = a[t], q = b[t];
        y[t] = p / q; y[200 + t] = p % q; y[400 + t] = p / 7; y[600 + t] = (int)p % 10;
        y[800 + t] = p >> (q & 63); y[1000 + t] = p * q; y[1200 + t] = p < q ? (short)p : (unsigned char)q; }"""
    run(text, 1, 200, a=a, b=b, y=y)
    quotient = [
        abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1) for p, q in zip(a.tolist(), b.tolist(), strict=True)
    ]
    np.testing.assert_array_equal(y[0], quotient)
    np.testing.assert_array_equal(y[1], a - np.array(quotient) * b)
    np.testing.assert_array_equal(y[2], [abs(p) // 7 * (1 if p > 0 else -1) for p in a.tolist()])
    np.testing.assert_array_equal(y[3], np.fmod(a.astype(np.int32), 10))
    np.testing.assert_array_equal(y[4], a >> (b & 63))
    np.testing.assert_array_equal(y[5], a * b)
    np.testing.assert_array_equal(y[6], np.where(a < b, a.astype(np.int16), b.astype(np.uint8)))


@needs_nvrtc
def test_arrays_of_a_thread_constants_and_branches(noise):
    y = np.zeros((3, 64), np.int32)
    text = """f(int* y) { static const int table[5] = {2, 3, 5, 7, 11}; int own[8], t = threadIdx.x;
        for (int i = 0; i < 8; i++) own[i] = i * t;
        #pragma unroll 1
        for (int i = 0; i < 8; i++) own[(i + t) % 8] += table[(i + t) % 5];
        y[t] = own[t % 8]; y[64 + t] = table[t % 5];
        long long n = t + 1; int steps = 0; while (n != 1) { n = n % 2 ? 3 * n + 1 : n / 2; steps++; } y[128 + t] = steps; }"""
    run(text, 1, 64, y=y)
    table = [2, 3, 5, 7, 11]
    for t in range(64):
        own = [i * t for i in range(8)]
        for i in range(8):
            own[(i + t) % 8] += table[(i + t) % 5]
        n, steps = t + 1, 0
        while n != 1:
            n, steps = (3 * n + 1 if n % 2 else n // 2), steps + 1
        assert y[:, t].tolist() == [own[t % 8], table[t % 5], steps]


@needs_nvrtc
def test_what_the_compiler_refuses_has_its_line():
    for text, line, said in (
        ("\n\n__device__ int x = ;", 3, "expected an expression"),
        ("\n\n#error here", 3, "here"),
        ('#include "nothing.h"', 1, "nothing.h"),
    ):
        with pytest.raises(nvrtc.CompileError, match=said) as raised:
            nvrtc.to_ptx(text)
        assert raised.value.line == line


def test_where_there_is_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(nvrtc, "_folders", lambda: iter([tmp_path]))
    assert nvrtc.find() is None
    with pytest.raises(nvrtc.NotInstalled, match="is not installed"):
        nvrtc.to_ptx("")
    for name in (
        "libnvrtc.so.12",
        "libnvrtc.so.13",
        "libnvrtc-builtins.so.13.1",
        "libnvrtc.so.9",
        "libnvrtc-672ee683.so.11.2",
    ):
        (tmp_path / name).write_bytes(b"no library")
    assert nvrtc.find() == tmp_path / "libnvrtc.so.13"
    with pytest.raises(nvrtc.NotInstalled, match="cannot be loaded"):
        nvrtc.to_ptx("")
