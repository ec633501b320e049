// The kernels of one instruction set. Compiled once for each, with NPUFLEET_ISA 0 (AVX2), 1 (AVX-512) or 2 (AVX-512 with BF16).
//
// Only intrinsics and static functions: an inline function of a library, compiled here with wider instructions, could be the copy that the
// linker keeps for everyone.

#include <immintrin.h>

#include "kernels.h"

namespace npufleet {
namespace {

#if NPUFLEET_ISA >= 1
constexpr int VL = 16;
using vf = __m512;
using vi = __m512i;
inline vf load(const float *p) { return _mm512_loadu_ps(p); }
inline void store(float *p, vf v) { _mm512_storeu_ps(p, v); }
inline vf set1(float x) { return _mm512_set1_ps(x); }
inline vf zero() { return _mm512_setzero_ps(); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
inline float sum(vf v) { return _mm512_reduce_add_ps(v); }
inline float largest(vf v) { return _mm512_reduce_max_ps(v); }
inline vi load_i(const void *p) { return _mm512_loadu_si512(p); }
inline vf as_f(vi v) { return _mm512_castsi512_ps(v); }
inline vi shl16(vi v) { return _mm512_slli_epi32(v, 16); }
inline vi high16(vi v) { return _mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))); }
inline vf from_i(vi v) { return _mm512_cvtepi32_ps(v); }
inline vi to_i(vf v) { return _mm512_cvtps_epi32(v); }
inline vi pairs_i8(const int8_t *p) { return _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
inline vi low8(vi v) { return _mm512_srai_epi32(_mm512_slli_epi32(v, 24), 24); }
inline vi second8(vi v) { return _mm512_srai_epi32(v, 8); }
inline vf widen_i8(const int8_t *p) { return from_i(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))); }
inline vf widen_bf16(const uint16_t *p) {
    return as_f(shl16(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))));
}
inline vf zero_below(vf value, vf x, vf limit) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ), value); }
inline vf power_of_two(vi n) { return as_f(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)); }
inline vf absolute(vf v) { return _mm512_abs_ps(v); }
#else
constexpr int VL = 8;
using vf = __m256;
using vi = __m256i;
inline vf load(const float *p) { return _mm256_loadu_ps(p); }
inline void store(float *p, vf v) { _mm256_storeu_ps(p, v); }
inline vf set1(float x) { return _mm256_set1_ps(x); }
inline vf zero() { return _mm256_setzero_ps(); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
inline float sum(vf v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float largest(vf v) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline vi load_i(const void *p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)); }
inline vf as_f(vi v) { return _mm256_castsi256_ps(v); }
inline vi shl16(vi v) { return _mm256_slli_epi32(v, 16); }
inline vi high16(vi v) { return _mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xffff0000u))); }
inline vf from_i(vi v) { return _mm256_cvtepi32_ps(v); }
inline vi to_i(vf v) { return _mm256_cvtps_epi32(v); }
inline vi pairs_i8(const int8_t *p) { return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
inline vi low8(vi v) { return _mm256_srai_epi32(_mm256_slli_epi32(v, 24), 24); }
inline vi second8(vi v) { return _mm256_srai_epi32(v, 8); }
inline vf widen_i8(const int8_t *p) { return from_i(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)))); }
inline vf widen_bf16(const uint16_t *p) {
    return as_f(shl16(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))));
}
inline vf zero_below(vf value, vf x, vf limit) { return _mm256_and_ps(value, _mm256_cmp_ps(x, limit, _CMP_GE_OQ)); }
inline vf power_of_two(vi n) { return as_f(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
inline vf absolute(vf v) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v); }
#endif

constexpr int VECTORS = PANEL / VL;
// Rows whose sums fit the registers beside a panel's vectors.
constexpr int ROWS = NPUFLEET_ISA >= 1 ? 12 : 3;

