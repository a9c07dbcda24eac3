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
    raise NotImplementedError("flops.einsum")  # your code here


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
    raise NotImplementedError("flops.layer")  # your code here


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
    layer = 4 * d_model**2 + 2 * d_model * d_ff  # your code here
    embeddings = vocab * d_model + positions * d_model
    head = 0 if tied else vocab * d_model
    params = layers * layer + embeddings + head
    scores = layers * 2 * T * d_model  # q times k and weights times v: no parameters, the same multiply-adds
    return 6 * B * T * (params + scores)


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
    raise NotImplementedError("flops.mfu")  # your code here


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
    raise NotImplementedError("flops.days")  # your code here


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
    raise NotImplementedError("flops.roofline")  # your code here


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
    raise NotImplementedError("flops.critical_batch")  # your code here
