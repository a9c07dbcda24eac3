"""What launches and PyTorch's operations move: `gpukit.trace()`.

tracer         the `with` block: `Trace` and `trace`
launch         one launch: its counts by access; torch_ops counts PyTorch's operations
recording      which addresses it touched, compactly: all that the cache model is given
caches         the cache model: traffic at each level, for any GPU. It is made of
instructions   the warps' instructions that an access becomes; coalesce guesses the lanes where nothing was compiled
contention     how atomics meet in L2
levels         L1 and L2: what they hold and give up
places         what integers in memory say of programs that did not run
waves          the programs on the SMs, wave by wave
spills         what is moved because registers do not suffice
replay         one launch again, access by access, for a view
"""
