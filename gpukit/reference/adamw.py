"""AdamW: what one step means, on which parameters it is judged, and the least it must move."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

from gpukit.op import Cost, Op

LR, BETA1, BETA2, EPS, WEIGHT_DECAY = 1e-2, 0.9, 0.999, 1e-8, 1e-2

# Of GPT-2 small, https://github.com/openai/gpt-2: 148 tensors, from 768 elements to 38.6 million.
_BLOCK = (
    (768,),
    (768,),
    (768, 2304),
    (2304,),
    (768, 768),
    (768,),
    (768,),
    (768,),
    (768, 3072),
    (3072,),
    (3072, 768),
    (768,),
)
GPT2_SMALL = ((50257, 768), (1024, 768), *_BLOCK * 12, (768,), (768,))  # fmt: skip


def adamw(
    params: Sequence[Tensor], grads: Sequence[Tensor], m: Sequence[Tensor], v: Sequence[Tensor], step: int
) -> None:
    """One step, in place, tensor by tensor: in PyTorch a dozen passes over each where one would do."""
    for p, g, m_i, v_i in zip(params, grads, m, v, strict=True):
        p.mul_(1 - LR * WEIGHT_DECAY)
        m_i.lerp_(g, 1 - BETA1)
        v_i.mul_(BETA2).addcmul_(g, g, value=1 - BETA2)
        denominator = (v_i / (1 - BETA2**step)).sqrt() + EPS
        p.addcdiv_(m_i, denominator, value=-LR / (1 - BETA1**step))


class FusedAdamW(torch.optim.AdamW):
    """PyTorch's own step in one launch for each few dozen tensors."""

    def __init__(self, params, **options):
        super().__init__(params, fused=True, **options)


class ForeachAdamW(torch.optim.AdamW):
    """PyTorch's default: a launch for each operation, over many tensors at once."""

    def __init__(self, params, **options):
        super().__init__(params, foreach=True, **options)


def shapes_of(shape: tuple[int, int]) -> list[tuple[int, ...]]:
    """The tensors of a benchmark shape (tensors, elements): GPT-2 small's own for its 148, else equal parts."""
    tensors, elements = shape
    if (tensors, elements) == (len(GPT2_SMALL), sum(map(math.prod, GPT2_SMALL))):
        return list(GPT2_SMALL)
    return [(elements // tensors + (i < elements % tensors),) for i in range(tensors)]


def make_inputs(shape: tuple[int, int], dtype: torch.dtype, generator: Generator) -> tuple[Tensor, ...]:
    """The parameters, then as many gradients, on the CPU: normal noise; some gradients are 0, some 10^4 times larger."""
    shapes = shapes_of(shape)
    params = [torch.randn(s, generator=generator, dtype=torch.float32).to(dtype) for s in shapes]
    grads = [torch.randn(s, generator=generator, dtype=torch.float32) for s in shapes]
    for g in grads:
        g.view(-1)[::7] = 0
        g.view(-1)[3::11] *= 1e4
    return *params, *(g.to(dtype) for g in grads)


COMPILED_TENSORS = 8


def build(provider: Callable, inputs: tuple[Tensor, ...]) -> Callable[[], list[Tensor]]:
    """A step on copies of the parameters, which returns them and both states; without these a wrong beta would not show,
    since it cancels in the first step. The provider is an optimizer's class, or like `adamw`.

    Raises ValueError for more than COMPILED_TENSORS tensors and a function that is not `adamw`, but made of it by
    torch.compile, which would take minutes: the loop over the tensors is unrolled.
    """
    half = len(inputs) // 2
    params, grads = [x.clone() for x in inputs[:half]], inputs[half:]
    if isinstance(provider, type):
        for p, g in zip(params, grads, strict=True):
            p.requires_grad_().grad = g
        optimizer = provider(params, lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY)

        results: list[Tensor] = []

        def call() -> list[Tensor]:
            optimizer.step()
            if not results:  # looking 2,000 states up takes longer than a step
                results.extend(params)
                results.extend(optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq") for p in params)
            return results

        return call

    if provider is not adamw and half > COMPILED_TENSORS:
        raise ValueError(f"not compiled for {half} tensors: at most {COMPILED_TENSORS}")
    m, v = ([torch.zeros_like(p) for p in params] for _ in range(2))
    results = [*params, *m, *v]
    step = 0

    def call() -> list[Tensor]:
        nonlocal step
        step += 1
        provider(params, grads, m, v, min(step, 2))  # a new number would be compiled again
        return results

    return call


def cost(shape: tuple[int, int], dtype: torch.dtype) -> Cost:
    """p, g, m and v read, p, m and v written, all in `dtype`: 28 bytes per parameter in float32; 14 FLOPs each."""
    _, elements = shape
    return Cost(4 * elements * dtype.itemsize, 3 * elements * dtype.itemsize, 14 * elements)


OP = Op(
    name="adamw",
    reference=adamw,
    library=FusedAdamW,
    make_inputs=make_inputs,
    cost=cost,
    test_shapes=((1, 1), (2, 5), (3, 1023), (5, 4099)),
    bench_shapes=(
        (1, 1_000_000),
        (1, 10_000_000),
        (1, 50_000_000),
        (1, 500_000_000),
        (148, sum(map(math.prod, GPT2_SMALL))),
        (2000, 2_000_000),
    ),
    peers={"foreach": ForeachAdamW},
    kernel="AdamW",
    bench_dtypes=("float32",),
    bench_modes=("fwd", "wall"),
    check_shape=lambda shape: (shape[0], min(shape[1], 1 << 24)),
    build=build,
)
