"""Matrix multiplication, c = activation(a @ b + bias) + residual, on the tensor cores.

The same kernels, to be read first: `matmul`, `matmul_ordered`, `matmul_split_k` and `linear_gelu` in
solutions/matmul.py.

A program computes one tile of c: along K, block by block, a tile of a and a tile of b are multiplied and added to sums in
registers. With tiles of BLOCK_M x BLOCK_N all programs together read a N / BLOCK_N times and b M / BLOCK_M times, where a
program per element would read them N and M times. What comes after the product is done on the sums before they are
stored, so bias, GELU, SwiGLU and a residual cost no pass over memory of their own.

`matmul_kernel` is the whole idea; it takes any strides and sizes. Where c has few tiles and K is long, SPLIT_K programs
share a tile: each leaves its sums in memory and the last of them adds all, always in the same order. Large matrices go
through gpukit.kernels._matmul_hopper on Hopper, or else through _matmul_persistent there and on later GPUs. The gradients
are two more products, with a and b transposed by their strides alone.

Sources: https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html;
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html
"""

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check_runs, check_tensors
from gpukit.kernels._autograd import differentiable, operator, through_pytorch
from gpukit.kernels._device import for_hopper, multiprocessors, properties
from gpukit.kernels._dtypes import DTYPES, acc_dtype, torch_acc_dtype
from gpukit.kernels._launch import launch
from gpukit.kernels._matmul_choices import FP8, GLUON, GROUP_M, Config, choices, fastest, problem
from gpukit.kernels._matmul_persistent import described, matmul_persistent
from gpukit.kernels._tiles import added, counters, epilogue, is_last, tile_at
from gpukit.kernels.gelu import gelu_bwd_operator, swiglu_bwd_operator

