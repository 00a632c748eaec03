"""Read a data set's folder as rows: images as they are stored, their labels and the names of the classes.

Everything is read through Hugging Face `datasets`, from parquet files as on the hub or from folders of images.
"""

import contextlib
import glob
import itertools
import json
import os
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from skiplab.errors import InputError, unknown
from skiplab.training import layout
from skiplab.training.layout import TRAIN_SPLIT

if TYPE_CHECKING:
    import datasets  # it takes half a second to import, so it is imported where it is used

RESIDENT_BYTES = 4e9  # what is larger is mapped from disk, and streamed
IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMN = "label"


@dataclass(frozen=True)
class Rows:
    """Images as they are stored, {"bytes", "path"}, and their labels."""

    split: str
    records: "datasets.Dataset"  # one column, "image"
    labels: np.ndarray  # int64; negative where missing
    places: np.ndarray  # rows of the split

    def select(self, chosen: np.ndarray) -> "Rows":
        """Return the rows with these indices."""
        return Rows(self.split, self.records.select(chosen), self.labels[chosen], self.places[chosen])

    def name(self, place: int) -> str:
        return (self.records[place]["image"] or {}).get("path") or f"row {self.places[place]} of {self.split}"


def read(folder: Path) -> tuple[dict[str, Rows], list[str], list, str]:
    """Return the rows of each split, the names of the classes, name and size of each file, and what is not used."""
    visible = layout.walk(folder)
    if tables := layout.tables(folder, visible):
        used = [path for path, _ in tables]
        rows, classes = _read_parquet(tables)
    elif any(map(layout.is_image, visible)):
        images = layout.images(folder, visible)
        used = [path for path, _, _ in images]
        rows, classes = _read_images(images)
    else:
        raise InputError(f"{folder} holds no images ({', '.join(layout.IMAGE_SUFFIXES)}) and no parquet files")
    files = [[path.relative_to(folder).as_posix(), path.stat().st_size] for path in used]
    return rows, classes, files, layout.unused(visible, used)


def _read_images(images: list[tuple[Path, str, str]]) -> tuple[dict[str, Rows], list[str]]:
    import datasets

    names = {split: sorted({name for _, part, name in images if part == split}) for _, split, _ in images}
    same = {name: form for split, own in names.items() for name, form in zip(own, _composed(own, split))}
    classes = sorted(set(same.values()))
    number = {name: classes.index(form) for name, form in same.items()}
    rows = {}
    for split in dict.fromkeys(split for _, split, _ in images):
        chosen = [(str(path), number[name]) for path, part, name in images if part == split]
        records = datasets.Dataset.from_dict(
            {"image": [{"bytes": None, "path": path} for path, _ in chosen]},
            features=datasets.Features(image=datasets.Image(decode=False)),
        )
        rows[split] = Rows(split, records, np.array([label for _, label in chosen]), np.arange(len(chosen)))
    return rows, classes


def _composed(names: list[str], split: str) -> list[str]:
    """Return names of classes composed (NFC): file systems and people spell one name in two forms of Unicode."""
    forms: dict[str, str] = {}
    for name in names:
        form = unicodedata.normalize("NFC", name)
        if form in forms:
            raise InputError(
                f"the split {split!r} has the classes {ascii(forms[form])} and {ascii(name)}, one name in two forms of "
                "Unicode; join or rename them"
            )
        forms[form] = name
    return list(forms)


def _read_parquet(tables: list[tuple[Path, str]]) -> tuple[dict[str, Rows], list[str]]:
    rows, names = {}, {}
    for split in dict.fromkeys(split for _, split in tables):
        rows[split], names[split] = _read_split(split, [path for path, part in tables if part == split])
    named = [split for split in (TRAIN_SPLIT, *rows) if names.get(split)]
    if not named:
        return rows, _numbered(np.unique(np.concatenate([part.labels for part in rows.values()])))
    classes = names[named[0]]
    for split in named:
        if names[split] != classes:
            numbers = _numbers_in(classes, names[split], split, named[0])
            labels = rows[split].labels
            valid = (labels >= 0) & (labels < len(numbers))
            rows[split] = replace(rows[split], labels=np.where(valid, numbers[np.where(valid, labels, 0)], -1))
    return rows, classes


def _numbered(labels: np.ndarray) -> list[str]:
    """Return the classes of sorted labels without names. Raises InputError where a number is left out."""
    present = labels[labels >= 0]
    if len(present) and present[-1] >= len(present):
        taken = set(present.tolist())
        gaps = (number for number in itertools.count() if number not in taken)
        lacking = int(present[-1]) + 1 - len(present)
        shown = ", ".join(map(str, itertools.islice(gaps, min(3, lacking)))) + ", …" * (lacking > 3)
        raise InputError(
            f"no image has the label{'s' * (lacking > 1)} {shown}: labels without names count the classes from 0 "
            f"without gaps, here 0 to {len(present) - 1}; number them anew, for instance with "
            "numpy.unique(labels, return_inverse=True), or store their names (a ClassLabel)"
        )
    return [str(label) for label in range(len(present))]


