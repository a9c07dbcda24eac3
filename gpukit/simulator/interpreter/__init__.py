"""Triton's interpreter made safe and right; differences_from_a_gpu.md lists what is fixed and what stays different.

layer         `install()`, and the list of Triton's names that are replaced; autoload calls it when Triton is imported
executor      one launch: its arguments, its programs; running is what the parts know of it meanwhile, digits how a kernel counts them, and integers what it makes of those it reads
memory_ops    loads, stores and atomics
addresses     where the lanes of one of them point: tiles, runs, sectors
bounds        which memory is legal, who wrote it, who raced; faults are the exceptions
unknown       integers that a sampled launch cannot read; wrapped are those that 32 bits are too few for
arithmetic    bf16, fp8, dots, reductions; numerics (number formats) and libdevice (its functions) beside it
language      and, or and not; min, max and range; what the interpreter lacks
gluon         what the words of a kernel in Gluon mean; shared_memory is where its warps, copies and products meet
frames        where in the user's code it happened
lines         how often each source line ran; sampled runs a few programs on addresses alone, turns a few turns of a loop
type_cache    what makes it quicker, and shortcuts
"""
