"""Time of a layer of BERT-base, by operations one after the other and by the operators that were chosen for the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.engine.limits import best

LAYERS, HIDDEN, HEADS, INNER = 2, 768, 12, 3072
LENGTHS = (128, 512)


def measure(threads: int) -> dict[str, Any]:
    """Milliseconds a layer for one sequence in float32, random weights: `unfused` by the references, `fused` by the chosen operations."""
    import torch

    from npufleet_kernels.dispatch import VARIANTS, select_kernels
    from npufleet_pod.models.encoder import Encoder, EncoderLayer, EncoderWeights, Norm, Projection
    from npufleet_pod.models.encoder_config import EncoderConfig

    torch.set_num_threads(threads)
    config = EncoderConfig("BertModel", LAYERS, HIDDEN, INNER, HEADS, 1000, 2, 512, 0, 1e-12, True)

    def projection(rows: int, columns: int) -> Projection:
        return Projection(torch.randn(rows, columns) / columns**0.5, torch.zeros(rows))

    def norm() -> Norm:
        return Norm(torch.ones(HIDDEN), torch.zeros(HIDDEN))

    layers = tuple(
        EncoderLayer(
            projection(3 * HIDDEN, HIDDEN), projection(HIDDEN, HIDDEN), norm(), projection(INNER, HIDDEN), projection(HIDDEN, INNER), norm()
        )
        for _ in range(LAYERS)
    )
    words, positions, types = (torch.randn(rows, HIDDEN) for rows in (1000, 512, 2))
    weights = EncoderWeights(words, positions, types, norm(), layers)
    encoders = {
        "unfused": Encoder(config, weights, select_kernels("cpu", dict.fromkeys(VARIANTS, "reference"))),
        "fused": Encoder(config, weights, select_kernels("cpu")),
    }
    found: dict[str, Any] = {"layers_timed": LAYERS, "dtype": "float32"}
    with torch.inference_mode():
        for length in LENGTHS:
            ids = torch.arange(length) % 1000
            for name, encoder in encoders.items():
                found[f"{name}_{length}_ms"] = round(1000 * best(partial(encoder.forward, ids, [length]), 8) / LAYERS, 3)
    return found
