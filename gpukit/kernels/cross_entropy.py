"""Cross-entropy of logits with class indices, and its gradient.

The same kernels, to be read first: `cross_entropy`, `loss_and_gradient_` and `smoothed_cross_entropy` in
solutions/losses.py.

For a row x with lse = log sum(exp x) and target t:
    loss = lse - (1 - s) x[t] - s mean(x) + z lse^2        s: label smoothing, z: weight of the z-loss
    dx   = softmax(x) (1 + 2 z lse) - s / V - (1 - s) [t]
Traffic for M rows of V: forward one read; backward one read, one write. `inplace=True` puts the gradient where the logits
were while it computes the loss: one read and one write for both passes, and no second tensor of the logits' size.

Limits: class weights and class probabilities as targets are not taken; second derivatives are left to PyTorch's
operations, and in place there are none. In float16 the gradient in place exists before a GradScaler's scale reaches it:
what is below 6e-8 is 0 then.
Sources: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html (definitions),
https://arxiv.org/abs/2204.02311 (z-loss), https://arxiv.org/abs/2410.10989 (gradient in place).
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check_dim, check_stored, check_tensors
from gpukit.kernels._autograd import differentiable, operator, through_pytorch
from gpukit.kernels._device import properties
from gpukit.kernels._dtypes import DTYPES, acc_dtype, torch_acc_dtype
from gpukit.kernels._launch import interpreted, launch, power_of_2
from gpukit.kernels._rows import as_rows


@triton.jit
def _exp(x):
    """e^x as 2^(x log2 e), which is one instruction after the product."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _load(x_ptr, start, V, stride_xv, BLOCK_V: tl.constexpr, ACC: tl.constexpr):
    """BLOCK_V logits from `start` on; beyond the row's end -inf, of which exp makes 0."""
    offs_v = start + tl.arange(0, BLOCK_V)
    return tl.load(x_ptr + offs_v * stride_xv, mask=offs_v < V, other=-float("inf")).to(ACC)


@triton.jit
def _join(m, l, x):
    """Running maximum m and sum l of exp(x - m), after one more block."""
    m_new = tl.maximum(m, tl.max(x, axis=0))
    return m_new, l * _exp(m - m_new) + tl.sum(_exp(x - m_new), axis=0)


@triton.jit
def _sum(x, start, V, BLOCK_V: tl.constexpr):
    return tl.sum(tl.where(start + tl.arange(0, BLOCK_V) < V, x, 0.0), axis=0)


