"""Time Token Graying against `torch.linalg.svd` and against a training step, interleaved in one run.

The paper's own figures: SVD-TG makes ViT-B training 6.3 times as long, DCT-TG 1.012 times.
Every round times all methods, in an order of its own; a speed-up is the median over rounds of the ratio within a round.
With a batch of one, a method grays 8 pictures one after the other, as a data-loader worker does.

    OMP_NUM_THREADS=1 python -m benchmarks.graying            # one core
    python -m benchmarks.graying --device cuda --batch 256    # against a ViT-B/16 step
"""

import argparse
import json
import statistics

import numpy as np
import timm
import torch

from skiplab.companion.timing import interleaved, median_ratio
from skiplab.transforms.graying import _dct_matrix, gray_dct, gray_svd, gray_svd_fast, patchify

PICTURES = 8
SIZES = {  # image and patch size
    "196×768 (ViT-B/16, 224 px)": (224, 16),
    "64×48 (patch 4, 32 px)": (32, 4),
    "3136×48 (Swin, 224 px)": (224, 4),
}


def photographs(count, size, seed=0):
    """Draw normalised images (count, 3, size, size) with a photograph's 1/f spectrum, 8 bits, clipped."""
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.fftfreq(size)[None])
    frequency[0, 0] = 1
    noise = rng.standard_normal((count, 4, size, size))
    fields = np.fft.ifft2(np.fft.fft2(noise) / frequency**1.3).real
    channels = fields[:, 3:] + 0.3 * fields[:, :3]  # the channels of a photograph are alike
    channels = channels / channels.std((-2, -1), keepdims=True) * 0.25 + 0.45
    pixels = np.round(np.clip(channels, 0, 1) * 255) / 255
    return torch.tensor((pixels - 0.45) / 0.225, dtype=torch.float32)


def svd_torch(tokens, epsilon):
    """Gray by `torch.linalg.svd` in the tokens' dtype: what a direct reading of the paper runs."""
    u, sigma, vh = torch.linalg.svd(tokens, full_matrices=False)
    top = sigma[..., :1]
    ratio = sigma / top
    grayed = torch.where(ratio > 1e-6, ratio, 0) ** epsilon * top
    return (u * grayed[..., None, :]) @ vh


def dct_dense(tokens, epsilon):
    """Gray by DCT with two dense products each way."""
    rows, columns = (_dct_matrix(n, tokens.device).to(tokens.dtype) for n in tokens.shape[-2:])
    c = rows @ tokens @ columns.mT
    top = c.abs().amax((-2, -1), keepdim=True)
    return rows.mT @ (c.sign() * (c.abs() / top) ** epsilon * top) @ columns


METHODS = {"torch.linalg.svd": svd_torch, "svd": gray_svd, "svd_fast": gray_svd_fast, "dct": gray_dct,
           "dct, dense": dct_dense}  # fmt: skip


def error(method, tokens, epsilon):
    """Return the largest relative Frobenius error over the batch against float64 on the CPU."""
    exact = tokens.double().cpu()
    reference = gray_dct(exact, epsilon) if "dct" in method else svd_torch(exact, epsilon)
    difference = METHODS[method](tokens, epsilon).double().cpu() - reference
    return (difference.norm(dim=(-2, -1)) / reference.norm(dim=(-2, -1))).max().item()


def training_step(name, images):
    """Return a function that runs forward and backward of a timm model; bf16 autocast on a device."""
    model = timm.create_model(name, num_classes=1000).to(images.device).train()
    autocast = torch.autocast(images.device.type, torch.bfloat16, enabled=images.device.type != "cpu")

    def step():
        model.zero_grad()
        with autocast:
            loss = model(images).square().mean()
        loss.backward()

    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, help="images a call (CPU: 1, CUDA: 256)")
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("--epsilon", type=float, default=0.5)
    parser.add_argument("--json", metavar="FILE", help="write the numbers there as well")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    batch = arguments.batch or (256 if device.type == "cuda" else 1)
    if device.type == "cpu":
        torch.set_num_threads(1)
    rows = []

    print(f"torch {torch.__version__}, {arguments.device}, batch {batch}, ε = {arguments.epsilon}, "
          f"median of {arguments.rounds} interleaved rounds\n")  # fmt: skip
    print("| tokens | method | ms an image | times faster than torch.linalg.svd | relative error |")
    print("|---|---|---|---|---|")
    for label, (size, patch) in SIZES.items():
        count = PICTURES if batch == 1 else batch
        tokens = patchify(photographs(count, size), patch).to(device)
        calls = list(tokens) if batch == 1 else [tokens]

        def gray_all(method):
            for part in calls:
                method(part, arguments.epsilon)

        functions = {name: (lambda method=method: gray_all(method)) for name, method in METHODS.items()}
        times = interleaved(functions, device.type, arguments.rounds)
        for name in METHODS:
            row = {
                "tokens": label,
                "method": name,
                "ms": 1e3 * statistics.median(times[name]) / count,
                "faster": median_ratio(times["torch.linalg.svd"], times[name]),
                "error": max(error(name, part, arguments.epsilon) for part in calls),
            }
            rows.append(row)
            print(f"| {label} | {name} | {row['ms']:.3f} | {row['faster']:.2f} | {row['error']:.1e} |")

    model = "vit_base_patch16_224" if device.type == "cuda" else "deit_small_patch16_224"
    images = photographs(batch, 224).to(device)
    gray_input = images[0] if batch == 1 else images
    functions = {"step": training_step(model, images)}
    for name, method in METHODS.items():
        functions[name] = lambda method=method: method(patchify(gray_input, 16), arguments.epsilon)
    times = interleaved(functions, device.type, min(arguments.rounds, 9))
    print(f"\n| method at 196×768 | % of a {model} forward and backward ({statistics.median(times['step']):.3f} s) |")
    print("|---|---|")
    for name in METHODS:
        share = 100 * median_ratio(times[name], times["step"])
        rows.append({"step": model, "method": name, "percent": share})
        print(f"| {name} | {share:.2f} |")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, **vars(arguments), "batch": batch, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
