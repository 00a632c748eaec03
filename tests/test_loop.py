"""The training loop against a loop written by hand, and its promises: exact resume, divergence as a result."""

import dataclasses
import math
import os

import numpy
import pytest
import torch

from interruption import last_state
from skiplab.errors import InputError
from skiplab.training import checkpoint, loop
from skiplab.training.loop import TrainConfig, train
from skiplab.training.run import build_optimizer

TINY = TrainConfig(
    data="fashion_mnist",
    model="vit",
    seed=3,
    epochs=3,
    learning_rate=1e-3,
    train_images=240,
    test_images=100,
    model_args={"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 7},
    batch_size=32,
    probe_images=4,
)


def but(**changes):
    return dataclasses.replace(TINY, **changes)


def by_hand(config):
    """Train without any of the libraries the loop uses; return losses per epoch, and the model."""
    data = loop.dataset(config)
    model = loop.build_model(config)
    decayed = [p for p in model.parameters() if p.ndim > 1 and p is not model.pos_embed and p is not model.cls_token]
    others = [p for p in model.parameters() if not any(p is q for q in decayed)]
    optimizer = torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": config.weight_decay}]
    )
    steps = data.train.num_images // config.batch_size
    total, losses = config.epochs * steps, []
    warmup = round(config.warmup * total)
    for epoch in range(1, config.epochs + 1):
        model.train()
        batches = data.train.batches(
            config.batch_size, device="cpu", seed=config.seed, epoch=epoch, drop_last=True, train=True
        )
        sums = []
        for step, (images, labels) in enumerate(batches):
            now = (epoch - 1) * steps + step
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * (
                    now / warmup if now < warmup else (1 + math.cos(math.pi * now / total)) / 2
                )
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
            for p in model.parameters():
                p.grad *= min(1, config.clip / norm)
            optimizer.step()
            optimizer.zero_grad()
            sums.append(loss.item())
        losses.append(numpy.mean(sums))
    return losses, model.eval()


@pytest.mark.parametrize("optimizer", ["adamw", "soap"])
def test_with_a_layer_decay_each_block_learns_at_a_share_of_the_next_ones_rate(tmp_path, optimizer):
    config = but(layer_decay=0.5, weight_decay=0.1, optimizer=optimizer)
    model = loop.build_model(config)
    rates = {
        id(p): group["lr"] * group.get("lr_scale", 1.0)
        for group in build_optimizer(config, model).param_groups
        for p in group["params"]
    }
    found = {name: rates[id(parameter)] / config.learning_rate for name, parameter in model.named_parameters()}
    # timm counts the embeddings as the first layer, the norm with the last block, and the head as the last layer.
    expected = {
        "patch_embed": 1 / 8,
        "cls_token": 1 / 8,
        "pos_embed": 1 / 8,
        "blocks.0": 1 / 4,
        "blocks.1": 1 / 2,
        "norm": 1 / 2,
        "head": 1,
    }
    for name, share in found.items():
        assert share == pytest.approx(next(value for start, value in expected.items() if name.startswith(start))), name
    result = train(but(layer_decay=0.5, optimizer=optimizer, epochs=1, warmup=0.0), tmp_path)
    last = config.learning_rate * (1 + math.cos(math.pi * 5 / 6)) / 2  # of 6 steps
    assert result["history"][-1]["learning_rate"] == pytest.approx(last)


def test_equals_a_loop_written_by_hand(tmp_path):
    result = train(TINY, tmp_path)
    losses, model = by_hand(TINY)
    assert [row["train_loss"] for row in result["history"]][1:] == pytest.approx(losses, rel=1e-5)
    pixels = loop.dataset(TINY).test
    ((images, labels),) = pixels.batches(100, device="cpu", train=False)
    with torch.no_grad():
        logits = model(images)
    assert result["final_test_top1"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean())
    among = [label in row.argsort()[-5:] for row, label in zip(logits, labels)]
    assert result["final_test_top5"] == pytest.approx(100 * numpy.mean(among))
    best = max(range(4), key=lambda epoch: result["history"][epoch]["validation_top1"])
    assert result["best_epoch"] == best
    assert result["validation_top1"] == result["history"][best]["validation_top1"]


