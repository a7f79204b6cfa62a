"""The command `relpos`: text in, text out, progress on standard error.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 stopped by Ctrl-C (143 by SIGTERM). What went wrong is one
line on standard error.
"""

import ctypes
import errno
import json
import os
import shlex
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

try:
    import typer
except ImportError as error:
    # the doctor needs torch alone: it is asked where something is missing
    from relpos._doctor.alone import run_alone

    sys.exit(run_alone(sys.argv[1:], error))

from relpos._options import WithKeys, check_penalty, check_search, overrides, path_of, told
from relpos._streams import (
    check_apart,
    drop_unwritten,
    fail,
    named,
    one_line,
    open_closed_streams,
    say,
    warnings_as_lines,
    written,
)
from relpos.translation.errors import InputError, Interrupted, UsageError, first_line

if TYPE_CHECKING:
    from relpos.translation.generation import Search, Translator

app = typer.Typer(
    help="Translate with relative position representations (Shaw, Uszkoreit and Vaswani, 2018).",
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

ModelArgument = Annotated[
    Path,
    typer.Argument(metavar="MODEL", parser=path_of, help="Folder of a model, or of the run that trained it."),
]
BeamsOption = Annotated[
    int | None,
    typer.Option(min=1, help="Hypotheses kept at each step; 1 is greedy.  [default: the model's, 4]"),
]
PenaltyOption = Annotated[
    float | None,
    typer.Option(help="Exponent on the length that divides a score.  [default: the model's, 0.6]"),
]
BatchOption = Annotated[int, typer.Option(min=1, help="Source subwords translated at once.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON.")]


def main() -> None:
    """Run the command and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run the command with `arguments`; returns its exit code."""
    open_closed_streams()
    try:
        with warnings_as_lines():
            result = app(arguments, prog_name="relpos", standalone_mode=False)
        if result == 128 + signal.SIGINT:
            # what typer makes of Ctrl-C
            raise KeyboardInterrupt
        if sys.stdout is not None:
            # what is still held back may fail, and is better told of here than at exit
            with named(None):
                sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except typer.TyperException as error:
        return fail(told(error), 2)
    except UsageError as error:
        return fail(str(error), 2)
    except InputError as error:
        return fail(str(error), 1)
    except Interrupted as stop:
        where = f"the state is in {stop.checkpoint}" if stop.checkpoint else "nothing was saved yet"
        # what `reproduce` has begun it goes on with by itself
        is_resumed = stop.checkpoint and arguments[:1] != ["reproduce"]
        how = "go on with --resume" if is_resumed else "run the same command again"
        return fail(f"stopped; {where}; {how}.", 128 + stop.signal)
    except (typer.Abort, KeyboardInterrupt):
        how = "; run the same command again to go on" if arguments[:1] == ["reproduce"] else ""
        return fail(f"stopped{how}.", 128 + signal.SIGINT)
    except ModuleNotFoundError as error:
        return fail(f'{error}. This command needs more packages: pip install "relpos[translate]"', 1)
    except ImportError as error:
        # that of relpos.inspection, which names its extra
        return fail(str(error), 1)
    except (BrokenPipeError, SystemExit) as error:
        # the reader of our output has left; typer and rich make a SystemExit of it
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        drop_unwritten()
        return 0
    except MemoryError as error:
        return fail(f"there is not enough memory for this ({first_line(error)}).", 1)
    except OSError as error:
        reason = error.strerror or first_line(error)
        if error.errno == errno.EBADF:
            reason = f"standard output: cannot be written ({reason})"
        return fail(f"{error.filename}: {reason}." if error.filename else f"{reason}.", 1)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        print(f"relpos {version('relpos')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise UsageError("no command given; see relpos --help.")


@app.command(cls=WithKeys)
def train(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(help="A YAML file, or a recipe that comes with relpos: messages, multi30k, numbers."),
    ],
    out: Annotated[
        Path,
        typer.Option(
            parser=path_of, metavar="FOLDER", help="Folder of the run: checkpoints, logs, the model."
        ),
    ],
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a translator as a recipe says.

    Any key of the recipe is an option too: --training.updates 1000 --model.dropout 0.3. Ctrl-C saves the
    state and stops.
    """
    _settle()
    from relpos.translation.recipe import load_recipe
    from relpos.translation.training import train as train_recipe

    loaded = load_recipe(recipe, overrides(context))
    model = train_recipe(loaded, out, resume=resume, report=say)
    if as_json:
        print(json.dumps({"model": str(model), "run": str(out)}))
    else:
        say(f"the model is in {model}; translate with: relpos translate {shlex.quote(str(out))} < text")


@app.command(cls=WithKeys)
def recipe(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(help="A YAML file, or a recipe that comes with relpos: messages, multi30k, numbers."),
    ] = "messages",
) -> None:
    """Print a recipe with every key, its value and what it means.

    A start for your own. Any key is an option too: --training.updates 1000.
    """
    from relpos.translation.recipe import explain_recipe, load_recipe

    print(explain_recipe(load_recipe(name, overrides(context))), end="")


@app.command()
def translate(
    model: ModelArgument,
    file: Annotated[
        Path | None,
        typer.Argument(
            parser=path_of, metavar="[FILE]", help="Text, one segment a line.  [default: standard input]"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            parser=path_of,
            metavar="FILE",
            help="File to write, or to replace when all is done.  [default: standard output]",
        ),
    ] = None,
    beams: BeamsOption = None,
    length_penalty: PenaltyOption = None,
    n_best: Annotated[
        int, typer.Option(min=1, help="Hypotheses for each line; more than one needs --json.")
    ] = 1,
    prefix: Annotated[str, typer.Option(help="Words that every translation begins with.")] = "",
    sample: Annotated[bool, typer.Option("--sample", help="Draw translations from the model.")] = False,
    temperature: Annotated[
        float | None, typer.Option(help="For --sample: over 1 is more varied.  [default: 1]")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**32 - 1, help="For --sample.  [default: 0]")
    ] = None,
    batch_tokens: BatchOption = 2048,
    split_long: Annotated[
        bool,
        typer.Option(
            "--split-long",
            help="Cut lines longer than those trained on at sentence ends, and join the pieces.",
        ),
    ] = False,
    max_line_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of a line, at most; a longer one ends the command.")
    ] = 1 << 20,
    as_json: JsonOption = False,
) -> None:
    """Translate text line by line; empty lines stay empty lines.

    A line on a pipe or a terminal is answered when it comes.
    """
    check_search(
        beams=beams,
        length_penalty=length_penalty,
        sample=sample,
        temperature=temperature,
        seed=seed,
        n_best=n_best,
        shows_scores=as_json,
    )
    _settle()
    import torch

    from relpos.translation.generation import Translator

    translator = Translator.load(model)
    search = _search(
        translator,
        beams,
        length_penalty,
        n_best=n_best,
        sample=sample,
        temperature=1.0 if temperature is None else temperature,
        tokens_per_batch=batch_tokens,
    )
    check_penalty(length_penalty, is_beam_search=search.beams > 1 and not sample, shows_scores=as_json)
    torch.manual_seed(seed or 0)
    check_apart(output, [file] if file else [], model)
    first_line = 1
    with written(output) as write:
        # what is drawn depends on the lines of a batch, and when lines arrive is chance
        for chunk in _arrived(file, max_line_bytes, is_alone=sample and not _is_regular(file)):
            with _progress(len(chunk)) as advance:
                found = translator.translate(
                    chunk,
                    search,
                    prefix=prefix,
                    split_long=split_long,
                    first_line=first_line,
                    with_scores=as_json,
                    progress=advance,
                )
            first_line += len(chunk)
            if as_json:
                records = (
                    {"source": source, "hypotheses": [vars(hypothesis) for hypothesis in hypotheses]}
                    for source, hypotheses in zip(chunk, found, strict=True)
                )
                write(json.dumps(record, ensure_ascii=False) for record in records)
            else:
                write(one_line(hypotheses[0].text) for hypotheses in found)


@app.command()
def evaluate(
    model: ModelArgument,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            parser=path_of,
            metavar="FILE",
            help="Test set: a .tsv, or a .jsonl with the fields source and target, plain or gzipped; or "
            "twice, source and target.  [default: the run's own]",
        ),
    ] = None,
    beams: BeamsOption = None,
    length_penalty: PenaltyOption = None,
    lengths: Annotated[
        str, typer.Option(help="Last length of each bucket but the open one, in words.")
    ] = "5,10,20,40",
    hypotheses: Annotated[
        Path | None, typer.Option(parser=path_of, metavar="FILE", help="File to write the translations to.")
    ] = None,
    batch_tokens: BatchOption = 2048,
    as_json: JsonOption = False,
) -> None:
    """Score translations of a test set by BLEU and chrF.

    The scores come with their signatures, for the whole and by length.
    """
    edges = _edges(lengths)
    check_apart(hypotheses, data or [], model)
    check_search(beams=beams, length_penalty=length_penalty)
    _settle()
    from relpos.translation.evaluation import evaluate as evaluate_pairs
    from relpos.translation.generation import Translator

    with (
        tempfile.TemporaryDirectory(prefix="relpos-", ignore_cleanup_errors=True) as scratch,
        # opened first, so that a file that cannot be written is told before the work
        written(hypotheses or Path(os.devnull)) as write,
    ):
        translator = Translator.load(model)
        pairs = _test_pairs(model, data or [], Path(scratch))
        search = _search(translator, beams, length_penalty, tokens_per_batch=batch_tokens)
        check_penalty(length_penalty, is_beam_search=search.beams > 1, shows_scores=False)
        with _progress(len(pairs)) as advance:
            result = evaluate_pairs(translator, pairs, search, edges=edges, progress=advance)
        write(one_line(hypothesis.text) for hypothesis in result.hypotheses)
    if as_json:
        print(json.dumps(result.to_dict(), ensure_ascii=False))
    else:
        from relpos._console_tables import print_scores

        print_scores(result)


@app.command(cls=WithKeys)
def reproduce(
    context: typer.Context,
    experiment: Annotated[str, typer.Argument(help="An experiment that comes with relpos: demo, multi30k.")],
    out: Annotated[
        Path,
        typer.Option(
            parser=path_of, metavar="FOLDER", help="Folder for runs, results.jsonl and report.html."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Train and compare the variants of an experiment; write a report.

    The report has pictures. Any key of its recipes is an option too. What is done is not done again: run
    it once more, with the same options, to go on.
    """
    _settle()
    from relpos._experiment_report import write_comparison
    from relpos.translation.experiments import load_experiment, run_experiment

    loaded = load_experiment(experiment)
    records = run_experiment(loaded, out, overrides(context), say)
    report = write_comparison(loaded.title, out, records)
    if as_json:
        print(json.dumps({"report": str(report), "results": records}, ensure_ascii=False))
    else:
        from relpos._console_tables import print_comparison

        print_comparison(records)
        print(f"\nThe report with pictures is {report}")


@app.command()
def seal(
    model: ModelArgument,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; compare every byte with the seal there is.")
    ] = False,
) -> None:
    """Seal a model anew after a change that you wanted.

    Such as fine-tuning it in place. The model is loaded first, so that none is sealed that does not load.
    """
    _settle()
    from relpos.translation.loading import check_seal, seal_model

    if check:
        print(f"{check_seal(model)}: every file is as it was sealed.")
    else:
        print(f"{seal_model(model)}: sealed.")


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Show versions, machine, backends, and what is wrong."""
    from relpos._doctor import write_report

    write_report(as_json=as_json)


for _registered in app.registered_commands:
    # without one typer cuts the first sentence to what a line of the list has room for
    _registered.short_help = (_registered.callback.__doc__ or "").splitlines()[0]


def _settle() -> None:
    """Set up this process, which is ours alone: quiet libraries, no telemetry, memory kept for reuse.

    Comes before the other imports of a command: the libraries read the environment when they are imported.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    keep_memory()


def keep_memory() -> None:
    """Have glibc keep freed blocks for reuse; changes this process for good.

    It gives large blocks back to the system at once, and a training step then pays for their page faults
    again.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD, bytes
            mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD, bytes


def _search(
    translator: "Translator", beams: int | None, length_penalty: float | None, **others: Any
) -> "Search":
    from relpos.translation.generation import Search

    saved = translator.model.generation_config
    beams = beams or saved.num_beams or Search.beams
    if length_penalty is None:
        length_penalty = Search.length_penalty if saved.length_penalty is None else saved.length_penalty
    try:
        search = Search(beams=beams, length_penalty=length_penalty, **others)
    except ValueError as error:
        raise UsageError(str(error)) from error
    translator.check(search)
    return search


def _arrived(file: Path | None, max_line_bytes: int, *, is_alone: bool) -> Iterator[list[str]]:
    """Lines as they come: those that are there together, some thousands at most, or each alone."""
    from relpos.translation.corpora import read_arrived

    for lines in read_arrived(sys.stdin.buffer if file is None else file, max_line_bytes, 8192):
        yield from ([line] for line in lines) if is_alone else [lines]


def _is_regular(file: Path | None) -> bool:
    """Whether text comes from a file, all of which can be read at any time."""
    if file is not None:
        return file.is_file()
    try:
        return stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError):
        return False


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    from tqdm import tqdm

    with tqdm(total=total, desc="translating", unit="line", disable=None, leave=False) as bar:
        yield bar.update


def _edges(text: str) -> list[int]:
    try:
        edges = [int(part) for part in text.split(",")]
    except ValueError:
        edges = []
    if not edges or edges[0] < 1 or edges != sorted(set(edges)):
        raise UsageError(f"--lengths takes rising whole numbers from 1 on, such as 5,10,20; got {text!r}.")
    return edges


def _test_pairs(model: Path, data: list[Path], scratch: Path) -> Any:
    from relpos.translation.atomic_files import link_folder
    from relpos.translation.checkpoints import find_model
    from relpos.translation.corpora import Source, read_corpus
    from relpos.translation.preparation import read_parts
    from relpos.translation.recipe import load_recipe

    if not data:
        recipe = model / "recipe.yaml"
        if not recipe.is_file():
            raise UsageError(f"{model} does not know its test set; give one with --data.")
        # a run has its text read already, and is only looked at: what is made anew goes elsewhere
        if find_model(model) != model:
            link_folder(model / "cache", scratch)
        return read_parts(load_recipe(str(recipe)).data, scratch)[0]["test"]
    if len(data) > 2:
        raise UsageError(f"--data takes one file of pairs, or two files; got {len(data)}.")
    if len(data) == 2:
        source = Source(files=(data[0], data[1]))
    elif ".jsonl" in data[0].suffixes:
        source = Source(jsonl=data[0])
    else:
        source = Source(tsv=data[0])
    return read_corpus(source, "source", "target", scratch)
