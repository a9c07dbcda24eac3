"""What every operation promises, whatever it computes. What an operation promises alone is in a file of its own beside this.

The operations are those of gpukit.benchmark; where they differ is said in operations.py.
"""

import inspect
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from gpukit import benchmark, hardware
from gpukit.kernels import _launch
from gpukit.testing import assert_close, poison
from tests.kernels.cases import (
    DTYPES,
    LAYOUTS,
    as_tuple,
    check,
    every_second,
    gradients_of,
    is_floating,
    leaves_of,
    moved,
    no_interpreter,
    opchecked,
    padded_rows,
    seeded,
    transposed,
    upstream_of,
    wanted_of,
)
from tests.kernels.operations import CONTRACTS, Variant

# An optimizer changes its inputs, and promises other things: test_adamw.py.
FUNCTIONS = [name for name, op in benchmark.operations().items() if op.build is None]
OPERATIONS = [name for name in FUNCTIONS if name in CONTRACTS]
CALLS = [
    pytest.param(name, variant, id=f"{name}-{which}" if which else name)
    for name in OPERATIONS
    for which, variant in {"": Variant(), **CONTRACTS[name].variants}.items()
]
# PyTorch's kl_div on its own default; inductor's advice.
pytestmark = [
    pytest.mark.filterwarnings("ignore:reduction. 'mean' divides"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
]
every_operation = pytest.mark.parametrize("name", OPERATIONS)
# But for those that are another one with a flag, as causal attention is: strides and PyTorch's ways of calling are the same.
FLAGGED = {"flash_attention_causal", "flash_attention_gqa"}
every_function = pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in FLAGGED])
every_call = pytest.mark.parametrize(("name", "variant"), CALLS)


def some_calls(which):
    """Those of which which(contract, variant) is true."""
    calls = [
        call for call in CALLS if which(CONTRACTS[call.values[0]], call.values[1]) and call.values[0] not in FLAGGED
    ]
    return pytest.mark.parametrize(("name", "variant"), calls)


def some_operations(which):
    return pytest.mark.parametrize("name", [name for name in OPERATIONS if which(CONTRACTS[name])])


BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])


@pytest.mark.parametrize("name", [*FUNCTIONS, *sorted(set(CONTRACTS) - set(FUNCTIONS))])
def test_every_operation_has_a_contract(name):
    assert name in FUNCTIONS, f"{name} in tests/kernels/operations.py is no operation of gpukit.reference"
    assert name in CONTRACTS, f"{name} has no contract: say in tests/kernels/operations.py what it promises"


def parts(name):
    """The operation, our function and what is said of them."""
    op = benchmark.operation(name)
    return op, benchmark.provider(op, "gpukit"), CONTRACTS[name]


def within(variant):
    return variant.form() if variant.form else nullcontext()


def checked(name, variant, shape, dtype, device, *layouts):
    op, fn, contract = parts(name)
    native = op.reference if contract.formula else None
    with within(variant):
        convert = variant.convert or contract.mild
        check(op, fn, shape, dtype, device, *layouts, convert=convert, native=native, **variant.options)


def mild(name, shape, dtype, device, variant=Variant()):  # noqa: B008
    """Inputs of which those that get gradients are normal noise: without the hard rows, so that differences and small
    deviations can be told from each other."""
    op, _, _ = parts(name)
    inputs = op.make_inputs(shape, torch.float64 if dtype == torch.float64 else torch.float32, seeded())
    inputs = inputs if variant.convert is None else variant.convert(*inputs)
    leaves, wanted = leaves_of(op, inputs)
    for i in wanted:
        leaves[i] = torch.randn(inputs[i].shape, generator=seeded(i), dtype=inputs[i].dtype)
    return [x.to(dtype) if is_floating(x) else x for x in moved(leaves, device)], wanted


def called(fn, op, inputs, upstream=None, **options):
    """Results and gradients."""
    leaves, wanted = leaves_of(op, inputs)
    outputs = as_tuple(fn(*leaves, **options))
    above = moved(upstream_of(outputs), outputs[0].device) if upstream is None else upstream(outputs)
    return [y.detach() for y in outputs], gradients_of(outputs, leaves, wanted, above)


# ----------------------------------------------------------------------------------------------------------- the values
@some_calls(lambda contract, variant: not contract.formula and not variant.form)
def test_the_reference_is_pytorchs(name, variant):
    op, _, _ = parts(name)
    for shape in op.test_shapes:
        inputs = op.make_inputs(shape, torch.float64, seeded())
        expected, given = (as_tuple(f(*inputs, **variant.options)) for f in (op.library, op.reference))
        for y, truth in zip(given, expected, strict=True):
            torch.testing.assert_close(y, truth, rtol=1e-9, atol=1e-9, equal_nan=True)


