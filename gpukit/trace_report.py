"""What one call of a kernel moves, compiles to and takes, without a GPU: `gpukit trace softmax --shape 4096x4096`.

Everything here is counted or modelled by gpukit.simulator; this module makes the inputs, which need no memory, and puts
the answers one below the other.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable

import torch

from gpukit import benchmark, dispatch, hardware, tables
from gpukit.accounting import roofline
from gpukit.op import Cost, Op
from gpukit.simulator.prediction.predict import Prediction, Step, predict

DTYPES = {name: getattr(torch, long) for name, long in benchmark.DTYPES.items()}


def command(op: str, shape: str | None, dtype: str, gpu: str) -> str:
    """What `gpukit trace` prints. Raises ValueError for what does not fit."""
    benchmark.refuse_unknown(op, shape, dtype)
    found = benchmark.operation(op)
    sizes = found.bench_shapes[0] if shape is None else tuple(map(int, shape.lower().split("x")))
    return report(found, sizes, DTYPES[dtype], hardware.gpu(gpu))


def report(op: Op, shape: tuple[int, ...], dtype: torch.dtype, gpu: hardware.Gpu) -> str:
    """Traffic, compile facts and predicted time of the forward pass of our kernel, as text. Needs the interpreter
    (TRITON_INTERPRET=1). Raises ValueError for an operation without a kernel and a shape or dtype that does not fit."""
    prediction = predict_op(op, shape, dtype, gpu)
    least = op.cost(shape, dtype)
    what = f"{op.name} {benchmark.shape_name(shape)} {str(dtype).removeprefix('torch.')} on {gpu.name}, forward"
    at_best = f"{least.bytes / gpu.hbm_gbps / 1e3:,.1f} µs at {gpu.hbm_gbps:,.0f} GB/s"
    lines = [
        f"{what}: traffic is counted, machine code compiled, time modelled; no GPU took part",
        *tables.facts(
            [("least traffic", f"{least.read_bytes:,} bytes read, {least.write_bytes:,} written; {at_best}")]
        ),
    ]
    lines = [tables.folded(line) for line in (*lines, *_roofline(op, least, dtype, gpu, prediction.time_us))]
    for step in prediction.steps:
        if step.launch is not None:
            lines += ["", *_step_lines(step)]
    return "\n".join([*lines, "", "PREDICTED TIME", prediction.report()])


def _roofline(op: Op, least: Cost, dtype: torch.dtype, gpu: hardware.Gpu, time_us: float) -> list[str]:
    """Where the kernel lies below the roof: its useful FLOPs and least bytes, in the time that is predicted."""
    name = next(short for short, long in DTYPES.items() if long is dtype)
    if not least.flops or name not in gpu.peak_flops:
        return []
    point = roofline.Point(op.name, least.flops, least.bytes, time_us, "modelled")
    where = f"{point.intensity:.3g} FLOPs per byte, {roofline.limit(gpu, name, point.intensity)} side of the ridge at "
    share = f"{point.least_us(gpu, name) / time_us:.0%} of the roof"
    return tables.facts([("roofline", f"{where}{gpu.ridge(name):.3g}; {share} (modelled)")])


def _step_lines(step: Step) -> list[str]:
    launch, compiled = step.launch, step.compiled
    how = "" if launch.sampled == launch.programs else f", {launch.sampled} of them looked at"
    lines = [f"TRAFFIC of {launch.kernel}, {launch.programs:,} programs{how}", launch.report()]
    try:
        traffic = launch.traffic(compiled.gpu, compiled)
    except ValueError as error:  # too many irregular accesses
        facts = {"caches": str(error)}
    else:
        found = f"{traffic.l2_hit_rate:.0%} of the reads found there"
        dirty = f", {traffic.dirty_bytes:,} more still in L2 at the end" if traffic.dirty_bytes else ""
        changed = f", {traffic.l2_atomic_sectors:,} changed by atomics" if traffic.l2_atomic_sectors else ""
        facts = {
            "L2": f"{traffic.l2_read_sectors:,} sectors read, {traffic.l2_write_sectors:,} written{changed}; {found}",
            "device memory": f"{traffic.dram_read_bytes:,} bytes read, {traffic.dram_write_bytes:,} written{dirty}",
        }
    lines += ["", *tables.facts(facts.items())]
    return [*lines, "", f"MACHINE CODE of {launch.kernel}", compiled.report()]


def predict_op(op: Op, shape: tuple[int, ...], dtype: torch.dtype, gpu: hardware.Gpu) -> Prediction:
    """The prediction for the forward pass of gpukit's kernel; its steps hold the traced launches and the machine code.
    Needs the interpreter. Raises ValueError as `report` does."""
    kernel = _kernel(op)
    own = ", ".join(map(benchmark.shape_name, op.bench_shapes))
    wrong = f"--shape {benchmark.shape_name(shape)} does not fit {op.name} (its benchmark shapes: {own})"
    least = op.cost(shape, dtype) if len(shape) == len(op.bench_shapes[0]) else None
    if least is not None and least.bytes > gpu.hbm_bytes:
        raise ValueError(
            f"--shape {benchmark.shape_name(shape)}: {op.name} moves at least {least.bytes / 1e9:,.0f} GB, and "
            f"{gpu.name} has {gpu.hbm_bytes / 1e9:,.0f} GB"
        )
    with Sizes(), hardware.imagined(gpu):
        try:
            inputs = op.make_inputs(shape, dtype, torch.Generator().manual_seed(0))
        except (ValueError, IndexError, TypeError, RuntimeError) as error:
            if "values to unpack" in str(error):
                takes = len(op.bench_shapes[0])
                raise ValueError(f"{wrong}: it takes {takes} sizes, and these are {len(shape)}") from None
            raise ValueError(f"{wrong}: {error}") from None
        try:
            call = op.build(kernel, inputs) if op.build else lambda: kernel(*inputs)
            return predict(call, gpu=gpu)
        except (TypeError, IndexError) as error:
            raise ValueError(f"{wrong}: {error}") from None


def _kernel(op: Op) -> Callable:
    try:
        found = benchmark.provider(op, "gpukit")
    except AttributeError:
        found = None
    if found is None:
        raise ValueError(f"{op.name} cannot be traced: gpukit.kernels has no {op.kernel or op.name}")
    return found


class Sizes(dispatch.Mode):
    """Inside the block PyTorch's floating-point results on the CPU have a size and no values: their memory is promised
    and never touched, so that a tensor larger than this machine costs nothing. Integers are computed, since they may be
    indices."""

    def operation(self, func, args, kwargs):
        try:
            return self._run(func, args, kwargs)
        except (RuntimeError, OSError) as error:
            if not isinstance(error, OSError) and "can't allocate memory" not in str(error):
                raise
            raise ValueError(f"{func} needs a tensor larger than this machine can promise") from None

    def _run(self, func, args, kwargs):
        name = func._schema.name.split("::")[-1]
        returned = [r.alias_info for r in func._schema.returns]
        views = any(alias is not None and not alias.is_write for alias in returned)
        given = dispatch.tensors((args, kwargs))
        floats = any(x.is_floating_point() for x in given)
        if name.startswith(("empty", "new_empty")):
            return _to_cpu(func(*_to_meta(args), **_to_meta({**kwargs, "device": "meta"})))
        if views or name == "_local_scalar_dense" or (given and not floats):
            return func(*args, **kwargs)
        written = [
            (args[i] if i < len(args) else kwargs.get(a.name))
            for i, a in enumerate(func._schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        if written:
            return written[0] if len(returned) == 1 else tuple(written) if returned else None
        if not given:  # one that makes a tensor of nothing; what it counts or draws in integers is needed
            fills = name in ("rand", "randn", "ones") and (kwargs.get("dtype") or torch.float32).is_floating_point
            return (
                _to_cpu(torch.empty(args[0], dtype=kwargs.get("dtype"), device="meta"))
                if fills
                else func(*args, **kwargs)
            )
        has_device = any(a.name == "device" for a in func._schema.arguments)
        out = func(*_to_meta(args), **_to_meta({**kwargs, **({"device": "meta"} if has_device else {})}))
        return _to_cpu(out)


def _to_meta(values):
    return dispatch.map_tensors(
        lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), values
    )


def _to_cpu(values):
    return dispatch.map_tensors(lambda x: _promised(x).as_strided(x.shape, x.stride()), values)


_NORESERVE = 0x4000  # of Linux' sys/mman.h; Python has a name for it from 3.13 on


def _promised(like: torch.Tensor) -> torch.Tensor:
    """Zeros for as many elements as `like` spans, in pages that exist once somebody writes to them."""
    last = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    elements = 1 + last if like.numel() else 1
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    return torch.frombuffer(mmap.mmap(-1, elements * like.element_size(), flags=flags), dtype=like.dtype)
