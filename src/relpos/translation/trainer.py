"""transformers' Seq2SeqTrainer with token batches, validation scores, and sealed checkpoints."""

import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate.utils import gather_object
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import (
    PreTrainedTokenizerFast,
    PrinterCallback,
    ProgressCallback,
    Seq2SeqTrainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback

from relpos.translation.batching import EpochLoader, PairCollator, TokenBatches
from relpos.translation.checkpoints import make_readable, seal
from relpos.translation.errors import InputError, first_line
from relpos.translation.evaluation import score
from relpos.translation.generation import Search, Translator
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.recipe import TrainingSettings
from relpos.translation.run_cleanup import (
    SAVING,
    foreign_checkpoints,
    keep_newest,
    remove_checkpoint,
    remove_links,
)
from relpos.translation.runs import foreign_message, mark_finished
from relpos.translation.schedule import share_of_peak


class RelposTrainer(Seq2SeqTrainer):
    """The trainer of one run; logs speed in target tokens per second, loss, BLEU and chrF.

    Args:
        settings: the training settings of the recipe; those that transformers supports are also in `args`.
        train_dataset, eval_dataset: as in `Prepared`.
        metrics: file for every logged line, as JSON.
        stopped: list of received signals; when it is not empty, the trainer saves and stops.
        first_step: step of the schedule at the first update, see schedule.py.
    """

    model: RelposForConditionalGeneration
    eval_dataset: datasets.Dataset
    train_dataset: datasets.Dataset
    processing_class: PreTrainedTokenizerFast

    def __init__(
        self,
        model: RelposForConditionalGeneration,
        args: TrainingArguments,
        train_dataset: datasets.Dataset,
        eval_dataset: datasets.Dataset,
        tokenizer: PreTrainedTokenizerFast,
        settings: TrainingSettings,
        metrics: Path,
        stopped: list[int],
        first_step: int = 1,
    ) -> None:
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=tokenizer,
            data_collator=PairCollator(tokenizer.pad_token_id),
        )
        self.settings, self._first_step = settings, first_step
        self._keep = max(settings.keep, settings.average)
        self._stopped = stopped
        self._seconds_before = 0.0
        self._tokens = 0
        self._started = self._ticked = time.perf_counter()
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.add_callback(_Progress(self, metrics))
        self.add_callback(_Stop(self, stopped))
        if self.is_world_process_zero():
            board = TensorBoardCallback()
            # set here, since the default is a folder below the checkpoints
            board.logging_dir = str(metrics.parent / "logs")
            self.add_callback(board)

    @property
    def seconds(self) -> float:
        """Seconds of training, including validation and earlier sessions."""
        return self._seconds_before + self.session_seconds

    @property
    def session_seconds(self) -> float:
        """Seconds since training began or resumed in this process."""
        return time.perf_counter() - self._started

    def start_clock(self) -> None:
        """Start counting seconds from the end of the earlier session."""
        self._started = self._ticked = time.perf_counter()
        history = self.state.log_history
        self._seconds_before = max((line["seconds"] for line in history if "seconds" in line), default=0.0)

    def recall(self, checkpoint: Path) -> None:
        """Load the state in `checkpoint`, at which training ended."""
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        self.control.should_training_stop = True
        self.start_clock()

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The paper's schedule; that of transformers begins at step 0, with rate 0."""
        if self.lr_scheduler is None:
            given = self.optimizer if optimizer is None else optimizer
            assert given is not None
            share = partial(share_of_peak, warmup=self.settings.warmup, first_step=self._first_step)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(given, share)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_train_dataloader(self) -> EpochLoader:
        """Batches of this process, reshuffled each epoch."""
        return self._loader(self.train_dataset, shuffle=True)

    def _loader(self, rows: datasets.Dataset, *, shuffle: bool) -> EpochLoader:
        batches = TokenBatches(
            rows["length"][:],
            self.settings.tokens_per_batch,
            seed=self.settings.seed,
            shuffle=shuffle,
            process=self.args.process_index,
            num_processes=self.args.world_size,
        )
        columns = rows.select_columns(["input_ids", "labels"])
        # its own generator, since a loader draws a number from torch's default one, and a validation must not
        # change the dropout of later updates
        return EpochLoader(
            columns, batch_sampler=batches, collate_fn=self.data_collator, generator=torch.Generator()
        )

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """One forward and backward pass; counts target tokens."""
        self._tokens += int((inputs["labels"] != -100).sum())
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log `logs` with the time so far and the speed since the last line. Raises: InputError for NaN."""
        if not math.isfinite(logs.get("loss", 0.0)):
            raise InputError(
                f"the loss must be finite; got {logs['loss']} at update {self.state.global_step}. Lower "
                "training.learning_rate_scale, or set training.max_gradient_norm."
            )
        if "loss" in logs:
            elapsed = time.perf_counter() - self._ticked
            logs["target_tokens_per_second"] = round(self._tokens * self.args.world_size / elapsed, 1)
            self._tokens, self._ticked = 0, time.perf_counter()
        logs["seconds"] = round(self.seconds, 2)
        super().log(logs, start_time)

    def evaluate(
        self,
        eval_dataset: datasets.Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **_unused: Any,
    ) -> dict[str, float]:
        """Loss in nats per target token, and BLEU and chrF of the first `validation_pairs` pairs."""
        paused = time.perf_counter()
        rows = self.eval_dataset if eval_dataset is None else eval_dataset
        was_training = self.model.training
        self.model.eval()
        loss = self._mean_loss(rows)
        hypotheses = self._translate(rows["source"][: self.settings.validation_pairs])
        scores = score(hypotheses, rows["target"][: self.settings.validation_pairs])
        self.model.train(was_training)
        metrics = {
            f"{metric_key_prefix}_loss": loss,
            f"{metric_key_prefix}_bleu": scores.bleu,
            f"{metric_key_prefix}_chrf": scores.chrf,
            f"{metric_key_prefix}_exact": scores.exact,
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        self._ticked += time.perf_counter() - paused  # the speed excludes validation
        return metrics

    @torch.no_grad()
    def _mean_loss(self, rows: datasets.Dataset) -> float:
        total, count = 0.0, 0
        for batch in self._loader(rows, shuffle=False):
            batch = self._prepare_inputs(batch)
            with self.compute_loss_context_manager():
                loss = self.model(**batch, num_items_in_batch=1).loss  # the sum, in nats
            total += float(loss)
            count += int((batch["labels"] != -100).sum())
        shares = gather_object([(total, count)])
        return sum(total for total, _ in shares) / max(1, sum(count for _, count in shares))

    def _translate(self, texts: list[str]) -> list[str]:
        """Greedy translations, distributed over the processes."""
        translator = Translator(self.model, self.processing_class)
        search = Search(beams=1, tokens_per_batch=self.settings.tokens_per_batch)
        mine = texts[self.args.process_index :: self.args.world_size]
        best = [found[0].text for found in translator.translate(mine, search, with_scores=False)]
        shares = gather_object([best])
        hypotheses = [""] * len(texts)
        for process, share in enumerate(shares):
            hypotheses[process :: self.args.world_size] = share
        return hypotheses

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        # the time since the last logged line, for resuming
        self.state.log_history.append({"step": self.state.global_step, "seconds": round(self.seconds, 2)})
        try:
            if self.args.should_save:
                if foreign_checkpoints(folder.parent):
                    raise InputError(foreign_message(foreign_checkpoints(folder.parent)))
                folder.mkdir(parents=True, exist_ok=True)
                remove_links(folder)
                (folder / SAVING).touch()
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            # every process writes its random state to the folder
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                if self.control.should_training_stop and not self._stopped:
                    mark_finished(folder)
                seal(folder)
                make_readable(folder)
                (folder / SAVING).unlink(missing_ok=True)
        except (OSError, RuntimeError, SafetensorError) as error:
            cause = _why_not_saved(error, folder)
            remove_checkpoint(folder)
            raise cause from error
        # after saving, so that the new checkpoint stays if an old one cannot be removed
        if self.args.should_save:
            keep_newest(folder.parent, self._keep, self.state.best_global_step)


class _Progress(TrainerCallback):
    """Writes JSON lines to metrics.jsonl, and a progress bar and text lines to standard error."""

    def __init__(self, trainer: RelposTrainer, path: Path) -> None:
        self.trainer, self.path = trainer, path
        self.bar: tqdm | None = None
        self.resumed_at = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_unused: Any
    ) -> None:
        """Start the clock and open the bar."""
        self.trainer.start_clock()
        self.resumed_at = state.global_step
        if state.is_world_process_zero:
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc="training",
                unit="update",
                mininterval=1.0,
                disable=None,  # no bar if standard error is not a terminal
            )

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_unused: Any
    ) -> None:
        """Move the bar."""
        if self.bar is not None:
            self.bar.update(1)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_unused: Any,
    ) -> None:
        """Write one JSON line and one text line."""
        if not state.is_world_process_zero or not logs or "train_runtime" in logs:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        left = math.inf if control.should_training_stop else self._seconds_left(state)
        tqdm.write(_line(state, logs, left), file=sys.stderr)

    def _seconds_left(self, state: TrainerState) -> float:
        """Estimated seconds left at the speed of this session, validations included."""
        trainer, limit = self.trainer, self.trainer.settings.minutes
        made, still = state.global_step - self.resumed_at, state.max_steps - state.global_step
        rest = trainer.session_seconds / made * still if made > 0 else math.inf
        return rest if limit is None else max(0.0, min(rest, 60 * limit - trainer.seconds))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_unused: Any
    ) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()


class _Stop(TrainerCallback):
    """Stops training: at the limit of time or updates after a last validation, on a signal without one.

    Also stops after `patience` validations without improvement.
    """

    def __init__(self, trainer: RelposTrainer, stopped: list[int]) -> None:
        self.trainer, self.stopped = trainer, stopped

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_unused: Any
    ) -> None:
        """Ask the trainer to stop at a limit or on a signal; all processes decide alike."""
        limit = self.trainer.settings.minutes
        is_over = limit is not None and self.trainer.seconds >= 60 * limit
        is_stopped = bool(self.stopped)
        if args.world_size > 1:
            votes = torch.tensor([is_over, is_stopped], dtype=torch.float32, device=args.device)
            is_over, is_stopped = (self.trainer.accelerator.reduce(votes) > 0).tolist()
            if is_stopped and not self.stopped:
                self.stopped.append(signal.SIGTERM)
        if is_stopped:
            control.should_evaluate = False
            control.should_save = control.should_training_stop = True
        elif is_over or state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = control.should_training_stop = True

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_unused: Any,
    ) -> None:
        """Ask the trainer to stop when patience is exhausted, by the history, which resuming keeps."""
        assert metrics is not None
        settings = self.trainer.settings
        value, best = metrics[f"eval_{settings.best}"], state.best_metric
        is_better = best is None or (value > best if args.greater_is_better else value < best)
        last_best = state.best_global_step or 0
        waited = sum("eval_loss" in line and line["step"] > last_best for line in state.log_history)
        if settings.patience is not None and not is_better and waited >= settings.patience:
            control.should_training_stop = True


def _why_not_saved(error: Exception, folder: Path) -> OSError:
    """The operating system's error behind a failure of torch, safetensors or tokenizers to save."""
    if isinstance(error, OSError) and error.errno:
        return error
    told = re.search(r"os error ([0-9]+)", str(error))
    if told:
        return OSError(int(told[1]), os.strerror(int(told[1])), str(folder))
    try:
        # a write to the same folder fails for the same reason, with an errno
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 20))
    except OSError as again:
        return OSError(again.errno, again.strerror, str(folder))
    return OSError(f"{folder} cannot be saved: {first_line(error)}")


def _line(state: TrainerState, logs: dict[str, float], seconds_left: float) -> str:
    """The text of a logged line."""
    update = f"update {state.global_step:>{len(f'{state.max_steps:,}')},} of {state.max_steps:,}"
    rest = _time_left(seconds_left) if state.global_step < state.max_steps else ""
    if "eval_loss" in logs:
        return (
            f"{update}  validation loss {logs['eval_loss']:.3f}  BLEU {logs['eval_bleu']:.2f}  "
            f"chrF {logs['eval_chrf']:.2f}  exact {logs['eval_exact']:.1%}{rest}"
        )
    return (
        f"{update}  loss {logs['loss']:.3f}  learning rate {logs['learning_rate']:.2e}  "
        f"{logs['target_tokens_per_second']:,.0f} target tokens/s{rest}"
    )


def _time_left(seconds: float) -> str:
    """The time left, for the end of a line; empty if it is unknown."""
    if seconds == math.inf:
        return ""
    for unit, length in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"  about {seconds / length:.{1 if unit == 'h' else 0}f} {unit} left"
    return f"  about {seconds:.0f} s left"
