"""The numbers of notebook 17, without its looks: what its prose says of recorded rows."""

from dataclasses import replace

from gpukit.lessons import capstone as lesson
from gpukit.train import ladder as train_ladder
from gpukit.train.presets import PRESETS
from gpukit.widgets import ladder


def test_the_prose_about_the_model_of_the_ladder():
    rows = {row["rung"]: row for row in ladder.rows("gpt2")}
    for rung in ("bf16", "FlashAttention", "fused AdamW"):
        assert float(rows[rung]["step_ms"]) > 2 * float(rows[rung]["predicted_ms"])
    assert rows["padded vocabulary"]["predicted_ms"] == rows["fused AdamW"]["predicted_ms"]
    said = lesson._what_the_ladder_says()
    assert "chunked loss (0.93), gpukit norms (0.98), CUDA graphs (0.98), recomputation (0.84)" in said


def test_the_profile_of_the_first_detective():
    before, after = (lesson.profile(rung).rows for rung in ("FlashAttention", "torch.compile"))
    assert round(sum(ms for _, _, ms in before[:3])) == 124 and {launches for _, launches, _ in before[:3]} == {8}
    assert round(sum(ms for name, _, ms in before if "copy_kernel" in name)) == 28
    assert not any("copy_kernel" in name for name, _, _ in after)
    assert "99% of the step's 116 ms" in lesson.what_is_left().data and "675 TFLOP/s" in lesson.what_is_left().data


def test_what_the_ladder_says_of_memory():
    """One pass and PyTorch's best are one way but for the loss; eight micro-batches are a choice, and no card's limit."""
    ways = {name: way for name, (_, _, way) in train_ladder.how(passes=8).items()}
    assert replace(ways["one pass"], loss="logits") == ways["PyTorch's best"]
    said = lesson.what_a_step_is().data
    assert "119 GB (modelled)" in said and "8 micro-batches it needs 16.7 GB (measured)" in said
    for name, way in ways.items():
        micro_batches = 8 if [*ways].index(name) < [*ways].index("one pass") else 1
        assert way.passes == micro_batches, f"{name}: up to chunked loss"
    said = lesson._what_the_ladder_says()
    assert "in 127 ms and 30.6 GB, and the rung one pass takes 124 ms and 24.4 GB" in said
    assert "12.0 GB where 16.5 were measured" in said and "becomes 2% slower" in said


def test_a_step_before_and_after():
    """The heights of the picture hold the time of the kernels and nothing of the gaps between them. The prose about it: twelve
    blocks have a kernel of attention each in both directions, and the head's chunks lie between them."""
    for parts in lesson._timeline().values():
        end = lesson._end(parts)
        for part, stretches in parts.items():
            drawn = sum(lesson._shares(stretches, end)) * end / lesson._BINS
            assert abs(drawn / lesson._busy_ms(parts, part) - 1) < 0.01, part
    before, after = lesson._timeline().values()
    assert len(before["loss"]) == 8
    first, last = (pick(start for start, *_ in after["loss"]) for pick in (min, max))
    starts = [start for start, *_ in after["attention"]]
    assert sum(start < first for start in starts) == 12 == sum(start > last for start in starts)
    said = lesson.what_the_timeline_says().data
    assert "8 orange bars" in said and "about 70 ms after the start" in said and "takes about 130 ms" in said
    assert "85 ms instead of 1,267, so they are 15 times as fast" in said
    assert "From 27 to 53 ms" in said and "differ from those in the table by up to 7%" in said


def test_losses_and_larger_models():
    said = lesson.what_the_losses_say().data
    assert "agree to 0.002 nats" in said and "0.14 nats, at step 14" in said
    said = str(lesson.larger_models())
    assert "1.17 for gpt-1.3b and 1.16 for llama-1b, where it was 1.04 for GPT-2" in said
    assert "82% of gpt-1.3b's step and 77% of GPT-2's" in said
    assert "Cheap recomputation saves 21% for 4% more time" in said
    rows = {row["rung"]: row for row in ladder.rows("gpt-1.3b")}
    for modelled in ("predicted_ms", "predicted_bytes"):
        assert rows["cheap recomputation"][modelled] == rows["bf16 weights"][modelled]
    for preset in ("gpt-1.3b", "llama-1b"):
        dates = {row["rung"]: row["date"] for row in ladder.rows(preset)}
        assert dates["fp8"] != dates["bf16 weights"], "fp8's gain is one between rows of different days"


