"""FLOPs, bytes and time: seven functions in plain Python, in the order of notebooks/03_flops.ipynb, which explains them.

No tensors and no kernels here. A multiplication is 1 FLOP and so is an addition; tera is 10^12, giga 10^9, micro 10^-6.
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import math


# ------------------------------------------------------------------------------------------------------- flops.einsum
def einsum_flops(expression: str, sizes: dict[str, int]) -> int:
    """FLOPs of an einsum such as "tokens d_in, d_out d_in -> tokens d_out".

    It is computed as one nest of loops, without results in between. Each round multiplies one element of every operand
    and adds the product to an element of the result, which began at zero. An axis that the result lacks is summed over;
    where there is none, every product is a result already and nothing is added.

    sizes  the length of every axis, also of axes that this expression does not have
    """
    inputs, _, output = expression.partition("->")
    operands = [operand.split() for operand in inputs.split(",")]  # the names of each operand's axes
    kept = output.split()  # those of the result's
    # BEGIN SOLUTION
    axes = {axis for operand in operands for axis in operand}
    rounds = math.prod(sizes[axis] for axis in axes)
    multiplications = len(operands) - 1
    additions = 1 if axes - set(kept) else 0
    return rounds * (multiplications + additions)
    # END SOLUTION


# -------------------------------------------------------------------------------------------------------- flops.layer
def layer_flops(
    B: int, T: int, d_model: int, heads: int, kv_heads: int, head_dim: int, d_ff: int, gated: bool, causal: bool
) -> tuple[int, int]:
    """(forward, backward): FLOPs of all matrix products of one transformer layer, for B sequences of T tokens.

    Attention  x [B, T, d_model] becomes q with `heads` heads, k and v with `kv_heads` heads, head_dim wide. As many query
               heads as it takes share one head of k and v. Scores from q and k, softmax, a weighted sum over v, and a
               projection of all heads together back to d_model.
    causal     token t sees the tokens 0 to t, and the kernel computes no other score; otherwise every token sees all T.
    MLP        d_model to d_ff and back to d_model. gated: a second matrix from d_model to d_ff works beside the first.

    Everything needs a gradient, x too, and nothing is computed twice. Softmax, norms and the like are no matrix products.
    """
    # BEGIN SOLUTION
    tokens = B * T
    projections = 2 * tokens * d_model * head_dim * (2 * heads + 2 * kv_heads)  # q and out, k and v
    pairs = T * (T + 1) // 2 if causal else T * T
    attention = 2 * (2 * B * heads * pairs * head_dim)  # scores, then the weighted sum
    mlp = 2 * tokens * d_model * d_ff * (3 if gated else 2)
    forward = projections + attention + mlp
    return forward, 2 * forward  # each product has two operands, and each of them a gradient as large as the product
    # END SOLUTION


# -------------------------------------------------------------------------------------------------------- flops.audit
def step_flops(
    layers: int, d_model: int, d_ff: int, vocab: int, positions: int, tied: bool, B: int, T: int
) -> int:  # fmt: skip
    """FLOPs of one training step, forward and backward, of B sequences of T tokens. It begins with one planted fault.

    The model  embedding(tokens) [vocab, d_model] + embedding(positions) [positions, d_model]; `layers` layers with four
               attention matrices [d_model, d_model] and two MLP matrices, d_model to d_ff and back; at last the logits,
               x times a head [vocab, d_model]. tied: the head is the embedding of the tokens; otherwise it is its own.
    Counted    what PyTorch's FlopCounterMode counts: matrix products and nothing else, and of attention the whole square
               of T x T scores, mask or no mask.
    """
    # BEGIN SOLUTION
    # STUB: layer = 4 * d_model**2 + 2 * d_model * d_ff
    # STUB: embeddings = vocab * d_model + positions * d_model
    # STUB: head = 0 if tied else vocab * d_model
    # STUB: params = layers * layer + embeddings + head
    # STUB: scores = layers * 2 * T * d_model  # q times k and weights times v: no parameters, the same multiply-adds
    # STUB: return 6 * B * T * (params + scores)
    layer = 4 * d_model**2 + 2 * d_model * d_ff
    head = vocab * d_model  # tied or not; the embeddings are looked up, which multiplies nothing
    multiplied = layers * layer + head
    scores = layers * 2 * T * d_model  # q times k and weights times v: no parameters, the same multiply-adds
    return 6 * B * T * (multiplied + scores)
    # END SOLUTION


# ---------------------------------------------------------------------------------------------------------- flops.mfu
def utilisation(
    tokens_per_s: float, forward_flops: float, gpus: int, rate_tflops: float, with_sparsity: bool, recomputed: float
) -> tuple[float, float]:
    """(MFU, HFU) of a training run, as fractions of 1. MFU counts the FLOPs that the model needs, HFU those that ran.

    tokens_per_s   of all GPUs together
    forward_flops  of the model's forward pass, for one token
    rate_tflops    the datasheet's rate of one GPU; with_sparsity: its footnote says that the rate is for matrices of
                   which two in every four elements are zero. Those of the model are not.
    recomputed     the share of the forward pass that the backward pass runs again because its results were not kept
    """
    # BEGIN SOLUTION
    peak_flops = gpus * rate_tflops * 1e12 / (2 if with_sparsity else 1)
    forward_per_s = tokens_per_s * forward_flops / peak_flops
    return 3 * forward_per_s, (3 + recomputed) * forward_per_s
    # END SOLUTION


# --------------------------------------------------------------------------------------------------------- flops.days
def training_days(
    params: float, active_params: float, tokens: float, gpus: int, peak_tflops: float, mfu: float,
    checkpoint_hours: float, interruptions: int, restart_hours: float,
) -> float:  # fmt: skip
    """Days from the first token to the last, expected, attention's quadratic term left out.

    params            of the model; active_params: those that one token meets (fewer in a mixture of experts)
    peak_tflops       of one GPU, dense; mfu: reached while training goes on
    checkpoint_hours  of training from one checkpoint to the next; writing one takes no time
    interruptions     in the whole run, at moments that know nothing of the checkpoints. Each costs the work that no
                      checkpoint holds, and restart_hours during which nothing is trained.
    """
    # BEGIN SOLUTION
    flops_per_hour = gpus * peak_tflops * 1e12 * mfu * 3600
    training_hours = 6 * active_params * tokens / flops_per_hour
    lost_hours = interruptions * (checkpoint_hours / 2 + restart_hours)
    return (training_hours + lost_hours) / 24
    # END SOLUTION


# ----------------------------------------------------------------------------------------------------- flops.roofline
def mlp_us(
    M: int, d_model: int, d_ff: int, itemsize: int,
    tensor_tflops: float, lane_tflops: float, hbm_gbps: float, fused: bool,
) -> float:  # fmt: skip
    """The least time of GELU(x W1) W2 in microseconds, for x [M, d_model], W1 [d_model, d_ff] and W2 [d_ff, d_model].

    Three kernels run one after the other: a product on the tensor cores, GELU on the ordinary lanes at 8 FLOPs an element,
    a product. fused: two kernels, since the first applies GELU before it writes.

    A kernel fetches every element that it needs once from memory, writes every element that it makes once, and leaves
    nothing on the chip for the next. Inside a kernel tensor cores, lanes and memory work at the same time.
    """
    # BEGIN SOLUTION
    bytes_per_us, tensor_per_us, lane_per_us = hbm_gbps * 1e3, tensor_tflops * 1e6, lane_tflops * 1e6
    weights, x, h = d_model * d_ff * itemsize, M * d_model * itemsize, M * d_ff * itemsize
    product_us = 2 * M * d_model * d_ff / tensor_per_us
    gelu_us = 8 * M * d_ff / lane_per_us
    product_bytes_us = (x + weights + h) / bytes_per_us  # of the second as well: it reads h and writes as much as x
    if fused:
        return max(product_us, gelu_us, product_bytes_us) + max(product_us, product_bytes_us)
    return 2 * max(product_us, product_bytes_us) + max(gelu_us, 2 * h / bytes_per_us)
    # END SOLUTION


# ----------------------------------------------------------------------------------------------- flops.critical_batch
def critical_batch(
    params: float, weight_bytes: float, kv_bytes: float, attention_flops: float, peak_tflops: float, hbm_gbps: float
) -> int:  # fmt: skip
    """The smallest batch whose decode step takes at least as long to compute as to fetch; 0 where no batch is enough.

    A decode step makes the next token of every sequence in the batch. Every weight is fetched once a step, and meets every
    sequence's token in a multiply-add.

    params           weights of the model, of weight_bytes each (1/2 for int4)
    kv_bytes         keys and values of one sequence, which nobody else can use
    attention_flops  what one sequence's token computes with them
    """
    # BEGIN SOLUTION
    flops_per_s, bytes_per_s = peak_tflops * 1e12, hbm_gbps * 1e9
    weights_s = params * weight_bytes / bytes_per_s  # whatever the batch
    compute_s = (2 * params + attention_flops) / flops_per_s  # of one sequence
    cache_s = kv_bytes / bytes_per_s
    if compute_s <= cache_s:
        return 0  # every sequence brings more to fetch than to compute, so that a larger batch does not help
    return math.ceil(weights_s / (compute_s - cache_s))
    # END SOLUTION
