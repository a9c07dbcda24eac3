"""What a notebook shows: each module holds one view. Rows and numbers go in, pictures and controls come out.

style       colors with a meaning, one matplotlib style, tables; every figure is a white card, which custom.css turns dark on a dark page
board       shapes in pixels: one list of them is SVG in the page's own colors, and the still of a saved notebook
view        the base of the views with controls: traits, reset, one drawing for the live picture and the still
calculator  the base of those whose controls are fields: decoding, flop_explorer, memory_calculator, roofline, training_cost

By notebook: predict and progress in all of them, implementation for the instructor; bits, precision (01);
memory_charts (02); benchmark, times, timeline, versus (04); tiles, assembly (05); warp (06); access, cache, waves (07);
fusion (08); gelu (10); norms (11); attention (13); training_run, ladder (17).
What is shown is counted in accounting/ and simulator/.
"""
