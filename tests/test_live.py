"""gpukit.live: bytes of tensors that are alive, and what autograd keeps."""

import pytest
import torch

from gpukit import live

KIB = 1024


def floats(kib: int, **options) -> torch.Tensor:
    return torch.zeros(kib * KIB // 4, **options)


def test_tensors_are_counted_from_their_birth_to_their_death():
    with live.watch() as memory:
        a = floats(4)
        b = a + 1
        assert memory.bytes == 8 * KIB
        del a
        assert memory.bytes == 4 * KIB
        c = b * 2
        assert memory.bytes == memory.peak_bytes == 8 * KIB
        del b
    assert memory.bytes == 4 * KIB
    del c
    assert memory.bytes == 0
    assert memory.peak_bytes == 8 * KIB


def test_views_and_what_was_there_before_count_nothing():
    before = floats(16)
    with live.watch() as memory:
        view = before.view(-1, 4)[1:].t()
        before.add_(1)
        assert memory.bytes == 0
        new = floats(4)
        parts = [new.view(2, -1), new[:7], new.detach()]
        assert memory.bytes == 4 * KIB
        del new
        assert memory.bytes == 4 * KIB  # its views hold it
        del parts
        assert memory.bytes == 0
    assert view.shape[0] == 4


def test_with_arguments_memory_from_before_counts_once_it_is_written():
    x, table, scratch = floats(4), floats(8), floats(16)
    with live.watch(arguments=([x],)) as memory:
        x.add_(1)  # the caller's
        y = x + table[: x.numel()]  # only read
        assert memory.bytes == 4 * KIB
        torch.add(x, y, out=scratch[KIB : 2 * KIB])
        assert memory.bytes == memory.peak_bytes == 20 * KIB and memory.largest_bytes == 16 * KIB
        scratch.zero_()  # is counted once
        assert memory.bytes == 20 * KIB
        del scratch
        assert memory.bytes == 4 * KIB
    del y
    assert memory.bytes == 0


def test_a_tensor_made_of_a_list_is_new():
    numbers = [0.0] * (KIB // 4)
    with live.watch() as memory:
        new = [torch.tensor(numbers), torch.as_tensor(numbers), torch.zeros(1).new_tensor(numbers)]
        assert memory.bytes == 3 * KIB
        del new
    assert memory.bytes == 0


def test_a_graph_holds_what_it_saved_until_its_backward_pass():
    x, w = floats(8).requires_grad_(), floats(8)
    with live.watch() as memory:
        y = (x * w).exp()
        loss = y.sum()
        del y
        assert memory.bytes == 8 * KIB + 4  # exp keeps its output, though no name does
        memory.phase("backward")
        loss.backward()
        assert memory.bytes == 8 * KIB + 4  # the gradient of x in its place
        x.grad = None
        assert memory.bytes == 4
        del loss
    assert memory.bytes == 0
    assert [m.op for m in memory.timeline][:2] == ["mul", "exp"]
    assert {m.phase for m in memory.timeline} == {"forward", "backward"}
    assert max(m.bytes for m in memory.timeline) <= memory.peak_bytes


def test_the_peak_sees_the_backward_pass():
    w = torch.zeros(16, 16, requires_grad=True)
    with live.watch() as forward:
        h = torch.nn.functional.gelu(torch.ones(1000, 16) @ w)
    with live.watch() as both:
        loss = torch.nn.functional.gelu(torch.ones(1000, 16) @ w).sum()
        loss.backward()
    assert both.peak_bytes > forward.peak_bytes
    assert h.shape == (1000, 16)


def test_saved_lists_each_memory_once_and_not_what_is_known():
    w = torch.zeros(8, 8, requires_grad=True)
    x = torch.zeros(4, 8, requires_grad=True)
    with live.saved([w]) as kept:
        h = x @ w  # x
        a = torch.relu(h)  # its output
        b = a @ w.t()  # a again, w under another shape
        torch.softmax(b, -1)
    assert [(s.op, s.shape) for s in kept] == [("matmul", (4, 8)), ("relu", (4, 8)), ("softmax", (4, 8))]
    assert all(s.bytes == 4 * 8 * 4 and s.dtype == torch.float32 for s in kept)
    with live.saved() as kept:
        x @ w
    assert sorted(s.shape for s in kept) == [(4, 8), (8, 8)]


def test_saved_lets_the_backward_pass_through():
    x = torch.full((3,), 2.0, requires_grad=True)
    with live.saved() as kept:
        y = (x * x).sum()
    y.backward()
    assert torch.equal(x.grad, torch.full((3,), 4.0))
    assert len(kept) == 1


@pytest.mark.gpu
def test_on_a_gpu_it_counts_what_the_allocator_hands_out():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with live.watch() as memory:
        a = torch.zeros(1 << 20, device="cuda")
        b = torch.zeros(3 << 20, device="cuda", dtype=torch.bfloat16)
    assert memory.bytes == torch.cuda.memory_allocated() - before
    assert a.device == b.device
