"""The commands `gpukit memory` and `gpukit flops`: their options, and the lines that they print."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial

from gpukit.accounting import memory, models, pencil
from gpukit.accounting.arguments import BadArgument

# What an argument of the calculators is called on the command line, where that is not its own name behind two hyphens.
_FLAGS = {"tokens": "--seq", "their number": "--gpus", "parameters": "--model"}
_TRAINING = ("recipe", "zero", "sequence_parallel", "micro_batches", "attention", "recompute", "dropout")
_SERVING = ("weights", "cache")
_SEQ = "tokens of a sequence (default: 4096, or the model's own length if that is less)"


def memory_command(parser: argparse.ArgumentParser) -> None:
    """Give `parser` its options, and `lines`, which makes the answer of them. It raises ValueError for a bad one."""
    _model(parser, f"one of {', '.join(models.PRESETS)}")
    parser.add_argument("--batch", default="1", metavar="N", help="sequences of one step, over all GPUs (default: 1)")
    parser.add_argument("--seq", metavar="N", help=_SEQ)
    parser.add_argument("--gpus", default="1xh100", metavar="NxGPU", help="for instance 8xh100 (default: 1xh100)")
    parser.add_argument("--tensor", metavar="N", help="GPUs that divide each matrix (default: 1; serving: all)")
    parser.add_argument("--pipeline", default="1", metavar="N", help="stages of layers (default: 1)")

    train = parser.add_argument_group("training")
    train.add_argument("--recipe", default="bf16-adamw", metavar="NAME", help=f"one of {', '.join(memory.RECIPES)}")
    train.add_argument("--zero", default="0", metavar="STAGE", help="0 to 3 (default: 0)")
    train.add_argument(
        "--sequence-parallel", action="store_true", help="--tensor divides what lies between matrices too"
    )
    train.add_argument("--micro-batches", default="1", metavar="N", help="forward passes of a step (default: 1)")
    train.add_argument("--attention", default="flash", metavar="KIND", help="flash (default) or eager")
    train.add_argument("--recompute", default="none", metavar="WHAT", help="none (default), selective or full")
    train.add_argument("--dropout", action="store_true", help="with dropout")

    serve = parser.add_argument_group("serving")
    serve.add_argument("--serve", action="store_true", help="weights and KV cache instead of a training step")
    serve.add_argument("--weights", default="bf16", metavar="DTYPE", help="of the weights (default: bf16)")
    serve.add_argument("--cache", default="bf16", metavar="DTYPE", help="of the KV cache (default: bf16)")
    parser.set_defaults(lines=partial(_named_by_flags, partial(_memory, parser)))


def _memory(parser: argparse.ArgumentParser, args: argparse.Namespace) -> list[str]:
    for name in _TRAINING if args.serve else _SERVING:
        if getattr(args, name) != parser.get_default(name):
            when = "a training step and has no meaning with --serve" if args.serve else "serving: add --serve"
            raise ValueError(f"--{name.replace('_', '-')} is an option of {when}")
    batch = pencil.count(args.batch, "--batch")
    usual = pencil.usual_length(models.preset(args.model))
    tokens = usual if args.seq is None else pencil.count(args.seq, "--seq")
    pipeline = pencil.count(args.pipeline, "--pipeline")
    tensor = None if args.tensor is None else pencil.count(args.tensor, "--tensor")
    if args.serve:
        layout = {"tensor": tensor, "pipeline": pipeline}
        return pencil.inference_lines(
            args.model, batch, tokens, args.gpus, weights=args.weights, cache=args.cache, **layout
        )
    micro_batches = pencil.count(args.micro_batches, "--micro-batches")
    return pencil.memory_lines(
        args.model, batch, tokens, args.gpus, recipe=args.recipe, zero=pencil.count(args.zero, "--zero"), tensor=tensor or 1,
        pipeline=pipeline, sequence_parallel=args.sequence_parallel, attention=args.attention, recompute=args.recompute,
        micro_batches=micro_batches, dropout=args.dropout,
    )  # fmt: skip


def flops_command(parser: argparse.ArgumentParser) -> None:
    """As `memory_command`."""
    _model(parser, f"a number of parameters such as 70B, or one of {', '.join(models.PRESETS)}")
    parser.add_argument("--tokens", required=True, metavar="N", help="that the model is trained on, for instance 15T")
    parser.add_argument("--gpus", default="1xh100", metavar="NxGPU", help="for instance 1024xh100 (default: 1xh100)")
    parser.add_argument("--mfu", default="0.4", metavar="SHARE", help="of the dense peak, above 0 to 1 (default: 0.4)")
    parser.add_argument("--seq", metavar="N", help=_SEQ)
    parser.add_argument("--dtype", default="bf16", help="whose peak is meant (default: bf16)")
    parser.add_argument("--watts", metavar="W", help="of one GPU and its share of the rest, for the energy")
    parser.add_argument("--price", metavar="P", help="of a GPU-hour, in any currency")
    parser.set_defaults(lines=partial(_named_by_flags, _flops))


def _flops(args: argparse.Namespace) -> list[str]:
    seq = None if args.seq is None else pencil.count(args.seq, "--seq")
    texts = {name: getattr(args, name) for name in ("mfu", "watts", "price")}
    given = {name: None if text is None else pencil.real(text, f"--{name}") for name, text in texts.items()}
    return pencil.flops_lines(
        args.model, pencil.count(args.tokens, "--tokens"), args.gpus, seq=seq, dtype=args.dtype, **given
    )


def _named_by_flags(lines: Callable[[argparse.Namespace], list[str]], args: argparse.Namespace) -> list[str]:
    """`lines`, with the options of the command in its errors in place of the calculators' arguments."""
    try:
        return lines(args)
    except BadArgument as error:
        name, rule = error.name, error.rule
        flag = _FLAGS.get(name) or (f"--{name.replace('_', '-')}" if name in args else _given(args, rule))
        flag = "--tokens" if name == "tokens" and "tokens" in args else flag or name
        raise ValueError(f"{flag} {rule}") from error
    except ValueError as error:
        found = re.fullmatch(r"(?:\w+: )?(\w+)( must .*)", str(error))
        if not found or found[1] not in args:
            raise
        raise ValueError(f"--{found[1].replace('_', '-')}{found[2]}") from error


def _given(args: argparse.Namespace, rule: str) -> str:
    """The option whose value a rule says it got, "" where that is none or several."""
    value = rule.rpartition("got ")[2].strip("'")
    names = [name for name, given in vars(args).items() if given == value]
    return f"--{names[0].replace('_', '-')}" if len(names) == 1 else ""


def _model(parser: argparse.ArgumentParser, words: str) -> None:
    parser.add_argument("--model", required=True, metavar="NAME", help=words)