def _numbers_in(classes: list[str], names: list[str], split: str, first: str) -> np.ndarray:
    """Return each name's number among the classes of the `first` split, which may count them in another order."""
    for name in names:
        if name not in classes:
            raise unknown(f"class of the split {split!r}, which the split {first!r} lacks:", name, classes)
    return np.array([classes.index(name) for name in names])


def _read_split(split: str, files: list[Path]) -> tuple[Rows, list[str] | None]:
    """Return the rows of a split, and the names of its classes if its files carry them."""
    columns = [_image_column(file) for file in files]
    names = [_class_names(file) for file in files]
    for file, column, own in zip(files, columns, names):
        if column != columns[0]:
            raise InputError(
                f"{file} has its images in the column {column!r}, {files[0]} in {columns[0]!r}; rename one of the two"
            )
        if own != names[0]:
            raise InputError(
                f"{file} and {files[0]} name their classes differently; write them anew with the same names"
            )
    labels = np.concatenate([_labels(file) for file in files])
    if not len(labels):
        raise InputError(f"the split {split!r} has no rows ({', '.join(map(str, files[:3]))})")
    records = _records(files, columns[0])
    if columns[0] != "image":
        records = records.rename_column(columns[0], "image")
    return Rows(split, records, labels, np.arange(len(labels))), names[0] and _composed(names[0], split)


def _labels(file: Path) -> np.ndarray:
    with _readable(file):
        column = pyarrow.parquet.ParquetFile(file).read([LABEL_COLUMN]).column(LABEL_COLUMN)
    return column.cast(pa.int64(), safe=False).fill_null(-1).to_numpy()


def _records(files: list[Path], column: str) -> "datasets.Dataset":
    """Return the stored images of some files: in memory, or of large files mapped from a copy made once in HF_HOME."""
    import datasets

    image = datasets.Image(decode=False)
    if sum(map(os.path.getsize, files)) < RESIDENT_BYTES:
        parts = []
        for file in files:
            with _readable(file):
                table = pyarrow.parquet.ParquetFile(file).read([column]).replace_schema_metadata()
            parts.append(datasets.Dataset(table).cast_column(column, image))
        return datasets.concatenate_datasets(parts)
    if "::" in str(files[0]):
        raise InputError(f"{files[0]} has '::' in its path, which Hugging Face takes for a chain of files; rename that")
    with _readable(f"{files[0]}{f' or one of {len(files) - 1} more' * (len(files) > 1)}"):
        return datasets.load_dataset(
            "parquet",
            data_files=[glob.escape(str(file)) for file in files],
            columns=[column],
            features=datasets.Features({column: image}),
            split="train",
        )


@contextlib.contextmanager
def _readable(file: Path | str) -> Iterator[None]:
    """Turn what readers of parquet raise into one line that names `file`."""
    import datasets

    try:
        yield
    except (OSError, pa.ArrowException, datasets.exceptions.DatasetGenerationError) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0].rstrip(".")
        raise InputError(f"{file} is not a readable parquet file ({reason})") from error


def _class_names(file: Path) -> list[str] | None:
    """Return the names of the classes in a file's metadata of Hugging Face, None where it has none."""
    import datasets

    metadata = (pyarrow.parquet.read_schema(file).metadata or {}).get(b"huggingface")
    try:  # the label's alone: features of other columns may be of types that this version does not know
        label = ((json.loads(metadata).get("info") or {}).get("features") or {}).get(LABEL_COLUMN) if metadata else None
        return label and getattr(datasets.Features.from_dict({LABEL_COLUMN: label})[LABEL_COLUMN], "names", None)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        reason = " ".join(str(error).split())[:80]
        raise InputError(
            f"{file} says of its labels what datasets {datasets.__version__} does not know ({reason}); write it anew "
            "with a ClassLabel, or without the metadata 'huggingface'"
        ) from error


def _image_column(file: Path) -> str:
    """Return the column with a parquet file's images. Raises InputError where it or the labels are missing."""
    with _readable(file):
        schema = pyarrow.parquet.read_schema(file)
    images = [name for name in schema.names if name in IMAGE_COLUMNS and pa.types.is_struct(schema.field(name).type)]
    labels = [name for name in schema.names if name == LABEL_COLUMN and pa.types.is_integer(schema.field(name).type)]
    if not images or not labels:
        seen = ", ".join(f"{name} ({schema.field(name).type})" for name in schema.names)
        raise InputError(
            f"{file} has the columns {seen}; needed are {' or '.join(IMAGE_COLUMNS)} (struct of bytes and "
            f"path) and {LABEL_COLUMN} (integer)"
        )
    return min(images, key=IMAGE_COLUMNS.index)


def take(rows: Rows, count: int | None, setting: str) -> Rows:
    """Return `count` rows, stratified; all for None. Raises InputError, naming `setting`, where there are fewer."""
    if count is None:
        return rows
    if count > len(rows.labels):
        raise InputError(f"{setting} is {count}, but the split {rows.split!r} has {len(rows.labels)} images")
    return rows.select(spread(rows.labels, count))


def spread(labels: np.ndarray, count: int) -> np.ndarray:
    """Return `count` places, evenly spaced through the images sorted by class: stratified, and without chance."""
    by_class = np.argsort(labels, kind="stable")
    return np.sort(by_class[(2 * np.arange(count) + 1) * len(labels) // (2 * count)])
