"""What a GPU would do, without one. Four packages, in the order in which a kernel in Triton goes through them:

interpreter/   runs kernels on the CPU as a GPU would, and checks every access
trace/         counts what they move, and what the caches of a GPU make of it
compiler/      what Triton makes of a kernel for any GPU: registers, layouts, machine code, occupancy
prediction/    from these the time, and what limits it

cuda/ compiles a kernel in CUDA C++, interprets its PTX and counts what it moves.
Beside them three models for lessons: simt (threads, warps, banks), queue_model (a GPU as a benchmark sees it) and allocator
(PyTorch's caching allocator). gpukit.validation says how true all of it is.
"""
