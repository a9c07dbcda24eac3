"""The command `gpukit train`, which is also `python -m gpukit.train` for torchrun: its options, and what they set off."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gpukit import tables
from gpukit.course import CourseError
from gpukit.train import presets
from gpukit.train.presets import Settings

# Options that change a setting of the same name: (name, type, help).
_NUMBERS = (
    ("steps", int, "optimizer steps of the whole run"),
    ("seq", int, "tokens of a sequence"),
    ("batch", int, "sequences per step, over all processes"),
    (
        "micro_batches",
        int,
        "parts of a batch that are computed one after the other: more of them need less memory",
    ),
    ("rate", float, "the highest learning rate"),
    ("warmup", int, "steps in which the learning rate rises"),
    ("seed", int, "of weights, order of the text and samples"),
    ("log_every", int, "steps between two lines of progress"),
    ("eval_every", int, "steps between two evaluations"),
    ("checkpoint_every", int, "steps between two checkpoints"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` the command's options."""
    names = "; ".join(f"{name}: {preset.about}" for name, preset in presets.PRESETS.items())
    parser.add_argument("--preset", metavar="NAME", help=f"what is trained (default: tiny). {names}")
    parser.add_argument(
        "--run",
        "--folder",
        dest="folder",
        metavar="DIR",
        help="folder of the run (default: runs/ and the preset's name); torchrun takes --run for its own, so write --folder there",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in that folder, from its last checkpoint"
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what the run would take, and end")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: the GPU if there is one"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help="with --dry-run: plan for this GPU, such as h200, instead of this machine"
    )
    parser.add_argument(
        "--ladder",
        action="store_true",
        help="instead of a run: measure a step as it is made fast by one change at a time",
    )
    parser.add_argument("--rungs", metavar="NAMES", help="with --ladder: only these changes, separated by commas")
    parser.add_argument(
        "--text", metavar="DIR", help="train on the Python files in DIR (default: Python's standard library)"
    )
    parser.add_argument("--dtype", choices=presets.DTYPES, help="of the matrix products")
    parser.add_argument("--optimizer", choices=presets.OPTIMIZERS, help="whose AdamW")
    parser.add_argument("--kernels", choices=presets.KERNELS, help="whose attention and loss")
    parser.add_argument(
        "--compile",
        action="store_true",
        default=None,
        help="let torch.compile fuse the model's operators: the first step takes a minute, the others less time",
    )
    parser.add_argument(
        "--sharding",
        choices=presets.SHARDINGS,
        help="with torchrun: each process holds the whole model (ddp, the default) or a share of it (fsdp)",
    )
    parser.add_argument(
        "--recompute",
        choices=presets.RECOMPUTE,
        help="full: keep only the blocks' inputs for the backward pass, and compute the rest again; less memory, more time",
    )
    for name, kind, text in _NUMBERS:
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, metavar="N", help=f"{text} (default: the preset's)"
        )


