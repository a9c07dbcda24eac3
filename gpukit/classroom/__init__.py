"""A term with a class: from submissions to grades, `gpukit class`. Nothing but the command line imports it.

assignment   the TOML file that says which exercises count, for how much and until when
intake       submissions as folders, zips or an LMS's download; packed lists their files, roster says whose they are
grade        submissions to verdicts, in several processes here or on a Dask cluster; pool is what runs them
store        the SQLite file that keeps verdicts, files and what was handed in
marks        verdicts to points, by the assignment's rules
replay       one verdict once more, on the same file and the same inputs
commands     the subcommands of `gpukit class`
"""
