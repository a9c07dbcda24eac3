"""`python -m gpukit.patched_models`: training steps and generation of transformers' models, as they are and patched, on a GPU.

    python -m gpukit.patched_models --models llama-1b,gpt2 --out DIR     rows in DIR/<gpu>/<model>.csv
    python -m gpukit.patched_models                                      all models, rows in gpukit/results/<gpu>/

The models are built from configs, with random weights in bfloat16. Their providers are

    torch           the model as transformers makes it, with "sdpa" attention ("eager" where it has no other)
    compile         torch.compile of that
    liger           Liger's kernels in that, where liger_kernel is installed
    gpukit          gpukit.patch(model), and GrowingCache where text is generated
    gpukit-compile  torch.compile of that

and each is compared with torch first: the loss within 1%, and where text is generated no comparison, since one rounding
may choose another token. Modes: "fwd+bwd" is a training step without its optimizer, [B, T] tokens with labels; "wall" is
generate() of 64 tokens after [B, T], greedy, the host's time included. A row's flops are (6 N + 12 L h T) B T for N
parameters without embeddings of positions, L layers of width h, and a third of that to read the prompt; its bytes are the
parameters once. Like those of `gpukit bench`, each provider's row is the median of three rounds, in turns.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpukit import benchmark

if TYPE_CHECKING:
    import torch

PROVIDERS = ("torch", "compile", "liger", "gpukit", "gpukit-compile")
MODES = ("fwd+bwd", "wall")
NEW_TOKENS = 64
ROUNDS = 3


@dataclass(frozen=True)
class Model:
    """One model to measure.

    family    of transformers' classes, before Config and ForCausalLM
    sizes     the arguments of its config
    training  [B, T] of a training step
    prompt    [B, T] of what generate() continues
    """

    family: str
    sizes: dict = field(hash=False)
    training: tuple[int, int] = (4, 4096)
    prompt: tuple[int, int] = (8, 2048)

    def build(self, device: str) -> torch.nn.Module:
        """The model with weights that are the same at every call."""
        import torch
        import transformers

        name = "GPT2LMHeadModel" if self.family == "GPT2" else f"{self.family}ForCausalLM"
        config = getattr(transformers, f"{self.family}Config")(**self.sizes)
        torch.manual_seed(0)
        with torch.device(device):
            return getattr(transformers, name)(config).to(torch.bfloat16)


_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # dropout in attention is not for our kernel
MODELS = {
    "gpt2": Model("GPT2", _GPT2, (32, 1024), (32, 512)),
    "llama-1b": Model("Llama", {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }),
    "qwen3-0.6b": Model("Qwen3", {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }),
    "gemma-2b": Model("Gemma", {
        "vocab_size": 256000, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
    }),
}  # fmt: skip


def prepared(model: torch.nn.Module, provider: str) -> Callable | None:
    """`model` as the provider runs it, or None where the provider is not installed or does not know the model."""
    import torch

    from gpukit.huggingface.patching import patch

    if provider == "liger":
        if importlib.util.find_spec("liger_kernel") is None:
            return None
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if provider.startswith("gpukit"):
        patch(model)
    return torch.compile(model, dynamic=False) if provider.endswith("compile") else model


def run(
    name: str,
    providers: Sequence[str] = PROVIDERS,
    modes: Sequence[str] = MODES,
    *,
    device: str = "cuda",
    out: Path | None = None,
    rep_ms: float = 1000,
    commit: str = "",
    say: Callable[[str], None] = print,
) -> list[benchmark.Row]:
    """Measure one of MODELS and return its rows, which are also written to the file `out`, if one is given.

    Raises ValueError for an unknown model, provider or mode; BenchmarkFailed, after the rows are written, where a provider's
    loss is not torch's.
    """
    import torch

    for what, given, known in (("model", [name], MODELS), ("providers", providers, PROVIDERS), ("modes", modes, MODES)):
        if unknown := [x for x in given if x not in known]:
            raise ValueError(f"{what} must be among {', '.join(known)}, got {', '.join(unknown)}")
    model = MODELS[name]
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    shared = benchmark.identity(gpu, commit)
    rows, failures = [], []
    for mode in modes:
        B, T = model.training if mode == "fwd+bwd" else model.prompt
        ids = torch.randint(2, 60, (B, T), generator=torch.Generator().manual_seed(0)).to(device)
        calls, true_loss = {}, None
        for provider in dict.fromkeys(["torch", *providers]):  # torch says what the loss is
            run_model = prepared(model.build(device), provider)
            if run_model is None:
                say(f"{provider} is not installed, skipped")
                continue
            ours = provider.startswith("gpukit")
            calls[provider] = (
                partial(_step, run_model, ids) if mode == "fwd+bwd" else partial(_generate, run_model, ids, ours)
            )
            if mode == "fwd+bwd":
                loss = float(calls[provider]())
                true_loss = loss if true_loss is None else true_loss
                if abs(loss - true_loss) > 0.01 * abs(true_loss):
                    failures.append(f"{name}: {provider}'s loss is {loss:.4f}, torch's {true_loss:.4f}")
                    say(failures[-1])
                    del calls[provider]
        if "torch" not in providers:
            del calls["torch"]
        flops, parameter_bytes = _cost(model, mode, device)
        rows += _timed(calls, mode, (B, T), flops, parameter_bytes, device, rep_ms, f"patch-{name}", shared, say)
        del calls
        gc.collect()
        if out is not None:
            benchmark.write(rows, out)
    if failures:
        raise benchmark.BenchmarkFailed("; ".join(failures))
    return rows


def _step(model: Callable, ids: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def _generate(model: Callable, ids: torch.Tensor, ours: bool = False) -> torch.Tensor:
    """ours: with gpukit's cache in place of transformers' own."""
    from gpukit.huggingface.cache import GrowingCache

    return model.eval().generate(
        ids, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0,
        past_key_values=GrowingCache() if ours else None,
    )  # fmt: skip


def _cost(model: Model, mode: str, device: str) -> tuple[int, int]:
    """FLOPs of one call, as the module's docstring counts them, and the bytes of the parameters."""
    built = model.build("meta")
    config = built.config
    parameters = sum(p.numel() for name, p in built.named_parameters() if "wpe" not in name)
    (B, T), layers, width = model.training, config.num_hidden_layers, config.hidden_size
    if mode == "wall":
        B, T = model.prompt
    flops = (6 * parameters + 12 * layers * width * T) * B * T
    return (flops if mode == "fwd+bwd" else flops // 3), 2 * parameters


def _timed(calls, mode, shape, flops, parameter_bytes, device, rep_ms, op, shared, say) -> list[benchmark.Row]:
    from gpukit.timing import NotTimed, time_ms

    rounds: dict[str, list] = {name: [] for name in calls}
    peaks = {}
    for turn in range(ROUNDS if device == "cuda" else 1):
        for name in [*calls][:: -1 if turn % 2 else 1]:
            try:
                rounds[name].append(time_ms(calls[name], wall=mode == "wall", rep_ms=rep_ms, device=device))
            except NotTimed as error:
                say(f"{name}: {error}")
                continue
            peaks[name] = benchmark.peak_bytes(calls[name], (), device)
    rows = []
    for name, times in rounds.items():
        if times:
            timing = sorted(times, key=lambda timing: timing.median_ms)[len(times) // 2]
            spread = timing.median_ms, timing.p20_ms, timing.p80_ms
            given = op, name, mode, "bfloat16", shape, *spread, parameter_bytes, flops, peaks[name]
            rows.append(benchmark.Row(*given, **shared, sm_mhz=timing.sm_mhz))
            say(f"{benchmark.line(rows[-1])}  {peaks[name] / 2**30:.2f} GiB")
    return rows


def main(argv: list[str] | None = None) -> int:
    """The exit status: 1 where a result was wrong, 2 where nothing could be measured."""
    parser = argparse.ArgumentParser(prog="python -m gpukit.patched_models", description=__doc__.split("\n")[0])
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--models", type=words, default=[*MODELS], metavar="llama-1b,gpt2", help="default: all")
    parser.add_argument("--providers", type=words, default=[*PROVIDERS], metavar="torch,gpukit", help="default: all")
    parser.add_argument("--modes", type=words, default=[*MODES], metavar="fwd+bwd,wall", help="default: both")
    parser.add_argument(
        "--rep-ms", type=float, default=1000, metavar="N", help="time for each row (default: %(default)s)"
    )
    parser.add_argument("--commit", default="", help="of the code measured (default: GPUKIT_COMMIT, else git's)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write DIR/<gpu>/ (default: gpukit/results)")
    given = parser.parse_args(argv)
    import torch

    if importlib.util.find_spec("transformers") is None or not torch.cuda.is_available():
        missing = "a GPU" if importlib.util.find_spec("transformers") else 'transformers: pip install "gpukit[hf]"'
        print(f"gpukit.patched_models needs {missing}; nothing was measured", file=sys.stderr)
        return 2
    folder = (given.out or benchmark.RESULTS) / benchmark.gpu_key(torch.cuda.get_device_name())
    status = 0
    for name in given.models:
        try:
            run(
                name, given.providers, given.modes, out=folder / f"patch-{name}.csv", rep_ms=given.rep_ms,
                commit=given.commit,
            )  # fmt: skip
        except ValueError as error:
            print(f"gpukit.patched_models: {error}", file=sys.stderr)
            return 2
        except benchmark.BenchmarkFailed as error:
            print(f"gpukit.patched_models: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
