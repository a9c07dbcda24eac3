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
    # BEGIN SOLUTION
    # STUB: return h * vocab + layers * (12 * h**2 + 13 * h) + 2 * h
    tables = (vocab + positions) * h
    block = 12 * h**2 + 13 * h
    head = 0 if tied else vocab * h
    return tables + layers * block + 2 * h + head
    # END SOLUTION


# ------------------------------------------------------------------------------------------------------- memory.llama
def llama(vocab: int, h: int, layers: int, heads: int, kv_heads: int, head_size: int, ffn: int, tied: bool) -> int:
    """How many parameters a Llama has.

    In order: a table of token vectors of width h, `layers` blocks, an RMSNorm, the head. A block has an RMSNorm, attention
    in which `heads` heads of queries share `kv_heads` heads of keys and values, each head of `head_size` numbers, another
    RMSNorm, and a SwiGLU MLP of inner width `ffn`. There are no biases, and positions are rotations without parameters. If
    `tied`, the head is the table of token vectors itself.
    """
    # BEGIN SOLUTION
    queries_and_output = 2 * h * heads * head_size
    keys_and_values = 2 * h * kv_heads * head_size
    mlp = 3 * h * ffn
    block = queries_and_output + keys_and_values + mlp + 2 * h
    tables = vocab * h if tied else 2 * vocab * h
    return tables + layers * block + h
    # END SOLUTION


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
    # BEGIN SOLUTION
    weight, gradient, optimizer = {"fp32": (4, 4, 4 + 4), "mixed": (2, 2, 4 + 4 + 4), "bf16": (2, 2, 2 + 2)}[recipe]
    weights = weight * (trained + frozen) // (gpus if stage >= 3 else 1)
    gradients = gradient * trained // (gpus if stage >= 2 else 1)
    states = optimizer * trained // (gpus if stage >= 1 else 1)
    return weights + gradients + states
    # END SOLUTION


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
    # BEGIN SOLUTION
    base = {}  # view -> the tensor whose memory it shows
    kept = set()
    for kind, inputs, output in operations:
        if kind == "view":
            base[output] = base.get(inputs[0], inputs[0])
        elif kind in ("matmul", "mul", "gelu", "silu"):
            kept.update(inputs)
        elif kind in ("relu", "exp", "sigmoid", "softmax"):
            kept.add(output)
    kept = {base.get(name, name) for name in kept} - set(weights)
    return sum(elements[name] for name in kept) * itemsize
    # END SOLUTION


# --------------------------------------------------------------------------------------------------- memory.recompute
def recompute_peak(layers: int, every: int, input_bytes: int, block_bytes: int) -> int:
    """The most bytes of activations that are alive at any time of the backward pass, with recomputation.

    The `layers` blocks are cut into segments of `every` blocks; the last segment may be shorter. The forward pass keeps
    the input of the first block of each segment and nothing else. The backward pass goes from the last segment to the
    first. It runs each segment forward again from its kept input, this time keeping everything that its blocks need, then
    goes backward through it, and then nothing of that segment is left.

    A block needs block_bytes for its backward pass; input_bytes of these are its own input.
    """
    # BEGIN SOLUTION
    peak = 0
    for kept, first in enumerate(range(0, layers, every)):  # `kept` inputs of earlier segments wait for their turn
        blocks = min(every, layers - first)
        peak = max(peak, kept * input_bytes + blocks * block_bytes)
    return peak
    # END SOLUTION


# ------------------------------------------------------------------------------------------------------- memory.serve
def sequences(
    gpu_bytes: int, parameters: int, layers: int, heads: int, kv_heads: int, head_size: int, tokens: int, page: int
) -> int:
    """How many sequences of `tokens` tokens each fit into the KV cache of a GPU of gpu_bytes at once, beside the weights.

    Weights and cache are in bf16, and nothing else is on the GPU. `heads` heads of queries share `kv_heads` heads of keys
    and values. A sequence gets its memory in pages; each page has room for `page` of its tokens in all layers.
    """
    # BEGIN SOLUTION
    token_bytes = 2 * 2 * layers * kv_heads * head_size  # keys and values, 2 bytes each
    pages = -(-tokens // page)
    free = gpu_bytes - 2 * parameters
    return max(0, free // (pages * page * token_bytes))
    # END SOLUTION


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
    # BEGIN SOLUTION
    # STUB: loss = 0.0
    # STUB: for first in range(0, len(x), micro_batch):
    # STUB:     rows = slice(first, first + micro_batch)
    # STUB:     loss = loss + squared_error(x[rows], target[rows], weights) / x.numel()
    # STUB: loss.backward()
    for first in range(0, len(x), micro_batch):
        rows = slice(first, first + micro_batch)
        loss = squared_error(x[rows], target[rows], weights) / x.numel()
        loss.backward()  # adds to the gradients, and lets this micro-batch's activations go
    # END SOLUTION
    return [weight.grad.norm().item() for weight in weights]
