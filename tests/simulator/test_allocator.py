"""PyTorch's caching allocator on paper: the rules one by one, what holds for any history, and on a GPU the real one."""

import itertools
import random

import pytest

from gpukit.simulator.allocator import MIB, Allocator, OutOfMemory

GIB = 1024 * MIB


def test_sizes_are_rounded_and_segments_have_three_kinds():
    a = Allocator(GIB)
    a.malloc("one byte", 1)
    assert a.map() == [[("one byte", 512), (None, 2 * MIB - 512)]]
    a.malloc("1 MiB", MIB)
    assert len(a.segments) == 1  # small ones share
    a.malloc("a little more", MIB + 1)
    assert a.map()[1] == [("a little more", MIB + 512), (None, 19 * MIB - 512)]
    a.malloc("9 MiB", 9 * MIB)
    assert len(a.segments) == 2  # shares the 20 MiB
    a.malloc("11 MiB", 11 * MIB)
    assert a.map()[2] == [("11 MiB", 12 * MIB)]  # its own, rounded up to 2 MiB; 1 MiB is not worth a split
    assert a.allocated_bytes == 512 + MIB + MIB + 512 + 9 * MIB + 12 * MIB
    assert a.reserved_bytes == (2 + 20 + 12) * MIB


def test_the_smallest_block_that_fits_is_taken_and_split():
    a = Allocator(GIB)
    for name, size in (("large", 100), ("small", 40), ("medium", 60)):
        a.malloc(name, size * MIB)
    for name in ("large", "small", "medium"):
        a.free(name)
    a.malloc("new", 50 * MIB)
    assert a.map() == [[(None, 100 * MIB)], [(None, 40 * MIB)], [("new", 50 * MIB), (None, 10 * MIB)]]


def test_free_neighbours_become_one_block_again():
    a = Allocator(GIB)
    a.malloc("whole", 96 * MIB)
    a.free("whole")
    for i in range(4):
        a.malloc(str(i), 24 * MIB)
    assert len(a.segments) == 1
    a.free("1")
    a.free("3")
    assert [size // MIB for _, size in a.map()[0]] == [24, 24, 24, 24]
    a.free("2")
    assert [(name, size // MIB) for name, size in a.map()[0]] == [("0", 24), (None, 72)]
    a.free("0")
    assert a.map() == [[(None, 96 * MIB)]]


def test_holes_are_no_room():
    a = Allocator(900 * MIB)
    a.malloc("warm-up", 768 * MIB)
    a.free("warm-up")
    for i in range(8):
        a.malloc(str(i), 96 * MIB)
    for i in range(0, 8, 2):
        a.free(str(i))
    assert (a.allocated_bytes, a.reserved_bytes, a.largest_free_bytes) == (384 * MIB, 768 * MIB, 96 * MIB)
    with pytest.raises(OutOfMemory, match="384 MiB are reserved and unallocated; the largest piece of that has 96 MiB"):
        a.malloc("192", 192 * MIB)
    a.free("1")
    a.malloc("192", 192 * MIB)  # three holes in a row are one now


def test_segments_that_nobody_uses_are_given_back_before_it_fails():
    a = Allocator(100 * MIB)
    a.malloc("a", 60 * MIB)
    a.free("a")
    a.malloc("b", 80 * MIB)
    assert a.map() == [[("b", 80 * MIB)]]
    assert a.peak_reserved_bytes == 80 * MIB


@pytest.mark.parametrize(
    ("call", "words"),
    (
        (lambda a: a.malloc("x", 0), "size must be positive, got 0"),
        (lambda a: a.malloc("there", 5), "a tensor called 'there' is there already"),
        (lambda a: a.free("gone"), "there is no tensor called 'gone'"),
        (lambda a: Allocator(0), "capacity_bytes must be positive, got 0"),
    ),
)
def test_what_is_refused(call, words):
    a = Allocator(GIB)
    a.malloc("there", 5)
    with pytest.raises(ValueError, match=words):
        call(a)


def history(seed: int, steps: int):
    """(name, size) to allocate or (name, None) to free, at random."""
    rng = random.Random(seed)
    held = []
    for i in range(steps):
        if held and rng.random() < 0.48:
            yield held.pop(rng.randrange(len(held))), None
        else:
            tops = (4096, 2 * MIB, 40 * MIB, 300 * MIB)
            held.append(f"t{i}")
            yield f"t{i}", rng.randrange(1, rng.choice(tops))


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_shared(seed):
    a = Allocator(10**12)
    sizes = {}
    for name, size in history(seed, 300):
        if size is None:
            a.free(name)
            del sizes[name]
        else:
            a.malloc(name, size)
            sizes[name] = size
        placed = [(n, b) for segment in a.map() for n, b in segment if n is not None]
        assert sorted(n for n, _ in placed) == sorted(sizes)
        assert all(sizes[n] <= b <= sizes[n] + MIB + 512 for n, b in placed)
        for segment in a.map():
            names = [n for n, _ in segment]
            assert not any(x is None and y is None for x, y in itertools.pairwise(names))
    for name in sizes:
        a.free(name)
    a.empty_cache()
    assert a.reserved_bytes == 0


@pytest.mark.gpu
def test_the_real_allocator_does_the_same():
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    if torch.cuda.memory_reserved():
        pytest.skip("another test still holds GPU memory, so the map would not begin empty")
    a, held = Allocator(10**12), {}
    for name, size in history(0, 400):
        if size is None:
            a.free(name)
            del held[name]
        else:
            a.malloc(name, size)
            held[name] = torch.empty(size, dtype=torch.uint8, device="cuda")
        real = sorted(
            [(block["state"] == "active_allocated", block["size"]) for block in segment["blocks"]]
            for segment in torch.cuda.memory_snapshot()
        )
        assert real == sorted([(n is not None, b) for n, b in segment] for segment in a.map())
