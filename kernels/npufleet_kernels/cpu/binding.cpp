// The kernels as operations and a class of torch, with every argument checked.

#include <ATen/ops/empty.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <string>

#include "step.h"

namespace npufleet {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

const KernelTable *table_of(const std::string &name) {
    if (name == "avx2" && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return &avx2_table;
    const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
    if (name == "avx512" && wide) return &avx512_table;
    if (name == "avx512_bf16" && wide && __builtin_cpu_supports("avx512bf16")) return &avx512_bf16_table;
    return nullptr;
}

const KernelTable *&chosen() {
    static const KernelTable *one = nullptr;
    return one;
}

std::vector<std::string> levels() {
    std::vector<std::string> found;
    for (const char *name : {"avx2", "avx512", "avx512_bf16"})
        if (table_of(name)) found.emplace_back(name);
    return found;
}

void choose(const std::string &name) {
    const KernelTable *table = table_of(name);
    TORCH_CHECK(table, "this CPU cannot run kernels for ", name);
    chosen() = table;
}

const KernelTable &table() {
    TORCH_CHECK(chosen(), "no instruction set was chosen: call npufleet_cpu::choose first");
    return *chosen();
}

Type type_of(const Tensor &tensor, const char *what) {
    switch (tensor.scalar_type()) {
        case at::kFloat: return Type::F32;
        case at::kBFloat16: return Type::BF16;
        case at::kChar: return Type::I8;
        default: TORCH_CHECK(false, what, " is ", tensor.scalar_type(), ": use float32, bfloat16 or int8");
    }
}

const float *floats(const OptionalTensor &tensor, int64_t size, const char *what) {
    if (!tensor.has_value() || !tensor->defined()) return nullptr;
    TORCH_CHECK(tensor->scalar_type() == at::kFloat && tensor->is_contiguous() && tensor->numel() == size, what, " must be ", size,
                " contiguous float32 numbers");
    return tensor->const_data_ptr<float>();
}

Linear linear_of(const Tensor &panels, int64_t rows, int64_t k, int64_t segment, const OptionalTensor &scale, const OptionalTensor &bias) {
    Linear l;
    l.type = type_of(panels, "weight");
    l.rows = rows, l.k = k, l.segment = segment;
    TORCH_CHECK(rows > 0 && k > 0 && segment > 0 && rows % segment == 0, "a weight of ", rows, " rows is not made of segments of ", segment);
    TORCH_CHECK(panels.is_contiguous() && panels.numel() * panels.element_size() == l.panel_count() * l.panel_bytes(),
                "panels do not hold a weight of ", rows, " × ", k);
    TORCH_CHECK((l.type == Type::I8) == (scale.has_value() && scale->defined()), "INT8 weights, and no others, have scales");
    l.panels = static_cast<const char *>(panels.const_data_ptr());
    l.scale = floats(scale, l.panel_count() * PANEL, "scale");
    l.bias = floats(bias, l.panel_count() * PANEL, "bias");
    return l;
}

Tensor pack(const Tensor &weight, int64_t segment, int64_t threads) {
    TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && weight.device().is_cpu(), "a weight must be (out, in), contiguous, on the CPU");
    Linear l;
    l.type = type_of(weight, "weight");
    l.rows = weight.size(0), l.k = weight.size(1), l.segment = segment;
    TORCH_CHECK(l.rows > 0 && l.k > 0 && segment > 0 && l.rows % segment == 0, "a weight of ", l.rows, " rows is not made of segments of ", segment);
    Tensor panels = at::empty({l.panel_count() * l.panel_bytes() / weight.element_size()}, weight.options());
    const int64_t element = size_of(l.type), step = l.type == Type::F32 ? 1 : 2, steps = (l.k + step - 1) / step;
    const char *source = static_cast<const char *>(weight.const_data_ptr());
    char *target = static_cast<char *>(panels.mutable_data_ptr());
    // By the threads that read it later: memory is taken on the NUMA node of whoever writes it first.
    run_on_team(static_cast<int>(threads), [&](Team &team, int thread) {
        team.share(thread, l.panel_count(), [&](int64_t panel) {
            char *to = target + panel * l.panel_bytes();
            const int64_t inside = panel % l.segment_panels() * PANEL, first = panel / l.segment_panels() * segment + inside;
            const int64_t width = segment - inside < PANEL ? segment - inside : PANEL;
            if (width < PANEL || l.k % step != 0) __builtin_memset(to, 0, static_cast<size_t>(l.panel_bytes()));
            // A few steps of all columns at a time, so that what is written stays in the nearest cache.
            const int64_t unit = step * element;
            for (int64_t start = 0; start < steps; start += 16) {
                const int64_t end = start + 16 < steps ? start + 16 : steps;
                for (int64_t column = 0; column < width; column++) {
                    const char *row = source + (first + column) * l.k * element;
                    for (int64_t s = start; s < end; s++) {
                        char *place = to + (s * PANEL + column) * unit;
                        if ((s + 1) * step > l.k) __builtin_memcpy(place, row + s * unit, static_cast<size_t>(element));
                        else if (unit == 4) __builtin_memcpy(place, row + s * 4, 4);
                        else __builtin_memcpy(place, row + s * 2, 2);
                    }
                }
            }
        });
    });
    return panels;
}

Tensor linear(const Tensor &x, const Tensor &panels, int64_t rows, int64_t segment, const OptionalTensor &scale, const OptionalTensor &bias,
              at::ScalarType result, int64_t threads) {
    TORCH_CHECK(x.dim() == 2 && x.device().is_cpu(), "x must be (T, in), on the CPU");
    TORCH_CHECK(result == at::kFloat || result == at::kBFloat16, "a result is float32 or bfloat16, not ", result);
    const int64_t count = x.size(0), k = x.size(1);
    Linear l = linear_of(panels, rows, k, segment, scale, bias);
    const Type x_type = type_of(x, "x");
    TORCH_CHECK(x_type != Type::I8, "x is int8: use float32 or bfloat16");
    const bool narrow = x_type == Type::BF16 && l.type != Type::F32 && table().bf16_dot;
    const Type compute = narrow ? Type::BF16 : Type::F32;
    Tensor out = at::empty({count, rows}, x.options().dtype(result));
    if (count == 0) return out;
    const int64_t lda = round_up(k, PANEL);
    Tensor scratch = at::empty({linear_scratch_bytes(l, static_cast<int>(threads)) + count * lda * size_of(compute) + 64},
                               x.options().dtype(at::kByte));
    char *inputs = reinterpret_cast<char *>(round_up(reinterpret_cast<int64_t>(scratch.mutable_data_ptr()), 64));
    const Tensor rows_of_x = x.contiguous();
    for (int64_t row = 0; row < count; row++) {
        char *to = inputs + row * lda * size_of(compute);
        const char *from = static_cast<const char *>(rows_of_x.const_data_ptr()) + row * k * size_of(x_type);
        table().convert(from, x_type, to, compute, k);
        __builtin_memset(to + k * size_of(compute), 0, static_cast<size_t>((lda - k) * size_of(compute)));
    }
    run_linear(table(), l, inputs, lda, compute, count, out.mutable_data_ptr(), result == at::kFloat ? Type::F32 : Type::BF16,
               inputs + round_up(count * lda * size_of(compute), 64), static_cast<int>(threads));
    return out;
}

Tensor argmax(const Tensor &logits) {
    TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.is_contiguous() && logits.size(1) > 0,
                "logits must be (N, vocabulary) contiguous float32");
    Tensor out = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
    for (int64_t row = 0; row < logits.size(0); row++) {
        out.mutable_data_ptr<int64_t>()[row] = table().argmax(logits.const_data_ptr<float>() + row * logits.size(1), logits.size(1));
    }
    return out;
}

