"""What GPUs send each other, against rings whose every message is counted."""

import pytest

from gpukit.accounting import collectives


def ring(tensors: list[list[float]]) -> tuple[list[list[float]], list[int]]:
    """An all-reduce of the GPUs' tensors, round by round: what each has at the end, and the elements that each has sent."""
    n = len(tensors)
    size = -(-len(tensors[0]) // n)
    shares = [[(t + [0.0] * (n * size - len(t)))[i * size : (i + 1) * size] for i in range(n)] for t in tensors]
    sent = [0] * n
    for gathering in (False, True):
        for r in range(n - 1):
            messages = []
            for gpu in range(n):
                share = (gpu + gathering - r) % n
                messages.append((share, list(shares[gpu][share])))
                sent[gpu] += size
            for gpu in range(n):
                share, values = messages[gpu - 1]
                old = shares[gpu][share]
                shares[gpu][share] = values if gathering else [a + b for a, b in zip(old, values, strict=True)]
    return [[x for share in each for x in share][: len(tensors[0])] for each in shares], sent


@pytest.mark.parametrize("gpus", (1, 2, 3, 4, 8))
@pytest.mark.parametrize("elements", (1, 7, 16))
def test_an_all_reduce_sends_what_a_ring_sends(gpus, elements):
    tensors = [[float((i + 1) * (gpu + 2)) for i in range(elements)] for gpu in range(gpus)]
    results, sent = ring(tensors)
    expected = [sum(column) for column in zip(*tensors, strict=True)]
    assert all(result == expected for result in results)
    assert {4 * each for each in sent} == {collectives.all_reduce(elements, gpus, 4)}


def test_a_step():
    ddp = collectives.step("ddp", 1000, 4, micro_batches=3)
    assert ddp == collectives.Step(all_reduce=2 * 3 * 250 * 4)
    fsdp = collectives.step("fsdp", 1000, 4, micro_batches=3)
    assert fsdp == collectives.Step(all_gather=3 * 2 * 3 * 250 * 2, reduce_scatter=3 * 3 * 250 * 4)
    kept = collectives.step("fsdp", 1000, 4, reshard=False)
    assert kept.total == 3 * 250 * 2 + 3 * 250 * 4
    assert collectives.step("fsdp", 1000, 1).total == 0


def test_bad_arguments():
    with pytest.raises(ValueError, match="step: engine must be one of"):
        collectives.step("zero", 1000, 4)
    with pytest.raises(ValueError, match="gpus must be"):
        collectives.all_reduce(10, 0, 4)
