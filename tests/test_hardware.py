"""The GPU table: figures checked by hand, internal consistency, a source for every number."""

from dataclasses import fields

import pytest

from gpukit.hardware import GPUS, KIB, MIB, Gpu, gpu

NUMERIC = [f.name for f in fields(Gpu) if f.name not in ("name", "key", "sources")]

# FLOP per clock and SM of the tensor cores in bf16 (fp16 on the T4), dense, with fp32 accumulation.
TENSOR_RATE = {
    "t4": 1024, "l4": 1024, "rtx-3090": 512, "rtx-4090": 512, "a100-40gb": 2048, "a100-80gb": 2048,
    "h100-sxm": 4096, "h100-pcie": 4096, "h200": 4096, "b200": 8192, "l40s": 1024, "rtx-5090": 512,
}  # fmt: skip


@pytest.mark.parametrize("card", GPUS, ids=lambda card: card.key)
@pytest.mark.parametrize("name", NUMERIC)
def test_every_number_has_a_source(card, name):
    assert card.sources[name].startswith("https://"), f"{card.key}.{name}"
    assert set(card.sources) == set(NUMERIC)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("h100", "sms", 132),
        ("h100", "fp32_lanes_per_sm", 128),
        ("h100", "hbm_gbps", 3350),
        ("h100", "hbm_bytes", 80 * 10**9),
        ("h100", "l2_bytes", 50 * MIB),
        ("h100", "smem_per_block_bytes", 227 * KIB),
        ("h100-pcie", "sms", 114),
        ("h200", "hbm_gbps", 4800),
        ("h200", "hbm_bytes", 141 * 10**9),
        ("h200", "l2_bytes", 60 * MIB),
        ("a100-40gb", "hbm_gbps", 1555),
        ("a100", "hbm_gbps", 2039),
        ("a100", "sms", 108),
        ("a100", "smem_per_block_bytes", 163 * KIB),
        ("b200", "hbm_gbps", 7700),
        ("l4", "hbm_gbps", 300),
        ("t4", "max_threads_per_sm", 1024),
        ("rtx-3090", "max_threads_per_sm", 1536),
        ("rtx-4090", "l2_bytes", 72 * MIB),
        ("l40s", "sms", 142),
        ("l40s", "hbm_gbps", 864),
        ("rtx-5090", "sms", 170),
        ("rtx-5090", "smem_per_block_bytes", 99 * KIB),
        ("rtx-5090", "l2_bytes", 96 * MIB),
    ],
)
def test_figures_by_hand(name, field, value):
    assert getattr(gpu(name), field) == value


@pytest.mark.parametrize(
    ("name", "dtype", "flops"),
    [
        ("h100", "bf16", 989.4e12),
        ("h200", "bf16", 989.4e12),
        ("h100-pcie", "bf16", 756e12),
        ("a100", "bf16", 312e12),
        ("a100", "tf32", 156e12),
        ("b200", "fp4", 9e15),
        ("l4", "fp16", 121e12),
        ("t4", "fp16", 65e12),
        ("rtx-3090", "fp16", 71e12),
        ("rtx-4090", "bf16", 165.2e12),
        ("l40s", "bf16", 362.05e12),
        ("rtx-5090", "bf16", 209.5e12),
        ("rtx-5090", "fp32", 104.8e12),
    ],
)
def test_peaks_by_hand(name, dtype, flops):
    assert gpu(name).peak(dtype) == flops


@pytest.mark.parametrize("card", GPUS, ids=lambda card: card.key)
def test_peaks_are_dense_and_fit_the_clock(card):
    """A sparse figure would be twice what the tensor cores can do per clock."""
    lanes = card.sms * card.fp32_lanes_per_sm * 2 * card.boost_mhz * 1e6
    assert card.peak("fp32") == pytest.approx(lanes, rel=0.02)
    tensor = TENSOR_RATE[card.key] * card.sms * card.boost_mhz * 1e6
    peak = card.peak("bf16" if "bf16" in card.peak_flops else "fp16")
    assert 0.9 * tensor < peak < 1.03 * tensor


def test_the_sparse_trap():
    """1,979 TFLOP/s on the H100's page is sparse bf16; dense it is half, and 1,979 is the dense rate of fp8."""
    assert gpu("h100").peak("bf16") == pytest.approx(1979e12 / 2, rel=1e-3)
    assert gpu("h100").peak("fp8") == pytest.approx(2 * gpu("h100").peak("bf16"), rel=1e-3)


def test_ridge_point():
    assert gpu("h100").ridge("bf16") == pytest.approx(295.34, abs=0.01)
    assert gpu("a100-40gb").ridge("bf16") == pytest.approx(312e12 / 1555e9)
    with pytest.raises(ValueError, match="dtype must be one of fp64, fp32, fp16, int8 on T4, got 'bf16'"):
        gpu("t4").ridge("bf16")


@pytest.mark.parametrize(
    ("alias", "key"),
    [
        ("h100", "h100-sxm"),
        ("H100", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("A100", "a100-80gb"),
        ("NVIDIA B200", "b200"),
        ("Tesla T4", "t4"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("3090", "rtx-3090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
    ],
)
def test_aliases(alias, key):
    assert gpu(alias).key == key


@pytest.mark.parametrize("card", GPUS, ids=lambda card: card.key)
def test_key_and_name_find_the_card(card):
    assert gpu(card.key) is card
    assert gpu(card.name) is card
    assert hash(card) == hash(gpu(card.name))


@pytest.mark.parametrize("name", ["h10", "", "NVIDIA A100 80GB PCIe", "H100 NVL"])
def test_unknown_gpu_names_the_list(name):
    with pytest.raises(ValueError, match="all of them: a100-40gb, a100-80gb, h100-sxm"):
        gpu(name)


@pytest.mark.parametrize("name", ["MI300X", "amd-mi300x", "AMD Instinct MI325X"])
def test_gpus_of_another_maker_have_no_number(name):
    with pytest.raises(ValueError, match=f"{name} is a GPU of AMD's, .* not modelled here, so there is no number"):
        gpu(name)


def test_unknown_gpu_names_the_nearest():
    with pytest.raises(ValueError, match=r"no GPU is called 'h20'; did you mean 'h200'\?"):
        gpu("h20")
