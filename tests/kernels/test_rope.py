"""Rotary position embedding: the reference and its cost, and the kernel against it."""

import sys

import pytest
import torch

from gpukit.kernels import _launch, rope
from gpukit.op import Cost
from gpukit.reference.rope import OP, rotate, tables
from gpukit.testing import assert_close, poison
from tests.kernels.cases import DTYPES, LAYOUTS, check, every_second, padded_rows, seeded, shapes_of

kernels = sys.modules["gpukit.kernels.rope"]  # the package's attribute of that name is the function


def leaves(shape, dtype, device):
    """q and k, which want gradients, and the tables."""
    q, k, *angles = (x.to(device) for x in OP.make_inputs(shape, dtype, seeded()))
    return [q.requires_grad_(), k.requires_grad_(), *angles]


# ---------------------------------------------------------------------------------------------------------- reference
def test_reference_is_what_models_do():
    for shape in OP.test_shapes:
        inputs = OP.make_inputs(shape, torch.float64, seeded())
        torch.testing.assert_close(OP.reference(*inputs), OP.library(*inputs))


def test_reference_is_a_product_of_complex_numbers():
    """The definition in the paper: the pair of halves is a complex number, turned by e^(i angle)."""
    q, _, cos, sin = OP.make_inputs((2, 3, 1, 5, 8), torch.float64, seeded())
    turned = torch.complex(*q.chunk(2, -1)) * torch.complex(cos, sin)
    torch.testing.assert_close(rotate(q, cos, sin), torch.cat((turned.real, turned.imag), -1))


def test_tables():
    cos, sin = tables(3, 4, base=100.0)
    torch.testing.assert_close(cos, torch.tensor([[0, 0], [1, 0.1], [2, 0.2]], dtype=torch.float64).cos())
    torch.testing.assert_close(cos.square() + sin.square(), torch.ones_like(cos))


def test_scores_depend_on_distances_alone():
    """What the embedding is for: q at position m and k at position n give what they give 5 positions later."""
    cos, sin = tables(12, 8)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=seeded(), dtype=torch.float64)
    at = lambda x, t: rotate(x, cos[t : t + 1], sin[t : t + 1])  # noqa: E731
    torch.testing.assert_close((at(q, 6) * at(k, 2)).sum(), (at(q, 11) * at(k, 7)).sum())


def test_cost_by_hand():
    """q [1, 2, 3, 4], k [1, 1, 3, 4] and two tables [3, 2]: 36 elements turned and 12 more read."""
    assert OP.cost((1, 2, 1, 3, 4), torch.float32) == Cost(read_bytes=192, write_bytes=144, flops=108)
    assert OP.cost_bwd((1, 2, 1, 3, 4), torch.bfloat16) == Cost(read_bytes=96, write_bytes=72, flops=108)


# ------------------------------------------------------------------------------------------------------------- values
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_float64(dtype, device):
    for shape in shapes_of(OP, device):
        check(OP, rope, shape, dtype, device)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda f: f.__name__)
def test_every_layout(layout, device):
    for shape, dtype in (((2, 2, 1, 1, 4), torch.float32), ((1, 4, 2, 5, 62), torch.bfloat16)):
        check(OP, rope, shape, dtype, device, layout, dy_layout=layout)
    check(OP, rope, (2, 3, 1, 7, 64), torch.float16, device, layout, dy_layout=padded_rows)


def test_heads_after_tokens(device):
    """As a linear layer leaves them, [B, T, H, D], seen through a transpose."""
    q, k, cos, sin = (x.detach() for x in leaves((2, 4, 2, 5, 6), torch.float32, device))
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    for ours, expected in zip(rope(*views, cos, sin), OP.reference(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions_of_each_sequence(dtype, device):
    """Tables [B, T, D/2], where two sequences begin at different positions."""

    def shifted(q, k, cos, sin):
        return q, k, *(torch.stack((table, table.roll(2, 0))) for table in (cos, sin))

    check(OP, rope, (2, 3, 2, 5, 6), dtype, device, convert=shifted)


def test_tables_of_float32(device):
    """Tables keep their precision beside queries in 16 bits, and repeated ones may be cut."""
    q, k, cos, sin = leaves((1, 4, 2, 40, 8), torch.bfloat16, device)
    cos, sin = (table.to(device, torch.float32) for table in tables(40, 8))
    doubled = [torch.cat((table, table), -1)[..., :4] for table in (cos, sin)]
    for turned, again, x in zip(rope(q, k, cos, sin), rope(q, k, *doubled), (q, k), strict=True):
        truth = rotate(x.detach().double(), cos.double(), sin.double())
        assert_close(turned.detach(), truth, truth.to(turned.dtype))
        assert torch.equal(turned, again)


def test_float64_and_its_derivatives(device):
    q, k, cos, sin = leaves((1, 2, 1, 2, 4), torch.float64, device)
    torch.testing.assert_close(rope(q, k, cos, sin), OP.reference(q, k, cos, sin), rtol=1e-13, atol=1e-13)
    small = [torch.randn_like(x).requires_grad_() for x in (q, k)]
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, cos, sin), small)
    assert torch.autograd.gradgradcheck(lambda q, k: rope(q, k, cos, sin), small)