def test_hyperparameters_are_judged_on_the_validation_split(tmp_path):
    """What an epoch reports comes from the validation split; the test split chooses nothing."""
    result, (_, model) = train(TINY, tmp_path), by_hand(TINY)
    split = loop.dataset(TINY).validation
    ((images, labels),) = split.batches(500, train=False)
    with torch.no_grad():
        logits = model(images)
    assert result["history"][-1]["validation_loss"] == pytest.approx(
        torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4
    )
    assert result["history"][-1]["validation_top1"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean())
    assert result["divergence"] is None


def test_seeds_differ_from_the_first_weight_on():
    first, second, again = (loop.build_model(config).head.weight for config in (TINY, but(seed=4), TINY))
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.parametrize(
    "changes",
    [
        {"augment": "crop_flip"},
        {"label_smoothing": 0.1},
        {"mixup": 0.8},
        {"cutmix": 1.0},
        {"weight_decay": 0.9},
        {"minimum_learning_rate": 9e-4},
        {"warmup": 0.5},
        {"clip": 0.01},
        {"seed": 4},
        {"optimizer": "sgd"},
    ],
)
def test_each_setting_changes_the_training(tmp_path, changes):
    one, other = train(TINY, tmp_path / "a"), train(but(**changes), tmp_path / "b")
    assert one["history"][-1]["train_loss"] != other["history"][-1]["train_loss"]


def test_the_block_gradient_norms_are_those_before_clipping(tmp_path):
    config = but(epochs=1, batch_size=216, clip=1e-6)
    data, model = loop.dataset(config), loop.build_model(config)
    ((images, labels),) = data.train.batches(216, seed=config.seed, epoch=1, drop_last=True, train=True)
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    expected = {
        f"blocks.{index}": sum(p.grad.square().sum() for p in block.parameters()).sqrt().item()
        for index, block in enumerate(model.blocks)
    }
    assert train(config, tmp_path)["history"][1]["block_gradient_norm"] == pytest.approx(expected, rel=1e-4)


class Killed(Exception):
    pass


def killed_after(epoch):
    def report(history):
        if history[-1]["epoch"] == epoch:
            raise Killed

    return report


EVERYTHING = {
    "augment": "crop_flip",
    "mixup": 0.8,
    "cutmix": 1.0,
    "label_smoothing": 0.1,
    "ema": 0.9,
    "model_args": TINY.model_args | {"drop_path_rate": 0.2, "proj_drop_rate": 0.1},
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        EVERYTHING,
        {"accumulation": 4},
        {"skip": "none"},
        *({"optimizer": name} for name in ("sgd", "lamb", "muon", "soap")),
        {"optimizer": "soap", "model_args": TINY.model_args | {"embed_dim": 30, "num_heads": 3}},
    ],
    ids=str,
)  # odd widths
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path, changes):
    config = but(**changes)
    whole = train(config, tmp_path / "whole")
    for epoch in (1, 2):
        with pytest.raises(Killed):
            train(config, tmp_path / "parts", killed_after(epoch))
    parts = train(config, tmp_path / "parts")
    assert len(parts.pop("seconds")) == len(whole.pop("seconds")) == 3
    assert parts == whole
    digests = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert digests[0] == digests[1]
    assert last_state(tmp_path / "whole") == last_state(tmp_path / "parts")


