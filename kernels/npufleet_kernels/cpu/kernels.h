// What the file of each instruction set gives to the driver: plain pointers, no library type, so that no code is shared between them.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace npufleet {

// Columns of the output that a panel of packed weights holds.
constexpr int64_t PANEL = 32;
// Keys whose scores are held at once.
constexpr int64_t KEY_BLOCK = 64;
// Rows of queries (tokens · heads of a group) that one task of attention holds at most, where a group has no more heads than that.
constexpr int64_t QUERY_ROWS = 96;

enum class Type : int32_t { F32 = 0, BF16 = 1, I8 = 2 };

constexpr int64_t size_of(Type type) { return type == Type::F32 ? 4 : type == Type::BF16 ? 2 : 1; }
constexpr int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// One panel: c (rows, 32) = a (rows, k) · panel · scale + bias, or added to c. Sums run over k in order, whatever `rows` is.
//
// a: rows of `a_type` with `lda` elements between them, zeros from k to the next multiple of 2. panel: F32 (k, 32); BF16 and I8
// (k/2, 32, 2), the last pair filled with zero. scale, bias: (32) or null. scratch: k · 32 floats, used for I8.
struct Gemm {
    const void *a;
    int64_t lda;
    Type a_type;
    const void *panel;
    Type panel_type;
    int64_t rows;
    int64_t k;
    float *c;
    int64_t ldc;
    const float *scale;
    const float *bias;
    bool add;
    void *scratch;
};

// A side of the KV cache, one group of heads of a layer: element (head, slot, d) lies at head · head_stride + slot · slot_stride + d.
struct KvSide {
    void *rows;
    float *scales;
    int64_t head_stride;
    int64_t slot_stride;
    int64_t scale_head_stride;
    int64_t scale_slot_stride;
};

// Queries of one sequence and one KV head against the keys up to their own.
struct Attend {
    const float *query;  // first row of the block's first head: row t at t · query_stride, heads of the group end to end
    int64_t query_stride;
    int64_t tokens;
    int64_t group;
    int64_t head_size;
    int64_t first_position;  // of the block's first query in its sequence
    float scale;
    KvSide keys;
    KvSide values;
    Type kv_type;
    int64_t head;
    const int64_t *slots;  // of every token; null: from first_slot on
    int64_t first_slot;
    Type compute;  // F32 or BF16
    void *output;  // as query, in `compute`'s type, output_stride elements between tokens
    int64_t output_stride;
    void *scratch;  // attend_scratch_bytes
};

int64_t attend_scratch_bytes(int64_t head_size, int64_t group);

// Q, K and V of one token: norm of heads, rotation, and the write to the cache.
struct Rotate {
    float *heads;  // one head of one token, rotated in place
    int64_t head_size;
    int64_t rotary_size;
    const float *cos;  // (rotary_size)
    const float *sin;
    const float *norm;  // (head_size) or null
    float epsilon;
};

struct KernelTable {
    bool bf16_dot;  // multiplies BF16 activations
    void (*gemm)(const Gemm &);
    void (*attend)(const Attend &);
    void (*rotate)(const Rotate &);
    // Writes one head of one token, quantised where the cache is INT8.
    void (*write_head)(const float *head, int64_t head_size, const KvSide &side, Type type, int64_t index, int64_t slot);
    // out (size rounded up to 32, zeros behind) = weight · x / rms(x)
    void (*rms_norm)(const float *x, const float *weight, int64_t size, float epsilon, void *out, Type out_type);
    // out = silu(gate) · up
    void (*silu_mul)(const float *gate, const float *up, int64_t size, void *out, Type out_type);
    void (*convert)(const void *from, Type from_type, void *to, Type to_type, int64_t size);
    int64_t (*argmax)(const float *row, int64_t size);
    // Rounds a row to multiples of its scale, which is returned: its largest magnitude / 127, not a number where an element is none.
    float (*quantise)(const float *row, int64_t size, int8_t *out);
};

extern const KernelTable avx2_table;
extern const KernelTable avx512_table;
extern const KernelTable avx512_bf16_table;

}  // namespace npufleet
