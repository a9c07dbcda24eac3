"""A term with a class: from the learners' copy to grades. Nothing but the command line imports it.

release      the copy without solutions (`gpukit release`, `init`); copies is what it says of itself, leaks searches it
update       a copy brought to a newer release (merge: answers into new stubs); reset: one stub; backup: before both
assignment   the TOML file that says which exercises count, for how much and until when; own: exercises that it brings
intake       submissions as folders, zips or an LMS's download; packed lists their files, roster says whose they are
grade        submissions to verdicts; pool: in several processes here or on a Dask cluster; versions: of a check
store        the SQLite file that keeps verdicts, files and what was handed in
marks        verdicts to points, by the assignment's rules
gradebook    Canvas, Moodle, nbgrader, JSON, JUnit; pages: for learners and the class; report writes all of them
replay       one verdict once more, on the same file and the same inputs
gradescope   an assignment as an autograder for Gradescope
commands     the subcommands of `gpukit class`
"""
