"""AdamW, in place and in as few bytes as it takes.

Five exercises, from top to bottom; notebooks/16_adamw.ipynb explains them. In a kernel a Python number is a float32.
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


# ----------------------------------------------------------------------------------------------------- adamw.update
@triton.jit
def update_block(p_ptr, g_ptr, m_ptr, v_ptr, offs, mask, new_m, new_v, decay, step_size, root, eps):
    """Updates p, m and v, float32, at the offsets `offs` where `mask` says so; g is only read.

    new_m and new_v are 1 - beta1 and 1 - beta2. What decay, step_size and root are is decided in `numbers`, below.
    """
    # BEGIN SOLUTION
    g = tl.load(g_ptr + offs, mask=mask)
    m = tl.load(m_ptr + offs, mask=mask)
    v = tl.load(v_ptr + offs, mask=mask)
    p = tl.load(p_ptr + offs, mask=mask)
    m += new_m * (g - m)
    v += new_v * (g * g - v)
    p = p * decay - step_size * m / (tl.sqrt(v) / root + eps)
    tl.store(m_ptr + offs, m, mask=mask)
    tl.store(v_ptr + offs, v, mask=mask)
    tl.store(p_ptr + offs, p, mask=mask)
    # END SOLUTION


@triton.jit
def adamw_kernel(p_ptr, g_ptr, m_ptr, v_ptr, n, new_m, new_v, decay, step_size, root, eps, BLOCK: tl.constexpr):
    """One program updates BLOCK of the n elements."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    update_block(p_ptr, g_ptr, m_ptr, v_ptr, offs, offs < n, new_m, new_v, decay, step_size, root, eps)


def numbers(step: int, lr: float, beta1: float, beta2: float, weight_decay: float) -> tuple[float, float, float]:
    """What is the same for all elements of a step, computed once and in float64: decay, step_size, root."""
    # BEGIN SOLUTION
    decay = 1 - lr * weight_decay
    step_size = lr / (1 - beta1**step)
    root = math.sqrt(1 - beta2**step)
    return decay, step_size, root
    # END SOLUTION


