"""The numbers of notebook 17, without its looks: what its prose says of recorded rows."""

from gpukit.lessons import capstone as lesson
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


def test_losses_and_larger_models():
    said = lesson.what_the_losses_say().data
    assert "agree to 0.002 nats" in said and "0.14 nats, at step 14" in said
    said = str(lesson.larger_models())
    assert "1.17 for gpt-1.3b and 1.16 for llama-1b, where it was 1.04 for GPT-2" in said
    assert "82% of gpt-1.3b's step and 77% of GPT-2's" in said


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
