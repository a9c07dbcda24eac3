"""What lessons show and do not teach: tables, figures and sentences with numbers, one function for each.

A notebook's code is code that a learner would type; what lays out a table or draws a figure is called by name,
`lesson.ring()`, and `lesson.ring??` shows its source.

diagram     boxes, arrows and words on an empty canvas: what diagrams are drawn with
measured    what lessons need measured on a GPU beyond `gpukit bench`
course_map  the notebooks of the course, with "you are here"
results     what is kept of runs on an H200, and the rate of a copy in them
layer       the Llama layer of the running story, in measured times

The others have the names of their notebooks: start, dtypes, memory, flops, benchmarking, triton_basics, coalescing, tiling,
fusion, softmax, gelu, norms, matmul, flash_attention, kv_cache, losses, adamw, capstone.
"""
