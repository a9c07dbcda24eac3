"""The reference kernels, fast and readable: `from gpukit.kernels import softmax`."""

try:
    import triton  # noqa: F401
except ModuleNotFoundError:
    raise ImportError(
        "gpukit.kernels needs Triton, which has Linux wheels only: on macOS and Windows use a Linux container or WSL"
    ) from None

# Plain imports: a lazy attribute would lose to the submodule of the same name as soon as anybody imports that.
from gpukit.kernels.softmax import softmax

__all__ = ["softmax"]
