"""Exercises whose answer is a text in CUDA C++: what a text may not say, texts that attack the compiler or the interpreter, and
a machine without the compiler. Each costs one verdict with a sentence."""

from dataclasses import replace
from functools import partial

import pytest

from gpukit import course, integrity
from gpukit.grading import cuda_text, registry
from gpukit.grading import judge as judging
from gpukit.simulator.cuda import nvrtc
from tests.grading.test_fence import landlock
from tests.grading.test_judge import fresh_server

ROOT = course.root(__file__)
EXERCISE = replace(registry.exercise("fusion.cuda"), timeout_s=30)
SOLUTION = integrity.solution("fusion", ROOT)
SIGNATURE = 'extern "C" __global__ void swiglu(const float* gate, const float* up, float* y, long long n)'
judge_source = partial(judging.judge_source, seed=1)
pytestmark = pytest.mark.skipif(nvrtc.find() is None, reason="NVRTC is not installed")


@pytest.fixture(scope="module", autouse=True)
def _close_servers():
    yield
    fresh_server()


def judged(text: str, exercise=EXERCISE):
    return judge_source(exercise, f"import torch\n\n\ndef swiglu_cuda():\n    return r'''{text}'''\n")


def said(verdict) -> str:
    return " ".join(" ".join(verdict.lines).split())


def body(statements: str, before: str = "") -> str:
    return f"{before}\n{SIGNATURE} {{\n{statements}\n}}"


# ------------------------------------------------------------------------------------------------------ what a text may say
REFUSED = {
    '#include "/etc/passwd"': "#include",
    "  #  include </etc/passwd>": "#include",
    "%:include </etc/passwd>": "%:",
    "??=include </etc/passwd>": "??",
    "/* */ #include </etc/passwd>": "#include",
    "// one line \\\n#include </etc/passwd>": "a line that goes on in the next one",
    "#def\\\nine X": "a line that goes on in the next one",
    "#embed </etc/passwd>": "#embed",
    '#line 7 "/etc/passwd"': "#line",
    "#error no": "#error",
    "#pragma nv_diag_suppress 1": "#pragma",
    '_Pragma("x")': "_Pragma",
    "#if __has_include(</etc/passwd>)": "__has_include",
    'asm("exit;");': "asm",
    '__asm__ volatile ("exit;");': "__asm__",
    "#define JOIN(a, b) a##b": "##",
    'printf("hello");': "printf",
    "int c = '\"'; // \" #include": "'",
    "int c = '/*'; #include </etc/passwd> /* */": "'",
    'R"(// )" #include': '"',
    "import <vector>;": "import",
    "x" * 20_000: "a text of 20,008 characters",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:30])
def test_what_a_text_may_not_say(text):
    line, what, instead = cuda_text.refused(f"int a;\n{text}\n")
    assert what == REFUSED[text] and instead
    assert line == (1 if len(text) == 20_000 else 2)


@pytest.mark.parametrize(
    "text",
    [
        SIGNATURE + " { }",
        '// the thread\'s "own" element, #include\n/* asm \'" printf */ int a;',
        "#define N 4\n#ifdef N\n#pragma unroll\n#endif\n  # pragma   unroll 4\n#undef N",
        "int a = 7 % 3; bool b = a ? true : false; int c[] = {a}; float assembled, printing, important;",
    ],
)
def test_what_it_may_say(text):
    assert cuda_text.refused(text) is None


def test_a_refusal_names_the_line_of_the_file():
    verdict = judged(body("    y[0] = 1;", before='#include "/etc/passwd"'))
    assert (verdict.state, verdict.diagnosis) == ("error", "forbidden")
    assert "exercises/fusion.py, line 5 uses #include" in said(verdict)
    changed = SOLUTION.replace('return r"""__device__', 'return "\\n#embed\\n" + r"""__device__')
    assert "the text of swiglu_cuda, line 2 uses #embed" in said(judge_source(EXERCISE, changed))


# ------------------------------------------------------------------------------------------------ what the fence is there for
@pytest.fixture
def nothing_is_refused(monkeypatch):
    monkeypatch.setattr(cuda_text, "refused", lambda text: None)


@landlock
@pytest.mark.parametrize(
    "path", ["/etc/passwd", str(ROOT / "solutions" / "fusion.py"), str(ROOT / "gpukit" / "checks" / "fusion.py")]
)
def test_the_compiler_reads_no_file(nothing_is_refused, path):
    verdict = judged(body("", before=f'#include "{path}"'))
    assert (verdict.state, verdict.diagnosis) == ("fail", "does-not-compile")
    assert "Permission denied" in said(verdict)


def test_inline_assembly_is_data(nothing_is_refused):
    assert judged(body('asm volatile ("exit;");')).diagnosis == "nan"
    assert judged(body('asm volatile ("trap;");')).diagnosis == "unsupported"
    assert judged(body('asm volatile (".reg .b999 q; mov.b999 q, 1;");')).diagnosis == "unsupported"


