"""How true the simulator is. Three things are checked against GPUs: traffic, times and values.

traffic            traced bytes and sectors beside Nsight Compute's, by kernel, with the bars; reasons says why where it is not
counted_kernels    the kernels that are counted; passes are more of them, and show what L2 keeps
counters           Nsight Compute's side of the table, beside simulated_counts; under_ncu launches the kernels for it
own_file           a file of one's own beside Nsight Compute: `gpukit trace --ncu FILE.py`
times              predicted beside measured times; timed_kernels are the kernels, and what measures a machine's rates
values             the interpreter's numbers beside a GPU's
new_kernels        kernels that the simulator was not built with, to be timed and counted like the others
halves             the split of these in two: on one half the model is improved, the one held back has the bars
unseen             measured first: twelfth_set, eleventh_set, tenth_set, ninth_set, eighth_set, seventh_set, sixth_set, fifth_set,
                   fourth_set, third_set
report             what `gpukit validate` prints of all this

`python -m gpukit.validation` prints and measures traffic and values, `python -m gpukit.validation.times` times.
"""
