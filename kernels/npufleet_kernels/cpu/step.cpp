#include "step.h"

#include <chrono>

namespace npufleet {
namespace {

// Rows of activations that one task multiplies: with the widest inputs of small models they stay in the second cache.
constexpr int64_t ROW_BLOCK = 96;

int64_t blocks(int64_t count, int64_t size) { return (count + size - 1) / size; }
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// A panel of the layer times a block of `rows` rows of activations, from `row` on; where it goes is left open.
Gemm product(const Linear &l, int64_t panel, const void *a, int64_t lda, Type a_type, int64_t rows, int64_t row, void *scratch) {
    Gemm g = {};
    g.a = static_cast<const char *>(a) + row * lda * size_of(a_type), g.lda = lda, g.a_type = a_type;
    g.panel = l.panel(panel), g.panel_type = l.type;
    g.rows = least(ROW_BLOCK, rows - row), g.k = l.k;
    g.scale = l.scale ? l.scale + panel * PANEL : nullptr;
    g.bias = l.bias ? l.bias + panel * PANEL : nullptr;
    g.scratch = scratch;
    return g;
}

bool has_int8(const std::vector<Layer> &layers) {
    for (const Layer &l : layers)
        for (const Linear *part : {&l.qkv, &l.output, &l.gate_up, &l.down})
            if (part->type == Type::I8) return true;
    return false;
}

// A tile of the output, and behind it the scratch of `gemm`.
int64_t linear_own_bytes(const Linear &linear) {
    const int64_t tile = ROW_BLOCK * PANEL * 4, widened = linear.type == Type::I8 ? round_up(linear.k, 2) * PANEL * 4 : 0;
    return round_up(tile + widened, 4096);
}

struct Buffers {
    char *normed;      // (rows, hidden) of the compute type
    float *heads;      // (rows, Q, K and V)
    char *mixed;       // (rows, heads · head_size) of the compute type
    char *activated;   // (rows, intermediate) of the compute type
    char *own;         // of each thread
    int64_t own_bytes;
    int64_t ld_hidden, ld_heads, ld_mixed, ld_inner;
};

int64_t largest_input(const Shape &s) {
    int64_t size = s.hidden;
    if (s.heads * s.head_size > size) size = s.heads * s.head_size;
    if (s.intermediate > size) size = s.intermediate;
    return round_up(size, PANEL);
}

int64_t layout(char *base, const Shape &s, int64_t rows, int threads, bool int8_weights, Buffers &b) {
    const int64_t element = size_of(s.compute);
    b.ld_hidden = round_up(s.hidden, PANEL);
    b.ld_heads = round_up((s.heads + 2 * s.kv_heads) * s.head_size, PANEL);
    b.ld_mixed = round_up(s.heads * s.head_size, PANEL);
    b.ld_inner = round_up(s.intermediate, PANEL);
    const int64_t tiles = 2 * ROW_BLOCK * PANEL * 4;
    const int64_t widened = int8_weights ? largest_input(s) * PANEL * 4 : 0;
    int64_t attention = attend_scratch_bytes(s.head_size, s.heads / s.kv_heads);
    b.own_bytes = round_up(attention > tiles + widened ? attention : tiles + widened, 4096);
    int64_t used = 0;
    auto take = [&](int64_t bytes) {
        char *place = base + used;
        used += round_up(bytes, 4096);
        return place;
    };
    b.normed = take(rows * b.ld_hidden * element);
    b.heads = reinterpret_cast<float *>(take(rows * b.ld_heads * 4));
    b.mixed = take(rows * b.ld_mixed * element);
    b.activated = take(rows * b.ld_inner * element);
    b.own = take(b.own_bytes * threads);
    return used;
}

class Clock {
public:
    Clock(double *seconds, int thread) : seconds_(thread == 0 ? seconds : nullptr) {
        if (seconds_) last_ = std::chrono::steady_clock::now();
    }
    void mark(Part part) {
        if (!seconds_) return;
        const auto now = std::chrono::steady_clock::now();
        seconds_[part] += std::chrono::duration<double>(now - last_).count();
        last_ = now;
    }

private:
    double *seconds_;
    std::chrono::steady_clock::time_point last_;
};

struct Query {
    int64_t sequence;
    int64_t first;
    int64_t tokens;
};

class Stack {
public:
    Stack(const KernelTable &table, const Shape &shape, const Batch &batch, const Buffers &buffers, float *x)
        : t_(table), s_(shape), in_(batch), b_(buffers), x_(x), element_(size_of(shape.compute)), group_(shape.heads / shape.kv_heads) {
        const int64_t most = group_ >= QUERY_ROWS ? 1 : QUERY_ROWS / group_;
        for (size_t index = 0; index < batch.sequences.size(); index++) {
            for (int64_t first = 0; first < batch.sequences[index].tokens; first += most) {
                const int64_t left = batch.sequences[index].tokens - first;
                queries_.push_back({static_cast<int64_t>(index), first, left < most ? left : most});
            }
        }
    }

