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
    raise NotImplementedError("flops.einsum")  # your code here


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
    raise NotImplementedError("flops.layer")  # your code here


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
    layer = 4 * d_model**2 + 2 * d_model * d_ff  # your code here
    embeddings = vocab * d_model + positions * d_model
    head = 0 if tied else vocab * d_model
    params = layers * layer + embeddings + head
    scores = layers * 2 * T * d_model  # q times k and weights times v: no parameters, the same multiply-adds
    return 6 * B * T * (params + scores)


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
    raise NotImplementedError("flops.mfu")  # your code here


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
    raise NotImplementedError("flops.days")  # your code here


# --------------------------------------------------------------------------------------------------- flops.chinchilla
def compute_optimal(
    gpus: int, peak_tflops: float, mfu: float, days: float, tokens_per_param: float
) -> tuple[float, float]:
    """(parameters, tokens): the model that a training budget is best spent on, and how long its text is.

    The budget is what `gpus` GPUs of peak_tflops each (dense) compute in `days` days at that MFU. All of it is spent on
    training, which takes 6 FLOPs per parameter and token; attention's products are left out. The text has
    tokens_per_param tokens for each parameter.
    """
    raise NotImplementedError("flops.chinchilla")  # your code here


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
    raise NotImplementedError("flops.roofline")  # your code here


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
    raise NotImplementedError("flops.critical_batch")  # your code here
