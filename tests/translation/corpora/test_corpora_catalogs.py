"""Catalogs of installed distributions, found through their metadata."""

import importlib.metadata
import json

import polib
import pytest


def _catalog(*entries, fuzzy=(), obsolete=()):
    """A catalog of (English, translation) or of finished entries."""
    catalog = polib.POFile()
    catalog.metadata = {"Content-Type": "text/plain; charset=utf-8", "Project-Id-Version": "fake"}
    for entry in entries:
        catalog.append(polib.POEntry(msgid=entry[0], msgstr=entry[1]) if isinstance(entry, tuple) else entry)
    for message in fuzzy:
        catalog.append(polib.POEntry(msgid=message, msgstr="x", flags=["fuzzy"]))
    for message in obsolete:
        catalog.append(polib.POEntry(msgid=message, msgstr="x", obsolete=True))
    return catalog


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Lay a distribution with catalogs on the import path: paths in the package, and what they hold."""

    def _install(catalogs, name="fake", editable=False):
        site, code = tmp_path / "site", tmp_path / "code"
        info = site / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        home = code if editable else site
        for path, catalog in catalogs.items():
            (home / path).parent.mkdir(parents=True, exist_ok=True)
            save = catalog.save_as_mofile if path.endswith(".mo") else catalog.save
            save(str(home / path))
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        listed = [f"{info.name}/METADATA", f"{info.name}/RECORD", *([] if editable else catalogs)]
        (info / "RECORD").write_text("".join(f"{path},,\n" for path in listed))
        if editable:
            origin = {"url": code.as_uri(), "dir_info": {"editable": True}}
            (info / "direct_url.json").write_text(json.dumps(origin))
        monkeypatch.syspath_prepend(str(site))
        return ["fake"]

    return _install


@pytest.mark.parametrize(
    "path", ["fake/locale/de/LC_MESSAGES/a.mo", "fake/locale/de/LC_MESSAGES/a.po", "fake/po/de.po"]
)
@pytest.mark.parametrize("editable", [False, True])
def test_catalogs_are_found_plain_or_editable(install, read, path, editable):
    names = install({path: _catalog(("one", "eins"))}, editable=editable)
    assert read(catalogs=names) == [("one", "eins")]


def test_english_may_be_the_target(install, read):
    names = install({"fake/de/LC_MESSAGES/a.mo": _catalog(("one", "eins"))})
    assert read("de", "en", catalogs=names) == [("eins", "one")]


@pytest.mark.parametrize("language", ["de", "de-AT", "de_AT", "DE_at"])
def test_a_region_falls_back_to_its_language(install, read, language):
    names = install({"fake/de/LC_MESSAGES/a.po": _catalog(("one", "eins"))})
    assert read("en-GB", language, catalogs=names) == [("one", "eins")]


def test_an_own_catalog_comes_before_the_fallback(install, read):
    tags = {"de": "Januar", "de_AT": "J\u00e4nner", "pt-BR": "janeiro"}
    names = install(
        {f"fake/{tag}/LC_MESSAGES/a.po": _catalog(("January", text)) for tag, text in tags.items()}
    )
    assert read("en", "de-AT", catalogs=names) == [("January", "J\u00e4nner")]
    assert read("en", "de-CH", catalogs=names) == [("January", "Januar")]
    # the only one of its language
    assert read("en", "pt", catalogs=names) == [("January", "janeiro")]


def test_po_is_read_and_not_the_mo_made_from_it(install, read):
    folder = "fake/de/LC_MESSAGES"
    names = install(
        {
            f"{folder}/a.po": _catalog(("one", "eins")),
            f"{folder}/a.mo": _catalog(("one", "old")),
            f"{folder}/b.mo": _catalog(("two", "zwei")),
        }
    )
    assert read(catalogs=names) == [("one", "eins"), ("two", "zwei")]


def test_doubtful_and_empty_messages_are_left_out(install, read):
    catalog = _catalog(("one", "eins"), ("two", ""), ("three", "  "), fuzzy=["four"], obsolete=["five"])
    assert read(catalogs=install({"fake/de/LC_MESSAGES/a.po": catalog})) == [("one", "eins")]


@pytest.mark.parametrize("ending", ["po", "mo"])
def test_both_plural_forms_are_taken_where_there_are_two(install, read, ending):
    def plural(*forms):
        return _catalog(
            polib.POEntry(msgid="%d day", msgid_plural="%d days", msgstr_plural=dict(enumerate(forms)))
        )

    names = install(
        {
            f"fake/de/LC_MESSAGES/a.{ending}": plural("%d Tag", "%d Tage"),
            f"fake/pl/LC_MESSAGES/a.{ending}": plural("%d a", "%d b", "%d c"),
        }
    )
    assert read(catalogs=names) == [("%d day", "%d Tag"), ("%d days", "%d Tage")]


def test_english_stands_in_the_comment_of_symbolic_messages(install, read):
    path = "fake/de/LC_MESSAGES/a.po"
    names = install({path: _catalog(("Save", "Sichern"))})
    file = importlib.metadata.distribution("fake").locate_file(path)
    file.write_text(
        file.read_text()
        + r"""
#. Default: "Say \"yes\" to ${name}"
#: a.pt:1
msgid "label_yes"
msgstr "Sage \"ja\" zu ${name}"

#. Default: "one line"
#. " and another"
msgid "help_lines"
msgstr "eine Zeile und noch eine"

