"""The operations in Triton, as one would use them in a model: `from gpukit.kernels import softmax`.

softmax, gelu, norms, rope, dropout                            rows and elements
matmul, fp8_matmul, quantized_matmul                           products
flash_attention, flash_attention_varlen, decode_attention      attention; kv_cache and the loop that decodes with it
cross_entropy, linear_cross_entropy, kl_div, adamw             losses and the optimizer

Behind them, shared: _launch (a table of compiled kernels), _device (the GPU), _arguments (what is refused), _autograd (a
launcher's operator and its gradient), _dtypes, _rows (a tensor as rows), _tiles (the order of tiles), _attention (one
head's blocks), _cast_transpose (operands of products in 8 bits), _class_losses (arguments and reductions). Parts of the
large ones: _matmul_choices, _matmul_persistent (descriptors), _norm_choices, _norm_pieces, _norm_backward,
_rows_choices, _rows_shared, _cross_entropy_shared, _flash_choices, _flash_backward, _flash_descriptors,
_decode_kernel, _adamw_kernels. In Gluon for Hopper: _hopper (what is shared), _norms_hopper, _matmul_hopper,
_fp8_hopper, _flash_hopper, _flash_hopper_forward, _flash_hopper_backward, _flash_hopper_one_pass,
_flash_hopper_parts, _flash_hopper_two_groups.
"""

try:
    import triton  # noqa: F401
except ModuleNotFoundError:
    raise ImportError(
        "gpukit.kernels needs Triton, which has Linux wheels only: on macOS and Windows use a Linux container or WSL"
    ) from None

# Plain imports: a lazy attribute would lose to the submodule of the same name as soon as anybody imports that.
from gpukit.kernels.adamw import AdamW
from gpukit.kernels.cross_entropy import cross_entropy
from gpukit.kernels.decode_attention import decode_attention
from gpukit.kernels.dropout import dropout
from gpukit.kernels.flash_attention import flash_attention
from gpukit.kernels.flash_attention_varlen import flash_attention_varlen
from gpukit.kernels.fp8_matmul import fp8_matmul
from gpukit.kernels.gelu import bias_gelu, geglu, gelu, swiglu
from gpukit.kernels.kl_div import kl_div
from gpukit.kernels.kv_cache import KVCache
from gpukit.kernels.linear_cross_entropy import linear_cross_entropy
from gpukit.kernels.matmul import Linear, matmul
from gpukit.kernels.norms import layer_norm, residual_rms_norm, rms_norm
from gpukit.kernels.quantized_matmul import int4_matmul, int8_matmul, quantize_int4, quantize_int8
from gpukit.kernels.rope import rope
from gpukit.kernels.softmax import log_softmax, softmax

__all__ = [
    "AdamW", "KVCache", "Linear", "bias_gelu", "cross_entropy", "decode_attention", "dropout", "flash_attention",
    "flash_attention_varlen", "fp8_matmul", "geglu", "gelu", "int4_matmul", "int8_matmul", "kl_div", "layer_norm",
    "linear_cross_entropy", "log_softmax", "matmul", "quantize_int4", "quantize_int8", "residual_rms_norm", "rms_norm", "rope",
    "softmax", "swiglu",
]  # fmt: skip