def changes(args: argparse.Namespace) -> dict[str, object]:
    """The settings that were given on the command line."""
    names = (
        "text",
        "dtype",
        "optimizer",
        "kernels",
        "compile",
        "sharding",
        "recompute",
        *(name for name, *_ in _NUMBERS),
    )
    given = {name: getattr(args, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def run(args: argparse.Namespace) -> int:
    """Train as the arguments say. Returns the exit status: 0; 1 where the loss became NaN; 130 after Ctrl-C, 143 after SIGTERM.
    Raises CourseError for a mistake in the arguments."""
    try:
        return _run(args)
    except ValueError as error:
        raise CourseError(str(error)) from None


def _run(args: argparse.Namespace) -> int:
    if args.rungs and not args.ladder:
        raise CourseError("--rungs names changes of the ladder: add --ladder")
    if args.ladder:
        return _ladder(args, presets.preset(args.preset or "tiny").settings)
    folder = Path(args.folder or Path("runs", args.preset or "tiny"))
    settings = _resumed(args, folder) if args.resume else presets.preset(args.preset or "tiny").settings
    settings = settings.replace(**changes(args))
    if args.gpu and not args.dry_run:
        raise CourseError("--gpu plans for a GPU that need not be here: add --dry-run")
    if not args.resume and not args.dry_run and (folder / "config.json").exists():
        raise CourseError(f"{folder} holds a run already: --resume goes on with it, and --run names another folder")

    from gpukit import hardware
    from gpukit.train import plan

    if args.gpu:
        from gpukit.train import ranks

        here = ranks.started()
        for line in plan.lines(settings, hardware.gpu(args.gpu), here.world) if here.main else ():
            print_line(line)
        return 0

    import torch  # here, since it takes seconds, and a mistake is said at once

    from gpukit.train import data, ranks
    from gpukit.train.loop import NotFinite, Trainer

    torch.set_num_threads(presets.threads(settings, torch.get_num_threads()))
    kind = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise CourseError("--device cuda: PyTorch sees no GPU here (gpukit doctor says why)")
    with ranks.joined(kind) as joined:
        say = print_line if joined.main else lambda line: None
        gpu, name = None, "this CPU"
        if kind == "cuda":
            name = torch.cuda.get_device_name(joined.local_rank)
            try:
                gpu = hardware.gpu(name)
            except ValueError:
                say(f"gpukit's table of hardware has no {name}")
        if kind == "cpu" and args.device == "auto" and presets.preset(settings.preset).needs_gpu and not args.dry_run:
            raise CourseError(
                f"there is no GPU here, and {settings.preset} would take very long without one: --preset tiny is made for a CPU; "
                f"--dry-run says what {settings.preset} takes, and --device cpu starts it all the same"
            )
        for line in plan.lines(settings, gpu, joined.world) if joined.main and (gpu or kind == "cpu") else ():
            say(line)
        if args.dry_run:
            return 0
        config = plan.accounting_config(settings.preset, settings.model)
        say(plan.mfu_formula(config, settings, gpu, joined.world, name))
        device = torch.device(kind, joined.local_rank) if kind == "cuda" else torch.device("cpu")
        text = Path(settings.text) if settings.text else None
        corpus = data.prepare(settings.model["vocab_size"], text, say=say)
        trainer = Trainer(settings, folder, corpus, device=device, gpu=gpu, ranks=joined, resume=args.resume, say=say)
        if trainer.step >= settings.steps:
            say(f"all {settings.steps:,} steps are done: --steps with a larger number goes on")
            return 0
        say(f"the run is recorded in {folder}")
        try:
            return trainer.run()
        except NotFinite as error:
            say(f"stopped: {error}")
            return 1
        finally:
            if trainer.record:
                trainer.record.close()


def _ladder(args: argparse.Namespace, settings: Settings) -> int:
    import torch  # here, since it takes seconds, and a mistake is said at once

    from gpukit import benchmark
    from gpukit.train import ladder

    cuda = torch.cuda.is_available() and args.device != "cpu"
    if not cuda and presets.preset(settings.preset).needs_gpu:
        raise CourseError(
            f"--ladder: {settings.preset} needs a GPU, and there is none here: --preset tiny climbs on a CPU"
        )
    taken = {"batch", "steps", "micro_batches"}
    if ignored := sorted(changes(args).keys() - taken):
        raise CourseError(
            f"--ladder: the rungs themselves say what changes, so it takes --batch, --micro-batches and --steps, got "
            f"--{ignored[0].replace('_', '-')}"
        )
    size = ladder.SIZES[settings.preset]
    settings = settings.replace(batch=args.batch or size.batch, steps=args.steps or size.steps, micro_batches=1)
    folder = Path(args.folder) if args.folder else Path("runs")
    if not args.folder and cuda:
        folder = benchmark.RESULTS / benchmark.gpu_key(torch.cuda.get_device_name())
    names = [name.strip() for name in args.rungs.split(",")] if args.rungs else ()
    ladder.climb(
        settings, names, passes=args.micro_batches or size.passes, device="cuda" if cuda else "cpu", folder=folder,
        say=print_line,
    )  # fmt: skip
    print_line(f"recorded in {folder / f'ladder-{settings.preset}.csv'}")
    return 0


def _resumed(args: argparse.Namespace, folder: Path) -> Settings:
    from gpukit.train.record import read_settings

    settings = read_settings(folder)
    if args.preset and args.preset != settings.preset:
        raise CourseError(f"--resume: the run in {folder} is of the preset {settings.preset}, not {args.preset}")
    for name, value in changes(args).items():
        if value != getattr(settings, name):
            print_line(f"changed: {name} was {getattr(settings, name)} and is {value}")
    return settings


def print_line(line: str) -> None:
    """Print a line, at once also into a file or a pipe."""
    print(tables.folded(line), flush=True)
    sys.stdout.flush()
