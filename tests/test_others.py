"""The stored spectra of the trained models of others are current, whole, and what the models give."""

import re
import shutil

import numpy
import pandas
import pytest
import torch
from timm.models.vision_transformer import VisionTransformer

from skiplab.companion import fingerprint
from skiplab.errors import InputError
from skiplab.models import pretrained
from skiplab.studies.low_pass import layers, others

installed = pytest.mark.skipif(bool(pretrained.missing()), reason="optional: make pretrained")


def test_what_is_stored_is_whole_current_and_says_where_it_is_from():
    content = others.stored()  # raises, naming the command, where it is damaged or stale
    made = content["provenance"]
    assert re.fullmatch("[0-9a-f]{40}", made["git"]["commit"])
    assert made["weights"] == pretrained.SHA256
    assert pretrained.PACKAGES.items() <= made["versions"].items() and set(pretrained.TOOLS) < set(made["versions"])
    assert (others.FOLDER / "spectra.json").stat().st_size < 200_000


def test_what_is_stored_is_loaded_and_has_every_layer_head_and_input():
    said = []
    found = others.load_or_measure(said.append)
    assert len(said) == 1 and said[0].startswith("loaded from data/pretrained/spectra.json, measured at commit ")
    for name, size, inputs in (("vit", (12, 6, 129), 8), ("text", (6, 12, 1 + others.BINS), 20)):
        model = found[name]
        assert (
            model.label == pretrained.LABELS[name] and model.gains.shape == size and len(model.frequencies) == size[-1]
        )
        assert (model.gains[..., 0] >= 1 - 1e-4).all() and (model.gains > 0).all()
        assert len(model.heads) == model.heads.input.nunique() == inputs and len(model.similarity) == inputs * size[0]
        assert (model.heads.halves <= model.heads.low_pass).all()
    assert {name: value.shape[-1] for name, value in found["vit"].spectra.items()} == dict.fromkeys(
        ("frequencies", "patches", "tokens", "sab"), 129
    )


@pytest.fixture
def copied(tmp_path, monkeypatch):
    shutil.copytree(others.FOLDER, tmp_path / "pretrained")
    monkeypatch.setattr(others, "FOLDER", tmp_path / "pretrained")
    monkeypatch.setattr(pretrained, "missing", lambda: ["onnx"])
    return tmp_path / "pretrained"


def test_a_damaged_file_is_refused(copied):
    path = copied / "spectra.json"
    path.write_text(path.read_text().replace("1", "2", 1))
    with pytest.raises(InputError, match="does not match SHA256SUMS; repair it with git checkout or make pretrained"):
        others.load_or_measure(print)
    path.unlink()
    with pytest.raises(InputError, match="is missing or does not match"):
        others.load_or_measure(print)


def test_other_sentences_or_other_code_make_it_stale(copied, monkeypatch):
    (copied / "sentences.txt").write_text("Only this.\n")
    with pytest.raises(InputError, match="is stale: code or inputs changed; measure again with: make pretrained"):
        others.load_or_measure(print)
    before = others.depends_on()
    reached = fingerprint.reached_modules(*others.MEASURING)
    for module in others.MEASURING:
        monkeypatch.setattr(fingerprint, "reached_modules", lambda *names: reached | {module: "x = 1"})
        assert others.depends_on()["code"] != before["code"]


def test_what_is_stale_is_measured_anew_where_the_packages_are(copied, monkeypatch):
    content = others.stored()
    (copied / "spectra.json").unlink()
    monkeypatch.setattr(pretrained, "missing", list)
    monkeypatch.setattr(others, "measure", lambda: content)
    said = []
    assert set(others.load_or_measure(said.append)) == {"vit", "text"} and said[0].startswith("measured anew: ")
    others.store()
    assert others.stored() == content


@installed
def test_measuring_again_gives_what_is_stored():
    def compare(new, old):
        if isinstance(old, dict):
            assert new.keys() == old.keys()
            for key in old:
                compare(new[key], old[key])
        elif isinstance(numpy.ravel(old)[0], str):
            assert new == old
        else:
            numpy.testing.assert_allclose(new, old, rtol=1e-3, atol=1e-4)

    again = others.measure()
    compare(again["models"], others.stored()["models"])


@installed
def test_every_sentence_is_long_enough_for_every_interval():
    sentences = (others.FOLDER / "sentences.txt").read_text().splitlines()
    lengths = [len(pretrained.token_ids(sentence)) for sentence in sentences]
    assert len(set(sentences)) >= 16 and min(lengths) >= 2 * others.BINS and len(set(lengths)) > 8


