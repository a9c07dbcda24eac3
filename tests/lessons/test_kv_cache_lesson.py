"""The numbers of notebook 14, without its looks."""

import re

import pytest
import torch

import gpukit
from gpukit.accounting.decoding import decode_step
from gpukit.hardware import gpu
from gpukit.lessons import kv_cache as lesson
from gpukit.reference.kv_cache import SmallModel, generate

H200 = gpu("h200")


def test_passes_are_counted_by_what_the_model_is_given():
    model, prompt = SmallModel(), torch.zeros(1, 3, dtype=torch.long)
    passed = lesson.passed_through(model)
    plain = generate(model, prompt, 3)
    assert passed == [3, 4, 5], "the picture and its alt text say so"
    assert "3, 4 and 5" in lesson.passes().alt and "3, 1 and 1" in lesson.passes().alt
    said = lesson.what_passed(plain, plain, sum(passed), 5)
    assert "wrote the same text both times" in said and "3, 4, and so on up to 5 tokens, 12 in all" in said
    assert "3 + 2 = 5" in said
    assert "The two texts differ" in lesson.what_passed(plain, plain + 1, 12, 5)


def test_one_token_in_the_timed_cache_is_the_last_of_a_whole_pass():
    model = SmallModel()
    tokens = torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(0))
    caches = [lesson.Cache(lesson._one_token, 9, model.kv_heads, model.head_size) for _ in range(model.layers)]
    model(tokens[:, :8], caches)
    torch.testing.assert_close(model(tokens[:, 8:], caches)[:, -1], model(tokens)[:, -1], rtol=1e-4, atol=1e-4)


def test_your_text_says_where_it_goes_wrong(capsys, monkeypatch):
    model, prompt = SmallModel(), torch.ones(1, 4, dtype=torch.long)
    plain = generate(model, prompt, 4)
    for impl, agree in (("exercises", 1), ("solutions", 4)):
        monkeypatch.setenv("GPUKIT_IMPL", impl)
        lesson.your_text(model, prompt, plain)
        assert f"{agree} of 4 tokens agree" in capsys.readouterr().out


def test_a_byte_of_cache_gains_nothing_by_a_batch():
    for batch in (1, 16, 64):
        assert lesson.intensity(batch) == pytest.approx((batch, 4))  # 32 query heads on 8 heads of keys
    assert lesson.intensity(1, 1024) == pytest.approx((1024, 4096))
    assert [row[1:] for row in lesson.intensity_table().rows][2] == (16, *lesson.intensity(16))
    assert f"up to a batch of about {lesson.RIDGE:.0f}" in lesson.what_the_intensity_says()


def test_the_answers_to_the_calculator():
    n = lesson.even_batch()
    steps = [decode_step("llama3-8b", batch, 8192) for batch in (n - 1, n)]
    assert steps[0].cache_bytes <= steps[0].weights_bytes and steps[1].cache_bytes > steps[1].weights_bytes
    small, large = lesson.gains(4), lesson.gains(64)
    assert small["weights of 4 bits"] > small["cache of 8 bits"] > 1
    assert large["cache of 8 bits"] > large["weights of 4 bits"] > 1, "the text says that it is the other way round"
    assert f"a batch of {n} on" in lesson.what_the_board_says().data
    assert all(step.fits(H200) for step in (decode_step("llama3-8b", 64, 8192), steps[0]))
    assert not decode_step("llama3-8b", 256, 8192).fits(H200), "the text says that the room ends there"


def test_appending_in_place_moves_the_token_alone():
    table, said = lesson.layout_said([16_781_312, 4096, 4096], 8)
    assert table.rows == [
        ("torch.cat", 16_781_312, "a new tensor"),
        ("[B, H, T_max, D]", 4096, 8),
        ("[B, T_max, H, D]", 4096, 1),
    ]
    assert "16.8 MB for a token of 2,048 bytes, 4,097 times" in said


def test_only_latent_attention_waits_for_arithmetic():
    found = {row[0]: row[-1] for row in lesson.groups_table().rows}
    assert [name for name, flops in found.items() if flops > lesson.RIDGE] == ["deepseek-v3"]
    assert found[lesson.ONE_HEAD] == pytest.approx(32)
    assert found["llama3-405b"] == pytest.approx(16) and found["gpt2-xl"] == pytest.approx(1)
    assert found["deepseek-v3"] == pytest.approx(2 * 128 * (576 + 512) / (2 * 576))


def test_parts_and_their_states():
    found = lesson.split_answers()
    assert found["parts"] == 33 and (found["parts"] - 1) * 8 < 2 * 132 <= found["parts"] * 8
    assert found["idle SMs"] == pytest.approx(100 * 124 / 132)
    _, H, H_kv, T, D = lesson.SHAPE
    assert found["states of 32 parts"] == pytest.approx(100 * 2 * 32 * H * (D + 2) * 4 / (2 * T * H_kv * D * 2))
    assert lesson.chosen_parts() == 16 and "8 of 132 SMs" in lesson.busy().alt