    void layer(Team &team, int thread, const Layer &l, const std::vector<CacheGroup> &groups, Clock &clock) {
        norm(team, thread, l.input_norm);
        clock.mark(PART_NORM);
        char *own = b_.own + thread * b_.own_bytes;
        multiply(team, thread, l.qkv, b_.normed, b_.ld_hidden, b_.heads, b_.ld_heads, false, own);
        clock.mark(PART_QKV);
        team.share(thread, blocks(in_.rows, rows_per_task()), [&](int64_t task) {
            const int64_t end = least(in_.rows, (task + 1) * rows_per_task());
            for (int64_t row = task * rows_per_task(); row < end; row++) place(l, groups, row);
        });
        clock.mark(PART_ROTATE);
        team.share(thread, static_cast<int64_t>(queries_.size()) * s_.kv_heads, [&](int64_t task) { attend(groups, task, own); });
        clock.mark(PART_ATTENTION);
        multiply(team, thread, l.output, b_.mixed, b_.ld_mixed, x_, b_.ld_hidden, true, own);
        clock.mark(PART_OUTPUT);
        norm(team, thread, l.mlp_norm);
        clock.mark(PART_NORM);
        gate_up(team, thread, l.gate_up, own);
        clock.mark(PART_GATE_UP);
        multiply(team, thread, l.down, b_.activated, b_.ld_inner, x_, b_.ld_hidden, true, own);
        clock.mark(PART_DOWN);
    }

private:
    int64_t rows_per_task() const { return in_.rows > 64 ? 8 : 1; }

    void norm(Team &team, int thread, const float *weight) {
        const int64_t each = rows_per_task();
        team.share(thread, blocks(in_.rows, each), [&](int64_t task) {
            for (int64_t row = task * each; row < least(in_.rows, (task + 1) * each); row++) {
                t_.rms_norm(x_ + row * b_.ld_hidden, weight, s_.hidden, s_.epsilon, b_.normed + row * b_.ld_hidden * element_, s_.compute);
            }
        });
    }

    void multiply(Team &team, int thread, const Linear &l, const char *a, int64_t lda, float *c, int64_t ldc, bool add, char *own) {
        const int64_t panels = l.panel_count();
        team.share(thread, panels * blocks(in_.rows, ROW_BLOCK), [&](int64_t task) {
            const int64_t panel = task % panels, row = task / panels * ROW_BLOCK;
            Gemm g = product(l, panel, a, lda, s_.compute, in_.rows, row, own);
            g.c = c + row * ldc + panel * PANEL, g.ldc = ldc, g.add = add;
            t_.gemm(g);
        });
    }

    void gate_up(Team &team, int thread, const Linear &l, char *own) {
        const int64_t panels = l.segment_panels();
        float *gate = reinterpret_cast<float *>(own), *up = gate + ROW_BLOCK * PANEL;
        char *scratch = own + 2 * ROW_BLOCK * PANEL * 4;
        team.share(thread, panels * blocks(in_.rows, ROW_BLOCK), [&](int64_t task) {
            const int64_t panel = task % panels, row = task / panels * ROW_BLOCK;
            Gemm g = product(l, panel, b_.normed, b_.ld_hidden, s_.compute, in_.rows, row, scratch);
            g.c = gate, g.ldc = PANEL;
            t_.gemm(g);
            g = product(l, panel + panels, b_.normed, b_.ld_hidden, s_.compute, in_.rows, row, scratch);
            g.c = up, g.ldc = PANEL;
            t_.gemm(g);
            for (int64_t i = 0; i < g.rows; i++) {
                char *target = b_.activated + ((row + i) * b_.ld_inner + panel * PANEL) * element_;
                t_.silu_mul(gate + i * PANEL, up + i * PANEL, PANEL, target, s_.compute);
            }
        });
    }

    // Norm and rotation of a row's heads, and their way into the cache.
    void place(const Layer &l, const std::vector<CacheGroup> &groups, int64_t row) {
        float *heads = b_.heads + row * b_.ld_heads;
        Rotate r = {};
        r.head_size = s_.head_size, r.rotary_size = in_.rotary_size, r.epsilon = s_.epsilon;
        r.cos = in_.cos + row * in_.rotary_size, r.sin = in_.sin + row * in_.rotary_size;
        for (int64_t head = 0; head < s_.heads + s_.kv_heads; head++) {
            r.heads = heads + head * s_.head_size;
            r.norm = head < s_.heads ? l.query_norm : l.key_norm;
            t_.rotate(r);
        }
        int64_t head = s_.heads;
        for (const CacheGroup &group : groups) {
            for (int64_t index = 0; index < group.kv_heads; index++, head++) {
                const float *key = heads + head * s_.head_size;
                t_.write_head(key, s_.head_size, group.keys, group.type, index, in_.new_slots[row]);
                t_.write_head(key + s_.kv_heads * s_.head_size, s_.head_size, group.values, group.type, index, in_.new_slots[row]);
            }
        }
    }