def test_one_of_two_results_is_used(device):
    for used in (0, 1):
        q, k, cos, sin = leaves((1, 2, 1, 3, 4), torch.float32, device)
        gradients = torch.autograd.grad(rope(q, k, cos, sin)[used].sum(), (q, k))
        assert (gradients[1 - used] == 0).all() and (gradients[used] != 0).any()


@pytest.mark.parametrize("shape", [(0, 2, 1, 3, 4), (2, 0, 1, 3, 4), (2, 2, 0, 3, 4), (1, 2, 1, 0, 4), (1, 2, 1, 3, 0)])
def test_sizes_zero(shape, device):
    B, H, H_kv, T, D = shape
    q, k = (torch.randn(B, n, T, D, device=device).requires_grad_() for n in (H, H_kv))
    cos, sin = (torch.randn(T, D // 2, device=device) for _ in range(2))
    ours, expected = rope(q, k, cos, sin), OP.reference(q, k, cos, sin)
    torch.testing.assert_close(ours, expected)
    for dx, x in zip(torch.autograd.grad([y.sum() for y in ours], (q, k)), (q, k), strict=True):
        assert dx.shape == x.shape


def test_gradients_without_strides(device):
    """sum().backward() hands down one number with stride 0 in every dimension."""
    q, k, cos, sin = leaves((2, 3, 2, 5, 6), torch.float32, device)
    both = [torch.autograd.grad(sum(y.sum() for y in fn(q, k, cos, sin)), (q, k)) for fn in (rope, OP.library)]
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_expanded_inputs(device):
    """One key head seen as four, and one position for the whole batch."""
    q, k, cos, sin = (x.detach() for x in leaves((2, 4, 1, 5, 6), torch.float32, device))
    k, cos, sin = k.expand(2, 4, 5, 6), cos.expand(2, 5, 3), sin.expand(2, 5, 3)
    for ours, expected in zip(rope(q, k, cos, sin), OP.reference(q, k, cos, sin), strict=True):
        torch.testing.assert_close(ours, expected)


# ------------------------------------------------------------------------------------------------------------- memory
def test_every_element_is_written(device, monkeypatch):
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **options: poison(empty_like(*a, **options)))
    q, k, cos, sin = leaves((2, 5, 3, 7, 62), torch.float32, device)
    outputs = rope(q, k, cos, sin)
    assert not any(y.isnan().any() for y in outputs)
    assert not any(dx.isnan().any() for dx in torch.autograd.grad([y.sum() for y in outputs], (q, k)))


def test_offsets_beyond_int32(device):
    """Heads 2^30 elements apart, in 4 GB that are never touched in between."""
    q = torch.empty(2 * 2**30 + 50, dtype=torch.float16, device=device).as_strided((1, 3, 2, 20), (1, 2**30, 20, 1))
    q.copy_(torch.randn(q.shape, generator=seeded()))
    near, (cos, sin) = q.clone(), (table.to(device, q.dtype) for table in tables(2, 20))
    for far, close in zip(rope(q, q, cos, sin), rope(near, near, cos, sin), strict=True):
        assert torch.equal(far, close)


def test_deterministic_new_and_contiguous(device):
    q, k, cos, sin = leaves((2, 5, 3, 7, 8), torch.float32, device)
    first, second = rope(q, k, cos, sin), rope(q, k, cos, sin)
    strided = rope(every_second(q.detach()), every_second(k.detach()), every_second(cos), every_second(sin))
    for y, again, other in zip(first, second, strided, strict=True):
        assert torch.equal(y, again) and torch.equal(y, other) and y.is_contiguous() and other.is_contiguous()
    assert not {y.data_ptr() for y in first} & {x.data_ptr() for x in (q, k)}


# ------------------------------------------------------------------------------------------------------------- errors
def test_bad_arguments(device, monkeypatch):
    q, k, cos, sin = (x.detach() for x in leaves((2, 4, 2, 5, 6), torch.float32, device))
    with pytest.raises(TypeError, match=r"rope: q must be float16, bfloat16, float32 or float64, got torch\.int64"):
        rope(q.long(), k, cos, sin)
    with pytest.raises(ValueError, match=r"rope: k must be \[batch, heads, tokens, head size\], got \[2, 5, 6\]"):
        rope(q, k[:, 0], cos, sin)
    with pytest.raises(TypeError, match=r"rope: k must have the dtype of q, torch\.float32, got torch\.float16"):
        rope(q, k.half(), cos, sin)
    with pytest.raises(ValueError, match=r"rope: k must be \[2, heads, 5, 6\] as q is but for the heads, got \[1, 2,"):
        rope(q, k[:1], cos, sin)
    with pytest.raises(ValueError, match="rope: the head size of q and k must be even, got 5"):
        rope(q[..., 1:], k[..., 1:], cos, sin)
    with pytest.raises(ValueError, match=r"rope: cos must be \[5, 3\] or \[2, 5, 3\], got \[5, 6\]"):
        rope(q, k, torch.cat((cos, cos), -1), sin)
    with pytest.raises(ValueError, match=r"rope: sin must have the shape of cos, \[5, 3\], got \[2, 5, 3\]"):
        rope(q, k, cos, sin.expand(2, 5, 3))
    with pytest.raises(ValueError, match=r"rope: cos requires a gradient, and gets none here; pass cos\.detach\(\)"):
        rope(q, k, cos.clone().requires_grad_(), sin)
    monkeypatch.setattr(_launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match="rope: q is on cpu; Triton needs a CUDA tensor here, or TRITON_INTERPRET=1"):
        rope(*(x.cpu() for x in (q, k, cos, sin)))


@pytest.mark.gpu
def test_tensors_on_two_devices(device):
    q, k, cos, sin = leaves((2, 4, 2, 5, 6), torch.float32, device)
    with pytest.raises(ValueError, match="rope: sin is on cpu"):
        rope(q, k, cos, sin.cpu())


# ------------------------------------------------------------------------------------------------------------ PyTorch
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # inductor's advice on matmuls, and there is none here
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_torch_compile_without_a_graph_break(backend, device):
    def model(fn, q, k, cos, sin):
        q, k = fn(2 * q, k, cos, sin)
        return q.sin(), k * 2

    torch.compiler.reset()
    compiled = torch.compile(lambda *x: model(rope, *x), fullgraph=True, backend=backend, dynamic=True)
    for shape in ((2, 4, 2, 5, 6), (3, 3, 3, 7, 8)):
        q, k, cos, sin = leaves(shape, torch.float32, device)
        ours, expected = compiled(q, k, cos, sin), model(OP.reference, q, k, cos, sin)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)
        both = [torch.autograd.grad([y.sum() for y in results], (q, k)) for results in (ours, expected)]
        for got, wanted in zip(*both, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_operator_registration(device):
    q, k, cos, sin = leaves((2, 4, 2, 5, 6), torch.float32, device)
    views = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k)]
    for given in ((q, k), views):
        for backwards in (False, True):
            torch.library.opcheck(torch.ops.gpukit.rope.default, (*given, cos, sin, backwards))


