"""What a name that is refused costs: the exercises that need it, and no other of the same file."""

import ast
import textwrap

import pytest

from gpukit import integrity
from gpukit.grading import registry
from gpukit.grading.judge import judge_source
from gpukit.grading.lint import lint
from gpukit.grading.parts import accepted

FILE = textwrap.dedent("""\
    import math
    import os

    PLACE = os.getpid()
    SCALE = 2


    def helper(x):
        return open(x)


    @staticmethod
    def mine(x):
        return math.sqrt(x) * SCALE


    def reads(x):
        return helper(x)


    def places(x):
        return PLACE


    def indirectly(x):
        return reads(x) + mine(x)
    """)


def test_what_is_not_needed_is_left_out():
    text, finding, noted = accepted(FILE, "mine")
    assert finding is None and lint(text) is None
    assert (noted.line, noted.text) == (2, "import os")
    left = {name for node in ast.parse(text).body for name in (getattr(node, "name", None),) if name}
    assert left == {"mine", "reads", "places", "indirectly"}
    assert [line if line in text.split("\n") else "" for line in FILE.split("\n")] == text.split("\n"), "lines stay"


@pytest.mark.parametrize(
    ("function", "line"), [("reads", 9), ("indirectly", 9), ("helper", 9), ("places", 2)], ids=lambda x: str(x)
)
def test_what_is_needed_is_refused(function, line):
    text, finding, noted = accepted(FILE, function)
    assert text == FILE and noted is None
    assert finding.line == line, "of several the one that the function needs"


ALONE = "def f(x):\n    return x\n"
REFUSED = {
    "a statement that does something": "import os\nos.system('true')\n" + ALONE,
    "a call": "open('x')\n" + ALONE,
    "in a branch": "if 1:\n    import os\n" + ALONE,
    "in a try": "try:\n    import os\nexcept ImportError:\n    pass\n" + ALONE,
    "an assignment to an element": "D = {}\nD[0] = open('x')\n" + ALONE,
    "an assignment to an attribute": "import torch\ntorch.add = open\n" + ALONE,
    "beside another statement": "import os; import math\n" + ALONE,
    "at the end of a line of its own function": "def f(x): return x\nf.__code__ = 1\n",
    "all names": "from os import *\n" + ALONE,
    "its own name": "def f(x):\n    return x\nfrom os import getpid as f\n",
    "its own name again": "def f(x):\n    return x\ndef f(x):\n    return open(x)\n",
    "its decorator": "def d(g):\n    return eval(g)\n@d\ndef f(x):\n    return x\n",
    "its default": "N = eval('1')\ndef f(x, n=N):\n    return x\n",
    "its annotation": "T = eval('int')\ndef f(x: T):\n    return x\n",
    "a base of its class": "class A:\n    __slots__ = open\nclass B(A):\n    pass\ndef f(x):\n    return B()\n",
    "by a constant": "import os\nN = os.getpid()\nM = N\ndef f(x):\n    return M\n",
    "inside a function": "import os\ndef f(x):\n    def g():\n        return os.getpid()\n    return g()\n",
    "by a comprehension": "import os\ndef f(x):\n    return [os for _ in x]\n",
    "by a statement": "import os\nfor i in range(3):\n    print(os)\n" + ALONE,
    "by a walrus": "print(n := open('x'))\n" + ALONE,
    "in the else of main": "if __name__ == '__main__':\n    pass\nelse:\n    open('x')\n" + ALONE,
}


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED)
def test_what_may_be_needed_is_refused(source):
    text, finding, _ = accepted(source, "f")
    assert text == source
    assert finding == lint(source) and finding is not None


LEFT_OUT = {
    "another import": "import os\n" + ALONE,
    "several names": "from os import getpid, path\n" + ALONE,
    "a constant": "N, M = open('x'), 3\n" + ALONE,
    "a decorated function": "import math\n@math.sin\ndef g(x):\n    return open(x)\n" + ALONE,
    "a function with a decorator of its own": "def d(g):\n    return eval(g)\n@d\ndef h(x):\n    return x\n" + ALONE,
    "a class": "class A:\n    def m(self):\n        return self.__dict__\n" + ALONE,
    "a chain": "import os\nN = os.getpid()\nM = N + 1\ndef g(x, n=M):\n    return x\n" + ALONE,
    "main": "if __name__ == '__main__':\n    import os\n    print(os.getpid())\n" + ALONE,
    "a function that would change its name": "def g():\n    global f\n    f = open\n" + ALONE,
    "with a form feed": "\x0cimport os\n\x0c\n" + ALONE,
    "over several lines": "import \\\n    os\nN = (\n    os.getpid()\n)\n" + ALONE,
    "in a text of several lines": "def g(x):\n    return open('''\n" + ALONE + "''')\n" + ALONE,
}


@pytest.mark.parametrize("source", LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_is_left_out(source):
    text, finding, _ = accepted(source, "f")
    assert finding is None and lint(text) is None and text != source
    assert text.count("\n") == source.count("\n")
    assert ast.dump(ast.parse(text).body[-1]) == ast.dump(ast.parse(source).body[-1])


def solution(concept, extra="", old="", new=""):
    source = integrity.solution(concept)
    assert not old or source.count(old) == 1
    return source.replace(old, new) + extra if old else source + extra


def test_one_exercise_of_a_file_is_refused_and_the_others_are_graded():
    own = 'valid = target[rows] != ignore_index\n        open("answers")'
    source = solution("losses", old="valid = target[rows] != ignore_index", new=own)
    refused = judge_source(registry.exercise("losses.chunked"), source, seed=1)
    assert (refused.state, refused.diagnosis) == ("error", "forbidden") and "uses open" in str(refused)
    for other in ("losses.column", "losses.one_launch"):
        assert str(judge_source(registry.exercise(other), source, seed=1)).startswith("PASS")


def test_what_is_left_out_of_the_file_is_said():
    source = solution("losses", "\n\nimport os\nHERE = os.getcwd()\n")
    verdict = judge_source(registry.exercise("losses.column"), source, seed=1)
    assert verdict.passed and "\n" in str(verdict) and "\n" not in verdict.line
    said = " ".join(" ".join(verdict.lines).split())
    number = source.split("\n").index("import os") + 1
    assert f"line {number} of exercises/losses.py uses import os" in said and "left out" in said
    wrong = solution("losses", "\n\nimport os\n", "logits[:, column].clone()", "logits[:, column]")
    verdict = judge_source(registry.exercise("losses.column"), wrong, seed=1)
    assert verdict.state == "fail" and "uses import os" in str(verdict) and "hint 1 of 3" in str(verdict)


def test_a_traceback_shows_the_line_of_the_file():
    source = solution("losses", old="    total, watched = 0.0, []\n", new="    total, watched = 0.0, [][1]\n")
    source = "import os\n" + source
    verdict = judge_source(registry.exercise("losses.column"), source, seed=1)
    number = source.split("\n").index("    total, watched = 0.0, [][1]") + 1
    assert verdict.diagnosis == "exception" and f"line {number}" in str(verdict)