def shapes_of(name, variant, dtype, device):
    """Each shape in float32 and in one of the others, since its edges are the same in both; half of them for a variant. On a
    GPU, where each is compiled for some seconds, three."""
    shapes = variant.shapes or benchmark.operation(name).test_shapes
    if device == "cuda":
        return shapes[1::3]
    if variant.options or name in FLAGGED:
        return shapes[1::2] if dtype == torch.float32 else shapes[-2:-1]
    return shapes if dtype == torch.float32 else shapes[DTYPES.index(dtype) % 2 :: 2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_call
def test_results_and_gradients_agree_with_float64(name, variant, dtype, device):
    for shape in shapes_of(name, variant, dtype, device):
        checked(name, variant, shape, dtype, device)


@pytest.mark.parametrize("layout", LAYOUTS[1:], ids=lambda f: f.__name__)
@every_function
def test_any_strides(name, layout, device):
    contract = CONTRACTS[name]
    for shape, dtype, above in zip(
        contract.strided, (torch.float32, torch.bfloat16, torch.float16), (layout, padded_rows, layout), strict=True
    ):
        checked(name, Variant(), shape, dtype, device, layout, above)
    if "long" in contract.variants:
        checked(name, contract.variants["long"], contract.strided[1], torch.float32, device, transposed, padded_rows)


@pytest.mark.parametrize("rows", [False, True], ids=["one number", "one row"])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if benchmark.operation(name).grads != ()])
def test_gradients_that_have_no_strides(name, rows, device):
    """sum().backward() hands down one number with stride 0 in every dimension, sum(0) one row."""
    op, fn, contract = parts(name)

    def above(outputs):
        one = lambda y: torch.arange(y.shape[-1], dtype=y.dtype, device=y.device) if rows and y.ndim else y.new_ones(())  # noqa: E731
        return [one(y).expand(y.shape) for y in outputs]

    inputs, _ = mild(name, contract.strided[1], torch.float32, device)
    truth, native = (
        called(f, op, [to(x).cpu() if is_floating(x) else x for x in moved(inputs, "cpu")], above)[1]
        for f, to in ((op.reference, torch.Tensor.double), (op.library, torch.clone))
    )
    for ours, expected, near in zip(called(fn, op, inputs, above)[1], truth, native, strict=True):
        assert_close(ours.cpu(), expected, near, gradient=True)


@pytest.mark.parametrize("shape", sorted({shape for c in CONTRACTS.values() for shape in c.zero}), ids=str)
@some_operations(lambda contract: contract.zero)
def test_sizes_zero_and_one(name, shape, device):
    op, fn, _ = parts(name)
    if 0 not in shape:
        checked(name, Variant(), shape, torch.float32, device)
        return
    full = tuple(max(n, 1) for n in shape)  # not every reference makes inputs without elements
    inputs = [
        x.new_zeros(shape if x.shape == full else shape[-1:]) if isinstance(x, torch.Tensor) else x
        for x in moved(op.make_inputs(full, torch.float32, seeded()), device)
    ]
    outputs, gradients = called(fn, op, inputs)
    assert all(y.shape == shape for y in outputs)
    for i, dx in zip(wanted_of(op, inputs), gradients, strict=True):  # PyTorch's own are not all of the right shape
        assert dx.shape == inputs[i].shape and (dx == 0).all()


# ---------------------------------------------------------------------------------------------------------- derivatives
def differentiated(name, variant, device):
    op, fn, contract = parts(name)
    inputs, wanted = mild(name, contract.small, torch.float64, device, variant)
    leaves = [x.requires_grad_(i in wanted) if is_floating(x) else x for i, x in enumerate(inputs)]
    return op, lambda *x: fn(*x, **variant.options), leaves, contract


@some_calls(lambda contract, variant: contract.float64)
def test_float64_and_its_derivatives(name, variant, device):
    """Computed in float64, as float64 is precise, and differentiated as differences of it are."""
    op, fn, leaves, contract = differentiated(name, variant, device)
    with within(variant):
        for y, truth in zip(as_tuple(fn(*leaves)), as_tuple(op.reference(*leaves, **variant.options)), strict=True):
            torch.testing.assert_close(y, truth, rtol=1e-12, atol=1e-13)
        if contract.second:  # fast: of one direction in place of each element, the same one in every run
            assert torch.autograd.gradcheck(fn, leaves, fast_mode=True)
            assert torch.autograd.gradgradcheck(fn, leaves, fast_mode=True)


@some_operations(lambda contract: not contract.second)
def test_a_second_derivative_that_is_none_is_refused(name, device):
    op, fn, contract = parts(name)
    inputs, _ = mild(name, contract.small, torch.float32, device)
    leaves, wanted = leaves_of(op, inputs)
    outputs = as_tuple(fn(*leaves))
    with pytest.raises(RuntimeError, match="there is no second derivative, which create_graph=True asks for"):
        gradients_of([y.sum() for y in outputs], leaves, wanted, None, create_graph=True)