inline uint16_t to_bf16(float x) {
    union {
        float f;
        uint32_t u;
    } bits = {x};
    if ((bits.u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return static_cast<uint16_t>((bits.u + 0x7fffu + ((bits.u >> 16) & 1)) >> 16);
}
inline float from_bf16(uint16_t x) {
    union {
        uint32_t u;
        float f;
    } bits = {static_cast<uint32_t>(x) << 16};
    return bits.f;
}
inline float maximum(float a, float b) { return a > b ? a : b; }
inline float root(float x) { return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

// exp, within about 2 units in the last place; 0 below -87 (Cephes' expf, by S. Moshier: range reduction by ln 2, polynomial of degree 6).
inline vf exponential(vf x) {
    const vf limit = set1(-87.0f);
    vf bounded = vmin(vmax(x, limit), set1(88.0f));
    vi n = to_i(mul(bounded, set1(1.44269504088896341f)));
    vf whole = from_i(n);
    vf r = fma(whole, set1(-0.693359375f), bounded);
    r = fma(whole, set1(2.12194440e-4f), r);
    vf p = set1(1.9875691500e-4f);
    p = fma(p, r, set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = fma(p, mul(r, r), add(r, set1(1.0f)));
    return zero_below(mul(p, power_of_two(n)), x, limit);
}

void to_bf16_row(const float *from, uint16_t *to, int64_t size) {
    int64_t i = 0;
#if NPUFLEET_ISA >= 2
    for (; i + 16 <= size; i += 16) {
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + i), (__m256i)_mm512_cvtneps_pbh(load(from + i)));
    }
#endif
    for (; i < size; i++) to[i] = to_bf16(from[i]);
}

void convert(const void *from, Type from_type, void *to, Type to_type, int64_t size) {
    if (from_type == to_type) {
        __builtin_memcpy(to, from, static_cast<size_t>(size * size_of(to_type)));
        return;
    }
    if (from_type == Type::F32) {
        to_bf16_row(static_cast<const float *>(from), static_cast<uint16_t *>(to), size);
        return;
    }
    if (to_type == Type::F32) {
        float *target = static_cast<float *>(to);
        int64_t i = 0;
        if (from_type == Type::BF16) {
            const uint16_t *source = static_cast<const uint16_t *>(from);
            for (; i + VL <= size; i += VL) store(target + i, widen_bf16(source + i));
            for (; i < size; i++) target[i] = from_bf16(source[i]);
        } else {
            const int8_t *source = static_cast<const int8_t *>(from);
            for (; i + VL <= size; i += VL) store(target + i, widen_i8(source + i));
            for (; i < size; i++) target[i] = static_cast<float>(source[i]);
        }
        return;
    }
    // INT8 to BF16: every value is exact.
    const int8_t *source = static_cast<const int8_t *>(from);
    uint16_t *target = static_cast<uint16_t *>(to);
    int64_t i = 0;
#if NPUFLEET_ISA >= 2
    for (; i + 32 <= size; i += 32) {
        _mm512_storeu_si512(target + i, (__m512i)_mm512_cvtne2ps_pbh(widen_i8(source + i + 16), widen_i8(source + i)));
    }
#endif
    for (; i < size; i++) target[i] = to_bf16(static_cast<float>(source[i]));
}

struct PanelF32 {
    static constexpr int64_t STEP = 1;
    static constexpr int64_t BYTES = PANEL * 4;
};
struct PanelBf16 {
    static constexpr int64_t STEP = 2;
    static constexpr int64_t BYTES = PANEL * 4;
};
struct PanelI8 {
    static constexpr int64_t STEP = 2;
    static constexpr int64_t BYTES = PANEL * 2;
};

inline void unpack(PanelF32, const char *panel, int vector, vf *out) { out[0] = load(reinterpret_cast<const float *>(panel) + vector * VL); }
inline void unpack(PanelBf16, const char *panel, int vector, vf *out) {
    vi both = load_i(reinterpret_cast<const uint32_t *>(panel) + vector * VL);
    out[0] = as_f(shl16(both));
    out[1] = as_f(high16(both));
}
inline void unpack(PanelI8, const char *panel, int vector, vf *out) {
    vi both = pairs_i8(reinterpret_cast<const int8_t *>(panel) + vector * VL * 2);
    out[0] = from_i(low8(both));
    out[1] = from_i(second8(both));
}

template <int R>
inline void finish(const Gemm &g, vf (&sums)[R][VECTORS], float *c) {
    for (int v = 0; v < VECTORS; v++) {
        for (int r = 0; r < R; r++) {
            vf value = sums[r][v];
            if (g.scale) value = mul(value, load(g.scale + v * VL));
            if (g.bias) value = add(value, load(g.bias + v * VL));
            float *target = c + r * g.ldc + v * VL;
            store(target, g.add ? add(load(target), value) : value);
        }
    }
}

template <class P, int R>
void float_tile(const Gemm &g, const float *a, float *c) {
    vf sums[R][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[r][v] = zero();
    const char *panel = static_cast<const char *>(g.panel);
    const int64_t steps = (g.k + P::STEP - 1) / P::STEP;
    for (int64_t s = 0; s < steps; s++, panel += P::BYTES) {
        if constexpr (R <= 2) _mm_prefetch(panel + 2048, _MM_HINT_T0);
        vf weights[VECTORS][2];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) unpack(P{}, panel, v, weights[v]);
#pragma GCC unroll 2
        for (int step = 0; step < P::STEP; step++) {
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                vf value = set1(a[r * g.lda + s * P::STEP + step]);
#pragma GCC unroll 4
                for (int v = 0; v < VECTORS; v++) sums[r][v] = fma(value, weights[v][step], sums[r][v]);
            }
        }
    }
    finish<R>(g, sums, c);
}

#if NPUFLEET_ISA >= 2
inline __m512bh bf16_pairs(PanelBf16, const char *panel, int vector) {
    return (__m512bh)_mm512_loadu_si512(panel + vector * 64);
}
inline __m512bh bf16_pairs(PanelI8, const char *panel, int vector) {
    const int8_t *p = reinterpret_cast<const int8_t *>(panel) + vector * 32;
    return _mm512_cvtne2ps_pbh(widen_i8(p + 16), widen_i8(p));
}

template <class P, int R>
void dot_tile(const Gemm &g, const uint16_t *a, float *c) {
    vf sums[R][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[r][v] = zero();
    const char *panel = static_cast<const char *>(g.panel);
    const int64_t steps = (g.k + 1) / 2;
    for (int64_t s = 0; s < steps; s++, panel += P::BYTES) {
        if constexpr (R <= 2) _mm_prefetch(panel + 2048, _MM_HINT_T0);
        __m512bh weights[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) weights[v] = bf16_pairs(P{}, panel, v);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            int pair;
            __builtin_memcpy(&pair, a + r * g.lda + s * 2, 4);
            __m512bh value = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], value, weights[v]);
        }
    }
    finish<R>(g, sums, c);
}
#endif

