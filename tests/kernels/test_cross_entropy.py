"""Cross-entropy, of logits and of a linear layer: the references, and the kernels against them."""

import pytest
import torch
import torch.nn.functional as F

from gpukit.kernels.cross_entropy import cross_entropy, cross_entropy_bwd, cross_entropy_fwd
from gpukit.kernels.linear_cross_entropy import chunk_tokens, linear_cross_entropy
from gpukit.op import Cost
from gpukit.reference import cross_entropy as reference
from gpukit.reference import linear_cross_entropy as linear_reference
from gpukit.testing import assert_close, poison
from tests.kernels.cases import (
    DTYPES,
    agree,
    contiguous,
    every_second,
    noise,
    opchecked,
    padded_rows,
    seeded,
    transposed,
)
from tests.kernels.cases import check as check_operation
from tests.kernels.operations import without_infinities

# Options, and a row longer than one block of the kernel (float64 has the shortest).
OPTIONS = (
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"reduction": "none", "z_loss": 1e-3},
    {"label_smoothing": 1.0, "z_loss": 1e-2},
)
LONG = 40_001


def check(shape, dtype, device, layout=contiguous, options=None, inplace=False):
    """In place too it is the logits' copy that is overwritten."""

    def fn(x, target, **options):
        return cross_entropy(x * 1 if inplace else x, target, **options, inplace=inplace)

    options = options or {}
    convert = without_infinities if options.get("label_smoothing") else None
    native = reference.cross_entropy
    check_operation(reference.OP, fn, shape, dtype, device, layout, convert=convert, native=native, **options)


# ---------------------------------------------------------------------------------------------------------- reference
def test_reference_is_pytorchs():
    for shape in reference.OP.test_shapes:
        x, target = reference.make_inputs(shape, torch.float64, seeded())
        for options in ({}, {"reduction": "sum"}, {"reduction": "none"}):
            expected = F.cross_entropy(x.view(-1, shape[-1]), target.view(-1), **options)
            torch.testing.assert_close(
                reference.cross_entropy(x, target, **options).flatten(), expected.flatten(), equal_nan=True
            )
    x = torch.randn(5, 9, dtype=torch.float64, generator=seeded())
    target = torch.tensor([0, 8, -100, 3, 3])
    expected = F.cross_entropy(x, target, label_smoothing=0.1)
    torch.testing.assert_close(reference.cross_entropy(x, target, label_smoothing=0.1), expected)


def test_cost_by_hand():
    assert reference.cost((2, 3), torch.bfloat16) == Cost(2 * (6 + 8), 8, 24)
    assert reference.cost_both((2, 3), torch.bfloat16) == Cost(2 * (6 + 8), 2 * (6 + 4), 48)
    assert linear_reference.cost((2, 3, 5), torch.float32).flops == 2 * 2 * 3 * 5


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_matches_float64(dtype, device):
    for options in OPTIONS:
        check((5, 65), dtype, device, options=options, inplace=True)
    check((2, 3, 781), dtype, device, inplace=True)
    check((3, LONG), dtype, device, inplace=True)


@pytest.mark.parametrize("layout", [padded_rows, every_second, transposed], ids=lambda f: f.__name__)
def test_any_strides_of_long_rows(layout, device):
    check((2, LONG), torch.bfloat16, device, layout)


def test_rows_longer_than_a_block(device):
    for options in OPTIONS:
        check((3, LONG), torch.float32, device, options=options)


def test_float64_is_computed_in_float64(device):
    x = torch.randn(3, LONG, generator=seeded(), dtype=torch.float64).to(device)
    target = torch.tensor([5, LONG - 1, 0], device=device)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    losses = cross_entropy(ours, target, label_smoothing=0.1), F.cross_entropy(theirs, target, label_smoothing=0.1)
    torch.testing.assert_close(*losses, rtol=1e-13, atol=0)
    gradients = (torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip(losses, (ours, theirs), strict=True))
    torch.testing.assert_close(*gradients, rtol=1e-11, atol=1e-16)


