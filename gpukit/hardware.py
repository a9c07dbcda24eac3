"""What each GPU can do at most, every number with the page it was read from.

Peaks are dense. Datasheets of Ampere and later print tensor-core rates "with sparsity", twice what a dense matmul can
reach; the table holds the dense half. fp64 and fp32 are the ordinary lanes; every other dtype is the tensor cores with
fp32 accumulation, which on GeForce cards runs at half the advertised fp16-accumulate rate.

Units: FLOP/s (a multiply-add is 2 FLOPs; integer operations for int8), GB/s = 10^9 B/s, memory capacity as printed with
GB = 10^9 bytes, on-chip sizes in KiB and MiB as powers of two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpukit.nearest import did_you_mean

KIB, MIB, GB = 1 << 10, 1 << 20, 10**9


@dataclass(frozen=True)
class Gpu:
    """One GPU. `sources` gives an address for every number, by the field's name."""

    name: str
    key: str  # "h100-sxm"
    compute_capability: tuple[int, int]
    sms: int
    fp32_lanes_per_sm: int
    boost_mhz: int
    peak_flops: Mapping[str, float] = field(
        hash=False
    )  # dtype -> FLOP/s, dense; a dtype that is absent is not supported
    hbm_gbps: float  # device memory, HBM or GDDR
    hbm_bytes: int
    l2_bytes: int
    smem_per_sm_bytes: int
    smem_per_block_bytes: int  # the most one block may ask for, with the opt-in
    registers_per_sm: int  # of 32 bits
    max_threads_per_sm: int
    sources: Mapping[str, str] = field(hash=False, repr=False)

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s in `dtype` ("bf16"). Raises ValueError for a dtype that this GPU has no rate for."""
        if dtype not in self.peak_flops:
            raise ValueError(f"dtype must be one of {', '.join(self.peak_flops)} on {self.name}, got {dtype!r}")
        return self.peak_flops[dtype]

    def ridge(self, dtype: str) -> float:
        """FLOPs per byte of device memory above which compute, not memory, is the limit. Raises ValueError as `peak`."""
        return self.peak(dtype) / (self.hbm_gbps * 1e9)


CAPABILITIES = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#compute-capabilities"
TURING = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/"
    "NVIDIA-Turing-Architecture-Whitepaper.pdf"
)
GA100 = "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
A100 = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-nvidia-us-2188504-web.pdf"
)
GA102 = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
ADA = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
L40S_PAGE = "https://www.nvidia.com/en-us/data-center/l40s/"
GB202 = "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"
L4_PAGE = "https://www.nvidia.com/en-us/data-center/l4/"
HOPPER = "https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper"
HOPPER_BLOG = "https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/"
H100_PAGE = "https://www.nvidia.com/en-us/data-center/h100/"
H200_PAGE = "https://www.nvidia.com/en-us/data-center/h200/"
BLACKWELL = "https://resources.nvidia.com/en-us-blackwell-architecture/datasheet"
BLACKWELL_TUNING = "https://docs.nvidia.com/cuda/blackwell-tuning-guide/index.html"
B200_DRIVER = "https://github.com/pytorch/ao/pull/4002"  # what the driver reports: 148 SMs, 126.5 MiB of L2
B200_CLOCK = "https://github.com/ByteDance-Seed/VeOmni/pull/986"

# capability -> (shared memory per SM, per block, threads per SM); registers are 65,536 on all of them
_LIMITS = {
    (7, 5): (64 * KIB, 64 * KIB, 1024),
    (8, 0): (164 * KIB, 163 * KIB, 2048),
    (8, 6): (100 * KIB, 99 * KIB, 1536),
    (8, 9): (100 * KIB, 99 * KIB, 1536),
    (9, 0): (228 * KIB, 227 * KIB, 2048),
    (10, 0): (228 * KIB, 227 * KIB, 2048),
    (12, 0): (100 * KIB, 99 * KIB, 1536),
}

_FROM_CUDA = (
    "compute_capability",
    "smem_per_sm_bytes",
    "smem_per_block_bytes",
    "registers_per_sm",
    "max_threads_per_sm",
)
_FROM_MAKER = ("sms", "fp32_lanes_per_sm", "boost_mhz", "peak_flops", "hbm_gbps", "hbm_bytes", "l2_bytes")


def _gpu(
    name, key, capability, sms, lanes, boost_mhz, peak_tflops, hbm_gbps, hbm_gb, l2_mib, source, /, **sources
) -> Gpu:
    """`source` holds for every number that `sources` does not name; limits of the capability come from CUDA's table."""
    smem_per_sm, smem_per_block, threads = _LIMITS[capability]
    return Gpu(
        name=name,
        key=key,
        compute_capability=capability,
        sms=sms,
        fp32_lanes_per_sm=lanes,
        boost_mhz=boost_mhz,
        # Through a decimal: 989.4e12 is the float nearest the printed number, 989.4 * 1e12 need not be.
        peak_flops={dtype: float(f"{tflops}e12") for dtype, tflops in peak_tflops.items()},
        hbm_gbps=hbm_gbps,
        hbm_bytes=hbm_gb * GB,
        l2_bytes=l2_mib * MIB,
        smem_per_sm_bytes=smem_per_sm,
        smem_per_block_bytes=smem_per_block,
        registers_per_sm=65536,
        max_threads_per_sm=threads,
        sources={**dict.fromkeys(_FROM_CUDA, CAPABILITIES), **dict.fromkeys(_FROM_MAKER, source), **sources},
    )


