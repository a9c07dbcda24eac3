"""What fused graphs move, held against gpukit.trace; the viewer; what is special about the exercises of notebook 08 and its
records. tests/checks/test_answers.py judges the known answers of all exercises."""

import random
import re
import xml.etree.ElementTree as ElementTree

import ipywidgets as widgets
import pytest
import torch
import traitlets

import gpukit
from gpukit import benchmark, course, hardware
from gpukit.accounting import fusion as graphs
from gpukit.accounting.fusion import Graph, Move, Op
from gpukit.checks.fusion import ACCESSES, CUDA, DETECTIVE, EPILOGUE, EXERCISES, GATE
from gpukit.grading.diagnose import Words
from gpukit.grading.judge import judge_source
from gpukit.grading.stubs import clear
from gpukit.reference.softmax import softmax as five_lines
from gpukit.simulator.compiler import assembly
from gpukit.validation.times import machine
from gpukit.widgets import board, style
from gpukit.widgets.fusion import fusion
from tests.calls import REDRAW, calls

ROOT = course.root(__file__)
H200 = hardware.gpu("h200")
N = 1 << 12


def gelu_by_hand(x):
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


def three_sigmoids_and_gradient(x):
    x.requires_grad_()
    torch.autograd.grad(x.sigmoid().sigmoid().sigmoid(), x, torch.empty_like(x))


