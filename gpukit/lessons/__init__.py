"""What lessons show and do not teach: tables, figures and sentences with numbers, one function for each.

A notebook's code is code that a learner would type; what lays out a table or draws a figure is called by name,
`lesson.ring()`, and `lesson.ring??` shows its source.

course_map  the notebooks of the course, with "you are here"
capstone    17, the GPT
"""