def test_autocast_leaves_the_dtype(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, cos, sin = leaves((1, 2, 1, 3, 4), dtype, device)
            assert [x.dtype for x in rope(q, k, cos.float(), sin.float())] == [dtype] * 2


# ---------------------------------------------------------------------------------------------------- on a GPU alone
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes_of_models(dtype, device):
    for shape in (
        (2, 32, 8, 100, 128),
        (1, 64, 8, 33, 128),
        (2, 12, 12, 200, 64),
        (1, 71, 1, 17, 80),
        (1, 8, 8, 9, 256),
    ):
        check(OP, rope, shape, dtype, device)
        check(OP, rope, shape, dtype, device, every_second, dy_layout=padded_rows)


@pytest.mark.gpu
def test_more_than_2_31_elements(device):
    T = 2**31 // (8 * 128) + 2
    q = torch.randn((1, 8, T, 128), device=device, dtype=torch.bfloat16)
    k = q[:, :1]
    cos, sin = (torch.randn((T, 64), device=device, dtype=torch.bfloat16) for _ in range(2))
    turned = rope(q, k, cos, sin)
    for x, y in zip((q, k), turned, strict=True):
        for part in (slice(0, 2), slice(T - 2, T)):
            truth = rotate(x[:, :, part].double(), cos[part].double(), sin[part].double())
            assert_close(y[:, :, part], truth, truth.to(y.dtype))


@pytest.mark.gpu
def test_cuda_graph(device):
    q, k, cos, sin = (x.detach() for x in leaves((2, 32, 8, 100, 128), torch.bfloat16, device))

    def there_and_back():
        turned = rope(q, k, cos, sin)
        return *turned, *kernels.rope_turn(*turned, cos, sin, True)

    there_and_back()  # compiles, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = there_and_back()
    q.copy_(torch.randn_like(q))
    graph.replay()
    assert all(map(torch.equal, results, there_and_back()))
