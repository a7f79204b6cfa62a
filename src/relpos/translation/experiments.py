"""Experiments: train and test several variants of a recipe, and record the results as JSON lines.

An experiment is a YAML file in relpos/recipes/experiments. Finished runs are recorded in `out`/results.jsonl,
so that an interrupted experiment can continue. Each record has the fingerprint of its settings, and is used
for these settings only.
"""

import hashlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import pydantic
from accelerate import PartialState
from pydantic import BaseModel, ConfigDict, Field

from relpos.translation.atomic_files import write_text_atomic
from relpos.translation.errors import InputError, UsageError
from relpos.translation.evaluation import Evaluation, evaluate
from relpos.translation.generation import Translator
from relpos.translation.ownership import check_free, format_of, working_in
from relpos.translation.preparation import check_corpora, read_parts
from relpos.translation.recipe import Recipe, load_recipe
from relpos.translation.runs import check_format, check_new, has_begun
from relpos.translation.strict_yaml import read_yaml
from relpos.translation.training import train

_KIND = "experiment"
_RESULTS = "results.jsonl"


class Task(BaseModel):
    """One recipe, and how its test set is evaluated."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(description="Name of the task in tables and folders.")
    title: str = Field(description="Title in tables and reports.")
    recipe: str = Field(description="Name of a packaged recipe, or a file.")
    edges: list[int] = Field([5, 10, 20, 40], description="Upper lengths of the buckets.")
    trained_up_to: int | None = Field(None, description="Longest length in training, if known.")


class Experiment(BaseModel):
    """Tasks, and the variants of each task: overrides of its recipe, `key.key: value`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1] = 1
    title: str
    tasks: list[Task] = Field(min_length=1)
    variants: dict[str, dict[str, Any]] = Field(min_length=1)


def packaged_experiments() -> list[str]:
    """Names of the packaged experiments."""
    folder = resources.files("relpos") / "recipes" / "experiments"
    return sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".yaml"))


def load_experiment(name: str) -> Experiment:
    """Read a packaged experiment. Raises: UsageError."""
    if name not in packaged_experiments():
        raise UsageError(
            f"no experiment {name!r}; the packaged ones are {', '.join(packaged_experiments())}."
        )
    text = (resources.files("relpos") / "recipes" / "experiments" / f"{name}.yaml").read_text("utf-8")
    try:
        return Experiment.model_validate(read_yaml(text))
    except pydantic.ValidationError as error:
        raise UsageError(f"experiment {name}: {error.errors()[0]['msg']}.") from error


