"""Training: transformers' Seq2SeqTrainer with batches by token budget, the paper's schedule and BLEU."""

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate.utils import gather_object
from tqdm import tqdm
from transformers import (
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    PrinterCallback,
    ProgressCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import TensorBoardCallback

from relpos.translation.batching import EpochLoader, PairCollator, TokenBatches
from relpos.translation.checkpoints import (
    average_weights,
    is_sealed,
    save_whole,
    seal,
    sealed_checkpoints,
    verify,
    write_weights,
)
from relpos.translation.config import RelposConfig
from relpos.translation.errors import InputError, Interrupted
from relpos.translation.evaluation import score
from relpos.translation.generation import Search, Translator
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.preparation import Prepared, prepare
from relpos.translation.recipe import Recipe, TrainingSettings, load_recipe, write_recipe


def train(
    recipe: Recipe, run: Path, *, resume: bool = False, report: Callable[[str], None] = lambda line: None
) -> Path:
    """Train the model of `recipe` in the folder `run` and return the folder of the finished model.

    `run` receives recipe.yaml, data.json (what was read and dropped), tokenizer/, checkpoints/,
    metrics.jsonl (every logged line), logs/ (TensorBoard) and, in the end, model/.

    Args:
        resume: go on from the last whole checkpoint in `run`, with the very losses of an unbroken run.
        report: receives lines about the progress, for a person.
    Raises:
        InputError: the recipe's data cannot be used, `run` holds another run, or the disk is full.
        Interrupted: SIGINT or SIGTERM came; the state is saved.
    """
    checkpoint = _open_run(recipe, run, resume)
    settings = recipe.training
    set_seed(settings.seed)
    prepared = prepare(recipe, run, report)
    model = RelposForConditionalGeneration(make_config(recipe, prepared.tokenizer))
    report(f"{model.num_parameters():,} weights")
    trainer = make_trainer(recipe, prepared, model, run)
    if checkpoint is not None:
        report(f"resuming from {checkpoint.name}")
    with _stop_on_signal(trainer) as stopped:
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except OSError as error:
            raise InputError(_saving_failed(run, error)) from error
    if stopped:
        last = sealed_checkpoints(run / "checkpoints")
        raise Interrupted(stopped[0], last[-1] if last else None)
    try:
        return _finish(trainer, recipe, run, report)
    except OSError as error:
        raise InputError(_saving_failed(run, error)) from error


def make_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> RelposConfig:
    """The model's configuration, with the tokenizer's numbers in it."""
    settings = recipe.model.model_dump(mode="json")
    try:
        return RelposConfig(
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            decoder_start_token_id=tokenizer.bos_token_id,
            label_smoothing=recipe.training.label_smoothing,
            **settings,
        )
    except ValueError as error:
        raise InputError(f"the recipe's model: {error}") from error


def make_trainer(
    recipe: Recipe, prepared: Prepared, model: RelposForConditionalGeneration, run: Path
) -> "RelposTrainer":
    """The trainer of one run, with its callbacks."""
    settings = recipe.training
    peak = settings.learning_rate_scale * (recipe.model.d_model * settings.warmup) ** -0.5
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(run / "checkpoints"),
        seed=settings.seed,
        max_steps=settings.updates,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=peak,
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=settings.warmup,
        lr_scheduler_kwargs={"timescale": settings.warmup},
        adam_beta1=settings.adam_betas[0],
        adam_beta2=settings.adam_betas[1],
        adam_epsilon=settings.adam_epsilon,
        max_grad_norm=settings.max_gradient_norm,
        use_cpu=not torch.accelerator.is_available(),
        bf16=settings.precision == "bfloat16",
        eval_strategy="steps",
        eval_steps=settings.evaluate_every,
        save_strategy="steps",
        save_steps=settings.evaluate_every,
        save_total_limit=max(settings.keep, settings.average) + 1,
        metric_for_best_model=settings.best,
        greater_is_better=settings.best != "loss",
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = RelposTrainer(
        model=model,
        args=arguments,
        train_dataset=prepared.train,
        eval_dataset=prepared.validation,
        processing_class=prepared.tokenizer,
        data_collator=PairCollator(prepared.tokenizer.pad_token_id),
        settings=settings,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if settings.patience is not None:
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=settings.patience))
    trainer.add_callback(_Log(run / "metrics.jsonl"))
    from torch.utils.tensorboard import SummaryWriter

    if trainer.is_world_process_zero():
        trainer.add_callback(TensorBoardCallback(SummaryWriter(str(run / "logs"))))
    return trainer