#. a note
msgid "description_unknown"
msgstr "ohne Englisch"
"""
    )
    assert read(catalogs=names) == [
        ("Save", "Sichern"),
        ('Say "yes" to ${name}', 'Sage "ja" zu ${name}'),
        ("one line and another", "eine Zeile und noch eine"),
    ]


def test_accelerator_marks_are_taken_off_both_sides(install, read):
    marked = [
        *(("_Open", "\u00d6_ffnen"), ("Save _As", "Speichern _unter"), ("Cu_t it", "_Ausschneiden")),
        *(("_Only here", "Nur dort"), ("%(first_name)s _left", "%(first_name)s _ging")),
    ]
    plain = [
        *(("Open", "\u00d6ffnen"), ("Save As", "Speichern unter"), ("Cut it", "Ausschneiden")),
        *(("Only here", "Nur dort"), ("%(first_name)s left", "%(first_name)s ging")),
    ]
    same = [("set lds_ord", "lds_ord setzen"), ("Q & A", "F & A")]
    catalog = _catalog(*marked, *same, ("Editing_dates", "Daten_bearbeiten"))
    assert read(catalogs=install({"fake/de/LC_MESSAGES/a.po": catalog})) == plain + same


def test_ampersands_are_marks_where_the_catalog_uses_them(install, read):
    catalog = _catalog(
        ("&Open", "\u00d6&ffnen"), ("E&xit", "(&X) Ende"), ("Save &amp; close", "Sichern &amp; Ende")
    )
    assert read(catalogs=install({"fake/de/LC_MESSAGES/a.po": catalog})) == [
        ("Open", "\u00d6ffnen"),
        ("Exit", "Ende"),
        ("Save &amp; close", "Sichern &amp; Ende"),
    ]


def test_paragraphs_and_sentences_are_split_where_they_answer_each_other(install, read):
    whole = [
        ("Take it. It is here.", "Nimm es, denn es ist hier."),
        ("What? It is here.", "Wie bitte. Ist es hier?"),
        ("No. It is the one thing which is here.", "Ein einziges Ding ist hier, und zwar dieses. Ja."),
    ]
    paragraphs = [("a\nb\n\nc", "d\ne\n \nf"), ("g\n\nh", "i\nj")]
    catalog = _catalog(*paragraphs, ("It is here. Take it!", "Es ist hier. Nimm es!"), *whole)
    found = read(catalogs=install({"fake/de/LC_MESSAGES/a.po": catalog}))
    assert found[:3] == [("a b", "d e"), ("c", "f"), ("g h", "i j")]
    assert found[3:] == [("It is here.", "Es ist hier."), ("Take it!", "Nimm es!"), *whole]


def test_a_distribution_that_is_not_there_or_has_no_catalog_is_told(failure):
    assert "the distribution pytest has no gettext catalogs" in failure(catalogs=["pytest"])
    told = "the distribution no-such-thing is not installed; run `pip install no-such-thing`."
    assert failure(catalogs=["no-such-thing"]) == told


MANY = [f"a{letter}" for letter in "bcdefghijklm"]


@pytest.mark.parametrize(
    ("tags", "told"), [(["fr", "pt_BR"], "fr, pt_br."), (MANY, f"{', '.join(MANY[:10])} and 2 more.")]
)
def test_an_unknown_language_is_told_with_ten_at_most_of_those_there_are(install, failure, tags, told):
    names = install({f"fake/{tag}/LC_MESSAGES/a.po": _catalog(("a", "b")) for tag in tags})
    assert failure(catalogs=names) == f"the distribution fake has no catalog for de; it has {told}"


@pytest.mark.parametrize("languages", [("fr", "de"), ("en", "en-GB")])
def test_one_side_must_be_english(failure, languages):
    message = failure(*languages, catalogs=["fake"])
    assert f"one of the two languages must be en; got {languages[0]} and {languages[1]}." in message


@pytest.mark.parametrize("ending", ["po", "mo"])
def test_a_damaged_catalog_is_told(install, failure, ending):
    path = f"fake/de/LC_MESSAGES/a.{ending}"
    names = install({path: _catalog(("a", "b"))})
    file = importlib.metadata.distribution("fake").locate_file(path)
    file.write_bytes(b"msgid what\n\xff\xfe")
    assert f"{file} is not a gettext catalog (" in failure(catalogs=names)


@pytest.mark.parametrize("end", ["\r", "\r\n"])
def test_a_catalog_is_read_with_any_ends_of_lines_and_its_texts_are_normalised(install, read, end):
    path = "fake/de/LC_MESSAGES/a.po"
    names = install({path: _catalog(("one", "eins"))})
    file = importlib.metadata.distribution("fake").locate_file(path)
    text = file.read_text("utf-8").replace("eins", "\ufeffu\u0308ber\u200ball\u00a0 ")
    file.write_bytes(text.replace("\n", end).encode())
    assert read(catalogs=names) == [("one", "\u00fcberall")]


@pytest.mark.parametrize("ending", ["po", "mo"])
def test_a_catalog_too_large_to_be_held_is_told_before_it_is_read(install, failure, monkeypatch, ending):
    path = f"fake/de/LC_MESSAGES/a.{ending}"
    names = install({path: _catalog(("one", "eins"))})
    file = importlib.metadata.distribution("fake").locate_file(path)
    monkeypatch.setattr(polib, f"{ending}file", None)
    if ending == "po":
        file.write_bytes(b'msgid "' + b"a" * (4 << 20) + b'"\nmsgstr "b"\n')
        assert failure(catalogs=names) == (
            f"{file}: line 1 has more than 4,194,304 bytes; remove this catalog."
        )
    with file.open("wb") as written:
        written.truncate(65 << 20)
    assert failure(catalogs=names) == f"{file} has more than 67,108,864 bytes; remove this catalog."