CHAINS = {
    "relu": (graphs.relu(N), torch.relu),
    "sin_cos": (graphs.sin_cos(N), lambda x: torch.sin(x) ** 2 + torch.cos(x) ** 2),
    "gelu": (graphs.gelu(N), gelu_by_hand),
    "softmax": (graphs.softmax(64, N // 64), lambda x: five_lines(x.view(64, -1))),
    "sigmoids": (graphs.sigmoids(N), three_sigmoids_and_gradient),
}


# ---- the graphs are those that PyTorch runs --------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHAINS)
def test_unfused_graphs_count_what_pytorch_moves(name):
    graph, function = CHAINS[name]
    x = torch.rand(N)
    with gpukit.trace() as t:
        function(x)
    apart = graph.plan()
    assert (t.read_bytes, t.write_bytes) == (apart.read_bytes, apart.write_bytes)
    assert len([op for op in t.torch_ops if op.bytes]) == len(apart.kernels)


@pytest.mark.parametrize(
    ("graph", "apart", "fused"),
    (
        (graphs.relu(N), (1, 1), (1, 1)),
        (graphs.sin_cos(N), (6, 5), (1, 1)),
        (graphs.gelu(N), (13, 9), (1, 1)),
        (graphs.softmax(8, 8), (7, 5), (1, 1)),
        (graphs.sigmoids(N), (9, 6), (5, 4)),
        (graphs.sigmoids(N, "s1 s2"), (10, 7), (4, 4)),  # the lecture's 8
        (graphs.sigmoids(N, "y"), (11, 8), (4, 2)),
        (graphs.sigmoids(N, ""), (12, 9), (3, 2)),  # the lecture's 5
        (graphs.epilogue(64, 64, 64), (9, 5), (6, 2)),
        (graphs.bias_gelu(64, 64), (3, 2), (2, 1)),
    ),
    ids=lambda value: value.name if isinstance(value, Graph) else "",
)
def test_trips_of_the_lesson(graph, apart, fused):
    for plan, expected in ((graph.plan(), apart), (graph.plan(graph.fusible), fused)):
        assert (plan.reads, plan.writes) == expected
        assert plan.accesses == sum(expected) == len(plan.moves)


def test_naive_softmax_reads_and_writes():
    M, rows = 48, 100
    apart, fused = (graphs.softmax(M, rows).plan(f) for f in (None, (True,) * 4))
    assert (apart.read_elements, apart.write_elements) == (5 * M * rows + 2 * M, 3 * M * rows + 2 * M)
    assert (fused.read_elements, fused.write_elements) == (M * rows, M * rows)


def test_intensity_of_relu_and_what_is_free():
    assert [graphs.relu(N, dtype).plan().bytes_per_flop for dtype in ("fp32", "fp16")] == [8, 4]
    for itemsize, dtype in ((4, "fp32"), (2, "fp16")):
        free = graphs.free_flops(H200, itemsize)

        def kernel_us(flops, dtype=dtype):
            graph = Graph("f", (Op("f", ("x",), "y", flops=flops),), {"x": N, "y": N}, ("y",), dtype)
            return graph.plan().time_us(H200)

        assert kernel_us(free) == kernel_us(1) < kernel_us(free + 1)


@pytest.mark.parametrize("graph", [graph for graph, _ in CHAINS.values()], ids=list(CHAINS))
def test_fusing_one_pair_more_never_moves_more(graph):
    rng = random.Random(7)
    for _ in range(30):
        fused = [can and rng.random() < 0.5 for can in graph.fusible]
        before = graph.plan(fused)
        for i, can in enumerate(graph.fusible):
            if can and not fused[i]:
                after = graph.plan([*fused[:i], True, *fused[i + 1 :]])
                assert after.bytes <= before.bytes and len(after.kernels) == len(before.kernels) - 1
        assert [op for kernel in before.kernels for op in kernel.ops] == list(graph.ops)


def test_plan_agrees_with_the_exercise():
    """Two programs, one count: the plan and what the check of fusion.accesses expects."""
    for ops, kernels, needed in (case.args for case in ACCESSES.cases(random.Random(5))):
        kernels = [[name for name in ops if name in kernel] for kernel in kernels]  # a plan runs them in order
        order = [name for kernel in kernels for name in kernel]
        first = {kernel[0] for kernel in kernels}
        sizes = dict.fromkeys({*ops, *(tensor for inputs in ops.values() for tensor in inputs)}, 1)
        graph = Graph("g", tuple(Op(n, tuple(ops[n]), n) for n in order), sizes, tuple(n for n in needed if n in ops))
        plan = graph.plan([name not in first for name in order[1:]])
        assert (plan.reads, plan.writes) == ACCESSES.expected(ops, kernels, needed)


def test_moves_and_lives():
    plan = graphs.sin_cos(N).plan((True, False, False, True))
    assert plan.moves == (
        Move(0, "read", "x"), Move(1, "write", "ss"), Move(2, "read", "x"), Move(2, "write", "c"), Move(3, "read", "c"),
        Move(4, "read", "ss"), Move(4, "write", "y"),
    )  # fmt: skip
    assert plan.life("x") == (-1, 2)
    assert plan.life("ss") == (1, 4)
    assert plan.life("y") == (4, 5)
    assert plan.life("s") is None and plan.life("cc") is None
    assert graphs.sigmoids(N).plan().life("dy") == (3, 3)  # it comes with the backward pass


def test_time_is_the_larger_of_memory_and_arithmetic():
    n = 8192
    plan = graphs.epilogue(n, n, n).plan()
    product, scaled, *_ = plan.kernels
    assert plan.kernel_us(product, H200) == pytest.approx(2 * n**3 / 989.4e12 * 1e6)
    assert plan.kernel_us(scaled, H200) == pytest.approx((2 * n * n + n) * 2 / 4.8e12 * 1e6)
    assert plan.time_us(H200) == pytest.approx(sum(plan.kernel_us(kernel, H200) for kernel in plan.kernels))


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda: Graph("g", (), {}, ()), "graph 'g': ops must hold at least one operation"),
        (lambda: Graph("g", (Op("a", ("x",), "y"),), {"x": 1, "y": 1}, ("y",), "fp8"), "dtype must be one of fp32"),
        (lambda: Graph("g", (Op("a", ("x",), "y"), Op("b", ("x",), "y")), {"x": 1, "y": 1}, ("y",)), "'y' is made twice"),
        (lambda: Graph("g", (Op("a", ("y",), "y"),), {"y": 1}, ("y",)), "'a' needs 'y' before it is made"),
        (lambda: Graph("g", (Op("a", ("x",), "y"),), {"x": 1, "y": 1}, ("z",)), "'z' is needed and no operation makes it"),
        (lambda: Graph("g", (Op("a", ("x",), "y"),), {"x": 0, "y": 1}, ("y",)), "elements of 'x' must be a whole number"),
        (lambda: Graph("g", (Op("a", ("x",), "y"),), {"x": 1}, ("y",)), "elements of 'y' must be .* got None"),
        (lambda: graphs.sin_cos(N).plan((True,)), "fused must hold 4 values, one for each pair of neighbours, got 1"),
        (lambda: graphs.sigmoids(N).plan((True,) * 5), "'gradient' begins a kernel of its own, so boundary 2"),
        (lambda: graphs.sigmoids(N, "s1 s4"), "keep must name tensors among s1, s2 and y, got s4"),
    ),
)  # fmt: skip
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# ---- the viewer ------------------------------------------------------------------------------------------------------


