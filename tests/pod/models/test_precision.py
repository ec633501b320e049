"""Which type each part is held in: the plan, what is loaded by it, and what it costs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from npufleet_api.calibration import Int8KvHeads
from npufleet_api.model import Dtype
from npufleet_api.precision import KvCacheDtype, WeightDtype
from npufleet_api.settings import PrecisionSettings
from npufleet_kernels import int8
from npufleet_kernels.dispatch import select_kernels
from npufleet_pod.errors import SettingsError
from npufleet_pod.models.checkpoint import open_checkpoint
from npufleet_pod.models.config import DecoderConfig, load_config
from npufleet_pod.models.decoder import Decoder, load_decoder
from npufleet_pod.models.perplexity import hidden_states, perplexity, token_losses
from npufleet_pod.models.precision import RolePrecision, plan_precision, uniform_precision
from npufleet_pod.models.sharding import shard
from npufleet_pod.models.weights import DecoderWeights, ExpertWeights, GatedWeights, load_weights
from support.tiny_model import write_tiny_model
from support.tiny_model_gguf import write_gguf

CPU = torch.device("cpu")
TEXT = [[(7 * i * i + 3 * i + seed) % 268 + 3 for i in range(60)] for seed in range(4)]


def settings(**fields: Any) -> PrecisionSettings:
    return PrecisionSettings.model_validate(fields)


def chosen(*layers: list[int]) -> Int8KvHeads:
    return Int8KvHeads(layers=list(layers), perplexity_loss_percent=0.01, limit_percent=0.1)


def loaded(model: Path, dtype: Dtype = Dtype.FLOAT32, heads: Int8KvHeads | None = None, **fields: Any) -> Decoder:
    config = load_config(model)
    plan = plan_precision(settings(**fields), dtype, config, heads)
    with open_checkpoint(model, torch.float32, CPU) as checkpoint:
        return load_decoder(config, checkpoint, select_kernels("cpu"), precision=plan)


def weights_of(model: Path, dtype: Dtype = Dtype.FLOAT32, heads: Int8KvHeads | None = None, **fields: Any) -> DecoderWeights:
    config = load_config(model)
    plan = plan_precision(settings(**fields), dtype, config, heads)
    with open_checkpoint(model, torch.float32, CPU) as checkpoint:
        return load_weights(config, checkpoint, lambda: True, shard(config), plan)


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> DecoderConfig:
    return load_config(tiny_model)


@pytest.mark.parametrize(
    ("fields", "dtype", "attention", "feed_forward", "output"),
    [
        ({}, "Float32", ("Float32", "Float32"), ("Float32", "Float32"), ("Float32", "Float32")),
        ({}, "BFloat16", ("BFloat16", "BFloat16"), ("BFloat16", "BFloat16"), ("BFloat16", "Float32")),
        (
            {"attention": "Float16", "feed_forward": "Int8", "output": "Float32"},
            "BFloat16",
            ("Float16", "Float16"),
            ("Int8", "BFloat16"),
            ("Float32", "Float32"),
        ),
        ({"output": "BFloat16"}, "Float32", ("Float32", "Float32"), ("Float32", "Float32"), ("BFloat16", "BFloat16")),
        ({"attention": "Int8", "output": "Int8"}, "Float16", ("Int8", "Float16"), ("Float16", "Float16"), ("Int8", "Float32")),
    ],
    ids=str,
)
def test_auto_is_the_engines_type_and_scores_are_summed_in_float32_unless_asked_otherwise(
    fields: dict[str, str],
    dtype: str,
    attention: tuple[str, str],
    feed_forward: tuple[str, str],
    output: tuple[str, str],
    config: DecoderConfig,
) -> None:
    def role(names: tuple[str, str]) -> RolePrecision:
        return RolePrecision(WeightDtype(names[0]), Dtype(names[1]))

    plan = plan_precision(settings(**fields), Dtype(dtype), config)
    assert [(layer.attention, layer.feed_forward) for layer in plan.layers] == [(role(attention), role(feed_forward))] * config.layers
    assert (plan.output, plan.dtype, plan.kv_dtype) == (role(output), Dtype(dtype), Dtype(attention[1]))


@pytest.mark.parametrize(
    ("kv_cache", "heads", "expected"),
    [("Auto", chosen([0], []), ((), ())), ("Int8", None, ((0, 1), (0, 1))), ("Int8Heads", chosen([1], [0, 1]), ((1,), (0, 1)))],
)
def test_int8_heads_are_all_or_those_of_the_calibration(
    kv_cache: str, heads: Int8KvHeads | None, expected: object, config: DecoderConfig
) -> None:
    plan = plan_precision(settings(kv_cache=kv_cache), Dtype.BFLOAT16, config, heads)
    assert plan.int8_kv_heads == expected
    quantised = sum(len(layer) for layer in plan.int8_kv_heads)
    assert plan.kv_bytes_per_token(2, 16) == 2 * ((4 - quantised) * 16 * 2 + quantised * (16 + 4))


@pytest.mark.parametrize(
    ("heads", "said"),
    [
        (None, "needs a calibration that chose heads: run npufleet-pod calibrate and set calibrationPath, or choose Int8"),
        (chosen([0]), "int8KvHeads has 1 layers, the model 2: calibrate this model"),
        (chosen([0], [1, 2]), "int8KvHeads names head 2, the model has 2: calibrate this model"),
    ],
)
def test_a_calibration_that_does_not_fit_is_refused_with_the_remedy(heads: Int8KvHeads | None, said: str, config: DecoderConfig) -> None:
    with pytest.raises(SettingsError, match=said):
        plan_precision(PrecisionSettings(kv_cache=KvCacheDtype.INT8_HEADS), Dtype.FLOAT32, config, heads)


def test_a_rank_numbers_its_own_heads(config: DecoderConfig) -> None:
    plan = plan_precision(settings(kv_cache="Int8Heads"), Dtype.FLOAT32, config, chosen([0, 1], [1]))
    assert plan.for_heads([0]).int8_kv_heads == ((0,), ())
    assert plan.for_heads([1]).int8_kv_heads == ((0,), (0,))
    assert plan.for_heads([0, 1]) == plan


def test_a_quantised_weight_is_that_of_the_checkpoint_rounded_once(tiny_model: Path) -> None:
    exact, found = weights_of(tiny_model), weights_of(tiny_model, Dtype.BFLOAT16, attention="Int8", feed_forward="Int8", output="Int8")
    for before, after in zip(exact.layers, found.layers, strict=True):
        assert isinstance(before.mlp, GatedWeights)
        assert isinstance(after.mlp, GatedWeights)
        for one, other in ((before.qkv, after.qkv), (before.output, after.output), (before.mlp.gate_up, after.mlp.gate_up)):
            values, scale = int8.quantise(one.weight)
            assert torch.equal(other.weight, values)
            assert other.scale is not None
            assert torch.equal(other.scale, scale)
    assert found.head.weight.dtype == torch.int8
    assert found.embedding.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("output", "tied", "embedding", "head", "shared"),
    [
        ("Auto", True, torch.bfloat16, torch.bfloat16, True),
        ("Float32", True, torch.float32, torch.float32, True),
        ("Float16", True, torch.bfloat16, torch.float16, False),
        ("Int8", True, torch.bfloat16, torch.int8, False),
        ("Auto", False, torch.bfloat16, torch.bfloat16, False),
        ("Float32", False, torch.bfloat16, torch.float32, False),
    ],
)
def test_one_table_serves_embedding_and_head_where_their_types_allow(
    output: str, tied: bool, embedding: torch.dtype, head: torch.dtype, shared: bool, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model", tied=tied)
    weights = weights_of(model, Dtype.BFLOAT16, output=output)
    assert (weights.embedding.dtype, weights.head.weight.dtype) == (embedding, head)
    assert (weights.embedding is weights.head.weight) == shared
    hidden = loaded(model, Dtype.BFLOAT16, output=output).forward(torch.tensor([5, 9]), torch.arange(2), [2], [_Forgetful()])
    assert hidden.dtype == torch.bfloat16
    # Whichever table it is looked up in, a token begins as the same row.
    assert torch.equal(weights.embedding.to(torch.bfloat16), weights_of(model, Dtype.BFLOAT16).embedding)


class _Forgetful:
    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys.transpose(0, 1), values.transpose(0, 1)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2MoeForCausalLM"])
def test_nothing_of_the_float_weights_outlives_its_quantisation(architecture: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", architecture=architecture, layers=3)
    weights = weights_of(model, attention="Int8", feed_forward="Int8", output="Int8")
    for layer in weights.layers:
        parts = [layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down]
        if isinstance(layer.mlp, ExpertWeights):
            assert layer.mlp.router.weight.dtype == torch.float32
            assert layer.mlp.shared is not None
            parts += [layer.mlp.shared.gate_up, layer.mlp.shared.down]
        for part in parts:
            assert part.weight.dtype == torch.int8
            # A view would keep the float tensor, or a larger one, alive behind it.
            assert part.weight.untyped_storage().nbytes() == part.weight.numel()
            assert part.scale is not None
            assert part.scale.shape == part.weight.shape[:-1]


def loss_percent(model: Path, dtype: Dtype, fields: dict[str, str]) -> float:
    before, after = token_losses(loaded(model), TEXT), token_losses(loaded(model, dtype, None, **fields), TEXT)
    return 100 * abs(perplexity(after) / perplexity(before) - 1)


MIXTURES = [
    ("Float32", {"attention": "BFloat16"}, 1.0),
    ("Float32", {"attention": "Float16"}, 0.2),
    ("Float32", {"feed_forward": "Int8"}, 1.0),
    ("Float32", {"feed_forward": "BFloat16"}, 1.0),
    ("Float32", {"attention": "Int8", "feed_forward": "Int8", "output": "Int8"}, 2.0),
    ("BFloat16", {}, 1.0),
    ("BFloat16", {"output": "Float32"}, 1.0),
    ("BFloat16", {"attention": "Float32", "feed_forward": "Int8", "output": "BFloat16"}, 1.0),
    ("Float16", {"feed_forward": "Int8"}, 1.0),
]


@pytest.mark.parametrize(("dtype", "fields", "limit"), MIXTURES, ids=str)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen2MoeForCausalLM", "GlmForCausalLM"])
def test_every_mixture_of_types_stays_near_float32(
    architecture: str, dtype: str, fields: dict[str, str], limit: float, tmp_path: Path
) -> None:
    model = write_tiny_model(tmp_path / "model", seed=3, architecture=architecture, config={"head_dim": 16})
    loss = loss_percent(model, Dtype(dtype), fields)
    assert 0 < loss < limit


def test_weights_of_a_gguf_file_are_quantised_alike(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=3)
    ours = weights_of(
        write_gguf(model, tmp_path / "gguf", "F32"), feed_forward="Int8", attention="Int8", kv_cache="Int8Heads", heads=chosen([0], [1])
    )
    theirs = weights_of(model, feed_forward="Int8", attention="Int8", kv_cache="Int8Heads", heads=chosen([0], [1]))
    for own, other in zip(ours.layers, theirs.layers, strict=True):
        assert isinstance(own.mlp, GatedWeights)
        assert isinstance(other.mlp, GatedWeights)
        for one, two in (
            (own.qkv, other.qkv),
            (own.output, other.output),
            (own.mlp.gate_up, other.mlp.gate_up),
            (own.mlp.down, other.mlp.down),
        ):
            assert one.weight.dtype == torch.int8
            assert torch.equal(one.weight, two.weight)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "GlmForCausalLM"])
def test_heads_in_another_order_compute_the_same(architecture: str, tmp_path: Path) -> None:
    model = write_tiny_model(
        tmp_path / "model", seed=3, architecture=architecture, heads=8, kv_heads=4, config={"attention_bias": True, "head_dim": 8}
    )
    plain = token_losses(loaded(model), TEXT)
    # Without a cache that quantises, only the order of the heads is another.
    ordered = token_losses(loaded(model, heads=chosen([0, 2], [1]), kv_cache="Int8Heads"), TEXT)
    torch.testing.assert_close(ordered, plain, rtol=1e-5, atol=1e-5)


def test_a_plan_of_one_type_changes_no_tensor(tiny_model: Path, config: DecoderConfig) -> None:
    with open_checkpoint(tiny_model, torch.float32, CPU) as checkpoint:
        weights = load_weights(config, checkpoint, lambda: True, shard(config), uniform_precision(Dtype.FLOAT32, config))
    for layer in weights.layers:
        for part in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down):
            assert (part.scale, part.result) == (None, None)
    assert math.prod(weights.embedding.shape) == config.vocab_size * config.hidden_size


def test_layers_may_differ_and_of_several_runs_the_last_counts(tiny_model: Path) -> None:
    runs = [{"first": 0, "last": 1, "feedForward": "BFloat16"}, {"first": 1, "last": 1, "attention": "Int8", "feedForward": "Float32"}]
    weights = weights_of(tiny_model, feedForward="Int8", layers=runs)
    first, second = weights.layers
    assert isinstance(first.mlp, GatedWeights)
    assert isinstance(second.mlp, GatedWeights)
    assert (first.qkv.weight.dtype, first.mlp.down.weight.dtype) == (torch.float32, torch.bfloat16)
    assert (second.qkv.weight.dtype, second.mlp.down.weight.dtype) == (torch.int8, torch.float32)


def test_what_people_read_names_the_layers_that_differ(config: DecoderConfig) -> None:
    runs = [{"first": 1, "last": 1, "feedForward": "Float32"}]
    told = plan_precision(settings(feedForward="Int8", layers=runs), Dtype.BFLOAT16, config).describe()
    assert told["attention"] == "BFloat16"
    assert told["feed_forward"] == "Int8, Float32 in 1"


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"first": 0, "last": 2}, "precision.layers.0.last: 2 is beyond the model's 2 layers"),
        ({"first": 0, "last": 0, "attention": "Float16"}, "precision.layers.0.attention: Float16 is computed in Float16"),
    ],
)
def test_layers_that_cannot_be_are_refused(config: DecoderConfig, run: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        plan_precision(settings(layers=[run]), Dtype.FLOAT32, config)


def test_a_run_of_layers_that_is_upside_down_is_refused() -> None:
    with pytest.raises(ValueError, match="first: 1 is above last 0"):
        settings(layers=[{"first": 1, "last": 0}])


def test_a_model_with_layers_of_several_types_answers_within_what_the_types_cost(tiny_model: Path) -> None:
    runs = [{"first": 0, "last": 0, "feedForward": "Int8"}]
    models = (loaded(tiny_model), loaded(tiny_model, layers=runs), loaded(tiny_model, feedForward="Int8"))
    plain, mixed, whole = (perplexity(token_losses(model, TEXT)) for model in models)
    assert mixed != plain
    assert abs(math.log(mixed / plain)) <= abs(math.log(whole / plain)) + 0.05


@pytest.mark.parametrize("fields", [{"feed_forward": "Int8"}, {"output": "Int8"}, {"output": "Float32"}, {"attention": "Float32"}], ids=str)
def test_what_the_packed_kernels_cannot_take_is_computed_without_them(fields: dict[str, str], tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", seed=3)
    config = load_config(model)
    plan = plan_precision(settings(**fields), Dtype.FLOAT16, config)
    with open_checkpoint(model, torch.float32, CPU) as checkpoint:
        decoder = load_decoder(config, checkpoint, select_kernels("cpu"), precision=plan, packed=True)
    hidden = hidden_states(decoder, [1, 2, 3, 4])
    assert torch.isfinite(decoder.logits(hidden).float()).all()