class RelposTrainer(Seq2SeqTrainer):
    """Seq2SeqTrainer with token batches, speed in target tokens per second, and scores while training."""

    def __init__(self, *, settings: TrainingSettings, **arguments: Any) -> None:
        self.settings = settings
        self.stop_signal: int | None = None
        self._seconds_before = 0.0
        self._started: float | None = None
        self._tokens = 0
        self._ticked = time.perf_counter()
        super().__init__(**arguments)

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
        return EpochLoader(columns, batch_sampler=batches, collate_fn=self.data_collator)  # type: ignore[arg-type]

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._started = self._ticked = time.perf_counter()
        return super()._inner_training_loop(*args, **kwargs)

    @property
    def seconds(self) -> float:
        """Time spent training, validation included, over all resumptions of the run."""
        if self._started is None:
            return 0.0
        if not self._seconds_before and self.state.log_history:
            logged = [line["seconds"] for line in self.state.log_history if "seconds" in line]
            resumed_at = self._initial_global_step
            before = [
                line["seconds"]
                for line in self.state.log_history
                if "seconds" in line and line["step"] <= resumed_at
            ]
            self._seconds_before = before[-1] if resumed_at and logged and before else 0.0
        return self._seconds_before + time.perf_counter() - self._started

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """One forward and backward pass; counts target tokens."""
        self._tokens += int((inputs["labels"] != -100).sum())
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the time so far and the speed since the last line."""
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
        self._ticked += time.perf_counter() - paused  # speed is that of training alone
        return metrics

    @torch.no_grad()
    def _mean_loss(self, rows: datasets.Dataset) -> float:
        total, count = 0.0, 0
        for batch in self._loader(rows, shuffle=False):
            batch = self._prepare_inputs(batch)
            with self.compute_loss_context_manager():
                loss = self.model(**batch, num_items_in_batch=1).loss
            total += float(loss)
            count += int((batch["labels"] != -100).sum())
        shares = gather_object([(total, count)])
        return sum(total for total, _ in shares) / max(1, sum(count for _, count in shares))

    def _translate(self, texts: list[str]) -> list[str]:
        """Greedy translations, each process doing its share."""
        translator = Translator(self.model, self.processing_class)
        search = Search(beams=1, tokens_per_batch=4 * self.settings.tokens_per_batch)
        mine = texts[self.args.process_index :: self.args.world_size]
        found = gather_object([[best[0].text for best in translator.translate(mine, search)]])
        hypotheses = [""] * len(texts)
        for process, share in enumerate(found):
            hypotheses[process :: self.args.world_size] = share
        return hypotheses

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        try:
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                seal(folder)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise
            # torch.save and safetensors report a full disk as RuntimeError
            raise OSError(str(error).splitlines()[0]) from error


class _Log(TrainerCallback):
    """Lines for a program (metrics.jsonl) and for a person (standard error), the time limit, the signals."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bar: tqdm | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_unused: Any
    ) -> None:
        """Open the bar."""
        if state.is_world_process_zero:
            self.bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc="training",
                unit="update",
                mininterval=1.0,
                disable=None,  # no bar where standard error is no terminal
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
        """Write one line for a program and one for a person."""
        if not state.is_world_process_zero or not logs:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        if self.bar is not None:
            self.bar.write(_line(state.global_step, logs), file=sys.stderr)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_unused: Any
    ) -> None:
        """Close the bar."""
        if self.bar is not None:
            self.bar.close()


class _Stopper(TrainerCallback):
    """Stop after a step, with a last validation, when the time is over; at once, saving, on a signal."""

    def __init__(self, trainer: RelposTrainer, stopped: list[int]) -> None:
        self.trainer, self.stopped = trainer, stopped

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_unused: Any
    ) -> None:
        """Ask the trainer to stop if it is time."""
        limit = self.trainer.settings.minutes
        is_over = limit is not None and self.trainer.seconds >= 60 * limit
        if self.stopped:
            control.should_evaluate = False
            control.should_save = control.should_training_stop = True
        elif is_over or state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = control.should_training_stop = True


def _line(step: int, logs: dict[str, float]) -> str:
    if "eval_loss" in logs:
        return (
            f"update {step:>6,}  validation loss {logs['eval_loss']:.3f}  BLEU {logs['eval_bleu']:.2f}  "
            f"chrF {logs['eval_chrf']:.2f}  exact {logs['eval_exact']:.1%}"
        )
    if "loss" in logs:
        return (
            f"update {step:>6,}  loss {logs['loss']:.3f}  learning rate {logs['learning_rate']:.2e}  "
            f"{logs['target_tokens_per_second']:,.0f} target tokens/s"
        )
    return f"update {step:>6,}  " + "  ".join(f"{name} {value:.4g}" for name, value in logs.items())


