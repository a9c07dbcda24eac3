"""What notebook 14 shows: passes with and without a cache, FLOPs per byte, layouts, shared heads, parts, 8 bits, and times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import process_time
from timeit import repeat

import torch
import torch.nn.functional as F
from IPython.display import Markdown
from torch import Tensor

import gpukit
from gpukit.accounting import models
from gpukit.accounting.decoding import decode_step
from gpukit.hardware import gpu
from gpukit.kernels.decode_attention import Config, config_of, decode_attention_fwd, splits_of
from gpukit.kernels.kv_cache import generate
from gpukit.lessons import diagram, layer, results
from gpukit.lessons.course_map import course_map as _map
from gpukit.reference.kv_cache import SmallModel
from gpukit.simulator.prediction.machine import machine
from gpukit.widgets import decoding, style, times
from gpukit.widgets.predict import Reveal, reveal
from gpukit.widgets.style import Picture, Table
from gpukit.widgets.versus import Missing, Versus, versus

H200 = gpu("h200")
RIDGE = H200.ridge("bf16")
LLAMA = models.preset("llama3-8b")
SHAPE = (1, 32, 8, 32_768, 128)  # batch, query heads, heads in the cache, tokens, D: of the promise and of the parts
LONG = SHAPE[3]
STORY = 8192  # tokens in each sequence's cache where batches are compared
INT8 = "decode_attention_int8"
_NOTHING = Markdown("No run is recorded: `gpukit bench decode_attention` makes one where there is a GPU.")


def course_map() -> Picture:
    return _map("kv_cache")


# ---- recorded times --------------------------------------------------------------------------------------------------


def took(op: str = "decode_attention", mode: str = "fwd") -> dict[tuple[str, tuple[int, ...]], float]:
    """Microseconds recorded on an H200 in bfloat16, by (provider, shape); {} without a record."""
    found = (row for row in results.rows(op) if (row.op, row.mode, row.dtype) == (op, mode, "bfloat16"))
    return {(row.provider, row.shape): 1e3 * row.median_ms for row in found}


us = partial(results.copy_us, "decode_attention")


def promise() -> Markdown:
    """The result at the head of the notebook."""
    us_of, int8 = took(), took(INT8)
    if not (us_of and int8):
        return _NOTHING
    lines, ours, half = us_of["torch", SHAPE], us_of["gpukit", SHAPE], int8["gpukit", SHAPE]
    days = results.days(lambda row: row.shape == SHAPE and row.mode == "fwd", "decode_attention", INT8)
    return Markdown(
        f"One layer of Llama 3 8B has to compute the attention of one new token over {LONG:,} earlier ones. Written as its "
        f"formula in PyTorch, this takes **{lines:,.0f} µs** on an H200. A kernel like those that you will write takes "
        f"**{ours:.0f} µs**, and **{half:.0f} µs** if the keys and values are stored in 8 bits (measured, {days}). "
        f"PyTorch's own attention function takes {us_of['library', SHAPE]:.0f} µs. By the end you can say which bytes these times "
        "are spent on, and why eight programs, one for each head of the cache, could never read them so fast."
    )


# ---- the same work twice ---------------------------------------------------------------------------------------------


def passes() -> Picture:
    """A prompt of three tokens and three new ones: which tokens go through the model in each pass."""
    prompt, new = 3, 3
    with diagram.canvas(18, 4.7) as ax:
        for left, name in ((0.2, "without a cache"), (9.6, "with a cache")):
            diagram.text(ax, left, 0.4, name, align="left", bold=True)
            for step in range(new):
                y, known = 0.9 + 1.0 * step, prompt + step
                diagram.text(ax, left, y + 0.45, f"pass {step + 1}", align="left", size=9)
                for token in range(known):
                    again = token < known - 1 if step else False
                    kept = again and left > 5
                    colour = "none" if kept else style.WASTE if again and step else style.READS
                    diagram.box(ax, left + 1.5 + token, y, 1, 0.9, str(token), colour, size=9, dashed=kept)
                diagram.arrow(ax, (left + 1.6 + known, y + 0.45), (left + 2.2 + known, y + 0.45))
                diagram.text(ax, left + 2.4 + known, y + 0.45, f"token {known}", align="left", size=9)
        diagram.text(ax, 0.2, 4.3, "blue: computed for the first time     orange: computed again", align="left", size=9)
        diagram.text(ax, 9.6, 4.3, "dashed: not computed, keys and values read from the cache", align="left", size=9)
    return diagram.picture(
        ax, alt="A prompt of 3 tokens and 3 passes. Without a cache the passes compute 3, 4 and 5 tokens, all but the last "
        "of each for the second or third time. With a cache they compute 3, 1 and 1.",
    )  # fmt: skip


def passed_through(model: SmallModel) -> list[int]:
    """A list to which every later pass of the model adds how many tokens it was given."""
    passed: list[int] = []
    model.token.register_forward_hook(lambda _, given, out: passed.append(given[0].numel()))
    return passed


def what_passed(plain: Tensor, written: Tensor, without: int, with_one: int) -> str:
    """plain, written: the text without and with a cache; then the tokens that passed through the model."""
    new = plain.shape[1]
    prompt = with_one - new + 1
    same = "The model wrote the same text both times" if torch.equal(plain, written) else "The two texts differ"
    return (
        f"**What you saw.** {same}. Without a cache the passes had {prompt}, {prompt + 1}, and so on up to "
        f"{prompt + new - 1} tokens, {without} in all. With a cache the {prompt} tokens of the prompt passed once, and "
        f"then each new token once. The last one did not pass, because no token follows it: {prompt} + {new - 1} = {with_one}. "
        f"So without a cache {without / with_one:.0f} times as many tokens pass here. The factor grows with the text, because the first number "
        "grows with the square of the length, and the second in proportion to it."
    )


class Cache:
    """What a SmallModel asks of a cache, around a function with the arguments of the exercise kv_cache.attend."""

    def __init__(self, attend: Callable[..., tuple[Tensor, Tensor, Tensor]], max_tokens: int, heads: int, D: int):
        self.attend_tokens, self.max_tokens = attend, max_tokens
        self.k, self.v = (torch.full((1, max_tokens, heads, D), torch.nan) for _ in range(2))
        self.lengths = torch.zeros(1, dtype=torch.int32)

    @property
    def longest(self) -> int:
        return int(self.lengths)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        new = [x.transpose(1, 2) for x in (q, k, v)]
        o, self.k, self.v = self.attend_tokens(*new, self.k, self.v, self.longest)
        self.lengths += q.shape[2]
        return o.transpose(1, 2)


def your_text(model: SmallModel, prompt: Tensor, plain: Tensor) -> None:
    """Print what the model writes with the learner's `attend`, and how far it agrees with the text without a cache."""
    model, prompt, plain = model.cpu(), prompt.cpu(), plain.cpu()
    max_tokens = prompt.shape[1] + plain.shape[1] - 1
    try:
        attend = gpukit.exercise("kv_cache").attend
        caches = [Cache(attend, max_tokens, model.kv_heads, model.head_size) for _ in range(model.layers)]
        yours = generate(model, prompt, plain.shape[1], caches)
    except Exception as error:
        print(f"not yet: {type(error).__name__}: {error}")
        return
    print(f"without a cache: {plain[0].tolist()}")
    print(f"with yours:      {yours[0].tolist()}")
    agree = int((yours == plain).cumprod(1).sum())
    print(f"{agree} of {plain.shape[1]} tokens agree, counted from the first one on")


