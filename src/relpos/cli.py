"""The command `relpos`: text in, text out, progress on standard error.

Exit codes: 0 success, 1 failure, 2 wrong use, 130 stopped by Ctrl-C (143 by SIGTERM). An error is one line on
standard error.
"""

import ctypes
import errno
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ImportError as error:
    # the doctor needs torch alone: it reports which packages are missing
    if sys.argv[1:] in (["doctor"], ["doctor", "--json"]):
        from relpos._doctor import write_report

        write_report(as_json="--json" in sys.argv)
        sys.exit()
    sys.exit(
        f'relpos: the commands need more packages ({error}): pip install "relpos[translate]". '
        "relpos doctor runs without them."
    )

from relpos._evaluation_data import field_names, length_edges, read_test_set
from relpos._options import (
    WithKeys,
    check_penalty,
    check_search,
    make_search,
    overrides,
    path_of,
    usage_message,
)
from relpos._streams import (
    check_apart,
    drop_unwritten,
    fail,
    is_regular,
    named,
    one_line,
    open_closed_streams,
    read_batches,
    say,
    warnings_as_lines,
    written,
)
from relpos.translation.errors import InputError, Interrupted, UsageError, first_line

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
    typer.Option(
        metavar="N", min=1, help="Beam size; 1 is greedy search.  [default: the model's setting, or 4]"
    ),
]
PenaltyOption = Annotated[
    float | None,
    typer.Option(
        metavar="X", help="Scores are divided by length**X.  [default: the model's setting, or 0.6]"
    ),
]
BatchOption = Annotated[
    int, typer.Option(metavar="N", min=1, help="Source subwords in a batch, padding included.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Write JSON.")]
RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A YAML file, or a packaged recipe: messages, multi30k or numbers."
    ),
]


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
            # typer's exit code for Ctrl-C
            raise KeyboardInterrupt
        if sys.stdout is not None:
            # a failing flush is reported here; Python would report it at exit
            with named(None):
                sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except typer.TyperException as error:
        return fail(usage_message(error), 2)
    except UsageError as error:
        return fail(str(error), 2)
    except InputError as error:
        return fail(str(error), 1)
    except Interrupted as stop:
        where = f"the state is in {stop.checkpoint}" if stop.checkpoint else "nothing was saved yet"
        # `reproduce` resumes without an option
        is_resumed = stop.checkpoint and arguments[:1] != ["reproduce"]
        how = "continue with --resume" if is_resumed else "run the same command again"
        return fail(f"stopped; {where}; {how}.", 128 + stop.signal)
    except (typer.Abort, KeyboardInterrupt):
        how = "; run the same command again to continue" if arguments[:1] == ["reproduce"] else ""
        return fail(f"stopped{how}.", 128 + signal.SIGINT)
    except ModuleNotFoundError as error:
        return fail(f'{error}. This command needs more packages: pip install "relpos[translate]"', 1)
    except ImportError as error:
        # relpos.inspection names its extra in the message
        return fail(str(error), 1)
    except (BrokenPipeError, SystemExit) as error:
        # the reader of our output has closed the pipe; typer and rich raise SystemExit then
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
    recipe: RecipeArgument,
    out: Annotated[
        Path,
        typer.Option(parser=path_of, metavar="FOLDER", help="Folder of the run: checkpoints, logs, model."),
    ],
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a translator from a recipe.

    Every key of the recipe is also an option: --training.updates 1000 --model.dropout 0.3. Ctrl-C saves a
    checkpoint and stops.
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
    name: RecipeArgument = "messages",
) -> None:
    """Print a recipe with every key, its value and its meaning.

    Use it as a start for your own. Every key is also an option: --training.updates 1000.
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
            help="Output file, replaced only on success.  [default: standard output]",
        ),
    ] = None,
    beams: BeamsOption = None,
    length_penalty: PenaltyOption = None,
    n_best: Annotated[
        int, typer.Option(metavar="N", min=1, help="Translations of each line; more than one needs --json.")
    ] = 1,
    prefix: Annotated[str, typer.Option(metavar="TEXT", help="First words of every translation.")] = "",
    sample: Annotated[
        bool, typer.Option("--sample", help="Sample translations instead of searching.")
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(metavar="X", help="For --sample: above 1 is more varied.  [default: 1]"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, max=2**32 - 1, help="For --sample: random seed.  [default: 0]"),
    ] = None,
    batch_tokens: BatchOption = 2048,
    split_long: Annotated[
        bool,
        typer.Option(
            "--split-long",
            help="Split lines longer than the training data at sentence ends, and join the translations.",
        ),
    ] = False,
    max_line_bytes: Annotated[
        int, typer.Option(metavar="N", min=1, help="Bytes in a line; a longer line is an error.")
    ] = 1 << 20,
    as_json: JsonOption = False,
) -> None:
    """Translate text line by line; empty lines stay empty lines.

    Lines from a pipe or a terminal are translated as they arrive.
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
    search = make_search(
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
        # samples depend on the lines of a batch, so lines from a pipe, which arrive at random times, go alone
        for chunk in read_batches(file, max_line_bytes, is_alone=sample and not is_regular(file)):
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
            help="Test set: a .tsv or .jsonl file, plain or gzipped; or two line-aligned files, --data "
            "SOURCE --data TARGET.  [default: the test set of the run]",
        ),
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE,TARGET",
            help="For a .jsonl file: its two fields, for example en,de or translation.en,translation.de.  "
            "[default: source,target]",
        ),
    ] = None,
    beams: BeamsOption = None,
    length_penalty: PenaltyOption = None,
    lengths: Annotated[
        str, typer.Option(metavar="N,N,N", help="Upper edges of the length buckets, in words.")
    ] = "5,10,20,40",
    hypotheses: Annotated[
        Path | None, typer.Option(parser=path_of, metavar="FILE", help="File for the translations.")
    ] = None,
    batch_tokens: BatchOption = 2048,
    as_json: JsonOption = False,
) -> None:
    """Score translations of a test set by BLEU and chrF.

    Prints the scores of the whole test set and by length, with sacrebleu's signatures.
    """
    edges = length_edges(lengths)
    names = field_names(fields, data or [])
    check_apart(hypotheses, data or [], model)
    check_search(beams=beams, length_penalty=length_penalty)
    _settle()
    from relpos.translation.evaluation import evaluate as evaluate_pairs
    from relpos.translation.generation import Translator

    with (
        tempfile.TemporaryDirectory(prefix="relpos-", ignore_cleanup_errors=True) as scratch,
        # opened first, so that an unwritable file fails before the work
        written(hypotheses or Path(os.devnull)) as write,
    ):
        translator = Translator.load(model)
        pairs = read_test_set(model, data or [], names, Path(scratch))
        search = make_search(translator, beams, length_penalty, tokens_per_batch=batch_tokens)
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
    experiment: Annotated[
        str, typer.Argument(metavar="EXPERIMENT", help="A packaged experiment: demo or multi30k.")
    ],
    out: Annotated[
        Path,
        typer.Option(
            parser=path_of, metavar="FOLDER", help="Folder of the runs, results.jsonl and report.html."
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Train and compare the variants of an experiment; write a report.

    Every key of its recipes is also an option. Finished runs are not repeated: run the same command again to
    continue after an interruption.
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
        bool, typer.Option("--check", help="Write nothing; compare every byte with the existing seal.")
    ] = False,
) -> None:
    """Renew the seal of a model after an intended change, such as new training.

    The model is loaded first, so that a broken model is not sealed.
    """
    _settle()
    from relpos.translation.loading import check_seal, seal_model

    if check:
        print(f"{check_seal(model)}: every file matches the seal.")
    else:
        print(f"{seal_model(model)}: sealed.")


@app.command()
def convert(
    model: ModelArgument,
    out: Annotated[
        Path, typer.Option(parser=path_of, metavar="FOLDER", help="Folder of the new model; new or empty.")
    ],
) -> None:
    """Convert a model of an older format to the present one.

    The model in MODEL is left as it is. A checkpoint becomes a model, whose training cannot be continued.
    """
    _settle()
    from relpos.translation.conversion import convert_model

    print(f"{convert_model(model, out)}: converted.")


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Show versions, the machine, the backends, and problems."""
    from relpos._doctor import write_report

    write_report(as_json=as_json)


for _registered in app.registered_commands:
    # typer would truncate the first sentence
    _registered.short_help = (_registered.callback.__doc__ or "").splitlines()[0]


def _settle() -> None:
    """Set up the process of a command: quiet libraries, no telemetry, freed memory kept for reuse.

    Call it before the other imports of a command, since the libraries read the environment when imported.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    keep_memory()


def keep_memory() -> None:
    """Make glibc keep freed blocks for reuse, for the rest of the process.

    By default it returns large blocks to the system, and each training step pays for their page faults again.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD, bytes
            mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD, bytes


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    from tqdm import tqdm

    with tqdm(total=total, desc="translating", unit="line", disable=None, leave=False) as bar:
        yield bar.update