template <class P, bool DOT, int R>
struct Tiles {
    static void run(const Gemm &g, int64_t row, int64_t rows) {
        if (rows < R) {
            Tiles<P, DOT, R - 1>::run(g, row, rows);
            return;
        }
        float *c = g.c + row * g.ldc;
#if NPUFLEET_ISA >= 2
        if constexpr (DOT) {
            dot_tile<P, R>(g, static_cast<const uint16_t *>(g.a) + row * g.lda, c);
            return;
        }
#endif
        if constexpr (!DOT) float_tile<P, R>(g, static_cast<const float *>(g.a) + row * g.lda, c);
    }
};
template <class P, bool DOT>
struct Tiles<P, DOT, 0> {
    static void run(const Gemm &, int64_t, int64_t) {}
};

template <class P, bool DOT>
void all_tiles(const Gemm &g) {
    const int64_t count = (g.rows + ROWS - 1) / ROWS;
    for (int64_t tile = 0, row = 0; tile < count; tile++) {
        int64_t rows = g.rows / count + (tile < g.rows % count);
        Tiles<P, DOT, ROWS>::run(g, row, rows);
        row += rows;
    }
}

void gemm(const Gemm &g) {
    if (g.panel_type == Type::I8 && g.rows > ROWS) {
        // Widened once for all rows, into the type of the activations; what is summed is the same.
        Gemm wide = g;
        wide.panel = g.scratch;
        wide.panel_type = g.a_type == Type::BF16 ? Type::BF16 : Type::F32;
        const int64_t steps = (g.k + 1) / 2;
        if (g.a_type == Type::BF16) {
            convert(g.panel, Type::I8, g.scratch, Type::BF16, steps * PANEL * 2);
        } else {
            const char *panel = static_cast<const char *>(g.panel);
            float *target = static_cast<float *>(g.scratch);
            for (int64_t s = 0; s < steps; s++, panel += PANEL * 2) {
                for (int v = 0; v < VECTORS; v++) {
                    vf both[2];
                    unpack(PanelI8{}, panel, v, both);
                    store(target + s * 2 * PANEL + v * VL, both[0]);
                    if (s * 2 + 1 < g.k) store(target + (s * 2 + 1) * PANEL + v * VL, both[1]);
                }
            }
        }
        gemm(wide);
        return;
    }
#if NPUFLEET_ISA >= 2
    if (g.a_type == Type::BF16) {
        if (g.panel_type == Type::I8) all_tiles<PanelI8, true>(g);
        else all_tiles<PanelBf16, true>(g);
        return;
    }
#endif
    if (g.panel_type == Type::F32) all_tiles<PanelF32, false>(g);
    else if (g.panel_type == Type::BF16) all_tiles<PanelBf16, false>(g);
    else all_tiles<PanelI8, false>(g);
}