@pytest.fixture
def view():
    return fusion([graphs.sin_cos(1 << 26), graphs.sigmoids(1 << 26), graphs.epilogue(512, 512, 512)])


def svg(view) -> ElementTree.Element:
    return ElementTree.fromstring(view.picture_area.value)


def titles(view) -> list[str]:
    return [title.text for title in svg(view).iter("title")]


def test_viewer_has_few_controls_and_a_button_for_each_pair(view):
    controls = view.children[0].children
    assert len(controls) == 5 and controls[-1].description == "reset"
    assert [b.description for b in view.pairs.children] == ["1 + 2", "2 + 3", "3 + 4", "4 + 5"]
    assert all(isinstance(b, widgets.ToggleButton) and b.tooltip and b.icon == "unlink" for b in view.pairs.children)
    assert len(fusion(graphs.relu(8)).children[0].children) == 4  # one chain: no menu


def test_viewer_fuses_and_parts(view):
    assert "reads s: 256 MiB" in " ".join(titles(view))
    view.pairs.children[0].value = True  # Space on the button
    assert view.fused == (True, False, False, False)
    assert view.pairs.children[0].icon == "link"
    assert "reads s: 256 MiB" not in " ".join(titles(view)) and "s: 256 MiB, in registers only" in titles(view)
    assert view.sentence().startswith("sin² + cos². 4 kernels read 1,280 MiB and write 1,024 MiB: 5 + 4 trips")
    view.fuse_button.click()
    assert view.fused == (True,) * 4 and all(button.value for button in view.pairs.children)
    assert "1 kernel reads 256 MiB and writes 256 MiB: 1 + 1 trips to memory, 112 µs on H200 SXM" in view.sentence()
    view.part_button.click()
    assert view.fused == (False,) * 4 and not any(button.value for button in view.pairs.children)


def test_viewer_draws_every_move_with_its_bytes(view):
    view.fused = (False, True, False, False)
    for move in view.plan.moves:
        name = f"{view.graph.ops[move.op].name} {move.kind}s {move.tensor}: 256 MiB"
        assert name in titles(view)
    drawn = [title for title in titles(view) if " reads " in title or " writes " in title]
    assert len(drawn) == len(view.plan.moves)


def test_viewer_changes_chain_and_gpu(view):
    view.controls["chain"].value = "matmul and its epilogue"
    assert [button.icon for button in view.pairs.children] == ["unlink", "unlink", "unlink", "lock"]
    assert view.pairs.children[3].disabled
    view.fuse_button.click()
    assert view.fused == (True, True, True, False)
    view.controls["gpu"].value = "t4"
    assert "on T4 (modelled)" in view.sentence()
    view.reset_button.click()
    assert (view.chain, view.gpu, view.fused) == ("sin² + cos²", "h200", (False,) * 4)
    assert len(view.pairs.children) == 4


