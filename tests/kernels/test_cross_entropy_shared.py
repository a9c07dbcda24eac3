"""Cross-entropy in place of rows that several programs share: in the interpreter, where programs run one after the other, and on a
Hopper GPU."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import gpukit
from gpukit import kernels
from gpukit.kernels import _cross_entropy_shared as parts
from gpukit.kernels import _rows_choices as choices
from gpukit.testing import assert_close
from tests.kernels.cases import compile_for_hopper, seeded

cross_entropy_module = sys.modules["gpukit.kernels.cross_entropy"]
# With pieces of 64: whole parts of 8 pieces and of 10, rows that end within a part, a prime, less than a part, one number.
CASES = [(7, 4096), (5, 1280), (5, 2000), (5, 1021), (3, 100), (2, 1)]


def logits(M, N, dtype, device="cpu"):
    """The first row has a part of -inf, and the others are large, or have -inf alone, or a NaN, as far as there are rows."""
    x = torch.randn(M, N, generator=seeded(0)).mul_(3).to(dtype).to(device)
    x[0, 512:1024] = -float("inf")
    if M > 4:
        x[1] *= 100
        x[3] = -float("inf")
        x[4, N // 2] = float("nan")
    return x


def targets(M, N, device="cpu"):
    """The first class, the last, one that is left out, and as far as there are rows one that is no class."""
    target = torch.randint(0, N, (M,), generator=seeded(2))
    given = torch.tensor([0, N - 1, -100, N // 2, 1, N, -7 + 2**32])[:M]
    target[: len(given)] = given
    return target.to(device)


def computed(x, target, z_loss=0.0, patience=0):
    """losses, stats, and the gradient, times a half; x is left as it is."""
    M = len(x)
    wide = torch.full(
        (M, x.shape[1] + 24), 7, dtype=x.dtype, device=x.device
    )  # rows lie apart, and nothing is between them
    wide[:, : x.shape[1]] = x
    losses, stats = (torch.full(size, 5.0, device=x.device) for size in ((M,), (M, 2)))
    scale = torch.tensor(0.5, device=x.device)
    parts.cross_entropy_parts(wide[:, : x.shape[1]], target, losses, stats, scale, -100, z_loss, patience)
    assert (wide[:, x.shape[1] :] == 7).all()
    return losses, stats, wide[:, : x.shape[1]]


def expected(x, target, z_loss, kind):
    """Losses, and the gradient times a half; NaN where a target is no class, though the gradient there is none's."""
    x = x.to(kind).requires_grad_()
    known = (target >= 0) & (target < x.shape[1])
    losses = F.cross_entropy(x, torch.where(known, target, -100), reduction="none")
    z = torch.where(target == -100, 0.0, x.logsumexp(-1).square()) * z_loss
    (dx,) = torch.autograd.grad((losses + z).sum() * 0.5, x)
    losses = torch.where(known | (target == -100), losses + z, float("nan"))
    return losses.detach(), dx