@contextmanager
def _stop_on_signal(trainer: RelposTrainer) -> Iterator[list[int]]:
    """While training: the first SIGINT or SIGTERM asks for a checkpoint and a stop, the second kills."""
    stopped: list[int] = []
    trainer.add_callback(_Stopper(trainer, stopped))
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, _frame: Any) -> None:
        stopped.append(number)
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, note)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _open_run(recipe: Recipe, run: Path, resume: bool) -> Path | None:
    """Make `run` ready; the checkpoint to go on from, if any."""
    checkpoints, written = run / "checkpoints", run / "recipe.yaml"
    if not resume:
        if written.exists() or (run / "model").exists():
            raise InputError(f"{run} holds a run already. Add --resume to go on, or choose another --out.")
        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{run}: cannot be made ({error.strerror}). Choose another --out.") from error
        write_recipe(recipe, written)
        return None
    if not written.is_file():
        raise InputError(f"{run} holds no run to resume. Leave --resume out to begin one.")
    before = load_recipe(str(written))
    for section in ("data", "tokenizer", "model"):
        if getattr(before, section) != getattr(recipe, section):
            raise InputError(
                f"{run} was trained with another {section} section than this recipe has. "
                f"Resume with {written}, or choose another --out."
            )
    write_recipe(recipe, written)
    for folder in checkpoints.glob("checkpoint-*"):
        if not is_sealed(folder):
            shutil.rmtree(folder)
    whole = sealed_checkpoints(checkpoints)
    if not whole:
        return None
    verify(whole[-1])
    return whole[-1]


def _finish(trainer: RelposTrainer, recipe: Recipe, run: Path, report: Callable[[str], None]) -> Path:
    """Choose the best weights and save them as the model of the run."""
    best = _best_checkpoint(trainer, run)
    folder = run / "model"
    if trainer.is_world_process_zero():
        save_whole(folder, lambda draft: _write_model(trainer, recipe, best, draft))
    trainer.accelerator.wait_for_everyone()
    recent = sealed_checkpoints(run / "checkpoints")[-recipe.training.average :]
    if recipe.training.average > 1 and len(recent) > 1:
        averaged = average_weights(recent)
        trainer.model.load_state_dict(averaged, strict=False)
        metrics = trainer.evaluate()
        name, sign = f"eval_{recipe.training.best}", -1 if recipe.training.best == "loss" else 1
        is_better = sign * metrics[name] >= sign * (trainer.state.best_metric or -math.inf)
        report(
            f"average of {len(recent)} checkpoints: {recipe.training.best} {metrics[name]:.3f}, "
            f"best single one {trainer.state.best_metric:.3f}; kept the {'average' if is_better else 'single one'}"
        )
        if is_better and trainer.is_world_process_zero():

            def write(draft: Path) -> None:
                _write_model(trainer, recipe, best, draft)
                write_weights(averaged, draft)

            save_whole(folder, write)
        trainer.accelerator.wait_for_everyone()
    return folder


def _best_checkpoint(trainer: RelposTrainer, run: Path) -> Path:
    best = trainer.state.best_model_checkpoint
    if best is not None and is_sealed(Path(best)):
        return Path(best)
    return sealed_checkpoints(run / "checkpoints")[-1]


def _write_model(trainer: RelposTrainer, recipe: Recipe, checkpoint: Path, draft: Path) -> None:
    """Fill `draft` with the checkpoint's weights, the configuration, the tokenizer and the search defaults."""
    shutil.copy(checkpoint / "model.safetensors", draft)
    trainer.model.config.save_pretrained(draft)
    generation = trainer.model.generation_config
    generation.num_beams = recipe.translation.beams
    generation.length_penalty = recipe.translation.length_penalty
    generation.save_pretrained(draft)
    trainer.processing_class.save_pretrained(draft)
    write_recipe(recipe, draft / "recipe.yaml")


def _saving_failed(run: Path, error: OSError) -> str:
    last = sealed_checkpoints(run / "checkpoints")
    survivor = f"the last good checkpoint is {last[-1]}" if last else "there is no checkpoint yet"
    reason = os.strerror(error.errno) if error.errno else str(error)
    return f"{run}: saving failed ({reason}); {survivor}. Make room and go on with --resume."