def test_in_place_there_is_no_second_derivative(device):
    x = torch.randn(4, 9, generator=seeded()).to(device).requires_grad_()
    target = torch.tensor([0, 8, -100, 3], device=device, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(cross_entropy(x * 1, target, inplace=True), x, create_graph=True)
    call = lambda x: cross_entropy(x, target, label_smoothing=0.1, z_loss=0.01, reduction="none")  # noqa: E731
    assert torch.autograd.gradgradcheck(call, (x.detach().double().requires_grad_(),), fast_mode=True)


@pytest.mark.parametrize("far", [1e3, -3e4, 1e30, -3.4028234663852886e38])
@pytest.mark.parametrize("how", ["", "inplace", "linear"])
def test_logits_far_from_zero(how, far, device):
    """What all logits of a row have in common changes nothing, also where a float32 has no digits left beside it."""
    x = torch.randn(4, 33, generator=seeded()) + far
    x = x.clamp(min=torch.finfo(torch.float32).min)
    target = torch.tensor([0, 32, 7, 7])
    leaves = [x.double().requires_grad_(), x.clone().requires_grad_(), x.to(device).requires_grad_()]
    losses = [F.cross_entropy(leaf, target) for leaf in leaves[:2]]
    if how == "linear":
        losses.append(linear_cross_entropy(leaves[2], torch.eye(33, device=device), target.to(device)))
    else:
        losses.append(cross_entropy(leaves[2] * 1, target.to(device), inplace=how == "inplace"))
    truth, native, ours = (torch.autograd.grad(loss, leaf)[0] for loss, leaf in zip(losses, leaves, strict=True))
    assert_close(losses[2].detach().cpu(), losses[0].detach(), losses[1].detach(), what="loss")
    assert_close(ours.cpu(), truth, native, gradient=True, what="dx")


def test_rows_without_a_loss(device):
    x = torch.randn(5, 7, generator=seeded())
    x[0], x[1, 3], x[2, 1], x[3, 2] = -torch.inf, torch.inf, torch.nan, -torch.inf
    target = torch.tensor([1, 0, 0, 2, 2])
    ours = cross_entropy(x.to(device), target.to(device), reduction="none").cpu()
    torch.testing.assert_close(ours, F.cross_entropy(x, target, reduction="none"), equal_nan=True)


def test_nothing_to_learn_from(device):
    x = torch.randn(3, 5, device=device, requires_grad=True)
    target = torch.full((3,), -100, device=device)
    assert cross_entropy(x, target).isnan() and F.cross_entropy(x, target).isnan()
    assert cross_entropy(x, target, reduction="sum") == 0
    empty = torch.randn(0, 5, device=device, requires_grad=True)
    assert cross_entropy(empty, target[:0]).isnan()
    assert torch.autograd.grad(cross_entropy(empty, target[:0], reduction="sum"), empty)[0].shape == (0, 5)


def test_no_leading_dimension_and_int32_targets(device):
    x = torch.randn(7, generator=seeded()).to(device)
    target = torch.tensor(3, device=device, dtype=torch.int32)
    torch.testing.assert_close(cross_entropy(x, target), F.cross_entropy(x, target.long()))


def test_one_class_is_certain(device):
    x = torch.randn(3, 1, device=device, requires_grad=True)
    loss = cross_entropy(x, torch.zeros(3, dtype=torch.int64, device=device))
    assert loss == 0 and (torch.autograd.grad(loss, x)[0] == 0).all()


# ------------------------------------------------------------------------------------- class weights and probabilities
def shares(N, V, soft=False, weighted=False, seed=0):
    """Logits, a target (probabilities too may be any numbers) and class weights, one of them 0; or None."""
    weight = (noise(V, seed=seed + 1).abs() * 8).round() / 8 if weighted else None  # the same in 16 bits
    if weighted:
        weight[V // 2] = 0
    if soft:
        return noise(N, V, seed=seed), noise(N, V, seed=seed + 2).abs(), weight
    target = torch.randint(0, V, (N,), generator=seeded(seed + 2))
    target[1::3] = -100
    return noise(N, V, seed=seed), target, weight


def functions(weight, inplace=False, **options):
    """Ours and PyTorch's."""

    def ours(x, target):
        w = None if weight is None else weight.to(x.device, x.dtype)
        return cross_entropy(x * 1 if inplace else x, target, weight=w, inplace=inplace, **options)

    def theirs(x, target):
        return F.cross_entropy(x, target, None if weight is None else weight.to(x), **options)

    return ours, theirs


KINDS = pytest.mark.parametrize(
    ("soft", "weighted"), [(False, True), (True, False), (True, True)], ids=["weights", "probabilities", "both"]
)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@KINDS
def test_shares_of_classes(soft, weighted, dtype, device):
    for N, V in ((5, 65), (2, 1), (4, 251)):
        x, target, weight = shares(N, V, soft, weighted)
        for smoothing in (0.0, 0.1):
            for reduction in ("mean", "sum", "none"):
                pair = functions(weight, label_smoothing=smoothing, reduction=reduction)
                agree(*pair, [x, target], dtype, device)


@KINDS
def test_shares_of_classes_in_place(soft, weighted, device):
    for smoothing in (0.0, 0.1):
        for reduction in ("mean", "none"):
            x, target, weight = shares(5, 65, soft, weighted)
            ours, theirs = functions(weight, True, label_smoothing=smoothing, reduction=reduction)
            agree(lambda x: ours(x, target.to(x) if soft else target.to(x.device)),  # noqa: B023
                  lambda x: theirs(x, target.to(x) if soft else target), [x], torch.float32, device)  # noqa: B023  # fmt: skip


@KINDS
def test_shares_of_rows_longer_than_a_block(soft, weighted, device):
    x, target, weight = shares(2, LONG, soft, weighted)
    agree(*functions(weight, label_smoothing=0.1), [x, target], torch.float32, device)


@pytest.mark.parametrize("layout", [padded_rows, every_second, transposed], ids=lambda f: f.__name__)
def test_probabilities_of_any_strides(layout, device):
    x, target, weight = (t.float().to(device) for t in shares(6, 33, True, True))
    given = cross_entropy(layout(x), layout(target), weight=every_second(weight))
    torch.testing.assert_close(given, F.cross_entropy(x, target, weight))
    one = target[:1].expand(6, 33)
    torch.testing.assert_close(cross_entropy(x, one), F.cross_entropy(x, one))
    cube, p = x.view(2, 3, 33).mT, target.view(2, 3, 33).mT
    torch.testing.assert_close(cross_entropy(cube, p, weight=weight, dim=1), F.cross_entropy(cube, p, weight))


@pytest.mark.parametrize("far", [1e3, -3e4])
@KINDS
def test_shares_of_logits_far_from_zero(soft, weighted, far, device):
    x, target, weight = shares(4, 33, soft, weighted)
    ours, theirs = functions(weight, label_smoothing=0.1)
    agree(ours, theirs, [(x + far).float(), target], torch.float32, device)


@KINDS
def test_shares_with_a_z_loss(soft, weighted, device):
    x, target, weight = shares(5, 17, soft, weighted)

    def theirs(x, target, reduction="none"):
        w = None if weight is None else weight.to(x)
        losses = F.cross_entropy(x, target, w, reduction="none", label_smoothing=0.1)
        z = 0.01 * x.logsumexp(-1).square()
        return losses + (z if soft else torch.where(target == -100, 0, z))

    ours, _ = functions(weight, z_loss=0.01, reduction="none", label_smoothing=0.1)
    agree(ours, theirs, [x, target], torch.float32, device)
    leaves = [x.to(device).requires_grad_(), target.to(device).requires_grad_(soft)]
    assert torch.autograd.gradcheck(ours, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(ours, leaves, fast_mode=True)


@KINDS
def test_shares_inside_torch_compile_and_autocast(soft, weighted, device):
    x, target, weight = shares(5, 17, soft, weighted)
    x, target = x.float().to(device), target.float().to(device) if soft else target.to(device)
    ours, theirs = functions(weight, label_smoothing=0.1)

    def gradients(fn):
        leaves = [x.clone().requires_grad_(), target.clone().requires_grad_() if soft else target]
        return torch.autograd.grad(fn(*leaves), leaves[: 1 + soft])

    torch.testing.assert_close(gradients(torch.compile(ours, fullgraph=True, backend="aot_eager")), gradients(theirs))
    assert opchecked(lambda: gradients(ours)) == ["gpukit::cross_entropy", "gpukit::cross_entropy_bwd"]
    with torch.autocast(device, dtype=torch.bfloat16):
        torch.testing.assert_close(ours(x, target), theirs(x, target))


def test_every_element_of_shares_is_written(device, monkeypatch):
    x, target, weight = shares(5, 65, True, True)
    leaves = [x.float().to(device).requires_grad_(), target.float().to(device).requires_grad_()]
    for owner, how in ((torch, "empty"), (torch, "empty_like")):
        original = getattr(owner, how)
        monkeypatch.setattr(owner, how, lambda *a, original=original, **options: poison(original(*a, **options)))
    loss = cross_entropy(*leaves, weight=weight.float().to(device))
    assert not any(x.isnan().any() for x in (loss, *torch.autograd.grad(loss, leaves)))


def test_nothing_to_learn_from_shares(device):
    x, weight = torch.randn(3, 5, device=device, requires_grad=True), torch.ones(5, device=device)
    ignored = torch.full((3,), -100, device=device)
    assert cross_entropy(x, ignored, weight=weight).isnan()
    loss = cross_entropy(x, ignored, weight=weight, reduction="sum")
    assert loss == 0 and (torch.autograd.grad(loss, x)[0] == 0).all()
    empty = x[:0]
    for reduction in ("mean", "sum", "none"):
        torch.testing.assert_close(
            cross_entropy(empty, empty, reduction=reduction), F.cross_entropy(empty, empty, reduction=reduction),
            equal_nan=True,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, r"weight must have the shape \[5\], one for each class, got \[4\]", {"weight": torch.ones(4)}),
        (TypeError, r"weight must be float16, .* got torch\.int64", {"weight": torch.ones(5).long()}),
        (TypeError, r"weight must be a tensor, got \[1\.0\]", {"weight": [1.0]}),
        (ValueError, r"weight is on meta, logits on", {"weight": torch.ones(5, device="meta")}),
        (ValueError, r"weight requires a gradient, and gets none here; pass weight\.detach\(\)",
         {"weight": torch.ones(5).requires_grad_()}),
        (ValueError, r"or probabilities \[\.\.\., V\], .* got \[3, 5\] and \[3\]", {"target": torch.ones(3)}),
        (ValueError, "ignore_index is for class indices, not for probabilities, got 1",
         {"target": torch.ones(3, 5), "ignore_index": 1}),
        (TypeError, r"target must hold class indices, int64 or int32, got torch\.bool", {"target": torch.ones(3) > 0}),
        (ValueError, r"target requires a gradient, and gets none with inplace=True",
         {"target": torch.ones(3, 5).requires_grad_(), "inplace": True}),
    ],
)  # fmt: skip
def test_shares_that_do_not_fit(error, message, change, device):
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) and x.is_cpu else x for name, x in change.items()}
    given = {"logits": torch.randn(3, 5, device=device), "target": torch.tensor([0, 1, 2], device=device)} | moved
    with pytest.raises(error, match=f"cross_entropy: .*{message}"):
        cross_entropy(**given)