float sum_of_squares(const float *x, int64_t size) {
    vf squares = zero();
    int64_t i = 0;
    for (; i + VL <= size; i += VL) squares = fma(load(x + i), load(x + i), squares);
    float total = sum(squares);
    for (; i < size; i++) total += x[i] * x[i];
    return total;
}

void rms_norm(const float *x, const float *weight, int64_t size, float epsilon, void *out, Type out_type) {
    const float factor = 1.0f / root(sum_of_squares(x, size) / static_cast<float>(size) + epsilon);
    const int64_t padded = round_up(size, PANEL);
    alignas(64) float part[PANEL];
    for (int64_t start = 0; start < padded; start += PANEL) {
        const int64_t count = size - start < PANEL ? size - start : PANEL;
        if (count == PANEL) {
            for (int64_t i = 0; i < PANEL; i += VL) {
                store(part + i, mul(mul(load(x + start + i), set1(factor)), load(weight + start + i)));
            }
        } else {
            for (int64_t i = 0; i < PANEL; i++) part[i] = i < count ? x[start + i] * factor * weight[start + i] : 0.0f;
        }
        convert(part, Type::F32, static_cast<char *>(out) + start * size_of(out_type), out_type, PANEL);
    }
}

void silu_mul(const float *gate, const float *up, int64_t size, void *out, Type out_type) {
    alignas(64) float part[PANEL];
    for (int64_t start = 0; start < size; start += PANEL) {
        for (int v = 0; v < VECTORS; v++) {
            vf g = load(gate + start + v * VL);
            vf product = div(mul(g, load(up + start + v * VL)), add(set1(1.0f), exponential(sub(zero(), g))));
            store(part + v * VL, product);
        }
        convert(part, Type::F32, static_cast<char *>(out) + start * size_of(out_type), out_type, PANEL);
    }
}

void rotate(const Rotate &r) {
    if (r.norm) {
        const float factor = 1.0f / root(sum_of_squares(r.heads, r.head_size) / static_cast<float>(r.head_size) + r.epsilon);
        for (int64_t i = 0; i < r.head_size; i++) r.heads[i] = r.heads[i] * factor * r.norm[i];
    }
    const int64_t half = r.rotary_size / 2;
    float *first = r.heads, *second = r.heads + half;
    int64_t i = 0;
    for (; i + VL <= half; i += VL) {
        const vf a = load(first + i), b = load(second + i);
        store(first + i, sub(mul(a, load(r.cos + i)), mul(b, load(r.sin + i))));
        store(second + i, fma(b, load(r.cos + half + i), mul(a, load(r.sin + half + i))));
    }
    for (; i < half; i++) {
        const float a = first[i], b = second[i];
        first[i] = a * r.cos[i] - b * r.sin[i];
        second[i] = b * r.cos[half + i] + a * r.sin[half + i];
    }
}

float quantise(const float *row, int64_t size, int8_t *out) {
    vf greatest = zero(), broken = zero();
    int64_t i = 0;
    for (; i + VL <= size; i += VL) {
        greatest = vmax(absolute(load(row + i)), greatest);
        broken = fma(load(row + i), zero(), broken);
    }
    float top = largest(greatest), bad = sum(broken);
    for (; i < size; i++) {
        top = maximum(row[i] < 0 ? -row[i] : row[i], top);
        bad += row[i] * 0.0f;
    }
    const float scale = bad == 0 ? top / 127.0f : __builtin_nanf("");
    const float divisor = scale > 0 ? scale : 1.0f;
    alignas(64) float steps[VL];
    for (i = 0; i + VL <= size; i += VL) {
        store(steps, from_i(to_i(vmin(vmax(div(load(row + i), set1(divisor)), set1(-127.0f)), set1(127.0f)))));
        for (int j = 0; j < VL; j++) out[i + j] = static_cast<int8_t>(steps[j]);
    }
    for (; i < size; i++) {
        const float step = row[i] / divisor;
        out[i] = static_cast<int8_t>(_mm_cvtss_si32(_mm_set_ss(step > 127.0f ? 127.0f : step > -127.0f ? step : -127.0f)));
    }
    return scale;
}

