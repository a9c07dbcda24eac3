"""CUDA C++ without a GPU: its text is compiled to PTX, the assembly language of NVIDIA's GPUs, which is then interpreted.

nvrtc    NVIDIA's compiler as a library: from text to PTX
ptx      from PTX to instructions
machine  runs a launch, all threads side by side, and checks and counts every access
compute  what each instruction does to its operands, in NumPy
"""
