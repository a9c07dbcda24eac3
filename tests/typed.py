"""Every public name, used as a reader of the notebooks would use it: a type checker reads this, nobody runs it (tests/test_typed.py).
A line with "type: ignore" is a mistake that the checker must find."""

import torch
from torch import Tensor

import gpukit
from gpukit import hardware, kernels, testing, timing
from gpukit.accounting import (
    attention,
    autocast,
    collectives,
    decoding,
    dtypes,
    flops,
    fusion,
    memory,
    models,
    roofline,
    tiling,
    training,
)
from gpukit.hardware import Gpu
from gpukit.huggingface.report import Report
from gpukit.op import Cost
from gpukit.simulator import simt
from gpukit.simulator.allocator import MIB, Allocator, OutOfMemory
from gpukit.simulator.compiler.compile import Compiled, CompileError
from gpukit.simulator.interpreter.faults import MemoryFault, RaceFault
from gpukit.simulator.prediction.predict import Prediction
from gpukit.simulator.queue_model import Device, SimulatedGpu


def course(model: torch.nn.Module) -> None:
    gpukit.use("solutions")
    gpukit.hint("softmax.fused", 2)
    gpukit.check("softmax.fused")
    gpukit.check(3)  # type: ignore[arg-type]
    print(gpukit.__version__, gpukit.compare("softmax.fused", gpu="a100"))
    y: Tensor = gpukit.exercise("softmax").softmax_fused(torch.randn(4, 4))
    report: Report = gpukit.patch(model, loss=False)
    modules: int = report.count("norms") + report.replaced["norms", "RMSNorm", "rms_norm"]
    gpukit.unpatch(model)
    print(y, modules)


def without_a_gpu(x: Tensor, kernel: object) -> float:
    try:
        with gpukit.trace(detail=True) as t:
            kernels.softmax(x)
    except (MemoryFault, RaceFault) as fault:
        print(fault.tensor, fault.line, fault.program)
        raise
    launch = t.launches[0]
    options: dict[str, object] = launch.options
    lines: list[str] = [str(row["name"]) for row in t.rows(caches=True)]
    print(t.report(), t.bytes, launch.traffic().dram_read_bytes, options, lines)
    try:
        compiled: Compiled = gpukit.compile(kernel, x, 4096, BLOCK=4096, num_warps=8, gpu="t4")
        print(compiled.registers, compiled.occupancy, compiled.spills, compiled.ptx)
    except CompileError as error:
        print(error)
    prediction: Prediction = gpukit.predict(lambda: kernels.softmax(x), gpu=hardware.gpu("h100"), sample=64)
    return prediction.time_us


def operations(x: Tensor, weight: Tensor, ids: Tensor, q: Tensor, starts: Tensor) -> Tensor:
    y = kernels.softmax(x, dim=-1) + kernels.log_softmax(x, dtype=torch.float32)
    y = kernels.gelu(y, approximate="tanh") + kernels.bias_gelu(y, weight) + kernels.swiglu(x, y) + kernels.geglu(x, y)
    y = kernels.layer_norm(y, weight) + kernels.rms_norm(y, weight, eps=1e-5)
    y, residual = kernels.residual_rms_norm(y, x)
    kernels.softmax([1.0])  # type: ignore[arg-type]
    y = kernels.dropout(kernels.matmul(y, weight, activation="gelu", residual=residual), 0.1, seed=7)
    y = kernels.int8_matmul(y, *kernels.quantize_int8(weight)) + kernels.int4_matmul(y, *kernels.quantize_int4(weight))
    y = kernels.fp8_matmul(y, weight, "row")
    rotated, k = kernels.rope(q, q, x, y)
    o = kernels.flash_attention(rotated, k, q, causal=True).transpose(1, 2)
    o, lse = kernels.flash_attention(q, q, q, return_lse=True)
    packed = kernels.flash_attention_varlen(q[0], q[0], q[0], starts, starts, 8, 8).sum()
    _, packed_lse = kernels.flash_attention_varlen(q[0], q[0], q[0], starts, starts, 8, 8, return_lse=True)
    cache = kernels.KVCache(1, 64, 2, 32, dtype=torch.float16)
    o = o + kernels.decode_attention(q, cache.k, cache.v, cache.lengths)
    loss = kernels.cross_entropy(y, ids) + kernels.linear_cross_entropy(x, weight, ids) + kernels.kl_div(x, y)
    layer: torch.nn.Module = kernels.Linear(64, 64, activation="relu")
    optimizer: torch.optim.Optimizer = kernels.AdamW(layer.parameters(), lr=3e-4, max_norm=1.0)
    optimizer.step()
    return loss + (o.sum() + lse.sum() + packed + packed_lse.sum())


def accounting() -> float:
    gpu: Gpu = hardware.gpu("h200")
    llama = models.preset("llama3-8b")
    plan = memory.training_memory(llama, 8, 8192, parallel=memory.Parallel(data=8, zero=3))
    step = flops.step_flops(llama, 8, 8192)
    days: training.Cost = training.training_cost(models.parameters(llama).total, 10**12, gpu, 1024, mfu=0.5)
    bound: str = roofline.limit(gpu, "bf16", 100.0)
    point = roofline.elementwise_point("relu", 10**6)
    tiles = tiling.Tiling(4096, 4096, 4096, 128, 128, 64)
    formats: dict[str, dtypes.Format] = dict(dtypes.FORMATS)
    moved: int = collectives.all_reduce(10**9, 8, 2)
    tokens = decoding.decode_step("llama3-8b", 1, 8192)
    graph: fusion.Graph = fusion.bias_gelu(4096, 4096)
    print(plan, step, days, bound, point, tiles, formats, tokens, graph, attention.online([[(1.0, 2.0)]]))
    print(autocast.runs_in, timing.time_ms, testing.assert_close, Cost)
    flops.step_flops(llama, "8", 8192)  # type: ignore[arg-type]
    return float(moved)


def models_of_a_gpu(x: Tensor) -> None:
    def copied(t: simt.Threads, source: simt.Global, target: simt.Global) -> None:
        target[t.index] = source[t.index]

    run: simt.Run = simt.launch(copied, x.numpy(), x.numpy(), grid=1, block=32, detail=True)
    simt.launch(copied, x.numpy(), grid="1", block=32)  # type: ignore[arg-type]
    allocator = Allocator(64 * MIB)
    try:
        allocator.malloc("x", 128 * MIB)
    except OutOfMemory as error:
        print(error)
    print(run, SimulatedGpu, Device)
