"""What models and kernels cost, from shapes, configurations and a `hardware.Gpu`: pure functions, nothing is run.

models              transformers as a few numbers, and their parameters
dtypes, autocast    number formats bit by bit; which one an operation runs in
flops, memory       FLOPs; where a GPU's memory goes in training and serving
roofline            what a GPU can reach at a given number of FLOPs a byte
training, decoding  a run's days and money; tokens per second
collectives         what several GPUs send each other in a training step
tiling, attention   tiles, waves and reuse of a matmul; blocks of scores and online softmax
fusion              what a graph of operations moves, for any choice of kernels
pencil, commands    the answers as text; the commands `gpukit memory` and `gpukit flops`
arguments           what all of these accept
"""
