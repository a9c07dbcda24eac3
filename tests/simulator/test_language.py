"""The language of the pinned Triton in the interpreter: one small kernel for each feature, its result against PyTorch's.

`@feature(inputs, want)` registers a kernel: it is launched on `inputs()` and on empty tensors like those of `want(*inputs)`,
traced as a check traces it, and must fill them with these values.
"""

import math
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
BLOCK_POINTERS = pytest.mark.skipif(VERSION >= (3, 9), reason="Triton 3.9 has no block pointers")
pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning"),
]


@dataclass
class Feature:
    kernel: object
    inputs: object
    want: object
    grid: tuple
    options: dict
    exact: bool
    also_changed: tuple


FEATURES: dict[str, Feature] = {}


def feature(inputs, want, grid=(1,), exact=True, changed=(), **options):
    """`changed` are positions of inputs that the kernel changes; `want` gives their values behind the others."""

    def register(kernel):
        function = kernel
        while hasattr(function, "fn"):  # of the decorators, down to the plain function
            function = function.fn
        name = function.__name__
        assert name not in FEATURES, name
        FEATURES[name] = Feature(kernel, inputs, want, grid, options, exact, changed)
        return kernel

    return register


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def randint(low, high, *shape, dtype=torch.int32, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one(*shape, dtype=torch.float32):
    return lambda: (randn(*shape, dtype=dtype),)


def two(*shape, dtype=torch.float32):
    return lambda: (randn(*shape, dtype=dtype), randn(*shape, dtype=dtype, seed=1))


def ints(low=-50, high=50, dtype=torch.int32, n=16):
    return lambda: (randint(low, high, n, dtype=dtype), randint(low, high, n, dtype=dtype, seed=1))


# ---- block pointers -----------------------------------------------------------------------------------------------


@feature(one(16, 32), lambda x: x + 1)
@triton.jit
def block_pointer(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (16, 32), (32, 1), (0, 0), (16, 32), (1, 0))
    y = tl.make_block_ptr(y_ptr, shape=(16, 32), strides=(32, 1), offsets=(0, 0), block_shape=(16, 32), order=(1, 0))
    tl.store(y, tl.load(x) + 1)


def padded(x, value, rows=16, columns=32):
    y = torch.full((rows, columns), value, dtype=x.dtype)
    y[: x.shape[0], : x.shape[1]] = x
    return y


@feature(one(13, 29), lambda x: padded(x, 0))
@triton.jit
def block_pointer_pads_with_zero(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (13, 29), (29, 1), (0, 0), (16, 32), (1, 0))
    block = tl.load(x, boundary_check=(0, 1), padding_option="zero")
    tl.store(y_ptr + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :], block)


@feature(one(13, 29), lambda x: padded(x, math.nan))
@triton.jit
def block_pointer_pads_with_nan(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (13, 29), (29, 1), (0, 0), (16, 32), (1, 0))
    block = tl.load(x, boundary_check=(0, 1), padding_option="nan")
    tl.store(y_ptr + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :], block)


@feature(one(13, 29, dtype=torch.bfloat16), lambda x: padded(x, math.nan))
@triton.jit
def block_pointer_pads_bf16_with_nan(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (13, 29), (29, 1), (0, 0), (16, 32), (1, 0))
    block = tl.load(x, boundary_check=(0, 1), padding_option="nan")
    tl.store(y_ptr + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :], block)


@feature(lambda: (randint(0, 9, 13, 29),), lambda x: padded(x, 0))
@triton.jit
def block_pointer_of_integers(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (13, 29), (29, 1), (0, 0), (16, 32), (1, 0))
    block = tl.load(x, boundary_check=(0, 1), padding_option="zero")
    tl.store(y_ptr + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :], block)


@feature(one(13, 32), lambda x: padded(x, 0))
@triton.jit
def block_pointer_checks_one_axis(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (13, 32), (32, 1), (0, 0), (16, 32), (1, 0))
    block = tl.load(x, boundary_check=(0,), padding_option="zero")
    tl.store(y_ptr + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :], block)


@feature(one(13, 29), lambda x: 2 * x)
@triton.jit
def block_pointer_store_at_the_edge(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (13, 29), (29, 1), (0, 0), (16, 32), (1, 0))
    y = tl.make_block_ptr(y_ptr, (13, 29), (29, 1), (0, 0), (16, 32), (1, 0))
    tl.store(y, 2 * tl.load(x, boundary_check=(0, 1)), boundary_check=(0, 1))


@feature(one(13, 70), lambda x: x.sum(1), exact=False)
@triton.jit
def block_pointer_advances(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (13, 70), (70, 1), (0, 0), (16, 32), (1, 0))
    total = tl.zeros((16,), tl.float32)
    for _ in range(0, 70, 32):
        total += tl.sum(tl.load(x, boundary_check=(0, 1), padding_option="zero"), axis=1)
        x = tl.advance(x, (0, 32))
    y = tl.make_block_ptr(y_ptr, (13,), (1,), (0,), (16,), (0,))
    tl.store(y, total, boundary_check=(0,))


@feature(lambda: (randn(24, 16).to(torch.float16),), lambda x: x.T.contiguous(), grid=(3,))
@triton.jit
def block_pointer_of_a_transposed_tensor(x_ptr, y_ptr):
    i = tl.program_id(0)
    x = tl.make_block_ptr(x_ptr, (16, 24), (1, 16), (0, i * 8), (16, 8), (0, 1))
    y = tl.make_block_ptr(y_ptr, (16, 24), (24, 1), (0, i * 8), (16, 8), (1, 0))
    tl.store(y, tl.load(x))


@feature(one(4, 6, 8), lambda x: torch.relu(x))
@triton.jit
def block_pointer_of_three_axes(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (4, 6, 8), (48, 8, 1), (0, 0, 0), (4, 8, 8), (2, 1, 0))
    y = tl.make_block_ptr(y_ptr, (4, 6, 8), (48, 8, 1), (0, 0, 0), (4, 8, 8), (2, 1, 0))
    block = tl.load(x, boundary_check=(1,), eviction_policy="evict_first")
    tl.store(y, tl.maximum(block, 0.0), boundary_check=(1,), eviction_policy="evict_last")


@feature(one(13, 29), lambda x: x.clone(), grid=(2, 2), M=13, N=29)
@triton.jit
def block_pointer_with_sizes_known_at_run_time(x_ptr, y_ptr, M, N):
    offsets = (tl.program_id(0) * 8, tl.program_id(1) * 16)
    x = tl.make_block_ptr(x_ptr, (M, N), (N, 1), offsets, (8, 16), (1, 0))
    y = tl.make_block_ptr(y_ptr, (M, N), (N, 1), offsets, (8, 16), (1, 0))
    y.store(tl.load(x, boundary_check=(0, 1)), boundary_check=(0, 1))


@feature(one(16, 32), lambda x: x[8:, 16:].contiguous())
@triton.jit
def block_pointer_method_advance(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (16, 32), (32, 1), (0, 0), (8, 16), (1, 0))
    x = x.advance((8, 0)).advance([0, 16])
    tl.store(tl.make_block_ptr(y_ptr, (8, 16), (16, 1), (0, 0), (8, 16), (1, 0)), tl.load(x))


@feature(one(16, 32), lambda x: torch.cat([torch.zeros(16, 4), x[:, :28]], 1))
@triton.jit
def block_pointer_before_the_start(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (16, 32), (32, 1), (0, -4), (16, 32), (1, 0))
    block = tl.load(x, boundary_check=(1,), padding_option="zero")
    tl.store(tl.make_block_ptr(y_ptr, (16, 32), (32, 1), (0, 0), (16, 32), (1, 0)), block)


@triton.jit
def add_one_at(pointer):
    tl.store(pointer, tl.load(pointer) + 1)


@feature(one(16, 32), lambda x: (x.clone(), x + 1), changed=(0,))
@triton.jit
def block_pointer_as_an_argument(x_ptr, y_ptr):
    x = tl.make_block_ptr(x_ptr, (16, 32), (32, 1), (0, 0), (16, 32), (1, 0))
    tl.store(tl.make_block_ptr(y_ptr, (16, 32), (32, 1), (0, 0), (16, 32), (1, 0)), tl.load(x))
    add_one_at(x)


# ---- tensor descriptors -------------------------------------------------------------------------------------------


@feature(one(16, 32), lambda x: torch.exp(x), exact=False)
@triton.jit
def descriptor(x_ptr, y_ptr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[16, 32], strides=[32, 1], block_shape=[8, 16])
    y = tl.make_tensor_descriptor(y_ptr, [16, 32], [32, 1], [8, 16])
    for i in range(0, 16, 8):
        for j in tl.static_range(0, 32, 16):
            y.store([i, j], tl.exp(x.load([i, j])))


@feature(one(13, 32), lambda x: padded(x, 0))
@triton.jit
def descriptor_pads_with_zero(x_ptr, y_ptr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[13, 32], strides=[32, 1], block_shape=[16, 32])
    y = tl.make_tensor_descriptor(y_ptr, [16, 32], [32, 1], [16, 32])
    tl.store_tensor_descriptor(y, [0, 0], tl.load_tensor_descriptor(x, [0, 0]))


@feature(one(13, 32), lambda x: padded(x, math.nan))
@triton.jit
def descriptor_pads_with_nan(x_ptr, y_ptr):
    x = tl.make_tensor_descriptor(x_ptr, [13, 32], [32, 1], [16, 32], padding_option="nan")
    y = tl.make_tensor_descriptor(y_ptr, [16, 32], [32, 1], [16, 32])
    y.store([0, 0], x.load([0, 0]))