std::tuple<Tensor, Tensor> quantise(const Tensor &weight, int64_t threads) {
    TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kFloat && weight.is_contiguous(), "a weight must be (out, in) contiguous float32");
    Tensor values = at::empty(weight.sizes(), weight.options().dtype(at::kChar));
    Tensor scales = at::empty({weight.size(0)}, weight.options());
    const int64_t size = weight.size(1);
    const float *from = weight.const_data_ptr<float>();
    int8_t *to = values.mutable_data_ptr<int8_t>();
    float *factors = scales.mutable_data_ptr<float>();
    const KernelTable &kernels = table();
    run_on_team(static_cast<int>(threads), [&](Team &team, int thread) {
        team.share(thread, weight.size(0), [&](int64_t row) { factors[row] = kernels.quantise(from + row * size, size, to + row * size); });
    });
    return {values, scales};
}

KvSide side_of(const Tensor &rows, const OptionalTensor &scales) {
    KvSide side = {};
    side.rows = rows.mutable_data_ptr();
    side.head_stride = rows.stride(0), side.slot_stride = rows.stride(1);
    if (scales.has_value() && scales->defined()) {
        side.scales = scales->mutable_data_ptr<float>();
        side.scale_head_stride = scales->stride(0), side.scale_slot_stride = scales->stride(1);
    }
    return side;
}

