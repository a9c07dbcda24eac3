"""Each operation in PyTorch: what it means, hard inputs, its least cost. One `gpukit.op.Op` or a few in each module.

softmax, gelu, norms, rope, dropout                     rows and elements
matmul, fp8_matmul, quantized_matmul                    products
flash_attention, decode_attention, kv_cache             attention, and a small model that decodes with a cache
cross_entropy, linear_cross_entropy, kl_div, adamw      losses and the optimizer
triton_basics                                           Triton's random numbers, for notebook 05
_liger                                                  providers: Liger's kernels in CuTe
"""