@feature(one(13, 32, dtype=torch.bfloat16), lambda x: padded(x, math.nan))
@triton.jit
def descriptor_pads_bf16_with_nan(x_ptr, y_ptr):
    x = tl.make_tensor_descriptor(x_ptr, [13, 32], [32, 1], [16, 32], padding_option="nan")
    y = tl.make_tensor_descriptor(y_ptr, [16, 32], [32, 1], [16, 32])
    y.store([0, 0], x.load([0, 0]))


@feature(one(4, 8, 16), lambda x: x.flip(0))
@triton.jit
def descriptor_of_three_axes(x_ptr, y_ptr):
    x = tl.make_tensor_descriptor(x_ptr, [4, 8, 16], [128, 16, 1], [1, 8, 16])
    y = tl.make_tensor_descriptor(y_ptr, [4, 8, 16], [128, 16, 1], [1, 8, 16])
    for i in range(4):
        y.store([3 - i, 0, 0], x.load([i, 0, 0]).reshape(1, 8, 16))


@feature(lambda: (TensorDescriptor.from_tensor(randn(16, 32), [8, 32]),), lambda x: 2 * x.base, grid=(2,))
@triton.jit
def host_descriptor(x, y_ptr):
    i = tl.program_id(0) * 8
    y = y_ptr + (i + tl.arange(0, 8))[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(y, 2 * x.load([i, 0]))


def padded_descriptor():
    return (TensorDescriptor(randn(13, 32), shape=[13, 32], strides=[32, 1], block_shape=[16, 32], padding="nan"),)


@feature(padded_descriptor, lambda x: padded(x.base, math.nan))
@triton.jit
def host_descriptor_pads_with_nan(x, y_ptr):
    tl.store(y_ptr + tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :], x.load([0, 0]))


@feature(
    lambda: (TensorDescriptor.from_tensor(torch.ones(16, 32), [16, 32]), randn(16, 32)),
    lambda x, y: (y + 1, y + 1),
    changed=(0,),
)
@triton.jit
def descriptor_atomics(x, y_ptr, z_ptr):
    at = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    y = tl.load(y_ptr + at)
    x.atomic_add([0, 0], y)
    tl.store(z_ptr + at, y + 1)


@feature(
    lambda: (TensorDescriptor.from_tensor(torch.zeros(16, 32, dtype=torch.int32), [16, 32]), randint(0, 99, 16, 32)),
    lambda x, y: (torch.tensor([16]), y),
    changed=(0,),
)
@triton.jit
def descriptor_integer_atomics(x, y_ptr, z_ptr):
    at = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 32)[None, :]
    y = tl.load(y_ptr + at)
    x.atomic_max([0, 0], y)
    x.atomic_min([0, 0], y + 1)
    x.atomic_and([0, 0], y | 1)
    x.atomic_or([0, 0], y)
    tl.static_assert(x.block_shape[0] == 16)
    tl.static_assert(x.dtype == tl.int32)
    tl.store(z_ptr, x.shape[0].to(tl.int64))


# ---- shapes -------------------------------------------------------------------------------------------------------


@feature(two(16), lambda x, y: (torch.stack([x, y], -1), x, y))
@triton.jit
def join_and_split(x_ptr, y_ptr, z_ptr, a_ptr, b_ptr):
    i = tl.arange(0, 16)
    z = tl.join(tl.load(x_ptr + i), tl.load(y_ptr + i))
    tl.store(z_ptr + i[:, None] * 2 + tl.arange(0, 2)[None, :], z)
    a, b = tl.split(z)
    tl.store(a_ptr + i, a)
    tl.store(b_ptr + i, b)


@feature(two(16), lambda x, y: torch.stack([x, y], -1).reshape(-1))
@triton.jit
def interleave(x_ptr, y_ptr, z_ptr):
    i = tl.arange(0, 16)
    tl.store(z_ptr + tl.arange(0, 32), tl.interleave(tl.load(x_ptr + i), tl.load(y_ptr + i)))


@feature(one(8, 16), lambda x: (x.T.contiguous(), x.T.contiguous(), x.T.contiguous()))
@triton.jit
def transpose(x_ptr, a_ptr, b_ptr, c_ptr):
    i, j = tl.arange(0, 8), tl.arange(0, 16)
    x = tl.load(x_ptr + i[:, None] * 16 + j[None, :])
    at = j[:, None] * 8 + i[None, :]
    tl.store(a_ptr + at, tl.trans(x))
    tl.store(b_ptr + at, x.T)
    tl.store(c_ptr + at, tl.trans(x, 1, 0))


@feature(one(2, 4, 8), lambda x: (x.permute(2, 0, 1).contiguous(), x.permute(1, 2, 0).contiguous(), x.mT.contiguous()))
@triton.jit
def permute(x_ptr, a_ptr, b_ptr, c_ptr):
    n = tl.arange(0, 64)
    x = tl.load(x_ptr + n).reshape(2, 4, 8)
    tl.store(a_ptr + n, tl.ravel(tl.permute(x, (2, 0, 1))))
    tl.store(b_ptr + n, x.permute(1, 2, 0).ravel())
    tl.store(c_ptr + n, tl.reshape(tl.trans(x, (0, 2, 1)), (64,)))


