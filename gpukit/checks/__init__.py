"""The exercises as data: cases, formulas and bounds of one lesson in each module, beside it its prose as Markdown.

In the order of the notebooks: start, dtypes, memory, flops, benchmarking, coalescing, tiling, fusion, triton_basics, softmax,
gelu, norms, matmul, flash_attention, kv_cache, losses, adamw, capstone. gpukit.grading.exercise says what an exercise is.
"""