# ----------------------------------------------------------------------------------------------------------- in place
def test_in_place_is_in_place(device):
    leaf = torch.randn(4, 33, device=device, requires_grad=True)
    logits = leaf * 1
    where = logits.data_ptr()
    loss = cross_entropy(logits, torch.tensor([1, 2, 3, -100], device=device), inplace=True)
    (dx,) = torch.autograd.grad(loss, logits)
    assert dx.data_ptr() == where


def test_who_saved_the_logits_is_told(device):
    leaf = torch.randn(4, 33, device=device, requires_grad=True)
    logits = leaf.exp()  # keeps its result for its own gradient
    loss = cross_entropy(logits, torch.tensor([1, 2, 3, 4], device=device), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_backward_runs_once(device):
    leaf = torch.randn(4, 33, device=device, requires_grad=True)
    loss = cross_entropy(leaf * 1, torch.tensor([1, 2, 3, 4], device=device), inplace=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran twice"):
        loss.backward()


# ------------------------------------------------------------------------------------------------------------- memory
def test_every_element_of_long_rows_is_written(device, monkeypatch):
    x, target = (t.to(device) for t in reference.make_inputs((2, LONG), torch.float32, seeded()))
    target[0] = -100
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: poison(empty(*size, **options)))
    losses, stats, _ = cross_entropy_fwd(x, target, -100, 0.0, 0.0)
    dx = cross_entropy_bwd(x, target, stats, torch.ones_like(losses), -100, 0.0, 0.0)
    assert not losses.isnan().any() and not dx.isnan().any() and (dx[0] == 0).all()


# ------------------------------------------------------------------------------------------------------------- errors


def test_target_that_is_no_class(device):
    x = torch.randn(3, 9, device=device)
    target = torch.tensor([1, 9, -1], device=device)
    if device == "cpu":
        with pytest.raises(IndexError, match=r"target must be in \[0, 9\) or ignore_index = -100, got 9"):
            cross_entropy(x, target)
    else:
        assert cross_entropy(x, target, reduction="none").isnan().tolist() == [False, True, True]
    assert cross_entropy(x, torch.tensor([1, 2, -1], device=device), ignore_index=-1).isfinite()


# ------------------------------------------------------------------------------------------------------------ PyTorch
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_torch_compile_in_place_and_in_chunks(backend, device):
    torch.compiler.reset()
    x, target = torch.randn(6, 33, device=device), torch.tensor([0, 32, -100, 3, 3, 1], device=device)
    weight = torch.randn(51, 33, device=device)
    for ours, theirs, arguments in (
        (lambda x, w: cross_entropy(2 * x, target, inplace=True), lambda x, w: F.cross_entropy(2 * x, target), (x, weight)),
        (lambda x, w: linear_cross_entropy(2 * x, w, target, chunk=4), lambda x, w: F.cross_entropy(2 * x @ w.T, target), (x, weight)),
    ):  # fmt: skip
        compiled = torch.compile(ours, fullgraph=True, backend=backend)
        results = []
        for call in (compiled, theirs):
            leaves = [a.clone().requires_grad_() for a in arguments]
            loss = call(*leaves)
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            results.append((loss.detach(), *(g for g in gradients if g is not None)))
        for given, expected in zip(*results, strict=True):
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------- in chunks
@pytest.mark.parametrize("options", [{}, {"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-3}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_in_chunks_matches_float64(dtype, options, device):
    for shape in linear_reference.OP.test_shapes[-1:]:
        x, weight, target = linear_reference.make_inputs(shape, dtype, seeded())
        results = []
        for convert in (torch.Tensor.double, torch.clone):
            leaves = [convert(t).requires_grad_() for t in (x, weight)]
            loss = linear_reference.linear_cross_entropy(*leaves, target, **options)
            results.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
        for chunk in (1, 3, 100):
            leaves = [t.to(device).requires_grad_() for t in (x, weight)]
            loss = linear_cross_entropy(*leaves, target.to(device), chunk=chunk, **options)
            assert_close(loss.detach().cpu(), results[0][0], results[1][0], what="loss")
            gradients = torch.autograd.grad(loss, leaves)
            for given, truth, native, what in zip(gradients, results[0][1:], results[1][1:], ("dx", "dw"), strict=True):
                assert_close(given.cpu(), truth, native, gradient=True, what=f"{what} in chunks of {chunk}")


@pytest.mark.parametrize("tokens", [0, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_does_not_read_what_lay_in_new_memory(dtype, tokens, device, monkeypatch):
    x = torch.randn(tokens, 8, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 8, device=device, dtype=dtype, requires_grad=True)
    target = torch.arange(tokens, device=device)

    def gradients(chunk):
        return torch.autograd.grad(linear_cross_entropy(x, weight, target, reduction="sum", chunk=chunk), (x, weight))

    expected, empty = [gradients(chunk) for chunk in (3, 7)], torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: empty(*size, **kind).fill_(float("nan")))
    for chunk, (dx, dweight) in zip((3, 7), expected, strict=True):
        found = gradients(chunk)
        assert torch.equal(found[0], dx) and torch.equal(found[1], dweight)
        assert dweight.isfinite().all() and bool(dweight.any()) == (tokens > 0)


def test_linear_gives_the_gradients_that_are_asked_for(device):
    x, weight = torch.randn(2, 3, 8, device=device), torch.randn(11, 8, device=device)
    target = torch.tensor([[1, 2, -100], [0, 10, 4]], device=device)
    expected = F.cross_entropy((x @ weight.T).view(-1, 11), target.view(-1))
    assert not linear_cross_entropy(x, weight, target).requires_grad
    torch.testing.assert_close(linear_cross_entropy(x, weight, target, chunk=4), expected)
    for need in ((True, False), (False, True)):
        leaves = [t.clone().requires_grad_(n) for t, n in zip((x, weight), need, strict=True)]
        linear_cross_entropy(*leaves, target, chunk=4).mul(3).backward()
        theirs = [t.clone().requires_grad_(n) for t, n in zip((x, weight), need, strict=True)]
        F.cross_entropy((theirs[0] @ theirs[1].T).view(-1, 11), target.view(-1)).mul(3).backward()
        for ours, other in zip(leaves, theirs, strict=True):
            assert (ours.grad is None) == (other.grad is None)
            if ours.grad is not None:
                torch.testing.assert_close(ours.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_linear_under_autocast(device):
    x, weight = (
        torch.randn(6, 8, device=device, requires_grad=True),
        torch.randn(11, 8, device=device, requires_grad=True),
    )
    target = torch.arange(6, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, weight, target)
        expected = F.cross_entropy(F.linear(x, weight), target)
    gradients = torch.autograd.grad(loss, (x, weight))
    assert loss.dtype == torch.float32 and all(g.dtype == torch.float32 for g in gradients)
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=1e-2)


def test_linear_under_autocast_leaves_float64(device):
    x, weight = (torch.randn(n, 8, device=device, dtype=torch.float64) for n in (6, 11))
    target = torch.arange(6, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = linear_cross_entropy(x, weight, target)
    torch.testing.assert_close(loss, F.cross_entropy(x @ weight.T, target))


def test_chunks_cover_the_tokens():
    for tokens, classes in ((1, 1), (0, 5), (127, 50257), (8192, 128256), (100_000, 200_000), (3, 10**9)):
        size = chunk_tokens(tokens, classes, 8)
        assert size >= 1 and (size * classes <= 2**27 + 128 * classes)
    assert chunk_tokens(8192, 128256, 768) == 1024
    assert chunk_tokens(8192, 128256, 4096) == 4096  # as many logits as the weight has numbers


# ---------------------------------------------------------------------------------------------------- on a GPU alone
@pytest.mark.gpu("long")
@pytest.mark.parametrize("inplace", [False, True], ids=["", "in place"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_length(dtype, inplace, device):
    for V in (1, 2, 31, 33, 127, 1000, 1024, 1025, 4096, 32_000, 32_768, 32_769, 50_257, 128_256):
        check((6, V), dtype, device, inplace=inplace)
        check((6, V), dtype, device, options=OPTIONS[1], inplace=inplace)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_more_than_2_31_elements(device):
    M, V = 2**31 // 32_768 + 2, 32_768
    x = torch.randn((M, V), device=device, dtype=torch.bfloat16)
    target = torch.randint(0, V, (M,), device=device)
    last = x[-2:].clone()
    losses, _, _ = cross_entropy_fwd(x, target, -100, 0.0, 0.0, scale=torch.ones((), device=device))
    torch.testing.assert_close(losses[-2:], F.cross_entropy(last.float(), target[-2:], reduction="none"))
    expected = torch.softmax(last.float(), -1) - F.one_hot(target[-2:], V)
    torch.testing.assert_close(x[-2:].float(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_linear_peak_memory(device):
    """A quarter of what holding the logits takes."""
    x, weight = (torch.randn(n, 1024, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (8192, 128_256))
    target = torch.randint(0, 128_256, (8192,), device=device)
    peaks = []
    for call in (lambda: linear_cross_entropy(x, weight, target), lambda: F.cross_entropy(x @ weight.T, target)):
        x.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[0] <= peaks[1] / 4
