"""What the cases of exercises are made of: seeded tensors by kind of argument, and how cases are named and tagged.

What exercises of several concepts take is drawn here, once for each kind of argument; a concept subclasses Inputs for what
it alone takes. Each kind has its corners, the values and layouts at which wrong answers fail that pass on noise: every
exercise has them among its cases, beside random ones. Nothing here imports torch before a tensor is drawn.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from gpukit.grading import wire
from gpukit.grading.exercise import Case

if TYPE_CHECKING:
    from torch import Tensor


def far(
    *shape: int, dtype: str = "float16", order: tuple[int, ...] = (), transposed: bool = False, gap: int = 1
) -> wire.Imaginary:
    """A tensor of which only the addresses exist, for `KernelExercise.huge`: contiguous, with its last two dimensions
    transposed in memory, or with its dimensions in any order, the outermost first; or with neighbors `gap` elements apart."""
    if transposed:
        order = (*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)
    return wire.Imaginary(shape, dtype, order, gap)


class Inputs:
    """Tensors on the CPU, the same on every machine for one state of `rng`. scale: the spread of `normal`."""

    def __init__(self, rng: Random, scale: float = 1.0):
        import torch

        self.torch = torch
        self.generator = torch.Generator().manual_seed(rng.getrandbits(62))
        self.scale = scale

    def normal(self, *shape: int, dtype: str = "float32", scale: float | None = None) -> Tensor:
        """Normal noise about 0; drawn in float32, so that the numbers of all dtypes are the same but for rounding."""
        x = self.torch.randn(shape, generator=self.generator).mul_(self.scale if scale is None else scale)
        return x.to(getattr(self.torch, dtype))

    def coarse(self, *shape: int, dtype: str = "float32", bits: int = 12) -> Tensor:
        """Normal noise up to 4 in `bits` bits. float32 adds a hundred products of one with 12 bits, more than tf32 keeps, and
        one with 5 exactly, in any order, so that a right answer is right to the last bit. With noise of all digits one seed in
        hundreds makes terms that cancel, and then another order of the sum would be outside the bound."""
        steps = 2.0 ** (bits - 2)
        return (
            self.normal(*shape)
            .mul_(steps)
            .round_()
            .clamp_(-4 * steps, 4 * steps)
            .div_(steps)
            .to(getattr(self.torch, dtype))
        )

    def apart(self, *shape: int) -> Tensor:
        """Normal noise in float32 with a hole around 0: no number is less than 1 in size. A result of few numbers has no larger
        one beside it whose digits count for the tolerance, so what it is made of must not cancel."""
        x = self.normal(*shape, scale=1.0)
        return x + self.torch.where(x < 0, -1.0, 1.0)

    def like(self, x: Tensor, *shape: int) -> Tensor:
        """What goes with x, such as a weight or an upstream gradient: noise of spread 1 in x's dtype, of x's shape unless
        another is given."""
        return self.torch.randn(shape or x.shape, generator=self.generator).to(x.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: str = "int64") -> Tensor:
        """Whole numbers from low to high - 1."""
        return self.torch.randint(low, high, shape, generator=self.generator).to(getattr(self.torch, dtype))

    def signs(self, *shape: int) -> Tensor:
        """1 and -1 in float32. Times a power of 2 they make products and sums that float32 does not hold: where a ReLU, or a
        mask, makes 0 of one, a product with 0 makes NaN."""
        return self.integers(0, 2, *shape) * 2.0 - 1

    # -- corners: one tensor holds them all, a row each, so that they cost one case ------------------------------------

    def rows(self, n: int, dtype: str = "float32") -> Tensor:
        """Rows [12, n] at which arithmetic goes wrong: zeros; all alike; all very negative; all very positive; a large
        element first, and last, among negative ones; tiny; squares beyond float16; sums beyond float16; far from zero with
        a small spread; large terms that cancel; one element beside zeros."""
        x = self.torch.randn(12, n, generator=self.generator, dtype=self.torch.float64)
        x[0] = 0
        x[1] = 3
        x[2] = x[2].abs() - 200
        x[3] = 200 - x[3].abs()
        x[4:6] = -1 - x[4:6].abs()
        x[4, 0] = x[5, -1] = 60
        x[6] *= 2.0**-12
        x[7] *= 400
        x[8] = 70_000 / n + x[8].abs() if n > 2 else 7
        x[9] = 1000 + x[9]
        x[10, 1::2] = -x[10, : n // 2 * 2 : 2] + self.torch.randn(n // 2, generator=self.generator) / 8
        x[10] *= 100
        x[11] = 0
        x[11, n // 2] = 2
        return x.to(getattr(self.torch, dtype))

    def logits(self, n: int, dtype: str = "float32") -> Tensor:
        """Rows [17, n]: those of `rows`, and five with -inf: in every second element, in the first half, in the second, in
        all but the first and in all but the last."""
        inf = float("inf")
        masked = self.torch.randn(5, n, generator=self.generator, dtype=self.torch.float64)
        if n > 1:
            masked[0, 1::2] = masked[1, : n // 2] = masked[2, (n + 1) // 2 :] = masked[3, 1:] = masked[4, :-1] = -inf
        return self.torch.cat([self.rows(n, "float64"), masked]).to(getattr(self.torch, dtype))

    def special(self, n: int) -> Tensor:
        """Rows [5, n] in float32 of whole numbers, which sums keep exactly, and in the middle of a row: infinity; -infinity; NaN; both
        infinities, whose sum is NaN; nothing. Both ends of each row are finite."""
        x, half = self.integers(-9, 10, 5, n).float(), n // 2
        x[0, half], x[1, half], x[2, half] = float("inf"), -float("inf"), float("nan")
        x[3, half], x[3, half - 1] = float("inf"), -float("inf")
        return x

    def stained(self, x: Tensor) -> Tensor:
        """A copy of x with a NaN in the middle of its second row: who made the mistake further up is to see it in the end."""
        x = x.clone()
        x.view(-1, x.shape[-1])[1, x.shape[-1] // 2] = float("nan")
        return x

    def late(self, M: int, N: int, block: int) -> Tensor:
        """bfloat16 rows that begin with a block of numbers near 0.3 and rise by about 3 behind it: the difference of the two
        maxima has more digits than 16 bits hold. Short rows: what one rounded term loses, no other makes up for."""
        x = self.torch.randn(M, N, generator=self.generator)
        x[:, :block] = 0.3 + x[:, :block] / 20
        x[:, block] += 3
        return x.to(self.torch.bfloat16)

    def factors(self, M: int, N: int, K: int, dtype: str = "float32") -> tuple[Tensor, Tensor]:
        """a [M, K] and b [K, N] of whole numbers whose product is exact in float32 sums, in any order, and in no others. Rows
        of a: one whose sums leave float16 and all but cancel in the end; zeros; the last element alone; the first alone; all
        alike; small numbers."""
        a, half = self.integers(-8, 9, M, K), K // 2
        a[0], a[1:2], a[2:4] = 0, 0, 0
        a[0, :half], a[0, K - half :] = 192, -192
        a[2:3, -1], a[3:4, 0], a[4:5] = 5, 5, 3
        b = self.integers(33, 63, K, N)
        b[K - half :] = b[:half]
        b[-1] += 1
        return tuple(x.to(getattr(self.torch, dtype)) for x in (a, b))

    def faint(self, T_q: int, T_k: int = 256) -> tuple[Tensor, Tensor, Tensor]:
        """q [1, T_q, 16], all queries alike, and k and v [1, T_k, 16] in float32, with a scale of 1/4: the first score is 20, the
        others are 0. Each of the others has 2e-9 of the weight, and a shortcut leaves them out; in the columns where the first
        key's values are 0, and theirs about a thousand, they are the result. The other columns hold ones, of which any order
        of sums gives one: with other numbers PyTorch would be exact, and each rounding beyond the tolerance."""
        q, k, v = self.torch.zeros(1, T_q, 16), self.torch.zeros(1, T_k, 16), 1024 * (self.normal(1, T_k, 16) + 1)
        q[..., 0], k[:, 0, 0], v[:, 0, :8], v[..., 8:] = 4, 20, 0, 1
        return q, k, v

    def buried(self, T_q: int, T_k: int = 256) -> tuple[Tensor, Tensor, Tensor]:
        """As `faint`, but the first 32 keys and the last 32 have scores of 0, and those between of 100. In float32 the first and the
        last have no weight at all, and values of millions: an exponent that is cut off below, say at -20, gives them some."""
        q, k, v = self.torch.zeros(1, T_q, 16), self.torch.zeros(1, T_k, 16), self.normal(1, T_k, 16) + 1
        q[..., 0], k[:, 32:-32, 0], v[:, :32], v[:, -32:] = 4, 100, 2.0**24, 2.0**24
        return q, k, v

    def stale(self, T_q: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [1, T_q, 16], all queries alike, and k and v [1, 48, 16] in float16, with a scale of 1/4: behind the first 32 keys all
        scores are higher by 11.125, whose exponential is beyond float16. Who goes on to subtract the old maximum, because
        the new one is hardly higher, has an infinite p."""
        q, k, v = self.torch.zeros(1, T_q, 16), self.torch.zeros(1, 48, 16), self.normal(1, 48, 16) + 1
        q[..., 0], k[:, 32:, 0] = 4, 11.125
        return q.half(), k.half(), v.half()

    def layouts(self, x: Tensor) -> list[tuple[str, Tensor]]:
        """x as its callers may hold it, with how that reads in a case's name: its last two dimensions transposed in memory,
        with a gap behind each row, every second element of a wider row. What is in the gaps is NaN, or the largest integer."""
        from gpukit.testing import poison

        found = []
        if x.ndim > 1:
            found.append(("transposed", x.transpose(-1, -2).contiguous().transpose(-1, -2)))
            gap = poison(x.new_empty(*x.shape[:-1], x.shape[-1] + 3))[..., : x.shape[-1]]
            found.append(("with a gap behind each row", gap.copy_(x)))
        sparse = poison(x.new_empty(*x.shape[:-1], 2 * x.shape[-1]))[..., ::2]
        return [*found, ("every second element of a row", sparse.copy_(x))]

    def upstream(self, y: Tensor) -> list[tuple[str, Tensor]]:
        """Upstream gradients of a result like y: the one of y.sum(), which has stride 0 everywhere; one row for all rows;
        the layouts; with zero rows and values around 5."""
        one = self.torch.ones((), dtype=y.dtype).expand(y.shape)
        mixed = self.like(y) + 5
        half = mixed if mixed.ndim == 1 else mixed.transpose(-1, -2)
        half[..., : half.shape[-1] // 2] = 0
        row = [("one row expanded", self.like(y, y.shape[-1]).expand(y.shape))] if y.ndim > 1 else []
        return [("of a sum: stride 0", one), *row, *self.layouts(self.like(y)), ("around 5, half of it 0", mixed)]

    def indices(self, high: int, n: int, dtype: str = "int64") -> Tensor:
        """Indices [n] below `high`, out of order: the first and the last, one of them several times, others."""
        x = self.integers(0, high, n, dtype=dtype)
        corners = self.torch.tensor([high - 1, 0, high - 1, high - 1, 0])[:n]
        x[: len(corners)] = corners.to(x.dtype)
        return x


def lengths(block: int) -> tuple[int, ...]:
    """Lengths around a block of `block`: one element, a prime, one less than the block, the block, one more, two and a bit."""
    return tuple(dict.fromkeys((1, 13, block - 1, block, block + 1, 2 * block + 5)))


def nbytes(*tensors: Tensor) -> int:
    """The bytes of the elements, for the bounds of Traffic."""
    return sum(x.numel() * x.element_size() for x in tensors)


def case(name: str, *args: Any, tags: str = "") -> Case:
    """A case that is named by hand. tags: words, with spaces between them."""
    return Case(name, args, frozenset(tags.split()))


def tensor_case(x: Tensor, *rest: Any, shown: str = "", note: str = "", tags: str = "", tail: bool = False) -> Case:
    """A case that is named after its tensors, "x [37, 781] float32, note", and tagged with the dtype of the first.

    shown  how the tensors read, where not as x and its shape
    tail   whether it is tagged "tail" if a row of x is shorter than the power of two that holds it
    """
    dtype = str(x.dtype).removeprefix("torch.")
    shorter = tail and x.shape[-1] & (x.shape[-1] - 1)
    name = listed(f"{shown or f'x {list(x.shape)}'} {dtype}", note)
    return case(name, x, *rest, tags=f"{dtype} {tags} {'tail' if shorter else ''}")


def listed(*parts: str) -> str:
    """The parts that are not empty, with commas between them."""
    return ", ".join(filter(None, parts))
