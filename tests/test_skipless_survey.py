"""What notebook 06 measures: each number against numpy on small models, and the tables' shapes."""

import dataclasses
import json
import math
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas
import pytest
import torch

from skiplab import draws
from skiplab.companion import claims, runs
from skiplab.models.skipless import SkiplessInit
from skiplab.studies.skipless import dense_tasks, inside, jacobians, outcomes, plots
from skiplab.theory.jacobian import attention, autograd_jacobian
from skiplab.training import dino, loop
from skiplab.training.dense import Scene
from test_dino import TINY as DINO
from test_loop import TINY

INIT = {"alpha": 2.0, "beta": 0.6, "c": 3.0}


def model(skip="none", skipless=INIT, depth=3):
    config = dataclasses.replace(
        TINY,
        skip=skip,
        skipless=skipless,
        model_args={"embed_dim": 16, "num_heads": 2, "patch_size": 7, "depth": depth},
    )
    return loop.build_model(config)


def images(count=3):
    return next(loop.dataset(TINY).test.batches(count))[0]


def test_the_formulas_hold_on_every_case_and_a_wrong_one_is_counted(monkeypatch):
    found = jacobians.jacobian_cases(20)
    assert set(found) <= set(claims.claims()) and len(found) == 4
    assert all(measurement.violations == 0 and measurement.cases == 20 for measurement in found.values())
    assert found == jacobians.jacobian_cases(20) != jacobians.jacobian_cases(20, seed=1)
    right = jacobians.attention_jacobian
    monkeypatch.setattr(jacobians, "attention_jacobian", lambda *inputs: 1.001 * right(*inputs))
    wrong = jacobians.jacobian_cases(20)
    assert [wrong[claim].violations for claim in found] == [20, 20, 20, 0]


@pytest.mark.parametrize("skip", ["none", "both"])
def test_the_blocks_tokens_are_the_models_own(skip):
    net = model(skip).eval()
    followed = list(inside.follow(net, images()))
    kept = []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    with torch.no_grad():
        net(images())
    assert len(followed) == 3
    for (_, x), tokens in zip(followed, kept):
        assert x.dtype == torch.float64 and torch.allclose(x.float(), tokens, atol=1e-4)


@torch.no_grad()
def test_the_report_measures_what_it_says():
    net = model()
    table = inside.report(net, images())
    block, x = next(inside.follow(net, images()))
    z, d = block.norm1(x), 16
    weight = block.attn.qkv.weight.numpy()
    w_q, w_k, w_v = (weight[part * d : (part + 1) * d].T for part in range(3))
    maps, margins = [], []
    for image in z.numpy():
        for head in range(2):
            columns = slice(8 * head, 8 * head + 8)
            logits = image @ w_q[:, columns] @ w_k[:, columns].T @ image.T / math.sqrt(8)
            e = np.exp(logits - logits.max(axis=1, keepdims=True))
            maps.append(e / e.sum(axis=1, keepdims=True))
            margins.append(np.diag(logits) - np.where(np.eye(len(logits)), -np.inf, logits).max(axis=1))
    row = table.iloc[0]
    products = np.stack([w_q[:, columns] @ w_k[:, columns].T for columns in (slice(0, 8), slice(8, 16))])
    assert row.qk_diagonal == pytest.approx(np.mean([np.diag(product) for product in products]))
    assert row.qk_spread == pytest.approx(products[:, ~np.eye(d, dtype=bool)].std(ddof=1))
    assert row.weight == pytest.approx(np.mean([np.diag(attn) for attn in maps]))
    assert row.dominant == pytest.approx(100 * np.mean(np.array(margins) > 0)) and row.margin == pytest.approx(
        np.mean(margins)
    )
    kappas = sorted(np.log10(np.linalg.cond(attn)) for attn in maps)
    assert row.log10_kappa_a == pytest.approx(kappas[2], rel=1e-3) and row.infinite == 0  # the lower middle of six
    assert row.kappa_vo == pytest.approx(np.linalg.cond(w_v @ block.attn.proj.weight.numpy().T), rel=1e-9)
    assert list(table.block) == [1, 2, 3] and "log_kappa_k" not in inside.report(net, images(), jacobians=False)


