"""Find the images or parquet files in a data set's folder: their splits and classes, and what cannot be used."""

import difflib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from skiplab.errors import InputError, unknown

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm")
TRAIN_SPLIT = "train"
TEST_SPLITS = ("test", "validation", "valid", "val")  # the first that exists is the test split
SPLITS = (TRAIN_SPLIT, *TEST_SPLITS)  # written in upper or lower case


def walk(folder: Path) -> list[Path]:
    """Return every folder and file below `folder` that is not hidden, sorted; links are followed.

    Raises InputError for a link to nothing or to a folder that it lies in, a name that is not UTF-8, and a folder that
    cannot be read.
    """
    found = []
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_refuse_unreadable):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in [*folders, *files] if not name.startswith(".")]
        for link in (Path(parent, name) for name in folders if os.path.islink(Path(parent, name))):
            if any(above.samefile(link) for above in link.parents):
                raise InputError(f"{link} is a link to {link.resolve()}, which it lies in; remove the link")
    strange = [ascii(str(path)) for path in found if not _is_utf8(path)]
    if strange:
        raise InputError(f"{count(strange, noun='name')} not in UTF-8; rename what has such a name")
    dangling = [str(path) for path in found if not path.exists()]
    if dangling:
        raise InputError(f"{count(dangling, noun='link')} to nothing; mend or remove such links")
    return sorted(found)


def images(folder: Path, visible: Iterable[Path]) -> list[tuple[Path, str, str]]:
    """Return path, split and class of every image, from split/class/…/x.png or class/…/x.png (all in split train).

    Raises InputError where a folder is taken for neither, where one holds no image, and where an image has no class.
    """
    folders = {path: path.relative_to(folder).parts for path in visible if path.is_dir()}
    found = {path: path.relative_to(folder).parts for path in visible if is_image(path)}
    top = [parts[0] for parts in folders.values() if len(parts) == 1]
    has_splits = any(name.lower() in SPLITS for name in top)
    (_check_splits if has_splits else _refuse_misspelt_splits)(folder, top)
    filled = {parts[:depth] for parts in found.values() for depth in range(1, len(parts))}
    empty = [str(path) for path, parts in folders.items() if len(parts) <= 1 + has_splits and parts not in filled]
    if empty:
        raise InputError(
            f"{count(empty, noun='folder')} without an image ({', '.join(IMAGE_SUFFIXES)}); remove empty classes"
        )
    loose = [str(path) for path, parts in found.items() if len(parts) < 2 + has_splits]
    if loose:
        raise InputError(f"{count(loose)} without a label; each must lie in a folder named after its class")
    if has_splits:
        return [(path, parts[0].lower(), parts[1]) for path, parts in found.items()]
    return [(path, TRAIN_SPLIT, parts[0]) for path, parts in found.items()]


def tables(folder: Path, visible: Iterable[Path]) -> list[tuple[Path, str]]:
    """Return path and split of every parquet file, named for instance train-00000-of-00001.parquet.

    Raises InputError for one that is not named after a split.
    """
    found = [(path, path.stem.partition("-")[0].lower()) for path in visible if path.suffix == ".parquet"]
    for path, split in found:
        if split not in SPLITS:
            raise unknown(f"split in the name of {path}:", split, SPLITS)
    return found


def is_image(path: Path) -> bool:
    """Tell an image by the end of its name."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def unused(visible: Iterable[Path], used: Iterable[Path]) -> str:
    """Say how many files of each kind are not used, for instance "2 .txt", in no words if there are none."""
    left = set(visible) - set(used)
    kinds = Counter(path.suffix.lower() or path.name for path in left if path.is_file())
    return ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))


def count(names: list[str], total: int | None = None, noun: str = "image") -> str:
    """Return for instance "5 images (a.png, b.png, c.png, …)"."""
    total = total or len(names)
    return f"{total} {noun}{'s' * (total > 1)} ({', '.join(names[:3])}{', …' * (total > 3)})"


def _check_splits(folder: Path, top: list[str]) -> None:
    for name in top:
        if name.lower() not in SPLITS:
            raise unknown(f"split: {folder} is divided into splits, and beside them lies", name, SPLITS)
    twice = [name for name, number in Counter(map(str.lower, top)).items() if number > 1]
    if twice:
        raise InputError(f"{folder} has the split {twice[0]!r} twice, in upper and lower case; keep one")


def _refuse_misspelt_splits(folder: Path, top: list[str]) -> None:
    """Refuse folders such as training and testing, which would become classes."""
    near = {
        name: match[0]
        for name in top
        if (match := difflib.get_close_matches(name.lower(), SPLITS, 1, cutoff=0.7)) and match[0][0] == name.lower()[0]
    }  # rain is no train
    if TRAIN_SPLIT in near.values() and (len(set(near.values())) > 1 or len(top) == 1):
        name = next(name for name in near if near[name] == TRAIN_SPLIT)
        raise InputError(
            f"{folder} has the folders {', '.join(map(repr, top[:3]))}, which look like splits, not "
            f"classes; rename {name!r} to {TRAIN_SPLIT!r} (allowed: {', '.join(SPLITS)})"
        )


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_unreadable(error: OSError) -> None:
    raise InputError(f"cannot read the folder {error.filename}: {error.strerror}") from error