// The layers of a decoder, with their weights packed.
struct DecoderStack : torch::CustomClassHolder {
    DecoderStack(int64_t hidden, int64_t heads, int64_t kv_heads, int64_t head_size, int64_t intermediate, double epsilon, bool narrow) {
        TORCH_CHECK(hidden > 0 && heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && head_size > 0 && intermediate > 0, "shape: not one of a decoder");
        shape_ = {hidden, heads, kv_heads, head_size, intermediate, static_cast<float>(epsilon), Type::F32};
        narrow_ = narrow;
    }

    // Tensors: input norm, QKV, query norm, key norm, output, feed-forward norm, gate and up, down; projections as panels, scale, bias.
    void add_layer(std::vector<OptionalTensor> t) {
        TORCH_CHECK(t.size() == 16, "a layer has 16 tensors");
        for (size_t index : {0, 1, 6, 9, 10, 13}) TORCH_CHECK(t[index].has_value() && t[index]->defined(), "a layer's tensor ", index, " is missing");
        const int64_t heads = (shape_.heads + 2 * shape_.kv_heads) * shape_.head_size, inner = shape_.intermediate;
        Layer l;
        l.input_norm = floats(t[0], shape_.hidden, "input norm");
        l.qkv = linear_of(*t[1], heads, shape_.hidden, heads, t[2], t[3]);
        l.query_norm = floats(t[4], shape_.head_size, "query norm");
        l.key_norm = floats(t[5], shape_.head_size, "key norm");
        l.output = linear_of(*t[6], shape_.hidden, shape_.heads * shape_.head_size, shape_.hidden, t[7], t[8]);
        l.mlp_norm = floats(t[9], shape_.hidden, "feed-forward norm");
        l.gate_up = linear_of(*t[10], 2 * inner, shape_.hidden, inner, t[11], t[12]);
        l.down = linear_of(*t[13], shape_.hidden, inner, shape_.hidden, t[14], t[15]);
        for (const Linear *part : {&l.qkv, &l.output, &l.gate_up, &l.down}) {
            TORCH_CHECK(!narrow_ || part->type != Type::F32, "float32 weights are multiplied with float32 activations");
        }
        layers_.push_back(l);
        kept_.push_back(std::move(t));
    }