def test_traffic_and_time():
    said = lesson.traffic_and_time().data
    assert "= 6.7e14 FLOPs" in said and "1.7 s" in said and "82 ms are 5%" in said
    assert PRESETS["gpt-1.3b"].settings.batch == 4 * PRESETS["gpt-1.3b"].settings.micro_batches == 16


def test_the_run_that_went_wrong_by_itself():
    """The two curves are of one rung and begin alike; a block as long as the row is wrong where threads read what others stored."""
    alt = lesson.unplanned().alt
    assert "begins at 11.26 and ends at 6.63" in alt and "begins at 11.23 and ends at 46.58" in alt
    wrong = {block: share for block, _, share in lesson.block_sizes().rows if share}
    assert set(wrong) == {"2 x 2,048", "1 x 2,048"}


def test_what_several_gpus_send_is_what_was_computed():
    """All rows: the recorded calls send what the plan says to the byte, but for the norms of the gradients, which FSDP sends
    as well; the links counted nothing else. Runs of a preset train the same model."""
    rows = lesson._ranks()
    assert {(row["engine"], row["gpus"]) for row in rows} >= {
        ("one", "1"),
        ("ddp", "2"),
        ("fsdp", "2"),
        ("ddp", "4"),
        ("fsdp", "4"),
    }
    for row in rows:
        recorded = sum(int(row[name]) for name in ("all_reduce_bytes", "all_gather_bytes", "reduce_scatter_bytes"))
        assert 0 <= recorded - int(row["sent_bytes"]) < 10_000
        assert abs(int(row["link_bytes"]) - recorded) <= 1e-3 * recorded
        assert abs(int(row["predicted_bytes"]) / int(row["memory_bytes"]) - 1) < 0.05
        alone = next(each for each in rows if (each["preset"], each["engine"]) == (row["preset"], "one"))
        assert abs(float(row["first_loss"]) / float(alone["first_loss"]) - 1) < 1e-6
        assert abs(float(row["mean_loss"]) / float(alone["mean_loss"]) - 1) < 0.01


def test_the_prose_about_several_gpus():
    """What the cells around the tables say without numbers."""
    assert "within 0.03% of what was" in lesson.what_was_sent().data
    rows = {(row["preset"], row["engine"], row["gpus"]): row for row in lesson._ranks()}
    for gpus in ("2", "4"):
        ddp, fsdp = (rows["gpt-1.3b", engine, gpus] for engine in ("ddp", "fsdp"))
        assert float(ddp["exposed_ms"]) < 0.15 * float(ddp["communication_ms"]), "nearly all of it is hidden"
        assert float(ddp["scaling"]) > float(fsdp["scaling"])
        assert int(ddp["memory_bytes"]) > 1.3 * int(fsdp["memory_bytes"])
    steps = {gpus: 16 * 4096e3 / float(rows["gpt-1.3b", "fsdp", gpus]["tokens_per_s"]) for gpus in "24"}
    assert abs(steps["4"] / steps["2"] - 1) < 0.02, "FSDP's step is as long on four GPUs as on two"
    assert float(rows["gpt-1.3b", "fsdp", "4"]["computation_ms"]) < 0.6 * steps["4"]
    assert (
        float(rows["gpt-1.3b", "ddp", "2"]["computation_ms"])
        > 1.05 * float(rows["gpt-1.3b", "one", "1"]["computation_ms"]) / 2
    )
    said = lesson._what_scaling_says()
    assert "converts all weights to bfloat16" in said
    assert "5 runs, 2 and 3 had the same learning rate" in said and "differ by at most 0.00004 nats" in said
    assert "For 207 ms only NCCL's" in said and "at least 165 ms nothing ran" in said
    assert "of a step's 117 ms on four GPUs, 50 are computation, 3 are NCCL's alone, and in the other 64" in said
    assert "begin at about 0, 260, 490 and 700 ms" in lesson.what_the_lanes_say().data
    # The picture: DDP sends in the last quarter of the step, FSDP from its beginning to its end.
    steps = [
        row for row in ladder.read(lesson.RANKS, "ranks-steps.csv") if (row["preset"], row["gpus"]) == ("gpt-1.3b", "2")
    ]
    for engine, earliest in (("ddp", 0.7), ("fsdp", 0.0)):
        found = [row for row in steps if row["engine"] == engine]
        end = max(float(row["start_ms"]) + float(row["ms"]) for row in found)
        sent = [float(row["start_ms"]) / end for row in found if row["what"] != "computation"]
        assert earliest <= min(sent) < earliest + 0.15 and max(sent) > 0.9
    assert "DDP, all-reduce from" in lesson.what_travels_when().alt