# --------------------------------------------------------------------------------------------------------------- memory
@every_call
def test_every_element_is_written(name, variant, device, monkeypatch):
    op, fn, _ = parts(name)
    inputs = op.make_inputs((variant.shapes or op.test_shapes)[-1], torch.float32, seeded())
    inputs = moved(inputs if variant.convert is None else variant.convert(*inputs), device)
    for owner, how in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, how)
        monkeypatch.setattr(owner, how, lambda *a, original=original, **options: poison(original(*a, **options)))
    with within(variant):
        outputs, gradients = called(fn, op, inputs, **variant.options)
    assert not any(x.isnan().any() for x in [*outputs, *gradients])


@every_call
def test_the_same_bits_in_new_memory(name, variant, device):
    """At a second call, and without autograd, which is another way through the function."""
    op, fn, contract = parts(name)
    inputs, _ = mild(name, (variant.shapes or op.test_shapes)[-2], torch.float32, device, variant)
    with within(variant):
        first, second = (called(fn, op, inputs, **variant.options) for _ in range(2))
        with torch.no_grad():
            plain = as_tuple(fn(*inputs, **variant.options))
            strided = as_tuple(fn(*moved(inputs, device, every_second), **variant.options))
    assert all(map(torch.equal, first[0] + first[1], second[0] + second[1]))
    assert all(map(torch.equal, first[0], plain))
    assert not {y.data_ptr() for y in plain} & {x.data_ptr() for x in inputs if isinstance(x, torch.Tensor)}
    if contract.contiguous:
        assert all(y.is_contiguous() for y in (*plain, *strided))


@some_calls(lambda contract, variant: contract.far and not variant.options)
def test_offsets_beyond_int32(name, variant, device):
    """Three rows 2^30 elements apart, in 4 GB that are never touched in between."""
    op, fn, contract = parts(name)
    far = torch.empty(2 * 2**30 + 50, dtype=torch.float16, device=device).as_strided((3, 50), (2**30, 1))
    far.copy_(torch.randn(3, 50, generator=seeded()))
    results = []
    for x in (far, far.clone()):
        inputs = contract.far(x)
        shape = inputs[0].shape
        # What comes from above lies as far apart as what went in, where it is as large.
        above = lambda outputs, x=inputs[0]: [x if y.shape == shape else torch.ones_like(y) for y in outputs]  # noqa: B023, E731
        with within(variant):
            outputs, gradients = called(fn, op, inputs, above)
        results.append([*outputs, *gradients])
    for y, near in zip(*results, strict=True):
        if contract.far_bits or device == "cpu":
            assert torch.equal(y, near)
        else:
            torch.testing.assert_close(y, near)


# --------------------------------------------------------------------------------------------------------- what is refused
REFUSED = [
    pytest.param(name, *case, id=f"{name}-{case[1]}"[:80]) for name in OPERATIONS for case in CONTRACTS[name].refused
]


def arguments_of(name, device):
    op, fn, contract = parts(name)
    inputs = moved(op.make_inputs(contract.small, torch.float32, seeded()), device)
    return fn, dict(zip(inspect.signature(fn).parameters, inputs, strict=False))


@pytest.mark.parametrize(("name", "error", "message", "change"), REFUSED)
def test_bad_arguments(name, error, message, change, device):
    fn, given = arguments_of(name, device)
    for argument, new in change.items():
        is_cpu = isinstance(new, torch.Tensor) and new.is_cpu and new.ndim
        given[argument] = new(given[argument]) if callable(new) else new.to(device) if is_cpu else new
    with pytest.raises(error, match=message):
        fn(**given)


@every_operation
def test_what_is_no_tensor_is_named(name, device):
    """In place of each tensor: a number, and a list."""
    fn, given = arguments_of(name, device)
    for argument, x in given.items():
        for bad in (3, [1.0]) if isinstance(x, torch.Tensor) else ():
            with pytest.raises((TypeError, ValueError), match=r"\w+: \w+ must be .*, got (3|\[1\.0\])"):
                fn(**{**given, argument: bad})


@pytest.mark.parametrize("elsewhere", ["meta", pytest.param("cpu", marks=pytest.mark.gpu)])
@every_operation
def test_tensors_on_two_devices(name, elsewhere, device):
    fn, given = arguments_of(name, device)
    for argument, x in given.items():
        if isinstance(x, torch.Tensor):
            with pytest.raises((TypeError, ValueError), match=rf"^\w+: .*{argument}.* on {elsewhere}"):
                fn(**{**given, argument: x.to(elsewhere)})