def test_a_run_goes_on_with_its_optimisers_tensors_laid_out_as_a_resumed_one_finds_them(tmp_path):
    run = loop._Run(TINY, tmp_path)
    run.advance()
    state = run.optimizer.state[run.net.head.weight]
    state["exp_avg"] = torch.zeros(16, 10).T.copy_(state["exp_avg"])  # strided
    state["exp_avg_sq"] = torch.zeros(161)[1:].view(10, 16).copy_(state["exp_avg_sq"])  # not where torch allocates
    kept = dict(state)
    run.save()
    for name, after in run.optimizer.state[run.net.head.weight].items():
        assert torch.equal(after, kept[name]) and after.is_contiguous() and after.data_ptr() % 64 == 0


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path):
    with pytest.raises(Killed):
        train(TINY, tmp_path, killed_after(1))
    with pytest.raises(checkpoint.CorruptFile, match="belongs to another configuration"):
        train(but(learning_rate=2e-3), tmp_path)


def test_micro_batches_add_up(tmp_path):
    whole, parts = train(TINY, tmp_path / "a"), train(but(accumulation=4), tmp_path / "b")
    pairs = list(zip(whole["history"], parts["history"]))[1:]
    for one, other in pairs:
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-3)


def test_the_averaged_weights_are_the_evaluated_ones(tmp_path):
    """With decay 1 - 1e-12 the averaged model stays where it started, whatever is learnt."""
    config = but(ema=1 - 1e-12, epochs=1, learning_rate=1e-2)
    result = train(config, tmp_path)
    assert result["history"][0]["validation_loss"] == pytest.approx(result["history"][1]["validation_loss"], rel=1e-6)
    stored = checkpoint.read(tmp_path / "model.safetensors")
    torch.testing.assert_close(stored["head.weight"], loop.build_model(config).head.weight.data)


def test_the_average_moves_once_an_update_whatever_the_micro_batches(tmp_path, monkeypatch):
    updates = []
    monkeypatch.setattr(loop.ModelEmaV3, "update", lambda self, model: updates.append(1))
    train(but(ema=0.9, epochs=2, accumulation=4), tmp_path)
    assert len(updates) == 2 * 6


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_explosion_is_a_mean_above_twice_a_constant_guess_over_20_steps(tmp_path, accumulation):
    run = loop._Run(but(accumulation=accumulation), tmp_path)
    guess = math.log(10)
    calm, wild = torch.tensor(1.99 * guess), torch.tensor(2.01 * guess)
    early = [100 * guess * torch.ones(())] * accumulation
    assert not run._diverged(1, early + [calm] * 20 * accumulation) and run.divergence is None
    assert not run._diverged(1, [calm] * 30 * accumulation + [wild] * 20 * accumulation)
    assert run.divergence == {"kind": "explosion", "epoch": 1, "step": 49}


def test_bfloat16_learns_the_same_up_to_its_precision(tmp_path):
    exact, rough = train(TINY, tmp_path / "a"), train(but(precision="bfloat16"), tmp_path / "b")
    losses = [[row["train_loss"] for row in result["history"][1:]] for result in (exact, rough)]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=2e-2)


@pytest.mark.slow
def test_a_compiled_model_learns_the_same(tmp_path):
    plain, compiled = train(but(epochs=1), tmp_path / "a"), train(but(epochs=1, compile=True), tmp_path / "b")
    assert plain["history"][1]["train_loss"] == pytest.approx(compiled["history"][1]["train_loss"], rel=1e-4)
    assert plain["history"][1]["log_kappa"][0]["n"] == compiled["history"][1]["log_kappa"][0]["n"]


def breaking(build, number, change):
    """Return `build`, but of models whose logits `change` spoils in training step `number`, counted from 1."""

    def build_and_break(config):
        model = build(config)
        calls = []

        def poison(module, arguments, output):
            calls.append(module.training)
            return change(output) if module.training and sum(calls) == number else output

        model.register_forward_hook(poison)
        return model

    return build_and_break


def test_a_non_finite_loss_stops_the_run_and_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "build_model", breaking(loop.build_model, 9, lambda logits: logits * float("nan")))
    result = train(TINY, tmp_path)
    assert result["divergence"] == {"kind": "non-finite", "epoch": 2, "step": 8}  # 6 steps an epoch, counted from 0
    assert len(result["history"]) == 3 and result["final_test_top1"] is None
    assert result["best_epoch"] in (0, 1) and result["test_top1"] > 0
    assert train(TINY, tmp_path)["divergence"] == result["divergence"]