    // hidden (T, hidden) and the result, float32 or bfloat16; the result is normalised by `norm` where there is one, in hidden's type.
    // cos, sin: (T, R) float32. cache: for each layer its groups, each keys, values, key scales, value scales, of (K, S, D) and (K, S);
    // groups: how many a layer has. new_slots: (T) int64. tokens, lengths, first_slots: of each sequence, first slot -1 where its tokens
    // are scattered: then their slots lie in `scattered`, end to end.
    Tensor forward(const Tensor &hidden, const Tensor &cos, const Tensor &sin, std::vector<OptionalTensor> cache, std::vector<int64_t> groups,
                   const Tensor &new_slots, std::vector<int64_t> tokens, std::vector<int64_t> lengths, std::vector<int64_t> first_slots,
                   const Tensor &scattered, const OptionalTensor &norm, int64_t threads, bool profile) {
        const int64_t rows = hidden.size(0), ld = round_up(shape_.hidden, PANEL);
        TORCH_CHECK(hidden.dim() == 2 && hidden.size(1) == shape_.hidden && hidden.is_contiguous(), "hidden must be (T, ", shape_.hidden, ")");
        TORCH_CHECK(groups.size() == layers_.size(), "the cache has ", groups.size(), " layers, the model ", layers_.size());
        TORCH_CHECK(new_slots.scalar_type() == at::kLong && new_slots.is_contiguous() && new_slots.numel() == rows, "new_slots must be (T) int64");
        TORCH_CHECK(scattered.scalar_type() == at::kLong && scattered.is_contiguous(), "scattered must be int64");
        TORCH_CHECK(tokens.size() == lengths.size() && tokens.size() == first_slots.size(), "sequences: three lists of one size");
        Batch batch;
        batch.rows = rows;
        batch.rotary_size = cos.size(1);
        batch.cos = floats(cos, rows * batch.rotary_size, "cos");
        batch.sin = floats(sin, rows * batch.rotary_size, "sin");
        TORCH_CHECK(batch.rotary_size % 2 == 0 && batch.rotary_size <= shape_.head_size, "rotation: ", batch.rotary_size, " of ", shape_.head_size);
        batch.new_slots = new_slots.const_data_ptr<int64_t>();
        int64_t most_slots = INT64_MAX;
        const std::vector<std::vector<CacheGroup>> caches = caches_of(cache, groups, most_slots);
        int64_t row = 0, next = 0;
        for (size_t i = 0; i < tokens.size(); i++) {
            TORCH_CHECK(tokens[i] > 0 && tokens[i] <= lengths[i], "sequence ", i, ": ", tokens[i], " new tokens of ", lengths[i]);
            Sequence s = {row, tokens[i], lengths[i], nullptr, first_slots[i]};
            if (first_slots[i] < 0) {
                TORCH_CHECK(next + lengths[i] <= scattered.numel(), "sequence ", i, ": slots are missing");
                s.slots = scattered.const_data_ptr<int64_t>() + next;
                check_slots(s.slots, lengths[i], most_slots);
                next += lengths[i];
            } else {
                TORCH_CHECK(first_slots[i] + lengths[i] <= most_slots, "sequence ", i, ": slots beyond the cache's ", most_slots);
            }
            batch.sequences.push_back(s);
            row += tokens[i];
        }
        TORCH_CHECK(row == rows, "sequences have ", row, " new tokens, hidden has ", rows);
        check_slots(batch.new_slots, rows, most_slots);
        Shape shape = shape_;
        shape.compute = narrow_ && table().bf16_dot ? Type::BF16 : Type::F32;
        const int workers = static_cast<int>(threads);
        const Type type = type_of(hidden, "hidden");
        TORCH_CHECK(type != Type::I8, "hidden is int8");
        Tensor out = at::empty({rows, shape_.hidden}, hidden.options());
        if (rows == 0) return out;
        Tensor memory = at::empty({rows * ld * 4 + step_scratch_bytes(shape, layers_, rows, workers) + 8192}, hidden.options().dtype(at::kByte));
        float *x = reinterpret_cast<float *>(round_up(reinterpret_cast<int64_t>(memory.mutable_data_ptr()), 4096));
        const char *from = static_cast<const char *>(hidden.const_data_ptr());
        for (int64_t i = 0; i < rows; i++) {
            table().convert(from + i * shape_.hidden * size_of(type), type, x + i * ld, Type::F32, shape_.hidden);
            for (int64_t j = shape_.hidden; j < ld; j++) x[i * ld + j] = 0;
        }
        char *scratch = reinterpret_cast<char *>(x) + round_up(rows * ld * 4, 4096);
        run_layers(table(), shape, layers_, caches, batch, x, scratch, workers, profile ? seconds_ : nullptr);
        const float *weight = floats(norm, shape_.hidden, "norm");
        std::vector<float> padded(static_cast<size_t>(ld));
        for (int64_t i = 0; i < rows; i++) {
            const float *result = x + i * ld;
            if (weight) {
                table().rms_norm(result, weight, shape_.hidden, shape_.epsilon, padded.data(), Type::F32);
                result = padded.data();
            }
            table().convert(result, Type::F32, static_cast<char *>(out.mutable_data_ptr()) + i * shape_.hidden * size_of(type), type, shape_.hidden);
        }
        return out;
    }