def _one_token(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, length: int):
    """`attend` for a prompt in an empty cache, or a single token after it."""
    end = length + q.shape[1]
    k_cache[:, length:end], v_cache[:, length:end] = k, v
    heads_first = (x.transpose(1, 2) for x in (q, k_cache[:, :end], v_cache[:, :end]))
    o = F.scaled_dot_product_attention(*heads_first, is_causal=length == 0, enable_gqa=True)
    return o.transpose(1, 2), k_cache, v_cache


def one_more_token() -> Picture | Missing:
    """CPU time for one more token after 64 to 512 others: all computed again, and keys and values kept."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that other processes do not matter
    wide = SmallModel(256, 4, 8, 2, 32, max_tokens=512).requires_grad_(False)
    tokens = torch.randint(256, (1, 512), generator=torch.Generator().manual_seed(1))
    ms: dict[str, list[tuple[int, float]]] = {"all again": [], "kept": []}
    for n in (64, 128, 256, 512):
        caches = [Cache(_one_token, n, wide.kv_heads, wide.head_size) for _ in range(wide.layers)]
        wide(tokens[:, : n - 3], caches)
        steps = partial(wide, tokens[:, :n]), partial(wide, tokens[:, n - 1 : n], caches)
        for taken, step in zip(ms.values(), steps, strict=True):
            taken.append((n, 1e3 * min(repeat(step, timer=process_time, number=1, repeat=3))))
    torch.set_num_threads(threads)
    return times.curve(ms, x="tokens so far", y="CPU time (ms)", title="One more token, one core", log="xy")


# ---- FLOPs per byte --------------------------------------------------------------------------------------------------


def who_reads_what() -> Picture:
    """One decode step of three sequences: the weights are read once for all, each cache for its own sequence."""
    with diagram.canvas(18, 5.4) as ax:
        diagram.text(ax, 0.2, 0.4, "in memory", align="left", bold=True)
        diagram.text(ax, 6.9, 0.4, "one new token for each", align="left", bold=True)
        diagram.text(ax, 13.2, 0.4, "in memory", align="left", bold=True)
        diagram.box(ax, 0.2, 0.9, 3.8, 4.1, "weights:\nread once,\nused by all", style.READS)
        for i in range(3):
            y = 0.9 + 1.45 * i
            diagram.box(ax, 6.9, y, 4.0, 1.2, f"sequence {i + 1}", diagram.PALE)
            diagram.box(ax, 13.2, y, 4.4, 1.2, f"cache of sequence {i + 1}", style.PEER)
            diagram.arrow(ax, (4.0, y + 0.6), (6.9, y + 0.6), colour=style.READS)
            diagram.arrow(ax, (13.2, y + 0.6), (10.9, y + 0.6), colour=style.PEER)
    return diagram.picture(
        ax,
        alt="In one step the weights are read once and serve three sequences. Each of the three caches is read for its "
        "own sequence alone.",
    )


def intensity(batch: int, new: int = 1, tokens: int = STORY) -> tuple[float, float]:
    """FLOPs per byte of weights, and per byte of cache, of Llama 3 8B: `new` tokens for each of `batch` sequences."""
    step = decode_step(LLAMA, batch, tokens)
    products = 2 * batch * new * step.weights_bytes / 2  # a multiplication and an addition for each weight and token
    scores = 4 * batch * new * LLAMA.layers * LLAMA.heads * LLAMA.head_size * tokens  # q k, and weights times v
    return products / step.weights_bytes, scores / step.cache_bytes


def intensity_table() -> Table:
    steps = (("prefill of 1,024 tokens", 1, 1024), *(("decode", batch, 1) for batch in (1, 16, 64)))
    rows = [(what, batch, *intensity(batch, new)) for what, batch, new in steps]
    columns = {"step": "", "batch": "sequences", "weights": "FLOPs per byte", "cache": "FLOPs per byte"}
    caption = f"Llama 3 8B, bf16, {STORY:,} tokens cached: computed; ridge of an H200: {RIDGE:.0f} FLOPs per byte"
    return style.table(columns, rows, caption=caption, formats=dict.fromkeys(("weights", "cache"), ",.0f"))


def what_the_intensity_says() -> str:
    weights, cache = intensity(64)
    return (
        "**What you saw.** For each byte of weights the step does as many FLOPs as there are sequences in the batch: "
        f"{weights:.0f} for 64. That is {weights / RIDGE:.0%} of the ridge, so a decode step waits for its weights up to a "
        f"batch of about {RIDGE:.0f}. For each byte of cache it does {cache:.0f} FLOPs, whatever the batch is, because four "
        "query heads share one head of the cache and no other sequence reads it. A larger batch cannot help there. Only a "
        "prefill does more FLOPs per byte than the ridge in both columns, since all its tokens share the bytes that are read."
    )


def decoding_board():
    """The calculator of tokens per second, at the running story's 8,192 tokens."""
    return decoding.decoding("llama3-8b", gpu="h200", batch=1, tokens=STORY)


