"""Memory: seven functions, in the order of notebooks/02_memory.ipynb, which explains them.

Six count in plain Python: what is there, how often, how many bytes each. The last one runs a small model and holds too
much. Whole numbers throughout: a count of bytes is never rounded.
"""

# What may be imported: torch, triton, einops, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import torch


# -------------------------------------------------------------------------------------------------------- memory.gpt2
def gpt2(vocab: int, positions: int, h: int, layers: int, tied: bool) -> int:
    """Parameters of GPT-2: a learned vector of width h for each token and each position, `layers` blocks, LayerNorm, head.

    A block: LayerNorm, attention (q, k, v and the output, h x h each), LayerNorm, MLP (h -> 4 h -> h). Its matrices and
    norms have biases. The head, h -> vocab without bias, is the table of token vectors itself if `tied`.
    """
    return h * vocab + layers * (12 * h**2 + 13 * h) + 2 * h  # your code here


# ------------------------------------------------------------------------------------------------------- memory.llama
def llama(vocab: int, h: int, layers: int, heads: int, kv_heads: int, head_size: int, ffn: int, tied: bool) -> int:
    """Parameters of a Llama: a table of token vectors of width h, `layers` blocks, RMSNorm, head.

    A block: RMSNorm, attention in which `heads` heads of queries share `kv_heads` heads of keys and values, RMSNorm, a
    SwiGLU MLP of inner width `ffn`. No biases; positions are rotations, which are computed. The head is the table itself
    if `tied`.
    """
    raise NotImplementedError("memory.llama")  # your code here


# ------------------------------------------------------------------------------------------------------- memory.state
def state_bytes(trained: int, frozen: int, recipe: str, gpus: int, stage: int) -> int:
    """Bytes of weights, gradients and optimizer state on each of `gpus` data-parallel GPUs, just before AdamW's step.

    trained, frozen  parameters that the optimizer moves, and others, which only take part (LoRA). `gpus` divides both
    recipe           "fp32": everything in fp32
                     "mixed": weights and gradients in bf16; both moments and a copy of the weights for the step in fp32
                     "bf16": everything in bf16
    stage            of ZeRO, 0 to 3: what is cut in equal parts, a part for each GPU, instead of repeated on all of them
    """
    raise NotImplementedError("memory.state")  # your code here


# ------------------------------------------------------------------------------------------------------- memory.saved
def saved_bytes(
    operations: list[tuple[str, list[str], str]], elements: dict[str, int], weights: list[str], itemsize: int
) -> int:
    """Bytes that autograd keeps from the forward pass of `operations` to their backward pass.

    operations  (kind, names of the inputs, name of the output), in the order they ran. The kinds: matmul, add, mul
                (elementwise), scale (by a constant), view (another shape), relu, gelu, silu, exp, sigmoid, softmax
    elements    name -> how many, each of `itemsize` bytes
    weights     names of parameters: in memory anyway, so they do not count

    Every tensor needs a gradient. An operation keeps what its derivatives need; where its input or its output would do,
    PyTorch keeps the output.
    """
    raise NotImplementedError("memory.saved")  # your code here


# --------------------------------------------------------------------------------------------------- memory.recompute
def recompute_peak(layers: int, every: int, input_bytes: int, block_bytes: int) -> int:
    """The most bytes of activations at any time of the backward pass, if most of them are computed a second time.

    The forward pass keeps the input of every `every`-th block, the first one's included, and nothing else: that cuts the
    `layers` blocks into segments, of which the last may be shorter. The backward pass goes from the last segment to the
    first. It runs a segment forward again from its kept input, this time keeping all that the blocks need, then backward,
    and then nothing of that segment is left.

    A block needs block_bytes for its backward pass, of which input_bytes are its own input.
    """
    raise NotImplementedError("memory.recompute")  # your code here


# ------------------------------------------------------------------------------------------------------- memory.serve
def sequences(
    gpu_bytes: int, parameters: int, layers: int, heads: int, kv_heads: int, head_size: int, tokens: int, page: int
) -> int:
    """How many sequences of `tokens` tokens a GPU of gpu_bytes can hold in its KV cache at once, beside the weights.

    Weights and cache are in bf16, and nothing else is on the GPU. `heads` heads of queries share `kv_heads` heads of keys
    and values. Memory is handed to a sequence in pages, each with room for `page` of its tokens in all layers.
    """
    raise NotImplementedError("memory.serve")  # your code here


# -------------------------------------------------------------------------------------------------- memory.accumulate
def squared_error(x: torch.Tensor, target: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """The sum of squared errors of a small model on the rows of x."""
    for weight in weights:
        x = torch.nn.functional.gelu(x @ weight)
    return (x - target).square().sum()


def gradient_norms(x: torch.Tensor, target: torch.Tensor, weights: list[torch.Tensor], micro_batch: int) -> list[float]:
    """The norm of the gradient of each weight, for the mean squared error over all of x [N, D], target [N, D].

    The rows are taken `micro_batch` at a time, the last time perhaps fewer, so that a batch of any size can be trained on:
    no more than one micro-batch's activations may be in memory at any time.
    """
    weights = [weight.clone().requires_grad_() for weight in weights]
    loss = 0.0  # your code here
    for first in range(0, len(x), micro_batch):
        rows = slice(first, first + micro_batch)
        loss = loss + squared_error(x[rows], target[rows], weights) / x.numel()
    loss.backward()
    return [weight.grad.norm().item() for weight in weights]