@every_operation
def test_without_a_gpu_and_the_interpreter(name, monkeypatch):
    fn, given = arguments_of(name, "cpu")
    no_interpreter(monkeypatch)
    with pytest.raises(ValueError, match=r"^\w+: \w+ (is|are) on cpu.*; Triton needs .* here, or TRITON_INTERPRET=1"):
        fn(**given)


@every_operation
def test_a_view_that_is_negated_when_read(name, device):
    """As the imaginary part of z.conj() is: its numbers are not the ones in memory."""
    fn, given = arguments_of(name, device)
    argument, x = next((argument, x) for argument, x in given.items() if is_floating(x))
    view = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert view.is_neg() and torch.equal(view, x)
    try:
        results = as_tuple(fn(**{**given, argument: view}))
    except ValueError as error:
        assert f"{argument} is a view that PyTorch negates when it reads it; pass {argument}.resolve_neg()" in str(
            error
        )
    else:  # it makes a copy first
        assert all(map(torch.equal, results, as_tuple(fn(**given))))


# -------------------------------------------------------------------------------------------------------------- PyTorch
@BACKENDS
@every_function
def test_torch_compile_without_a_graph_break(name, backend, device):
    op, fn, contract = parts(name)

    def model(*x):
        return tuple(y.sin() for y in as_tuple(fn(2 * x[0], *x[1:])))

    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=True)
    for shape in (contract.strided[1], contract.small):
        inputs, _ = mild(name, shape, torch.float32, device)
        results, gradients = zip(*(called(f, op, inputs) for f in (compiled, model)), strict=True)
        # Inductor makes a sine of its own.
        near = [{}, {}] if backend == "aot_eager" else [{"rtol": 1e-4, "atol": 1e-5}, {"rtol": 1e-3, "atol": 1e-4}]
        torch.testing.assert_close(*results, **near[0])
        torch.testing.assert_close(*gradients, **near[1])


@some_calls(lambda contract, variant: variant == Variant() or variant.operator)
def test_operators_are_registered(name, variant, device):
    """Each operator that a compiled call and its gradient go through does what it says of itself to PyTorch."""
    op, fn, contract = parts(name)
    inputs, _ = mild(name, contract.small, torch.float32, device, variant)
    inputs = moved(inputs, device, transposed)
    assert opchecked(lambda: called(fn, op, inputs, **variant.options))


@every_function
def test_checkpointing(name, device):
    """Recomputed in the backward pass, which also refuses a second look at what was saved."""
    op, fn, contract = parts(name)
    inputs, _ = mild(name, contract.small, torch.float32, device)
    again = partial(checkpoint, fn, use_reentrant=False)
    torch.testing.assert_close(called(again, op, inputs), called(fn, op, inputs), rtol=0, atol=0)


@every_function
def test_autocast(name, device):
    op, fn, contract = parts(name)
    for dtype in (torch.float32, torch.bfloat16, *[torch.float64] * (contract.float64 and not contract.keeps)):
        inputs, _ = mild(name, contract.small, dtype, device)
        outputs, _ = called(fn, op, inputs)
        with torch.autocast(device, dtype=torch.bfloat16):
            cast, gradients = called(fn, op, inputs)
        keeps = contract.keeps or dtype == torch.float64
        for y, plain in zip(cast, outputs, strict=True):
            assert y.dtype == (plain.dtype if keeps or plain.ndim == 0 else torch.bfloat16)
        leaves, wanted = leaves_of(op, inputs)
        assert [dx.dtype for dx in gradients] == [leaves[i].dtype for i in wanted]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name in OPERATIONS for shape in CONTRACTS[name].graphs])
def test_cuda_graph(name, shape, device):
    """What is captured once computes anew from what its inputs hold at each replay."""
    op, fn, _ = parts(name)
    inputs, _ = mild(name, shape, torch.bfloat16, device)
    leaves, wanted = leaves_of(op, inputs)
    above = moved(upstream_of(as_tuple(fn(*leaves))), device)

    def there_and_back():
        outputs = as_tuple(fn(*leaves))
        return [*(y.detach() for y in outputs), *gradients_of(outputs, leaves, wanted, above)]

    stream = torch.cuda.Stream()  # a gradient runs where its forward pass ran, and a capture sees one stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        there_and_back()  # compiles, which a capture cannot
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = there_and_back()
    with torch.no_grad():
        leaves[0].copy_(torch.randn_like(leaves[0]))
    graph.replay()
    assert all(map(torch.equal, results, there_and_back()))


def test_every_launch_asks_for_fused_products_and_sums():
    asked = {}

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: asked.update(options)

    with hardware.imagined("h200"):  # so that a GPU launches nothing
        _launch.launch(Kernel(), 1, torch.ones(1), num_warps=4)
    assert asked == {"enable_fp_fusion": True, "num_warps": 4}, "Triton 3.10 fuses only what asks for it"
