"""The training loop: draw a batch, forward, backward, update; now and then a line of progress, an evaluation, a checkpoint.

A run that was stopped, by Ctrl-C, by a signal or by a power cut, goes on from its last checkpoint as if nothing had happened:
every number that it writes from there on is the one that an uninterrupted run writes, bit for bit, on the same machine with
the same number of threads and processes. (On a GPU, gpukit's attention over 512 tokens or more adds in an order that differs
from run to run, unless torch.use_deterministic_algorithms(True) was called.)
"""

from __future__ import annotations

import contextlib
import errno
import math
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from gpukit import hardware
from gpukit.accounting.training import Schedule, mfu
from gpukit.course import CourseError
from gpukit.train import checkpoint, data, plan
from gpukit.train.compiled import check_first
from gpukit.train.model import GPT, GPTConfig, Operations
from gpukit.train.optimizer import adamw, update
from gpukit.train.presets import Settings
from gpukit.train.ranks import ALONE, Ranks
from gpukit.train.record import Record


class NotFinite(CourseError):
    """The loss or the gradients became infinite or NaN; the message says at which step, and what to look at."""


class Trainer:
    """One run. After construction `model`, `optimizer` and `batches` are there, at step 0 or, with `resume`, at that of the
    newest whole checkpoint; `run()` trains until `settings.steps`.

    settings     what is trained;  folder: where it is recorded;  corpus: the text
    device       torch.device("cpu"), or of a GPU, whose peak `gpu` is used for MFU (None: not known)
    ranks        which of several processes this is
    operations   what the model calls for norms, attention, loss and so on; None: as `settings.kernels` says
    say          is given each line of progress
    Raises ValueError for settings that do not fit, and CheckpointError where `resume` finds no checkpoint of this model.
    """

    def __init__(
        self, settings: Settings, folder: Path, corpus: data.Corpus, *, device: torch.device | None = None,
        gpu: hardware.Gpu | None = None, ranks: Ranks | None = None, operations: Operations | None = None, resume: bool = False,
        say: Callable[[str], None] = print,
    ):  # fmt: skip
        ranks = ranks or ALONE
        self.settings, self.corpus, self.ranks, self.gpu = settings, corpus, ranks, gpu
        self.device = device or torch.device("cpu")
        self.say = say if ranks.main else lambda line: None
        self.checkpoints = folder / "checkpoints"
        config = GPTConfig(**settings.shape)
        if corpus.tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"train: vocab_size must be at least {corpus.tokenizer.vocab_size:,}, the tokenizer's, got {config.vocab_size:,}"
            )
        shares = ranks.world * settings.micro_batches
        if settings.batch % shares:
            raise ValueError(
                f"train: batch must be a multiple of processes x micro_batches, {ranks.world:,} x {settings.micro_batches:,}, "
                f"got {settings.batch:,}"
            )
        self.sequences = settings.batch // shares  # in one pass of this process
        self.schedule = Schedule(settings.steps, settings.warmup, settings.rate, settings.final_rate)
        self.accounting = plan.accounting_config(settings.preset, settings.model)
        self.step = 0
        torch.manual_seed(settings.seed)  # the same weights in all processes
        if operations is None and settings.kernels == "gpukit":
            from gpukit import kernels  # here, since Triton is not on every system

            operations = Operations(attention=kernels.flash_attention, loss=kernels.linear_cross_entropy)
        self.model = GPT(config, operations)
        self.model.recompute = settings.recompute == "full"
        if settings.compile:
            self.model.compile()  # what calls the model's forward() by that name still gets it as it is written
        torch.manual_seed(settings.seed + ranks.rank)  # dropout differs
        self.called = ranks.laid_out(self.model, self.device, settings.sharding, settings.dtype)
        # What this process holds of each. Within a pass of FSDP the model has the gathered ones in their places.
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = adamw(self.model, settings)
        drawn = 0
        if resume and checkpoint.checkpoints(self.checkpoints):
            drawn = self._load(checkpoint.newest(self.checkpoints, self.say, ranks))
        elif resume:
            self.say("the run has no checkpoint yet, so it begins again")
        self.batches = data.Batches(
            corpus.train, self.sequences, settings.seq, seed=settings.seed, drawn=drawn, rank=ranks.rank, world=ranks.world
        )  # fmt: skip
        self.record = Record(folder, settings, self.say) if ranks.main else None
        # Whether the compiled model needs no more comparison with the model. With dropout, two losses differ by themselves.
        self._checked = not settings.compile or self.model.config.dropout > 0
        self.signal = 0  # the number of the signal that asked for an end
        self._losses: list[tuple[int, Tensor, Tensor | None]] = []  # of the steps whose numbers were not looked at yet
        self._last_finite = ""

    # ---- one step

    def train_step(self, norm_wanted: bool = True) -> tuple[Tensor, Tensor | None]:
        """Forward and backward passes over one batch, and an update. Returns the mean loss of this process's sequences and the
        gradients' norm before clipping (None where nobody wanted it), both still on the device. Raises Miscompiled at the first
        step where torch.compile got the model wrong."""
        s = self.settings
        self.called.train()
        total = torch.zeros((), device=self.device)
        for number in range(1, s.micro_batches + 1):
            inputs, targets = (data.to_device(tensor, self.device) for tensor in next(self.batches))
            with self.ranks.averaging(self.called, on=number == s.micro_batches):
                with self._autocast():
                    loss = self.called(inputs, targets)
                    if not self._checked:
                        check_first(loss, lambda: self.model.forward(inputs, targets))  # noqa: B023
                        self._checked = True
                    loss = loss / s.micro_batches
                loss.backward()
            total += loss.detach()
        # DDP's gradients lie in the tensors that it sends, from the pass on that it sends them in. What an earlier pass of the
        # step adds up has to lie there too, or all gradients would be there twice.
        keep = self.ranks.world > 1 and s.sharding == "ddp" and s.micro_batches > 1
        norm = update(self.optimizer, self.schedule.rate(self.step), s, norm_wanted=norm_wanted, keep=keep)
        self.step += 1
        return total, norm

    def _autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bf16")

    # ---- the run

    def run(self) -> int:
        """Train to the last step, or until a signal comes. Returns 0, or 128 + the signal's number once a checkpoint is written.
        Raises NotFinite where the loss or the gradients are no numbers any more."""
        s = self.settings
        if self.record:
            self.record.rewind(self.step)
        self._begin = time.perf_counter()
        with self._signals():
            since, begin = self.step, time.perf_counter()
            while self.step < s.steps:
                number = self.step + 1
                last = number == s.steps
                logged = number == 1 or number % s.log_every == 0 or last
                evaluated = number % s.eval_every == 0 or last
                saved = number % s.checkpoint_every == 0 or last
                loss, norm = self.train_step(norm_wanted=logged or saved)
                self._losses.append((number, loss, norm))
                # To look at a number makes the CPU wait for the GPU, so it is done in few steps. Of several processes all must
                # stop in the same step, so they ask each other, and only then.
                ended = self.signal if self.ranks.world == 1 else 0
                if logged or evaluated or saved or ended:
                    loss, norm = self._look()
                    seconds = time.perf_counter() - begin
                    ended = self.ranks.largest(self.signal)
                    validation = self.evaluate() if evaluated else None
                    if logged or evaluated or saved:
                        self._report(loss, norm, validation, (number - since) / seconds)
                    if evaluated:
                        self._sample(validation)
                    if saved or ended:
                        self.save()
                    since, begin = number, time.perf_counter()
                if ended:
                    name = signal.Signals(ended).name
                    self.say(f"{name}: stopped after step {number:,}, from which --resume goes on")
                    return 128 + ended
        return 0

    def _look(self) -> tuple[float, float | None]:
        """The last step's loss and gradient norm, over all processes. Raises NotFinite for the first one since it was called
        last that is infinite or NaN."""
        losses = self.ranks.mean(torch.stack([loss for _, loss, _ in self._losses])).tolist()
        norm = None
        for (number, _, norm_there), loss in zip(self._losses, losses, strict=True):
            norm = None if norm_there is None else norm_there.item()
            for name, value in (("loss", loss), ("norm of the gradients", norm)):
                if value is not None and not math.isfinite(value):
                    raise NotFinite(self._advice(number, name, value))
            self._last_finite = f"step {number:,}: loss {loss:.4f}" + (f", gradients {norm:.3g}" if norm else "")
        self._losses.clear()
        return losses[-1], norm

    def _advice(self, number: int, name: str, value: float) -> str:
        s = self.settings
        rate = self.schedule.rate(number - 1)
        before = f" (the last good one was {self._last_finite})" if self._last_finite else ""
        lines = [
            f"the {name} of step {number:,} is {value}{before}; nothing was saved since. What to look at:",
            f"  the learning rate: it was {rate:.3g} in this step. Try half of it (--rate), or a longer warm-up (--warmup)",
            "  gradient_norm in metrics.csv: a norm that grew for many steps points to the learning rate, a sudden one to "
            "the data of that step or to a wrong gradient",
        ]
        if self.model.operations != Operations():
            lines.append("  the kernels in use: run the same steps with PyTorch's operations and compare the losses")
        if s.dtype == "bf16":
            lines.append("  the precision: run the same steps with --dtype fp32")
        return "\n".join(lines)

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss on sequences from the whole validation text, in nats per token; always the same ones."""
        s, ranks = self.settings, self.ranks
        self.model.eval()
        # The last batch has another shape, for which torch.compile would compile again.
        evaluated = self.model.forward if s.compile else self.model
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        batches = data.in_order(
            self.corpus.validation, self.sequences, s.seq, s.eval_sequences, rank=ranks.rank, world=ranks.world
        )
        nothing = torch.zeros(1, s.seq, dtype=torch.int64)
        while True:
            inputs, targets = next(batches, (nothing, nothing))
            count = 0 if inputs is nothing else len(inputs)  # the last batch may be shorter
            # With FSDP a pass needs all processes, so one that has no batch left takes part in those of the others.
            if not ranks.largest(count):
                break
            with self._autocast():
                loss = evaluated(data.to_device(inputs, self.device), data.to_device(targets, self.device))
            sums += torch.stack((loss.double() * count, sums.new_tensor(count)))
        total, count = ranks.sum(sums).tolist()
        return total / count

    def _sample(self, validation: float) -> None:
        """Let the model write, and record it. The numbers that decide are drawn by a generator of their own, so that training
        does not depend on whether there are samples."""
        # With FSDP a pass needs all processes: all draw the same tokens, and one writes them down.
        if not self.settings.sample or not (self.record or self.settings.sharding == "fsdp"):
            return
        self.model.eval()
        generator = torch.Generator(self.device).manual_seed(self.settings.seed + self.step)
        start = torch.tensor([[self.corpus.tokenizer.end]], device=self.device)
        with self._autocast():
            drawn = self.model.generate(start, self.settings.sample, temperature=0.8, generator=generator)[
                0, 1:
            ].tolist()
        known = [token for token in drawn if token < self.corpus.tokenizer.vocab_size]  # a model's table may be larger
        if self.record:
            self.record.sample(self.step, self.corpus.tokenizer.decode(known))

    def _report(self, loss: float, norm: float | None, validation: float | None, steps_per_s: float) -> None:
        s = self.settings
        tokens_per_s = steps_per_s * s.tokens_per_step
        share = None
        if self.gpu is not None:
            each = plan.flops_per_token(self.accounting, s.seq)
            share = mfu(tokens_per_s, each, self.gpu, self.ranks.world, s.dtype)
        memory_bytes = self._memory()
        rate = self.schedule.rate(self.step - 1)
        parts = [
            f"step {self.step:>{len(f'{s.steps:,}')},} of {s.steps:,}",
            f"loss {loss:.4f}",
            f"rate {rate:.2e}",
            f"{tokens_per_s:,.0f} tokens/s",
            *([f"MFU {share:.1%}"] if share is not None else []),
            f"{memory_bytes / 1e9:,.2f} GB",
            *([f"validation loss {validation:.4f}"] if validation is not None else []),
        ]
        self.say("   ".join(parts))
        if self.record:
            self.record.row({
                "step": self.step, "tokens": self.step * s.tokens_per_step, "loss": loss, "learning_rate": rate,
                "gradient_norm": norm, "validation_loss": validation, "tokens_per_s": tokens_per_s, "mfu": share,
                "memory_bytes": memory_bytes, "seconds": time.perf_counter() - self._begin,
            })  # fmt: skip

    def _memory(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        import resource  # not on Windows

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    # ---- checkpoints

    def save(self) -> None:
        """Write a checkpoint of this step. Where the disk has no room training goes on, with the checkpoint before."""
        info = {"model": asdict(self.model.config), "sampler": self.batches.state()}
        try:
            checkpoint.save(self.checkpoints, self.step, self._state(), info, self.ranks)
        except OSError as error:
            room = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
            kept = [path.name for path in checkpoint.checkpoints(self.checkpoints)]
            there = f"{kept[-1]} is kept" if kept else "there is none yet"
            self.say(f"no checkpoint of step {self.step:,} could be written: {room}; {there}, and training goes on")

    def _state(self) -> dict[str, Tensor]:
        """What this process has of a checkpoint's tensors, by name."""
        state = {f"model.{name}": parameter.detach() for name, parameter in self.parameters.items()}
        for name, parameter in self.parameters.items():
            for kind, value in self.optimizer.state[parameter].items():
                state[f"optimizer.{kind}.{name}"] = value
        return state | self._random_state()

    def _random_state(self) -> dict[str, Tensor]:
        """Of PyTorch's generators in this process, which dropout draws from."""
        name = f"random.{self.ranks.rank}"
        state = {f"{name}.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            state[f"{name}.cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def _load(self, found: checkpoint.Checkpoint) -> int:
        """Go on from a checkpoint. Returns how many sequences were drawn until it."""
        checkpoint.check_shape(found, asdict(self.model.config))
        there = found.names()
        for parameter in self.parameters.values():  # the optimizer has no state before its first step
            step = torch.zeros((), device=self.device)
            moments = {kind: torch.zeros_like(parameter.detach()) for kind in ("exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {"step": step, **moments}
        random = self._random_state()
        state = {name: value for name, value in self._state().items() if name not in random or name in there}
        found.read(state, self.ranks)
        if f"random.{self.ranks.rank}.cpu" in state:  # a process that was not there before keeps its own
            torch.set_rng_state(state[f"random.{self.ranks.rank}.cpu"])
        if f"random.{self.ranks.rank}.cuda" in state:
            torch.cuda.set_rng_state(state[f"random.{self.ranks.rank}.cuda"], self.device)
        self.step = found.step
        seed, drawn = found.info["sampler"]
        if seed != self.settings.seed:
            self.say(f"the seed was {seed} and is {self.settings.seed} now, so the sequences come in another order")
        self.say(f"resumed from {found.path.name}")
        return drawn

    # ---- signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Inside the block a signal that asks for an end is noted, and the step that runs is finished. A second one ends at
        once, as it would have without this."""

        def note(number: int, _) -> None:
            self.signal = number
            signal.signal(number, before[number])

        numbers = [getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")]
        before = {}
        try:
            for number in filter(None, numbers):
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup gpukit train
                    before[number] = signal.signal(number, note)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
