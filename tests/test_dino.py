"""DINO pre-training: it learns, resumes bit for bit, is stored, and breaks without a crash."""

import dataclasses
import math
import warnings

import numpy as np
import pytest
import torch

from interruption import equal, interrupted, weights
from skiplab.companion import runs
from skiplab.errors import InputError
from skiplab.training import checkpoint, dino, loop
from skiplab.training.dino import DinoConfig, build_vit, distil, load_teacher, neighbour_top1
from test_selfsupervised import TINY_PRETRAINING

TINY = DinoConfig(
    **TINY_PRETRAINING,
    outputs=32,
    hidden_dim=16,
    bottleneck_dim=8,
    local_crops=2,
    local_size=14,
    momentum=0.9,
    temperature_warmup=0.5,
)
INIT = {"alpha": 1.8, "beta": 1.0, "c": 3.0}


def but(**changes):
    return dataclasses.replace(TINY, **changes)


def test_it_learns_and_says_what_it_did(tmp_path):
    reported = []
    result = distil(but(epochs=10), tmp_path, lambda rows: reported.append(len(rows)))
    losses = [row["train_loss"] for row in result["history"]]
    assert reported == list(range(1, 11)) and min(losses) < losses[0] and result["final_loss"] == losses[-1]
    assert losses[0] < math.log(32) * 1.5 and result["divergence"] is None and len(result["seconds"]) == 10
    assert 0 <= result["validation_top1"] <= 100
    temperatures = [row["temperature"] for row in result["history"]]
    assert temperatures[0] == 0.04 and temperatures[-1] == pytest.approx(0.07) and temperatures == sorted(temperatures)


def test_building_and_running_it_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distil(but(epochs=1), tmp_path)


@pytest.mark.parametrize("changes", [{}, {"optimizer": "soap", "skip": "none", "skipless": INIT}, {"local_crops": 0}])
def test_a_resumed_run_ends_where_an_undisturbed_one_does(tmp_path, monkeypatch, changes):
    config = but(**changes)
    whole = distil(config, tmp_path / "whole")
    with interrupted(monkeypatch):
        distil(config, tmp_path / "parts")
    parts = distil(config, tmp_path / "parts")
    assert parts["history"] == whole["history"] and parts["validation_top1"] == whole["validation_top1"]
    assert equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))


def test_the_seed_decides_the_bits(tmp_path):
    results = [distil(config, tmp_path / name) for name, config in (("a", TINY), ("b", TINY), ("c", but(seed=4)))]
    assert results[0]["history"] == results[1]["history"] != results[2]["history"]


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    distil(but(epochs=1), tmp_path)
    with pytest.raises(checkpoint.CorruptFile, match="another configuration"):
        distil(TINY, tmp_path)


def test_the_loss_is_the_published_cross_entropy_of_different_views():
    net = dino.Dino((build_vit(TINY), build_vit(TINY)), TINY).train()
    large, small = [torch.randn(4, 1, 28, 28) for _ in range(2)], [torch.randn(4, 1, 14, 14) for _ in range(3)]
    with torch.no_grad():
        taught = [net.teacher["head"](net.teacher["vit"](view)).numpy() for view in large]
        said = [net.student["head"](net.student["vit"](view)).numpy() for view in large + small]
        centre = np.linspace(-0.1, 0.1, 32, dtype=np.float32)
        net.criterion.center.copy_(torch.from_numpy(centre))
        found = net(large, small, 0.05)

    def softmax(x):
        e = np.exp(x - x.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    terms = [
        -(softmax((t - centre) / 0.05) * np.log(softmax(s / 0.1))).sum(axis=1).mean()
        for i, t in enumerate(taught)
        for j, s in enumerate(said)
        if i != j
    ]
    assert found.item() == pytest.approx(np.mean(terms), rel=1e-4)
    expected = 0.9 * centre + 0.1 * np.concatenate(taught).mean(axis=0)
    assert np.allclose(net.criterion.center.flatten(), expected, atol=1e-6)


def test_the_teacher_is_the_students_average_and_nothing_else_moves_it(tmp_path):
    run = dino._Distillation(but(momentum=0.5, frozen_epochs=1), tmp_path)
    images, _ = next(run.data.train.batches(32))
    before = {name: p.clone() for name, p in run.net.teacher.named_parameters()}
    last = run.net.student["head"].last_layer.weight_v.clone()
    run._step(images, 5, 1)
    share = dino.cosine_schedule(5, 3 * run.steps, 0.5, 1.0)
    assert 0.5 < share < 1
    for name, parameter in run.net.teacher.named_parameters():
        student = dict(run.net.student.named_parameters())[name]
        assert torch.allclose(parameter, share * before[name] + (1 - share) * student, atol=1e-6), name
        assert not parameter.requires_grad
    assert torch.equal(run.net.student["head"].last_layer.weight_v, last)  # frozen in the first epoch
    run._step(images, 6, 2)
    assert not torch.equal(run.net.student["head"].last_layer.weight_v, last)
    decays = {group["weight_decay"] for group in run.optimizer.param_groups}
    assert 0 in decays and dino.cosine_schedule(6, 3 * run.steps, 0.04, 0.4) in decays


def test_drop_path_is_the_students_only():
    net = dino.Dino(
        tuple(build_vit(but(model_args=TINY.model_args | {"drop_path_rate": 0.9})) for _ in range(2)), TINY
    ).train()
    images = torch.randn(8, 1, 28, 28)
    assert torch.equal(net.teacher["vit"](images), net.teacher["vit"](images))
    assert not torch.equal(net.student["vit"](images), net.student["vit"](images))


def test_a_loss_that_breaks_is_a_result_and_the_last_whole_epoch_is_kept(tmp_path, monkeypatch):
    step = dino._Distillation._step
    monkeypatch.setattr(
        dino._Distillation, "_step", lambda self, *inputs: step(self, *inputs) * (math.nan if inputs[2] == 2 else 1)
    )
    result = distil(TINY, tmp_path)
    assert result["divergence"] == {"kind": "non-finite", "epoch": 2, "step": 5}
    assert len(result["history"]) == 2 and result["history"][1]["train_loss"] is None
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())


