"""Memory: seven functions; notebooks/02_memory.ipynb explains them.

Six of them compute in plain Python how many parameters or bytes there are. The last one runs a small model and holds more
memory than it needs. All other results are whole numbers: compute with integers.
"""

# What may be imported: torch, triton, einops, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import torch


# -------------------------------------------------------------------------------------------------------- memory.gpt2
def gpt2(vocab: int, positions: int, h: int, layers: int, tied: bool) -> int:
    """How many parameters a GPT-2 has.

    In order: a learned vector of width h for each token of the vocabulary and for each position, `layers` blocks, a
    LayerNorm, the head. A block has a LayerNorm, attention (q, k, v and the output, h x h each), another LayerNorm, and an
    MLP (h -> 4 h -> h). All matrices of a block have a bias; a LayerNorm has a gain and a bias. The head, h -> vocab, has
    no bias; if `tied`, it is the table of token vectors itself.
    """
    return h * vocab + layers * (12 * h**2 + 13 * h) + 2 * h  # your code here


# ------------------------------------------------------------------------------------------------------- memory.llama
def llama(vocab: int, h: int, layers: int, heads: int, kv_heads: int, head_size: int, ffn: int, tied: bool) -> int:
    """How many parameters a Llama has.

    In order: a table of token vectors of width h, `layers` blocks, an RMSNorm, the head. A block has an RMSNorm, attention
    in which `heads` heads of queries share `kv_heads` heads of keys and values, each head of `head_size` numbers, another
    RMSNorm, and a SwiGLU MLP of inner width `ffn`. There are no biases, and positions are rotations without parameters. If
    `tied`, the head is the table of token vectors itself.
    """
    raise NotImplementedError("memory.llama")  # your code here


# ------------------------------------------------------------------------------------------------------- memory.state
def state_bytes(trained: int, frozen: int, recipe: str, gpus: int, stage: int) -> int:
    """Bytes of weights, gradients and optimizer states on each of `gpus` data-parallel GPUs, just before AdamW's step.

    trained, frozen  parameters that the optimizer changes, and others that only take part in the passes (as with LoRA).
                     Both are divisible by `gpus`
    recipe           "fp32": everything in fp32
                     "mixed": weights and gradients in bf16; AdamW's two averages and a copy of the weights in fp32
                     "bf16": everything in bf16, without a copy
    stage            of ZeRO, 0 to 3: what is sharded, one equal part per GPU, and what every GPU keeps whole
    """
    raise NotImplementedError("memory.state")  # your code here


# ------------------------------------------------------------------------------------------------------- memory.saved
def saved_bytes(
    operations: list[tuple[str, list[str], str]], elements: dict[str, int], weights: list[str], itemsize: int
) -> int:
    """Bytes that autograd keeps from the forward pass of `operations` to their backward pass.

    operations  (kind, names of the inputs, name of the output), in the order in which they ran. The kinds: matmul, add,
                mul (elementwise), scale (by a constant), view (another shape for the same memory), relu, gelu, silu, exp,
                sigmoid, softmax
    elements    name of a tensor -> how many elements it has, each of `itemsize` bytes
    weights     names of parameters: they are in memory anyway, so they do not count

    Every tensor needs a gradient. An operation keeps what its derivatives contain. Where either its input or its output
    would be enough, PyTorch keeps the output.
    """
    raise NotImplementedError("memory.saved")  # your code here


# --------------------------------------------------------------------------------------------------- memory.recompute
def recompute_peak(layers: int, every: int, input_bytes: int, block_bytes: int) -> int:
    """The most bytes of activations that are alive at any time of the backward pass, with recomputation.

    The `layers` blocks are cut into segments of `every` blocks; the last segment may be shorter. The forward pass keeps
    the input of the first block of each segment and nothing else. The backward pass goes from the last segment to the
    first. It runs each segment forward again from its kept input, this time keeping everything that its blocks need, then
    goes backward through it, and then nothing of that segment is left.

    A block needs block_bytes for its backward pass; input_bytes of these are its own input.
    """
    raise NotImplementedError("memory.recompute")  # your code here


# ------------------------------------------------------------------------------------------------------- memory.serve
def sequences(
    gpu_bytes: int, parameters: int, layers: int, heads: int, kv_heads: int, head_size: int, tokens: int, page: int
) -> int:
    """How many sequences of `tokens` tokens each fit into the KV cache of a GPU of gpu_bytes at once, beside the weights.

    Weights and cache are in bf16, and nothing else is on the GPU. `heads` heads of queries share `kv_heads` heads of keys
    and values. A sequence gets its memory in pages; each page has room for `page` of its tokens in all layers.
    """
    raise NotImplementedError("memory.serve")  # your code here


# -------------------------------------------------------------------------------------------------- memory.accumulate
def squared_error(x: torch.Tensor, target: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """The sum of squared errors of a small model on the rows of x."""
    for weight in weights:
        x = torch.nn.functional.gelu(x @ weight)
    return (x - target).square().sum()


def gradient_norms(x: torch.Tensor, target: torch.Tensor, weights: list[torch.Tensor], micro_batch: int) -> list[float]:
    """The norm of the gradient of each weight, for the mean squared error over all elements of x [N, D], target [N, D].

    The rows are taken `micro_batch` at a time, the last time perhaps fewer. The activations of at most one micro-batch may
    be in memory at any time, so that a batch of any size can be trained on.
    """
    weights = [weight.clone().requires_grad_() for weight in weights]
    loss = 0.0  # your code here
    for first in range(0, len(x), micro_batch):
        rows = slice(first, first + micro_batch)
        loss = loss + squared_error(x[rows], target[rows], weights) / x.numel()
    loss.backward()
    return [weight.grad.norm().item() for weight in weights]
