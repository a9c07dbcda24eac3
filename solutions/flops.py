"""FLOPs, bytes and time: eight functions in plain Python, in the order of notebooks/03_flops.ipynb, which explains them.

There are no tensors and no kernels here. A multiplication is 1 FLOP, and so is an addition. Tera is 10^12, giga is 10^9,
and micro is 10^-6.
"""

# What may be imported: torch, triton, einops, numpy, abc, bisect, cmath, collections, copy, dataclasses, decimal, enum,
# fractions, functools, heapq, itertools, math, numbers, operator, random, statistics, string, struct, types and typing.
import math


# ------------------------------------------------------------------------------------------------------- flops.einsum
def einsum_flops(expression: str, sizes: dict[str, int]) -> int:
    """FLOPs of an einsum such as "tokens d_in, d_out d_in -> tokens d_out".

    It is computed as one nest of loops, without results in between. Each round of the innermost loop multiplies one
    element of every operand and adds the product to an element of the result, which began at zero. An axis that the
    result lacks is summed over. If there is no such axis, every product is a result already and nothing is added.

    sizes  name of an axis -> its length; it may also name axes that this expression does not have
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

    Attention  x [B, T, d_model] becomes q with `heads` heads, and k and v with `kv_heads` heads; each head is head_dim
               wide. heads / kv_heads query heads share one head of k and v. Then come the scores from q and k, softmax, a
               weighted sum over v, and a projection of all heads together back to d_model.
    causal     token t sees the tokens 0 to t, and the kernel computes no other score; otherwise every token sees all T.
    MLP        d_model to d_ff and back to d_model. gated: a second matrix from d_model to d_ff works beside the first.

    Everything needs a gradient, x too, and nothing is computed twice. Softmax and norms are no matrix products.
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
    """FLOPs of one training step, forward and backward, of B sequences of T tokens. The stub has one planted fault.

    The model  embedding(tokens) [vocab, d_model] + embedding(positions) [positions, d_model]; `layers` layers with four
               attention matrices [d_model, d_model] and two MLP matrices, d_model to d_ff and back; at last the logits,
               x times a head [vocab, d_model]. If tied, the head is the embedding of the tokens; otherwise it is a
               matrix of its own.
    Counted    what PyTorch's FlopCounterMode counts: matrix products and nothing else, and of attention the whole square
               of T x T scores, with or without a mask.
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
def utilization(
    tokens_per_s: float, forward_flops: float, gpus: int, rate_tflops: float, with_sparsity: bool, recomputed: float
) -> tuple[float, float]:
    """(MFU, HFU) of a training run, as fractions of 1. MFU counts the FLOPs that the model needs, HFU those that ran.

    tokens_per_s   of all GPUs together
    forward_flops  of the model's forward pass, for one token
    rate_tflops    the data sheet's rate of one GPU. with_sparsity: its footnote says that the rate holds for matrices in
                   which two of every four elements are zero; the model's matrices are not like that
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
    """The expected number of days from the first token to the last; attention's quadratic term is left out.

    params            of the model. active_params: those that one token meets (fewer in a mixture of experts)
    peak_tflops       of one GPU, dense. mfu: what is reached while training goes on
    checkpoint_hours  of training from one checkpoint to the next; writing a checkpoint takes no time
    interruptions     in the whole run, at random moments. Each costs the work since the last checkpoint, and
                      restart_hours during which nothing is trained
    """
    # BEGIN SOLUTION
    flops_per_hour = gpus * peak_tflops * 1e12 * mfu * 3600
    training_hours = 6 * active_params * tokens / flops_per_hour
    lost_hours = interruptions * (checkpoint_hours / 2 + restart_hours)
    return (training_hours + lost_hours) / 24
    # END SOLUTION


# --------------------------------------------------------------------------------------------------- flops.chinchilla
def compute_optimal(
    gpus: int, peak_tflops: float, mfu: float, days: float, tokens_per_param: float
) -> tuple[float, float]:
    """(parameters, tokens): the model that a training budget is best spent on, and how long its text is.

    The budget is what `gpus` GPUs of peak_tflops each (dense) compute in `days` days at that MFU. All of it is spent on
    training, which takes 6 FLOPs per parameter and token; attention's products are left out. The text has
    tokens_per_param tokens for each parameter.
    """
    # BEGIN SOLUTION
    flops = gpus * peak_tflops * 1e12 * mfu * days * 86400
    params = math.sqrt(flops / (6 * tokens_per_param))  # 6 N D with D = tokens_per_param N
    return params, tokens_per_param * params
    # END SOLUTION


# ----------------------------------------------------------------------------------------------------- flops.roofline
def mlp_us(
    M: int, d_model: int, d_ff: int, itemsize: int,
    tensor_tflops: float, lane_tflops: float, hbm_gbps: float, fused: bool,
) -> float:  # fmt: skip
    """The least time of GELU(x W1) W2 in microseconds, for x [M, d_model], W1 [d_model, d_ff] and W2 [d_ff, d_model].

    Three kernels run one after the other: a product on the tensor cores, GELU on the ordinary lanes at 8 FLOPs per
    element, and a second product on the tensor cores. fused: two kernels, since the first one applies GELU before it
    writes its result.

    A kernel reads every element that it needs once from memory, writes every element of its result once, and leaves
    nothing on the chip for the next kernel. Inside a kernel, tensor cores, lanes and memory work at the same time.
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
    """The smallest batch whose decode step takes at least as long to compute as to fetch; 0 if no batch is enough.

    A decode step makes the next token of every sequence in the batch. Every weight is fetched once per step, and meets the
    token of every sequence in a multiply-add.

    params           weights of the model, of weight_bytes each (1/2 for int4)
    kv_bytes         of the keys and values of one sequence, which no other sequence can use
    attention_flops  what the token of one sequence computes with them
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