    void attend(const std::vector<CacheGroup> &groups, int64_t task, char *own) {
        const Query &query = queries_[static_cast<size_t>(task / s_.kv_heads)];
        const Sequence &sequence = in_.sequences[static_cast<size_t>(query.sequence)];
        const int64_t kv_head = task % s_.kv_heads, row = sequence.first_row + query.first;
        int64_t head = kv_head;
        const CacheGroup *group = &groups.front();
        while (head >= group->kv_heads) head -= group++->kv_heads;
        Attend a = {};
        a.query = b_.heads + row * b_.ld_heads + kv_head * group_ * s_.head_size, a.query_stride = b_.ld_heads;
        a.tokens = query.tokens, a.group = group_, a.head_size = s_.head_size;
        a.first_position = sequence.length - sequence.tokens + query.first;
        a.scale = 1.0f / __builtin_sqrtf(static_cast<float>(s_.head_size));
        a.keys = group->keys, a.values = group->values, a.kv_type = group->type, a.head = head;
        a.slots = sequence.slots, a.first_slot = sequence.first_slot;
        a.compute = s_.compute;
        a.output = b_.mixed + (row * b_.ld_mixed + kv_head * group_ * s_.head_size) * element_, a.output_stride = b_.ld_mixed;
        a.scratch = own;
        t_.attend(a);
    }

    const KernelTable &t_;
    const Shape &s_;
    const Batch &in_;
    const Buffers &b_;
    float *x_;
    int64_t element_;
    int64_t group_;
    std::vector<Query> queries_;
};

}  // namespace

int64_t step_scratch_bytes(const Shape &shape, const std::vector<Layer> &layers, int64_t rows, int threads) {
    Buffers b;
    return layout(nullptr, shape, rows, threads, has_int8(layers), b) + 4096;
}

void run_layers(const KernelTable &table, const Shape &shape, const std::vector<Layer> &layers,
                const std::vector<std::vector<CacheGroup>> &caches, const Batch &batch, float *x, char *scratch, int threads,
                double *seconds) {
    Buffers buffers;
    layout(scratch, shape, batch.rows, threads, has_int8(layers), buffers);
    Stack stack(table, shape, batch, buffers, x);
    run_on_team(threads, [&](Team &team, int thread) {
        // Columns that nobody writes are multiplied with zeros: they must be numbers.
        if (shape.heads * shape.head_size != buffers.ld_mixed) {
            const int64_t element = size_of(shape.compute), used = shape.heads * shape.head_size;
            team.share(thread, batch.rows, [&](int64_t row) {
                char *from = buffers.mixed + (row * buffers.ld_mixed + used) * element;
                __builtin_memset(from, 0, static_cast<size_t>((buffers.ld_mixed - used) * element));
            });
        }
        Clock clock(seconds, thread);
        for (size_t index = 0; index < layers.size(); index++) stack.layer(team, thread, layers[index], caches[index], clock);
    });
}

int64_t linear_scratch_bytes(const Linear &linear, int threads) { return linear_own_bytes(linear) * threads + 4096; }

void run_linear(const KernelTable &table, const Linear &linear, const void *x, int64_t lda, Type x_type, int64_t rows, void *out,
                Type out_type, char *scratch, int threads) {
    const int64_t own_bytes = linear_own_bytes(linear), panels = linear.panel_count(), each = linear.segment_panels();
    run_on_team(threads, [&](Team &team, int thread) {
        float *c = reinterpret_cast<float *>(scratch + thread * own_bytes);
        team.share(thread, panels * blocks(rows, ROW_BLOCK), [&](int64_t task) {
            const int64_t panel = task % panels, row = task / panels * ROW_BLOCK;
            Gemm g = product(linear, panel, x, lda, x_type, rows, row, c + ROW_BLOCK * PANEL);
            g.c = c, g.ldc = PANEL;
            table.gemm(g);
            const int64_t inside = panel % each * PANEL, column = panel / each * linear.segment + inside;
            const int64_t width = least(linear.segment - inside, PANEL);
            for (int64_t i = 0; i < g.rows; i++) {
                char *target = static_cast<char *>(out) + ((row + i) * linear.rows + column) * size_of(out_type);
                table.convert(c + i * PANEL, Type::F32, target, out_type, width);
            }
        });
    });
}

}  // namespace npufleet
