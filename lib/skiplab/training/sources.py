"""The named data sets, and the folder in which the files of one lie: embedded, in the hub's cache, or a local copy."""

import contextlib
import functools
import hashlib
import logging
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from skiplab.errors import InputError
from skiplab.files import ROOT
from skiplab.training.layout import TEST_SPLITS


@dataclass(frozen=True)
class Spec:
    """What is known about a named data set. The defaults hold for a local folder."""

    repo: str | None = None  # on the hub
    revision: str | None = None
    sha256: dict[str, str] = field(default_factory=dict)  # file → hash, checked at each load
    test_split: str = TEST_SPLITS[0]  # the hub's split with labels that plays the test split
    channels: int | None = None
    img_size: int | None = None
    crop: float = 1.0  # resized so that the centre crop keeps this share of the shorter side
    pad: int = 0  # zero border that is added where it leads to img_size
    streams: bool = False  # whatever its size
    gated: bool = False  # needs a token


SPECS = {
    "fashion_mnist": Spec(pad=2),  # columns image, label
    "cifar10": Spec(  # columns img, label
        repo="uoft-cs/cifar10",
        revision="0b2714987fa478483af9968de7c934580d0bb9a2",
        sha256={
            "plain_text/train-00000-of-00001.parquet": "8428b53a88a11ac374111006708df514"
            "69e315a22ac6d66470afd9c78d2ae883",
            "plain_text/test-00000-of-00001.parquet": "841389e6f2d64f28bf17310e430aebac"
            "20ec3ba611a3c5e231dc93c645ce84de",
        },
    ),
    "tiny-imagenet": Spec(  # columns image, label; a few images are grey
        repo="zh-plus/tiny-imagenet",
        revision="5a77092c28e51558c5586e9c5eb71a7e17a5e43f",
        test_split="valid",
        channels=3,
    ),
    "imagenet-1k": Spec(  # columns image, label; the labels of its own test split are secret
        repo="ILSVRC/imagenet-1k",
        revision="49e2ee26f3810fb5a7536bbf732a7b07389a47b5",
        test_split="validation",
        channels=3,
        img_size=224,
        crop=224 / 256,
        streams=True,
        gated=True,
    ),
}
EMBEDDED = ROOT / "data" / "fashion_mnist"


def variable(name: str) -> str:
    """Return the environment variable that makes a name of the hub stand for a local folder."""
    return "COMPANION_" + name.upper().replace("-", "_")


def locate(name: str, spec: Spec, local: str | None) -> tuple[Path, str]:
    """Return the folder of a data set, of its `local` copy if there is one, and where its images come from, in words.

    Raises InputError where it cannot be reached, or its files are not the expected ones.
    """
    if local:
        return Path(local), f"local copy in place of {spec.repo} ({variable(name)}), not bit-exact"
    if spec.repo:
        return _hub_folder(name, spec), f"{spec.repo} at revision {spec.revision}"
    if name not in SPECS:
        return Path(name), f"local folder {name}"
    sums = (EMBEDDED / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    _check_hashes(
        EMBEDDED,
        dict(reversed(line.split()) for line in sums),
        f"repair it with `git checkout -- {EMBEDDED.relative_to(ROOT)}`",
    )
    return EMBEDDED, "embedded: the first 6,000 training and 2,000 test images of Fashion-MNIST (MIT)"


def _hub_folder(name: str, spec: Spec) -> Path:
    """Return the folder of a data set of the hub, from the cache or downloaded."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

    fetch = functools.partial(
        snapshot_download, spec.repo, repo_type="dataset", revision=spec.revision, allow_patterns="*.parquet"
    )
    with quiet():
        try:
            folder = fetch(local_files_only=True)
        except LocalEntryNotFoundError:
            try:
                HfApi().dataset_info(spec.repo, revision=spec.revision, timeout=5)  # a download retries for 25 s
                folder = fetch()
            except GatedRepoError as error:
                raise InputError(
                    f"{name} is gated: accept its terms at https://huggingface.co/datasets/{spec.repo} "
                    "and give your token (HF_TOKEN, or `hf auth login`)"
                ) from error
            except Exception as error:  # whatever the network says, the ways out are the same
                reason = str(error).strip().partition("\n")[0]
                token = " with a token for this gated set (HF_TOKEN)" * spec.gated
                raise InputError(
                    f"{name} is not in the cache and cannot be fetched from the hub ({reason}); three ways out: "
                    f"connect to the network once{token}; set HF_HOME to a cache that holds {spec.repo} at "
                    f"{spec.revision[:7]}; or use local data (a folder, {variable(name)}=folder, or the embedded "
                    "'fashion_mnist')"
                ) from error
    _check_hashes(Path(folder), spec.sha256, "delete the file and load again")
    return Path(folder)


def _check_hashes(folder: Path, sha256: dict[str, str], repair: str) -> None:
    for file, expected in sha256.items():
        path = folder / file
        if not path.is_file():
            raise InputError(f"{path} is missing; {repair}")
        with open(path, "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != expected:
                raise InputError(f"{path} does not have the expected SHA-256; {repair}")


@contextlib.contextmanager
def quiet():
    """Keep Hugging Face's progress bars and log lines, and warnings, off the screen for a while."""
    import datasets
    import huggingface_hub.utils as hub

    logger = logging.getLogger("huggingface_hub")
    level, bars = logger.level, [library for library in (datasets, hub) if not library.are_progress_bars_disabled()]
    logger.setLevel(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for library in bars:
            library.disable_progress_bars()
        try:
            yield
        finally:
            for library in bars:
                library.enable_progress_bars()
            logger.setLevel(level)
