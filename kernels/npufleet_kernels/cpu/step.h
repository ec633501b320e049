// A whole decoder over the new tokens of many sequences, on plain memory.
#pragma once

#include <vector>

#include "kernels.h"
#include "pool.h"

namespace npufleet {

// A packed linear layer: panels of 32 columns, each segment of `segment` columns filled up to whole panels.
struct Linear {
    const char *panels = nullptr;
    Type type = Type::F32;
    int64_t rows = 0;  // outputs
    int64_t k = 0;
    int64_t segment = 0;
    const float *scale = nullptr;  // padded as the panels are
    const float *bias = nullptr;

    int64_t segment_panels() const { return (segment + PANEL - 1) / PANEL; }
    int64_t panel_count() const { return rows / segment * segment_panels(); }
    int64_t panel_bytes() const { return type == Type::F32 ? k * PANEL * 4 : round_up(k, 2) * PANEL * size_of(type); }
    const char *panel(int64_t index) const { return panels + index * panel_bytes(); }
};

struct Layer {
    const float *input_norm;
    Linear qkv;
    const float *query_norm;
    const float *key_norm;
    Linear output;
    const float *mlp_norm;
    Linear gate_up;
    Linear down;
};

struct Shape {
    int64_t hidden;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_size;
    int64_t intermediate;
    float epsilon;
    Type compute;  // of activations that are multiplied: F32, or BF16 where the instruction set has it
};

struct CacheGroup {
    int64_t kv_heads;
    Type type;
    KvSide keys;
    KvSide values;
};

struct Sequence {
    int64_t first_row;
    int64_t tokens;
    int64_t length;
    const int64_t *slots;  // of all tokens; null: from first_slot on
    int64_t first_slot;
};

struct Batch {
    int64_t rows;
    std::vector<Sequence> sequences;
    const int64_t *new_slots;
    const float *cos;  // (rows, rotary_size)
    const float *sin;
    int64_t rotary_size;
};

enum Part { PART_NORM, PART_QKV, PART_ROTATE, PART_ATTENTION, PART_OUTPUT, PART_GATE_UP, PART_DOWN, PARTS };

int64_t step_scratch_bytes(const Shape &shape, const std::vector<Layer> &layers, int64_t rows, int threads);

// x: (rows, hidden rounded up to 32) float, replaced by the last layer's result with its residual. seconds: (PARTS) or null, time of each
// part, over all layers.
void run_layers(const KernelTable &table, const Shape &shape, const std::vector<Layer> &layers,
                const std::vector<std::vector<CacheGroup>> &caches, const Batch &batch, float *x, char *scratch, int threads,
                double *seconds);

// out (rows, outputs of the layer) = x (rows, lda) · linear; out_type F32 or BF16. scratch: linear_scratch_bytes.
int64_t linear_scratch_bytes(const Linear &linear, int threads);
void run_linear(const KernelTable &table, const Linear &linear, const void *x, int64_t lda, Type x_type, int64_t rows, void *out,
                Type out_type, char *scratch, int threads);

}  // namespace npufleet
