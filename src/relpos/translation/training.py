"""Training runs: trains the model of a recipe in a folder, and resumes interrupted runs."""

import errno
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedTokenizerFast, Seq2SeqTrainingArguments, set_seed

from relpos.translation.checkpoints import (
    CARD,
    average_weights,
    is_sealed,
    save_sealed,
    sealed_checkpoints,
    write_weights,
)
from relpos.translation.config import RelposConfig
from relpos.translation.errors import InputError, Interrupted, first_line
from relpos.translation.model import RelposForConditionalGeneration
from relpos.translation.model_card import write_card
from relpos.translation.preparation import Prepared, check_corpora, prepare
from relpos.translation.recipe import Recipe, located, write_recipe
from relpos.translation.runs import (
    OpenRun,
    begin_run,
    check_format,
    check_new,
    check_resumable,
    has_model,
    resume_run,
    working_in_run,
)
from relpos.translation.schedule import peak_rate
from relpos.translation.tokenizer import save_tokenizer
from relpos.translation.trainer import RelposTrainer

# a full disk, a quota, a limit on file size
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def train(
    recipe: Recipe, run: Path, *, resume: bool = False, report: Callable[[str], None] = lambda line: None
) -> Path:
    """Train the model of `recipe` in the folder `run`; returns the folder of the finished model.

    Writes recipe.yaml, data.json (the counts of pairs), tokenizer/, checkpoints/, metrics.jsonl (every logged
    line), logs/ (TensorBoard) and, at the end, model/ into `run`.

    Args:
        resume: continue from the last complete checkpoint in `run`, with exactly the losses of an
            uninterrupted run.
        report: called with lines about the progress.
    Raises:
        InputError: the recipe's data cannot be used, `run` has another run, or the disk is full.
        Interrupted: by SIGINT, SIGTERM or SIGHUP; the state is saved.
    """
    recipe = located(recipe)
    processes = PartialState(cpu=not torch.accelerator.is_available())
    try:
        if not processes.is_main_process:
            return _train(recipe, run, lambda: None, report)
        if resume:
            check_resumable(run)
            check_format(run, recipe)
        else:
            check_new(run)
            check_corpora(recipe.data)
        with working_in_run(run):
            return _train(
                recipe,
                run,
                lambda: resume_run(recipe, run, report) if resume else begin_run(recipe, run),
                report,
            )
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise InputError(
                f"{run}: the reader of the progress closed the pipe. Training stopped; continue: train with "
                "--resume, reproduce by the same command."
            ) from error
        if isinstance(error, FileNotFoundError | ConnectionError):
            raise
        raise InputError(_saving_failed(run, error)) from error


def _train(
    recipe: Recipe, run: Path, begin: Callable[[], OpenRun | None], report: Callable[[str], None]
) -> Path:
    open_run = broadcast_object_list([begin()])[0]
    checkpoint = open_run.checkpoint
    set_seed(recipe.training.seed)
    with PartialState().main_process_first():
        prepared = prepare(recipe, run, report)
    model = RelposForConditionalGeneration(make_config(recipe, prepared.tokenizer))
    report(f"{model.num_parameters():,} weights")
    if recipe.training.warmup >= recipe.training.updates:
        report(
            "note: the learning rate will still be rising at the end: training.warmup is "
            f"{recipe.training.warmup}, training.updates {recipe.training.updates}; "
            "a tenth to a third of the updates is usual"
        )
    first_step = 0 if open_run.format == 1 else 1
    if not first_step:
        report("this run was begun by an earlier relpos and keeps its schedule: the first rate is 0")
    with _noted_signals() as stopped:
        trainer = _make_trainer(recipe, prepared, model, run, stopped, first_step)
        if open_run.is_finished:
            report(f"training was finished before, at {checkpoint.name}")
            if has_model(run, recipe):
                return run / "model"
            trainer.recall(checkpoint)
        else:
            if checkpoint is not None:
                report(f"resuming from {checkpoint.name}")
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    if stopped:
        last = sealed_checkpoints(run / "checkpoints")
        raise Interrupted(stopped[0], last[-1] if last else None)
    return _finish(trainer, recipe, run, report)


