"""What the README shows is run: its Python in order, its recipe through the checks, its commands by name."""

import re
from pathlib import Path

import pytest

from relpos.cli import app
from relpos.translation.recipe import load_recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TRANSLATOR = (ROOT / "docs" / "translator.md").read_text(encoding="utf-8")


def shell(text: str) -> str:
    """The commands of a page."""
    return "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))


@pytest.mark.parametrize(
    "page", ["README.md", "docs/modules.md", "docs/decoding.md", "docs/text.md", "docs/translator.md"]
)
def test_python_of_a_page_runs_and_prints_what_it_says(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for code in blocks:
        exec(compile(code, page, "exec"), names)
        printed = capsys.readouterr().out
        for expected in re.findall(r"print\(.*\)  # (.*)", code):
            assert expected in printed


@pytest.mark.parametrize("page", [README, TRANSLATOR], ids=["README.md", "docs/translator.md"])
def test_recipe_of_a_page_is_valid(tmp_path: Path, page: str) -> None:
    (text,) = re.findall(r"cat > my.yaml <<'END'\n(.*?)END\n", shell(page), re.DOTALL)
    (tmp_path / "my.yaml").write_text(text)
    assert load_recipe(str(tmp_path / "my.yaml")).training.updates == 20000


def test_commands_of_the_pages_exist_and_every_command_is_shown() -> None:
    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    used = set(re.findall(r"^(?:.*\| )?relpos (\w+)", shell(README + TRANSLATOR), re.MULTILINE))
    assert used == known - {"reproduce"}
    assert "relpos reproduce multi30k" in (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make (\S+)", shell(README), re.MULTILINE))
    assert targets == {"demo", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.split()) <= 800
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
