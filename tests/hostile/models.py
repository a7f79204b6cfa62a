"""Model folders: a copy of a good one in which files are damaged, missing, or something else."""

import os
import shutil
import struct
from pathlib import Path
from random import Random

from hostile.bytes_and_values import damaged, damaged_json
from hostile.case import Case, Material
from hostile.text import words

_OLD = Path(__file__).parents[1] / "translation" / "data" / "format_1"


def make(random: Random, home: Path, material: Material) -> Case:
    """`translate`, `evaluate`, `seal` or `convert` of the damaged folder."""
    folder = home / "model"
    shutil.copytree(material.model, folder)
    is_old = random.random() < 0.2
    if is_old:
        make_old(random, folder)
    if random.random() < 0.7:
        (folder / "seal.json").unlink()
    for _ in range(random.choice((1, 1, 1, 2))):
        name = random.choice(sorted(path.name for path in folder.iterdir()))
        if random.random() < 0.7:
            name = random.choice(("config.json", "generation_config.json", "tokenizer.json", name))
        if (folder / name).is_file() and not (folder / name).is_symlink():
            spoil(random, folder / name, home)
    (home / "in.txt").write_text(f"{words(random)}\n\n{words(random)}\n")
    kind = random.randrange(6)
    if is_old and kind < 4:
        return Case("model", ["convert", "model", "--out", "new"], added=("new",))
    if kind == 0:
        return Case("model", ["seal", "model"], outputs=("model/seal.json",))
    if kind == 1:
        return Case("model", ["seal", "model", "--check"])
    if kind == 2:
        (home / "in.tsv").write_text(f"{words(random)}\t{words(random)}\n")
        return Case("model", ["evaluate", "model", "--data", "in.tsv"])
    options = random.choice(([], ["--beams=1"], ["--json"], ["--sample"], ["--split-long"]))
    return Case("model", ["translate", "model", "in.txt", *options])


def make_old(random: Random, folder: Path) -> None:
    """Put a model of format 1 in the place of the model; its vocabulary may be smaller than the tokenizer."""
    (folder / "model.safetensors").unlink()
    shutil.copytree(
        _OLD / random.choice(("tables_by_head", "post_norm", "shards")), folder, dirs_exist_ok=True
    )


def spoil(random: Random, file: Path, home: Path) -> None:
    """Damage a file, or put something else in its place."""
    with file.open("rb") as opened_before:
        # it may have been spoiled before
        data = opened_before.read(1 << 20)
    file.unlink()
    kind = random.randrange(12)
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        file.symlink_to(
            random.choice(("/dev/zero", "/dev/null", "/proc/self/mem", "missing", file.name, ".."))
        )
    elif kind == 2:
        file.symlink_to(home / "thesis.txt")
    elif kind == 3:
        # a hole of 100 GB, which takes no room
        with file.open("wb") as opened:
            opened.write(data)
            opened.truncate(100 << 30)
    elif kind == 4 and hasattr(os, "mkfifo") and random.random() < 0.5:
        os.mkfifo(file)
    elif kind == 5:
        pass
    elif file.suffix == ".json":
        file.write_bytes(damaged_json(random, data))
    elif file.suffix == ".safetensors":
        file.write_bytes(_damaged_weights(random, data))
    else:
        file.write_bytes(damaged(random, data))


def _damaged_weights(random: Random, data: bytes) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    header, body = data[8 : 8 + length], data[8 + length :]
    kind = random.randrange(6)
    if kind == 0:
        return struct.pack("<Q", random.choice((0, 1, 2**31, 2**63, 2**64 - 1))) + data[8:]
    if kind == 1:
        return data[: 8 + length] + b"\xff\xff\xff\x7f" * (len(body) // 4)
    if kind == 2:
        at = random.randrange(len(body))
        return data[: 8 + length] + body[:at]
    if kind == 3:
        header = damaged_json(random, header)
    elif kind == 4:
        header = header.replace(b"F32", random.choice((b"F16", b"I64", b"BOOL", b"F99")), 1)
    else:
        return damaged(random, data)
    return struct.pack("<Q", len(header)) + header + body
