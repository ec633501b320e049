from __future__ import annotations

import torch

from npufleet_pod.engine.kv_cache import BLOCK_TOKENS, GrowingKVCache
from npufleet_pod.models.config import parse_config

CONFIG = parse_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 16,
        "max_position_embeddings": 512,
    }
)


def test_what_was_stored_comes_back_whatever_the_steps() -> None:
    cache = GrowingKVCache(CONFIG, torch.float32, torch.device("cpu"))
    everything = torch.randn(2, 2, 3 * BLOCK_TOKENS, 2, 4, generator=torch.Generator().manual_seed(0))
    stored = 0
    for count in (1, BLOCK_TOKENS - 1, 1, 5, BLOCK_TOKENS, 1):
        cache.reserve(count)
        for layer in range(2):
            new = everything[layer, :, stored : stored + count]
            keys, values = cache.append(layer, new[0], new[1])
            assert torch.equal(keys, everything[layer, 0, : stored + count].transpose(0, 1))
            assert torch.equal(values, everything[layer, 1, : stored + count].transpose(0, 1))
        assert cache.length == stored
        cache.commit()
        stored += count
        assert cache.length == stored