def test_the_recorded_cache_is_the_one_that_is_modelled():
    (bytes_,) = {row.bytes for row in lesson.results.rows("decode_attention") if row.shape == lesson.SHAPE}
    assert lesson.cache_bytes() == pytest.approx(bytes_, rel=2e-3)  # q, o and lengths beside it
    rows = lesson.took()
    assert rows["torch", lesson.SHAPE] > 10 * rows["gpukit", lesson.SHAPE]
    for number in (rows["gpukit", lesson.SHAPE], lesson.took(lesson.INT8)["gpukit", lesson.SHAPE]):
        assert f"**{number:.0f} µs**" in lesson.promise().data


def test_what_is_said_of_the_times_holds():
    us, graph = lesson.took(), lesson.took(mode="fwd-graph")
    model = lesson.us(lesson.cache_bytes())
    assert model < graph["gpukit", lesson.SHAPE] < us["gpukit", lesson.SHAPE]
    shapes = (lesson.SHAPE, lesson.SHORT, lesson.MANY)
    for shape in shapes:
        peers = [us[name, shape] for name, s in us if s == shape and name != "torch"]
        assert us["torch", shape] > max(peers), "the formula is the slowest everywhere"
        assert 1 / 4 < us["compile", shape] / us["torch", shape] < 0.36, "a third to a quarter"
    assert ("sdpa-efficient", lesson.SHAPE) not in us, "the gap in the table"
    assert 0.9 * 16 * model < us["gpukit", lesson.MANY] < 16 * model, "a little less than the model"
    assert (
        us["sdpa-efficient", lesson.SHORT] / us["gpukit", lesson.SHORT]
        > 5
        > us["sdpa-efficient", lesson.MANY] / us["gpukit", lesson.MANY]
        > 1
    )
    table = lesson.measured()
    assert table.rows[0][[*table.columns].index("model")] == pytest.approx(model, rel=2e-3)
    room = {
        row.provider: row
        for row in lesson.results.rows("decode_attention")
        if (row.shape, row.mode) == (lesson.SHORT, "fwd")
    }
    o = 2 * 32 * 128  # bytes
    assert room["sdpa-efficient"].peak_bytes == o
    assert all(room[f"sdpa-{name}"].peak_bytes > 10 * o for name in ("cudnn", "flash")), "room for the states of parts"
    assert all(room[f"sdpa-{name}"].note == "launch-bound" for name in ("cudnn", "flash"))
    narrow = lesson.took(lesson.INT8)
    assert all(1 < us["gpukit", shape] / narrow["gpukit", shape] < 1.5 for shape in shapes)
    said = lesson.what_8_bits_gain().data
    gains = re.search(r"([\d.]+), ([\d.]+) and ([\d.]+) times as fast as 16", said)
    assert [float(x) for x in gains.groups()] == [
        round(us["gpukit", shape] / narrow["gpukit", shape], 2) for shape in shapes
    ]


def test_large_numbers_widen_the_steps_of_all_that_share_them():
    _, few = lesson.on_the_grid((*lesson.GRID, 1.2))
    step, many = lesson.on_the_grid((*lesson.GRID, 8.0))
    assert 0 not in few and many[:-1] == [0] * 5 and step == pytest.approx(8 / 3)


def test_keys_want_a_scale_per_channel_and_values_one_per_token():
    def rounded(x, dims):
        scale = x.abs().amax(dims, keepdim=True) / 127
        return (x / scale).round() * scale

    table = lesson.int8_errors(rounded)
    whole, channel, token = table.rows
    assert channel[2] < token[2] <= whole[2] and token[3] < channel[3] < whole[3]
    assert [round(row[1], 4) for row in table.rows] == [8.0, 8.0156, 8.25]
    assert f"({channel[2]:.1f}% against {token[2]:.1f}%" in lesson.what_the_errors_say(table).data


def test_the_layer_reads_what_a_decode_step_does():
    weights, cache = lesson.layer_step()
    step = decode_step("llama3-8b", 4, 4096)
    assert cache * lesson.LLAMA.layers == step.cache_bytes
    assert weights * lesson.LLAMA.layers < step.weights_bytes < 1.1 * weights * lesson.LLAMA.layers
    assert f"{cache / 1e6:.0f} MB of keys and values" in lesson.layer_line().data


def test_yours_counts_loads(monkeypatch):
    monkeypatch.setenv("GPUKIT_IMPL", "solutions")
    loaded, least = (int(n.replace(",", "")) for n in re.findall(r"([\d,]{5,})", lesson.yours().data))
    assert least == 377 * 2 * 8 * 64 * 2 <= loaded < 1.2 * least
    assert gpukit.exercise("kv_cache").__file__.endswith("solutions/kv_cache.py")
