"""What the README shows is run: its Python in order, its recipe through the checks, its commands by name."""

import re
from pathlib import Path

import pytest

from relpos.cli import app
from relpos.translation.recipe import load_recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))


@pytest.mark.parametrize("page", ["README.md", "docs/decoding.md", "docs/text.md"])
def test_python_of_a_page_runs_and_prints_what_it_says(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for code in blocks:
        exec(compile(code, page, "exec"), names)
        printed = capsys.readouterr().out
        for expected in re.findall(r"print\(.*\)  # (.*)", code):
            assert expected in printed


def test_recipe_of_the_readme_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"cat > my.yaml <<'END'\n(.*?)END\n", SHELL, re.DOTALL)
    (tmp_path / "my.yaml").write_text(text)
    assert load_recipe(str(tmp_path / "my.yaml")).model.d_model == 256


def test_commands_of_the_readme_exist() -> None:
    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    used = set(re.findall(r"^(?:.*\| )?relpos (\w+)", SHELL, re.MULTILINE))
    assert used == known - {"reproduce"}
    assert "relpos reproduce multi30k" in README


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^make (\S+)", SHELL, re.MULTILINE))
    assert targets == {"demo", "test"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