def even_batch() -> int:
    """The first batch whose caches are more bytes than the weights."""
    step = decode_step(LLAMA, 1, STORY)
    return int(step.weights_bytes / step.cache_bytes) + 1


def gains(batch: int) -> dict[str, float]:
    """How many times as many tokens per second weights of 4 bits and a cache of 8 give, each alone."""
    rate = lambda *dtypes: decode_step(LLAMA, batch, STORY, *dtypes).tokens_per_s(H200)  # noqa: E731
    return {"weights of 4 bits": rate("int4") / rate(), "cache of 8 bits": rate("bf16", "int8") / rate()}


def what_the_board_says() -> Markdown:
    """The answers to the calculator's questions, folded."""
    small, large = gains(4), gains(64)
    alone, many = (decode_step(LLAMA, batch, STORY) for batch in (1, 64))
    return Markdown(
        "<details><summary>Answers</summary>\n\n"
        f"The weights are {alone.weights_bytes / 1e9:.1f} GB and one cache is {alone.cache_bytes / 1e9:.2f} GB, so from a "
        f"batch of {even_batch()} on the caches take more bytes. At batch 4, weights of 4 bits give "
        f"{small['weights of 4 bits']:.2f} times as many tokens per second, and a cache of 8 bits "
        f"{small['cache of 8 bits']:.2f} times. At batch 64 it is the other way round: {large['weights of 4 bits']:.2f} "
        f"and {large['cache of 8 bits']:.2f}. From batch 1 to batch 64 all sequences together generate "
        f"{many.tokens_per_s(H200) / alone.tokens_per_s(H200):.0f} times as many tokens per second, but each of them waits "
        f"{many.ms(H200) / alone.ms(H200):.1f} times as long for its next token (modelled, at the data sheet's bandwidth). "
        "Memory soon limits even larger batches: at 256 the caches no longer fit.\n</details>"
    )


# ---- where a token lies ----------------------------------------------------------------------------------------------


