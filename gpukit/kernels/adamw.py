"""AdamW, all tensors of a parameter group in one launch.

The same kernels, to be read first: `adamw_update`, `adamw_many`, `clip_scale` and `round_at_random` in
solutions/adamw.py.

With gradient g, at step t:
    m = b1 m + (1 - b1) g,  v = b2 v + (1 - b2) g^2
    p = (1 - lr wd) p - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)
Traffic in float32: p, m and v read and written, g read, 28 bytes per parameter, the least possible. With bfloat16 weights
and gradients and a float32 master copy it is 28 as well, with stochastic rounding in place of the master 22.

The kernel finds its tensors in a table of addresses, so that 2,000 small tensors cost one launch, as one large tensor
does. Step counts stay on the device: a step can be captured in a CUDA graph, or skipped without the CPU knowing.

Limits: no amsgrad, no sparse or complex gradients; a parameter must fill its memory, in any order of dimensions.
Sources: https://arxiv.org/abs/1711.05101 (AdamW); torch.optim.AdamW, with which state_dicts can be exchanged;
https://arxiv.org/abs/2010.06192 (stochastic rounding of bfloat16 weights).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from gpukit.kernels._adamw_kernels import adamw_kernel, square_sums_kernel
from gpukit.kernels._dtypes import acc_dtype
from gpukit.kernels._launch import interpreted, launch

BLOCK, NUM_WARPS = 1024, 4
# A tensor's row in the table: the addresses of the parameter, its gradient, m, v and the master copy, its number of
# elements, and the number of its first block.
COLUMNS = 7


def _arranged(g: Tensor, p: Tensor) -> Tensor:
    """A copy of p's gradient in p's order of dimensions."""
    if g.layout != torch.strided:
        raise TypeError("AdamW: sparse gradients are not supported; use torch.optim.SparseAdam")
    return torch.empty_like(p, dtype=g.dtype).copy_(g)


def _moment(name: str, value: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of one of p's states in p's order of dimensions, on its device."""
    if value.shape != p.shape:
        raise ValueError(
            f"AdamW: {name} must have the shape of its parameter, {list(p.shape)}, got {list(value.shape)}"
        )
    return torch.empty_like(p, dtype=dtype).copy_(value)