def same(a, b):
    """Whether all bits are the same, those of NaN, too."""
    kinds = {2: torch.int16, 4: torch.int32}
    return all(
        torch.equal(x.contiguous().view(kinds[x.itemsize]), y.contiguous().view(kinds[y.itemsize]))
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture
def pieces_of_64(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a GPU gets pieces as large as they are")
    monkeypatch.setattr(parts, "PIECE", 64)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("M", "N"), CASES, ids=str)
def test_nobody_waits_forever(M, N, dtype, z_loss, pieces_of_64):
    """The first program of a row finds no message of the others, the last one finds all. No program reads what another has
    overwritten, which the interpreter would call a race."""
    x, target = logits(M, N, dtype), targets(M, N)
    losses, stats, dx = computed(x, target, z_loss)
    truth, native = (expected(x, target, z_loss, kind) for kind in (torch.float64, torch.float32))
    usual = torch.ones(M, dtype=torch.bool)
    usual[3:5] = M <= 4  # NaN there
    known = (target == -100) | ((target >= 0) & (target < N))
    assert_close(losses[usual & known], truth[0][usual & known], native[0][usual & known])
    assert losses[~known].isnan().all()
    assert_close(
        dx[usual & known], truth[1][usual & known], expected(x, target, z_loss, dtype)[1][usual & known], gradient=True
    )
    assert torch.equal(stats[usual, 0], x[usual].float().amax(-1).clamp(min=torch.finfo(torch.float32).min))
    assert M <= 4 or dx[3:5].isnan().all()
    assert (dx[target == -100] == 0).all()
    assert same((losses, stats, dx), computed(x, target, z_loss, patience=3)), "patience changes no bit"


def test_messages_that_have_come_give_the_same_bits(pieces_of_64, monkeypatch):
    """Also where all messages were there before, so that no part is computed twice: as on a GPU."""
    x, target = logits(7, 2000, torch.bfloat16), targets(7, 2000)
    kept, zeros = [], torch.zeros

    def words(*shape, **options):
        kept.append(zeros(*shape, **options))
        return kept[-1]

    monkeypatch.setattr(parts, "torch", SimpleNamespace(zeros=words, int64=torch.int64))
    alone = computed(x, target, 0.01)
    (found,) = kept
    assert found.shape == (7 * 4,) and (found != 0).all()
    monkeypatch.setattr(parts, "torch", SimpleNamespace(zeros=lambda *_, **__: found, int64=torch.int64))
    with gpukit.trace() as t:
        assert same(computed(x, target, 0.01), alone)
    (launch,) = t.launches
    programs = 7 * 4
    # Each program looks at the words of its row, at the target and at the scale. In 4 rows the target is a class and has a logit.
    assert launch.read_bytes == x.nbytes + programs * (4 * 8 + 8 + 4) + 4 * 2
    # It writes its message, and says so before to the interpreter; for each row one of them writes the loss and stats.
    assert launch.write_bytes == x.nbytes + programs * 2 * 8 + 7 * (4 + 8)
    # And the messages are what is used: with a last one that says a larger maximum, the other parts' gradients are smaller.
    larger = found.view(7, 4).clone()
    larger[4:, 3] += 0x80_0000 << 32  # twice the maximum
    monkeypatch.setattr(parts, "torch", SimpleNamespace(zeros=lambda *_, **__: larger.flatten(), int64=torch.int64))
    dx = computed(x, target, 0.01)[2]
    assert torch.equal(dx[:3], alone[2][:3])
    assert (dx[5:, 2:1500].abs() < alone[2][5:, 2:1500].abs()).all(), "the target in column 1 has another share"


def test_pieces():
    """Those that were measured to be fastest, and no more parts than there are slots."""
    assert [parts.pieces_of(N) for N in (32_000, 50_304, 128_256)] == [8, 10, 8]
    for N in range(1, choices.SHARED_BYTES["cross_entropy"][-1] // 2, 128):
        assert -(-N // (parts.pieces_of(N) * parts.PIECE)) <= 32 * parts.WARPS


# ------------------------------------------------------------------------------------------------------------- choices
@pytest.fixture
def launched(pieces_of_64, monkeypatch):
    """Short rows are for Hopper, and the GPU is one. Counts the calls."""
    calls, original = [], parts.cross_entropy_parts

    def counted(*given):
        calls.append(given[0].shape)
        original(*given, patience=0)

    monkeypatch.setattr(parts, "cross_entropy_parts", counted)
    monkeypatch.setattr(choices, "for_hopper", lambda name, device: {"_cross_entropy_shared": parts}[name])
    monkeypatch.setattr(choices, "SHARED_BYTES", {"cross_entropy": range(4096, 8193)})
    return calls


def test_the_operation_takes_it(launched):
    x, target = logits(3, 2048, torch.bfloat16), torch.tensor([3, -100, 2047])
    results = []
    for kind, loss in (
        (torch.bfloat16, partial(kernels.cross_entropy, inplace=True)),
        (torch.float64, F.cross_entropy),
        (torch.float32, F.cross_entropy),
    ):
        leaf = x.to(kind).requires_grad_()
        value = loss(leaf.clone(), target)
        results.append((value.detach(), torch.autograd.grad(value, leaf)[0]))
    assert launched == [x.shape]
    for i, (ours, truth, native) in enumerate(zip(*results, strict=True)):
        assert_close(ours, truth, native.to(ours.dtype), gradient=i == 1)


def test_what_does_not_fit_goes_to_the_others(launched):
    x, target, weight = logits(4, 2048, torch.bfloat16), torch.tensor([1, 2, 3, -100]), torch.rand(2048)
    inplace = lambda x, target, **others: kernels.cross_entropy(x, target, **{"inplace": True, **others})  # noqa: E731
    with torch.no_grad():
        for taken, (begin, end), others in (
            (1, (0, 2048), {}),
            (1, (8, 2056), {"z_loss": 0.1}),
            (1, (0, 2048), {"reduction": "none"}),
            (0, (0, 2048), {"weight": weight}),
            (0, (0, 2048), {"label_smoothing": 0.1}),
            (0, (0, 2048), {"inplace": False}),
            (0, (0, 1920), {}),  # too short
            (0, (0, 4224), {}),  # too long
            (0, (4, 2052), {}),  # begins anywhere
            (0, (0, 2056), {}),  # no whole blocks of 128
        ):
            launched.clear()
            inplace(F.pad(x, (0, 4096))[:, begin:end], target, **others)
            assert len(launched) == taken, (begin, end, others)
        launched.clear()
        inplace(x.float(), target)
        inplace(x[:0], target[:0], reduction="sum")
        inplace(x.clone(), torch.softmax(x.float(), -1))
        assert not launched, "float32, no rows, probabilities"


def test_the_interpreter_gets_the_kernel_for_all(device):
    x = torch.empty(2, 50_304, dtype=torch.bfloat16, device=device)
    if device == "cpu":
        assert choices.shared("cross_entropy", x) is None


FOR_HOPPER = """
from gpukit.kernels import _cross_entropy_shared as parts

parts.launch, parts.interpreted = launch, lambda: False
stats, target, scale = torch.empty(2, 2), torch.empty(2, dtype=torch.int64), torch.empty(())
for V, dtype in ((32_000, torch.bfloat16), (32_768, torch.float16), (50_304, torch.bfloat16), (51_200, torch.float16)):
    for z_loss in (0.0, 1e-4):
        parts.cross_entropy_parts(torch.empty(2, V, dtype=dtype), target, stats, stats, scale, -100, z_loss)
"""


def test_it_compiles_without_a_gpu(tmp_path):
    """No register is lacking."""
    assert compile_for_hopper(FOR_HOPPER, tmp_path) == [0] * 16


# ---------------------------------------------------------------------------------------------------- on a GPU alone
@pytest.fixture
def on_hopper(device):
    if choices.for_hopper("_cross_entropy_shared", torch.device(device)) is None:
        pytest.skip("for Hopper")
    return device


@pytest.mark.gpu
@pytest.mark.parametrize("N", [31_744, 32_000, 40_960, 50_304, 128_256, 262_144, 1 << 20])
def test_any_number_of_rows(N, on_hopper):
    for M, dtype in ((1, torch.bfloat16), (33, torch.bfloat16), (131, torch.float16)):
        if M * N > 131 * 128_256:
            continue
        x = torch.randn(M, N, generator=seeded(M)).mul_(3).to(dtype).to(on_hopper)
        target = targets(M, N, on_hopper) % N if M > 1 else torch.tensor([N - 1], device=on_hopper)
        assert choices.shared("cross_entropy", x) is parts
        ours, scale = x.clone(), torch.tensor(0.5, device=on_hopper)
        losses, *_ = cross_entropy_module.cross_entropy_fwd(ours, target, -100, 0.0, 0.01, scale=scale)
        truth, native = (expected(x, target, 0.01, kind) for kind in (torch.float64, torch.float32))
        assert_close(losses, truth[0], native[0])
        assert_close(ours, truth[1], expected(x, target, 0.01, dtype)[1], gradient=True)


@pytest.mark.gpu
@pytest.mark.parametrize("N", [32_000, 50_304, 128_256])
def test_the_bits_do_not_depend_on_which_program_computes_a_message(N, on_hopper):
    """Without patience each program computes what is missing, while others overwrite their parts; with little, some do, and not
    those of the run before."""
    x, target = logits(600, N, torch.bfloat16, on_hopper), targets(600, N, on_hopper)
    first = computed(x, target, 0.01, 1 << 20)
    for patience in (0, 1, 2, 3, 4, 5, 6, 8, 12, 20, 1 << 20):
        for _ in range(3):
            assert same(computed(x, target, 0.01, patience), first), f"patience {patience}"


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_offsets_past_two_to_the_31(on_hopper):
    """More rows than are there at a time, against the kernel that reads each row twice."""
    N = 128_256
    M = 2**31 // N + 500
    x = torch.randn(M, N, device=on_hopper, dtype=torch.bfloat16)
    target = torch.randint(0, N, (M,), device=on_hopper)
    target[::7] = -100
    tail, scale = x[-256:].clone(), torch.tensor(1.0, device=on_hopper)
    losses, stats, _ = cross_entropy_module.cross_entropy_fwd(x, target, -100, 0.0, 1e-4, scale=scale)
    truth = expected(tail, target[-256:], 1e-4, torch.float32)
    torch.testing.assert_close(losses[-256:], truth[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x[-256:].float(), 2 * truth[1], rtol=2**-7, atol=1e-8)
    assert losses.isfinite().all() and stats.isfinite().all()