def make_config(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> RelposConfig:
    """The configuration of the recipe's model, with the token ids of `tokenizer`. Raises: InputError."""
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
    except (ValueError, TypeError) as error:
        raise InputError(f"the recipe's model: {error}") from error


def _make_trainer(
    recipe: Recipe,
    prepared: Prepared,
    model: RelposForConditionalGeneration,
    run: Path,
    stopped: list[int],
    first_step: int,
) -> RelposTrainer:
    settings = recipe.training
    arguments = Seq2SeqTrainingArguments(
        output_dir=str(run / "checkpoints"),
        seed=settings.seed,
        max_steps=settings.updates,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=peak_rate(recipe.model.d_model, settings.warmup, settings.learning_rate_scale),
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
        metric_for_best_model=settings.best,
        greater_is_better=settings.best != "loss",
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    return RelposTrainer(
        model=model,
        args=arguments,
        train_dataset=prepared.train,
        eval_dataset=prepared.validation,
        tokenizer=prepared.tokenizer,
        settings=settings,
        metrics=run / "metrics.jsonl",
        stopped=stopped,
        first_step=first_step,
    )


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Collect signals that end a process; a second signal of a kind has its usual effect."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # ignored signals stay ignored, as under nohup
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}

    def note(number: int, _frame: Any) -> None:
        noted.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _finish(trainer: RelposTrainer, recipe: Recipe, run: Path, report: Callable[[str], None]) -> Path:
    """Choose the best weights and save them as the model of the run, once: a kill leaves no other choice."""
    best = _best_checkpoint(trainer, run)
    averaged = _better_average(trainer, recipe, run, report)

    def write(draft: Path) -> None:
        _write_model(trainer, recipe, best, draft)
        if averaged is not None:
            write_weights(averaged, draft)

    folder = run / "model"
    if trainer.is_world_process_zero():
        save_sealed(folder, write)
    trainer.accelerator.wait_for_everyone()
    return folder


def _better_average(
    trainer: RelposTrainer, recipe: Recipe, run: Path, report: Callable[[str], None]
) -> dict[str, torch.Tensor] | None:
    """The average of the newest checkpoints, if the recipe asks for it and it is better than the best one."""
    recent = sealed_checkpoints(run / "checkpoints")[-recipe.training.average :]
    if recipe.training.average == 1 or len(recent) == 1:
        return None
    averaged = average_weights(recent)
    _load(averaged, trainer.model)
    metrics = trainer.evaluate()
    value, single = metrics[f"eval_{recipe.training.best}"], trainer.state.best_metric
    sign = -1 if recipe.training.best == "loss" else 1
    is_better = single is None or sign * value >= sign * single
    report(
        f"{recipe.training.best} of the average of {len(recent)} checkpoints {value:.3f}, "
        f"of the best single one {math.nan if single is None else single:.3f}; kept: "
        + ("the average" if is_better else "the single one")
    )
    return averaged if is_better else None


def _load(weights: dict[str, torch.Tensor], model: RelposForConditionalGeneration) -> None:
    """Load `weights` into `model`; tied weights appear once."""
    # compared by name, since attention accepts a state dict without tables
    assert model.state_dict().keys() - weights.keys() <= set(model.all_tied_weights_keys)
    assert not model.load_state_dict(weights, strict=False).unexpected_keys


def _best_checkpoint(trainer: RelposTrainer, run: Path) -> Path:
    # by its number, since the path in the state is wrong after the run was moved
    best = run / "checkpoints" / f"checkpoint-{trainer.state.best_global_step}"
    return best if is_sealed(best) else sealed_checkpoints(run / "checkpoints")[-1]


def _write_model(trainer: RelposTrainer, recipe: Recipe, checkpoint: Path, draft: Path) -> None:
    """Write the checkpoint's weights, configuration, tokenizer and generation settings to `draft`."""
    shutil.copy(checkpoint / "model.safetensors", draft)
    trainer.model.config.save_pretrained(draft)
    generation = trainer.model.generation_config
    generation.num_beams = recipe.translation.beams
    # with one beam the penalty has no effect, and transformers refuses to save such a setting
    is_beam_search = recipe.translation.beams > 1
    generation.length_penalty = recipe.translation.length_penalty if is_beam_search else None
    # the default limit of `generate`; transformers' is 20
    generation.max_length = None
    generation.max_new_tokens = min(2 * recipe.training.max_length, recipe.model.max_positions - 1)
    generation.save_pretrained(draft)
    save_tokenizer(trainer.processing_class, draft)
    write_recipe(recipe, draft / "recipe.yaml")
    write_card(recipe, draft / CARD)


def _saving_failed(run: Path, error: OSError) -> str:
    last = sealed_checkpoints(run / "checkpoints")
    survivor = f"the last good checkpoint is {last[-1]}" if last else "there is no checkpoint yet"
    again = "continue: train with --resume, reproduce by the same command" if last else "begin again"
    reason = os.strerror(error.errno) if error.errno else first_line(error)
    advice = "Make room" if error.errno in _NO_ROOM else "Fix that"
    return f"{error.filename or run}: saving failed ({reason}); {survivor}. {advice} and {again}."