def adamw_update(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor,
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """Step number `step`, 1 for the first, of p with the gradient g: changes p, m and v, all [n] float32, contiguous, in place.

        m = beta1 m + (1 - beta1) g                 m^ = m / (1 - beta1^step)
        v = beta2 v + (1 - beta2) g^2               v^ = v / (1 - beta2^step)
        p = p - lr weight_decay p - lr m^ / (sqrt(v^) + eps)

    Bound: p, g, m and v are read once, p, m and v are written once, 28 bytes per parameter.
    """
    n = p.numel()
    decay, step_size, root = numbers(step, lr, beta1, beta2, weight_decay)
    adamw_kernel[(triton.cdiv(n, BLOCK),)](
        p, g, m, v, n, 1 - beta1, 1 - beta2, decay, step_size, root, eps, BLOCK=BLOCK
    )


# ------------------------------------------------------------------------------------------------------- adamw.clip
@triton.jit
def square_sums_kernel(g_ptr, sum_ptr, n, BLOCK: tl.constexpr):
    """sums[i]: the sum of the squares of block i of g."""
    pid = tl.program_id(0)
    # BEGIN SOLUTION
    # STUB: offs = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # STUB: g = tl.load(g_ptr + offs, mask=offs < n, other=0.0)
    # STUB: tl.store(sum_ptr + pid, tl.sum(g * g, axis=0))
    offs = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    tl.store(sum_ptr + pid, tl.sum(g * g, axis=0))
    # END SOLUTION


@triton.jit
def clip_kernel(sum_ptr, scale_ptr, count, max_norm, BLOCK: tl.constexpr):
    """One program: the norm from `count` sums, and what the gradients are to be multiplied by."""
    # BEGIN SOLUTION
    # STUB: total = 0.0
    # STUB: for start in range(0, count, BLOCK):
    # STUB:     i = start + tl.arange(0, BLOCK)
    # STUB:     total += tl.sum(tl.load(sum_ptr + i, mask=i < count, other=0.0), axis=0)
    # STUB: norm = tl.sqrt(total)
    # STUB: scale = max_norm / (norm + 1e-6)
    # STUB: tl.store(scale_ptr, tl.minimum(scale, 1.0))
    total = 0.0
    for start in range(0, count, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(sum_ptr + offs, mask=offs < count, other=0.0), axis=0)
    scale = max_norm / (tl.sqrt(total) + 1e-6)
    tl.store(scale_ptr, tl.minimum(scale, 1.0))
    # END SOLUTION


def clip_scale(g: Tensor, max_norm: float) -> Tensor:
    """g [n] float32, float16 or bfloat16, contiguous -> scale [1] float32: max_norm / (norm of g + 1e-6), but 1 at most.

    The update multiplies each gradient by it on the way, so that clipping writes no gradient.
    Bound: g is read once, in two launches.
    """
    n = g.numel()
    count = triton.cdiv(n, BLOCK)
    sums = torch.empty(count, dtype=torch.float32, device=g.device)
    scale = torch.empty(1, dtype=torch.float32, device=g.device)
    square_sums_kernel[(count,)](g, sums, n, BLOCK=BLOCK)
    clip_kernel[(1,)](sums, scale, count, max_norm, BLOCK=BLOCK)
    return scale


# ------------------------------------------------------------------------------------------------------- adamw.many
@triton.jit
def adamw_many_kernel(
    p_ptr, g_ptr, m_ptr, v_ptr, start_ptr, size_ptr, decay_ptr, owner_ptr, first_ptr,
    new_m, new_v, step_size, root, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program updates BLOCK elements of one tensor.

    By tensor: start, where it begins; size; decay, as in adamw.update; first, the number of its first program.
    By program: owner, the tensor that it works on. All are int64 but decay, which is float32.
    """
    pid = tl.program_id(0)
    # BEGIN SOLUTION
    tensor = tl.load(owner_ptr + pid)
    inside = (pid - tl.load(first_ptr + tensor)) * BLOCK + tl.arange(0, BLOCK)
    mask = inside < tl.load(size_ptr + tensor)
    offs = tl.load(start_ptr + tensor) + inside
    decay = tl.load(decay_ptr + tensor)
    # END SOLUTION
    update_block(p_ptr, g_ptr, m_ptr, v_ptr, offs, mask, new_m, new_v, decay, step_size, root, eps)


def share_out(sizes: list[int], BLOCK: int) -> tuple[list[int], list[int]]:
    """owner and first, as the kernel wants them, for tensors of these sizes; a size may be 0. len(owner) is the grid."""
    # BEGIN SOLUTION
    owner, first = [], []
    for tensor, size in enumerate(sizes):
        first.append(len(owner))
        owner += [tensor] * triton.cdiv(size, BLOCK)
    return owner, first
    # END SOLUTION


def adamw_many(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor,
    starts: list[int], sizes: list[int], weight_decays: list[float],
    step: int, lr: float, beta1: float, beta2: float, eps: float, BLOCK: int,
) -> None:  # fmt: skip
    """adamw.update for many tensors that lie in one buffer, each with a weight decay of its own.

    p, g, m and v [n] float32, contiguous; tensor i lies at starts[i] in each of them and has sizes[i] elements, perhaps
    none. There are gaps between tensors, which stay as they are, and a tensor may lie before one with a smaller number.
    Bound: one launch, no program without work.
    """
    owner, first = share_out(sizes, BLOCK)
    tables = [torch.tensor(table, dtype=torch.int64, device=p.device) for table in (starts, sizes, owner, first)]
    each = [numbers(step, lr, beta1, beta2, weight_decay) for weight_decay in weight_decays]
    decays = torch.tensor([decay for decay, _, _ in each], dtype=torch.float32, device=p.device)
    _, step_size, root = each[0]
    adamw_many_kernel[(len(owner),)](
        p, g, m, v, *tables[:2], decays, *tables[2:], 1 - beta1, 1 - beta2, step_size, root, eps, BLOCK=BLOCK
    )


# --------------------------------------------------------------------------------------------------- adamw.rounding
@triton.jit
def round_kernel(x_ptr, y_ptr, n, seed, BLOCK: tl.constexpr):
    """y = x, float32 to bfloat16, up or down at random."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n)
    # BEGIN SOLUTION
    noise = tl.randint(seed, offs).to(tl.uint32, bitcast=True) & 0xFFFF
    bits = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    y = bits.to(tl.float32, bitcast=True).to(tl.bfloat16)
    # END SOLUTION
    tl.store(y_ptr + offs, y, mask=offs < n)


def round_at_random(x: Tensor, seed: int) -> Tensor:
    """x [n] float32, contiguous, n <= 2^24 -> y [n] int16, the bits of bfloat16 numbers; int16 because the check compares bits.

    Each x lies between two bfloat16 numbers, at some share of the way from the one nearer to zero to the one farther from
    zero. This share is the probability with which y is the farther one; otherwise y is the nearer one. Element i takes the lower 16 of the
    32 random bits of tl.randint(seed, i) and adds them to those bits of x that bfloat16 does not keep: y is the farther
    number where this sum carries. No x is NaN.
    """
    y = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    round_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, x.numel(), seed, BLOCK=BLOCK)
    return y.view(torch.int16)


# ----------------------------------------------------------------------------------------------------- adamw.resume
class AdamW:
    """An optimizer that can be stopped and resumed; it updates through adamw_update.

    params is a list of float32 tensors; weight_decays has one number for each. A state_dict has the names of
    torch.optim.AdamW's:

        {"state": {i: {"step": number, "exp_avg": m, "exp_avg_sq": v}}, "param_groups": [{"lr": …, "betas": …, "eps": …}]}

    i counts the parameters; one that never had a gradient has no state. "step" counts its own updates.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decays=None):
        self.params, self.weight_decays = params, weight_decays or [0.0] * len(params)
        self.options = {"lr": lr, "betas": betas, "eps": eps}
        self.state = {}

    def step(self) -> None:
        """One update of each parameter that has a gradient; the others stay as they are, their states too."""
        # BEGIN SOLUTION
        beta1, beta2 = self.options["betas"]
        for i, p in enumerate(self.params):
            if p.grad is None:
                continue
            if i not in self.state:
                self.state[i] = {"step": 0, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            state = self.state[i]
            state["step"] += 1
            adamw_update(
                p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"],
                self.options["lr"], beta1, beta2, self.options["eps"], self.weight_decays[i],
            )  # fmt: skip
        # END SOLUTION

    def state_dict(self) -> dict:
        """What a checkpoint has to hold. The caller writes it to a disk, or goes on training before it does."""
        # BEGIN SOLUTION
        state = {
            i: {"step": s["step"], "exp_avg": s["exp_avg"].clone(), "exp_avg_sq": s["exp_avg_sq"].clone()}
            for i, s in self.state.items()
        }
        return {"state": state, "param_groups": [dict(self.options)]}
        # END SOLUTION

    def load_state_dict(self, state_dict: dict) -> None:
        """Go on as the optimizer that gave state_dict would have. The caller is done with state_dict."""
        # BEGIN SOLUTION
        self.options = dict(state_dict["param_groups"][0])
        self.state = {
            i: {"step": int(s["step"]), "exp_avg": s["exp_avg"].clone(), "exp_avg_sq": s["exp_avg_sq"].clone()}
            for i, s in state_dict["state"].items()
        }
        # END SOLUTION


def train(
    p: Tensor, q: Tensor, gradients: Tensor, turns: list[bool], stop: int, lr: float, weight_decay: float
) -> tuple[Tensor, ...]:
    """What the check calls: trains copies of p and q [n] on gradients [steps, n] and resumes after `stop` steps.

    All are contiguous. p has a gradient in every step, q in those in which turns says so, perhaps in none. Returns p, q, and
    m and v of both as a checkpoint taken at the end holds them; NaN stands for what it does not hold.
    """
    params = [p.clone(), q.clone()]
    optimizer = AdamW(params, lr=lr, weight_decays=[weight_decay, 0.0])
    for i, g in enumerate(gradients.unbind()):
        if i == stop:
            checkpoint = optimizer.state_dict()
            optimizer.options["lr"] = 2 * lr  # by a schedule
            resumed = AdamW(params, lr=1.0, betas=(0.5, 0.5), eps=1.0, weight_decays=[weight_decay, 0.0])
            kept = [x.clone() for x in params]
            for lost in (optimizer, resumed):  # both runs go on until they are killed, and what they did is lost
                for x in params:
                    x.grad = g
                lost.step()
            for x, before in zip(params, kept, strict=True):
                x.copy_(before)
            optimizer = resumed
            optimizer.load_state_dict(checkpoint)
        params[0].grad = g
        params[1].grad = g if turns[i] else None
        optimizer.step()
    state = optimizer.state_dict()["state"]
    for kept in state.values():
        if isinstance(kept["step"], str):
            raise TypeError("step is text, and PyTorch's AdamW goes on from a number")
    none = torch.full_like(p, math.nan)
    return *params, *(state.get(i, {}).get(name, none) for i in (0, 1) for name in ("exp_avg", "exp_avg_sq"))
