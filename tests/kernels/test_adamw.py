"""AdamW: against torch.optim.AdamW, step by step, in the interpreter and on a GPU."""

import copy
import pickle
import sys

import pytest
import torch

from gpukit import benchmark
from gpukit.kernels.adamw import AdamW
from gpukit.op import Cost
from gpukit.reference.adamw import OP, ForeachAdamW

kernels = sys.modules["gpukit.kernels.adamw"]
SHAPES = ((3,), (7, 5), (), (2050,), (0,), (64, 33))


def weights(dtype=torch.float32, device="cpu", shapes=SHAPES, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype).to(device).requires_grad_() for s in shapes]


def give_gradients(params, *others, seed):
    g = torch.Generator().manual_seed(seed)
    for both in zip(params, *others, strict=True):
        grad = torch.randn(both[0].shape, generator=g)
        for p in both:
            p.grad = grad.to(p, copy=True)


def step_both(a, b, ours, theirs, seeds):
    """Steps of two optimizers of ours and theirs, with the same gradients."""
    for seed in seeds:
        give_gradients(ours, theirs, seed=seed)
        a.step()
        b.step()


def copies(params, dtype=None):
    return [p.detach().to(dtype or p.dtype, copy=True).requires_grad_() for p in params]


def farthest(ours, theirs):
    """The largest difference, in units of rounding of each tensor's largest element."""
    eps = torch.finfo(ours[0].dtype).eps
    return max(
        float((p.detach().double() - q.detach().double()).abs().max() / (q.detach().double().abs().max() * eps))
        for p, q in zip(ours, theirs, strict=True)
        if p.numel()
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.3, "maximize": True}, {"betas": (0.0, 0.5)}, {"eps": 1e-3, "betas": (0.95, 0.9999)}],
    ids=str,
)
def test_equals_pytorchs(options, device):
    ours = weights(device=device)
    theirs = copies(ours)
    a, b = AdamW(ours, lr=1e-2, **options), torch.optim.AdamW(theirs, lr=1e-2, **options)
    for step in range(9):
        give_gradients(ours, theirs, seed=step)
        if step % 3 == 2:  # a parameter that took no part keeps its weights, its state and its count
            ours[1].grad = theirs[1].grad = None
        a.step()
        b.step()
    assert farthest(ours, theirs) < 16
    for p, q in zip(ours, theirs, strict=True):
        assert float(a.state[p]["step"]) == float(b.state[q]["step"]) == (6 if p is ours[1] else 9)
        torch.testing.assert_close(a.state[p]["exp_avg_sq"], b.state[q]["exp_avg_sq"], rtol=1e-5, atol=1e-9)


def test_hundred_steps_of_a_model(device):
    """A two-layer perceptron that learns: weights, loss and gradients stay together for 100 steps."""

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).to(device)

    g = torch.Generator().manual_seed(1)
    x = torch.randn(32, 8, generator=g).to(device)
    y = x[:, :1] * x[:, 1:2]
    losses = []
    for optimizer in (AdamW, torch.optim.AdamW):
        net = model()
        step = optimizer(net.parameters(), lr=1e-2)
        for _ in range(100):
            step.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            step.step()
        losses.append((loss.detach(), [p.detach() for p in net.parameters()]))
    (ours, our_weights), (theirs, their_weights) = losses
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    for p, q in zip(our_weights, their_weights, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_float64(device):
    """Learning rate and betas reach the kernel in float32, with seven digits."""
    ours = weights(torch.float64, device)
    theirs = copies(ours)
    a, b = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    step_both(a, b, ours, theirs, range(5))
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits(dtype, device):
    """m and v have the weights' dtype, as in PyTorch, which rounds at more places: ours is the nearer to float64."""
    ours = weights(dtype, device)
    native, truth = copies(ours), copies(ours, torch.float64)
    optimizers = [
        make(p, lr=1e-2, eps=1e-3) for make, p in ((AdamW, ours), *((torch.optim.AdamW, p) for p in (native, truth)))
    ]
    for step in range(5):
        give_gradients(ours, native, truth, seed=step)
        for p, q in zip(ours, truth, strict=True):
            q.grad = p.grad.double()
        for optimizer in optimizers:
            optimizer.step()
    assert farthest(ours, truth) <= 2 * farthest(native, truth) + 2


def test_groups_and_mixed_dtypes(device):
    ours = [*weights(device=device), *weights(torch.bfloat16, device, seed=1)]
    theirs = copies(ours)
    optimizers = []
    for make, params in ((AdamW, ours), (torch.optim.AdamW, theirs)):
        groups = [{"params": params[:3], "weight_decay": 0.0}, {"params": params[3:], "lr": 1e-3}]
        optimizers.append(make(groups, lr=1e-2))
    for step in range(3):
        give_gradients(ours, theirs, seed=step)
        for optimizer in optimizers:
            optimizer.step()
    assert farthest(ours[:6], theirs[:6]) < 16 and farthest(ours[6:], theirs[6:]) < 4


def test_one_launch_for_all_tensors(device, monkeypatch):
    launched = []
    kernel = kernels.adamw_kernel
    monkeypatch.setattr(kernels, "adamw_kernel", _Counting(kernel, launched))
    params = weights(device=device, shapes=[(n,) for n in range(1, 40)])
    optimizer = AdamW(params)
    give_gradients(params, seed=0)
    optimizer.step()
    assert launched == [(39,)]


class _Counting:
    def __init__(self, kernel, launched):
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid):
        self.launched.append(grid)
        return self.kernel[grid]