# -------------------------------------------------------------------------------------------------------- texts that attack
HOSTILE = {
    "an endless loop": (body("while (true) y[0] = 1;"), "endless", "the kernel does not end"),
    "a loop without a body": (body("for (int i = 0; i < 4; ) { y[i] = 0; }"), "endless", "is still running"),
    "another launch": (body("swiglu<<<1, 1>>>(gate, up, y, n);"), "does-not-compile", "device-side kernel launch"),
    "recursion": (
        body("y[0] = f(n);", before="__device__ __noinline__ float f(long long n) { return n > 1 ? f(n - 1) + f(n - 2) : 1; }"),
        "unsupported",
        "did not inline",
    ),
    "large shared memory": (body("__shared__ float a[12289]; a[threadIdx.x] = 1; y[0] = a[n % 7];"), "does-not-compile|unsupported", "shared"),
    "large arrays of its own": (body("float a[1 << 22]; for (int i = 0; i < n; i++) a[i * n % 77] = i; y[0] = a[n % 5];"), "unsupported", "arrays of"),
    "large global arrays": (body("y[0] = a[n];", before="__device__ float a[1 << 28];"), "unsupported", "1,073,741,824 bytes"),
    "an address from nowhere": (body("*(float*)n = 1;"), "out-of-bounds", "address of nothing"),
    "a stray pointer": (body("y[-5] = gate[0];"), "out-of-bounds", "at index -5, before the start of y"),
    "another array's memory": (body("if (n > 1) ((float*)up)[1] = 3;"), "input-changed", "up was changed"),
    "two kernels": (body("y[0] = 1;", before='extern "C" __global__ void other() {}'), "signature", "must define one __global__ function"),
    "no kernel": ("", "signature", SIGNATURE.partition("void ")[2]),
    "a mangled name": (body("").replace('extern "C" ', ""), "signature", "must define one __global__ function"),
    "other arguments": (body("").replace("long long n", "int n"), "signature", "with the arguments that it was handed out with"),
    "atomics": (body("atomicAdd(y, 1.0f);"), "unsupported", "atom|red"),
    "unset variables": (body("float a; y[0] = a;"), "nan|unsupported", ""),
    "deep templates": (
        body("y[0] = F<2000000>::v;", before="template <int N> struct F { static const int v = 1 + F<N - 1>::v; };"),
        "does-not-compile|timeout|crashed",
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("text, diagnosis, sentence", HOSTILE.values(), ids=HOSTILE)
def test_hostile_texts(text, diagnosis, sentence):
    verdict = judged(text)
    assert verdict.diagnosis in diagnosis.split("|"), str(verdict)
    assert any(part in said(verdict) for part in sentence.split("|")), str(verdict)
    assert integrity.badly_said(verdict) == ""


@pytest.mark.parametrize(
    "result, diagnosis, sentence",
    [
        ("None", "type", "returned a NoneType, expected a str"),
        ("b'x'", "type", "expected a str"),
        ("7", "type", "returned a int"),
        ("'x' * 10_000_000", "malformed", "sent an answer that cannot be judged"),
        ("'x' * 1_000_000", "forbidden", "a text of 1,000,000 characters"),
        ("'\\0'", "does-not-compile|signature", ""),
        ("'\\ud800'", "malformed|does-not-compile", ""),
    ],
)
def test_results_that_are_no_text(result, diagnosis, sentence):
    verdict = judge_source(EXERCISE, f"def swiglu_cuda():\n    return {result}\n")
    assert verdict.diagnosis in diagnosis.split("|") and sentence in said(verdict), str(verdict)


def test_a_global_array_keeps_nothing_from_launch_to_launch():
    """A kernel that were right from its second launch on is wrong in each."""
    before = "__device__ int launches;"
    loop = "for (long long i = threadIdx.x + (long long)blockIdx.x * blockDim.x; i < n; i += (long long)gridDim.x * blockDim.x)"
    text = body(f"{loop} y[i] = launches ? gate[i] / (1 + expf(-gate[i])) * up[i] : 0; launches = 1;", before)
    verdict = judged(text)
    assert verdict.state == "fail" and "0 of 12 cases pass" in said(verdict)


def test_a_compiler_that_dies_or_sleeps_is_the_texts_fault(monkeypatch):
    def dying(message, *_):
        raise judging.wire.Closed

    before = judging._Run._exchange
    monkeypatch.setattr(
        judging._Run,
        "_exchange",
        lambda self, worker, message, deadline: (
            dying(message) if isinstance(message, str) else before(self, worker, message, deadline)
        ),
    )
    verdict = judge_source(EXERCISE, SOLUTION)
    assert (verdict.state, verdict.diagnosis) == ("crashed", "crashed")
    assert "the compiler ends without an answer when it compiles exercises/fusion.py" in said(verdict)


# ------------------------------------------------------------------------------------------------------ what a learner reads
def test_lines_are_those_of_the_file():
    for edit, sentence in {
        ("blockIdx.x * ", "blockId.x * "): "blockId",
        ("i < n / 4; i", "i < n; i"): "float4 g = ((const float4*)gate)[i];",
    }.items():
        source = SOLUTION.replace(*edit)
        at = next(i for i, line in enumerate(source.splitlines(), 1) if sentence in line and "STUB" not in line)
        assert f"line {at}" in said(judge_source(EXERCISE, source))


def test_a_rule_names_the_line_of_the_file():
    source = SOLUTION.replace("silu(g.w) * u.w", "silu(g.w) * up[4 * i + 3]")
    at = next(i for i, line in enumerate(source.splitlines(), 1) if "up[4 * i + 3]" in line)
    assert f"(line {at - 1}, {at})" in said(judge_source(EXERCISE, source))


# ------------------------------------------------------------------------------------------------- a machine without NVRTC
@pytest.mark.parametrize("found", [None, ROOT / "README.md"])
def test_without_the_compiler_there_is_no_verdict(monkeypatch, found):
    """Neither a pass nor a mistake; the line says what to install."""
    monkeypatch.setattr(nvrtc, "find", lambda: found)
    for source in (SOLUTION, SOLUTION.replace("n / 4", "n / 8")):
        verdict = judge_source(EXERCISE, source)
        assert (verdict.state, verdict.diagnosis, verdict.passed) == ("skipped", "no-compiler", False)
        assert "cannot be judged here: NVRTC" in said(verdict) and nvrtc.INSTALL in said(verdict)
    assert judge_source(EXERCISE, "def swiglu_cuda():\n    raise NotImplementedError\n").state == "todo"