def test_soap_with_a_gradient_that_is_not_finite_is_a_divergence(tmp_path, monkeypatch):
    build = dino.build_vit

    def breaking(config):
        vit = build(config)
        vit.norm.weight.register_hook(lambda grad: grad * math.nan)
        return vit

    monkeypatch.setattr(dino, "build_vit", breaking)
    result = distil(but(optimizer="soap"), tmp_path)
    assert result["divergence"] == {"kind": "non-finite", "epoch": 1, "step": 0}


def test_neighbours_vote_as_published():
    generator = torch.Generator().manual_seed(0)
    known, features = torch.randn(60, 5, generator=generator), torch.randn(30, 5, generator=generator)
    labels, truth = torch.randint(3, (60,), generator=generator), torch.randint(3, (30,), generator=generator)
    right = 0
    for feature, answer in zip(features.numpy(), truth.tolist()):
        cosines = known.numpy() @ feature / np.linalg.norm(known.numpy(), axis=1) / np.linalg.norm(feature)
        near = np.argsort(-cosines)[:20]
        votes = [np.exp(cosines[near] / 0.07)[labels.numpy()[near] == label].sum() for label in range(3)]
        right += int(np.argmax(votes) == answer)
    assert neighbour_top1(known, labels, features, truth) == pytest.approx(100 * right / 30)
    assert neighbour_top1(features[:3], truth[:3], features[:3], truth[:3]) >= 100 / 3  # fewer than 20 known


def test_a_stored_run_gives_back_its_teacher(store):
    (first,) = runs.load_or_run(distil, [TINY], workers=0)
    assert runs.load_or_run(distil, [TINY], workers=0) == [first]
    config, vit = load_teacher(first.folder)
    assert config == TINY and not vit.training
    assert equal(vit.state_dict(), weights(first.folder))
    assert vit(torch.randn(1, 1, 42, 42)).shape == (1, 16)  # of any size


def test_bad_settings_are_named():
    for changes, message in (
        ({"momentum": 1.5}, "momentum is 1.5"),
        ({"student_temperature": 0}, "student_temperature is 0"),
        ({"local_crops": -1}, "local_crops is -1"),
        ({"outputs": 1}, "outputs is 1"),
        ({"epochs": 0}, "epochs is 0"),
        ({"global_scale": [0.5, 0.4]}, r"global_scale is \[0.5, 0.4\]"),
        ({"optimizer": "soup"}, "did you mean 'soap'"),
        ({"skipless": {"alfa": 1}}, "did you mean 'alpha'"),
        ({"skipless": {"alpha": -1}}, "alpha is -1"),
    ):
        with pytest.raises(InputError, match=message):
            but(**changes)
    with pytest.raises(InputError, match="local_size 10 is not divisible by vit's patch size 7 .nearest: 7 or 14"):
        build_vit(but(local_size=10))
    with pytest.raises(InputError, match="it is no ViT|has no skipless|dynamic_img_size"):
        build_vit(but(model="convmixer", model_args={"dim": 16, "depth": 1, "kernel_size": 3, "patch_size": 7}))
    with pytest.raises(InputError, match="exceeds the 180 training images"):
        distil(but(batch_size=500), None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_it_runs_on_a_gpu(tmp_path):
    assert distil(but(device="cuda", precision="bfloat16"), tmp_path)["divergence"] is None


def test_its_shared_settings_are_the_loops():
    assert loop.build_optimizer(TINY, build_vit(TINY)).param_groups