ACTIVATIONS = ("gelu", "gelu_tanh", "swiglu")
PRECISIONS = ("ieee", "tf32")


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, z_ptr, bias_ptr, residual_ptr, scale_ptr, parts_ptr, counters_ptr,
    stride_ab, stride_am, stride_ak,
    stride_bb, stride_bk, stride_bn,
    M, N, K, batches,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """One tile of c per program, or with SPLIT_K > 1 of them, each with its share of K. Their sums go to parts
    [SPLIT_K, batches, M, N] (2 N columns for "swiglu"), and the last of them adds all."""
    GATED: tl.constexpr = ACTIVATION == "swiglu"
    # With fp8 operands the tensor cores of Hopper keep 14 bits of a sum: no longer than one block of K at a time.
    IMPRECISE: tl.constexpr = BLOCK_K if a_ptr.dtype.element_ty == tl.float8e4nv else None
    # One dimension of programs for tile, share and batch: a grid's second and third end at 65,535.
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    pid_m, pid_n = tile_at(pid % (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
    share = pid // (tiles_m * tiles_n)  # of SPLIT_K * batches
    batch = (share % batches).to(tl.int64)

    # int64: a matrix may have more than 2^31 elements, and a row of a transposed one may span as many.
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    # Shares are whole blocks of K, as many each: the last ones may be short, or have none.
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    first = share // batches * steps * BLOCK_K
    offs_k = first + tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + batch * stride_ab + offs_m * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + batch * stride_bb + offs_k[:, None] * stride_bk + offs_n * stride_bn
    # A stride of 1 is a compile-time constant here, which tl.cast takes and .to() does not know.
    step_a, step_b = tl.cast(stride_ak, tl.int64) * BLOCK_K, tl.cast(stride_bk, tl.int64) * BLOCK_K
    # The second half of b's columns. It may lie more than 2^31 elements on, hence int64.
    up_ptrs = b_ptrs + tl.cast(stride_bn, tl.int64) * N

    # The sums stay in registers over all of K, in float32 also for 16-bit operands.
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    up = acc
    for k in tl.range(first, min(first + steps * BLOCK_K, K), BLOCK_K):
        # Zeros beyond the edges: they add nothing to the sums.
        mask_k = k + tl.arange(0, BLOCK_K) < K
        a = tl.load(a_ptrs, mask=(offs_m < M) & mask_k[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=mask_k[:, None] & (offs_n < N), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACC)
        if GATED:
            b = tl.load(up_ptrs, mask=mask_k[:, None] & (offs_n < N), other=0.0)
            up = tl.dot(a, b, up, input_precision=PRECISION, max_num_imprecise_acc=IMPRECISE, out_dtype=ACC)
            up_ptrs += step_b
        # Pointers that move take one addition; computed anew from k they would take a product.
        a_ptrs += step_a
        b_ptrs += step_b

    mask = (offs_m < M) & (offs_n < N)
    if SPLIT_K > 1:
        columns = 2 * N if GATED else N
        # Parts lie share by share, so that the same element of two shares is `size` apart.
        size = tl.cast(batches, tl.int64) * M * columns
        parts = parts_ptr + tl.cast(share, tl.int64) * M * columns + offs_m * columns + offs_n
        tl.store(parts, acc, mask=mask)
        if GATED:
            tl.store(parts + N, up, mask=mask)
        # One counter for each tile of each batch. Whoever counts last sees what the others have stored.
        if not is_last(counters_ptr + pid % (tiles_m * tiles_n * batches), SPLIT_K):
            return
        parts = parts_ptr + batch * M * columns + offs_m * columns + offs_n
        acc = added(parts, size, mask, SPLIT_K)
        if GATED:
            up = added(parts + N, size, mask, SPLIT_K)
    # Only float32 results show the error of the shorter formula for GELU.
    FINE: tl.constexpr = c_ptr.dtype.element_ty == tl.float32
    before = batch * M * N  # elements of c in the batches before this one
    # int64 again: moved here once, so that the epilogue counts from the batch's first row.
    if z_ptr is not None:
        z_ptr += before * (2 if GATED else 1)
    if residual_ptr is not None:
        residual_ptr += before
    y = epilogue(acc, up, z_ptr, bias_ptr, residual_ptr, scale_ptr, offs_m, offs_n, M, N, ACTIVATION, FINE)
    tl.store(c_ptr + before + offs_m * N + offs_n, y, mask=mask)


# ------------------------------------------------------------------------------------------------------------ launchers
def _like(a, b, bias, residual, scale, activation, precision, autotune, save):
    """Room for c and z."""
    rows, columns = a.shape[:-1], b.shape[-1]
    dtype = torch.bfloat16 if a.dtype == FP8 else a.dtype
    N = columns // 2 if activation == "swiglu" else columns
    z = a.new_empty((*rows, columns), dtype=dtype) if save else None
    return a.new_empty((*rows, N), dtype=dtype), z


# What `choices` said of these shapes and strides: asking costs the CPU 20 us.
_known: dict[tuple, tuple[Config, ...]] = {}


def matmul_fwd(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    activation: str,
    precision: str,
    autotune: bool,
    save: bool,
    *,
    config: Config | None = None,
    keep: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """c [batches, M, N] of a [batches, M, K] and b [batches, K, N] (2 N columns for "swiglu"), or [M, N] of [M, K] and [K, N],
    both of any strides, and with `save` what went into the activation. keep: see `counters`."""
    c, z = _like(a, b, bias, residual, scale, activation, precision, autotune, save)
    if c.numel() == 0:
        return c, z
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    after = (z, bias, residual, scale)
    if config is None:
        key = (a.shape, b.shape, a.stride(), b.stride(), a.dtype, precision, activation, a.device)
        captured = a.is_cuda and torch.cuda.is_current_stream_capturing()  # see _by_tma
        at = (*key, (a.data_ptr() | b.data_ptr()) % 16, properties(a.device), captured)
        configs = _known.get(at)
        if configs is None:
            batches = [x if x.ndim == 3 else x.unsqueeze(0) for x in (a, b)]
            configs = choices(problem(*batches, activation, precision))
            if len(_known) >= 10_000:  # sizes that always change
                _known.clear()
            _known[at] = configs
        config = configs[0]
        if autotune:
            run = lambda config: _run(config, a, b, c, after, activation, precision, keep)  # noqa: E731
            with torch.cuda.device_of(a):
                config = fastest(key, configs, run)
    _run(config, a, b, c, after, activation, precision, keep)
    return c, z


@cache
def _constants(config: Config, activation: str, precision: str, dtype: torch.dtype) -> dict:
    """What a kernel is compiled for."""
    if config.GLUON:
        return {
            "ACTIVATION": activation, "BLOCK_N": config.BLOCK_N, "BLOCK_K": config.BLOCK_K, "GROUP_M": GROUP_M,
            "STAGES": config.num_stages, "PIECES": config.PIECES, "num_warps": config.num_warps,
        }  # fmt: skip
    constants = {
        "ACTIVATION": activation,
        "BLOCK_M": config.BLOCK_M,
        "BLOCK_N": config.BLOCK_N,
        "BLOCK_K": config.BLOCK_K,
        "GROUP_M": GROUP_M,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    if config.descriptors:
        return constants | {"PIECES": config.PIECES, "FLATTEN": config.FLATTEN}
    return constants | {"PRECISION": precision, "ACC": acc_dtype(dtype), "SPLIT_K": config.SPLIT_K}


def _run(
    config: Config, a: Tensor, b: Tensor, c: Tensor, after: tuple, activation: str, precision: str, keep: bool
) -> None:
    """Fill c, and z where there is one in `after` = (z, bias, residual, scale). keep: see `counters`."""
    batches = a.shape[0] if a.ndim == 3 else 1
    (M, K), columns, N = a.shape[-2:], b.shape[-1], c.shape[-1]
    constants = _constants(config, activation, precision, a.dtype)
    if config.descriptors:
        along_k = (True, False) if a.dtype == FP8 else (None, None)  # of 8 bits the tensor cores take rows along K only
        by = for_hopper(GLUON, a.device).matmul_hopper if config.GLUON else matmul_persistent
        a, b, c = (x if x.ndim == 2 else x[0] for x in (a, b, c))
        by(described(a, along_k[0]), described(b, along_k[1]), c, *after, multiprocessors(a.device), constants)
        return
    tiles = -(-M // config.BLOCK_M) * -(-N // config.BLOCK_N) * batches
    parts = count = None
    if config.SPLIT_K > 1:
        parts = torch.empty(config.SPLIT_K * batches * M * columns, dtype=torch_acc_dtype(a.dtype), device=a.device)
        count = counters(tiles, a.device, keep)
    a_strides, b_strides = (x.stride() if x.ndim == 3 else (0, *x.stride()) for x in (a, b))  # 0: there is one batch
    launch(
        matmul_kernel, tiles * config.SPLIT_K, a, b, c, *after, parts, count, *a_strides, *b_strides, M, N, K, batches,
        **constants,
    )  # fmt: skip


_operator = operator("matmul", matmul_fwd, like=_like, keep=False)


def product(a: Tensor, b: Tensor, precision: str, autotune: bool = False, *, compiled: bool) -> Tensor:
    """a @ b of matrices, or of as many in a batch, in a backward pass; as an operator where that is `compiled`."""
    return _operator.either(compiled)(a, b, None, None, None, "", precision, autotune, False)[0]


def _keep(inputs: tuple, results: tuple) -> tuple:
    a, b, bias, _, scale, *settings, _ = inputs
    return (a, b, bias, scale, results[1]), settings


def _gradients(backward, ctx, dc: Tensor) -> tuple:
    """Of a, b, bias and residual: da = dz b^T and db = a^T dz, where dz is dc through the activation."""
    compiled = backward is _operator.op
    a, b, bias, scale, z = ctx.saved_tensors
    activation, precision, autotune = ctx.settings
    need_a, need_b, need_bias, need_residual, *_ = ctx.needs_input_grad
    dz = dc
    if activation == "swiglu":
        dz = torch.cat(swiglu_bwd_operator.either(compiled)(dc, *z.chunk(2, dim=-1)), dim=-1)
    elif activation:
        form = "tanh" if activation == "gelu_tanh" else "none"
        dz, _ = gelu_bwd_operator.either(compiled)(dc, z, None, form)
    over = tuple(range(dz.ndim - 1))
    dbias = dz.sum(over, dtype=torch_acc_dtype(dz.dtype)).to(bias.dtype) if need_bias else None
    if scale is not None:
        dz = (dz * scale).to(dz.dtype)
    da = product(dz, b.mT, precision, autotune, compiled=compiled) if need_a else None
    db = product(a.mT, dz, precision, autotune, compiled=compiled) if need_b else None
    return da, db, dbias, dc if need_residual else None


def _second(ctx, dc: Tensor) -> tuple:
    a, b, bias, scale, _ = ctx.saved_tensors
    plain = lambda *given: _plain(*given, scale, ctx.settings[0])  # noqa: E731
    wanted = any(ctx.needs_input_grad[:3])
    found = through_pytorch(plain, (a, b, bias), (dc,)) if wanted else (None,) * 3
    return *found, dc if ctx.needs_input_grad[3] else None


# The gradient is made of several operators, so that torch.compile can fuse what lies between them.
_matmul = differentiable(_operator, _operator, keep=_keep, gradients=_gradients, again=_second)


def _plain(a: Tensor, b: Tensor, bias: Tensor | None, scale: Tensor | None, activation: str) -> Tensor:
    y = a @ b
    y = y if scale is None else (y * scale).to(y.dtype)
    y = y if bias is None else y + bias
    if activation == "swiglu":
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    elif activation:
        y = F.gelu(y, approximate="tanh" if activation == "gelu_tanh" else "none")
    return y


# --------------------------------------------------------------------------------------------------------------- public
def _check_options(op: str, activation: str | None, precision: str) -> None:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be None, {', '.join(map(repr, ACTIVATIONS))}, got {activation!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"{op}: precision must be {' or '.join(map(repr, PRECISIONS))}, got {precision!r}")


def _check_device(op: str, a: Tensor, b: Tensor) -> None:
    check_tensors(op, a=a, b=b)
    for name, x in (("a", a), ("b", b)):
        check_runs(op, name, x)
    if a.device != b.device:
        raise ValueError(f"{op}: a is on {a.device}, b on {b.device}; they must be on one device")


def _check_operands(op: str, a: Tensor, b: Tensor, least: int) -> None:
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in (*DTYPES, FP8):
            raise TypeError(f"{op}: {name} must be float8_e4m3fn, float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.ndim < least:
            dimensions = "one dimension" if least == 1 else "two dimensions"
            raise ValueError(f"{op}: {name} must have at least {dimensions}, got shape {list(x.shape)}")
    if a.dtype != b.dtype:
        raise TypeError(f"{op}: a and b must have one dtype, got {a.dtype} and {b.dtype}")
    if a.shape[-1] != b.shape[-2 if b.ndim > 1 else 0]:
        raise ValueError(
            f"{op}: a [..., M, K] and b [..., K, N] must agree in K, got {list(a.shape)} and {list(b.shape)}"
        )
    if a.dtype == FP8:
        gpu = properties(a.device)
        if gpu is not None and gpu.compute_capability < (8, 9):
            major, minor = gpu.compute_capability
            raise ValueError(f"{op}: float8_e4m3fn needs a GPU of compute capability 8.9 or later, got {major}.{minor}")
        if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
            raise ValueError(f"{op}: a and b in float8_e4m3fn have no gradients; detach them or pass them in 16 bits")


def _check_after(
    op: str, a: Tensor, bias: Tensor | None, residual: Tensor | None, scale: Tensor | None, columns: int, shape: list[int],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """Raise for a bias, residual or scale that does not fit."""
    given = {"bias": bias, "residual": residual, "scale": scale}
    check_tensors(op, **{name: x for name, x in given.items() if x is not None})
    for name, x, wanted in (("bias", bias, [columns]), ("residual", residual, shape)):
        if x is None:
            continue
        if list(x.shape) != wanted:
            raise ValueError(f"{op}: {name} must have the shape {wanted}, got {list(x.shape)}")
        if x.dtype not in DTYPES or (name == "residual" and x.dtype != dtype):
            allowed = str(dtype) if name == "residual" else "float16, bfloat16, float32 or float64"
            raise TypeError(f"{op}: {name} must be {allowed}, got {x.dtype}")
    if scale is not None and (scale.numel() != 1 or scale.dtype != torch.float32):
        raise ValueError(f"{op}: scale must be one float32 number, got {list(scale.shape)} {scale.dtype}")
    for name, x in given.items():
        if x is not None and x.device != a.device:
            raise ValueError(f"{op}: {name} is on {x.device}, a on {a.device}; they must be on one device")


def matmul(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    precision: str = "ieee",
    *,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    autotune: bool = False,
) -> Tensor:
    """activation(a @ b scale + bias) + residual.

    a [..., M, K], b [..., K, N]: float16, bfloat16, float32, float64 or float8_e4m3fn (without gradients; the result is
    bfloat16), any strides, any sizes; leading dimensions are broadcast, and copied where no one stride describes them.
    Sums are kept in float32 (float64 for float64). A vector a [K] is a row and a vector b [K] a column, as in torch.matmul:
    c has no M, or no N, then.
    bias [N], any of these dtypes but fp8. residual: the result's shape and dtype. scale: one float32 number on the
    device, for operands that were scaled to fit into fp8; it gets no gradient.
    activation  None, "gelu", "gelu_tanh", or "swiglu": b then holds 2 N columns, gate before up, as does the bias
    precision   of float32 operands: "ieee", without tensor cores, or "tf32", which keeps 10 bits of their mantissas and is
                many times faster
    autotune    measure every configuration once for these sizes and strides, and keep the fastest; else a model chooses

    Returns c [..., M, N], contiguous, in a's dtype. Under autocast a, b and what is added are first cast, as by
    torch.matmul. Raises TypeError for a dtype, ValueError for a shape, device, activation or precision that does not fit.
    """
    _check_options("matmul", activation, precision)
    _check_device("matmul", a, b)
    if torch.is_autocast_enabled(a.device.type):
        to = torch.get_autocast_dtype(a.device.type)
        a, b, bias, residual = (x.to(to) if _is_cast(x) else x for x in (a, b, bias, residual))
    _check_operands("matmul", a, b, 1)
    is_row, is_column = a.ndim == 1, b.ndim == 1
    a, b = a[None] if is_row else a, b[:, None] if is_column else b
    columns = b.shape[-1]
    if activation == "swiglu" and columns % 2:
        raise ValueError(f"matmul: b must have an even number of columns for 'swiglu', gate and up, got {columns}")
    leading = a.shape[:-2]
    try:
        if b.ndim > 2:
            leading = torch.broadcast_shapes(leading, b.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"matmul: the leading dimensions of a and b must be equal or 1, got {list(a.shape)} and {list(b.shape)}"
        ) from None
    (M, K), N = a.shape[-2:], columns // 2 if activation == "swiglu" else columns
    dtype = torch.bfloat16 if a.dtype == FP8 else a.dtype
    shape = [*leading, *[M] * (not is_row), *[N] * (not is_column)]
    if not (bias is residual is scale is None):
        _check_after("matmul", a, bias, residual, scale, columns, shape, dtype)
    as_it_is = a.ndim == b.ndim == 2 and not (is_row or is_column)
    if b.ndim == 2:  # all rows of a times one matrix, as in a linear layer
        a = a if a.ndim == 2 else a.reshape(a.shape[:-1].numel(), K)
    else:
        batches = leading.numel()
        a = a.expand(*leading, M, K).reshape(batches, M, K)
        b = b.expand(*leading, K, columns).reshape(batches, K, columns)
    if residual is not None:
        residual = residual.reshape(*a.shape[:-1], N)
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, b, bias, residual))
    inputs = (a, b, bias, residual, scale, activation or "", precision, autotune, grad and activation is not None)
    c = _matmul(*inputs) if grad or torch.compiler.is_compiling() else matmul_fwd(*inputs)[0]
    return c if as_it_is else c.view(shape)


def _is_cast(x: Tensor | None) -> bool:
    """Whether autocast casts x: float64 and fp8 it leaves alone."""
    return x is not None and x.dtype in (torch.float16, torch.bfloat16, torch.float32)


def matmul_by_pointers(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N] by `matmul_kernel`, whatever else the GPU could do: what benchmarks compare."""
    _check_device("matmul_by_pointers", a, b)
    _check_operands("matmul_by_pointers", a, b, 2)
    a, b = a[None], b[None]
    config = choices(replace(problem(a, b, "", "ieee"), by_tma=False, in_gluon=False))[0]
    return matmul_fwd(a, b, None, None, None, "", "ieee", False, False, config=config)[0][0]


def matmul_bias_gelu(a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    """gelu(a @ b + bias) in one kernel."""
    return matmul(a, b, bias, "gelu")


class Linear(torch.nn.Linear):
    """torch.nn.Linear with what follows it in one kernel: activation(x @ weight.T + bias) + residual.

    x [..., in_features] -> [..., out_features]. With activation "swiglu" the weight has 2 out_features rows, those of the
    gate first, and `out_features` says their number. activation and precision as in `matmul`, and its errors.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, activation: str | None = None,
        precision: str = "ieee", device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        _check_options("Linear", activation, precision)
        rows = 2 * out_features if activation == "swiglu" else out_features
        super().__init__(in_features, rows, bias, device, dtype)
        self.activation, self.precision = activation, precision

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return matmul(x, self.weight.mT, self.bias, self.activation, self.precision, residual=residual)