def run_experiment(
    experiment: Experiment,
    out: Path,
    overrides: list[str] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Train and test every task in every variant, in the folder `out`; returns one record for each.

    Args:
        overrides: `key.key=value`, applied to every recipe before the variant's overrides.
        report: called with lines about the progress.
    Raises:
        UsageError: an option is wrong, or `out` has runs or results with other settings.
        InputError: a recipe or its data cannot be used, `out` has a user's files with the same names, or
            another process works in it. Interrupted: as `train`. OSError: a file cannot be written.
    """
    file = out / _RESULTS
    check_experiment(out)
    records = read_results(file)
    done = {(record["task"], record["variant"]): record.get("fingerprint") for record in records}
    steps = plan(experiment, overrides or [])
    for task, variant, recipe in steps:
        _check_settings(task, variant, recipe, out, done)
    begun = {(task.name, variant) for task, variant, _ in steps if has_begun(out / task.name / variant)}
    new = [step for step in steps if (step[0].name, step[1]) not in done.keys() | begun]
    for task, variant, recipe in steps:
        # before the other runs are trained, which takes hours
        if (task.name, variant) in begun - done.keys():
            check_format(out / task.name / variant, recipe)
    for task, variant, _ in new:
        check_new(out / task.name / variant)
    _check_text(new)
    # the main process holds the lock
    with working_in(out, _KIND) if PartialState().is_main_process else nullcontext():
        for number, (task, variant, recipe) in enumerate(steps, start=1):
            name = f"run {number} of {len(steps)}: {task.name}, {variant}"
            if (task.name, variant) in done:
                report(f"{name}: done before")
                continue
            run = out / task.name / variant
            report(name)
            model = train(recipe, run, resume=has_begun(run), report=report)
            record = {"task": task.name, "title": task.title, "variant": variant}
            record |= {"fingerprint": fingerprint(recipe), **_measure(task, recipe, run, model)}
            records.append(record)
            lines = (json.dumps(each, ensure_ascii=False) + "\n" for each in records)
            write_text_atomic(file, "".join(lines))
    return records


def check_experiment(out: Path) -> None:
    """Refuse a folder in which a user's files have the names of an experiment's files. Writes nothing.

    Raises:
        InputError: there are such files, or the results are damaged.
    """
    if format_of(out, _KIND) is None and not _was_begun_before_marks(out):
        check_free(out, _KIND, (_RESULTS, "report.html"))


def plan(experiment: Experiment, overrides: list[str]) -> list[tuple[Task, str, Recipe]]:
    """Every task in every variant, and its recipe. Raises: UsageError."""
    steps = []
    for task in experiment.tasks:
        for variant, changes in experiment.variants.items():
            options = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in changes.items())]
            steps.append((task, variant, load_recipe(task.recipe, options)))
    return steps


def fingerprint(recipe: Recipe) -> str:
    """SHA-256 of all settings of `recipe` except `data.folder`, since a corpus may be moved."""
    settings = recipe.model_dump(mode="json")
    del settings["data"]["folder"]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def read_results(file: Path) -> list[dict[str, Any]]:
    """The records in a results file; none if it is missing. An incomplete last line is dropped.

    Raises:
        InputError: a line is not a record.
    """
    if not file.is_file():
        return []
    records = []
    # splitlines would also split at other line separators, which samples may contain
    for number, line in enumerate(file.read_bytes().split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict) or not {"task", "variant"} <= record.keys():
            raise InputError(f"{file} line {number} is damaged; delete that line to repeat its run.")
        records.append(record)
    return records


def _check_text(steps: list[tuple[Task, str, Recipe]]) -> None:
    """Check the corpora of every task before anything is written. Raises: InputError."""
    for task, data in {task.name: (task.name, recipe.data) for task, _, recipe in steps}.values():
        named = [path for sources in data.sources.values() for source in sources for path in source.paths]
        missing = [path for path in named if not (data.folder / path.expanduser()).is_file()]
        if missing:
            others = len(set(missing)) - 1
            more = f" and {others} more file{'s' if others > 1 else ''}" if others else ""
            raise InputError(
                f"{task} needs {missing[0]}{more} in {data.folder.absolute()}; "
                "give the right folder with --data.folder FOLDER."
            )
        check_corpora(data)


def _was_begun_before_marks(out: Path) -> bool:
    """Whether the results in `out` are from an experiment before relpos marked folders."""
    try:
        return any("fingerprint" in record for record in read_results(out / _RESULTS))
    except (InputError, OSError):
        return False


def _check_settings(task: Task, variant: str, recipe: Recipe, out: Path, done: dict[Any, Any]) -> None:
    """Refuse results or a run with other settings than those of `recipe`."""
    run = out / task.name / variant
    if (task.name, variant) in done:
        before = done[task.name, variant]
    elif has_begun(run):
        before = fingerprint(load_recipe(str(run / "recipe.yaml")))
    else:
        return
    if before != fingerprint(recipe):
        raise UsageError(
            f"{out} holds results of other settings ({task.name}, {variant}); choose another --out."
        )


def _measure(task: Task, recipe: Recipe, run: Path, model: Path) -> dict[str, Any]:
    parts, _ = read_parts(recipe.data, run / "cache")
    if not len(parts["test"]):
        raise InputError(f"task {task.name}: the recipe has no test part. Give data.test or data.test_share.")
    translator = Translator.load(model)
    result = evaluate(translator, parts["test"], edges=task.edges)
    history = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    speeds = sorted(
        line["target_tokens_per_second"] for line in history if "target_tokens_per_second" in line
    )
    return {
        "weights": translator.model.num_parameters(),
        "updates": max(line["step"] for line in history),
        "seconds": max(line["seconds"] for line in history),
        "target_tokens_per_second": speeds[len(speeds) // 2] if speeds else None,
        "trained_up_to": task.trained_up_to,
        **result.to_dict(),
        "samples": _samples(parts["test"], result),
        "history": [
            {name: line[name] for name in line if name.startswith("eval_") or name in ("step", "seconds")}
            for line in history
            if "eval_loss" in line
        ],
    }


def _samples(pairs: Any, result: Evaluation, count: int = 12) -> list[dict[str, str]]:
    """Evenly spaced segments of the test set, so that none is chosen by its quality."""
    step = max(1, len(pairs) // count)
    rows = range(0, len(pairs), step)[:count]
    return [
        {
            "source": pairs[row]["source"],
            "reference": pairs[row]["target"],
            "hypothesis": result.hypotheses[row].text,
        }
        for row in rows
    ]