    // Seconds of norms, QKV, rotation with the write, attention, output, gate and up, down since the last call, of profiled steps.
    std::vector<double> take_profile() {
        std::vector<double> found(seconds_, seconds_ + PARTS);
        for (double &second : seconds_) second = 0;
        return found;
    }

private:
    std::vector<std::vector<CacheGroup>> caches_of(const std::vector<OptionalTensor> &cache, const std::vector<int64_t> &groups, int64_t &most_slots) const {
        std::vector<std::vector<CacheGroup>> caches;
        size_t next = 0;
        for (int64_t count : groups) {
            std::vector<CacheGroup> own;
            int64_t heads = 0;
            for (int64_t i = 0; i < count; i++, next += 4) {
                TORCH_CHECK(next + 4 <= cache.size() && cache[next].has_value() && cache[next + 1].has_value(), "cache: tensors are missing");
                const Tensor &keys = *cache[next], &values = *cache[next + 1];
                for (const Tensor *side : {&keys, &values}) {
                    TORCH_CHECK(side->dim() == 3 && side->size(2) == shape_.head_size && side->stride(2) == 1, "keys and values must be (K, S, ", shape_.head_size, ")");
                    if (side->size(1) < most_slots) most_slots = side->size(1);
                }
                const Type type = type_of(keys, "keys");
                TORCH_CHECK(values.scalar_type() == keys.scalar_type() && values.size(0) == keys.size(0), "keys and values differ in type or heads");
                for (size_t scales : {next + 2, next + 3}) {
                    const bool there = cache[scales].has_value() && cache[scales]->defined();
                    TORCH_CHECK(there == (type == Type::I8), "INT8 heads, and no others, have scales");
                    TORCH_CHECK(!there || (cache[scales]->scalar_type() == at::kFloat && cache[scales]->dim() == 2 &&
                                           cache[scales]->size(0) == keys.size(0) && cache[scales]->size(1) >= keys.size(1)),
                                "scales must be (K, S) float32");
                }
                own.push_back({keys.size(0), type, side_of(keys, cache[next + 2]), side_of(values, cache[next + 3])});
                heads += keys.size(0);
            }
            TORCH_CHECK(heads == shape_.kv_heads, "a layer of the cache has ", heads, " heads, the model ", shape_.kv_heads);
            caches.push_back(std::move(own));
        }
        return caches;
    }

    static void check_slots(const int64_t *slots, int64_t count, int64_t most) {
        for (int64_t i = 0; i < count; i++) TORCH_CHECK(slots[i] >= 0 && slots[i] < most, "slot ", slots[i], " lies beyond the cache's ", most);
    }

    Shape shape_;
    bool narrow_;
    std::vector<Layer> layers_;
    std::vector<std::vector<OptionalTensor>> kept_;
    double seconds_[PARTS] = {};
};

TORCH_LIBRARY(npufleet_cpu, m) {
    m.def("levels", levels);
    m.def("choose", choose);
    m.def("pack", pack);
    m.def("linear", linear);
    m.def("argmax", argmax);
    m.def("quantise", quantise);
    m.class_<DecoderStack>("DecoderStack")
        .def(torch::init<int64_t, int64_t, int64_t, int64_t, int64_t, double, bool>())
        .def("add_layer", &DecoderStack::add_layer)
        .def("take_profile", &DecoderStack::take_profile)
        .def("forward",
             [](const c10::intrusive_ptr<DecoderStack> &self, const Tensor &hidden, const Tensor &cos, const Tensor &sin,
                std::vector<OptionalTensor> cache, std::vector<int64_t> groups, const Tensor &new_slots, std::vector<int64_t> tokens,
                std::vector<int64_t> lengths, std::vector<int64_t> first_slots, const Tensor &scattered, const OptionalTensor &norm,
                int64_t threads, bool profile) {
                 return self->forward(hidden, cos, sin, std::move(cache), std::move(groups), new_slots, std::move(tokens),
                                      std::move(lengths), std::move(first_slots), scattered, norm, threads, profile);
             });
}

}  // namespace
}  // namespace npufleet