def layouts() -> Picture:
    """Where the keys of one token lie in memory, for a cache with heads before tokens and one with tokens before heads."""
    heads, slots, token = 3, 5, 3
    colours = (style.READS, style.COMPUTE, style.YOURS)
    with diagram.canvas(18, 5.2) as ax:
        for y, name, by_head in ((0.4, "[B, H, T_max, D]", True), (2.9, "[B, T_max, H, D]", False)):
            diagram.text(ax, 0.2, y, name, align="left", code=True)
            for place in range(heads * slots):
                head, t = divmod(place, slots) if by_head else (place % heads, place // heads)
                filled = t <= token
                colour = colours[head] if t == token else diagram.PALE if filled else "none"
                diagram.box(
                    ax, 0.2 + 1.17 * place, y + 0.4, 1.17, 1.0, f"t {t}\nh {head}" if filled else "", colour, size=8
                )
        diagram.text(
            ax, 0.2, 5.0, "memory runs from left to right; colored: the new token t 3; outlined: still free", align="left",
            size=9,
        )  # fmt: skip
    return diagram.picture(
        ax, alt="Memory of a cache with 3 heads and room for 5 tokens. With heads before tokens the new token's three "
        "vectors lie in three places; with tokens before heads they lie side by side, in one piece.",
    )  # fmt: skip


def layout_said(moved: Sequence[int], heads: int) -> tuple[Table, str]:
    """moved: bytes of appending by torch.cat, with heads before tokens, and with tokens before heads."""
    names, pieces = ("torch.cat", "[B, H, T_max, D]", "[B, T_max, H, D]"), ("a new tensor", heads, 1)
    columns = {"cache": "", "moved": "bytes", "pieces written": ""}
    rows = list(zip(names, moved, pieces, strict=True))
    table = style.table(
        columns, rows, caption=f"keys of one token appended to 4,096, {heads} heads of 128 in bf16: counted"
    )
    grown, in_place = moved[0], moved[-1]
    return table, (
        f"**What you saw.** `torch.cat` makes a new tensor and copies all old keys into it: {grown / 1e6:.1f} MB for a "
        f"token of {in_place // 2:,} bytes, {grown / in_place:,.0f} times what is needed. Copying at every step makes the "
        "work grow with the square of the length again, which is what the cache was meant to avoid. Writing into a tensor "
        "that is large enough from the start moves only the new token, read once and written once, in either layout."
    )


def one_query() -> Picture:
    """One program of `decode`: a query, its sequence's blocks of keys and values, and slots that it must not read."""
    with diagram.canvas(18, 6.0) as ax:
        diagram.text(
            ax, 0.2, 0.4, "one head of one sequence in the cache: T_max = 10 slots, length = 7", align="left", bold=True
        )
        for t in range(10):
            used = t < 7
            colour = style.READS if t // 4 == 1 and used else diagram.PALE if used else "none"
            diagram.box(
                ax, 0.2 + 1.3 * t, 0.8, 1.3, 1.0, f"token {t}" if used else "?", colour, size=8.5, dashed=not used
            )
        for block, name in enumerate(("block 0", "block 1, at work")):
            left = 0.25 + 5.2 * block
            ax.plot([left, left + 5.1], [2.05, 2.05], color=style.INK, lw=1.5)
            diagram.text(ax, left + 2.5, 2.35, name, size=9)
        diagram.text(ax, 13.5, 1.3, "?: never written,\nmay be NaN", align="left", size=9)
        diagram.box(ax, 0.2, 3.0, 17.4, 2.7, "", "none")
        diagram.text(ax, 0.5, 3.4, "one program, on an SM", align="left", bold=True)
        diagram.box(ax, 0.7, 3.9, 2.6, 1.4, "q, one row\nof D numbers", diagram.PALE, size=9)
        diagram.box(ax, 5.6, 3.9, 3.8, 1.4, "scores of a block,\n-inf past the length", style.WASTE, size=9)
        diagram.box(ax, 11.6, 3.9, 3.8, 1.4, "m, l and acc:\nthe query's state", style.COMPUTE, size=9)
        diagram.arrow(ax, (3.4, 4.6), (5.5, 4.6))
        diagram.arrow(ax, (9.5, 4.6), (11.5, 4.6))
        diagram.arrow(ax, (7.6, 2.6), (7.6, 3.85), colour=style.READS)
    return diagram.picture(
        ax, alt="A cache with 10 slots of which 7 are in use. A program walks over blocks of 4 tokens; in block 1 the last "
        "slot lies past the length, was never written, and gets the score -inf. The state m, l, acc stays in the program.",
    )  # fmt: skip


# ---- shared heads ----------------------------------------------------------------------------------------------------


def shared_heads() -> Picture:
    """Four query heads on one head of the cache: a program for each, or one program for all."""
    with diagram.canvas(18, 5.4) as ax:
        for left, name in ((0.2, "a program for each query head"), (9.8, "one program for the group")):
            diagram.text(ax, left, 0.4, name, align="left", bold=True)
            diagram.box(ax, left, 0.9, 7.6, 1.0, "one head of the cache", style.READS)
            packed = left > 5
            if packed:
                diagram.box(ax, left, 3.4, 7.6, 1.6, "", style.COMPUTE, alpha=0.25)
                diagram.arrow(ax, (left + 3.8, 1.9), (left + 3.8, 3.4), "loaded once", style.READS)
            for i in range(4):
                x = left + 0.1 + 1.9 * i
                diagram.box(ax, x, 3.7, 1.7, 1.0, f"query {i}", style.COMPUTE if packed else diagram.PALE, size=9)
                if not packed:
                    diagram.arrow(ax, (x + 0.85, 1.9), (x + 0.85, 3.65), colour=style.READS)
            if not packed:
                diagram.text(ax, left + 3.8, 5.1, "loaded four times", color=style.READS, size=9)
    return diagram.picture(
        ax, alt="Left, four programs with one query each load the same head of the cache four times. Right, one program "
        "holds the four queries as rows of a matrix and loads it once.",
    )  # fmt: skip


def attention_intensity(name: str) -> float:
    """FLOPs per byte of cache of a model's attention in decode, if each byte is loaded once for all query heads."""
    return _intensity_of(models.preset(name))


def _intensity_of(c: models.Config) -> float:
    sizes = (c.kv_rank + c.rope_size, c.kv_rank) if c.kv_rank else (c.qk_size, c.value_size)
    return 2 * c.layers * c.heads * sum(sizes) / decode_step(c, 1, 1).cache_bytes


ONE_HEAD = "llama3-8b, if one head served all"


def groups_table() -> Table:
    shown = {name: models.preset(name) for name in ("gpt2-xl", "llama3-8b")}
    shown[ONE_HEAD] = replace(shown["llama3-8b"], kv_heads=1)
    shown |= {name: models.preset(name) for name in ("qwen2.5-7b", "llama3-405b", "deepseek-v3")}
    rows = []
    for name, c in shown.items():
        heads = "1, shared" if c.kv_rank else c.kv_heads
        token = decode_step(c, 1, 1).cache_bytes
        rows.append((name, c.attention, c.heads, heads, token, _intensity_of(c)))
    columns = {"model": "", "attention": "", "query heads": "", "heads in the cache": "", "per token": "bytes"}
    columns |= {"attention does": "FLOPs per byte"}
    caption = f"bf16, computed; ridge of an H200: {RIDGE:.0f} FLOPs per byte"
    return style.table(columns, rows, caption=caption, formats={"attention does": ".0f"})


def what_the_groups_say() -> str:
    large, latent = attention_intensity("llama3-405b"), attention_intensity("deepseek-v3")
    one = _intensity_of(replace(models.preset("llama3-8b"), kv_heads=1))
    return (
        "**What you saw.** In bfloat16 attention does 1 FLOP per byte for each query head that uses a head of the cache: "
        f"1 without sharing, {large:.0f} in Llama 3 405B, and {one:.0f} if the query heads of Llama 3 8B shared a single "
        f"head (no real model). All of these are far to the left of the ridge at {RIDGE:.0f}. "
        "DeepSeek-V3 is the exception. It keeps one vector of 576 numbers per token for all heads, so 128 query heads "
        f"share each byte, and most bytes serve twice, as key and as value: "
        f"{latent:.0f} FLOPs per byte. Of these models it is the only one whose attention waits for arithmetic."
    )


# ---- parts -----------------------------------------------------------------------------------------------------------


def splitting() -> Picture:
    """One head's tokens in three parts, each a program, and the three states that are joined."""
    with diagram.canvas(18, 5.6) as ax:
        diagram.text(ax, 0.2, 0.4, "tokens of one head", align="left", bold=True)
        colours = (style.READS, style.COMPUTE, style.YOURS)
        for i, colour in enumerate(colours):
            left = 0.2 + 4.4 * i
            diagram.box(ax, left, 0.8, 4.4, 1.0, f"part {i}", colour)
            diagram.box(ax, left + 0.5, 3.0, 3.4, 1.4, f"m, l, acc\nof part {i}", colour)
            diagram.arrow(ax, (left + 2.2, 1.8), (left + 2.2, 3.0), f"program {i}")
            ax.plot([left + 2.2] * 2, [4.4, 5.0], color=style.INK, lw=2)
        diagram.arrow(ax, (2.4, 5.0), (14.6, 5.0))
        diagram.box(ax, 14.6, 4.2, 3.2, 1.3, "join:\no of this head", style.WRITES)
    return diagram.picture(
        ax, alt="The tokens of one head in three parts, a program for each. Every program leaves a state m, l, acc; a "
        "second step joins the three states to the output of the head.",
    )  # fmt: skip


def split_answers() -> dict[str, float]:
    """SMs without work with one program per head, parts for two programs per SM, and the parts' sums beside the cache."""
    B, H, H_kv, T, D = SHAPE
    sums = 2 * 4 * 32 * B * H * (D + 2)  # float32, written and read
    return {
        "idle SMs": 100 * (1 - B * H_kv / H200.sms),
        "parts": -(-2 * H200.sms // (B * H_kv)),
        "states of 32 parts": 100 * sums / (2 * 2 * B * T * H_kv * D),
    }


def what_the_parts_need() -> str:
    found, (B, _, H_kv, *_) = split_answers(), SHAPE
    programs = B * H_kv
    return (
        f"**What you saw.** {programs} programs keep {programs} of {H200.sms} SMs busy, and {found['idle SMs']:.0f}% of the "
        f"GPU waits. Two programs on each SM are {2 * H200.sms} programs, {found['parts']:.0f} parts of each head. The "
        f"states that the parts leave are {found['states of 32 parts']:.1f}% of the cache's bytes, next to nothing. Where SMs "
        "are idle, splitting is nearly free."
    )


def busy() -> Picture:
    """Which SMs read how many tokens of one long sequence, by parts of a head."""
    return decoding.busy(LONG, SHAPE[2], (1, 4, 16, 33), H200.sms)


def _config() -> Config:
    _, H, H_kv, _, D = SHAPE
    return config_of(H // H_kv, D, torch.bfloat16, torch.bfloat16, H200.smem_per_sm_bytes)


def chosen_parts() -> int:
    """How many parts per head the course's kernel makes of SHAPE on an H200: it asks for one program on each SM."""
    B, _, H_kv, T, _ = SHAPE
    return splits_of(B * H_kv, T, _config().BLOCK_N, H200.sms)


def modelled_us(parts: int) -> float:
    """The course's kernel for SHAPE in so many parts per head; the simulator's estimate for an H200."""
    B, H, H_kv, T, D = SHAPE
    q, k, v = (torch.empty(B, *s, D, dtype=torch.bfloat16, device="meta") for s in ((H, 1), (T, H_kv), (T, H_kv)))
    lengths = torch.full((B,), T, dtype=torch.int32)
    given = q, k, v, lengths, None, None, D**-0.5, "ieee"
    run = partial(decode_attention_fwd, *given, splits=parts, config=_config())
    found = gpukit.predict(run, gpu=H200, sample=1)  # one program is looked at: they are all alike
    return max(step.time_us for step in found.steps)


def by_parts() -> Reveal:
    """How much faster 16 parts are than 4, and what the cache's bytes take at the rate of a copy."""
    few, many = modelled_us(4), modelled_us(16)
    least = us(cache_bytes())
    gain = f"{1 - least / many:.0%} at most" if 1 - least / many >= 0.01 else "next to nothing"
    rows = [("4", 4 * SHAPE[2], few), ("16", 16 * SHAPE[2], many), ("the cache at a copy's rate", "", least)]
    table = style.table(
        {"parts": "", "programs": "", "takes": "µs"}, rows, caption="modelled for an H200", formats={"takes": ".1f"}
    )
    said = (
        f"**What you saw.** 32 programs take {few:.0f} µs and 128 programs {many:.1f} µs, so 16 parts are {few / many:.1f} times as fast. "
        "More parts help as long as there are idle SMs. With 16 parts nearly every SM has a program. The cache's "
        f"{cache_bytes() / 1e6:.0f} MB alone would need {least:.1f} µs at the rate of a copy. In the rest of the time programs wait for "
        f"blocks that are still on their way. So more parts could gain {gain} in the model. For this sequence the "
        f"course's kernel chooses {chosen_parts()} parts on an H200, one program on nearly every SM."
    )
    if clock := took(mode="fwd-graph").get(("gpukit", SHAPE)):
        said += f" In a CUDA graph it takes {clock:.1f} µs (measured)."
    return reveal("by-parts", {"16 parts, compared with 4": few / many}, how="modelled", also=[table, said])


def cache_bytes() -> int:
    """Keys and values of one layer that SHAPE reads, in 16 bits."""
    B, _, H_kv, T, D = SHAPE
    return 2 * 2 * B * T * H_kv * D


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


GRID = (0.4, -0.9, 0.7, -0.3, 1.1)  # small numbers of the picture of steps
STEPS = 3  # on each side of zero in that picture; int8 has 127


def on_the_grid(numbers: Sequence[float]) -> tuple[float, list[float]]:
    """The width of a step, and the numbers rounded to whole steps."""
    step = max(map(abs, numbers)) / STEPS
    return step, [round(value / step) * step for value in numbers]


def one_step_for_all() -> Picture:
    """A row of numbers on the steps of one scale, without and with a large number among them."""
    rows = {"all numbers are small": (*GRID, 1.2), "one number is large": (*GRID, 8.0)}
    said = []
    with style.use():
        fig, panels = style.figure(1, 2, width=10.0, height=3.2)
        for ax, (title, numbers) in zip(panels, rows.items(), strict=True):
            step, rounded = on_the_grid(numbers)
            said.append(f"{title}: {rounded[:-1].count(0)} of the five small numbers become 0")
            for level in range(-STEPS, STEPS + 1):
                ax.axhline(level * step, color=style.NEUTRAL, lw=0.8, zorder=0)
            ax.plot(range(6), numbers, "o", color=style.READS, ms=7, label="number")
            ax.plot(range(6), rounded, "s", color=style.WASTE, ms=4.5, label="stored as")
            ax.set_title(title)
            ax.set_xticks(range(6))
            style.axes(ax, x="place in the row", y="value" if ax is panels[0] else "")
        fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return style.picture(fig, alt=f"Six numbers and the steps that they are rounded to. {'; '.join(said)}.")


def real_looking() -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of one sequence, 8 heads and 2,048 tokens in float64: one channel of the keys is large in every token, and
    one token's values are large."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 8, 1, 128, generator=generator).double()
    k, v = (torch.randn(1, 8, 2048, 128, generator=generator).double() for _ in range(2))
    k[..., 5] += 25
    v[:, :, 100] *= 25
    return q, k, v


SHARING = {"the whole cache": (0, 1, 2, 3), "a channel of a head": (2,), "a token of a head": (3,)}


def int8_errors(rounded: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Table:
    """The error of attention where the keys alone, or the values alone, are rounded. rounded(x, dims): x in 8 bits, with
    one scale for all numbers along dims."""
    q, k, v = real_looking()
    attention = F.scaled_dot_product_attention
    exact, rows = attention(q, k, v), []
    for name, dims in SHARING.items():
        sharing = math.prod(k.shape[dim] for dim in dims)  # numbers with one scale
        wrong = attention(q, rounded(k, dims), v), attention(q, k, rounded(v, dims))
        rows.append((name, 8 + 32 / sharing, *(100 * _off(o, exact) for o in wrong)))
    columns = {"one scale for": "", "per element": "bits", "error from keys": "%", "error from values": "%"}
    return style.table(columns, rows, caption="2,048 tokens, 8 heads, D = 128: error of o, computed")


def _off(o: Tensor, exact: Tensor) -> float:
    return float((o - exact).norm() / exact.norm())


def what_the_errors_say(table: Table) -> Markdown:
    whole, channel, token = table.rows
    return Markdown(
        f"**What you saw.** Keys fare best with one scale per channel ({channel[2]:.1f}% against {token[2]:.1f}% with one "
        f"per token): the large channel then makes only its own steps wide. Values fare best with one scale per token "
        f"({token[3]:.1f}% against {channel[3]:.1f}%): the large token keeps its wide steps to itself. One scale for the "
        f"whole cache is worst for values ({whole[3]:.0f}%), and for keys hardly worse than one per token, because every "
        f"token contains the large channel. A scale per token costs {token[1] - 8:.2f} bits per element."
    )


# ---- what it costs ---------------------------------------------------------------------------------------------------

NAMES = {
    "torch": "formula", "compile": "compiled", "library": "SDPA", "gpukit": "this course", "sdpa-flash": "flash",
    "sdpa-cudnn": "cuDNN", "sdpa-efficient": "efficient",
}  # fmt: skip
SHORT, MANY = (1, 32, 32, 8192, 128), (16, 32, 32, 8192, 128)  # the other two recorded shapes


def measured(op: str = "decode_attention") -> Table | Missing:
    """This course's kernel beside PyTorch's; a table alone, since a line between these shapes would mean nothing."""
    found = versus(op, names=NAMES)
    return found.table if isinstance(found, Versus) else found


def what_was_measured() -> Markdown:
    """Said below the first table."""
    us_of, graph = took(), took(mode="fwd-graph")
    if not (us_of and graph):
        return _NOTHING
    model, call, alone = us(cache_bytes()), us_of["gpukit", SHAPE], graph["gpukit", SHAPE]
    few, many = (us_of["sdpa-efficient", shape] / us_of["gpukit", shape] for shape in (SHORT, MANY))
    ratios = [
        us_of[name, shape] / us_of["gpukit", shape] for name in ("sdpa-cudnn", "sdpa-flash") for shape in (SHAPE, SHORT)
    ]
    low, high = min(ratios), max(ratios)
    flash = us_of["sdpa-flash", MANY] / us_of["gpukit", MANY]
    reads = machine(H200)
    room = {
        row.provider: row.peak_bytes
        for row in results.rows("decode_attention")
        if (row.shape, row.mode) == (SHORT, "fwd")
    }
    return Markdown(
        "**What you saw.** *Formula* is the slowest everywhere. It copies the shared heads, applies a mask, and sends scores and "
        "weights through memory. Compiled, it takes a third to a quarter of the time.\n\n*Efficient* does not split. With "
        f"one sequence of 32 heads it has 32 programs for {H200.sms} SMs and takes {few:.1f} times as long as this course's kernel. With 16 "
        f"sequences it has 512, and it still takes {many:.1f} times as long, but not for lack of programs: every SM has "
        "work, and splitting would gain nothing. (Its time is missing in the first row: *efficient* cannot take "
        "grouped heads.) The memory that a call allocates shows which kernels split. At the second shape *efficient* takes "
        f"{room['sdpa-efficient']:,} bytes, which is o alone. cuDNN takes {room['sdpa-cudnn']:,} and *flash* "
        f"{room['sdpa-flash']:,}: room for the states of parts (measured). For one sequence cuDNN and *flash* take {low:.2f} to "
        f"{high:.2f} times as long as this course's kernel, and for 16 *flash* takes {flash:.1f} times as long. Their times for one sequence "
        "are *launch-bound* in the record, so they may contain some waiting for the CPU.\n\n"
        f"Why does one sequence take {call:.1f} µs where the model says {model:.1f}? In a CUDA graph the same kernel takes "
        f"{alone:.1f} µs. A likely reason for this first part of the difference is the way of measuring: before each plain "
        "call the benchmark empties the L2 cache by overwriting it, and what it wrote there goes to memory while the kernel "
        "reads. In the graph, calls take turns on copies of the inputs, and nothing is left to be written "
        f"([04 Benchmarking](04_benchmarking.ipynb)). The remaining {alone - model:.0f} µs are a fixed cost of the kernel: "
        "its programs start, wait for their first blocks, and join the parts at the end. With 16 times the bytes nothing "
        f"is left of it. There the course's kernel takes {us_of['gpukit', MANY]:.0f} µs, a little less than the model, because it "
        f"reads and hardly writes: on an H200 reading alone is {reads.read_gbps / reads.copy_gbps:.2f} times as fast as "
        "copying (measured)."
    )


def what_8_bits_gain() -> Markdown:
    """Said below the second table."""
    wide, narrow = took(), took(INT8)
    if not (wide and narrow):
        return _NOTHING
    gain = {shape: wide["gpukit", shape] / narrow["gpukit", shape] for shape in (SHAPE, SHORT, MANY)}
    bytes_of = {row.shape: row.bytes for op in ("decode_attention", INT8) for row in results.rows(op) if row.op == op}
    least = results.copy_us(INT8, bytes_of[MANY])
    return Markdown(
        f"**What you saw.** The bytes are nearly halved, and the time is not: 8 bits are {gain[SHAPE]:.2f}, "
        f"{gain[SHORT]:.2f} and {gain[MANY]:.2f} times as fast as 16 at the three shapes (plain calls, measured). For one "
        "sequence the fixed cost of starting and joining stays what it was. For 16 sequences the kernel takes "
        f"{narrow['gpukit', MANY]:.0f} µs where its bytes need {least:.0f}: every integer has to be converted to float16 "
        "before the tensor cores can use it, and these instructions are probably the limit now "
        "(so for 8 bits [the course's kernel](../gpukit/kernels/decode_attention.py) runs two programs on an SM). What you gain for certain is room: nearly twice as "
        "many tokens, or sequences, fit into memory. *SDPA* and *formula* first write out the whole cache in 16 bits."
    )


def yours() -> Markdown:
    """What the learner's split kernel loads, and its time where there is a GPU."""
    from gpukit.timing import time_ms

    device = "cuda" if torch.cuda.is_available() else "cpu"
    held = (300, 77)
    q, lengths = torch.randn(2, 8, 64).half().to(device), torch.tensor(held, dtype=torch.int32).to(device)
    k, v = (torch.randn(2, 512, 8, 64).half().to(device) for _ in range(2))
    try:
        mine = gpukit.exercise("kv_cache")
        with gpukit.trace() as trace:
            mine.decode_split(q, k, v, lengths, 4)
        least = sum(held) * 2 * 8 * 64 * 2
        text = f"Your parts load **{trace.launches[0].load_bytes:,} bytes** (counted). Keys and values are {least:,} of them."
        if device == "cuda":
            text += f" Measured here: {time_ms(mine.decode_split, q, k, v, lengths, 4)}."
    except Exception as error:
        text = f"Your kernel does not run yet ({type(error).__name__}): fill the gaps, then run this cell again."
    return Markdown(text)


# ---- the running story -----------------------------------------------------------------------------------------------


def layer_step() -> tuple[int, int]:
    """Bytes of weights and of cache that one layer of Llama 3 8B reads to decode one token for each of four sequences of
    4,096 tokens."""
    return 2 * layer.weights(), 2 * 2 * layer.TOKENS * layer.KV


def layer_line() -> Markdown:
    """The line of the layer's budget that this notebook improves."""
    try:
        again = layer.totals_us()[0]
    except (FileNotFoundError, StopIteration):
        return _NOTHING
    weights, cache = layer_step()
    step = us(weights + cache)
    half = us(weights + cache * (LLAMA.head_size + 4) / (2 * LLAMA.head_size))
    return Markdown(
        f"One layer of Llama 3 8B, one new token for each of four sequences of 4,096 tokens. Without a cache all "
        f"{layer.TOKENS:,} tokens pass through the layer again: **{again:,.0f} µs** on an H200 (sum of measured times, "
        f"PyTorch's functions). With a cache the step reads {weights / 1e6:.0f} MB of weights and {cache / 1e6:.0f} MB of "
        f"keys and values, **{step:.0f} µs** at the rate of a copy; with 8 bits in the cache **{half:.0f} µs** (computed). "
        f"At this length most of what is left is the weights, {weights / (weights + cache):.0%} of the bytes."
    )
