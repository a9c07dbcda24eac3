"""What the tests of the contract (test_contract.py) have to know of each operation beside its `Op`.

A new operation needs an entry in CONTRACTS: `Contract(zero=ZERO_AND_ONE)` where its inputs are rows, as softmax's are.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

ZERO_AND_ONE = ((0,), (0, 5), (3, 0), (2, 0, 4), (1,), (5, 1), (1, 1, 1))


@dataclass(frozen=True)
class Variant:
    """A way to call an operation.

    options  arguments by name, the same for the kernel and the reference
    convert  applied to the operation's inputs first, where they do not go with the options
    form     a context in which the kernels take another path, such as that of long rows
    shapes   to try; default: some of Op.test_shapes
    operator whether compiled calls go through an operator of other results than the plain call's
    """

    options: dict = field(default_factory=dict)
    convert: Callable[..., tuple] | None = None
    form: Callable | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    operator: bool = False


@dataclass(frozen=True)
class Contract:
    """What an operation promises where operations differ.

    small      the shape whose inputs are changed for `refused`, and of which derivatives are compared with differences
    refused    (error, its message, what is changed by the argument's name: a new value, or a function of the old one)
    variants   more ways to call it, by name: they agree with float64, have derivatives and write every element, too
    strided    shapes that are tried in every layout: the first in float32, the second in bfloat16, the third in float16
    zero       shapes of no or one element, where the inputs are rows
    float64    whether float64 is taken
    second     whether a gradient can be differentiated once more; where not, it says so
    keeps      whether autocast leaves the dtype; where not, it computes in 16 bits, as PyTorch's own does
    contiguous whether results are, whatever the inputs are
    graphs     shapes whose forward and backward passes are captured, in bfloat16
    far        from a tensor [3, 50] of float16 whose rows are 2^30 elements apart: arguments
    far_bits   whether their results have the same bits as those of rows near by; of other strides a compiler may make
               another order of sums
    mild       what is done to float32 inputs: of attention's scores around 100 float32 keeps two digits less, so that a
               right result is refused or not by PyTorch's own luck. In 16 bits they stay
    formula    whether PyTorch's own error is that of the reference in the same dtype, since Op.library takes fewer options
    """

    small: tuple[int, ...] = (2, 3)
    refused: tuple = ()
    variants: dict[str, Variant] = field(default_factory=dict)
    strided: tuple[tuple[int, ...], ...] = ((2, 1), (5, 63), (2, 3, 781))
    zero: tuple[tuple[int, ...], ...] = ()
    float64: bool = True
    second: bool = True
    keeps: bool = True
    contiguous: bool = True
    graphs: tuple[tuple[int, ...], ...] = ((333, 4096),)
    far: Callable[[Tensor], tuple] | None = None
    far_bits: bool = True
    mild: Callable[..., tuple] | None = None
    formula: bool = False


FLOATS = "must be float16, bfloat16, float32 or float64, got torch.int64"
SCALAR = r"must have at least one dimension, got a scalar of shape \[\]"


def int64(x):
    return x.long()


def half(x):
    return x.half()


def scalar(x):
    return x.flatten()[0]


def ones(x, dtype=None):
    """[N] for x [..., N]."""
    return torch.ones(x.shape[-1], dtype=dtype or x.dtype, device=x.device)


# ------------------------------------------------------------------------------------------------------------ norms
@contextmanager
def long_rows():
    """Rows of more than 16 elements are long, so that short ones show what is done with long ones."""
    from gpukit.kernels import _norm_backward, _norm_choices, norms

    plain, configs = _norm_choices.long_config, (norms._fwd_config, _norm_backward._bwd_config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_norm_choices, "RESIDENT_FWD", 16)
        patch.setattr(_norm_choices, "RESIDENT_BWD", 16)
        patch.setattr(_norm_choices, "long_config", lambda dtype: {**plain(dtype), "BLOCK_N": 32, "num_warps": 1})
        for config in configs:
            config.cache_clear()
        yield
    for config in configs:
        config.cache_clear()


NORM = {
    "variants": {"long": Variant(form=long_rows, shapes=((1, 17), (7, 64), (2, 3, 131)))}, "zero": ZERO_AND_ONE, "far_bits": False,
    "graphs": ((333, 781), (333, 4096), (333, 8192), (333, 40_000)),
}  # fmt: skip
EPS = tuple(
    (ValueError, f"rms_norm: eps must be a number above 0, got {eps}", {"eps": eps})
    for eps in (0, -1e-6, float("nan"), None)
)


# ----------------------------------------------------------------------------------------------------------- losses
def probabilities_as_logarithms(x, t):
    return x, (t.double() + 1e-6).log().to(t.dtype)


def without_infinities(x, target):
    """Smoothing asks for every class: one of -inf makes the loss infinite."""
    return x.clamp(min=-1e4), target


# -------------------------------------------------------------------------------------------------------- attention
def attention(*given):
    """q, k and v of which one, or all, are replaced: (error, message, {name: new})."""
    return tuple((error, f"flash_attention: .*{message}", change) for error, message, change in given)


def all_of(*names, new):
    return dict.fromkeys(names, new)


def zeros(*shape, dtype=torch.float32):
    return lambda old: torch.zeros(shape, dtype=dtype, device=old.device)


def mild_scores(q, k, v, *more):
    """Scores of at most about 10."""
    q = q.clone()
    if q.dtype == torch.float32 and q.numel():
        q[0, 0, -1:] *= 0.1
        q[0, 0, -3:-2] *= 0.3
    return q, k, v, *more


FLASH = {
    "small": (1, 4, 8, 16), "mild": mild_scores, "float64": False, "second": False, "keeps": False, "contiguous": False,
    "strided": ((2, 2, 33, 16), (1, 2, 20, 40), (1, 1, 17, 64)),
    "graphs": ((2, 4, 300, 64), (2, 4, 300, 128)),
}  # fmt: skip
DECODE = {
    "small": (2, 4, 2, 3, 16), "float64": False, "contiguous": False, "formula": True,
    "strided": ((2, 6, 3, 34, 16), (1, 2, 1, 20, 40), (1, 4, 2, 33, 64)),
    "graphs": ((2, 8, 2, 300, 64),),
}  # fmt: skip
PRODUCT = {"small": (2, 3, 4), "strided": ((35, 40, 50), (35, 40, 50), (17, 33, 20)), "keeps": False,
           "graphs": ((512, 512, 512), (4, 512, 4096), (333, 333, 333))}  # fmt: skip
QUANTIZED = {"small": (2, 8, 128), "strided": ((5, 40, 256),) * 3, "float64": False, "keeps": False, "formula": True,
             "graphs": ((4, 512, 1024),)}  # fmt: skip

CONTRACTS = {
    "gelu": Contract(
        refused=(
            (TypeError, f"gelu: x {FLOATS}", {"x": int64}),
            (ValueError, 'gelu: approximate must be "none" or "tanh", got True', {"approximate": True}),
        ),
        variants={"tanh": Variant({"approximate": "tanh"})},
        zero=ZERO_AND_ONE,
        far=lambda x: (x,),
    ),
    "bias_gelu": Contract(
        refused=(
            (ValueError, 'bias_gelu: approximate must be "none" or "tanh", got \'erf\'', {"approximate": "erf"}),
            (
                ValueError,
                r"bias_gelu: bias must have the shape \[3\] of x's last dimension, got \[2\]",
                {"bias": lambda b: b[:2]},
            ),
            (TypeError, f"bias_gelu: bias {FLOATS}", {"bias": int64}),
        ),
        variants={"tanh": Variant({"approximate": "tanh"})},
        zero=ZERO_AND_ONE,
        far=lambda x: (x, ones(x)),
    ),
    "swiglu": Contract(
        refused=(
            (ValueError, r"swiglu: up must have the shape of gate, \[2, 3\], got \[2, 1\]", {"up": lambda x: x[:, :1]}),
            (TypeError, r"swiglu: up must have the dtype of gate, torch\.float32, got torch\.float16", {"up": half}),
        ),
        zero=ZERO_AND_ONE,
        far=lambda x: (x, x),
    ),
    "geglu": Contract(
        refused=(
            (ValueError, r"geglu: up must have the shape of gate, \[2, 3\], got \[2, 1\]", {"up": lambda x: x[:, :1]}),
            (ValueError, 'geglu: approximate must be "none" or "tanh", got \'erf\'', {"approximate": "erf"}),
        ),
        variants={"tanh": Variant({"approximate": "tanh"})},
        zero=ZERO_AND_ONE,
        far=lambda x: (x, x),
    ),
    "softmax": Contract(
        refused=(
            (TypeError, f"softmax: x {FLOATS}", {"x": int64}),
            (TypeError, r"softmax: x .* got torch\.complex64", {"x": lambda x: x.to(torch.complex64)}),
            *(
                (ValueError, rf"softmax: dim must be -2 to 1 for x of shape \[2, 3\], got {dim}", {"dim": dim})
                for dim in (2, -3)
            ),
            (TypeError, r"softmax: dim must be an integer, got 1\.0", {"dim": 1.0}),
            (TypeError, r"softmax: dtype must be float16, .* or None, got torch\.int64", {"dtype": torch.int64}),
        ),
        zero=ZERO_AND_ONE,
        graphs=((33, 781), (33, 4096), (33, 32_000), (33, 70_001), (33, 131_072)),
        far=lambda x: (x,),
        far_bits=False,
    ),
    "log_softmax": Contract(
        refused=(
            (TypeError, f"log_softmax: x {FLOATS}", {"x": int64}),
            (ValueError, "log_softmax: dim must be -1 to 0 for x of shape", {"x": scalar, "dim": 1}),
        ),
        zero=ZERO_AND_ONE,
        graphs=((33, 781), (33, 70_001)),
        far=lambda x: (x,),
        far_bits=False,
    ),
    "rms_norm": Contract(
        refused=(
            (TypeError, f"rms_norm: x {FLOATS}", {"x": int64}),
            (
                ValueError,
                r"rms_norm: weight must have the shape \[3\] of x's last dimension, got \[2\]",
                {"weight": lambda w: w[:2]},
            ),
            (
                ValueError,
                r"rms_norm: weight must have the shape \[2, 3\] of x's last 2 dimensions, got \[3\]",
                {"normalized_shape": (2, 3)},
            ),
            *EPS,
        ),
        far=lambda x: (x, ones(x)),
        **NORM,
    ),
    "layer_norm": Contract(
        refused=(
            (ValueError, f"layer_norm: x {SCALAR}", {"x": scalar}),
            (
                ValueError,
                r"layer_norm: bias must have the shape \[3\] of x's last dimension, got \[1, 3\]",
                {"bias": lambda b: b[None]},
            ),
            (TypeError, r"layer_norm: weight must be float16, .* got torch\.int32", {"weight": lambda w: w.int()}),
            # as torch.nn.functional has it
            (TypeError, r"layer_norm: weight must be a tensor \[3\] or None, got \(3,\)", {"weight": (3,)}),
            *(
                (
                    ValueError,
                    r"layer_norm: normalized_shape must be the last dimensions of x, .* \[2, 3\], got",
                    {"normalized_shape": shape},
                )
                for shape in (2, (3, 2), (), (1, 2, 3))
            ),
            (
                TypeError,
                "layer_norm: normalized_shape must be an integer, a tuple .* got 3.0",
                {"normalized_shape": 3.0},
            ),
        ),
        far=lambda x: (x, ones(x), ones(x)),
        **NORM,
    ),
    "residual_rms_norm": Contract(
        refused=(
            (
                ValueError,
                r"residual_rms_norm: residual must have the shape of x, \[2, 3\], got \[3\]",
                {"residual": lambda r: r[0]},
            ),
            (
                TypeError,
                r"residual_rms_norm: residual must have the dtype of x, torch\.float32, got torch\.float16",
                {"residual": half},
            ),
        ),
        far=lambda x: (x, x, ones(x)),
        **NORM,
    ),
    "rope": Contract(
        small=(2, 4, 2, 5, 6),
        refused=(
            (TypeError, f"rope: q {FLOATS}", {"q": int64}),
            (
                ValueError,
                r"rope: k must be \[batch, heads, tokens, head size\], got \[2, 5, 6\]",
                {"k": lambda k: k[:, 0]},
            ),
            (TypeError, r"rope: k must have the dtype of q, torch\.float32, got torch\.float16", {"k": half}),
            (
                ValueError,
                r"rope: k must be \[2, heads, 5, 6\] as q is but for the heads, got \[1, 2,",
                {"k": lambda k: k[:1]},
            ),
            (
                ValueError,
                "rope: the head size of q and k must be even, got 5",
                all_of("q", "k", new=lambda x: x[..., 1:]),
            ),
            (
                ValueError,
                r"rope: cos must be \[5, 3\] or \[2, 5, 3\], got \[5, 6\]",
                {"cos": lambda x: torch.cat((x, x), -1)},
            ),
            (
                ValueError,
                r"rope: sin must have the shape of cos, \[5, 3\], got \[2, 5, 3\]",
                {"sin": lambda x: x.expand(2, 5, 3)},
            ),
            (
                ValueError,
                r"rope: cos requires a gradient, and gets none here; pass cos\.detach\(\)",
                {"cos": lambda x: x.clone().requires_grad_()},
            ),
        ),
        strided=((2, 2, 1, 1, 4), (1, 4, 2, 5, 62), (2, 3, 1, 7, 64)),
        graphs=((2, 32, 8, 100, 128),),
        far=lambda x: (
            x[None, :, None, :20],
            x[None, :, None, :20],
            *(ones(x)[:10].expand(1, 10) * c for c in (0.6, 0.8)),
        ),
    ),
    "dropout": Contract(
        refused=(
            *(
                (ValueError, rf"dropout: p must be a number in \[0, 1\], got {p}", {"p": p})
                for p in (-0.1, 1.5, float("nan"), None)
            ),
            (ValueError, r"dropout: p must be a number in \[0, 1\], got tensor\(0\.5000\)", {"p": torch.tensor(0.5)}),
            *(
                (ValueError, rf"dropout: seed must be 0 to 2\^63 - 1, got {seed}", {"seed": seed})
                for seed in (-1, 2**63)
            ),
            (TypeError, r"dropout: seed must be an integer or an int64 tensor of one element, got 1\.5", {"seed": 1.5}),
            (ValueError, r"got a tensor of torch.int64 \[2\]", {"seed": torch.zeros(2, dtype=torch.int64)}),
            (ValueError, r"got a tensor of torch.float32 \[1\]", {"seed": torch.zeros(1)}),
            (ValueError, "dropout: seed is on meta", {"seed": torch.zeros(1, dtype=torch.int64, device="meta")}),
            (TypeError, f"dropout: x {FLOATS}", {"x": int64}),
            (ValueError, f"dropout: x {SCALAR}", {"x": scalar}),
        ),
        zero=ZERO_AND_ONE,
        far=lambda x: (x, 0.5, 1),
        formula=True,
    ),
    "cross_entropy": Contract(
        small=(4, 9),
        refused=(
            (TypeError, rf"cross_entropy: logits {FLOATS}", {"logits": int64}),
            (
                ValueError,
                r"cross_entropy: .* or probabilities \[\.\.\., V\], .* got \[4, 9\] and \[4\]",
                {"target": lambda t: t.float()},
            ),
            (
                ValueError,
                r"cross_entropy: .* need a target \[\.\.\.\] .* got \[4, 9\] and \[3\]",
                {"target": lambda t: t[:3]},
            ),
            (ValueError, r"cross_entropy: .* at least one class, got \[4, 0\]", {"logits": lambda x: x[:, :0]}),
            (ValueError, r"cross_entropy: .* got \[4, 9\] and \[4\], V being dimension 0", {"dim": 0}),
            (ValueError, r"cross_entropy: dim must be -2 to 1 for logits of shape \[4, 9\], got 2", {"dim": 2}),
            (ValueError, r"cross_entropy: reduction must be 'mean', 'sum' or 'none', got 'avg'", {"reduction": "avg"}),
            (ValueError, r"cross_entropy: label_smoothing must be between 0 and 1, got 1.5", {"label_smoothing": 1.5}),
            (ValueError, r"cross_entropy: z_loss must be 0 or more, got -1", {"z_loss": -1}),
            (
                TypeError,
                r"cross_entropy: ignore_index must be an integer of target's torch\.int64, got 3\.0",
                {"ignore_index": 3.0},
            ),
            (
                TypeError,
                r"cross_entropy: ignore_index must be .* torch\.int32, got 1099511627776",
                {"target": lambda t: t.int(), "ignore_index": 2**40},
            ),
            (
                ValueError,
                r"logits that each have memory of their own, got strides \(0, 1\)",
                {"logits": lambda x: x[:1].expand(4, 9), "inplace": True},
            ),
            (
                ValueError,
                r"memory of their own, got strides \(9, 0\)",
                {"logits": lambda x: x[:, :1].expand(4, 9), "inplace": True},
            ),
            (
                ValueError,
                r"inplace=True needs logits whose rows are evenly spaced",
                {
                    "logits": lambda x: x.view(2, 2, 9).transpose(0, 1),
                    "target": lambda t: t.view(2, 2),
                    "inplace": True,
                },
            ),
        ),
        variants={
            "smooth": Variant({"reduction": "sum", "label_smoothing": 0.1}, without_infinities),
            "terms": Variant({"reduction": "none", "z_loss": 1e-3}),
            "uniform": Variant({"label_smoothing": 1.0, "z_loss": 1e-2}, without_infinities),
        },
        strided=((6, 65), (5, 251), (2, 3, 64)),
        graphs=((33, 5000),),
        far=lambda x: (x, torch.tensor([1, 49, 3], device=x.device)),
        far_bits=False,
        formula=True,
    ),
    "linear_cross_entropy": Contract(
        small=(4, 8, 11),
        refused=(
            (
                ValueError,
                r"linear_cross_entropy: x \[\.\.\., D\] needs a weight \[V, D\], got \[4, 8\] and \[8, 11\]",
                {"weight": lambda w: w.T},
            ),
            (
                TypeError,
                r"linear_cross_entropy: .* one dtype and device, got torch\.float32 .* torch\.float16",
                {"weight": half},
            ),
            (ValueError, r"linear_cross_entropy: reduction must be 'mean' or 'sum', got 'none'", {"reduction": "none"}),
            (
                ValueError,
                r"linear_cross_entropy: chunk must be a whole number of tokens, at least 1, got 0",
                {"chunk": 0},
            ),
            (ValueError, r"linear_cross_entropy: chunk must be a whole number .* got 2\.5", {"chunk": 2.5}),
            (TypeError, rf"linear_cross_entropy: x {FLOATS}", all_of("x", "weight", new=int64)),
            (ValueError, r"need a target", {"target": lambda t: t[:2]}),
        ),
        variants={"smooth": Variant({"reduction": "sum", "label_smoothing": 0.1, "z_loss": 1e-3})},
        strided=((6, 20, 33), (5, 16, 65), (3, 8, 20)),
        second=False,
        keeps=False,
        graphs=((64, 256, 1000),),
        formula=True,
    ),
    "kl_div": Contract(
        small=(2, 3),
        refused=(
            (TypeError, r"kl_div: .* one dtype of .* got torch\.float32 and torch\.float16", {"target": half}),
            (TypeError, r"kl_div: .* got torch\.int64 and torch\.int64", all_of("input", "target", new=int64)),
            (ValueError, r"kl_div: .* one shape, got \[2, 3\] and \[2, 2\]", {"target": lambda t: t[:, :2]}),
            (
                ValueError,
                r"kl_div: reduction must be one of 'mean', 'batchmean', 'sum', 'none', got 'avg'",
                {"reduction": "avg"},
            ),
            (
                ValueError,
                r"kl_div: .* divides by the first dimension",
                {**all_of("input", "target", new=scalar), "reduction": "batchmean"},
            ),
        ),
        variants={
            **{reduction: Variant({"reduction": reduction}) for reduction in ("batchmean", "sum")},
            "none": Variant({"reduction": "none"}, operator=True),
            "log": Variant({"log_target": True, "reduction": "batchmean"}, probabilities_as_logarithms),
            "log-none": Variant({"log_target": True, "reduction": "none"}, probabilities_as_logarithms),
        },
        strided=((6, 65), (5, 63), (2, 3, 781)),
        far=lambda x: (x, x.abs_()),
        far_bits=False,
        formula=True,
    ),
    "matmul": Contract(
        refused=(
            (
                ValueError,
                r"matmul: a \[..., M, K\] and b \[..., K, N\] must agree in K, got \[2, 4\] and",
                {"b": zeros(5, 3)},
            ),
            (ValueError, r"matmul: a must have at least one dimension, got shape \[\]", {"a": scalar}),
            (ValueError, r"matmul: .* must agree in K, got \[2, 4\] and \[3\]", {"b": lambda b: b[0]}),
            (
                ValueError,
                r"matmul: residual must have the shape \[3\], got \[2, 3\]",
                {"a": lambda a: a[0], "residual": torch.zeros(2, 3)},
            ),
            (TypeError, r"matmul: a must be float8_e4m3fn, .* got torch.int32", {"a": lambda a: a.int()}),
            (TypeError, "matmul: a and b must have one dtype, got torch.float32 and torch.float16", {"b": half}),
            (
                ValueError,
                "matmul: the leading dimensions of a and b must be equal",
                {"a": zeros(3, 2, 4), "b": zeros(2, 4, 3)},
            ),
            (
                ValueError,
                "matmul: activation must be None, 'gelu', 'gelu_tanh', 'swiglu', got 'relu'",
                {"activation": "relu"},
            ),
            (ValueError, "matmul: precision must be 'ieee' or 'tf32', got 'bf16'", {"precision": "bf16"}),
            (ValueError, r"matmul: bias must have the shape \[3\], got \[4\]", {"bias": torch.zeros(4)}),
            (
                TypeError,
                "matmul: bias must be float16, .* got torch.int64",
                {"bias": torch.zeros(3, dtype=torch.int64)},
            ),
            (ValueError, r"matmul: residual must have the shape \[2, 3\], got \[3\]", {"residual": torch.zeros(3)}),
            (
                TypeError,
                "matmul: residual must be torch.float32, got torch.float16",
                {"residual": torch.zeros(2, 3).half()},
            ),
            (
                ValueError,
                r"matmul: scale must be one float32 number, got \[2\] torch.float32",
                {"scale": torch.ones(2)},
            ),
            (TypeError, r"matmul: scale must be a tensor, got 2\.0", {"scale": 2.0}),
            (
                ValueError,
                "matmul: b must have an even number of columns for 'swiglu', .* got 3",
                {"activation": "swiglu"},
            ),
        ),
        **PRODUCT,
    ),
    "matmul_bias_gelu": Contract(
        refused=((ValueError, r"matmul: bias must have the shape \[3\], got \[2\]", {"bias": lambda b: b[:2]}),),
        **PRODUCT,
    ),
    "fp8_matmul": Contract(
        refused=(
            (
                ValueError,
                r"fp8_matmul: a \[..., K\] and b \[K, N\] must agree in K, got \[2, 4\] and \[5, 3\]",
                {"b": zeros(5, 3)},
            ),
            (ValueError, r"fp8_matmul: .* must agree in K, got \[2, 4\] and \[4\]", {"b": lambda b: b[:, 0]}),
            (ValueError, r"fp8_matmul: .* must agree in K, got \[\] and", {"a": scalar}),
            (
                TypeError,
                "fp8_matmul: b must be float16, bfloat16 or float32, got torch.float64",
                {"b": lambda b: b.double()},
            ),
            (TypeError, "fp8_matmul: a must be float16, bfloat16 or float32, got torch.int64", {"a": int64}),
            (TypeError, "fp8_matmul: a and b must have one dtype, got torch.float32 and torch.float16", {"b": half}),
            *(
                (ValueError, f"fp8_matmul: scaling must be 'tensor' or 'row', got {given!r}", {"scaling": given})
                for given in ("block", None)
            ),
        ),
        variants={"row": Variant({"scaling": "row"})},
        **PRODUCT | {"small": (2, 3, 4), "graphs": ((512, 512, 512), (333, 333, 333))},
        float64=False,
        second=False,
        far=lambda x: (x, x.mT),
    ),
    "int8_matmul": Contract(
        refused=(
            (
                TypeError,
                "int8_matmul: weight must be torch.int8, as quantize_int8",
                {"weight": zeros(32, 8, dtype=torch.int16)},
            ),
        ),
        **QUANTIZED,
    ),
    "int4_matmul": Contract(
        refused=(
            (
                ValueError,
                r"int4_matmul: a \[..., K\] and weight \[K / 4, N\] must agree in K, got \[2, 64\]",
                {"a": lambda a: a[:, :64]},
            ),
            (
                TypeError,
                "int4_matmul: a must be float16, bfloat16 or float32, got torch.float64",
                {"a": lambda a: a.double()},
            ),
            (
                TypeError,
                "int4_matmul: weight must be torch.int16, as quantize_int4",
                {"weight": zeros(128, 8, dtype=torch.int8)},
            ),
            (
                ValueError,
                r"int4_matmul: scales must be \[K / group, 8\] for K = 128 and a group that",
                {"scales": zeros(1, 7)},
            ),
            (ValueError, "int4_matmul: scales must be .* a multiple of 64, got", {"scales": zeros(4, 8)}),
            (
                TypeError,
                "int4_matmul: scales must be float16, .* got torch.int8",
                {"scales": zeros(1, 8, dtype=torch.int8)},
            ),
            (
                ValueError,
                r"int4_matmul: bias must be \[8\] of floating-point numbers, got \[7\]",
                {"bias": torch.zeros(7)},
            ),
        ),
        **QUANTIZED,
    ),
    "flash_attention": Contract(
        refused=attention(
            (TypeError, "q must be float16, bfloat16 or float32, got torch.float64", {"q": lambda q: q.double()}),
            (TypeError, "k must have the dtype of q, torch.float32, got torch.float16", {"k": half}),
            (ValueError, r"v must have the dimensions \[B H T D\], got shape \[4, 8, 16\]", {"v": lambda v: v[0]}),
            (ValueError, r"q must have the dimensions .* got shape \[\]", {"q": scalar}),
            (
                ValueError,
                "head size, q's last dimension, must be 1 to 256, got 257",
                all_of("q", "k", "v", new=zeros(1, 4, 8, 257)),
            ),
            (ValueError, "must be 1 to 256, got 0", all_of("q", "k", "v", new=zeros(1, 4, 8, 0))),
            (
                ValueError,
                "heads of k and v must divide those of q, got 4 of q and 3 of k",
                all_of("k", "v", new=zeros(1, 3, 8, 16)),
            ),
            (ValueError, "must divide those of q, got 4 of q and 0 of k", all_of("k", "v", new=zeros(1, 0, 8, 16))),
            (ValueError, "k and v must have one shape", {"k": zeros(1, 4, 9, 16)}),
            (ValueError, "k and v must have one shape, and q's head size", all_of("k", "v", new=zeros(1, 4, 8, 32))),
            (ValueError, "q and k must have one batch size, got 1 and 2", all_of("k", "v", new=zeros(2, 4, 8, 16))),
            *(
                (ValueError, f"scale must be positive, 1e-37 to 1e37, got {float(scale)}", {"scale": scale})
                for scale in (-1.0, float("nan"), 0, 1e-300)
            ),
            *(
                (
                    ValueError,
                    f"window must be None or a whole number of at least 1 key, got {window}",
                    {"causal": True, "window": window},
                )
                for window in (0, 1.5)
            ),
            (ValueError, "precision must be 'ieee' or 'tf32', got 'tf64'", {"precision": "tf64"}),
        ),
        **FLASH,
    ),
    "flash_attention_causal": Contract(**FLASH),
    "flash_attention_gqa": Contract(
        **FLASH
        | {
            "small": (1, 4, 2, 8, 16),
            "strided": ((2, 2, 1, 33, 16), (1, 2, 2, 20, 40), (1, 4, 2, 17, 64)),
            "graphs": ((2, 4, 2, 300, 64),),
        }
    ),
    "decode_attention": Contract(
        refused=tuple(
            (error, f"decode_attention: .*{message}", change)
            for error, message, change in (
                (TypeError, "q must be float16, bfloat16 or float32, got torch.float64", {"q": lambda q: q.double()}),
                (TypeError, "v_cache must be the dtype of q, torch.float32, got torch.float16", {"v_cache": half}),
                (
                    TypeError,
                    "k_cache must be .* got torch.int8; int8 needs k_scales and v_scales",
                    all_of("k_cache", "v_cache", new=zeros(2, 3, 2, 16, dtype=torch.int8)),
                ),
                (
                    TypeError,
                    "k_cache must be int8, since there are scales, got torch.float32",
                    all_of("k_scales", "v_scales", new=torch.zeros(2, 3, 2)),
                ),
                (TypeError, "lengths must be int32 or int64, got torch.float32", {"lengths": lambda n: n.float()}),
                (ValueError, r"q must be \[B, H, D\] or \[B, H, T_q, D\]", {"q": lambda q: q[0]}),
                (ValueError, "must have one shape, and q's batch and head size", {"v_cache": zeros(2, 4, 2, 16)}),
                (
                    ValueError,
                    "must have one shape, and q's batch and head size",
                    all_of("k_cache", "v_cache", new=zeros(2, 3, 2, 8)),
                ),
                (ValueError, r"lengths must be \[2\], one for each sequence, got \[1\]", {"lengths": lambda n: n[:1]}),
                (
                    ValueError,
                    "the head size, q's last dimension, must be 1 to 256, got 257",
                    {"q": zeros(2, 4, 257), **all_of("k_cache", "v_cache", new=zeros(2, 3, 2, 257))},
                ),
                (
                    ValueError,
                    "must divide those of q, got 4 of q and 3 of the caches",
                    all_of("k_cache", "v_cache", new=zeros(2, 3, 3, 16)),
                ),
                (ValueError, "requires a gradient, and there is none", {"q": lambda q: q.clone().requires_grad_()}),
                (ValueError, "scale must be positive, 1e-37 to 1e37, got -1.0", {"scale": -1.0}),
                (ValueError, "precision must be 'ieee' or 'tf32', got 'fast'", {"precision": "fast"}),
            )
        ),
        **DECODE,
    ),
    "decode_attention_int8": Contract(
        refused=(
            (
                ValueError,
                r"decode_attention: v_scales must be \[2, 3, 2\], one for each head of a token, got None",
                {"v_scales": None},
            ),
        ),
        **DECODE,
    ),
}
