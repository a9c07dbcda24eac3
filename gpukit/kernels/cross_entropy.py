"""Cross-entropy of logits with class indices, or with a probability for each class, and its gradient.

The same kernels, to be read first: `cross_entropy`, `loss_and_gradient_` and `smoothed_cross_entropy` in
solutions/losses.py.

For a row x with lse = log sum(exp x) and target t:
    loss = lse - (1 - s) x[t] - s mean(x) + z lse^2        s: label smoothing, z: weight of the z-loss
    dx   = softmax(x) (1 + 2 z lse) - s / V - (1 - s) [t]
With class weights w, or probabilities t in place of the index, each class has a share q of the row's loss:
    q    = w ((1 - s) t + s / V)          t: 1 at the index and else 0, where there is an index
    loss = sum q (lse - x) + z lse^2      dx = softmax(x) (sum q + 2 z lse) - q
Traffic for M rows of V: forward one read; backward one read, one write; probabilities are read once more in each.
`inplace=True` puts the gradient where the logits were while it computes the loss: one read and one write for both passes,
and no second tensor of the logits' size. The kernel here reads a long row twice, the second time mostly from a cache; on Hopper
in gpukit.kernels._cross_entropy_shared several programs share it, and each logit is read once.

Limits: the gradient of probabilities is left to PyTorch's operations, weights have none; second derivatives are left to
PyTorch's operations, and in place there are none. In float16 the gradient in place exists before a GradScaler's scale reaches it:
what is below 6e-8 is 0 then.
Sources: https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html (definitions),
https://arxiv.org/abs/2204.02311 (z-loss), https://arxiv.org/abs/2410.10989 (gradient in place).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpukit.kernels._arguments import check_dim, check_stored, check_tensors
from gpukit.kernels._autograd import differentiable, operator, through_pytorch
from gpukit.kernels._class_losses import check, checked_weight, count, in_pytorch, is_soft, lies_apart, reduced
from gpukit.kernels._device import properties
from gpukit.kernels._dtypes import acc_dtype, torch_acc_dtype
from gpukit.kernels._launch import launch, power_of_2
from gpukit.kernels._rows import as_rows
from gpukit.kernels._rows_choices import shared


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
def _spread(
    target_ptr, weight_ptr, start, V, stride_tv,
    SMOOTHING: tl.constexpr, SOFT: tl.constexpr, BLOCK_V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The shares q of a block of classes, without that of an index, which has (1 - SMOOTHING) of its weight on top."""
    offs_v = start + tl.arange(0, BLOCK_V)
    q = tl.zeros([BLOCK_V], ACC)
    if SOFT:
        t = tl.load(target_ptr + offs_v * stride_tv, mask=offs_v < V, other=0.0).to(ACC)
        q = t * (1 - SMOOTHING)
    if SMOOTHING != 0:
        q += SMOOTHING / tl.cast(V, ACC)
    if weight_ptr is not None:
        q *= tl.load(weight_ptr + offs_v, mask=offs_v < V, other=0.0).to(ACC)
    return tl.where(offs_v < V, q, 0.0)


@triton.jit
def _add_shares(mass, loss, m_old, m, x, q, start, V, BLOCK_V: tl.constexpr):
    """The shares' sum, and the sum of q (m - x) as seen from the new maximum m, after one more block."""
    # Nothing has been summed before the first block, whose m_old is no maximum of anything.
    loss += tl.where(mass == 0, 0.0, mass * (m - m_old))
    return mass + tl.sum(q, axis=0), loss + _sum(q * (m - x), start, V, BLOCK_V)