@pytest.mark.parametrize("skip", ["none", "both"])
def test_the_jacobian_is_the_attentions_with_its_skip_if_it_has_one(skip):
    block, x = next(inside.follow(model(skip), images()))
    z = block.norm1(x)[0].detach()[:5]
    w = inside.matrices.weights(block)
    expected = autograd_jacobian(lambda z: (skip == "both") * z + attention(z, w.w_q, w.w_k, w.w_v, w.w_o, 2), z)
    assert torch.allclose(inside.jacobian(block, z, skip == "both"), expected, atol=1e-9)


@torch.no_grad()
def test_spectra_are_of_each_block_and_of_their_product():
    net = model("both", {})
    table = inside.depth_spectra(net, images(), [1, 3])
    ks = [inside.jacobian(block, block.norm1(x)[0], True).numpy() for block, x in inside.follow(net, images())]
    values = np.linalg.svd(ks[0], compute_uv=False)
    assert list(table.depth) == [1, 3] and np.allclose(table["values"][0], values / values[0])
    assert table.log_kappa[1] == pytest.approx(np.log(np.linalg.cond(ks[2])), rel=1e-6)
    through = np.linalg.svd(ks[2] @ ks[1] @ ks[0], compute_uv=False)
    assert table["median"][1] == pytest.approx(np.log10(through[len(through) // 2] / through[0]), rel=1e-6)


@torch.no_grad()
def test_the_terms_add_up():
    found = inside.two_terms(model(), images())
    assert found["larger"] in ("through A", "through V")
    larger = found[f"ln κ, {found['larger']}"]
    assert found["difference"] == found["ln κ, K"] - larger and found[f"size {found['larger']}"] == max(
        found["size through A"], found["size through V"]
    )


def test_only_shared_out_triples_add_up_to_the_target():
    table = inside.query_key_distances(INIT, 16, 2, [0, 1])
    assert list(table.index) == list(inside.READINGS)[:3]
    assert table.loc["triples shared out", "all heads"] < 1e-8 < table.loc["a Z for each head", "all heads"]
    assert table["each head"].between(0, 1).all() and table.loc["one Z for all heads", "all heads"] > 0.5
    whole = inside.query_key_distances(INIT, 16, 1, [0])
    assert (whole["each head"] < 1e-8).all()  # a single head of full width holds all of it
    torch.manual_seed(0)
    targets = [2.0 / 4 * z + 0.6 * np.eye(16) for z in draws.normal(2, 16, 16).numpy()]
    least = [np.linalg.norm(np.linalg.svd(target, compute_uv=False)[8:]) / np.linalg.norm(target) for target in targets]
    own = inside.query_key_distances(INIT, 16, 2, [0]).loc["a Z for each head"]
    assert own["each head"] == pytest.approx(np.mean(least))  # every head holds the best part of rank 8 of its own


def test_cases_of_the_initialisation():
    assert inside.orthogonal_cases([model(), model(depth=1)]).cases == 4
    assert inside.orthogonal_cases([model()]).violations == 0
    assert inside.orthogonal_cases([model(skipless={})]).violations == 3
    assert inside.architecture_cases([(model(), model(skipless={}))]).violations == 0
    assert inside.architecture_cases([(model(), model(depth=2))]).violations == 1


def test_the_first_attention_of_a_published_size():
    table = inside.first_attention(INIT, ["vit_tiny_patch16_224"], [0])
    assert len(table) == 1 and 0 < table.photographs[0] < table.independent[0] < 1 and 2 < table.log10_kappa[0] < 7


def test_curves_hold_steps_and_seconds(tmp_path):
    (tmp_path / "provenance.json").write_text(json.dumps({"seconds_per_epoch": [2.0, 3.0]}))
    history = [{"epoch": epoch, "validation_top1": 10.0 * epoch} for epoch in range(3)]
    run = SimpleNamespace(folder=tmp_path, config=TINY, history=history)
    table = outcomes.curves([run], ["init"])
    steps = loop.dataset(TINY).train.num_images // TINY.batch_size
    assert list(table.steps) == [0, steps, 2 * steps] and list(table.seconds) == [0, 2, 5]
    assert list(table.validation_top1) == [0, 10, 20] and set(table.arm) == {"init"}


def test_the_untrained_score_is_that_of_a_run_that_moves_nothing(tmp_path):
    config = dataclasses.replace(DINO, epochs=1, learning_rate=1e-30, minimum_learning_rate=0.0)
    assert outcomes.untrained_top1(config) == dino.distil(config, tmp_path)["validation_top1"]


def test_what_pre_training_did_to_the_neighbours_is_said():
    table = pandas.DataFrame(
        [
            {
                "optimizer": "adamw",
                "skip": skip,
                "depth": depth,
                "validation_top1": 40.0 + depth + seed,
                "untrained_top1": 50.0,
            }
            for skip, depths in (("both", [8]), ("none", [6, 8]))
            for depth in depths
            for seed in (0, 1)
        ]
    )
    others = table.assign(optimizer="soap", validation_top1=0.0)
    assert outcomes.neighbours(pandas.concat([table, others]), "adamw", 6) == (
        "DINO with skips: k-NN 48.5 % after pre-training, 50.0 % before; "
        "without, 6 blocks: k-NN 46.5 % after pre-training, 50.0 % before"
    )


def test_what_each_arm_scores_at_its_own_rate_is_said():
    table = pandas.DataFrame(
        [
            {"arm": arm, "optimizer": "soap", "learning_rate": rate, "validation_top1": top1, "test_top1": top1 + 1}
            for arm, scores in {"skips": (40, 50, 60), "default": (30, 20, 10), "init": (30, 35, 15)}.items()
            for rate, top1 in zip((1e-3, 3e-3, 1e-2), scores)
        ]
    )
    assert outcomes.own_rates(table, {"soap": 1e-2}, {"default": "bare", "init": "ours"}, {"soap": "SOAP"}) == [
        "SOAP: the arm with skips is best at 0.01, the largest tried",
        "  bare: 11.0 % there; at its own best, 0.001 (the smallest tried), 31.0 %",
        "  ours: 16.0 % there; at its own best, 0.003 (not at the edge of those tried), 36.0 %",
        "  so this init adds +5.0 points at the rate of the verdicts, and +5.0 where each arm has its own",
    ]


def test_the_best_reading_is_compared_with_the_chosen_one():
    scores = {inside.CHOSEN: (40.0, 42.0), "MLP orthogonal": (45.0, 45.0)}
    table = pandas.DataFrame(
        [
            {"reading": name, "seed": seed, "test_top1": top1}
            for name, both in scores.items()
            for seed, top1 in enumerate(both)
        ]
    )
    assert outcomes.best_reading(table) == (
        "of 2 readings the best is MLP orthogonal, 45.0 ± 0.0 %: +4.0 ± 1.4 points "
        "from the chosen one (a Z for each head, MLP scaled), 41.0 ± 1.4 %, over 2 seed(s)"
    )
    worse = table.assign(test_top1=table.test_top1.where(table.reading == inside.CHOSEN, 0.0))
    assert "the chosen one (a Z for each head, MLP scaled) is best: 41.0 ± 1.4 %" in outcomes.best_reading(worse)


def test_the_spread_is_over_all_settings_of_a_seed():
    table = pandas.DataFrame({"seed": [0, 0, 0, 1, 1], "test_top1": [10, 30, 20, 5, 6]})
    assert outcomes.spread(table).to_dict() == {0: 20, 1: 1}


def dense_table(data="voc2012"):
    return pandas.DataFrame(
        [
            {
                "arm": arm,
                "depth": depth,
                "seed": seed,
                "dense": dense,
                "discovery": discovery,
                "similarity": 0.5 if dense == "none" else None,
                "miou_single": None if dense == "none" else 10.0 * seed + depth,
                "miou_multi": None if dense == "none" else 50.0,
                "corloc": 40.0 + seed if dense == "none" else None,
            }
            for arm, depths in (("skips", [4]), ("skipless", [3, 4]))
            for depth in depths
            for seed in (0, 1)
            for dense, discovery in ((data, "none"), ("none", data))
        ]
    )


def test_values_go_to_the_claims_of_their_data_only():
    paper = dense_tasks.dense_values(dense_table(), "imagenet-1k", 4)
    assert set(paper) == {
        f"cut.dino.{place}.{arm}"
        for place in ("voc.single", "voc.multi", "tokencut.voc")
        for arm in ("skips", "skipless")
    }
    assert paper["cut.dino.voc.single.skips"].tolist() == [4, 14] and paper[
        "cut.dino.tokencut.voc.skipless"
    ].tolist() == [40, 41]
    repro = dense_tasks.dense_values(dense_table(), "tiny-imagenet", 4)
    assert set(repro) == {
        f"cut.repro.dino.{place}.{arm}" for place in ("voc", "tokencut") for arm in ("skips", "skipless")
    }
    assert set(paper) | set(repro) <= set(claims.claims())
    assert not dense_tasks.dense_values(dense_table("composed"), "imagenet-1k", 4)
    assert not dense_tasks.dense_values(dense_table(), "fashion_mnist", 4)
    assert not any("ade20k" in name for name in dense_tasks.dense_values(dense_table("ade20k"), "tiny-imagenet", 4))


def test_differences_are_paired_by_seed():
    table = dense_table()
    assert dense_tasks.difference(table, "miou_single", 3, 4).tolist() == [-1, -1]
    assert dense_tasks.difference(table, "corloc", 4, 4).tolist() == [0, 0]


def test_a_dense_table_of_runs():
    config = SimpleNamespace(initial="distil/abc", dense="composed", discovery="none")
    pretrained = SimpleNamespace(config=SimpleNamespace(skip="none", model_args={"depth": 4}, seed=2))
    table = dense_tasks.dense_table([runs.Run(config, "x", None, {"miou_single": 5.0}, [])], {"abc": pretrained})
    assert table.iloc[0].to_dict() | {"miou_multi": 0, "corloc": 0, "similarity": 0} == {
        "arm": "skipless",
        "depth": 4,
        "seed": 2,
        "dense": "composed",
        "discovery": "none",
        "miou_single": 5.0,
        "miou_multi": 0,
        "corloc": 0,
        "similarity": 0,
    }


# --- Figures ----------------------------------------------------------------------------------------------------------

ARMS = {"skips": "with skips", "init": "no skips"}


def drawn(figure):
    figure.canvas.draw()
    plt.close(figure)
    return figure.axes


def test_every_figure_is_drawn_from_what_the_survey_returns():
    spectra = pandas.concat(
        [
            inside.depth_spectra(model("both" if arm == "skips" else "none"), images(), [1, 2]).assign(arm=arm, seed=0)
            for arm in ARMS
        ]
    )
    axes = drawn(plots.spectra(spectra, ARMS, 1))
    assert len(axes) == 3 and len(axes[0].lines) == 2
    reports = pandas.concat(
        [inside.report(model(), images()).assign(arm=arm, seed=seed) for arm in ARMS for seed in (0, 1)]
    )
    assert drawn(plots.attention({"map": torch.eye(5)}, reports, ARMS, 5))[1].get_ylim() == (0, 1)
    curves = pandas.DataFrame(
        [
            {
                "arm": arm,
                "optimizer": optimizer,
                "seed": seed,
                "steps": step,
                "seconds": 2.0 * step,
                "validation_top1": 10.0,
            }
            for arm in ARMS
            for optimizer in ("adamw", "soap")
            for seed in (0, 1)
            for step in (0, 5)
        ]
    )
    assert len(drawn(plots.training(curves, ARMS, {"adamw": "AdamW", "soap": "SOAP"}))) == 4
    scan = pandas.DataFrame(
        [
            {"arm": arm, "optimizer": "soap", "learning_rate": rate, "test_top1": 50.0}
            for arm in ARMS
            for rate in (1e-3, 1e-2)
        ]
    )
    assert len(drawn(plots.rates(scan, ARMS, {"soap": "SOAP"}, {"soap": 1e-3}))) == 1
    table = pandas.DataFrame(
        [
            {"name": name, "value": value, "seed": seed, "test_top1": 50.0 + seed}
            for name in INIT
            for value in (1.0, 2.0)
            for seed in (0, 1)
        ]
    )
    readings = pandas.DataFrame(
        [{"reading": name, "seed": seed, "test_top1": 50.0} for name in inside.READINGS for seed in (0, 1)]
    )
    assert len(drawn(plots.sensitivity(table, INIT, readings, {"with skips": [60.0]}))) == 4
    metrics = {"miou_single": "mIoU (%)", "corloc": "CorLoc (%)"}
    assert len(drawn(plots.dense(dense_table(), metrics, {"skips": "with skips", "skipless": "without"}))) == 2


def test_pictures_show_every_scene_and_model_and_masks_where_there_are_some():
    boxes = np.array([[1.0, 1, 5, 5]])
    scenes = [
        Scene(np.zeros((channels, 14, 14), np.uint8), mask, boxes)
        for channels, mask in ((1, np.zeros((14, 14), int)), (3, None))
    ]
    colours = {name: torch.rand(2, 2, 2, 3) for name in ("a", "b")}
    axes = drawn(plots.pictures(scenes, colours, {name: [boxes[0], boxes[0]] for name in colours}))
    assert len(axes) == 8 and len(axes[2].patches) == 2


def test_the_published_settings_are_the_initialisations_defaults():
    assert SkiplessInit(**INIT) == SkiplessInit()
