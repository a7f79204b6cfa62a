"""Options of the command: keys of a recipe as options, near names, combinations that mean nothing."""

import difflib
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from relpos.translation.errors import UsageError
from relpos.translation.setting_ranges import LENGTH_PENALTIES, TEMPERATURES

_OVERRIDES = "relpos.overrides"


class WithKeys(TyperCommand):
    """A command that takes any key of a recipe as an option, `--training.updates 3`; see `overrides`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the keys out, wherever they stand; the rest is parsed as always."""
        rest, ctx.meta[_OVERRIDES] = _take_keys(args)
        return super().parse_args(ctx, rest)


def overrides(context: typer.Context) -> list[str]:
    """The keys that were given to a command `WithKeys`, each as `key.key=value`."""
    return context.meta[_OVERRIDES]


def path_of(text: str) -> Path:
    """A path that was given; an empty one, as of a variable that is not set, would be the working folder."""
    if not text:
        raise UsageError("a path is empty; name a file or a folder.")
    return Path(text)


def told(error: typer.TyperException) -> str:
    """What is wrong with the options, with the nearest option there is."""
    # str() of it leaves out which option or argument
    message, name = error.format_message(), getattr(error, "option_name", None)
    if name is None or not message.startswith("No such option"):
        # typer's values are checked by pydantic, in its words
        return message.replace("Input should be", "it must be").partition(", unable to")[0]
    context: Any = getattr(error, "ctx", None)
    command = context.command if context else None
    known = [option for each in command.params for option in each.opts] if command else []
    known = [option for option in known if option.startswith("--")]
    if isinstance(command, WithKeys):
        known += [f"--{key}" for key in _recipe_keys()]
        # the last word of a key: --updates
        known.sort(key=lambda option: option.rpartition(".")[2] != name.lstrip("-"))
        near = known[:1] if known[0].endswith(f".{name.lstrip('-')}") else []
    else:
        near = []
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    hint = (
        f"did you mean {near[0]}?" if near else f"see {context.command_path if context else 'relpos'} --help."
    )
    return f"no such option: {name}; {hint}"


def check_search(
    *,
    beams: int | None,
    length_penalty: float | None,
    sample: bool = False,
    temperature: float | None = None,
    seed: int | None = None,
    n_best: int = 1,
    shows_scores: bool = False,
) -> None:
    """Refuse options of a search that are out of range, or that another option leaves without effect.

    Raises:
        UsageError: names the options.
    """
    for name, value, (least, most) in (
        ("--temperature", temperature, TEMPERATURES),
        ("--length-penalty", length_penalty, LENGTH_PENALTIES),
    ):
        # also false of NaN
        if value is not None and not least <= value <= most:
            raise UsageError(f"{name} must be from {least:g} to {most:g}; got {value}.")
    if n_best > 1 and not shows_scores:
        raise UsageError("--n-best gives several translations a line; add --json.")
    if not sample:
        for name, given in (("--temperature", temperature), ("--seed", seed)):
            if given is not None:
                raise UsageError(f"{name} changes nothing without --sample; add --sample, or leave it out.")
    elif beams is not None:
        raise UsageError("--sample draws each token and keeps no beams; leave out --beams or --sample.")
    check_penalty(length_penalty, is_beam_search=not sample and beams != 1, shows_scores=shows_scores)


def check_penalty(length_penalty: float | None, *, is_beam_search: bool, shows_scores: bool) -> None:
    """Refuse a length penalty where no hypotheses are compared and no score is shown. Raises: UsageError."""
    if length_penalty is not None and not is_beam_search and not shows_scores:
        raise UsageError(
            "--length-penalty changes nothing with one beam or --sample, where hypotheses do not compete; "
            "leave it out."
        )


def _take_keys(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments without `--key.key value` and `--key.key=value`, and these as `key.key=value`."""
    rest: list[str] = []
    found: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--":
            return [*rest, argument, *waiting], found
        key, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or "." not in key:
            rest.append(argument)
            continue
        if not equals:
            value = next(waiting, "")
            if not value or value.startswith("--"):
                raise UsageError(f"option --{key} needs a value: --{key} VALUE, or --{key}=VALUE.")
        found.append(f"{key}={value}")
    return rest, found


def _recipe_keys() -> list[str]:
    from relpos.translation.recipe import Recipe

    sections: dict[str, Any] = {name: field.annotation for name, field in Recipe.model_fields.items()}
    return [
        f"{name}.{key}" for name, section in sections.items() for key in getattr(section, "model_fields", ())
    ]
