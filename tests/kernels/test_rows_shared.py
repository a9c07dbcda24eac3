"""Softmax and its gradient of rows that several programs share: in the interpreter, where programs run one after the other, and on a
Hopper GPU."""

import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import gpukit
from gpukit import hardware
from gpukit.kernels import _rows_choices as choices
from gpukit.kernels import _rows_shared, log_softmax, softmax
from gpukit.kernels.softmax import softmax_bwd
from gpukit.testing import assert_close, poison
from tests.kernels.cases import compile_for_hopper, padded_rows, seeded

softmax_module = sys.modules["gpukit.kernels.softmax"]
LONG = 131_072
# Columns that are whole parts, and that are not; one part alone; fewer numbers than a part.
CASES = [(7, 4096), (3, 2000), (1, 1040), (5, 512), (2, 16)]
FUNCTIONS = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])


def name(log):
    return "log_softmax" if log else "softmax"


def random(*shape, dtype=torch.float32, seed=0, device="cpu"):
    return torch.randn(shape, generator=seeded(seed)).mul_(3).to(dtype).to(device)


def given(M, N, dtype, log, device="cpu"):
    """y and dy; the last rows' dy are zeros, and hold a NaN, as far as there are rows."""
    x = random(M, N, device=device)
    y, dy = (
        (torch.log_softmax if log else torch.softmax)(x, -1).to(dtype),
        random(M, N, dtype=dtype, seed=1, device=device),
    )
    if M > 4:
        dy[-1], dy[-2, N // 3] = 0, float("nan")
    return y, dy


def gradients(y, dy, log):
    return dy - y.exp() * dy.sum(-1, keepdim=True) if log else y * (dy - (y * dy).sum(-1, keepdim=True))


def shared(y, dy, log, patience):
    dx = poison(torch.empty_like(y))
    _rows_shared.softmax_gradients(y, dy, dx, log, patience)
    return dx


@pytest.fixture
def parts_of_512(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a GPU gets parts as large as they are")
    monkeypatch.setattr(_rows_shared, "PART", 512)


def numbers(M, N, dtype, device="cpu"):
    """x; parts of 512 of the first row have -inf alone, and of the last rows one is of -inf and one holds a NaN, as far as there are
    rows."""
    x = random(M, N, dtype=dtype, device=device)
    x[0, 512:1024] = -float("inf")
    if M > 4:
        x[-1], x[-2, N // 3] = -float("inf"), float("nan")
    return x


def forward(x, log, patience):
    y = poison(torch.empty(x.shape, dtype=x.dtype, device=x.device))
    _rows_shared.softmax_parts(x, y, log, patience)
    return y


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("M", "N"), CASES, ids=str)
def test_forward_nobody_waits_forever(M, N, dtype, log, parts_of_512):
    x, fn = numbers(M, N, dtype), torch.log_softmax if log else torch.softmax
    wide = torch.empty(M, N + 24, dtype=dtype)[:, :N].copy_(x)  # its rows lie apart
    for patience in (0, 3):
        y = forward(wide, log, patience)
        assert_close(y, fn(x.double(), -1), fn(x, -1))
        assert M <= 4 or (y[-1].isnan().all() and y[-2].isnan().all() and not y[:-2].isnan().any())


@FUNCTIONS
def test_forward_words_that_have_come_give_the_same_bits(log, parts_of_512, monkeypatch):
    x = numbers(7, 2000, torch.bfloat16)
    kept = kept_words(monkeypatch)
    alone = forward(x, log, 0)
    (words,) = kept
    assert words.shape == (7 * 4,) and (words != 0).all()
    maxima, sums = ((words >> shift).to(torch.int32).view(torch.float32).view(7, 4) for shift in (32, 0))
    for part in range(4):
        own = x[:, 512 * part : 512 * (part + 1)].float()
        m = own.amax(-1).clamp(min=torch.finfo(torch.float32).min)
        finite = ~own.isnan().any(-1)
        assert torch.equal(maxima[finite, part], m[finite])
        torch.testing.assert_close(sums[:, part][finite], (own - m[:, None]).exp().sum(-1)[finite])

    def again(words):
        with monkeypatch.context() as patch:
            patch.setattr(_rows_shared, "torch", SimpleNamespace(zeros=lambda *_, **__: words, int64=torch.int64))
            return forward(x, log, 0)

    assert torch.equal(again(words.clone()).nan_to_num(7), alone.nan_to_num(7))
    # And the messages are what is used: with a sum that is larger by 100 in the last part's, which its program posts only at the end.
    larger = torch.where(torch.arange(4) == 3, sums + 100, sums).view(torch.int32).long() & 0xFFFFFFFF
    found = again((words.view(7, 4) >> 32 << 32 | larger).flatten())
    m = maxima.amax(-1, keepdim=True)
    total = (sums * (maxima - m).exp()).sum(-1, keepdim=True) + 100 * (maxima[:, 3:] - m).exp()
    expected = (x - m - total.log() if log else (x - m).exp() / total).bfloat16()
    torch.testing.assert_close(found[:5, :1536], expected[:5, :1536], rtol=2**-6, atol=1e-4)
    assert torch.equal(found[:5, 1536:], alone[:5, 1536:])


@FUNCTIONS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("M", "N"), CASES, ids=str)
def test_nobody_waits_forever(M, N, dtype, log, parts_of_512):
    """The first program of a row finds no word of the others, the last one finds all."""
    y, dy = given(M, N, dtype, log)
    for patience in (0, 3):
        dx = shared(y, dy, log, patience)
        assert_close(dx, gradients(y.double(), dy.double(), log), gradients(y, dy, log), gradient=True)


def kept_words(monkeypatch):
    """The words of the calls from now on."""
    zeros, kept = torch.zeros, []

    def words(*shape, **options):
        kept.append(zeros(*shape, **options))
        return kept[-1]

    monkeypatch.setattr(_rows_shared, "torch", SimpleNamespace(zeros=words, int64=torch.int64))
    return kept


def launched_with(words, y, dy, log, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(_rows_shared, "torch", SimpleNamespace(zeros=lambda *_, **__: words, int64=torch.int64))
        return shared(y, dy, log, 0)


@FUNCTIONS
def test_words_that_have_come_give_the_same_bits(log, parts_of_512, monkeypatch):
    y, dy = given(7, 2000, torch.bfloat16, log)
    kept = kept_words(monkeypatch)
    alone = shared(y, dy, log, 0)
    (words,) = kept
    assert words.shape == (7 * 4,) and (words != 0).all(), "a sum of 0 and one that is NaN are messages, too"
    # The same sums in other words, so that it is seen that each program posts its own.
    others = words + 2
    assert torch.equal(launched_with(others, y, dy, log, monkeypatch).nan_to_num(7), alone.nan_to_num(7))
    assert torch.equal(others, words)
    # And the sums in them are what is used: with 1 more in the last part's, which its program posts only at the end.
    sums = (words >> 32).to(torch.int32).view(torch.float32).view(7, 4)
    terms = (dy if log else y.float() * dy.float()).float()
    for part in range(4):
        expected = terms[:, 512 * part : 512 * (part + 1)].sum(-1)
        torch.testing.assert_close(sums[:, part], expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    moved = torch.where(torch.arange(4) == 3, sums + 1, sums).view(torch.int32).long() << 32 | 3
    found = launched_with(moved.flatten(), y, dy, log, monkeypatch)
    dot = sums.sum(-1, keepdim=True) + 1
    expected = (dy - y.float().exp() * dot if log else y * (dy - dot)).bfloat16()
    assert torch.equal(found[:5, 1536:], alone[:5, 1536:]) and (found[:5] != alone[:5]).any(-1).all()
    torch.testing.assert_close(found[:5, :1536], expected[:5, :1536], rtol=2**-6, atol=1e-4)


def test_each_byte_is_read_once_where_nobody_waits(parts_of_512, monkeypatch):
    y, dy = given(3, 2048, torch.bfloat16, False)
    kept = kept_words(monkeypatch)
    shared(y, dy, False, 0)
    with gpukit.trace() as t:
        launched_with(kept[0], y, dy, False, monkeypatch)
    (launch,) = t.launches
    programs = 3 * 4
    assert launch.read_bytes == 2 * y.nbytes + programs * 4 * 8, "each looks at the words of its row"
    assert launch.write_bytes == y.nbytes + programs * 8, "and posts its own"
    kept = kept_words(monkeypatch)
    result = forward(y, False, 0)
    with gpukit.trace() as t, monkeypatch.context() as patch:
        patch.setattr(_rows_shared, "torch", SimpleNamespace(zeros=lambda *_, **__: kept[0], int64=torch.int64))
        assert torch.equal(forward(y, False, 0), result)
    (launch,) = t.launches
    assert (launch.read_bytes, launch.write_bytes) == (y.nbytes + programs * 4 * 8, y.nbytes + programs * 8)


@pytest.fixture
def as_on_hopper(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("a GPU has choices of its own")
    monkeypatch.setattr(choices, "for_hopper", lambda name, device: name)


def test_which_rows_are_shared(as_on_hopper):
    def taken(N=LONG, M=2, dtype=torch.bfloat16, log=False):
        y = torch.empty(M, N, dtype=dtype, device="meta")
        return choices.shared(name(log), y, y) == "_rows_shared"

    assert taken() and taken(M=1) and taken(dtype=torch.float16) and taken(65_664) and taken(128_256) and taken(1 << 20)
    assert taken(40_960) and not taken(40_832), "shorter rows stay with the others"
    assert taken(65_536, log=True) and not taken(65_408, log=True)
    for N, whether in (
        (32_768, False),
        (32_896, True),
        (50_304, True),
        (65_536, True),
        (1 << 20, True),
        ((1 << 20) + 128, False),
    ):
        assert (
            choices.shared("forward", torch.empty(2, N, dtype=torch.bfloat16, device="meta")) is not None
        ) == whether
    assert choices.SHARED_BYTES["forward"][-1] // 2 <= _rows_shared.PART * 32 * _rows_shared.FORWARD_WARPS
    assert choices.SHARED_BYTES["softmax"][-1] // 2 <= _rows_shared.PART * 32 * _rows_shared.WARPS, (
        "a slot for each part"
    )
    assert not taken((1 << 20) + 128), "more parts than may be there at a time"
    assert not taken(LONG + 16) and not taken(dtype=torch.float32) and not taken(dtype=torch.float64)
    y = torch.empty(2, LONG, dtype=torch.bfloat16, device="meta")
    for dy, whether in (
        (torch.empty(2, LONG + 8, dtype=y.dtype, device="meta")[:, :LONG], True),
        (torch.empty(2, LONG + 4, dtype=y.dtype, device="meta")[:, :LONG], False),  # rows that begin anywhere
        (torch.empty(1, 1, dtype=y.dtype, device="meta").expand(2, LONG), False),
        (torch.empty(1, LONG, dtype=y.dtype, device="meta").expand(2, LONG), False),
    ):
        assert (choices.shared("softmax", y, dy) is not None) == whether


def test_the_interpreter_and_other_gpus_get_the_pointer_kernel(device):
    y = torch.empty(2, LONG, dtype=torch.bfloat16, device=device)
    if device == "cpu":
        assert choices.shared("softmax", y, y) is None
    for gpu in ("h100", "a100"):
        with hardware.imagined(hardware.gpu(gpu)):
            assert choices.shared("softmax", y, y) is None


@FUNCTIONS
def test_the_operation_takes_it(log, parts_of_512, monkeypatch):
    fn = log_softmax if log else softmax
    monkeypatch.setattr(choices, "for_hopper", lambda name, device: _rows_shared if name == "_rows_shared" else None)
    monkeypatch.setattr(choices, "SHARED_BYTES", dict.fromkeys(choices.SHARED_BYTES, range(4096, 8193)))
    monkeypatch.setattr(softmax_module, "RESIDENT", 1024)
    monkeypatch.setattr(_rows_shared, "softmax_gradients", partial(_rows_shared.softmax_gradients, patience=0))
    monkeypatch.setattr(_rows_shared, "softmax_parts", partial(_rows_shared.softmax_parts, patience=0))
    kept = kept_words(monkeypatch)
    for layout in (torch.clone, padded_rows, lambda dy: torch.nn.functional.pad(dy, (0, 128))[..., :-128]):
        x, dy = (
            random(2, 3, 2048, dtype=torch.bfloat16).requires_grad_(),
            layout(random(2, 3, 2048, dtype=torch.bfloat16, seed=1)),
        )
        y = fn(x)
        (dx,) = torch.autograd.grad(y, x, dy)
        plain = torch.log_softmax if log else torch.softmax
        assert_close(y.detach(), plain(x.detach().double(), -1), plain(x.detach(), -1))
        results = []
        for kind in (torch.float64, torch.bfloat16):
            leaf = x.detach().to(kind).requires_grad_()
            results += torch.autograd.grad((torch.log_softmax if log else torch.softmax)(leaf, -1), leaf, dy.to(kind))
        assert_close(dx, *results, gradient=True)
    assert len(kept) == 3 + 2, "rows that begin at any address are not shared"


FOR_HOPPER = """
from gpukit.kernels import _rows_shared

_rows_shared.launch, _rows_shared.interpreted = launch, lambda: False
for N, dtype in ((131072, torch.bfloat16), (131072, torch.float16), (128256, torch.bfloat16)):
    for log in (False, True):
        x = torch.empty(2, N, dtype=dtype)
        _rows_shared.softmax_gradients(x, x, x, log)
        _rows_shared.softmax_parts(x, x, log)
"""


def test_it_compiles_without_a_gpu(tmp_path):
    """In 64 registers with none lacking, and forward in 56."""
    spilled = compile_for_hopper(FOR_HOPPER, tmp_path)
    assert spilled == [0] * 24


# ---------------------------------------------------------------------------------------------------- on a GPU alone
@pytest.fixture
def chosen(device, monkeypatch):
    """One name for each call for which several programs were to share a row."""
    if choices.for_hopper("_rows_shared", torch.device(device)) is None:
        pytest.skip("chosen on Hopper")
    names, original = [], softmax_module.shared

    def spy(*tensors):
        found = original(*tensors)
        names.extend(["_rows_shared"] if found else [])
        return found

    monkeypatch.setattr(softmax_module, "shared", spy)
    return names


@pytest.mark.gpu
@FUNCTIONS
@pytest.mark.parametrize("N", [65_536, 65_664, 128_256, LONG, 200_064, 1 << 20])
def test_any_number_of_rows(N, log, device, chosen):
    ours, theirs = (log_softmax, torch.log_softmax) if log else (softmax, torch.softmax)
    for M, dtype in ((1, torch.bfloat16), (33, torch.bfloat16), (131, torch.float16)):
        if M * N > 131 * 200_064:
            continue
        x, dy = random(M, N, dtype=dtype, device=device), random(M, N, dtype=dtype, seed=1, device=device)
        wide = torch.empty(M, N + 8, dtype=dtype, device=device)[:, :N].copy_(dy)  # its rows lie apart
        leaf = x.clone().requires_grad_()
        y = ours(leaf)
        (dx,) = torch.autograd.grad(y, leaf, wide)
        truth, native = x.double().requires_grad_(), x.clone().requires_grad_()
        expected = [theirs(leaf, -1) for leaf in (truth, native)]
        assert_close(y.detach(), *(y.detach() for y in expected), what="y")
        true_dx, near_dx = (
            torch.autograd.grad(y, leaf, dy.to(y.dtype))[0] for y, leaf in zip(expected, (truth, native), strict=True)
        )
        assert_close(dx, true_dx, near_dx, gradient=True, what="dx")
        assert chosen == ["_rows_shared"] * 2
        chosen.clear()


@pytest.mark.gpu
@FUNCTIONS
def test_rows_without_a_sum(log, device, chosen):
    """NaN and infinity in a row reach all of its parts, and no other row."""
    y, dy = given(40, LONG, torch.bfloat16, log, device)
    dy[3, 7], dy[5, LONG - 1], y[7, 50_000], dy[9] = float("nan"), float("inf"), float("nan"), 0
    dx = softmax_bwd(y, dy, log)
    torch.testing.assert_close(
        dx, gradients(y.float(), dy.float(), log).bfloat16(), rtol=2**-6, atol=1e-5, equal_nan=True
    )
    assert chosen == ["_rows_shared"] and dx.isnan().any(-1).sum() == 4 and (dx[9] == 0).all()


@pytest.mark.gpu
@FUNCTIONS
@pytest.mark.parametrize("N", [LONG, 128_256])
def test_the_bits_do_not_depend_on_which_program_computes_a_sum(N, log, device, chosen):
    """Without patience each program computes all of them; with little, some do, and not those of the run before."""
    y, dy = given(600, N, torch.bfloat16, log, device)
    dy.nan_to_num_(0)
    expected = softmax_bwd(y, dy, log)
    for patience in (0, 1, 2, 3, 4, 5, 6, 8, 12, 20, 1 << 20):
        for _ in range(3):
            assert torch.equal(shared(y, dy, log, patience), expected), f"patience {patience}"


@pytest.mark.gpu
@FUNCTIONS
@pytest.mark.parametrize("N", [LONG, 128_256, 50_304])
def test_forward_bits_do_not_depend_on_which_program_computes_a_message(N, log, device, chosen):
    x = numbers(600, N, torch.bfloat16, device)
    bits = lambda y: y.view(torch.int16)  # noqa: E731 NaN equals itself
    expected = forward(x, log, 1 << 20)
    fn = torch.log_softmax if log else torch.softmax
    assert_close(expected[:9], fn(x[:9].double(), -1), fn(x[:9], -1))
    for patience in (0, 1, 2, 3, 4, 5, 6, 8, 12, 20, 1 << 20):
        for _ in range(3):
            assert torch.equal(bits(forward(x, log, patience)), bits(expected)), f"patience {patience}"


@pytest.mark.gpu
def test_graphs_and_streams_at_a_time(device, chosen):
    tensors = [given(400, LONG, torch.bfloat16, False, device) for _ in range(2)]
    expected = [softmax_bwd(y, dy) for y, dy in tensors]
    streams, graphs = [torch.cuda.Stream() for _ in range(4)], []
    for y, dy in tensors:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dx = softmax_bwd(y, dy)
        graphs.append((graph, dx))
    torch.cuda.synchronize()
    results = []
    for _ in range(10):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if i < 2:
                    graphs[i][0].replay()
                else:
                    results.append((softmax_bwd(*tensors[i - 2]), expected[i - 2]))
    torch.cuda.synchronize()
    results += [(dx, expected[i]) for i, (_, dx) in enumerate(graphs)]
    assert all(torch.equal(dx.nan_to_num(7), true.nan_to_num(7)) for dx, true in results)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_every_element_at_full_size(device, chosen, monkeypatch):
    """More rows than are there at a time, against the kernel that reads each row twice."""
    y = torch.softmax(torch.randn(4096, LONG, device=device, dtype=torch.bfloat16), -1)
    dy = torch.randn_like(y)
    dx, again = softmax_bwd(y, dy), softmax_bwd(y, dy)
    assert chosen == ["_rows_shared"] * 2 and torch.equal(dx, again)
    monkeypatch.setattr(softmax_module, "shared", lambda *_: None)
    others = softmax_bwd(y, dy)
    for i in range(0, 4096, 256):
        torch.testing.assert_close(dx[i : i + 256], others[i : i + 256], rtol=2**-7, atol=2e-7)