def test_an_exploded_loss_is_recorded_and_training_goes_on(tmp_path, monkeypatch):
    # A logit of 1000 for a class that one image in ten has: a loss of about 900, once.
    build = breaking(loop.build_model, 9, lambda logits: logits + 1000 * torch.eye(10)[0])
    monkeypatch.setattr(loop, "build_model", build)
    result = train(TINY, tmp_path)
    # with 6 steps an epoch the loss is looked at where an epoch ends, and every 20 steps of one
    assert result["divergence"] == {"kind": "explosion", "epoch": 2, "step": 11}
    assert len(result["history"]) == 4 and result["final_test_top1"] is not None
    assert result["history"][3]["train_loss"] < 10 < result["history"][2]["train_loss"]


def test_too_large_a_rate_is_recorded_and_ends_only_a_broken_run(tmp_path):
    """Which of the two kinds comes first, and when, is a matter of rounding."""
    result = train(but(learning_rate=300.0, epochs=4, weight_decay=0.0), tmp_path)
    divergence, epochs = result["divergence"], len(result["history"]) - 1
    assert divergence["kind"] in ("explosion", "non-finite")
    assert (divergence["epoch"] - 1) * 6 <= divergence["step"] < divergence["epoch"] * 6
    assert epochs == (divergence["epoch"] if divergence["kind"] == "non-finite" else 4)
    assert (result["final_test_top1"] is None) == (divergence["kind"] == "non-finite")


def test_weights_broken_by_the_last_step_count_as_divergence(tmp_path, monkeypatch):
    clip = torch.nn.utils.clip_grad_norm_
    calls = []

    def poison(parameters, *arguments):
        calls.append(1)
        if len(calls) == 18:  # 3 epochs of 6 steps
            parameters[0].grad.fill_(float("nan"))
        return clip(parameters, *arguments)

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", poison)
    result = train(TINY, tmp_path)
    assert result["divergence"] == {"kind": "non-finite", "epoch": 3, "step": 17}
    assert result["final_test_top1"] is None and result["best_epoch"] < 3


def test_mixup_needs_an_even_number_of_images(tmp_path):
    with pytest.raises(InputError, match="mixup and cutmix pair images: .* an even number at a time, not 5"):
        train(but(mixup=0.8, batch_size=10, accumulation=2), tmp_path)


@pytest.mark.parametrize(
    "scores, epoch",
    [
        ([10, 60, 62, 61], None),
        ([10, 60, 20, 61], None),
        ([10, 60, 40, 29, 10], 3),
        ([10, 60, 29, 31, 29], 4),
        ([10, 19, 5], None),
        ([10, 20, 9], 2),
        ([10, 10, 10], None),
    ],
)
def test_a_collapse_is_the_epoch_from_which_the_score_stays_low(scores, epoch):
    found = loop._collapse([{"validation_top1": score} for score in scores])
    assert found == (None if epoch is None else {"kind": "collapse", "epoch": epoch, "step": None})


def test_kappa_is_recorded_for_every_block_and_place_each_epoch(tmp_path):
    result = train(but(epochs=1), tmp_path)
    assert [row["epoch"] for row in result["history"]] == [0, 1]
    for row in result["history"]:
        assert [(entry["place"], entry["block"], entry["n"]) for entry in row["log_kappa"]] == [
            (place, block, 4) for place in loop.PLACES for block in (0, 1)
        ]
    assert list(result["history"][1]["block_gradient_norm"]) == ["blocks.0", "blocks.1"]


def test_measuring_kappa_does_not_change_the_training(tmp_path):
    probed, plain = train(TINY, tmp_path / "a"), train(but(probe_images=0), tmp_path / "b")
    assert [row["train_loss"] for row in probed["history"]] == [row["train_loss"] for row in plain["history"]]