# ---------------------------------------------------------------------------------------------------------- operation
def test_costs_by_hand():
    assert OP.cost((3, 1000), torch.float32) == Cost(read_bytes=16_000, write_bytes=12_000, flops=14_000)
    assert OP.cost((3, 1000), torch.bfloat16).bytes == 14_000


def test_benchmarks_see_what_is_wrong(device):
    def truth(shape):
        inputs = benchmark.make_inputs(OP, shape, torch.float32, device)
        return benchmark._Truth(OP, inputs, OP.bench_modes)

    assert len(OP.make_inputs(OP.bench_shapes[-1], torch.float32, torch.Generator())) == 2 * 2000
    for shape in OP.test_shapes:
        assert [truth(shape).refutes(f) for f in (OP.reference, OP.library, ForeachAdamW, AdamW)] == [""] * 4
    for wrong in ({"betas": (0.8, 0.999)}, {"betas": (0.9, 0.99)}, {"weight_decay": 0.0}, {"eps": 1e-3}, {"lr": 0.02}):

        class Wrong(torch.optim.AdamW):
            def __init__(self, params, wrong=wrong, **options):
                super().__init__(params, **{**options, **wrong})

        assert truth((5, 4099)).refutes(Wrong)
    with pytest.raises(ValueError, match="not compiled for 9 tensors: at most 8"):
        truth((9, 90)).refutes(torch.compile(OP.reference))


# -------------------------------------------------------------------------------------------------------- precision
def test_master_weights(device):
    """16-bit weights are the rounded float32 copy, which moves as float32 weights do."""
    ours = weights(torch.bfloat16, device)
    theirs = copies(ours, torch.float32)
    a, b = AdamW(ours, lr=1e-4, master_weights=True), torch.optim.AdamW(theirs, lr=1e-4)
    for step in range(10):
        give_gradients(ours, theirs, seed=step)
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.float()
        a.step()
        b.step()
    assert farthest([a.state[p]["master"] for p in ours], theirs) < 16
    for p in ours:
        assert torch.equal(p, a.state[p]["master"].bfloat16()) and a.state[p]["exp_avg"].dtype == torch.float32


def test_stochastic_rounding_keeps_small_updates(device):
    """Updates of a fifteenth of a rounding step vanish in bfloat16, always; rounded at random they arrive on average."""
    ends = {}
    for stochastic in (False, True):
        p = torch.ones(5000 if stochastic else 1000, dtype=torch.bfloat16, device=device, requires_grad=True)
        optimizer = AdamW([p], lr=1e-4, weight_decay=0.0, stochastic_rounding=stochastic)
        p.grad = torch.ones_like(p)
        for _ in range(20):
            optimizer.step()
        ends[stochastic] = p.detach().float()
    exact = 1 - 20 * 1e-4
    assert (ends[False] == 1).all()
    assert abs(float(ends[True].mean()) - exact) < 5 * float(ends[True].std()) / 5000**0.5 + 1e-6
    assert 0 < float(ends[True].std()) < 2**-8


def test_stochastic_rounding_repeats_and_keeps_infinities(device):
    results = []
    for seed in (0, 0, 1):
        p = torch.ones(5000, dtype=torch.bfloat16, device=device, requires_grad=True)
        optimizer = AdamW([p], lr=1e-3, stochastic_rounding=True, seed=seed)
        p.grad = torch.ones_like(p)
        p.grad[7] = torch.nan
        optimizer.step()
        results.append(p.detach())
    assert torch.equal(results[0].nan_to_num(7), results[1].nan_to_num(7))
    assert not torch.equal(results[0].nan_to_num(7), results[2].nan_to_num(7))
    assert results[0].isnan().nonzero().flatten().tolist() == [7]


