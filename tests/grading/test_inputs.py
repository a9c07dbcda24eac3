"""Seeded inputs, and how cases are named and tagged."""

import random

import torch

from gpukit.grading import registry
from gpukit.grading.inputs import Inputs, tensor_case
from gpukit.grading.recognize import TAGS


def test_one_seed_gives_the_same_numbers_in_every_dtype():
    first, second = (Inputs(random.Random(7), scale=2) for _ in range(2))
    assert torch.equal(first.normal(3, 5).half(), second.normal(3, 5, dtype="float16"))
    assert torch.equal(first.integers(-3, 9, 50).float(), second.integers(-3, 9, 50, dtype="float32"))
    x = torch.empty(4, 6, dtype=torch.bfloat16)
    for shape in ((), (6,)):
        like = first.like(x, *shape)
        assert like.dtype == x.dtype and tuple(like.shape) == (shape or (4, 6))
        assert torch.equal(like.float(), second.normal(*like.shape, scale=1).bfloat16().float())
    assert not torch.equal(first.normal(9), Inputs(random.Random(8), scale=2).normal(9))


def test_case_is_named_and_tagged_after_its_first_tensor():
    x = torch.zeros(2, 6).half()
    plain = tensor_case(x, 3)
    assert (plain.name, plain.args, plain.tags) == ("x [2, 6] float16", (x, 3), {"float16"})
    told = tensor_case(x, shown="a [2, 6]", note="BLOCK 4", tags="long partial", tail=True)
    assert (told.name, told.tags) == ("a [2, 6] float16, BLOCK 4", {"float16", "long", "partial", "tail"})
    assert "tail" not in tensor_case(x[:, :4], tail=True).tags


def test_every_tag_of_a_case_has_its_phrase_and_every_phrase_a_case():
    """So that a pattern in what fails can always be told. A tag means one thing in all exercises."""
    used = {
        tag
        for exercise in registry.exercises().values()
        for seed in range(2)
        for case in exercise.cases(random.Random(seed))
        for tag in case.tags
    }
    assert used - TAGS.keys() == set(), "these tags have no phrase in TAGS of gpukit/grading/recognize.py"
    assert TAGS.keys() - used == set(), "no case has these tags"
    assert len(set(TAGS.values())) == len(TAGS), "two tags read alike"
