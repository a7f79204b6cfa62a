"""File signatures: recognises files that are not text by their first bytes, and says how to convert each."""

# enough for the names of a zip's first files, and for the signature of a tar at byte 257
HEAD_BYTES = 2048

_UNPACK = "unpack it with {} and name the file in it"

# first bytes, kind, remedy
_KINDS = (
    (b"\xfd7zXZ\x00", "an xz archive", _UNPACK.format("`xz -d`")),
    (b"(\xb5/\xfd", "a zstd archive", _UNPACK.format("`zstd -d`")),
    (b"\x04\x22M\x18", "an lz4 archive", _UNPACK.format("`lz4 -d`")),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK.format("`7z x`")),
    (b"Rar!\x1a\x07", "a rar archive", _UNPACK.format("`unrar x`")),
    (b"\x1f\x9d", "a file packed by `compress`", _UNPACK.format("`gzip -d`")),
    (
        b"PAR1\x15",
        "a parquet file",
        "name its folder by `dataset:` in a recipe, or write it as tab-separated text",
    ),
    (
        b"ARROW1\x00\x00",
        "an Arrow file",
        "name its folder by `dataset:` in a recipe, or write it as tab-separated text",
    ),
    (b"SQLite format 3\x00", "an SQLite database", "write its table as tab-separated text"),
    (b"%PDF-", "a PDF document", "save its text as plain text in UTF-8"),
    (b"{\\rtf1", "an RTF document", "save it as plain text in UTF-8"),
    (
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
        "an old Office document",
        "save it as plain or tab-separated text in UTF-8",
    ),
    (b"\x93NUMPY", "a NumPy array", "name a text file"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file", "name a text file"),
    (b"\x89PNG\r\n\x1a\n", "a PNG picture", "name a text file"),
    (b"\xff\xd8\xff", "a JPEG picture", "name a text file"),
    (b"\x7fELF", "a program", "name a text file"),
)


def binary_format(head: bytes) -> str | None:
    """The kind of a file that begins with `head`, and a remedy: "is a zip archive; unpack it ...".

    None if it may be text. Gzip is not reported, since gzipped text can be read.
    """
    for mark, kind, remedy in _KINDS:
        if head.startswith(mark):
            return f"is {kind}; {remedy}"
    if head[:3] == b"BZh" and head[4:10] == b"1AY&SY":
        return f"is a bzip2 archive; {_UNPACK.format('`bzip2 -d`')}"
    if head[257:262] == b"ustar":
        return f"is a tar archive; {_UNPACK.format('`tar xf`')}"
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _zip_kind(head)
    return None


def _zip_kind(head: bytes) -> str:
    """Which kind of zip it is; the names of its first files tell Office documents apart."""
    document = "save it as plain text in UTF-8"
    sheet = "save it as tab-separated text in UTF-8"
    for mark, kind, remedy in (
        (b"word/", "a Word document", document),
        (b"xl/", "an Excel workbook", sheet),
        (b"opendocument.spreadsheet", "a spreadsheet", sheet),
        (b"opendocument.", "an OpenDocument file", document),
        (
            b"[Content_Types].xml",
            "an Office document (Word, Excel)",
            f"{document}, or a sheet as tab-separated text",
        ),
        (b"epub+zip", "an EPUB book", document),
    ):
        if mark in head:
            return f"is {kind}; {remedy}"
    return f"is a zip archive; {_UNPACK.format('`unzip`')}"