# ---------------------------------------------------------------------------------------------- clipping and scaling
@pytest.mark.parametrize("max_norm", [1.0, 1e6])
def test_clipping(max_norm, device):
    ours = weights(device=device)
    theirs = copies(ours)
    a, b = AdamW(ours, lr=1e-2, max_norm=max_norm), torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(4):
        give_gradients(ours, theirs, seed=step)
        before = ours[3].grad.clone()
        torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        a.step()
        b.step()
        assert torch.equal(ours[3].grad, before), "the gradients are not written"
    assert farthest(ours, theirs) < 16


def test_grad_scaler_skips_without_asking(device):
    ours = weights(device=device, shapes=((100,), (7, 5)))
    theirs = copies(ours)
    a, b = AdamW(ours, lr=1e-2, max_norm=1.0), torch.optim.AdamW(theirs, lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for step in range(5):
        give_gradients(ours, theirs, seed=step)
        for p in ours:
            p.grad *= scaler.scale(torch.ones((), device=device))
        if step == 2:
            ours[0].grad[3] = torch.inf
        before = [p.detach().clone() for p in ours]
        scaler.step(a)
        scaler.update(1024.0)
        if step == 2:
            assert all(torch.equal(p, q) for p, q in zip(ours, before, strict=True))
        else:
            torch.nn.utils.clip_grad_norm_(theirs, 1.0)
            b.step()
    assert farthest(ours, theirs) < 32
    assert float(a.state[ours[0]]["step"]) == 4


def test_nan_reaches_its_parameters(device):
    p, q = weights(device=device, shapes=((5,), (4,)))
    optimizer = AdamW([p, q])
    p.grad, q.grad = torch.tensor([1.0, torch.nan, 1, 1, 1], device=device), torch.ones(4, device=device)
    optimizer.step()
    assert p.isnan().tolist() == [False, True, False, False, False] and not q.isnan().any()


# -------------------------------------------------------------------------------------------------------- state_dict
@pytest.mark.parametrize("first", [AdamW, torch.optim.AdamW])
def test_state_dicts_can_be_exchanged(first, device):
    second = torch.optim.AdamW if first is AdamW else AdamW
    ours = weights(device=device)
    theirs = copies(ours)
    a, b = first(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(6):
        if step == 3:
            state = copy.deepcopy(a.state_dict())
            a = second(ours, lr=99.0)
            a.load_state_dict(state)
        give_gradients(ours, theirs, seed=step)
        a.step()
        b.step()
    assert farthest(ours, theirs) < 16


def test_state_dict_round_trip_with_a_master_copy(device):
    """Training that is stopped and taken up again ends where training in one go ends, to the bit."""
    ends = []
    for stop in (False, True):
        params = weights(torch.bfloat16, device)
        optimizer = AdamW(params, lr=1e-3, master_weights=True)
        for step in range(6):
            if stop and step == 3:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = AdamW(params, lr=1.0, master_weights=True)
                optimizer.load_state_dict(state)
            give_gradients(params, seed=step)
            optimizer.step()
        ends.append([*params, *(optimizer.state[p]["exp_avg_sq"] for p in params)])
    assert all(torch.equal(p, q) for p, q in zip(*ends, strict=True))


def test_scheduler_closure_and_new_groups(device):
    p, q = weights(device=device, shapes=((5,), (4,)))
    optimizer = AdamW([p], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 0.5)
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    assert optimizer.step(lambda: torch.tensor(7.0)) == 7
    torch.testing.assert_close(before * (1 - 0.5 * 1e-2) - p, torch.full_like(p, 0.5))
    schedule.step()
    middle = p.detach().clone()
    optimizer.add_param_group({"params": [q], "lr": 0.5})
    q.grad = -torch.ones_like(q)
    there = q.detach().clone()
    optimizer.step()
    assert torch.equal(p, middle) and not torch.equal(q, there)


def test_tensor_learning_rate(device):
    ours = weights(device=device)
    theirs = copies(ours)
    lr = torch.tensor(1e-2, device=device)
    a, b = AdamW(ours, lr=lr), torch.optim.AdamW(theirs, lr=1e-2)
    give_gradients(ours, theirs, seed=0)
    a.step()
    b.step()
    assert farthest(ours, theirs) < 16
    lr.zero_()
    before = ours[1].detach().clone()
    a.step()
    assert torch.equal(ours[1], before)


def test_layouts_of_weights_and_gradients(device):
    """Any dense order of dimensions; a gradient in another order than its parameter is copied."""
    base = torch.randn(6, 5, 4, device=device)
    ours = [base.permute(2, 0, 1).clone(memory_format=torch.preserve_format).requires_grad_()]
    theirs = copies(ours)
    a, b = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    give_gradients(ours, theirs, seed=0)
    ours[0].grad = ours[0].grad.contiguous()
    a.step()
    b.step()
    assert farthest(ours, theirs) < 16


def test_unaligned_weights(device):
    flat = torch.randn(100, device=device)
    ours = [flat[1:50].detach().requires_grad_(), flat[51:].detach().requires_grad_()]
    theirs = copies(ours)
    a, b = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    step_both(a, b, ours, theirs, range(2))
    assert farthest(ours, theirs) < 16


@pytest.mark.parametrize("again", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))], ids=["copied", "pickled"])
def test_a_copy_goes_on_alone(again, device):
    ours = weights(device=device)
    a = AdamW(ours, max_norm=1.0, seed=3)
    give_gradients(ours, seed=0)
    a.step()
    b = again(a)
    theirs = b.param_groups[0]["params"]
    assert b.seed == 3
    give_gradients(ours, theirs, seed=1)
    b.step()
    assert not torch.equal(ours[0], theirs[0])
    a.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def _cleared(a, params):
    a.state.clear()


