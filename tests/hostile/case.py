"""A case: a command, what it reads, and what it may change in the user's folder."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Material:
    """What was made once: a small run of ours, and its recipe."""

    run: Path
    recipe: Path

    @property
    def model(self) -> Path:
        return self.run / "model"


@dataclass(frozen=True)
class Case:
    """A command to be run in the user's folder.

    Paths are relative to that folder. `outputs` may change, with all that they hold; what `kept` names
    stays also there. A name of `added` may come, where nothing stands yet.
    """

    kind: str
    arguments: list[str]
    stdin: bytes = b""
    outputs: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    # folder that Python looks for installed distributions in
    site: str | None = None
