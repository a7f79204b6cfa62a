"""Tables on standard output: the scores of one test set, and of the variants of an experiment."""

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from relpos.translation.evaluation import Evaluation


def print_scores(result: "Evaluation") -> None:
    """Print the scores of a test set, by length and in total, with their signatures."""
    table = Table(title=None)
    for name in (result.length_unit, "segments", "BLEU", "BLEU lowercased", "chrF", "exact"):
        table.add_column(name, justify="right")
    rows = [(f"{bucket.shortest} to {bucket.longest}", bucket.scores) for bucket in result.buckets]
    for label, scores in [*rows, ("all", result.scores)]:
        table.add_row(
            label,
            f"{scores.segments:,}",
            f"{scores.bleu:.2f}",
            f"{scores.bleu_lowercased:.2f}",
            f"{scores.chrf:.2f}",
            f"{scores.exact:.1%}",
        )
    console = _console()
    console.print(table)
    for name, signature in result.scores.signatures.items():
        print(f"{name}: {signature}")


def print_comparison(records: list[dict[str, Any]]) -> None:
    """Print the records of an experiment: scores of the variants, scores by length, and translations."""
    console = _console()
    for task in dict.fromkeys(record["task"] for record in records):
        rows = [record for record in records if record["task"] == task]
        table = Table(title=f"{rows[0]['title']} ({rows[0]['scores']['segments']:,} test segments)")
        for name in ("", "BLEU", "BLEU lc", "chrF", "exact", "weights", "updates", "minutes", "tokens/s"):
            table.add_column(name, justify="left" if not name else "right")
        for row in rows:
            scores = row["scores"]
            table.add_row(
                row["variant"],
                f"{scores['bleu']:.2f}",
                f"{scores['bleu_lowercased']:.2f}",
                f"{scores['chrf']:.2f}",
                f"{scores['exact']:.1%}",
                f"{row['weights']:,}",
                f"{row['updates']:,}",
                f"{row['seconds'] / 60:.1f}",
                f"{row['target_tokens_per_second'] or 0:,.0f}",
            )
        console.print(table)
        console.print(_length_table(rows))
        sample = Table(title="Translations of test segments, evenly spaced", show_lines=True)
        for name in ("source", "reference", *(row["variant"] for row in rows)):
            sample.add_column(name)
        for cells in zip(*(row["samples"] for row in rows), strict=True):
            first = cells[0]
            sample.add_row(first["source"], first["reference"], *(cell["hypothesis"] for cell in cells))
        console.print(sample)
    for name, signature in records[0]["scores"]["signatures"].items():
        print(f"{name}: {signature}")


def _length_table(rows: list[dict[str, Any]]) -> Any:
    table = Table(title=f"By length: {rows[0]['length_unit']}")
    for name in (
        "length",
        "segments",
        *(f"{row['variant']} {metric}" for metric in ("chrF", "exact") for row in rows),
    ):
        table.add_column(name, justify="right")
    limit = rows[0]["trained_up_to"]
    for buckets in zip(*(row["buckets"] for row in rows), strict=True):
        first = buckets[0]
        shortest, longest = first["shortest"], first["longest"]
        label = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
        if limit is not None and shortest > limit:
            label += " (longer than trained)"
        table.add_row(
            label,
            f"{first['scores']['segments']:,}",
            *(f"{bucket['scores']['chrf']:.1f}" for bucket in buckets),
            *(f"{bucket['scores']['exact']:.1%}" for bucket in buckets),
        )
    return table


def _console() -> Console:
    """Standard output without markup; 140 columns wide if it is not a terminal."""
    return Console(width=None if sys.stdout.isatty() else 140, markup=False, emoji=False)