def _one_removed(a, params):
    del a.state[params[1]]


def _replaced(a, params):
    for state in a.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name] * 0.5


def _offloaded(a, params):
    """What saves memory between steps: the states go to the CPU, in whatever layout, and come back."""
    for state in a.state.values():
        state |= {name: value.cpu().clone(memory_format=torch.contiguous_format) for name, value in state.items()}


def _relaid(a, params):
    params[1].data = params[1].data.t().contiguous().t()
    params[1].grad = None


def _moved(a, params):
    for p in params:
        p.data = p.data.clone()


@pytest.mark.parametrize("change", [_cleared, _one_removed, _replaced, _offloaded, _relaid, _moved])
def test_weights_and_states_may_be_replaced_between_steps(change, device):
    ours = weights(device=device)
    theirs = copies(ours)
    a, b = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    step_both(a, b, ours, theirs, range(2))
    change(a, ours)
    change(b, theirs)
    for state in b.state.values():  # PyTorch wants them on one device
        state |= {name: value.to(theirs[0].device) for name, value in state.items() if name != "step"}
    step_both(a, b, ours, theirs, range(2, 4))
    assert farthest(ours, theirs) < 16


def test_who_kept_the_weights_is_told(device):
    w, x = torch.ones(3, device=device, requires_grad=True), torch.ones(3, device=device, requires_grad=True)
    y = (w * x).sum()
    w.grad = torch.ones_like(w)
    AdamW([w]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_step_inside_torch_compile(device):
    ours = weights(device=device, shapes=((7, 5),))
    theirs = copies(ours)
    a, b = AdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)

    def train(params, optimizer):
        optimizer.zero_grad()
        params[0].square().sum().backward()
        optimizer.step()

    compiled = torch.compile(train, backend="eager")
    for _ in range(2):
        compiled(ours, a)
        train(theirs, b)
    assert farthest(ours, theirs) < 16


def test_settings_of_float64(device):
    """A learning rate and a norm in float64 do not make another kernel of it."""
    for options in ({}, {"stochastic_rounding": True}):
        ours = [*weights(torch.bfloat16, device), *weights(torch.float32, device)]
        optimizer = AdamW(ours, lr=torch.tensor(1e-2, dtype=torch.float64, device=device), max_norm=1.0, **options)
        give_gradients(ours, seed=0)
        if not options:
            optimizer.add_param_group({"params": weights(torch.float64, device, shapes=((3,),))})
            optimizer.param_groups[1]["params"][0].grad = torch.ones(3, dtype=torch.float64, device=device)
        before = copies(ours)
        optimizer.step()
        assert all(p.isfinite().all() and not torch.equal(p, q) for p, q in zip(ours, before, strict=True) if p.numel())


