"""From an exercise and a learner's file to a verdict, the same in a notebook, pytest and the command line.

exercise, prose     what an exercise is, and what is written about it; ideas and inputs are what checks share; registry finds all
judge               makes inputs, has them run and decides: gpukit.check
server, worker      the processes in which the learner's code runs, and the witnesses there; messages and wire are how they talk
lint                what a file may not contain, told before it runs
compare, evidence   whether a result is right; what a check saw
diagnose, verdict   the lines that the learner reads; state, label and lines as one object
plugin, cells       the grader of `pytest --nbval notebooks`; check_cells protects its cells; report writes what a run found
stubs               exercises/ out of solutions/
"""