MAPS = [
    torch.softmax(3 * torch.randn(2, 3, 17, 17, generator=torch.Generator().manual_seed(layer)), dim=-1)
    for layer in range(4)
]


def test_heads_are_counted_as_the_definition_says():
    f = numpy.fft.fft(numpy.eye(17), norm="ortho")
    table = others.by_head(MAPS)
    for image in range(2):
        gains = numpy.array(
            [
                [numpy.linalg.norm(f @ head @ f.conj().T, axis=1) for head in layer[image].double().numpy()]
                for layer in MAPS
            ]
        ).reshape(12, 17)
        upper = gains[:, numpy.abs(numpy.fft.fftfreq(17)) > 0.25].mean(axis=1)
        assert table.low_pass[image] == pytest.approx(100 * (gains[:, 0] > upper).mean())
        assert table.halves[image] == pytest.approx(100 * (gains[:, 0] > 2 * upper).mean())
        assert (
            sorted(100 * upper / gains[:, 0])[5]
            <= table.kept[image] + 1e-4
            <= sorted(100 * upper / gains[:, 0])[6] + 2e-4
        )


def test_permutations_filter_nothing_and_means_everything():
    shift = torch.eye(16).roll(1, dims=0).expand(1, 1, 16, 16)
    mean = torch.full((1, 1, 16, 16), 1 / 16)
    table = others.by_head([shift, mean])
    assert table.halves[0] == 50 and others.by_head([mean]).kept[0] == pytest.approx(0, abs=1e-4)
    assert others.by_head([shift]).kept[0] == pytest.approx(100, abs=1e-3)


def test_intervals_of_bands_hold_every_band_once():
    n = 17
    gains = torch.rand(3, n)
    gains[:, 9:] = gains[:, 1:9].flip(-1)
    binned = others._binned(gains)
    assert binned.shape == (3, 9) and torch.equal(binned[:, 0], gains[:, 0])
    torch.testing.assert_close(binned[:, 1:], gains[:, 1:9])  # eight bands, one in each interval
    ones = others._binned(torch.ones(48))
    assert torch.equal(ones, torch.ones(9))
    marked = torch.zeros(48)
    marked[3] = 1  # 3/48 of a cycle is the end of the first interval, which holds three bands
    assert others._binned(marked).tolist() == pytest.approx([0, 1 / 3, *[0] * 7])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return VisionTransformer(
        img_size=28, patch_size=7, in_chans=1, num_classes=10, embed_dim=24, depth=3, num_heads=3
    ).eval()


IMAGES = torch.randn(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))


def test_a_vit_of_timm_is_traced_alike(model):
    trace = others.trace(model, IMAGES)
    table = others.by_layer(trace.tokens[1:], trace.maps)
    expected = layers.similarity_by_layer(model, IMAGES)
    mean = table.groupby("block")[["depth", "features", "attention"]].mean()
    pandas.testing.assert_frame_equal(mean, expected.set_index("block")[["depth", "features", "attention"]], atol=1e-6)
    assert others.ranks(table).shape == (3, 2)
    summary = others.summary({"a": (others.by_head(trace.maps), table), "b": (others.by_head(trace.maps), table)})
    assert list(summary.index) == ["a", "b"] and summary.iloc[0].str.fullmatch(r"-?[\d.]+ ± [\d.]+").all()


def test_photograph_spectra_are_those_of_the_explicit_transform(model):
    trace = others.trace(model, IMAGES)
    spectra = others.photograph_spectra(IMAGES, 7, trace)
    f = numpy.fft.fft(numpy.eye(16), norm="ortho")
    patches = trace.tokens[2][:, 1:].double().numpy()
    squares = numpy.mean([(numpy.abs(f @ x) ** 2).sum(axis=1) / (x**2).sum() for x in patches], axis=0)
    expected = numpy.sqrt([squares[0], *(squares[i] + squares[16 - i] for i in range(1, 8)), squares[8]])
    assert spectra["tokens"][2].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert spectra["frequencies"].tolist() == [i / 16 for i in range(9)] and spectra["sab"].shape == (3, 9)
    for part in ("patches", "tokens", "sab"):
        assert spectra[part].square().sum(dim=-1).tolist() == pytest.approx([1.0] * len(spectra[part]), rel=1e-5)
    constant = others.photograph_spectra(torch.ones(1, 1, 28, 28), 7, trace)
    table = others.energy_shares(constant)
    assert table.loc["patches"].tolist() == pytest.approx([100, 0], abs=1e-4) and len(table) == 4
    assert (table.sum(axis=1) <= 100 + 1e-3).all()