@feature(one(64), lambda x: (x.flip(0), x.reshape(8, 8).flip(0), x.reshape(8, 8).flip(1)))
@triton.jit
def flip(x_ptr, a_ptr, b_ptr, c_ptr):
    n = tl.arange(0, 64)
    at = tl.arange(0, 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    x = tl.load(x_ptr + n)
    tl.store(a_ptr + n, tl.flip(x, 0))
    tl.store(b_ptr + at, tl.flip(tl.reshape(x, (8, 8)), 0))
    tl.store(c_ptr + at, x.reshape([8, 8]).flip(1))


@feature(two(16), lambda x, y: (torch.cat([x, y]).sort().values,))
@triton.jit
def cat(x_ptr, y_ptr, z_ptr):
    i = tl.arange(0, 16)
    z = tl.cat(tl.load(x_ptr + i), tl.load(y_ptr + i), can_reorder=True)
    tl.store(z_ptr + tl.arange(0, 32), tl.sort(z))


@feature(one(16), lambda x: (x[:, None].expand(16, 4) + torch.arange(4), x[None, :].expand(2, 16)))
@triton.jit
def expand_and_broadcast(x_ptr, a_ptr, b_ptr):
    i, j = tl.arange(0, 16), tl.arange(0, 4)
    x = tl.load(x_ptr + i)
    a, b = tl.broadcast(tl.expand_dims(x, 1), j[None, :].to(tl.float32))
    tl.store(a_ptr + i[:, None] * 4 + j[None, :], a + b)
    tl.store(b_ptr + tl.arange(0, 2)[:, None] * 16 + i[None, :], tl.broadcast_to(x.expand_dims(0), (2, 16)))


@feature(one(16), lambda x: x * 3)
@triton.jit
def expand_several_axes(x_ptr, y_ptr):
    i = tl.arange(0, 16)
    x = tl.expand_dims(tl.load(x_ptr + i), (0, -1))
    tl.static_assert(x.shape[0] == 1 and x.shape[2] == 1)
    tl.store(y_ptr + i[None, :, None], x[:, :, :] * 3)


@feature(one(4, 4), lambda x: (x.reshape(16).clone(), x + 0, x.sum().reshape(1)), exact=False)
@triton.jit
def views(x_ptr, a_ptr, b_ptr, c_ptr):
    n = tl.arange(0, 16)
    x = tl.load(x_ptr + n)
    y = tl.view(x, (4, 4))
    tl.store(a_ptr + n, y.view(16))
    tl.store(b_ptr + n, tl.reshape(y, (16,), can_reorder=True))
    tl.store(c_ptr + tl.arange(0, 1), tl.full((1,), tl.sum(y), tl.float32))


@feature(one(8, 16), lambda x: x.gather(1, torch.arange(16).flip(0).expand(8, 16)))
@triton.jit
def gather(x_ptr, y_ptr):
    i, j = tl.arange(0, 8), tl.arange(0, 16)
    at = i[:, None] * 16 + j[None, :]
    index = tl.broadcast_to(15 - j[None, :], (8, 16))
    tl.store(y_ptr + at, tl.gather(tl.load(x_ptr + at), index, axis=1))


@feature(one(8, 16), lambda x: x.flip(0))
@triton.jit
def gather_rows(x_ptr, y_ptr):
    i, j = tl.arange(0, 8), tl.arange(0, 16)
    at = i[:, None] * 16 + j[None, :]
    tl.store(y_ptr + at, tl.load(x_ptr + at).gather(tl.broadcast_to(7 - i[:, None], (8, 16)), 0))


# ---- reductions and scans -----------------------------------------------------------------------------------------


@feature(
    one(8, 16),
    lambda x: (x.sum(1), x.max(0).values, x.min(1).values, x.argmax(1).int(), x.argmin(0).int(), x.sum().reshape(1)),
    exact=False,
)
@triton.jit
def reductions(x_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr):
    i, j = tl.arange(0, 8), tl.arange(0, 16)
    x = tl.load(x_ptr + i[:, None] * 16 + j[None, :])
    tl.store(a_ptr + i, x.sum(axis=1))
    tl.store(b_ptr + j, tl.max(x, 0))
    tl.store(c_ptr + i, tl.min(x, axis=-1))
    tl.store(d_ptr + i, tl.argmax(x, axis=1))
    tl.store(e_ptr + j, x.argmin(0))
    tl.store(f_ptr, tl.sum(x))


@feature(one(8, 16), lambda x: (x - x.max(1, keepdim=True).values, x.argmax(1).int(), x.max(1).values))
@triton.jit
def reductions_with_indices(x_ptr, a_ptr, b_ptr, c_ptr):
    i, j = tl.arange(0, 8), tl.arange(0, 16)
    at = i[:, None] * 16 + j[None, :]
    x = tl.load(x_ptr + at)
    tl.store(a_ptr + at, x - tl.max(x, axis=1, keep_dims=True))
    value, index = tl.max(x, axis=1, return_indices=True)
    tl.store(b_ptr + i, index)
    tl.store(c_ptr + i, value)


@feature(
    lambda: (torch.tensor([1.0, 5, 5, 2, 5, 1, 1, 0]), randint(-9, 9, 8)),
    lambda x, k: (torch.tensor([1]).int(), torch.tensor([7]).int(), k.max().reshape(1), k.min().reshape(1)),
)
@triton.jit
def ties_and_integers(x_ptr, k_ptr, a_ptr, b_ptr, c_ptr, d_ptr):
    i = tl.arange(0, 8)
    x, k = tl.load(x_ptr + i), tl.load(k_ptr + i)
    tl.store(a_ptr, tl.argmax(x, 0, tie_break_left=True))
    _value, index = tl.min(x, 0, return_indices=True, return_indices_tie_break_left=False)
    tl.store(b_ptr, index)
    tl.store(c_ptr, tl.max(k))
    tl.store(d_ptr, tl.min(k, axis=0))


@feature(
    lambda: (randint(0, 99, 16), randint(0, 2, 16)),
    lambda k, b: (torch.tensor([np.bitwise_xor.reduce(k.numpy())]).int(), b.max().reshape(1), k.sum().reshape(1)),
)
@triton.jit
def bitwise_reductions(k_ptr, b_ptr, a_ptr, any_ptr, sum_ptr):
    i = tl.arange(0, 16)
    tl.store(a_ptr, tl.xor_sum(tl.load(k_ptr + i), 0))
    tl.store(any_ptr, tl.reduce_or(tl.load(b_ptr + i), 0))
    tl.store(sum_ptr, tl.sum(tl.load(k_ptr + i), 0, dtype=tl.int64))


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def welford(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    n = n_a + n_b
    delta = mean_b - mean_a
    return mean_a + delta * n_b / n, m2_a + m2_b + delta * delta * n_a * n_b / n, n


@feature(one(4, 16), lambda x: (x.prod(1), x.mean(1), x.var(1, correction=0)), exact=False)
@triton.jit
def custom_reductions(x_ptr, a_ptr, b_ptr, c_ptr):
    i, j = tl.arange(0, 4), tl.arange(0, 16)
    x = tl.load(x_ptr + i[:, None] * 16 + j[None, :])
    tl.store(a_ptr + i, tl.reduce(x, 1, multiply))
    mean, m2, n = tl.reduce((x, tl.zeros_like(x), tl.full((4, 16), 1.0, tl.float32)), 1, welford)
    tl.store(b_ptr + i, mean)
    tl.store(c_ptr + i, m2 / n)


@triton.jit
def plus_once(a, b):
    return a + b


@feature(lambda: (torch.tensor([2.0**24] + [1.0] * 15),), lambda x: torch.tensor([2.0**24 + 14]))
@triton.jit
def custom_reductions_round_as_a_tree(x_ptr, y_ptr):
    tl.store(y_ptr, tl.reduce(tl.load(x_ptr + tl.arange(0, 16)), 0, plus_once))


TWO = tl.constexpr(2)


@triton.jit
def doubled(x: torch.Tensor) -> torch.Tensor:
    return TWO * x


@feature(one(16), lambda x: (2 * x - 2 / (2 + x * x), (2 > x).int()))
@triton.jit
def constants_left_of_a_block(x_ptr, y_ptr, z_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, (doubled(x) - TWO / (TWO + x * x)).to(tl.float32))
    tl.store(z_ptr + i, (TWO > x).to(tl.int32))


@triton.jit
def keep_larger(value_a, index_a, value_b, index_b):
    larger = value_a > value_b
    return tl.where(larger, value_a, value_b), tl.where(larger, index_a, index_b)


@feature(one(16, dtype=torch.bfloat16), lambda x: (x.max().reshape(1), x.argmax().int().reshape(1)))
@triton.jit
def custom_reduction_of_bf16(x_ptr, a_ptr, b_ptr):
    i = tl.arange(0, 16)
    value, index = tl.reduce((tl.load(x_ptr + i), i), axis=0, combine_fn=keep_larger, keep_dims=False)
    tl.store(a_ptr, value)
    tl.store(b_ptr, index)


@feature(
    one(4, 16),
    lambda x: (x.cumsum(1), x.cumprod(0), x.flip(1).cumsum(1).flip(1), x.cummax(1).values),
    exact=False,
)
@triton.jit
def scans(x_ptr, a_ptr, b_ptr, c_ptr, d_ptr):
    at = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(a_ptr + at, tl.cumsum(x, axis=1))
    tl.store(b_ptr + at, x.cumprod(0))
    tl.store(c_ptr + at, tl.cumsum(x, 1, reverse=True))
    tl.store(d_ptr + at, tl.associative_scan(x, 1, larger))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@feature(
    lambda: (randint(-5, 5, 4, 16),),
    lambda k: (k.cumsum(0).int(), k.flip(1).cumsum(1).flip(1).int(), k.cumsum(1).int(), k.sum(1).int()),
)
@triton.jit
def scans_along_any_axis(k_ptr, a_ptr, b_ptr, c_ptr, d_ptr):
    i = tl.arange(0, 4)
    at = i[:, None] * 16 + tl.arange(0, 16)[None, :]
    k = tl.load(k_ptr + at)
    tl.store(a_ptr + at, tl.cumsum(k, 0))
    tl.store(b_ptr + at, tl.cumsum(k, -1, reverse=True))
    tl.store(c_ptr + at, tl.associative_scan(k, -1, plus))
    tl.store(d_ptr + i, tl.reduce(k, -1, plus))


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def linear(a, b, c, d):
    return a * c, b * c + d


def recurrence(a, b):
    h, out = torch.zeros(()), []
    for x, y in zip(a, b, strict=True):
        h = x * h + y
        out.append(h)
    return torch.stack(out)


@feature(two(16), recurrence, exact=False)
@triton.jit
def scan_of_a_recurrence(a_ptr, b_ptr, y_ptr):
    i = tl.arange(0, 16)
    _, y = tl.associative_scan((tl.load(a_ptr + i), tl.load(b_ptr + i)), 0, linear)
    tl.store(y_ptr + i, y)


@feature(one(16), lambda x: x.flip(0).cummax(0).values.flip(0))
@triton.jit
def scan_backwards(x_ptr, y_ptr):
    i = tl.arange(0, 16)
    tl.store(y_ptr + i, tl.associative_scan(tl.load(x_ptr + i), axis=0, combine_fn=larger, reverse=True))


@feature(
    lambda: (randint(0, 100, 16, dtype=torch.int8), randint(0, 2, 16).bool()),
    lambda k, b: (k.cumsum(0), b.int().cumsum(0).int(), k.long().sum().reshape(1)),
)
@triton.jit
def scans_of_small_integers(k_ptr, b_ptr, a_ptr, c_ptr, d_ptr):
    i = tl.arange(0, 16)
    k = tl.load(k_ptr + i)
    tl.store(a_ptr + i, tl.cumsum(k, 0, dtype=tl.int64))
    tl.store(c_ptr + i, tl.cumsum(tl.load(b_ptr + i).to(tl.int32), 0))
    tl.store(d_ptr, tl.sum(k))


@feature(one(4, 16), lambda x: (x.sort(1).values, x.sort(1, descending=True).values, x.topk(4, 1).values))
@triton.jit
def sorting(x_ptr, a_ptr, b_ptr, c_ptr):
    i = tl.arange(0, 4)[:, None]
    at = i * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(a_ptr + at, tl.sort(x))
    tl.store(b_ptr + at, tl.sort(x, dim=1, descending=True))
    tl.store(c_ptr + i * 4 + tl.arange(0, 4)[None, :], tl.topk(x, 4))


@feature(lambda: (randint(-99, 99, 32),), lambda k: k.sort().values)
@triton.jit
def sorting_integers(k_ptr, y_ptr):
    i = tl.arange(0, 32)
    tl.store(y_ptr + i, tl.sort(tl.load(k_ptr + i), 0, False))


@feature(one(16, dtype=torch.bfloat16), lambda x: (x.sort().values, x.sort(descending=True).values))
@triton.jit
def sorting_bf16(x_ptr, a_ptr, b_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(a_ptr + i, tl.sort(x))
    tl.store(b_ptr + i, tl.sort(x, descending=1))


@feature(lambda: (randn(16).sort().values, randn(16, seed=1)), lambda x, y: (x.flip(0), x.sort().values))
@triton.jit
def merging(x_ptr, y_ptr, a_ptr, b_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(a_ptr + i, tl.bitonic_merge(x, descending=True))
    tl.store(b_ptr + i, tl.bitonic_merge(x))


@feature(
    lambda: (randint(0, 8, 32),),
    lambda k: (k.bincount(minlength=8).int(), k[:20].bincount(minlength=8).int()),
)
@triton.jit
def histogram(k_ptr, a_ptr, b_ptr):
    i, bins = tl.arange(0, 32), tl.arange(0, 8)
    k = tl.load(k_ptr + i)
    tl.store(a_ptr + bins, k.histogram(8))
    tl.store(b_ptr + bins, tl.histogram(k, 8, mask=i < 20))


@feature(one(4, 16), lambda x: (x.softmax(0), x.softmax(1)), exact=False)
@triton.jit
def softmax(x_ptr, a_ptr, b_ptr):
    at = tl.arange(0, 4)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(a_ptr + at, tl.softmax(x))
    tl.store(b_ptr + at, tl.softmax(x, dim=1, keep_dims=True, ieee_rounding=True))


# ---- products -----------------------------------------------------------------------------------------------------


def pair(m=16, k=16, n=16, dtype=torch.float16):
    return lambda: (randn(m, k, dtype=dtype), randn(k, n, dtype=dtype, seed=7))


@triton.jit
def tile(pointer, M: tl.constexpr, N: tl.constexpr):
    return pointer + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]


@feature(
    pair(),
    lambda a, b: ((a.float() @ b.float()), (a.float() @ b.float()) + 1, (a.float() @ b.float()).half()),
    exact=False,
)
@triton.jit
def dots(a_ptr, b_ptr, x_ptr, y_ptr, z_ptr):
    a, b = tl.load(tile(a_ptr, 16, 16)), tl.load(tile(b_ptr, 16, 16))
    tl.store(tile(x_ptr, 16, 16), tl.dot(a, b))
    tl.store(tile(y_ptr, 16, 16), tl.dot(a, b, acc=tl.full((16, 16), 1.0, tl.float32)))
    tl.store(tile(z_ptr, 16, 16), tl.dot(a, b, out_dtype=tl.float16))


@feature(pair(dtype=torch.float32), lambda a, b: (a @ b, a @ b, a @ b), exact=False)
@triton.jit
def dots_of_fp32(a_ptr, b_ptr, x_ptr, y_ptr, z_ptr):
    a, b = tl.load(tile(a_ptr, 16, 16)), tl.load(tile(b_ptr, 16, 16))
    tl.store(tile(x_ptr, 16, 16), tl.dot(a, b, input_precision="ieee"))
    tl.store(tile(y_ptr, 16, 16), tl.dot(a, b, input_precision="tf32x3"))
    tl.store(tile(z_ptr, 16, 16), tl.dot(a, b, allow_tf32=False))


@feature(pair(dtype=torch.float32), lambda a, b: (a @ b, a @ b), exact=False)
@triton.jit
def dots_in_bf16_parts(a_ptr, b_ptr, x_ptr, y_ptr):
    a, b = tl.load(tile(a_ptr, 16, 16)), tl.load(tile(b_ptr, 16, 16))
    tl.store(tile(x_ptr, 16, 16), tl.dot(a, b, input_precision="bf16x3"))
    tl.store(tile(y_ptr, 16, 16), tl.dot(a, b, input_precision="bf16x6"))


@feature(
    lambda: (randint(-9, 9, 16, 32, dtype=torch.int8), randint(-9, 9, 32, 16, dtype=torch.int8)),
    lambda a, b: (a.int() @ b.int(), a.int() @ b.int() + 2),
)
@triton.jit
def dots_of_int8(a_ptr, b_ptr, x_ptr, y_ptr):
    a, b = tl.load(tile(a_ptr, 16, 32)), tl.load(tile(b_ptr, 32, 16))
    tl.store(tile(x_ptr, 16, 16), tl.dot(a, b, out_dtype=tl.int32))
    tl.store(tile(y_ptr, 16, 16), tl.dot(a, b, tl.full((16, 16), 2, tl.int32), out_dtype=tl.int32))


@feature(pair(dtype=torch.float64), lambda a, b: a @ b, exact=False)
@triton.jit
def dots_of_fp64(a_ptr, b_ptr, x_ptr):
    a, b = tl.load(tile(a_ptr, 16, 16)), tl.load(tile(b_ptr, 16, 16))
    tl.store(tile(x_ptr, 16, 16), tl.dot(a, b, out_dtype=tl.float64))


@feature(lambda: (randn(2, 16, 32).half(), randn(2, 32, 16).half()), lambda a, b: a.float() @ b.float(), exact=False)
@triton.jit
def dots_of_three_axes(a_ptr, b_ptr, x_ptr):
    z, i, j = tl.arange(0, 2)[:, None, None], tl.arange(0, 16), tl.arange(0, 32)
    a = tl.load(a_ptr + z * 512 + i[None, :, None] * 32 + j[None, None, :])
    b = tl.load(b_ptr + z * 512 + j[None, :, None] * 16 + i[None, None, :])
    tl.store(x_ptr + z * 256 + i[None, :, None] * 16 + i[None, None, :], tl.dot(a, b))


def fp8_pair():
    return randn(16, 32).to(torch.float8_e5m2), randn(32, 16, seed=3).to(torch.float8_e5m2)


@feature(fp8_pair, lambda a, b: (a.float() @ b.float(), a.float() @ b.float()), exact=False)
@triton.jit
def dots_of_fp8(a_ptr, b_ptr, x_ptr, y_ptr):
    a, b = tl.load(tile(a_ptr, 16, 32)), tl.load(tile(b_ptr, 32, 16))
    tl.store(tile(x_ptr, 16, 16), tl.dot(a, b))
    tl.store(tile(y_ptr, 16, 16), tl.dot(a, b, max_num_imprecise_acc=16))


def scaled_pair():
    scales = randint(120, 132, 128, 2, dtype=torch.uint8), randint(120, 132, 128, 2, dtype=torch.uint8, seed=2)
    values = randn(128, 64).to(torch.float8_e5m2), randn(64, 128, seed=3).to(torch.float8_e5m2)
    return (*values, *scales)


def scaled(a, b, s, t):
    left = a.double() * torch.exp2(s.double() - 127).repeat_interleave(32, 1)
    right = b.double() * torch.exp2(t.double() - 127).repeat_interleave(32, 1).T
    return (left @ right).float()


@feature(scaled_pair, scaled, exact=False)
@triton.jit
def scaled_dot(a_ptr, b_ptr, s_ptr, t_ptr, x_ptr):
    a, b = tl.load(tile(a_ptr, 128, 64)), tl.load(tile(b_ptr, 64, 128))
    s, t = tl.load(tile(s_ptr, 128, 2)), tl.load(tile(t_ptr, 128, 2))
    tl.store(tile(x_ptr, 128, 128), tl.dot_scaled(a, s, "e5m2", b, t, "e5m2"))


def fp4_pair():
    packed = randint(0, 256, 128, 32, dtype=torch.uint8), randint(0, 256, 32, 128, dtype=torch.uint8, seed=1)
    return (*packed, randint(120, 132, 128, 2, dtype=torch.uint8))


def scaled_fp4(a, b, s):
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    numbers = torch.cat([numbers, -numbers])
    left = torch.stack([numbers[(a & 15).long()], numbers[(a >> 4).long()]], -1).reshape(128, 64)
    right = torch.stack([numbers[(b & 15).long()], numbers[(b >> 4).long()]], 1).reshape(64, 128)
    return (left * torch.exp2(s.double() - 127).repeat_interleave(32, 1) @ right).float() + 1


@feature(fp4_pair, scaled_fp4, exact=False)
@triton.jit
def scaled_dot_of_fp4(a_ptr, b_ptr, s_ptr, x_ptr):
    a, b, s = tl.load(tile(a_ptr, 128, 32)), tl.load(tile(b_ptr, 32, 128)), tl.load(tile(s_ptr, 128, 2))
    acc = tl.full((128, 128), 1.0, tl.float32)
    tl.store(tile(x_ptr, 128, 128), tl.dot_scaled(a, s, "e2m1", b, None, rhs_format="e2m1", acc=acc))


# ---- arithmetic ---------------------------------------------------------------------------------------------------


def c_div(a, b):
    return torch.div(a, b, rounding_mode="trunc")


@feature(
    lambda: (randint(-50, 50, 16), torch.tensor([3, -3, 7, -7, 1, -1, 2, 5] * 2).int()),
    lambda a, b: (c_div(a, b), torch.fmod(a, b), -a, ~a, a / b),
    exact=False,
)
@triton.jit
def integer_division_truncates(a_ptr, b_ptr, q_ptr, r_ptr, n_ptr, i_ptr, f_ptr):
    i = tl.arange(0, 16)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(q_ptr + i, a // b)
    tl.store(r_ptr + i, a % b)
    tl.store(n_ptr + i, -a)
    tl.store(i_ptr + i, ~a)
    tl.store(f_ptr + i, a / b)


@feature(
    lambda: (randint(-(2**31), 2**31, 16), randint(0, 31, 16)),
    lambda a, s: (a >> s, a << s, ((a.long() & 0xFFFFFFFF) >> s).int(), a & s, a | s, a ^ s),
)
@triton.jit
def shifts_and_bits(a_ptr, s_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr):
    i = tl.arange(0, 16)
    a, s = tl.load(a_ptr + i), tl.load(s_ptr + i)
    tl.store(b_ptr + i, a >> s)
    tl.store(c_ptr + i, a << s)
    tl.store(d_ptr + i, (a.to(tl.uint32, bitcast=True) >> s.to(tl.uint32)).to(tl.int32, bitcast=True))
    tl.store(e_ptr + i, a & s)
    tl.store(f_ptr + i, a | s)
    tl.store(g_ptr + i, a ^ s)


@feature(ints(dtype=torch.int8), lambda a, b: (a + b, a * b, a.int() * b.int(), (a.int() + 1000).short(), a.abs()))
@triton.jit
def small_integers(a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr):
    i = tl.arange(0, 16)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(c_ptr + i, a + b)
    tl.store(d_ptr + i, a * b)
    tl.store(e_ptr + i, a.to(tl.int32) * b)
    tl.store(f_ptr + i, a.to(tl.int16) + 1000)
    tl.store(g_ptr + i, tl.abs(a))


@feature(
    lambda: (randint(0, 256, 16, dtype=torch.uint8), randint(1, 256, 16, dtype=torch.uint8)),
    lambda a, b: (a // b, a % b, a >> 3, a + b, (a > b)),
)
@triton.jit
def unsigned_integers(a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr):
    i = tl.arange(0, 16)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(c_ptr + i, a // b)
    tl.store(d_ptr + i, a % b)
    tl.store(e_ptr + i, a >> 3)
    tl.store(f_ptr + i, a + b)
    tl.store(g_ptr + i, a > b)


@feature(ints(-(2**31), 2**31), lambda a, b: ((a.long() & 0xFFFFFFFF) * (b.long() & 0xFFFFFFFF) >> 32).int())
@triton.jit
def high_half_of_a_product(a_ptr, b_ptr, c_ptr):
    i = tl.arange(0, 16)
    tl.store(c_ptr + i, tl.umulhi(tl.load(a_ptr + i), tl.load(b_ptr + i)))


def high_half(a, b):
    wrap = lambda n: n - (1 << 64) if n >= 1 << 63 else n  # noqa: E731
    values = [wrap((x % (1 << 64)) * (y % (1 << 64)) >> 64) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    return torch.tensor(values)


@feature(ints(-(2**62), 2**62, torch.int64), high_half)
@triton.jit
def high_half_of_a_product_of_64_bits(a_ptr, b_ptr, c_ptr):
    i = tl.arange(0, 16)
    tl.store(c_ptr + i, tl.umulhi(tl.load(a_ptr + i), tl.load(b_ptr + i)))


@feature(
    two(16),
    lambda x, y: (torch.fmod(x, y), x / y, torch.minimum(x, y), x.clamp(-0.5, 0.5), torch.addcmul(x, x, y)),
    exact=False,
)
@triton.jit
def floats(x_ptr, y_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr):
    i = tl.arange(0, 16)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(a_ptr + i, x % y)
    tl.store(b_ptr + i, tl.div_rn(x, y))
    tl.store(c_ptr + i, min(x, y))
    tl.store(d_ptr + i, tl.clamp(x, -0.5, 0.5))
    tl.store(e_ptr + i, tl.fma(x, y, x))


@feature(
    lambda: (torch.tensor([1.0, math.nan, 2.0, math.nan]), torch.tensor([math.nan, 1.0, 3.0, math.nan])),
    lambda x, y: (torch.fmax(x, y), torch.maximum(x, y), torch.fmin(x, y), torch.minimum(x, y), x.clamp(0, 1)),
)
@triton.jit
def not_a_number(x_ptr, y_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr):
    i = tl.arange(0, 4)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(a_ptr + i, tl.maximum(x, y))
    tl.store(b_ptr + i, tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL))
    tl.store(c_ptr + i, tl.minimum(x, y))
    tl.store(d_ptr + i, tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL))
    tl.store(e_ptr + i, tl.clamp(x, 0.0, 1.0, propagate_nan=tl.PropagateNan.ALL))


@feature(one(16), lambda x: (x.abs().exp(), x.exp2(), x.abs().log(), x.abs().log2(), x.cos(), x.sin()), exact=False)
@triton.jit
def functions(x_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(a_ptr + i, tl.exp(tl.abs(x)))
    tl.store(b_ptr + i, tl.math.exp2(x))
    tl.store(c_ptr + i, tl.log(tl.abs(x)))
    tl.store(d_ptr + i, tl.log2(tl.abs(x)))
    tl.store(e_ptr + i, tl.cos(x))
    tl.store(f_ptr + i, x.sin())


@feature(
    one(16),
    lambda x: (x.abs().sqrt(), x.abs().rsqrt(), x.abs().sqrt(), x.erf(), x.floor(), x.ceil(), x.sigmoid(), x / 3),
    exact=False,
)
@triton.jit
def more_functions(x_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr, h_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(a_ptr + i, tl.sqrt(tl.abs(x)))
    tl.store(b_ptr + i, tl.rsqrt(tl.abs(x)))
    tl.store(c_ptr + i, tl.sqrt_rn(tl.abs(x)))
    tl.store(d_ptr + i, tl.erf(x))
    tl.store(e_ptr + i, tl.floor(x))
    tl.store(f_ptr + i, tl.ceil(x))
    tl.store(g_ptr + i, tl.sigmoid(x))
    tl.store(h_ptr + i, tl.fdiv(x, 3.0))


@feature(
    one(16),
    lambda x: (x.tanh(), x.expm1(), torch.pow(x.abs(), 1.5), torch.hypot(x, x), x.trunc(), x.isnan()),
    exact=False,
)
@triton.jit
def library_functions(x_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(a_ptr + i, libdevice.tanh(x))
    tl.store(b_ptr + i, libdevice.expm1(x))
    tl.store(c_ptr + i, libdevice.pow(tl.abs(x), 1.5))
    tl.store(d_ptr + i, libdevice.hypot(x, x))
    tl.store(e_ptr + i, tl.extra.libdevice.trunc(x))
    tl.store(f_ptr + i, libdevice.isnan(x).to(tl.int1))


@feature(one(16, dtype=torch.float64), lambda x: (x.exp(), x.erf(), x * 2.5, x.sum().reshape(1)), exact=False)
@triton.jit
def double_precision(x_ptr, a_ptr, b_ptr, c_ptr, d_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(a_ptr + i, tl.exp(x))
    tl.store(b_ptr + i, tl.erf(x))
    tl.store(c_ptr + i, x * 2.5)
    tl.store(d_ptr, tl.sum(x))


@feature(
    lambda: (randn(16).half(), randint(-9, 9, 16)),
    lambda x, k: (
        torch.where(x > 0, x.float(), -1.5),
        torch.where(k > 0, k.float(), x.float()),
        x + k,
        x * 2.5,
        k * 0.5,
    ),
)
@triton.jit
def mixed_dtypes(x_ptr, k_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr):
    i = tl.arange(0, 16)
    x, k = tl.load(x_ptr + i), tl.load(k_ptr + i)
    tl.store(a_ptr + i, tl.where(x > 0, x.to(tl.float32), -1.5))
    tl.store(b_ptr + i, tl.where(k > 0, k, x.to(tl.float32)))
    tl.store(c_ptr + i, x + k)
    tl.store(d_ptr + i, x * 2.5)
    tl.store(e_ptr + i, k * 0.5)


@feature(
    one(16),
    lambda x: (
        x.view(torch.int32).clone(),
        x.half().view(torch.int16).clone(),
        (x.view(torch.int32) ^ 1).view(torch.float32),
    ),
)
@triton.jit
def bitcasts(x_ptr, a_ptr, b_ptr, c_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(a_ptr + i, x.to(tl.int32, bitcast=True))
    tl.store(b_ptr + i, tl.cast(x.to(tl.float16), tl.int16, bitcast=True))
    tl.store(c_ptr + i, (x.to(tl.int32, bitcast=True) ^ 1).to(tl.float32, bitcast=True))


@feature(one(16), lambda x: (x.view(torch.int32) + 1).view(torch.float32))
@triton.jit
def bitcast_of_a_pointer(x_ptr, y_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + i)
    tl.store(tl.cast(y_ptr, tl.pointer_type(tl.int32), bitcast=True) + i, x + 1)


@feature(
    one(16),
    lambda x: (x.to(torch.float8_e4m3fn), x.to(torch.float8_e5m2), x.to(torch.float8_e4m3fn).float(), x.bfloat16()),
)
@triton.jit
def conversions(x_ptr, a_ptr, b_ptr, c_ptr, d_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(a_ptr + i, x.to(tl.float8e4nv))
    tl.store(b_ptr + i, x.to(tl.float8e5, fp_downcast_rounding="rtne"))
    tl.store(c_ptr + i, x.to(tl.float8e4nv).to(tl.float32))
    tl.store(d_ptr + i, x.to(tl.bfloat16))


@feature(
    lambda: (randn(16) * 50,),
    lambda x: (x.int(), x.short(), x > 0, (x > 0).float(), x.long(), x.abs().to(torch.uint8)),
)
@triton.jit
def conversions_to_integers(x_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(a_ptr + i, x.to(tl.int32))
    tl.store(b_ptr + i, x.to(tl.int16))
    tl.store(c_ptr + i, x > 0)
    tl.store(d_ptr + i, (x > 0).to(tl.float32))
    tl.store(e_ptr + i, x.cast(tl.int64))
    tl.store(f_ptr + i, tl.abs(x).to(tl.uint8))


def toward_zero(x):
    return (x.view(torch.int32) & -65536).view(torch.float32).bfloat16()


@feature(one(16), lambda x: (toward_zero(x), x.half().float() * 0 + 1))
@triton.jit
def rounding_toward_zero(x_ptr, a_ptr, b_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(a_ptr + i, x.to(tl.bfloat16, fp_downcast_rounding="rtz"))
    half = x.to(tl.float16, fp_downcast_rounding="rtz").to(tl.float32)
    tl.store(b_ptr + i, (tl.abs(half) <= tl.abs(x)).to(tl.float32))


@feature(ints(), lambda a, b: (((a > 0) & (b > 0)) | (a == b), (a != b) ^ (a >= 3), ~(a <= b), (a < b) & True))
@triton.jit
def logic(a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr):
    i = tl.arange(0, 16)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(c_ptr + i, (a > 0) & (b > 0) | (a == b))
    tl.store(d_ptr + i, (a != b) ^ (a >= 3))
    tl.store(e_ptr + i, ~(a <= b))
    tl.store(f_ptr + i, (a < b).logical_and(a < b))


@feature(ints(), lambda a, b: (a + b, a - b, a * b, torch.maximum(a, b), torch.minimum(a, b)))
@triton.jit
def named_operators(a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, g_ptr):
    i = tl.arange(0, 16)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(c_ptr + i, tl.add(a, b))
    tl.store(d_ptr + i, tl.sub(a, b, sanitize_overflow=False))
    tl.store(e_ptr + i, tl.mul(a, b))
    tl.store(f_ptr + i, max(a, b))
    tl.store(g_ptr + i, tl.minimum(a, b))


@triton.jit
def both(a, b):
    return a + b, a - b


@triton.jit
def relu(a):
    return a if a > 0 else a * 0


@feature(two(16), lambda x, y: (x + y, x - y, x.relu()))
@triton.jit
def mapped_elements(x_ptr, y_ptr, a_ptr, b_ptr, c_ptr):
    i = tl.arange(0, 16)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    a, b = tl.map_elementwise(both, x, y)
    tl.store(a_ptr + i, a)
    tl.store(b_ptr + i, b)
    tl.store(c_ptr + i, tl.map_elementwise(relu, x))


# ---- atomics ------------------------------------------------------------------------------------------------------


def counters(dtype=torch.int32, n=16):
    return lambda: (torch.zeros(n, dtype=dtype), torch.arange(n).to(dtype))


@feature(
    lambda: (torch.full((8,), 5, dtype=torch.int32),),
    lambda x: (torch.full((8,), 5).int(), torch.tensor([6, 9, 3, 1, 13, 2, 7, 5]).int()),
    changed=(0,),
)
@triton.jit
def atomics(x_ptr, old_ptr):
    tl.store(old_ptr, tl.atomic_add(x_ptr, 1))
    tl.store(old_ptr + 1, tl.atomic_max(x_ptr + 1, 9))
    tl.store(old_ptr + 2, tl.atomic_min(x_ptr + 2, 3))
    tl.store(old_ptr + 3, tl.atomic_and(x_ptr + 3, 3))
    tl.store(old_ptr + 4, tl.atomic_or(x_ptr + 4, 8))
    tl.store(old_ptr + 5, tl.atomic_xor(x_ptr + 5, 7))
    tl.store(old_ptr + 6, tl.atomic_xchg(x_ptr + 6, 7))
    tl.store(old_ptr + 7, tl.atomic_cas(x_ptr + 7, 4, 9))


@feature(
    lambda: (torch.zeros(4), randn(16)),
    lambda x, y: (torch.zeros(1), y.reshape(4, 4).sum(1)),
    changed=(0,),
    exact=False,
    grid=(4,),
)
@triton.jit
def atomics_of_several_programs(x_ptr, y_ptr, z_ptr):
    i = tl.program_id(0)
    y = tl.load(y_ptr + i * 4 + tl.arange(0, 4))
    tl.atomic_add(x_ptr + i + tl.zeros((4,), tl.int32), y, mask=tl.arange(0, 4) < 4, sem="relaxed", scope="gpu")
    if i == 0:
        tl.store(z_ptr, 0.0)


@feature(
    lambda: (torch.zeros(8),),
    lambda x: (torch.ones(1), torch.tensor([1.0, 2, -3, 4, 0, 0, 0, 0])),
    changed=(0,),
)
@triton.jit
def atomics_of_floats(x_ptr, y_ptr):
    tl.atomic_add(x_ptr, 1.0, sem="acq_rel", scope="cta")
    tl.atomic_max(x_ptr + 1, 2.0, sem="acquire")
    tl.atomic_min(x_ptr + 2, -3.0, sem="release", scope="sys")
    tl.atomic_xchg(x_ptr + 3, 4.0)
    tl.atomic_add(x_ptr + tl.arange(0, 8), 1.0, mask=tl.arange(0, 8) < 0)
    tl.store(y_ptr, 1.0)


@feature(
    lambda: (torch.zeros(16, dtype=torch.float16), torch.arange(16)),
    lambda x, k: (torch.zeros(16).half(), k.half()),
    changed=(0,),
)
@triton.jit
def atomics_of_halves(x_ptr, k_ptr, old_ptr):
    i = tl.arange(0, 16)
    tl.store(old_ptr + i, tl.atomic_add(x_ptr + i, tl.load(k_ptr + i).to(tl.float16)))


@feature(counters(torch.int64), lambda x, k: (torch.zeros(16).long(), k), changed=(0,))
@triton.jit
def atomics_of_64_bits(x_ptr, k_ptr, old_ptr):
    i = tl.arange(0, 16)
    tl.store(old_ptr + i, tl.atomic_cas(x_ptr + i, tl.zeros((16,), tl.int64), tl.load(k_ptr + i)))


@feature(
    lambda: (torch.zeros(2, dtype=torch.int32), torch.zeros(1)),
    lambda lock, x: (torch.zeros(1), torch.tensor([0, 4]).int(), torch.tensor([4.0])),
    changed=(0, 1),
    grid=(4,),
)
@triton.jit
def a_lock(lock_ptr, x_ptr, y_ptr):
    while tl.atomic_cas(lock_ptr, 0, 1) == 1:
        pass
    tl.store(x_ptr, tl.load(x_ptr) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(lock_ptr, 0)
    if tl.atomic_add(lock_ptr + 1, 1) == 0:
        tl.store(y_ptr, 0.0)


@feature(
    lambda: (torch.zeros(1, dtype=torch.uint32), torch.zeros(1, dtype=torch.uint64)),
    lambda a, b: (torch.zeros(1).int(), torch.tensor([2**32 - 1]).to(torch.uint32), torch.tensor([7]).to(torch.uint64)),
    changed=(0, 1),
)
@triton.jit
def atomics_of_unsigned(a_ptr, b_ptr, y_ptr):
    tl.atomic_max(a_ptr, 0xFFFFFFFF)
    tl.atomic_add(b_ptr, 7)
    tl.store(y_ptr, 0)


# ---- methods ------------------------------------------------------------------------------------------------------


@feature(
    one(16), lambda x: (x.exp(), x.abs().sqrt(), x.abs().rsqrt(), x.abs().log(), x.cos(), x.sigmoid()), exact=False
)
@triton.jit
def methods_of_a_block(x_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(a_ptr + i, x.exp())
    tl.store(b_ptr + i, tl.abs(x).sqrt())
    tl.store(c_ptr + i, tl.abs(x).rsqrt())
    tl.store(d_ptr + i, tl.abs(x).log())
    tl.store(e_ptr + i, x.cos())
    tl.store(f_ptr + i, x.sigmoid())


@feature(
    lambda: (randint(1, 4, 8),),
    lambda k: (k.bincount(minlength=8).int(), k.cumsum(0).int(), k.cumprod(0).int(), (k + 2) // 3, k.flip(0)),
)
@triton.jit
def methods_of_integers(k_ptr, a_ptr, b_ptr, c_ptr, d_ptr, e_ptr):
    i = tl.arange(0, 8)
    k = tl.load(k_ptr + i)
    tl.store(a_ptr + i, k.histogram(8))
    tl.store(b_ptr + i, k.cumsum())
    tl.store(c_ptr + i, k.associative_scan(0, multiply))
    tl.store(d_ptr + i, k.cdiv(3))
    (e_ptr + i).store(k.flip(0), mask=i < 8)


@feature(
    lambda: (torch.zeros(4, dtype=torch.int32),),
    lambda x: (torch.zeros(4).int(), torch.tensor([1, 2, 5, 9]).int()),
    changed=(0,),
)
@triton.jit
def methods_of_a_pointer(x_ptr, y_ptr):
    tl.store(y_ptr + 0, x_ptr.atomic_add(1))
    tl.store(y_ptr + 1, (x_ptr + 1).atomic_max(2))
    tl.store(y_ptr + 2, (x_ptr + 2).atomic_xchg(5, sem="relaxed"))
    tl.store(y_ptr + 3, (x_ptr + 3).atomic_cas(0, 9))


# ---- control flow, constants, functions ---------------------------------------------------------------------------


@feature(one(64), lambda x: x.reshape(4, 16).sum(0), exact=False, N=64)
@triton.jit
def loops(x_ptr, y_ptr, N):
    i = tl.arange(0, 16)
    total = tl.zeros((16,), tl.float32)
    for start in tl.range(0, N, 16, num_stages=2, loop_unroll_factor=2, flatten=False):
        total += tl.load(x_ptr + start + i)
    tl.store(y_ptr + i, total)


@feature(one(64), lambda x: x.reshape(4, 16).sum(0), exact=False, N=64)
@triton.jit
def loops_with_more_options(x_ptr, y_ptr, N):
    i = tl.arange(0, 16)
    total = tl.zeros((16,), tl.float32)
    for block in tl.range(0, 4, warp_specialize=False, disallow_acc_multi_buffer=True, disable_licm=True):
        total += tl.load(x_ptr + block * 16 + i)
    tl.store(y_ptr + i, total)


@feature(one(16), lambda x: x * 10, exact=False)
@triton.jit
def static_loops(x_ptr, y_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    total = x
    for k in tl.static_range(1, 4):
        total += x * (k + 1)
    for k in tl.static_range(4, step=2):
        if k == 2:
            total += 0 * x
    tl.store(y_ptr + i, total)


@feature(one(16), lambda x: (x + 8,), exact=False)
@triton.jit
def while_loops(x_ptr, y_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    n = 8
    while n > 0:
        x += 1
        n -= 1
    tl.store(y_ptr + i, x)


@feature(one(16), lambda x: (torch.where(x.sum() > 0, x, -x), x * 3), N=3)
@triton.jit
def branches(x_ptr, a_ptr, b_ptr, N):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    if tl.sum(x) > 0:
        y = x
    else:
        y = -x
    tl.store(a_ptr + i, y)
    scale = 3 if N == 3 else 4
    z = x * scale if N > 2 and N < 5 else x
    tl.store(b_ptr + i, z)


@triton.constexpr_function
def next_even(n):
    return n + n % 2


SIZE = tl.constexpr(16)


@feature(one(16), lambda x: x * 4)
@triton.jit
def constexpr_functions(x_ptr, y_ptr):
    HALF: tl.constexpr = SIZE // 2
    i = tl.arange(0, next_even(HALF * 2))
    tl.static_assert(next_even(3) == 4, "rounds up")
    tl.static_print("size", SIZE)
    tl.store(y_ptr + i, tl.load(x_ptr + i) * next_even(3))


@triton.jit
def divmod_pair(a, b: tl.constexpr):
    return a // b, a % b


@triton.jit
def scaled_by(x, factor=2.0):
    return x * factor


@triton.jit(noinline=True)
def square(x):
    return x * x


@triton.jit
def apply(x, function: tl.constexpr, times: tl.constexpr = 2):
    for _ in tl.static_range(times):
        x = function(x)
    return x


@feature(one(16), lambda x: (x * 4, torch.arange(16).int() // 3, torch.arange(16).int() % 3, x * 3, x[3:4] ** 2))
@triton.jit
def nested_functions(x_ptr, a_ptr, q_ptr, r_ptr, b_ptr, c_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.store(a_ptr + i, apply(x, scaled_by))
    q, r = divmod_pair(i, b=3)
    tl.store(q_ptr + i, q)
    tl.store(r_ptr + i, r)
    tl.store(b_ptr + i, scaled_by(x, factor=3.0))
    tl.store(c_ptr, square(tl.load(x_ptr + 3)))


@feature(one(16), lambda x: (x * 3 + 1, x - 1), exact=False)
@triton.jit
def tuples(x_ptr, a_ptr, b_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    pair = (x * 3, 1)
    a, one = pair
    tl.store(a_ptr + i, a + one)
    trio = pair + pair
    tl.store(b_ptr + i, trio[2] / 3 - trio[3] * len(pair) // 2)


Point = namedtuple("Point", ["x", "y"])


@feature(lambda: ((randn(16), randn(16, seed=1), 3),), lambda args: args[0] + args[1] * args[2])
@triton.jit
def tuple_arguments(args, y_ptr):
    i = tl.arange(0, 16)
    x_ptr, _z_ptr, _factor = args
    tl.store(y_ptr + i, tl.load(x_ptr + i) + tl.load(args[1] + i) * args[2])


@triton.jit
def moved(x, by):
    return Point(x + by, x - by)


@feature(one(16), lambda x: (x + 2, x - 2, x * 3))
@triton.jit
def named_tuples(x_ptr, a_ptr, b_ptr, c_ptr):
    i = tl.arange(0, 16)
    point = moved(tl.load(x_ptr + i), 2)
    tl.store(a_ptr + i, point.x)
    tl.store(b_ptr + i, point[1])
    pair = Point(tl.load(x_ptr + i), 3)
    tl.store(c_ptr + i, pair.x * pair.y)


@feature(lambda: (Point(randn(16), 3),), lambda p: p.x * p.y)
@triton.jit
def named_tuple_arguments(p, y_ptr):
    i = tl.arange(0, 16)
    tl.store(y_ptr + i, tl.load(p.x + i) * p.y)


@feature(
    one(16),
    lambda x: (x + 1.5, x * 7, torch.arange(16).int() + 3_000_000_000 - 3_000_000_000),
    eps=1.5,
    flag=True,
    n=7,
    big=3_000_000_000,
)
@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["x_ptr"])
def scalar_arguments(x_ptr, a_ptr, b_ptr, c_ptr, eps, flag, n, big, unused=None):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    if flag:
        tl.store(a_ptr + i, x + eps)
    if unused is None:
        tl.store(b_ptr + i, x * n)
    tl.store(c_ptr + i, (i + big - big).to(tl.int32))


@feature(one(16), lambda x: x + 1, EVEN=True, ACTIVATION="relu", DTYPE=tl.float32)
@triton.jit
def constexpr_arguments(x_ptr, y_ptr, EVEN: tl.constexpr, ACTIVATION: tl.constexpr, DTYPE: tl.constexpr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i).to(DTYPE)
    if EVEN and ACTIVATION == "relu":
        x += 1
    tl.store(y_ptr + i, x.to(y_ptr.dtype.element_ty))


@feature(one(16), lambda x: x + 2 * x)
@triton.jit
def hints(x_ptr, y_ptr):
    i = tl.max_contiguous(tl.multiple_of(tl.arange(0, 16), 16), 16)
    tl.assume(tl.program_id(0) >= 0)
    tl.device_assert(i >= 0, "never negative")
    tl.device_assert(tl.num_programs(0) == 1)
    tl.debug_barrier()
    x = tl.load(tl.max_constancy(x_ptr + i, 1), eviction_policy="evict_last")
    x += tl.load(x_ptr + i, cache_modifier=".cg") + tl.load(x_ptr + i, volatile=True)
    tl.store(y_ptr + i, x, cache_modifier=".wb", eviction_policy="")


@feature(one(16), lambda x: x + 0)
@triton.jit
def printing(x_ptr, y_ptr):
    i = tl.arange(0, 16)
    x = tl.load(x_ptr + i)
    tl.device_print("x", x, i)
    tl.device_print("bits", i, hex=True)
    tl.device_print("no value")
    tl.static_print("a shape", x.shape, x.dtype)
    tl.store(y_ptr + i, x)


@feature(
    one(16),
    lambda x: (torch.tensor([16, 4, 32]).int(), torch.tensor([1, 1, 0]).int()),
)
@triton.jit
def questions_about_types(x_ptr, a_ptr, b_ptr):
    x = tl.load(x_ptr + tl.arange(0, 16))
    tl.store(a_ptr, x.shape[0])
    tl.store(a_ptr + 1, tl.cdiv(x.numel, 4))
    tl.store(a_ptr + 2, x.dtype.primitive_bitwidth)
    tl.store(b_ptr, x.dtype.is_floating())
    tl.store(b_ptr + 1, x_ptr.dtype.is_ptr() and x.type.is_block())
    tl.store(b_ptr + 2, x.dtype.is_int())


@feature(lambda: (), lambda: (torch.arange(6).int().reshape(2, 3),), grid=(3, 2))
@triton.jit
def program_ids(y_ptr):
    i, j = tl.program_id(axis=0), tl.program_id(1)
    tl.store(y_ptr + j * tl.num_programs(0) + i, j * 3 + i)


@feature(lambda: (), lambda: torch.tensor([0, 4, 1, 5, 2, 6, 3, 7]).int(), grid=(8,))
@triton.jit
def swizzled_programs(y_ptr):
    n = tl.program_id(0)
    i, j = tl.swizzle2d(n // 4, n % 4, 2, 4, 2)
    tl.store(y_ptr + n, i * 4 + j)


@feature(lambda: (torch.zeros(1),), lambda x: torch.tensor([0.0, 1, 2, 3]))
@triton.jit
def scalar_stores(x_ptr, y_ptr):
    for k in range(4):
        tl.store(y_ptr + k, tl.load(x_ptr) + k)


@feature(
    one(16),
    lambda x: (torch.zeros(4, 4), torch.full((16,), 2.5).half(), torch.zeros(16), torch.tensor([3.0])),
)
@triton.jit
def constant_tensors(x_ptr, a_ptr, b_ptr, c_ptr, d_ptr):
    i = tl.arange(0, 16)
    tl.store(a_ptr + i, tl.zeros((4, 4), dtype=tl.float32).ravel())
    tl.store(b_ptr + i, tl.full([16], 2.5, tl.float16))
    tl.store(c_ptr + i, tl.zeros_like(tl.load(x_ptr + i)))
    tl.store(d_ptr, 3.0)


@feature(one(16), lambda x: x.sum().reshape(1), exact=False)
@triton.jit
def scalar_of_a_block(x_ptr, y_ptr):
    total = tl.reduce(tl.load(x_ptr + tl.arange(0, 16)), None, plus)
    tl.store(y_ptr, total)


@feature(one(16), lambda x: (x.clone(), x.clone()))
@triton.jit
def a_pointer_to_pointers_of_its_own(x_ptr, a_ptr, b_ptr):
    i = tl.arange(0, 16)
    for k in tl.static_range(2):
        target = a_ptr if k == 0 else b_ptr
        tl.store(target + i, tl.load(x_ptr + i))


@feature(one(16), lambda x: x[:8] + x[8:])
@triton.jit
def slicing_with_none(x_ptr, y_ptr):
    x = tl.load(x_ptr + tl.arange(0, 16))
    halves = x.reshape(2, 8)
    tl.store(y_ptr + tl.arange(0, 8), tl.sum(halves[:, :], 0))


@feature(ints(), lambda a, b: ((a > 0) & (b > 0), (a > 0) | (b > 0), ~(a > 0), (a > 0) & (a < 9) & (b != 3)), N=16)
@triton.jit
def words_for_logic(a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, f_ptr, N):
    i = tl.arange(0, 16)
    a, b = tl.load(a_ptr + i), tl.load(b_ptr + i)
    tl.store(c_ptr + i, a > 0 and b > 0)
    tl.store(d_ptr + i, a > 0 or b > 0)
    if not N == 3 and (N == 16 or N == 17):
        tl.store(e_ptr + i, not a > 0)
    tl.store(f_ptr + i, a > 0 and a < 9 and b != 3)


@feature(lambda: (), lambda: (torch.tensor([-2, -1, 0, -2]).int(), torch.tensor([-1, -1, -1, 0]).int()))
@triton.jit
def counters_are_tensors(a_ptr, b_ptr):
    for k in range(4):
        tl.store(a_ptr + k, (k - 5) % 3)
    for k in tl.range(4):
        tl.store(b_ptr + k.to(tl.int64), (k - 5) // 3)


@triton.jit
def larger_of(a, b):
    return max(a, b)


@feature(two(16), lambda x, y: (torch.maximum(x, y), torch.minimum(x, y).clamp(max=0), x.max().reshape(1)))
@triton.jit
def min_and_max_of_blocks(x_ptr, y_ptr, a_ptr, b_ptr, c_ptr):
    i = tl.arange(0, 16)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(a_ptr + i, larger_of(x, y))
    tl.store(b_ptr + i, min(x, y, 0.0))
    tl.static_assert(max(3, 4) == 4)
    tl.store(c_ptr, tl.reduce(x, 0, larger_of))


# ---- random numbers -----------------------------------------------------------------------------------------------


def philox(seed, offset, rounds=10):
    """Philox4x32 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    word = 0xFFFFFFFF
    c0, c1, c2, c3 = offset & word, 0, 0, 0
    k0, k1 = seed & word, (seed >> 32) & word
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high2, low2 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return c0, c1, c2, c3


def signed(words):
    return torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32)


def uniform(word):
    word = word - (1 << 32) if word >> 31 else word
    return np.float32(-word - 1 if word < 0 else word) * np.float32(4.6566127342e-10)


@feature(
    lambda: (),
    lambda: (
        signed(philox(42, i)[0] for i in range(16)),
        torch.tensor(np.array([uniform(philox(42, i)[0]) for i in range(16)])),
        signed(philox(42, i, 7)[0] for i in range(16)),
    ),
    seed=42,
)
@triton.jit
def random_numbers(a_ptr, b_ptr, c_ptr, seed):
    i = tl.arange(0, 16)
    tl.store(a_ptr + i, tl.randint(seed, i).to(tl.int32, bitcast=True))
    tl.store(b_ptr + i, tl.rand(seed, i))
    tl.store(c_ptr + i, tl.randint(seed, i, n_rounds=7).to(tl.int32, bitcast=True))


@feature(
    lambda: (),
    lambda: tuple(signed(philox(7, i)[k] for i in range(16)) for k in range(4)),
    seed=7,
)
@triton.jit
def four_random_numbers(a_ptr, b_ptr, c_ptr, d_ptr, seed):
    i = tl.arange(0, 16)
    a, b, c, d = tl.randint4x(seed, i)
    tl.store(a_ptr + i, a.to(tl.int32, bitcast=True))
    tl.store(b_ptr + i, b.to(tl.int32, bitcast=True))
    zero = tl.zeros((16,), tl.uint32)
    a, b, c, d = tl.philox(seed, i.to(tl.uint32), zero, zero, zero)
    tl.store(c_ptr + i, c.to(tl.int32, bitcast=True))
    tl.store(d_ptr + i, d.to(tl.int32, bitcast=True))


def normal(seed, offset):
    u, v = (uniform(word) for word in philox(seed, offset)[:2])
    return math.sqrt(-2 * math.log(max(1e-7, u))) * math.cos(6.283185307179586 * v)


@feature(lambda: (), lambda: torch.tensor([normal(3, i) for i in range(16)]), exact=False, seed=3)
@triton.jit
def normal_numbers(y_ptr, seed):
    tl.store(y_ptr + tl.arange(0, 16), tl.randn(seed, tl.arange(0, 16)))


@feature(lambda: (), lambda: torch.tensor([uniform(philox(2**40 + 1, i)[2]) for i in range(16)]), seed=2**40 + 1)
@triton.jit
def a_seed_of_64_bits(y_ptr, seed):
    i = tl.arange(0, 16)
    _a, _b, c, _d = tl.rand4x(seed, i)
    tl.store(y_ptr + i, c)


# ---- decorators ---------------------------------------------------------------------------------------------------


def first_of(configs, named_args, **kwargs):
    return configs[:1]


@feature(
    lambda: (randn(64), torch.zeros(1)),
    lambda x, n: (x + 1, torch.tensor([4.0])),
    grid=lambda meta: (triton.cdiv(64, meta["BLOCK"]),),
    changed=(1,),
    N=64,
)
@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 16}, num_warps=4, num_stages=2, pre_hook=None),
        triton.Config({"BLOCK": 64}, num_warps=8),
    ],
    key=["N"],
    reset_to_zero=["n_ptr"],
    prune_configs_by={"early_config_prune": first_of},
)
@triton.heuristics({"EVEN": lambda args: args["N"] % args["BLOCK"] == 0})
@triton.jit
def autotuned(x_ptr, n_ptr, y_ptr, N, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.static_assert(EVEN)
    tl.atomic_add(n_ptr, 1.0)
    tl.store(y_ptr + i, tl.load(x_ptr + i) + 1)


def price(x_ptr, y_ptr, N, BLOCK, num_warps, **kwargs):
    return -BLOCK


@feature(
    lambda: (randn(64),),
    lambda x: (x * 2, x * 2),
    changed=(0,),
    N=64,
)
@triton.autotune(
    [triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 64})],
    key=["N"],
    restore_value=["x_ptr"],
    prune_configs_by={"perf_model": price, "top_k": 1},
)
@triton.jit
def autotuned_by_a_model(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i) * 2
    tl.store(y_ptr + i, x)
    tl.store(x_ptr + i, x)


@feature(one(64), lambda x: x + 3, N=64)
@triton.heuristics(values={"BLOCK": lambda args: triton.next_power_of_2(args["N"]), "num_warps": lambda args: 2})
@triton.jit
def heuristics(x_ptr, y_ptr, N, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i) + 3)


# ---- the tests ----------------------------------------------------------------------------------------------------


def base(value):
    return value.base if isinstance(value, TensorDescriptor) else value


def run(name):
    """Launch a feature as a check does. Its results and the wanted ones."""
    from gpukit.simulator.trace.tracer import trace

    known = FEATURES[name]
    inputs = known.inputs()
    want = known.want(*inputs)
    want = want if isinstance(want, tuple) else (want,)
    outputs = [torch.empty(w.shape, dtype=w.dtype) for w in want[: len(want) - len(known.also_changed)]]
    with trace():
        known.kernel[known.grid](*inputs, *outputs, **known.options)
    return [*outputs, *(base(inputs[i]) for i in known.also_changed)], want


def of_this_triton():
    return [pytest.param(name, marks=BLOCK_POINTERS if "block_pointer" in name else ()) for name in FEATURES]


@pytest.mark.parametrize("name", of_this_triton())
def test_feature(name):
    got, want = run(name)
    for y, right in zip(got, want, strict=True):
        if FEATURES[name].exact or not y.dtype.is_floating_point:
            assert y.dtype == right.dtype
            torch.testing.assert_close(y.float(), right.float(), rtol=0, atol=0, equal_nan=True)
        else:
            torch.testing.assert_close(y, right, rtol=1e-5, atol=3e-5)


@pytest.fixture(scope="module")
def source():
    return Path(__file__).read_text()


@pytest.mark.parametrize("name", of_this_triton())
def test_feature_on_the_device(name, source):
    """As a check runs it: the launch is written down without data, and carried out where only the text of kernels runs."""
    from gpukit.grading.device import Device
    from gpukit.grading.host import Recorder, decoys

    known = FEATURES[name]
    inputs = known.inputs()
    if any(isinstance(value, TensorDescriptor | tuple) for value in inputs):
        pytest.skip("a function of an exercise gets tensors and numbers")
    want = known.want(*inputs)
    want = want if isinstance(want, tuple) else (want,)
    recorder, device = Recorder(__file__, lambda path: 0), Device(source, __file__, uploads=False)
    arguments = recorder.arguments(decoys(inputs))
    with recorder:
        made = [torch.empty(w.shape, dtype=w.dtype) for w in want[: len(want) - len(known.also_changed)]]
        known.kernel[known.grid](*arguments, *made, **known.options)
    device.arguments(inputs)
    got = device.play(recorder.tape({f"y[{i}]": y for i, y in enumerate(made)}))
    for y, right in zip(got.values(), want, strict=False):
        torch.testing.assert_close(y.float(), right.float(), rtol=1e-5, atol=3e-5, equal_nan=True)