def test_viewer_says_what_cannot_be(view):
    with pytest.raises(traitlets.TraitError, match="fused must hold 4 values"):
        view.fused = (True,)
    with pytest.raises(traitlets.TraitError, match="chain must be one of"):
        view.chain = "tea"
    for graph, options, message in (
        ([], {}, "graphs must hold at least one graph"),
        ([graphs.relu(8), graphs.relu(9)], {}, "graphs must have distinct names"),
        (graphs.relu(8), {"gpu": "abacus"}, "no GPU is called 'abacus'"),
        (graphs.epilogue(8, 8, 8, "bf16"), {"gpu": "t4"}, "dtype must be one of .* on T4, got 'bf16'"),
        (graphs.sin_cos(8), {"fused": (True,)}, "fused must hold 4 values"),
        (graphs._chain("c", 8, [("f", f"t{i}", f"t{i + 1}") for i in range(10)], "t10", "fp32"), {}, "may have 9 operations"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            fusion(graph, **options)


def test_live_picture_keeps_to_its_frame_and_the_colours_of_the_course(view):
    for chain in view.graphs:
        view.chain = chain
        root = svg(view)
        assert root.get("role") == "img" and root.get("aria-label") == view.sentence()
        _, _, width, height = map(float, root.get("viewBox").split())
        for rect in root.iter("rect"):
            x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
            assert -1 <= x and x + w <= width + 1 and -1 <= y and y + h <= height + 1 and w >= 0 and h >= 0
        used = {colour.upper() for colour in re.findall(r"#[0-9a-fA-F]{6}", view.picture_area.value)}
        assert used <= {colour.upper() for colour in (*style.COLOURS.values(), board.DARK, board.LIGHT, "#BDBDBD")}


def test_saved_form_is_constant_and_small(view):
    text, (data, metadata) = repr(view), view._repr_png_()
    assert text == "fusion viewer: sin² + cos², 5 operations in 5 kernels, 6 reads and 5 writes"
    assert data.startswith(b"\x89PNG") and len(data) <= style.MAX_PNG_BYTES and "modelled" in metadata["alt"]
    view.chain, view.gpu = "matmul and its epilogue", "t4"
    assert repr(view) == text and view._repr_png_()[0] == data


def test_a_redraw_is_quick():
    view = fusion(graphs.sigmoids(1 << 26, ""))
    assert calls(view.fuse_button.click) < REDRAW


# ---- the exercises ---------------------------------------------------------------------------------------------------


def solution() -> str:
    return (ROOT / "solutions" / "fusion.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("exercise", [e for e in EXERCISES if e is not ACCESSES], ids=lambda exercise: exercise.id)
def test_cases_hold_what_breaks_kernels(exercise):
    cases = exercise.cases(random.Random(1))
    tags = set().union(*(case.tags for case in cases))
    assert exercise is CUDA or {"float32", "float16", "bfloat16"} <= tags
    sizes = [case.args[0].numel() for case in cases]
    assert max(sizes) <= 1 << 16 and any(size & (size - 1) for size in sizes)
    if exercise is not EPILOGUE:
        assert 1 in sizes


def test_a_kernel_in_cuda_meets_every_kind_of_grid():
    grids = [(case.args[0].numel(), case.args[2] * case.args[3], case.args[3]) for case in CUDA.cases(random.Random(1))]
    assert {n % 4 for n, _, _ in grids} == {0, 1, 2, 3}
    assert any(threads < n % 4 for n, threads, _ in grids), "fewer threads than elements are left"
    assert any(threads > n for n, threads, _ in grids) and any(16 * threads < n for n, threads, _ in grids)
    assert any(per_block % 32 for _, _, per_block in grids), "a warp that is not full"


def test_detective_starts_from_working_code_that_moves_five_times_the_bytes():
    found = judge_source(DETECTIVE, clear(solution(), {e.function: e.id for e in EXERCISES}), seed=1)
    assert found.diagnosis == "traffic"
    assert "right values, but 5.0x the memory traffic" in str(found)
    assert "copies and fills by PyTorch around your kernel" in str(found)
    assert " are enough" in str(found) and "in which dtype the kernel loads and stores?" in " ".join(str(found).split())


def test_padding_is_followed_through_the_function():
    source = solution().replace('mask=mask_n, other=-float("inf")', "mask=mask_n, other=0.0")
    shown = " ".join(str(judge_source(GATE, source, seed=1)).split())
    assert re.search(r"The \d+ padding lanes add one half each to the sum", shown)


# ---- the notebook and its records ------------------------------------------------------------------------------------


def recorded(name: str) -> str:
    return (benchmark.RESULTS / "h200" / name).read_text()


@pytest.mark.parametrize("name", ("gelu", "sin_cos"))
def test_recorded_code_of_torch_compile_is_fused(name):
    text = recorded(f"fusion-{name}-compile.txt")
    assert text.count("@triton.jit") == text.count("tl.load(") == text.count("tl.store(") == 1
    assert text.startswith("# ") and "torch.compile" in text


def test_recorded_code_of_the_sigmoids_keeps_y_alone():
    text = recorded("fusion-sigmoids-compile.txt")
    graph = graphs.sigmoids(N, "y")
    assert text.count("tl.load(") + text.count("tl.store(") == graph.plan(graph.fusible).accesses
    assert text.count("@triton.jit") == 2


def test_recorded_times_bear_out_what_the_notebook_says():
    """Its prose has no figures; whoever records new ones learns here which sentence no longer holds."""
    rows = benchmark.rows("fusion")
    us = {(row.op, row.provider, row.dtype): row.median_ms * 1e3 for row in rows}
    gbps = next(row.gbps for row in rows if row.op == "copy")
    n = 16_384 * 4_096

    def model(graph, fused):
        return graph.plan(graph.fusible if fused else None).bytes / gbps / 1e3

    gelu, sigmoids = graphs.gelu(n), {keep: graphs.sigmoids(n, keep) for keep in ("s1 s2 y", "")}
    for way in ("compile", "triton", "library"):  # bytes predict the time
        assert us["gelu_tanh", way, "float32"] == pytest.approx(model(gelu, True), rel=0.1)
    assert us["gelu_tanh", "torch", "float32"] == pytest.approx(model(gelu, False), rel=0.1)
    assert us["three_sigmoids", "torch", "float32"] == pytest.approx(model(sigmoids["s1 s2 y"], False), rel=0.1)
    assert us["three_sigmoids", "triton", "float32"] == pytest.approx(model(sigmoids[""], True), rel=0.1)
    # Half the bytes hardly help: blocks to start, arithmetic, Python.
    start_us = n / 256 / machine()["empty programs"].value
    assert start_us < us["gelu_tanh", "cuda", "bfloat16"] < 1.5 * start_us
    for op, way in (
        ("gelu_tanh", "cuda"),
        ("sin_cos", "triton"),
        ("sin_cos", "compile"),
        ("three_sigmoids", "compile"),
    ):
        assert us[op, way, "bfloat16"] > 0.8 * us[op, way, "float32"]


def test_recorded_ptx_is_that_of_the_source():
    accesses = assembly.memory_accesses(assembly.ptx(recorded("fusion-gelu-cuda.ptx")))
    widths = {(a.kind, a.bits) for a in accesses}
    assert widths == {(kind, bits) for kind in ("load", "store") for bits in (16, 32, 128)}
    source = (ROOT / "gpukit" / "kernels" / "fusion.cu").read_text()
    for constant, bits in (("0.79788456f", "0f3F4C422A"), ("0.044715f", "0f3D372713")):
        assert constant in source and bits in recorded("fusion-gelu-cuda.ptx")


def test_records_name_no_machine():
    for path in (benchmark.RESULTS / "h200").glob("fusion*"):
        assert not re.search(r"/(tmp|root|home|work|usr)/", path.read_text()), path.name


@pytest.mark.parametrize(
    ("message", "asks"), [("Expected dtype ['fp32', 'fp64'] but got fp16", True), ("undefined is not defined", False)]
)
def test_an_exponential_of_16_bits_asks_where_to_convert(message, asks):
    said = " ".join(" ".join(Words(DETECTIVE, "fusion.py").does_not_compile("an A100", 1, message).lines).split())
    assert ("where can the kernel convert it?" in said) is asks


@pytest.mark.parametrize(
    ("message", "says"), [("'tensor' object has no attribute '__pow__'", True), ("undefined is not defined", False)]
)
def test_a_power_of_a_block_says_what_to_write(message, says):
    said = " ".join(" ".join(Words(DETECTIVE, "fusion.py").does_not_compile("an A100", 1, message).lines).split())
    assert ("multiply the value by itself" in said) is says