@triton.jit
def _store_gradient(
    dx_ptr, x, start, target, m, log_l, scale,
    stride_dxv,
    V,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    # softmax(x) - one-hot(target), smoothed; the z-loss adds a multiple of the softmax.
    offs_v = start + tl.arange(0, BLOCK_V)
    # Not from the log-sum-exp, for its digits: see `cross_entropy_fwd_kernel`.
    dx = _exp(x - m - log_l)
    if Z_LOSS != 0:
        dx *= 1 + 2 * Z_LOSS * (m + log_l)
    if SMOOTHING != 0:
        dx -= SMOOTHING / tl.cast(V, dx.dtype)
    # The one-hot vector is never in memory: one lane of one block is its 1.
    dx = tl.where(offs_v == target, dx - (1 - SMOOTHING), dx) * scale
    tl.store(dx_ptr + offs_v * stride_dxv, dx, mask=offs_v < V)


@triton.jit
def cross_entropy_fwd_kernel(
    x_ptr, target_ptr, loss_ptr, stats_ptr, scale_ptr,
    stride_xm, stride_xv,
    V, ignore_index,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, GRADIENT: tl.constexpr,
    BLOCK_V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One row per program: its loss, and stats [M, 2], in one pass: its maximum m, and log l, the logarithm of its sum of
    exp(x - m). Their sum, the log-sum-exp, has too few digits where logits are large: near 1,000 each probability would be
    wrong by 3e-5. GRADIENT: a second pass overwrites the row with `scale` times its gradient."""
    pid_m = tl.program_id(0).to(tl.int64)  # a row's offset passes 2^31 elements in ordinary batches
    x_ptr += pid_m * stride_xm
    target = tl.load(target_ptr + pid_m).to(tl.int64)
    # A target outside is never read from: its loss becomes NaN, or 0 if it is ignore_index.
    valid = (target >= 0) & (target < V)
    x_target = tl.load(x_ptr + target * stride_xv, mask=valid, other=float("nan")).to(ACC)

    # The maximum starts finite, so that -inf - m is never NaN. A row of -inf alone ends with log 0 and so with -inf.
    m = tl.full([], -3.4028234663852886e38, ACC)
    l = tl.zeros([], ACC)
    # The plain sum of the logits, for smoothing alone.
    total = tl.zeros([], ACC)
    for start in tl.range(BLOCK_V, V, BLOCK_V, num_stages=1):
        x = _load(x_ptr, start, V, stride_xv, BLOCK_V, ACC)
        m, l = _join(m, l, x)
        if SMOOTHING != 0:
            total += _sum(x, start, V, BLOCK_V)
    # The first block comes last and stays in registers: a row of one block is never read twice, of others a block less.
    x = _load(x_ptr, 0, V, stride_xv, BLOCK_V, ACC)
    m, l = _join(m, l, x)
    log_l = tl.log(l)
    # Differences to the maximum first: they are small where the logits are large.
    loss = log_l + (1 - SMOOTHING) * (m - x_target)
    if SMOOTHING != 0:
        loss += SMOOTHING * (m - (total + _sum(x, 0, V, BLOCK_V)) / V)
    if Z_LOSS != 0:
        loss += Z_LOSS * (m + log_l) * (m + log_l)
    tl.store(loss_ptr + pid_m, tl.where(target == ignore_index, 0.0, loss))
    tl.store(stats_ptr + 2 * pid_m + tl.arange(0, 2), tl.join(m, log_l))

    if GRADIENT:
        # A row that does not count still gets its gradient: zeros, in place of the logits.
        scale = tl.where(target == ignore_index, 0.0, tl.load(scale_ptr).to(ACC))
        _store_gradient(x_ptr, x, 0, target, m, log_l, scale, stride_xv, V, SMOOTHING, Z_LOSS, BLOCK_V)
        # Backwards: what was read last is still in a cache.
        last = (V - 1) // BLOCK_V * BLOCK_V
        for behind in tl.range(0, last, BLOCK_V, num_stages=1):
            x = _load(x_ptr, last - behind, V, stride_xv, BLOCK_V, ACC)
            _store_gradient(x_ptr, x, last - behind, target, m, log_l, scale, stride_xv, V, SMOOTHING, Z_LOSS, BLOCK_V)


@triton.jit
def cross_entropy_bwd_kernel(
    x_ptr, target_ptr, stats_ptr, dloss_ptr, dx_ptr,
    stride_xm, stride_xv, stride_dloss,
    V, ignore_index,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, BLOCK_V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A block of a row per program, in a grid of one dimension: the other two end at 65,535."""
    blocks = tl.cdiv(V, BLOCK_V)
    pid_m = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK_V
    target = tl.load(target_ptr + pid_m).to(tl.int64)
    scale = tl.where(target == ignore_index, 0.0, tl.load(dloss_ptr + pid_m * stride_dloss).to(ACC))
    m, log_l = tl.split(tl.load(stats_ptr + 2 * pid_m + tl.arange(0, 2)))
    x = _load(x_ptr + pid_m * stride_xm, start, V, stride_xv, BLOCK_V, ACC)
    _store_gradient(dx_ptr + pid_m * V, x, start, target, m, log_l, scale, 1, V, SMOOTHING, Z_LOSS, BLOCK_V)


@triton.jit
def scale_rows_kernel(x_ptr, scale_ptr, stride_xm, stride_xv, stride_scale, V, BLOCK_V: tl.constexpr):
    """One row per program: x *= scale, in place. Where the scale is 1, as after loss.backward(), no row is read: as many
    programs as blocks would take 150 µs to find that out for 4,096 x 128,256."""
    pid_m = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + pid_m * stride_scale)
    if scale != 1.0:
        for start in tl.range(0, V, BLOCK_V):
            offs_v = start + tl.arange(0, BLOCK_V)
            at_ptr = x_ptr + pid_m * stride_xm + offs_v * stride_xv
            tl.store(at_ptr, tl.load(at_ptr, mask=offs_v < V) * scale, mask=offs_v < V)


def _row_config(V: int, dtype: torch.dtype, gradient: bool) -> dict:
    """Blocks and warps; times of an H200, bf16, 4,096 rows.

    The loss alone is one stream: blocks of 8,192 read 128,256 logits in 274 µs (16,384: 304, 32,768: 382). With the
    gradient a row is read twice, the second time from L2 if few rows are under way at a time, so long rows get all warps:
    737 µs, and 750 with 8. Rows that begin anywhere are loaded element by element: 50,257 in 425 µs, 659 with 8 warps."""
    BLOCK_V, num_warps = 8192, 8
    if gradient and V % 8:
        num_warps = 32
    elif gradient and V > 65536:
        BLOCK_V, num_warps = 16384, 32
    BLOCK_V = min(power_of_2(V), BLOCK_V)
    return {"BLOCK_V": BLOCK_V, "ACC": acc_dtype(dtype), "num_warps": min(max(BLOCK_V // 256, 1), num_warps)}


def _stream_config(V: int) -> dict:
    BLOCK_V = min(power_of_2(V), 2048)
    return {"BLOCK_V": BLOCK_V, "num_warps": min(max(BLOCK_V // 512, 1), 4)}


def cross_entropy_fwd(
    x: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, *, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Losses [M] and stats [M, 2] of x [M, V]. With `scale`, a scalar tensor, x becomes scale times its gradient."""
    M, V = x.shape
    if properties(x.device) is None:  # on a GPU, looking would make the CPU wait; there the loss is NaN
        outside = (target != ignore_index) & ((target < 0) | (target >= V))
        if bool(outside.any()):
            raise IndexError(
                f"target must be in [0, {V}) or ignore_index = {ignore_index}, got {int(target[outside][0])}"
            )
    losses, stats = (torch.empty(n, dtype=torch_acc_dtype(x.dtype), device=x.device) for n in (M, (M, 2)))
    if M:
        launch(
            cross_entropy_fwd_kernel, M, x, target, losses, stats, scale, *x.stride(), V, ignore_index,
            SMOOTHING=label_smoothing, Z_LOSS=z_loss, GRADIENT=scale is not None,
            **_row_config(V, x.dtype, scale is not None),
        )  # fmt: skip
    return losses, stats


def cross_entropy_bwd(
    x: Tensor, target: Tensor, stats: Tensor, dloss: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    """dx [M, V], contiguous, for the gradients dloss [M] of the losses."""
    M, V = x.shape
    dx = torch.empty((M, V), dtype=x.dtype, device=x.device)
    if M:
        config = _stream_config(V)
        launch(
            cross_entropy_bwd_kernel, M * -(-V // config["BLOCK_V"]),
            x, target, stats, dloss, dx, *x.stride(), dloss.stride(0), V, ignore_index,
            SMOOTHING=label_smoothing, Z_LOSS=z_loss, ACC=acc_dtype(x.dtype), **config,
        )  # fmt: skip
    return dx


def scale_rows(x: Tensor, scale: Tensor) -> None:
    """x [M, V] *= scale [M], in place."""
    M, V = x.shape
    if M:
        launch(scale_rows_kernel, M, x, scale, *x.stride(), scale.stride(0), V, **_stream_config(V))


def reduced(losses: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The losses [M] as PyTorch's `reduction` of them; the mean is over the targets that count."""
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (target != ignore_index).sum()


def _plain(x: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float) -> Tensor:
    """The losses [M] in PyTorch's operations, for second derivatives."""
    x = x.to(torch_acc_dtype(x.dtype))
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "none"}
    losses = F.cross_entropy(x, target.long(), **options)
    return losses + z_loss * torch.where(target == ignore_index, 0.0, x.logsumexp(-1).square()) if z_loss else losses


def _second(ctx, dloss: Tensor) -> tuple:
    x, target, _ = ctx.saved_tensors
    return through_pytorch(lambda x: _plain(x, target, *ctx.settings), (x,), (dloss,))


# The losses of the rows, whose gradient reads the logits again. The reduction is outside, where torch.compile can fuse it.
_losses = differentiable(
    operator(
        "cross_entropy",
        cross_entropy_fwd,
        like=lambda x, *_: tuple(x.new_empty(n, dtype=torch_acc_dtype(x.dtype)) for n in (len(x), (len(x), 2))),
    ),
    operator("cross_entropy_bwd", cross_entropy_bwd, like=lambda x, *_: x.new_empty(x.shape)),
    keep=lambda inputs, results: ((*inputs[:2], results[1]), inputs[2:]),
    gradients=lambda backward, ctx, dloss: backward(*ctx.saved_tensors, dloss, *ctx.settings),
    again=_second,
)


class InplaceFunction(torch.autograd.Function):
    """The reduced loss. The gradient takes the place of the logits at once, and backward() hands it out."""

    @staticmethod
    def forward(ctx, x: Tensor, target: Tensor, reduction: str, *settings) -> Tensor:
        scale = torch.ones((), dtype=torch_acc_dtype(x.dtype), device=x.device)
        if reduction == "mean":
            scale /= (target != settings[0]).sum()
        losses, _ = cross_entropy_fwd(x, target, *settings, scale=scale)
        # Autograd stops whoever saved the logits for a gradient and would find ours there.
        torch.autograd.graph.increment_version(x)
        ctx.dx = x.detach()  # save_for_backward refuses what was changed
        return reduced(losses, target, settings[0], reduction)

    @staticmethod
    def backward(ctx, dloss: Tensor):
        if torch.is_grad_enabled():
            raise RuntimeError("cross_entropy: inplace=True has no second derivative, which create_graph=True asks for")
        if ctx.dx is None:
            raise RuntimeError(
                "cross_entropy: backward ran twice, and with inplace=True the first has used the gradient"
            )
        dx, ctx.dx = ctx.dx, None
        scale_rows(dx, dloss.reshape(-1).expand(len(dx)))
        return dx, None, None, None, None, None


def _lies_apart(x: Tensor) -> bool:
    """Whether no two elements of x share their memory."""
    reach = 0
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def check(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    z_loss: float,
    dim: int = -1,
) -> None:
    check_tensors("cross_entropy", logits=logits, target=target)
    if logits.dtype not in DTYPES:
        raise TypeError(f"cross_entropy: logits must be float16, bfloat16, float32 or float64, got {logits.dtype}")
    if target.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"cross_entropy: target must hold class indices, int64 or int32, got {target.dtype}")
    if logits.ndim == 0 or logits.movedim(dim, -1).shape[-1] == 0 or target.shape != logits.movedim(dim, -1).shape[:-1]:
        raise ValueError(
            f"cross_entropy: logits [..., V] need a target [...] and at least one class, got {list(logits.shape)} and "
            f"{list(target.shape)}" + (f", V being dimension {dim}" if dim != -1 else "")
        )
    if logits.device != target.device or not (logits.is_cuda or interpreted()):
        raise ValueError(
            f"cross_entropy: logits are on {logits.device} and target on {target.device}; Triton needs both on one GPU "
            "here, or TRITON_INTERPRET=1 before Python starts"
        )
    top = torch.iinfo(target.dtype).max
    if not (isinstance(ignore_index, int) and -top <= ignore_index <= top):
        raise TypeError(
            f"cross_entropy: ignore_index must be an integer of target's {target.dtype}, got {ignore_index!r}"
        )
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"cross_entropy: reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"cross_entropy: label_smoothing must be between 0 and 1, got {label_smoothing}")
    if not 0 <= z_loss < float("inf"):
        raise ValueError(f"cross_entropy: z_loss must be 0 or more, got {z_loss}")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    *,
    dim: int = -1,
    z_loss: float = 0.0,
    inplace: bool = False,
) -> Tensor:
    """Cross-entropy of logits [..., V] with class indices target [...].

    logits float16, bfloat16, float32 or float64, any strides; target int64 or int32. Computed in float32 (float64 for
    float64), and the loss is returned so: a mean loss in bfloat16 would have two digits. reduction "none" gives [...].
    dim: which dimension of the logits is V, the last or, as in torch.nn.functional.cross_entropy's [N, V, d1, ...], 1; where
    another one follows, the logits are copied.
    z_loss adds z_loss * (log sum exp)^2 to each loss. inplace: the logits' memory holds their gradient afterwards, so
    they must be the result of an operation (not a parameter) and must not be read again, and backward() runs once;
    torch.compile computes the same out of place.

    Raises TypeError and ValueError for what does not fit, IndexError for a target outside [0, V) on the CPU; on a GPU such
    a target makes the loss NaN.
    """
    if dim != -1:
        check_tensors("cross_entropy", logits=logits)
        check_dim("cross_entropy", "logits", dim, logits)
    check(logits, target, ignore_index, label_smoothing, reduction, z_loss, dim)
    check_stored("cross_entropy", "logits", logits)
    if dim != -1:
        logits = logits.movedim(dim, -1)
    settings = (ignore_index, float(label_smoothing), float(z_loss))
    flat = target.reshape(-1).contiguous()
    if inplace and not torch.compiler.is_compiling():
        try:
            x = logits.view(-1, logits.shape[-1])
        except RuntimeError:
            raise ValueError(
                f"cross_entropy: inplace=True needs logits whose rows are evenly spaced, got strides {logits.stride()} "
                f"for shape {list(logits.shape)}"
            ) from None
        if not _lies_apart(x):
            raise ValueError(
                "cross_entropy: inplace=True needs logits that each have memory of their own, got strides "
                f"{logits.stride()} for shape {list(logits.shape)}"
            )
        loss = InplaceFunction.apply(x, flat, reduction, *settings)
        return loss.view(target.shape) if reduction == "none" else loss
    x = as_rows(logits)
    return reduced(_losses(x, flat, *settings), target, ignore_index, reduction)


def cross_entropy_inplace(logits: Tensor, target: Tensor, **options) -> Tensor:
    """cross_entropy(logits, target, inplace=True, ...): afterwards the logits are gone."""
    return cross_entropy(logits, target, **options, inplace=True)