void write_head(const float *head, int64_t head_size, const KvSide &side, Type type, int64_t index, int64_t slot) {
    const int64_t place = index * side.head_stride + slot * side.slot_stride;
    if (type != Type::I8) {
        convert(head, Type::F32, static_cast<char *>(side.rows) + place * size_of(type), type, head_size);
        return;
    }
    side.scales[index * side.scale_head_stride + slot * side.scale_slot_stride] =
        quantise(head, head_size, static_cast<int8_t *>(side.rows) + place);
}

int64_t argmax(const float *row, int64_t size) {
    // A NaN is less than every number; the first of equal ones is taken.
    vf best = set1(-__builtin_inff());
    int64_t i = 0;
    for (; i + VL <= size; i += VL) best = vmax(load(row + i), best);
    float top = largest(best);
    for (; i < size; i++) top = row[i] > top ? row[i] : top;
    for (i = 0; i < size; i++)
        if (row[i] == top) return i;
    return 0;
}

#if NPUFLEET_ISA >= 1
// 16 rows of 16 words to 16 columns.
inline void transpose_tile(const uint32_t *from, int64_t stride, uint32_t *to, int64_t to_stride) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * stride);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(to + (i)*to_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 8) * to_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
        _mm512_storeu_si512(to + (i + 4) * to_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
        _mm512_storeu_si512(to + (i + 12) * to_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
    }
}
#else
inline void transpose_tile(const uint32_t *from, int64_t stride, uint32_t *to, int64_t to_stride) {
    for (int row = 0; row < 16; row += 8) {
        for (int column = 0; column < 16; column += 8) {
            __m256 r[8], t[8];
            for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_ps(reinterpret_cast<const float *>(from + (row + i) * stride + column));
            for (int i = 0; i < 8; i += 2) {
                t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
                t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
            }
            for (int i = 0; i < 8; i += 4) {
                r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
                r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
                r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
                r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
            }
            for (int i = 0; i < 4; i++) {
                float *low = reinterpret_cast<float *>(to + (column + i) * to_stride + row);
                float *high = reinterpret_cast<float *>(to + (column + i + 4) * to_stride + row);
                _mm256_storeu_ps(low, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
                _mm256_storeu_ps(high, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
            }
        }
    }
}
#endif

inline int64_t slot_of(const Attend &a, int64_t position) { return a.slots ? a.slots[position] : a.first_slot + position; }

// Keys [start, start + count) as panels of 32 keys over head_size; rows beyond count are zero.
void pack_keys(const Attend &a, int64_t start, int64_t count, int64_t padded_size, char *staging, char *panels) {
    const int64_t element = size_of(a.compute), words = padded_size * element / 4, row_bytes = padded_size * element;
    for (int64_t key = 0; key < KEY_BLOCK; key++) {
        char *row = staging + key * row_bytes;
        if (key >= count) {
            __builtin_memset(row, 0, static_cast<size_t>(row_bytes));
            continue;
        }
        const int64_t place = a.head * a.keys.head_stride + slot_of(a, start + key) * a.keys.slot_stride;
        convert(static_cast<const char *>(a.keys.rows) + place * size_of(a.kv_type), a.kv_type, row, a.compute, a.head_size);
        if (padded_size > a.head_size) {
            __builtin_memset(row + a.head_size * element, 0, static_cast<size_t>((padded_size - a.head_size) * element));
        }
    }
    uint32_t *target = reinterpret_cast<uint32_t *>(panels);
    const uint32_t *source = reinterpret_cast<const uint32_t *>(staging);
    for (int64_t panel = 0; panel < KEY_BLOCK / PANEL; panel++) {
        for (int64_t key = 0; key < PANEL; key += 16) {
            for (int64_t word = 0; word < words; word += 16) {
                const uint32_t *from = source + (panel * PANEL + key) * words + word;
                transpose_tile(from, words, target + (panel * words + word) * PANEL + key, PANEL);
            }
        }
    }
}

// Values of the same keys as panels of 32 elements over the block's keys.
void pack_values(const Attend &a, int64_t start, int64_t count, int64_t padded_size, char *staging, char *panels) {
    const int64_t element = size_of(a.compute);
    const int64_t columns = padded_size / PANEL;
    for (int64_t key = 0; key < KEY_BLOCK; key += 2) {
        char *rows[2];
        for (int64_t i = 0; i < 2; i++) {
            rows[i] = staging + i * padded_size * element;
            int64_t filled = 0;
            if (key + i < count) {
                const int64_t place = a.head * a.values.head_stride + slot_of(a, start + key + i) * a.values.slot_stride;
                convert(static_cast<const char *>(a.values.rows) + place * size_of(a.kv_type), a.kv_type, rows[i], a.compute, a.head_size);
                filled = a.head_size;
            }
            if (filled < padded_size) __builtin_memset(rows[i] + filled * element, 0, static_cast<size_t>((padded_size - filled) * element));
        }
        for (int64_t column = 0; column < columns; column++) {
            if (a.compute == Type::F32) {
                for (int64_t i = 0; i < 2; i++) {
                    float *target = reinterpret_cast<float *>(panels) + (column * KEY_BLOCK + key + i) * PANEL;
                    __builtin_memcpy(target, rows[i] + column * PANEL * 4, PANEL * 4);
                }
                continue;
            }
            uint16_t *target = reinterpret_cast<uint16_t *>(panels) + (column * KEY_BLOCK + key) * PANEL;
            const uint16_t *first = reinterpret_cast<const uint16_t *>(rows[0]) + column * PANEL;
            const uint16_t *second = reinterpret_cast<const uint16_t *>(rows[1]) + column * PANEL;
            for (int64_t i = 0; i < PANEL; i++) {
                target[2 * i] = first[i];
                target[2 * i + 1] = second[i];
            }
        }
    }
}

struct AttendScratch {
    char *query, *keys, *values, *staging, *weights;
    float *scores, *mixed, *largest, *total, *key_scales, *value_scales;
};

inline int64_t attend_layout(char *base, int64_t head_size, int64_t group, AttendScratch &s) {
    const int64_t padded = round_up(head_size, PANEL), rows = group > QUERY_ROWS ? group : QUERY_ROWS;
    int64_t used = 0;
    auto take = [&](int64_t bytes) {
        char *place = base + used;
        used += round_up(bytes, 64);
        return place;
    };
    s.query = take(rows * padded * 4);
    s.keys = take(KEY_BLOCK * padded * 4);
    s.values = take(KEY_BLOCK * padded * 4);
    s.staging = take(KEY_BLOCK * padded * 4);
    s.weights = take(rows * KEY_BLOCK * 4);
    s.scores = reinterpret_cast<float *>(take(rows * KEY_BLOCK * 4));
    s.mixed = reinterpret_cast<float *>(take(rows * padded * 4));
    s.largest = reinterpret_cast<float *>(take(rows * 4));
    s.total = reinterpret_cast<float *>(take(rows * 4));
    s.key_scales = reinterpret_cast<float *>(take(KEY_BLOCK * 4));
    s.value_scales = reinterpret_cast<float *>(take(KEY_BLOCK * 4));
    return used;
}

void softmax_row(const Attend &a, const AttendScratch &s, int64_t row, int64_t visible, int64_t padded) {
    float *scores = s.scores + row * KEY_BLOCK;
    for (int64_t key = visible; key < KEY_BLOCK; key++) scores[key] = -__builtin_inff();
    vf top = load(scores);
    for (int64_t key = VL; key < KEY_BLOCK; key += VL) top = vmax(top, load(scores + key));
    const float before = s.largest[row], now = maximum(before, largest(top));
    const vf shift = set1(now);
    vf total = zero();
    for (int64_t key = 0; key < KEY_BLOCK; key += VL) {
        vf weight = exponential(sub(load(scores + key), shift));
        total = add(total, weight);
        if (a.kv_type == Type::I8) weight = mul(weight, load(s.value_scales + key));
        store(scores + key, weight);
    }
    convert(scores, Type::F32, s.weights + row * KEY_BLOCK * size_of(a.compute), a.compute, KEY_BLOCK);
    if (now > before) {
        alignas(64) float fade[VL];
        store(fade, exponential(set1(before - now)));
        s.total[row] *= fade[0];
        float *mixed = s.mixed + row * padded;
        for (int64_t i = 0; i < padded; i += VL) store(mixed + i, mul(load(mixed + i), set1(fade[0])));
        s.largest[row] = now;
    }
    s.total[row] += sum(total);
}

void attend(const Attend &a) {
    AttendScratch s;
    attend_layout(static_cast<char *>(a.scratch), a.head_size, a.group, s);
    const int64_t padded = round_up(a.head_size, PANEL), rows = a.tokens * a.group, element = size_of(a.compute);
    for (int64_t row = 0; row < rows; row++) {
        char *target = s.query + row * padded * element;
        const float *source = a.query + row / a.group * a.query_stride + row % a.group * a.head_size;
        convert(source, Type::F32, target, a.compute, a.head_size);
        if (padded > a.head_size) __builtin_memset(target + a.head_size * element, 0, static_cast<size_t>((padded - a.head_size) * element));
        s.largest[row] = -__builtin_inff();
        s.total[row] = 0;
    }
    __builtin_memset(s.mixed, 0, static_cast<size_t>(rows * padded * 4));
    const int64_t seen = a.first_position + a.tokens;
    const bool scaled = a.kv_type == Type::I8;
    for (int64_t start = 0; start < seen; start += KEY_BLOCK) {
        const int64_t count = seen - start < KEY_BLOCK ? seen - start : KEY_BLOCK;
        pack_keys(a, start, count, padded, s.staging, s.keys);
        pack_values(a, start, count, padded, s.staging, s.values);
        for (int64_t key = 0; key < KEY_BLOCK; key++) {
            s.key_scales[key] = a.scale;
            if (!scaled) continue;
            s.value_scales[key] = 0;
            if (key >= count) continue;
            const int64_t slot = slot_of(a, start + key);
            s.key_scales[key] = a.scale * a.keys.scales[a.head * a.keys.scale_head_stride + slot * a.keys.scale_slot_stride];
            s.value_scales[key] = a.values.scales[a.head * a.values.scale_head_stride + slot * a.values.scale_slot_stride];
        }
        for (int64_t panel = 0; panel < KEY_BLOCK / PANEL; panel++) {
            Gemm g = {};
            g.a = s.query, g.lda = padded, g.a_type = a.compute;
            g.panel = s.keys + panel * padded * PANEL * element, g.panel_type = a.compute;
            g.rows = rows, g.k = padded;
            g.c = s.scores + panel * PANEL, g.ldc = KEY_BLOCK;
            g.scale = s.key_scales + panel * PANEL;
            gemm(g);
        }
        for (int64_t row = 0; row < rows; row++) {
            const int64_t ahead = a.first_position + row / a.group + 1 - start;
            softmax_row(a, s, row, ahead < 0 ? 0 : ahead < count ? ahead : count, padded);
        }
        for (int64_t column = 0; column < padded / PANEL; column++) {
            Gemm g = {};
            g.a = s.weights, g.lda = KEY_BLOCK, g.a_type = a.compute;
            g.panel = s.values + column * KEY_BLOCK * PANEL * element, g.panel_type = a.compute;
            g.rows = rows, g.k = KEY_BLOCK;
            g.c = s.mixed + column * PANEL, g.ldc = padded;
            g.add = true;
            gemm(g);
        }
    }
    for (int64_t row = 0; row < rows; row++) {
        float *mixed = s.mixed + row * padded;
        const vf share = set1(1.0f / s.total[row]);
        for (int64_t i = 0; i < padded; i += VL) store(mixed + i, mul(load(mixed + i), share));
        char *target = static_cast<char *>(a.output) + (row / a.group * a.output_stride + row % a.group * a.head_size) * element;
        convert(mixed, Type::F32, target, a.compute, a.head_size);
    }
}

}  // namespace

#if NPUFLEET_ISA == 0
int64_t attend_scratch_bytes(int64_t head_size, int64_t group) {
    AttendScratch s;
    return attend_layout(nullptr, head_size, group, s);
}
const KernelTable avx2_table = {false, gemm, attend, rotate, write_head, rms_norm, silu_mul, convert, argmax, quantise};
#elif NPUFLEET_ISA == 1
const KernelTable avx512_table = {false, gemm, attend, rotate, write_head, rms_norm, silu_mul, convert, argmax, quantise};
#else
const KernelTable avx512_bf16_table = {true, gemm, attend, rotate, write_head, rms_norm, silu_mul, convert, argmax, quantise};
#endif

}  // namespace npufleet