# ------------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be 0 or more and finite, got -1"),
        ({"eps": -1e-8}, "eps must be 0 or more"),
        ({"weight_decay": float("nan")}, "weight_decay must be 0 or more and finite, got nan"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
        ({"betas": (0.9,)}, "betas must be two numbers"),
        ({"amsgrad": True}, "amsgrad=True is not supported"),
        ({"max_norm": 0.0}, "max_norm must be positive and finite, got 0"),
        ({"master_weights": True, "stochastic_rounding": True}, "choose one"),
        ({"lr": torch.ones(2)}, r"tensor of one element, got shape \[2\]"),
        ({"lr": torch.tensor(-1.0)}, "lr must be 0 or more and finite, got -1"),
        ({"betas": 0.9}, r"betas must be two numbers in \[0, 1\), got 0.9"),
        ({"seed": -1}, r"seed must be an integer, 0 to 2\^63 - 1, got -1"),
        ({"seed": 1.5}, "seed must be an integer"),
    ],
)
def test_bad_options(options, message, device):
    with pytest.raises(ValueError, match=message):
        AdamW(weights(device=device), **options)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"amsgrad": True}, "amsgrad=True is not supported"),
        ({"betas": (0.9, 1.5)}, "betas must be two numbers"),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or more and finite, got -1"),
        ({"master_weights": True, "stochastic_rounding": True}, "choose one"),
        ({"params": [torch.zeros(2, dtype=torch.complex64)]}, "parameters must be float32"),
    ],
)
def test_a_bad_group_is_not_added(group, message, device):
    p, q = weights(device=device, shapes=((5,), (4,)))
    optimizer = AdamW([p])
    with pytest.raises((ValueError, TypeError), match=message):
        optimizer.add_param_group({"params": [q], **group})
    assert len(optimizer.param_groups) == 1


def test_what_does_not_fit_its_parameter(device):
    p = torch.zeros(3, device=device, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p], lr=0.5)
    optimizer.step()
    state = torch.optim.AdamW([p], lr=0.1, amsgrad=True).state_dict()
    with pytest.raises(ValueError, match="amsgrad=True is not supported"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5 and len(optimizer.state) == 1
    p.data = torch.zeros(4, device=device)
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"exp_avg must have the shape of its parameter, \[4\], got \[3\]"):
        optimizer.step()
    q = torch.zeros(5, device=device, requires_grad=True)
    with pytest.raises(ValueError, match=r"exp_avg must have the shape of its parameter, \[5\], got \[3\]"):
        AdamW([q]).load_state_dict(optimizer.state_dict())


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_bad_parameters(device, monkeypatch):
    with pytest.raises(TypeError, match=r"parameters must be float32, .*, got torch\.complex64"):
        AdamW([torch.zeros(3, dtype=torch.complex64, device=device)])
    with pytest.raises(ValueError, match=r"strides \(10, 2\), with gaps or overlaps"):
        AdamW([torch.zeros(4, 10, device=device)[:, ::2]])
    with pytest.raises(TypeError, match=r"stochastic_rounding is for bfloat16 parameters, got torch\.float16"):
        AdamW([torch.zeros(3, dtype=torch.float16, device=device)], stochastic_rounding=True)
    p = torch.zeros(3, device=device, requires_grad=True)
    optimizer = AdamW([p])
    p.grad = torch.sparse_coo_tensor([[1]], [1.0], (3,), device=device, check_invariants=True)
    sparse, p.grad = p.grad, None
    for dense_first in (False, True):
        if dense_first:
            p.grad = torch.ones_like(p)
            optimizer.step()
        p.grad = sparse
        with pytest.raises(TypeError, match="sparse gradients are not supported"):
            optimizer.step()
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    with pytest.raises(ValueError, match="a parameter is on cpu; Triton needs CUDA tensors"):
        AdamW([torch.zeros(3)])


# ---------------------------------------------------------------------------------------------------- on a GPU alone
@pytest.mark.gpu
def test_cuda_graph(device):
    ours = weights(device=device)
    theirs = copies(ours)
    a, b = AdamW(ours, lr=1e-2, max_norm=1.0), torch.optim.AdamW(theirs, lr=1e-2)
    give_gradients(ours, seed=0)
    grads = [p.grad for p in ours]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        a.step()  # compiles, which a capture cannot
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for p, g in zip(ours, grads, strict=True):
            p.grad = g * 1  # at another address than before
        a.step()
    give_gradients(theirs, seed=0)
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    b.step()
    for step in range(3):
        give_gradients(theirs, seed=step + 1)
        for g, q in zip(grads, theirs, strict=True):
            g.copy_(q.grad)
        graph.replay()
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        b.step()
    assert farthest(ours, theirs) < 16


@pytest.mark.gpu
@pytest.mark.xdist_group("memory")
def test_more_than_2_31_elements(device):
    n = 2**31 + 5000
    p = torch.ones(n, dtype=torch.bfloat16, device=device, requires_grad=True)
    p.grad = torch.full_like(p, 0.5)
    optimizer = AdamW([p], lr=0.25, weight_decay=0.0)
    optimizer.step()
    assert (p[:10] == 0.75).all() and (p[-10:] == 0.75).all() and (p[2**31 - 5 : 2**31 + 5] == 0.75).all()