def test_training_starts_from_the_weights_of_another_run(tmp_path):
    first = train(TINY, tmp_path / "train" / "one")
    second = train(but(initial="train/one", learning_rate=1e-9), tmp_path / "train" / "two")
    assert second["history"][0]["validation_top1"] == first["validation_top1"]
    with pytest.raises(InputError, match="three/model.safetensors does not exist; compute that run first"):
        train(but(initial="train/three"), tmp_path / "train" / "four")
    with pytest.raises(InputError, match="not in the model, first blocks.1."):
        train(but(initial="train/one", model_args=TINY.model_args | {"depth": 1}), tmp_path / "train" / "five")
    with pytest.raises(InputError, match="12 missing, first blocks.2."):
        train(but(initial="train/one", model_args=TINY.model_args | {"depth": 3}), tmp_path / "train" / "six")


def test_training_does_not_start_from_half_of_the_scaling_parameters(tmp_path):
    scaled = but(model_args=TINY.model_args | {"scaling": "featscale"})
    train(scaled, tmp_path / "train" / "one")
    weights = checkpoint.read(tmp_path / "train" / "one" / "model.safetensors")
    half = {name: value for name, value in weights.items() if not name.endswith(".t")}
    checkpoint.write(tmp_path / "train" / "two" / "model.safetensors", half)
    with pytest.raises(InputError, match="only 2 of the model's 4 scaling parameters"):
        train(dataclasses.replace(scaled, initial="train/two"), tmp_path / "train" / "three")


def test_graying_acts_on_the_training_images_only(tmp_path):
    grayed = but(graying="svd", epsilon=0.5, graying_patch_size=7)
    plain, gray, mild = (
        train(config, tmp_path / str(number))
        for number, config in enumerate([TINY, grayed, dataclasses.replace(grayed, epsilon=1.0)])
    )
    assert plain["history"][0] == gray["history"][0]
    assert plain["history"][1]["train_loss"] != gray["history"][1]["train_loss"]
    assert plain["history"] == mild["history"]  # at epsilon 1 graying is the identity
    assert plain["final_test_top1_grayed"] is None
    assert gray["final_test_top1_grayed"] is not None and mild["final_test_top1_grayed"] == mild["final_test_top1"]


