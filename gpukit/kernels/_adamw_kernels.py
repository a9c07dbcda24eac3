"""The kernels of AdamW: one block of one tensor per program, found in a table of addresses (gpukit.kernels.adamw, which
fills it), and the sums of squares of which a gradient's norm is made."""

import triton
import triton.language as tl

# They change from step to step, with a schedule, and the kernel is the same for all of them.
NUMBERS = ["lr", "new_m", "new_v", "log_beta1", "log_beta2", "eps", "weight_decay", "sign", "seed"]


@triton.jit
def _find(table_ptr, block_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Which tensor this program works on, its row of the table, its first element there, and how many there are."""
    tensor = tl.load(block_ptr + tl.program_id(0))
    row_ptr = table_ptr + tensor * COLUMNS
    return tensor, row_ptr, (tl.program_id(0) - tl.load(row_ptr + 6)) * BLOCK, tl.load(row_ptr + 5)


@triton.jit
def _pointer(row_ptr, column: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in that column. That 16 divides it has to be said, as the compiler sees a number from memory."""
    return tl.multiple_of(tl.load(row_ptr + column).to(tl.pointer_type(DTYPE)), 16 if ALIGNED else 1)


@triton.jit
def _one_minus_power(log_b, t):
    """1 - b^t; by the series of 1 - e^y where b^t is nearly 1, as 0.999^1 is, and a difference would lose its digits."""
    y = log_b * t
    series = -y * (1 + y / 2 * (1 + y / 3 * (1 + y / 4 * (1 + y / 5 * (1 + y / 6 * (1 + y / 7))))))
    return tl.where(y > -0.25, series, 1 - tl.exp(y))


@triton.jit
def _round_stochastically(x, seed, offs):
    """float32 to bfloat16, up or down, on average x: 16 random bits are added to the 16 that are then cut off."""
    noise = tl.randint(seed, offs, n_rounds=6).to(tl.uint32, bitcast=True) & 0xFFFF
    rounded = ((x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), rounded, x).to(tl.bfloat16)


@triton.jit
def _update(
    p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, offs, mask,
    decay, step_size, root, new_m, new_v, eps, scale, seed,
    MASTER: tl.constexpr, STOCHASTIC: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One block. w_ptr: the weights that are updated, the parameter itself or its master copy."""
    g = tl.load(g_ptr + offs, mask=mask, other=0.0).to(ACC) * scale
    m = tl.load(m_ptr + offs, mask=mask, other=0.0).to(ACC)
    v = tl.load(v_ptr + offs, mask=mask, other=0.0).to(ACC)
    w = tl.load(w_ptr + offs, mask=mask, other=0.0).to(ACC)
    # b1 m + (1 - b1) g, from new_m = 1 - b1 alone, which has all its digits in float32.
    m += new_m * (g - m)
    v += new_v * (g * g - v)
    # Decoupled: the decay is a factor of the weight and passes through neither m nor v.
    w = w * decay - step_size * m / (tl.sqrt(v) / root + eps)
    tl.store(m_ptr + offs, m, mask=mask)
    tl.store(v_ptr + offs, v, mask=mask)
    if MASTER:
        tl.store(w_ptr + offs, w, mask=mask)
    if STOCHASTIC:
        tl.store(p_ptr + offs, _round_stochastically(w, seed, offs.to(tl.int32)), mask=mask)
    else:
        tl.store(p_ptr + offs, w, mask=mask)


@triton.jit(do_not_specialize=NUMBERS)
def adamw_kernel(
    table_ptr, block_ptr, step_ptr, lr_ptr, scale_ptr, skip_ptr, tensors,
    lr, new_m, new_v, log_beta1, log_beta2, eps, weight_decay, sign, seed,
    P_DTYPE: tl.constexpr, G_DTYPE: tl.constexpr, S_DTYPE: tl.constexpr, ACC: tl.constexpr,
    MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one tensor. scale_ptr: what the gradients are multiplied with; skip_ptr: not 0, nothing changes."""
    if skip_ptr is not None:
        if tl.load(skip_ptr) != 0:
            return
    tensor, row_ptr, start, n = _find(table_ptr, block_ptr, COLUMNS, BLOCK)
    p_ptr = _pointer(row_ptr, 0, P_DTYPE, ALIGNED)
    g_ptr = _pointer(row_ptr, 1, G_DTYPE, ALIGNED)
    m_ptr = _pointer(row_ptr, 2, S_DTYPE, ALIGNED)
    v_ptr = _pointer(row_ptr, 3, S_DTYPE, ALIGNED)
    w_ptr = _pointer(row_ptr, 4, S_DTYPE, ALIGNED) if MASTER else p_ptr
    if lr_ptr is not None:
        lr = tl.load(lr_ptr).to(ACC)
    if scale_ptr is not None:
        sign *= tl.load(scale_ptr).to(ACC)
    # The launcher counts up afterwards, on the device: all blocks of a tensor read the same t.
    t = tl.load(step_ptr + tensor) + 1
    seed += tensor * 65_537 + t.to(tl.int32) * 7_919  # a stream of random numbers of its own, in which elements count
    # A Python number arrives in float32, where 1 - 0.999 would have four digits: 1 - beta is computed by the launcher.
    step_size = lr / _one_minus_power(log_beta1, t)
    root = tl.sqrt(_one_minus_power(log_beta2, t))
    decay = 1 - lr * weight_decay
    offs = start + tl.arange(0, BLOCK)
    # All blocks but a tensor's last are whole. A mask made from a number in memory would cost them their wide loads.
    if start + BLOCK <= n:
        _update(
            p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, offs, tl.full([BLOCK], True, tl.int1),
            decay, step_size, root, new_m, new_v, eps, sign, seed, MASTER, STOCHASTIC, ACC,
        )  # fmt: skip
    else:
        _update(
            p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, offs, offs < n,
            decay, step_size, root, new_m, new_v, eps, sign, seed, MASTER, STOCHASTIC, ACC,
        )  # fmt: skip


@triton.jit
def square_sums_kernel(
    table_ptr, block_ptr, out_ptr, tensors,
    G_DTYPE: tl.constexpr, ACC: tl.constexpr,
    COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of the squares of each block's gradients."""
    _, row_ptr, start, n = _find(table_ptr, block_ptr, COLUMNS, BLOCK)
    offs = start + tl.arange(0, BLOCK)
    g = tl.load(_pointer(row_ptr, 1, G_DTYPE, ALIGNED) + offs, mask=offs < n, other=0.0).to(ACC)
    tl.store(out_ptr + tl.program_id(0), tl.sum(g * g, axis=0))
