"""Make data/photographs from the pictures that ship with scikit-image and scikit-learn.

    pip install scikit-image scikit-learn && python data/build_photographs.py

Each is scaled so that its shorter side has 224 pixels (bicubic, antialiased), cropped at the centre, and stored as PNG.
"""

import hashlib
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

SIDE = 224
FOLDER = Path(__file__).parent / "photographs"
SKIMAGE = Path(find_spec("skimage").origin).parent / "data"
SKLEARN = Path(find_spec("sklearn").origin).parent / "datasets" / "images"
SOURCES = [
    SKIMAGE / name
    for name in ("astronaut.png", "chelsea.png", "coffee.png", "hubble_deep_field.jpg", "retina.jpg", "rocket.jpg")
] + [SKLEARN / name for name in ("china.jpg", "flower.jpg")]

for source in SOURCES:
    with Image.open(source) as image:
        image = image.convert("RGB")
        scale = SIDE / min(image.size)
        image = image.resize([max(SIDE, round(scale * side)) for side in image.size], Image.Resampling.BICUBIC)
        left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
        image.crop((left, top, left + SIDE, top + SIDE)).save(FOLDER / f"{source.stem}.png", optimize=True)
sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(FOLDER.glob("*.png"))]
(FOLDER / "SHA256SUMS").write_text("".join(sums))
