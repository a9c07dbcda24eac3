"""gpukit's kernels in models of Hugging Face: `gpukit.patch(model)`, and `gpukit.unpatch(model)` to take them out again.

patching      patch and unpatch: which module gets what
report        what was replaced, what was not and why, and which calls went to the original after all
replacement   one module's forward, replaced and put back
norms, mlp    RMSNorm and LayerNorm; gated products and GELU
rope          rotary position embedding, inside the attention modules
cache         keys and values that are appended in place, for generate()
attention     transformers' attention interface: masks, prefill, decode
loss          a causal language model's loss without its logits
"""
