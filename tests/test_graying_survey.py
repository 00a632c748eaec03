"""The survey of notebook 02: its own gray implementations are right, its counts can fail, its clocks do no harm."""

import dataclasses

import pytest
import torch

from skiplab.companion import runs, timing
from skiplab.studies.token_graying import costs, low_precision, measures
from skiplab.training import loop
from skiplab.transforms.graying import METHODS, patchify
from test_loop import TINY


@pytest.fixture(scope="module")
def tokens():
    return patchify(measures.images(64)[1], 8)


@pytest.mark.parametrize(
    "method, gray",
    [("svd", costs.gray_lapack), ("svd", low_precision.gram_gray), ("dct", low_precision.dense_dct_gray)],
)
def test_the_other_ways_to_gray_agree_with_the_library_in_double_precision(tokens, method, gray):
    found = measures.relative_distance(gray(tokens.double(), 0.7), METHODS[method](tokens.double(), 0.7))
    assert found.max() < 1e-6


def test_distances_are_percent_of_the_second():
    x = torch.ones(2, 3, 4)
    assert measures.relative_distance(1.5 * x, x).tolist() == pytest.approx([50, 50])


def test_spectra_start_at_one_and_fall():
    found = measures.spectra([1.0, 0.5])
    assert len(found) == 8 * 2 * 2 * 196
    curves = found.pivot_table(index="index", columns=["photograph", "form", "ε"], values="sigma")
    assert (curves.loc[1] == 1).all() and (curves.diff().iloc[1:] <= 1e-12).all(axis=None)


def test_without_graying_both_forms_are_the_same():
    found = measures.compare_forms([1.0])
    assert len(found) == 24 and found.distance.max() < 1e-4
    finite = found[found.kappa < float("inf")]
    assert ((finite.svd / finite.dct - 1).abs() < 1e-6).all() and ((finite.svd / finite.target - 1).abs() < 1e-6).all()


def test_the_statements_hold_and_their_counts_can_fail(monkeypatch):
    found = measures.svd_cases(20)
    assert set(found) == {"asa.tg.svd_exact", "asa.tg.svd_flips"}
    assert all(count.violations == 0 and count.cases >= 20 for count in found.values())
    assert measures.svd_cases(20) == found
    monkeypatch.setitem(METHODS, "svd", METHODS["dct"])
    assert all(count.violations > 0 for count in measures.svd_cases(20).values())


def test_low_precision_has_every_way_and_knows_no_error_of_an_infinite_kappa():
    found = low_precision.compare([0.5])
    assert len(found) == 8 * 3 * 4 and (found.error > 0).all()
    unknown = found[found.kappa_error.isna()]
    assert set(unknown.photograph) == {"astronaut", "retina"} and not unknown.way.str.startswith("DCT").any()


def test_the_clock_restores_the_threads_and_times_every_task_in_every_round():
    before, done = torch.get_num_threads(), []
    times = timing.interleaved({"a": lambda: done.append("a"), "b": lambda: done.append("b")}, "cpu", 2)
    assert done == ["a", "b"] * 3 and {name: len(values) for name, values in times.items()} == {"a": 2, "b": 2}
    assert torch.get_num_threads() == before


def test_costs_have_three_repetitions():
    times = costs.graying_times("cpu", 1)
    assert times.groupby(["tokens", "way"]).size().eq(3).all() and len(times) == 27
    assert times[times.way == "torch.linalg.svd"].faster.eq(1).all()
    ratios = costs.step_ratios("vit_tiny_patch16_224", "cpu", 1)
    assert len(ratios) == 9 and (ratios.ratio > 1).all()


def test_workers_prepare_images_and_agree_with_batches():
    assert (costs.worker_rates(24, workers=1)["images a second"] > 0).all()
    assert costs.worker_agrees() and not costs.worker_agrees(tolerance=0)


def test_kappas_of_a_trained_model(store):
    plain, grayed, inside = runs.load_or_run(
        loop.train,
        [
            TINY,
            dataclasses.replace(TINY, graying="svd", epsilon=0.5, graying_patch_size=7),
            dataclasses.replace(TINY, graying="svd", epsilon=0.5, graying_blocks=[0, 1]),
        ],
        workers=0,
    )
    found = {
        name: measures.model_kappas(run, 6, 7).groupby(["images", "place", "block"]).log_kappa.apply(list)
        for name, run in (("plain", plain), ("grayed", grayed), ("inside", inside))
    }
    for name in ("plain", "inside"):
        assert all(found[name]["as trained"][key] == found[name]["plain"][key] for key in found[name]["plain"].index)
    patches = found["grayed"]
    finite = [(a, b) for a, b in zip(patches["as trained", "patches", 0], patches["plain", "patches", 0]) if b < 10]
    assert all(a == pytest.approx(b / 2, rel=1e-3) for a, b in finite)
    assert set(patches.index.get_level_values("block")) == {0, 1, 2}
    assert measures.block_graying_top1(inside, False) == pytest.approx(inside.result["test_top1"])
    assert measures.block_graying_top1(plain, True) == measures.block_graying_top1(plain, False)
    model, images = inside.load_model(), torch.randn(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    logits = [
        model.train(training)(images) for training in (False, True)
    ]  # TINY has no dropout: graying is all that differs
    assert not torch.allclose(*logits, rtol=0.01)