_GA100 = {"fp64": 9.7, "fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312, "int8": 624}
# The whitepaper's dense columns; tensor-core rates are at 1,830 MHz, fp32 and fp64 at the 1,980 MHz of boost_mhz.
_GH100 = {"fp64": 33.5, "fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9, "int8": 1978.9}
_GH100_PCIE = {"fp64": 25.6, "fp32": 51.2, "tf32": 378, "fp16": 756, "bf16": 756, "fp8": 1513, "int8": 1513}
_B200 = {
    "fp64": 37, "fp32": 75, "tf32": 1100, "fp16": 2250, "bf16": 2250, "fp8": 4500, "int8": 4500, "fp4": 9000,
}  # fmt: skip
_L4 = {"fp64": 0.473, "fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "fp8": 242.5, "int8": 242.5}
_L40S = {"fp64": 1.43, "fp32": 91.6, "tf32": 183, "fp16": 362.05, "bf16": 362.05, "fp8": 733, "int8": 733}
_T4 = {"fp64": 0.254, "fp32": 8.1, "fp16": 65, "int8": 130}  # fp64: 1/32 of fp32; no bf16, no tf32
_RTX_3090 = {"fp64": 0.556, "fp32": 35.6, "tf32": 35.6, "fp16": 71, "bf16": 71, "int8": 284}
_RTX_4090 = {"fp64": 1.29, "fp32": 82.6, "tf32": 82.6, "fp16": 165.2, "bf16": 165.2, "fp8": 330.3, "int8": 660.6}
_RTX_5090 = {
    "fp64": 1.64, "fp32": 104.8, "tf32": 104.8, "fp16": 209.5, "bf16": 209.5, "fp8": 419, "int8": 838, "fp4": 1676,
}  # fmt: skip

GPUS: tuple[Gpu, ...] = (
    _gpu("A100 40GB", "a100-40gb", (8, 0), 108, 64, 1410, _GA100, 1555, 40, 40, GA100),
    _gpu(
        "A100 80GB SXM", "a100-80gb", (8, 0), 108, 64, 1410, _GA100, 2039, 80, 40, GA100,
        hbm_gbps=A100, hbm_bytes=A100,
    ),
    _gpu("H100 SXM", "h100-sxm", (9, 0), 132, 128, 1980, _GH100, 3350, 80, 50, HOPPER, hbm_gbps=H100_PAGE),
    _gpu("H100 PCIe", "h100-pcie", (9, 0), 114, 128, 1755, _GH100_PCIE, 2039, 80, 50, HOPPER),
    # The chip of the H100 SXM with all six memory stacks, hence all of GH100's L2: the driver reports 60 MiB.
    _gpu(
        "H200 SXM", "h200", (9, 0), 132, 128, 1980, _GH100, 4800, 141, 60, HOPPER,
        hbm_gbps=H200_PAGE, hbm_bytes=H200_PAGE, l2_bytes=HOPPER_BLOG,
    ),
    _gpu(
        "B200", "b200", (10, 0), 148, 128, 1965, _B200, 7700, 180, 126, BLACKWELL,
        sms=B200_DRIVER, fp32_lanes_per_sm=CAPABILITIES, boost_mhz=B200_CLOCK, l2_bytes=BLACKWELL_TUNING,
    ),
    _gpu(
        "L4", "l4", (8, 9), 58, 128, 2040, _L4, 300, 24, 48, ADA,
        peak_flops=L4_PAGE, hbm_gbps=L4_PAGE, hbm_bytes=L4_PAGE,
    ),
    _gpu(
        "L40S", "l40s", (8, 9), 142, 128, 2520, _L40S, 864, 48, 96, ADA,
        peak_flops=L40S_PAGE, hbm_gbps=L40S_PAGE, hbm_bytes=L40S_PAGE,
    ),
    _gpu("T4", "t4", (7, 5), 40, 64, 1590, _T4, 320, 16, 4, TURING),
    _gpu("RTX 3090", "rtx-3090", (8, 6), 82, 128, 1695, _RTX_3090, 936, 24, 6, GA102),
    _gpu("RTX 4090", "rtx-4090", (8, 9), 128, 128, 2520, _RTX_4090, 1008, 24, 72, ADA),
    _gpu("RTX 5090", "rtx-5090", (12, 0), 170, 128, 2407, _RTX_5090, 1792, 32, 96, GB202),
)  # fmt: skip

# Names as people type them and as torch.cuda.get_device_name() prints them; compared without case, spaces and hyphens.
# Cards that differ (A100 80GB PCIe, H100 NVL) are absent on purpose: a wrong peak is worse than none.
_ALIASES = {
    "a100-40gb": "A100 40, A100-SXM4-40GB, A100-PCIE-40GB",
    "a100-80gb": "A100, A100 80, A100-SXM, A100-SXM4-80GB",
    "h100-sxm": "H100, H100 SXM5, H100 80GB HBM3",
    "h200": "H200 SXM",
    "rtx-3090": "3090",
    "rtx-4090": "4090",
    "rtx-5090": "5090",
}
# Asked for and left out: everything here is built on the compiler, the warps of 32 lanes and the caches of NVIDIA's GPUs.
# https://www.amd.com/en/products/accelerators/instinct.html
_AMD = re.compile(r"(amd|radeon)?(instinct)?mi\d{3}[ax]?")


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", str(name).lower())


_BY_NAME = {_plain(alias): gpu for gpu in GPUS for alias in (gpu.key, gpu.name, *_ALIASES.get(gpu.key, "").split(", "))}
_BY_NAME.pop("", None)


def gpu(name: str) -> Gpu:
    """The GPU called `name`: "h100", "H200", "NVIDIA A100-SXM4-80GB". Raises ValueError naming the nearest and all."""
    if _plain(name) in _BY_NAME:
        return _BY_NAME[_plain(name)]
    if _AMD.fullmatch(_plain(name)):
        raise ValueError(
            f"{name} is a GPU of AMD's, whose compiler, caches and waves of 64 lanes are not modelled here, so there is no number "
            f"for it  (all GPUs of the table: {', '.join(g.key for g in GPUS)})"
        )
    hint = did_you_mean(_plain(name), _BY_NAME)
    raise ValueError(f"no GPU is called {name!r}{hint}  (all of them: {', '.join(g.key for g in GPUS)})")


_imagined: Gpu | None = None


@contextmanager
def imagined(gpu: Gpu) -> Iterator[None]:
    """Inside the block launches are those of `gpu`, which need not be there: grids and configurations are chosen for it,
    tensors on the CPU are taken for its own, and nothing runs but the interpreter, also beside another GPU."""
    global _imagined
    before, _imagined = _imagined, gpu
    try:
        yield
    finally:
        _imagined = before


def imagined_gpu() -> Gpu | None:
    """The GPU of the innermost `imagined` block, None outside of one."""
    return _imagined
