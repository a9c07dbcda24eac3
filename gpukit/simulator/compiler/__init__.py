"""What Triton makes of a kernel for a GPU that is not here: `gpukit.compile`.

compile      a kernel and its arguments in, `Compiled` out: registers, spills, shared memory, layouts, PTX, SASS
worker       the process that compiles, since the interpreter's variable changes Triton when it is imported
layouts      which thread holds which element of a block
assembly     PTX and SASS as data; listing makes rows of it that can be read
banks        how lanes meet in the banks of shared memory
occupancy    how many programs are on an SM at a time
"""
