"""Options of the command: keys of a recipe as options, nearest names, options without effect."""

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from relpos.translation.errors import UsageError
from relpos.translation.setting_ranges import LENGTH_PENALTIES, TEMPERATURES

if TYPE_CHECKING:
    from relpos.translation.generation import Search, Translator

_OVERRIDES = "relpos.overrides"


class WithKeys(TyperCommand):
    """A command that accepts every key of a recipe as an option, `--training.updates 3`; see `overrides`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remove the keys from the arguments, and parse the rest as usual."""
        rest, ctx.meta[_OVERRIDES] = _take_keys(args)
        return super().parse_args(ctx, rest)


def overrides(context: typer.Context) -> list[str]:
    """The keys given to a command `WithKeys`, each as `key.key=value`."""
    return context.meta[_OVERRIDES]


def path_of(text: str) -> Path:
    """The path in an option; refuses an empty one, which would mean the working folder."""
    if not text:
        raise UsageError("a path is empty; name a file or a folder.")
    return Path(text)


def usage_message(error: typer.TyperException) -> str:
    """The message of a usage error, with the nearest option for an unknown one."""
    # str(error) does not name the option or argument
    message, name = error.format_message(), getattr(error, "option_name", None)
    if name is None or not message.startswith("No such option"):
        # pydantic checks the values of options
        return message.replace("Input should be", "it must be").partition(", unable to")[0]
    context: Any = getattr(error, "ctx", None)
    command = context.command if context else None
    known = [option for each in command.params for option in each.opts] if command else []
    known = [option for option in known if option.startswith("--")]
    if isinstance(command, WithKeys):
        known += [f"--{key}" for key in _recipe_keys()]
        # first the keys whose last word was given, as in --updates
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
    """Check the options of a search.

    Raises:
        UsageError: an option is out of range, or has no effect beside another one.
    """
    for name, value, (least, most) in (
        ("--temperature", temperature, TEMPERATURES),
        ("--length-penalty", length_penalty, LENGTH_PENALTIES),
    ):
        # false for NaN too
        if value is not None and not least <= value <= most:
            raise UsageError(f"{name} must be from {least:g} to {most:g}; got {value}.")
    if n_best > 1 and not shows_scores:
        raise UsageError("--n-best gives several translations of a line; add --json.")
    if not sample:
        for name, given in (("--temperature", temperature), ("--seed", seed)):
            if given is not None:
                raise UsageError(f"{name} has no effect without --sample; add --sample, or omit {name}.")
    elif beams is not None:
        raise UsageError("--sample does not use beams; omit --beams or --sample.")
    check_penalty(length_penalty, is_beam_search=not sample and beams != 1, shows_scores=shows_scores)


def check_penalty(length_penalty: float | None, *, is_beam_search: bool, shows_scores: bool) -> None:
    """Refuse a length penalty if no hypotheses are compared and no score is shown. Raises: UsageError."""
    if length_penalty is not None and not is_beam_search and not shows_scores:
        raise UsageError(
            "--length-penalty has no effect with one beam or --sample, since no hypotheses are compared; "
            "omit it."
        )


def make_search(
    translator: "Translator", beams: int | None, length_penalty: float | None, **others: Any
) -> "Search":
    """The search that the options ask for; the model's settings are the defaults. Raises: UsageError."""
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


def _take_keys(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments other than `--key.key value` and `--key.key=value`, and those as `key.key=value`."""
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