class _Bucket:
    """The parameters of a group that one launch serves: one device, one dtype of weights, one of gradients."""

    def __init__(self, params: list[Tensor], states: list[dict], grad_dtype: torch.dtype):
        self.params, self.states, self.device = params, states, params[0].device
        self.dtype, self.grad_dtype, self.state_dtype = params[0].dtype, grad_dtype, states[0]["exp_avg"].dtype
        # One tensor for all step counts; each parameter's own, as PyTorch wants it, is a view of one element.
        steps = [torch.as_tensor(state["step"], dtype=torch.float32, device=self.device) for state in states]
        self.steps = torch.stack(steps)
        for state, step in zip(states, self.steps, strict=True):
            state["step"] = step
        sizes = np.array([p.numel() for p in params], dtype=np.int64)
        blocks = -(-sizes // BLOCK)
        self.blocks = int(blocks.sum())
        self.owner = torch.from_numpy(np.repeat(np.arange(len(params), dtype=np.int32), blocks)).to(self.device)
        self.rows = np.zeros((len(params), COLUMNS), dtype=np.int64)
        for column, name in ((2, "exp_avg"), (3, "exp_avg_sq"), (4, "master")):
            self.rows[:, column] = [state[name].data_ptr() if name in state else 0 for state in states]
        self.rows[:, 5], self.rows[:, 6] = sizes, np.cumsum(blocks) - blocks
        self.table = torch.empty(self.rows.shape, dtype=torch.int64, device=self.device)
        self.first_moment = states[0]["exp_avg"].data_ptr()
        # A graph copies from here whenever it is replayed, and nothing can be allocated while it is captured.
        self.captured = torch.empty(self.rows.shape, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        self.rows[:, 0] = [p.data_ptr() for p in params]
        self.addresses: list[int] = []
        self.grads: list[Tensor] = []

    def is_current(self, states: dict) -> bool:
        """Whether the states lie where they lay: who offloads them puts other tensors in their place. Told by the first
        of them, since looking at 2,000 takes as long as the launch."""
        state = states.get(self.params[0])
        return state is self.states[0] and "exp_avg" in state and state["exp_avg"].data_ptr() == self.first_moment

    def refresh(self) -> None:
        """Bring gradients and addresses up to date. Gradients are allocated anew in most steps, often where they were."""
        self.grads = [g if (g := p.grad).stride() == p.stride() else _arranged(g, p) for p in self.params]
        addresses = [g.data_ptr() for g in self.grads]
        if addresses == self.addresses:
            return
        self.addresses = addresses
        self.rows[:, 1] = addresses
        self.aligned = not (self.rows[:, :5] % 16).any()
        host = torch.from_numpy(self.rows)
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            host = self.captured.copy_(host)
        elif self.device.type == "cuda":
            host = host.pin_memory()
        self.table.copy_(host, non_blocking=True)

    def launch(self, kernel, tensors: Sequence[Tensor | None], *numbers, **constants) -> None:
        """The kernel's arguments are the table, the blocks' owners, `tensors`, all tensors of the bucket, and `numbers`."""
        # The interpreter refuses addresses that it does not know; a GPU needs no more than the table.
        known = (*self.params, *self.grads, *(t for s in self.states for t in s.values())) if interpreted() else None
        if self.blocks:
            launch(
                kernel, self.blocks, self.table, self.owner, *tensors, known, *numbers,
                **constants, COLUMNS=COLUMNS, ALIGNED=self.aligned, BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip


_TL = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


class AdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay, as torch.optim.AdamW, in one launch per device and dtype of a group.

    params          tensors or groups: float32, float64, float16 or bfloat16, one or many devices
    lr              a number, or a scalar tensor on the parameters' device (for CUDA graphs with a schedule)
    betas, eps, weight_decay, maximize    as in PyTorch; amsgrad is refused
    max_norm        clip the gradients of all groups to this norm together, as torch.nn.utils.clip_grad_norm_ does, but
                    without writing them: the gradients stay as they are
    master_weights  16-bit weights: update a float32 copy in state["master"] and round it to the weights. m and v are
                    float32
    stochastic_rounding, seed   bfloat16 weights: no copy; the update is rounded up or down at random, so that updates
                    smaller than a rounding are not lost on average. m and v are float32. The same seed, the same result
    Without either, m and v have the weights' dtype, as in PyTorch.

    Parameters without gradients are left alone, and NaN in a gradient reaches its parameters, as in PyTorch; under
    torch.amp.GradScaler the gradients are unscaled on the way and a step with an infinite one is skipped, without waiting
    for the GPU. state_dicts can be exchanged with torch.optim.AdamW (a master copy is ignored there).

    Raises ValueError for options out of range, TypeError and ValueError for parameters and gradients it does not take.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves its scale in self.grad_scale, self.found_inf

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        capturable: bool = False,
        max_norm: float | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ):
        if max_norm is not None and not 0 < max_norm < math.inf:
            raise ValueError(f"AdamW: max_norm must be positive and finite, got {max_norm}")
        if not (isinstance(seed, int) and 0 <= seed < 2**63):
            raise ValueError(f"AdamW: seed must be an integer, 0 to 2^63 - 1, got {seed!r}")
        self.max_norm, self.seed = max_norm, seed
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "capturable": capturable, "foreach": None, "differentiable": False, "fused": None,
            "master_weights": master_weights, "stochastic_rounding": stochastic_rounding,
        }  # fmt: skip
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_norm": self.max_norm, "seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # what torch.optim.AdamW's state does not say
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._buckets: dict = {}
        self._states = 0

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._buckets, self._states = {}, 0
        try:
            self._check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    @staticmethod
    def _check_group(group: dict) -> None:
        lr, betas = group["lr"], group["betas"]
        if group["amsgrad"]:
            raise ValueError("AdamW: amsgrad=True is not supported here; use torch.optim.AdamW")
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ValueError(f"AdamW: lr must be a number or a tensor of one element, got shape {list(lr.shape)}")
        for name in ("lr", "eps", "weight_decay"):
            if not 0 <= group[name] < math.inf:
                raise ValueError(f"AdamW: {name} must be 0 or more and finite, got {group[name]}")
        if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"AdamW: betas must be two numbers in [0, 1), got {betas}")
        if group["master_weights"] and group["stochastic_rounding"]:
            raise ValueError("AdamW: master_weights and stochastic_rounding are two ways to the same end; choose one")
        for p in group["params"]:
            if p.dtype not in _TL:
                raise TypeError(f"AdamW: parameters must be float32, float64, float16 or bfloat16, got {p.dtype}")
            if not (p.is_cuda or interpreted()):
                raise ValueError(
                    f"AdamW: a parameter is on {p.device}; Triton needs CUDA tensors here, or TRITON_INTERPRET=1 before "
                    "Python starts"
                )
            if group["stochastic_rounding"] and p.dtype in (torch.float16, torch.float64):
                raise TypeError(f"AdamW: stochastic_rounding is for bfloat16 parameters, got {p.dtype}")
            if p.numel() and not torch.empty_like(p).stride() == p.stride():
                raise ValueError(
                    f"AdamW: a parameter of shape {list(p.shape)} has strides {p.stride()}, with gaps or overlaps in "
                    "memory; make it contiguous"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if any(group.get("amsgrad") for group in state_dict["param_groups"]):
            raise ValueError("AdamW: amsgrad=True is not supported here; this state needs torch.optim.AdamW")
        super().load_state_dict(state_dict)
        # The base class gives all states the weights' dtype; m, v and master of 16-bit weights are float32 here.
        numbers = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(numbers, params, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                if name in ("exp_avg", "exp_avg_sq", "master") and isinstance(value, Tensor):
                    self.state[p][name] = _moment(name, value, p, value.dtype)
        self._buckets = {}

    def _state(self, p: Tensor, group: dict) -> dict:
        state = self.state[p]
        wide = p.dtype in (torch.bfloat16, torch.float16) and (group["master_weights"] or group["stochastic_rounding"])
        dtype = torch.float32 if wide else p.dtype
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros_like(p, dtype=dtype) for _ in range(2))
        if group["master_weights"] and wide and "master" not in state:
            state["master"] = p.detach().to(torch.float32, copy=True)
        for name in ("exp_avg", "exp_avg_sq", "master"):
            value = state.get(name)
            wanted = dtype, p.device, p.shape, p.stride()
            if value is not None and (value.dtype, value.device, value.shape, value.stride()) != wanted:
                state[name] = _moment(name, value, p, dtype)
        return state

    def _collect(self, index: int, group: dict) -> list[_Bucket]:
        """The buckets of a group, with the gradients of this step."""
        params = [p for p in group["params"] if p.grad is not None]
        dtypes = [p.grad.dtype for p in params]
        # Lists of numbers, since thousands of tuples would wake the garbage collector in every step.
        seen = [*map(id, params), *map(Tensor.data_ptr, params), *map(Tensor.numel, params), *dtypes]
        known = self._buckets.get(index)
        if known is None or known[0] != seen or not all(bucket.is_current(self.state) for bucket in known[1]):
            parts: dict[tuple, list[Tensor]] = {}
            for p, dtype in zip(params, dtypes, strict=True):
                parts.setdefault((p.device, p.dtype, dtype), []).append(p)
            buckets = [_Bucket(ps, [self._state(p, group) for p in ps], key[2]) for key, ps in parts.items()]
            known = self._buckets[index] = seen, buckets
        for bucket in known[1]:
            bucket.refresh()
        return known[1]

    def _scale(self, buckets: list[_Bucket], device: torch.device) -> Tensor | None:
        """What the gradients are multiplied by: the inverse of a GradScaler's scale, and the clipping of their norm."""
        grad_scale = getattr(self, "grad_scale", None)
        scale = None if grad_scale is None else 1 / grad_scale.to(device)
        if self.max_norm is None:
            return scale
        squares = []
        for bucket in buckets:
            acc = torch.float64 if bucket.grad_dtype == torch.float64 else torch.float32
            out = torch.empty(bucket.blocks, dtype=acc, device=bucket.device)
            bucket.launch(square_sums_kernel, [out], G_DTYPE=_TL[bucket.grad_dtype], ACC=acc_dtype(bucket.grad_dtype))
            squares.append(out.sum().to(device))
        norm = torch.stack(squares).sum().sqrt()
        norm = norm if scale is None else norm * scale
        clip = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        return clip if scale is None else clip * scale

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of all parameters with gradients. Returns what `closure`, if given, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():  # torch.compile is not to follow addresses: it leaves its graph here
            torch.compiler.disable(self._update)()
        else:
            self._update()
        return loss

    def _update(self) -> None:
        if len(self.state) != self._states:  # somebody has removed some
            self._buckets = {}
        groups = [(group, self._collect(i, group)) for i, group in enumerate(self.param_groups)]
        self._states = len(self.state)
        buckets = [bucket for _, own in groups for bucket in own]
        found_inf = getattr(self, "found_inf", None)
        scales: dict[torch.device, Tensor | None] = {}
        for group, own in groups:
            beta1, beta2 = map(float, group["betas"])  # tensors too, which live on the CPU
            for bucket in own:
                if bucket.device not in scales:
                    scales[bucket.device] = self._scale(buckets, bucket.device)
                skip = None if found_inf is None else found_inf.to(bucket.device)
                lr = group["lr"]
                on_device = isinstance(lr, Tensor)
                bucket.launch(
                    adamw_kernel,
                    [bucket.steps, lr.to(bucket.device) if on_device else None, scales[bucket.device], skip],
                    0.0 if on_device else float(lr), 1.0 - beta1, 1.0 - beta2, math.log(beta1) if beta1 else -1e30,
                    math.log(beta2) if beta2 else -1e30, float(group["eps"]), float(group["weight_decay"]),
                    -1.0 if group["maximize"] else 1.0, self.seed,
                    P_DTYPE=_TL[bucket.dtype], G_DTYPE=_TL[bucket.grad_dtype], S_DTYPE=_TL[bucket.state_dtype],
                    ACC=acc_dtype(bucket.dtype), MASTER="master" in bucket.states[0],
                    STOCHASTIC=bool(group["stochastic_rounding"]) and bucket.dtype == torch.bfloat16,
                )  # fmt: skip
                # Autograd stops whoever kept the weights for a gradient and would find others there.
                torch.autograd.graph.increment_version(bucket.params)
                if skip is None:
                    bucket.steps += 1
                else:
                    bucket.steps += (skip == 0).to(bucket.steps.dtype)
        for bucket in buckets:
            bucket.grads = []  # or zero_grad() would free nothing before the next step