@triton.jit
def _store_gradient(
    dx_ptr, x, start, target, m, log_l, scale,
    stride_dxv,
    V,
    target_ptr, weight_ptr, weight, mass, stride_tv,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SHARES: tl.constexpr, SOFT: tl.constexpr,
    BLOCK_V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """weight: of the class at the index; mass: the sum of the row's shares; these and what they need with SHARES alone."""
    # softmax(x) - one-hot(target), smoothed; the z-loss adds a multiple of the softmax.
    offs_v = start + tl.arange(0, BLOCK_V)
    # Not from the log-sum-exp, for its digits: see `cross_entropy_fwd_kernel`.
    dx = _exp(x - m - log_l)
    if SHARES:
        # softmax(x) as often as the shares ask for it, minus the shares.
        if Z_LOSS != 0:
            dx *= mass + 2 * Z_LOSS * (m + log_l)
        else:
            dx *= mass
        if SOFT or SMOOTHING != 0:
            dx -= _spread(target_ptr, weight_ptr, start, V, stride_tv, SMOOTHING, SOFT, BLOCK_V, ACC)
        if not SOFT:
            dx = tl.where(offs_v == target, dx - (1 - SMOOTHING) * weight, dx)
        tl.store(dx_ptr + offs_v * stride_dxv, dx * scale, mask=offs_v < V)
        return
    if Z_LOSS != 0:
        dx *= 1 + 2 * Z_LOSS * (m + log_l)
    if SMOOTHING != 0:
        dx -= SMOOTHING / tl.cast(V, dx.dtype)
    # The one-hot vector is never in memory: one lane of one block is its 1.
    dx = tl.where(offs_v == target, dx - (1 - SMOOTHING), dx) * scale
    tl.store(dx_ptr + offs_v * stride_dxv, dx, mask=offs_v < V)


@triton.jit
def cross_entropy_fwd_kernel(
    x_ptr, target_ptr, loss_ptr, stats_ptr, scale_ptr, weight_ptr, mass_ptr,
    stride_xm, stride_xv, stride_tm, stride_tv,
    V, ignore_index,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, GRADIENT: tl.constexpr, SHARES: tl.constexpr, SOFT: tl.constexpr,
    BLOCK_V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One row per program: its loss, and stats [M, 2], in one pass: its maximum m, and log l, the logarithm of its sum of
    exp(x - m). Their sum, the log-sum-exp, has too few digits where logits are large: near 1,000 each probability would be
    wrong by 3e-5. GRADIENT: a second pass overwrites the row with `scale` times its gradient.

    SHARES: there are class weights [V] at weight_ptr, which may be None else, or with SOFT probabilities [M, V] at
    target_ptr, and mass [M] gets the sum of each row's shares. stride_tm and stride_tv are those of probabilities, or None."""
    pid_m = tl.program_id(0).to(tl.int64)  # a row's offset passes 2^31 elements in ordinary batches
    x_ptr += pid_m * stride_xm
    if SOFT:
        target_ptr += pid_m * stride_tm
        target = tl.full([], -1, tl.int64)  # no class, and not ignore_index, which is NO_INDEX
        weight = tl.zeros([], ACC)
    else:
        target = tl.load(target_ptr + pid_m).to(tl.int64)
        # A target outside is never read from: its loss becomes NaN, or 0 if it is ignore_index.
        valid = (target >= 0) & (target < V)
        x_target = tl.load(x_ptr + target * stride_xv, mask=valid, other=float("nan")).to(ACC)
        if SHARES:
            weight = tl.load(weight_ptr + target, mask=valid, other=0.0).to(ACC)
        else:
            weight = tl.zeros([], ACC)

    # The maximum starts finite, so that -inf - m is never NaN. A row of -inf alone ends with log 0 and so with -inf.
    m = tl.full([], -3.4028234663852886e38, ACC)
    l = tl.zeros([], ACC)
    # The plain sum of the logits, for smoothing alone.
    total = tl.zeros([], ACC)
    # The sum of all shares but the index's, and of q (m - x), where shares are not the same for all classes.
    mass = tl.zeros([], ACC)
    loss = tl.zeros([], ACC)
    SPREAD: tl.constexpr = SHARES and (SOFT or SMOOTHING != 0)
    for start in tl.range(BLOCK_V, V, BLOCK_V, num_stages=1):
        x = _load(x_ptr, start, V, stride_xv, BLOCK_V, ACC)
        m_old = m
        m, l = _join(m, l, x)
        if SPREAD:
            q = _spread(target_ptr, weight_ptr, start, V, stride_tv, SMOOTHING, SOFT, BLOCK_V, ACC)
            mass, loss = _add_shares(mass, loss, m_old, m, x, q, start, V, BLOCK_V)
        elif SMOOTHING != 0:
            total += _sum(x, start, V, BLOCK_V)
    # The first block comes last and stays in registers: a row of one block is never read twice, of others a block less.
    x = _load(x_ptr, 0, V, stride_xv, BLOCK_V, ACC)
    m_old = m
    m, l = _join(m, l, x)
    log_l = tl.log(l)
    # Differences to the maximum first: they are small where the logits are large.
    if SHARES:
        if SPREAD:
            q = _spread(target_ptr, weight_ptr, 0, V, stride_tv, SMOOTHING, SOFT, BLOCK_V, ACC)
            mass, loss = _add_shares(mass, loss, m_old, m, x, q, 0, V, BLOCK_V)
        if not SOFT:
            mass += (1 - SMOOTHING) * weight
            loss += (1 - SMOOTHING) * weight * (m - x_target)
        loss += mass * log_l
        tl.store(mass_ptr + pid_m, mass)
    else:
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
        _store_gradient(
            x_ptr, x, 0, target, m, log_l, scale, stride_xv, V, target_ptr, weight_ptr, weight, mass, stride_tv,
            SMOOTHING, Z_LOSS, SHARES, SOFT, BLOCK_V, ACC,
        )  # fmt: skip
        # Backwards: what was read last is still in a cache.
        last = (V - 1) // BLOCK_V * BLOCK_V
        for behind in tl.range(0, last, BLOCK_V, num_stages=1):
            x = _load(x_ptr, last - behind, V, stride_xv, BLOCK_V, ACC)
            _store_gradient(
                x_ptr, x, last - behind, target, m, log_l, scale, stride_xv, V,
                target_ptr, weight_ptr, weight, mass, stride_tv, SMOOTHING, Z_LOSS, SHARES, SOFT, BLOCK_V, ACC,
            )  # fmt: skip


@triton.jit
def cross_entropy_bwd_kernel(
    x_ptr, target_ptr, stats_ptr, dloss_ptr, dx_ptr, weight_ptr, mass_ptr,
    stride_xm, stride_xv, stride_dloss, stride_tm, stride_tv,
    V, ignore_index,
    SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SHARES: tl.constexpr, SOFT: tl.constexpr,
    BLOCK_V: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """A block of a row per program, in a grid of one dimension: the other two end at 65,535."""
    blocks = tl.cdiv(V, BLOCK_V)
    pid_m = (tl.program_id(0) // blocks).to(tl.int64)
    start = tl.program_id(0) % blocks * BLOCK_V
    if SOFT:
        target_ptr += pid_m * stride_tm
        target = tl.full([], -1, tl.int64)
    else:
        target = tl.load(target_ptr + pid_m).to(tl.int64)
    scale = tl.where(target == ignore_index, 0.0, tl.load(dloss_ptr + pid_m * stride_dloss).to(ACC))
    weight = tl.zeros([], ACC)
    mass = weight
    if SHARES:
        mass = tl.load(mass_ptr + pid_m)
        if not SOFT:
            weight = tl.load(weight_ptr + target, mask=(target >= 0) & (target < V), other=0.0).to(ACC)
    m, log_l = tl.split(tl.load(stats_ptr + 2 * pid_m + tl.arange(0, 2)))
    x = _load(x_ptr + pid_m * stride_xm, start, V, stride_xv, BLOCK_V, ACC)
    _store_gradient(
        dx_ptr + pid_m * V, x, start, target, m, log_l, scale, 1, V, target_ptr, weight_ptr, weight, mass, stride_tv,
        SMOOTHING, Z_LOSS, SHARES, SOFT, BLOCK_V, ACC,
    )  # fmt: skip


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


# What stands for ignore_index where targets are probabilities.
NO_INDEX = -100


def _shares(target: Tensor, weight: Tensor | None) -> tuple[dict, tuple]:
    """The kernels' flags, and the strides of probabilities."""
    soft = is_soft(target)
    return {"SHARES": soft or weight is not None, "SOFT": soft}, target.stride() if soft else (None, None)


def cross_entropy_fwd(
    x: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    weight: Tensor | None = None,
    *,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Losses [M], stats [M, 2] and mass [M] of x [M, V], the target [M] or [M, V] and class weights [V], which are contiguous;
    without weights and probabilities there is no mass. With `scale`, a scalar tensor, x becomes scale times its gradient."""
    M, V = x.shape
    soft = is_soft(target)
    if properties(x.device) is None and not soft:  # on a GPU, looking would make the CPU wait; there the loss is NaN
        outside = (target != ignore_index) & ((target < 0) | (target >= V))
        if bool(outside.any()):
            raise IndexError(
                f"target must be in [0, {V}) or ignore_index = {ignore_index}, got {int(target[outside][0])}"
            )
    losses, stats = (torch.empty(n, dtype=torch_acc_dtype(x.dtype), device=x.device) for n in (M, (M, 2)))
    flags, strides = _shares(target, weight)
    mass = torch.empty_like(losses) if flags["SHARES"] else None
    plain = scale is not None and not flags["SHARES"] and label_smoothing == 0
    if plain and M and (on_hopper := shared("cross_entropy", x)):
        on_hopper.cross_entropy_parts(x, target, losses, stats, scale, ignore_index, z_loss)
    elif M:
        launch(
            cross_entropy_fwd_kernel, M, x, target, losses, stats, scale, weight, mass, *x.stride(), *strides,
            V, NO_INDEX if soft else ignore_index,
            SMOOTHING=label_smoothing, Z_LOSS=z_loss, GRADIENT=scale is not None, **flags,
            **_row_config(V, x.dtype, scale is not None),
        )  # fmt: skip
    return losses, stats, mass


def cross_entropy_bwd(
    x: Tensor,
    target: Tensor,
    stats: Tensor,
    dloss: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    weight: Tensor | None = None,
    mass: Tensor | None = None,
) -> Tensor:
    """dx [M, V], contiguous, for the gradients dloss [M] of the losses."""
    M, V = x.shape
    dx = torch.empty((M, V), dtype=x.dtype, device=x.device)
    if M:
        config = _stream_config(V)
        flags, strides = _shares(target, weight)
        launch(
            cross_entropy_bwd_kernel, M * -(-V // config["BLOCK_V"]),
            x, target, stats, dloss, dx, weight, mass if flags["SHARES"] else None, *x.stride(), dloss.stride(0), *strides,
            V, NO_INDEX if flags["SOFT"] else ignore_index,
            SMOOTHING=label_smoothing, Z_LOSS=z_loss, **flags, ACC=acc_dtype(x.dtype), **config,
        )  # fmt: skip
    return dx


def scale_rows(x: Tensor, scale: Tensor) -> None:
    """x [M, V] *= scale [M], in place."""
    M, V = x.shape
    if M:
        launch(scale_rows_kernel, M, x, scale, *x.stride(), scale.stride(0), V, **_stream_config(V))


def _gradients(backward, ctx, dloss: Tensor) -> tuple[Tensor, Tensor | None]:
    """Of x and of probabilities. The latter, (1 - s) w (lse - x), few ask for: PyTorch's operations compute it."""
    x, target, weight, stats, mass = ctx.saved_tensors
    _, label_smoothing, _ = ctx.settings
    need_x, need_target, *_ = ctx.needs_input_grad
    dx = backward(x, target, stats, dloss, *ctx.settings, weight, mass) if need_x else None
    if not need_target:
        return dx, None
    m, log_l = stats.unsqueeze(1).unbind(-1)  # [M, 1]; not their sum, for its digits
    dtarget = (m - x + log_l) * ((1 - label_smoothing) * dloss.unsqueeze(-1))
    return dx, (dtarget if weight is None else dtarget * weight).to(target.dtype)


def _second(ctx, dloss: Tensor) -> tuple:
    x, target, weight, *_ = ctx.saved_tensors
    plain = lambda x, target: in_pytorch(x, target, *ctx.settings, weight)  # noqa: E731
    return through_pytorch(plain, (x, target), (dloss,))


def _like(x, target, ignore_index, label_smoothing, z_loss, weight=None):
    losses, stats = (x.new_empty(n, dtype=torch_acc_dtype(x.dtype)) for n in (len(x), (len(x), 2)))
    return losses, stats, torch.empty_like(losses) if is_soft(target) or weight is not None else None


# The losses of the rows, whose gradient reads the logits again. The reduction is outside, where torch.compile can fuse it.
_losses = differentiable(
    operator(
        "cross_entropy",
        cross_entropy_fwd,
        like=_like,
    ),
    operator("cross_entropy_bwd", cross_entropy_bwd, like=lambda x, *_: x.new_empty(x.shape)),
    keep=lambda inputs, results: ((*inputs[:2], inputs[5], *results[1:]), inputs[2:5]),
    gradients=_gradients,
    again=_second,
)


class InplaceFunction(torch.autograd.Function):
    """The reduced loss. The gradient takes the place of the logits at once, and backward() hands it out."""

    @staticmethod
    def forward(ctx, x: Tensor, target: Tensor, reduction: str, weight: Tensor | None, *settings) -> Tensor:
        scale = torch.ones((), dtype=torch_acc_dtype(x.dtype), device=x.device)
        number = None
        if reduction == "mean":
            number = count(scale.expand(len(x)), target, settings[0], weight)
            scale /= number
        losses, *_ = cross_entropy_fwd(x, target, *settings, weight, scale=scale)
        # Autograd stops whoever saved the logits for a gradient and would find ours there.
        torch.autograd.graph.increment_version(x)
        ctx.dx = x.detach()  # save_for_backward refuses what was changed
        return reduced(losses, target, reduction, number)

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
        return dx, *(None,) * 6


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    *,
    weight: Tensor | None = None,
    dim: int = -1,
    z_loss: float = 0.0,
    inplace: bool = False,
) -> Tensor:
    """Cross-entropy of logits [..., V] with class indices target [...], or with probabilities target [..., V].

    logits float16, bfloat16, float32 or float64, any strides; target int64 or int32, or probabilities in any of the logits'
    dtypes, which go with no ignore_index and get a gradient. Computed in float32 (float64 for float64), and the loss is
    returned so: a mean loss in bfloat16 would have two digits. reduction "none" gives [...].
    weight: of each class, [V] in any of these dtypes, without a gradient. Each loss counts as often as its class weighs, and
    the mean of losses with indices is over the weights, as in PyTorch.
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
    check(logits, target, ignore_index, label_smoothing, reduction, z_loss, dim, soft=True)
    check_stored("cross_entropy", "logits", logits)
    soft = is_soft(target)
    if dim != -1:
        logits, target = logits.movedim(dim, -1), target.movedim(dim, -1) if soft else target
    settings = (ignore_index, float(label_smoothing), float(z_loss))
    flat = target.reshape(-1).contiguous()
    if soft:
        check_stored("cross_entropy", "target", target)
        flat = as_rows(target)
    if weight is not None:
        weight = checked_weight(weight, logits)
    if inplace and not torch.compiler.is_compiling():
        try:
            x = logits.view(-1, logits.shape[-1])
        except RuntimeError:
            raise ValueError(
                f"cross_entropy: inplace=True needs logits whose rows are evenly spaced, got strides {logits.stride()} "
                f"for shape {list(logits.shape)}"
            ) from None
        if not lies_apart(x):
            raise ValueError(
                "cross_entropy: inplace=True needs logits that each have memory of their own, got strides "
                f"{logits.stride()} for shape {list(logits.shape)}"
            )
        if soft and torch.is_grad_enabled() and target.requires_grad:
            raise ValueError(
                "cross_entropy: target requires a gradient, and gets none with inplace=True, which leaves no logits to "
                "compute it from; pass target.detach()"
            )
        loss = InplaceFunction.apply(x, flat, reduction, weight, *settings)
        return loss.view(logits.shape[:-1]) if reduction == "none" else loss
    x = as_rows(logits)
    losses = _losses(x, flat, *settings, weight)
    number = count(losses, target, ignore_index, weight) if reduction == "mean" else None
    return reduced(losses, target, reduction, number)


def cross_entropy_inplace(logits: Tensor, target: Tensor, **options) -> Tensor:
    """cross_entropy(logits, target, inplace=True, ...): afterwards the logits are gone."""
    return cross_entropy(logits, target, **options, inplace=True)