def test_graying_before_a_block_acts_on_its_tokens(tmp_path):
    config = but(epochs=1, graying="svd", epsilon=0.5, graying_blocks=[1])
    plain, gray = train(but(epochs=1), tmp_path / "a"), train(config, tmp_path / "b")
    assert plain["history"][0] == gray["history"][0]
    assert plain["history"][1]["train_loss"] != gray["history"][1]["train_loss"]
    with pytest.raises(InputError, match="graying_blocks names block 2; the model has blocks 0 to 1"):
        train(dataclasses.replace(config, graying_blocks=[2]), tmp_path / "c")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"graying": "pca"}, "unknown graying 'pca'"),
        ({"graying": "svd", "epsilon": 0.0}, "epsilon is 0.0"),
        ({"graying": "svd", "epsilon": 0.5, "graying_patch_size": 5}, "not divisible by patch_size 5"),
        ({"epochs": 0}, "epochs is 0; it must be at least 1"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be positive"),
        ({"learning_rate": float("nan")}, "learning_rate is nan; it must be a finite number"),
        ({"weight_decay": float("inf")}, "weight_decay is inf; it must be a finite number"),
        ({"model_args": {"drop_rate": float("nan")}}, "model_args['drop_rate'] is nan; it must be a finite number"),
        ({"model_args": {"mlp_ratio": 10**400}}, "model_args['mlp_ratio'] is a whole number of 401 digits"),
        ({"model_args": {"dtype": torch.float64}}, "model_args['dtype'] is torch.float64, a dtype; it must be"),
        ({"learning_rate": 10**400}, "learning_rate is a whole number of 401 digits; it must be at most 1.8e+308"),
        ({"batch_size": -(10**5000)}, "batch_size is a whole number of 5001 digits"),
        ({"accumulation": -(10**5000)}, "accumulation is a whole number of 5001 digits"),
        ({"accumulation": "2"}, "accumulation is '2', a str; it must be of type int"),
        ({"skipless": {"alpha": float("inf")}}, "skipless['alpha'] is inf; it must be a finite number"),
        ({"skipless": {"alpha": 10**400}}, "skipless['alpha'] is a whole number of 401 digits"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1; it must be at least 0"),
        ({"mixup": -1}, "mixup is -1; it must be at least 0"),
        ({"clip": -1}, "clip is -1; it must be positive"),
        ({"ema": 2}, "ema is 2; it must be at least 0 and below 1"),
        ({"warmup": 1.0}, "warmup is 1.0; it must be at least 0 and below 1"),
        ({"mixup": "0.2"}, "mixup is '0.2', a str; it must be of type float"),
        ({"epochs": 2.0}, "epochs is 2.0, a float; it must be of type int"),
        ({"compile": 1}, "compile is 1, a int; it must be of type bool"),
        ({"img_size": "28"}, "must be of type int | None"),
        ({"seed": 2**65}, "seed is 36893488147419103232; it must be from 0 to 4294967295"),
        ({"optimizer": "kron"}, "optimizer 'kron' cannot be used: its state must go through a checkpoint and back"),
        ({"optimizer": "adafactorbv"}, "optimizer 'adafactorbv' cannot be used"),
        ({"optimizer": "adahessian"}, "optimizer 'adahessian' cannot be used"),
        ({"validation": 0.0}, "validation is 0.0; it must be a share above 0"),
        ({"accumulation": 5}, "accumulation 5 does not divide batch_size 32"),
        ({"layer_decay": 1.5}, "layer_decay is 1.5; it must lie above 0 and be at most 1"),
        ({"graying_place": "worker"}, "unknown graying_place 'worker'; did you mean 'workers'"),
        ({"graying_place": "workers"}, "give a graying method and no graying_blocks"),
        ({"precision": "bf16"}, "unknown precision 'bf16'; did you mean 'bfloat16'"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"batch_size": 250}, "batch_size 250 exceeds the 216 training images"),
        (
            {"model": "vit_tini_patch16_224"},
            "unknown model 'vit_tini_patch16_224'; did you mean 'vit_tiny_patch16_224'",
        ),
        ({"skip": "no_sap"}, "unknown skip 'no_sap'; did you mean 'no_sab'"),
        ({"data": "fashion"}, "unknown data set 'fashion'"),
        ({"augment": "flip"}, "unknown augment"),
        ({"optimizer": "adamz"}, "unknown optimizer 'adamz'"),
        ({"model_args": {"img_size": 28}}, "model_args sets 'img_size', which the data and the configuration decide"),
    ],
)
def test_bad_configurations_are_refused_in_one_line(tmp_path, changes, message):
    with pytest.raises(InputError) as error:
        train(but(**changes), tmp_path)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_asking_for_a_gpu_in_vain_is_refused():
    with pytest.raises(InputError, match="shows no GPU to torch; use device 'cpu' or 'auto'"):
        but(device="cuda")


@pytest.mark.slow
@pytest.mark.skipif("COMPANION_CIFAR10" not in os.environ, reason="COMPANION_CIFAR10 names no folder with CIFAR-10")
def test_a_short_run_on_cifar10_learns(tmp_path):
    """Colour images in the hub's column layout: better than chance within 60 steps."""
    config = but(
        data="cifar10",
        train_images=4000,
        test_images=1000,
        epochs=1,
        batch_size=60,
        learning_rate=3e-3,
        model_args={"embed_dim": 48, "depth": 2, "num_heads": 3, "patch_size": 4},
    )
    result = train(config, tmp_path)
    assert loop.dataset(config).channels == 3 and loop.dataset(config).num_classes == 10
    assert result["final_test_top1"] > 20 and result["history"][0]["validation_top1"] < 20
