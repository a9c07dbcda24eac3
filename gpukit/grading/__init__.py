"""From an exercise and a learner's file to a verdict, the same in a notebook, pytest and the command line.

exercise, prose     what an exercise is, and what is written about it; ideas and inputs are what checks share; registry finds all
judge               makes inputs, has them run and decides: gpukit.check
server, worker      the processes of a check, and what each answers; messages and wire are how they talk,
                    remote what a worker uses of the judge's
host, device        the learner's Python without data, and its kernels with data, whose word counts; kernel_text: what these may say
lint, fence         what a file may name, told before it runs (names lists it; parts: of that what one exercise needs); what its
                    process may ask of the system; cuda_text: what a kernel in CUDA C++ may say
compare, evidence   whether a result is right; what a check saw; recognize tells which wrong idea explains it
diagnose, verdict   the lines that the learner reads; state, label and lines as one object
plugin, cells       the grader of `pytest --nbval notebooks`; check_cells protects its cells; report writes what a run
                    found, also one that a signal ends (ending)
stubs               exercises/ out of solutions/
example             what an answer moves and takes on one input of a real size, for `gpukit compare` and charts
"""
