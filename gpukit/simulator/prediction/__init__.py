"""How long a launch takes, and why: `gpukit.predict`.

predict      trace, compiled kernel and GPU in, time and its limit out
machine      what a GPU was measured to reach
mix          how often each machine instruction runs, and which unit it keeps busy
scoreboard   how long programs take that share an SM, warp by warp
between      what a launch leaves in L2 for the next
"""
