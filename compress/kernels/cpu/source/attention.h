// Attention over the cache: online softmax over blocks of keys (FlashAttention, arXiv 2205.14135), query heads that
// share keys and values (arXiv 2305.13245) in one pass over them.
//
// The cache keeps, per layer, sequence and key-value head, keys and values as panels, so that the product with a query
// and the weighted sum run along lanes:
//   keys    [capacity / 16][head_dim][16]: 16 tokens side by side
//   values  [ceil(head_dim / 16)][capacity][16]: 16 channels side by side
// in float32, bfloat16, or int8 with one float32 step per token and head.
#pragma once

#include "linear.h"

constexpr int KEYS = 128;  // keys per block of the online softmax
constexpr int MAX_HEAD = 256;
constexpr float NOTHING = -1e30f;
constexpr int64_t MOST_PARTS = 16;  // of one token's keys

// The cache of all layers; Python's `CacheLayout` mirrors it field by field.
struct Cache {
    void* keys;
    void* values;
    float* key_steps;  // [layers, B, h, capacity] for INT8
    float* value_steps;
    int64_t batch, capacity, length;  // length: tokens before this pass
    int32_t type, padding;
};

struct Heads {
    int64_t query, shared, size;  // query heads, key-value heads, channels of one
    int64_t value_panels() const { return (size + LANES - 1) / LANES; }
};

// Where one sequence's one key-value head lives.
template <class Number>
struct HeadCache {
    typename Number::type *keys, *values;
    float *key_steps, *value_steps;

    HeadCache(const Cache& cache, const Heads& heads, int64_t layer, int64_t sequence, int64_t head) {
        const int64_t index = (layer * cache.batch + sequence) * heads.shared + head;
        keys = static_cast<typename Number::type*>(cache.keys) + index * cache.capacity * heads.size;
        values = static_cast<typename Number::type*>(cache.values) +
                 index * cache.capacity * heads.value_panels() * LANES;
        key_steps = cache.key_steps + index * cache.capacity;
        value_steps = cache.value_steps + index * cache.capacity;
    }
};

static inline float cache_step(const float* x, int64_t size) {
    float largest = 0.0f;
    for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(x[i]));
    return largest == 0.0f ? 1.0f : largest / 127.0f;
}

static inline void put(float* to, float value, float) { *to = value; }
static inline void put(uint16_t* to, float value, float) { *to = to_bfloat16(value); }
static inline void put(int8_t* to, float value, float step) { *to = static_cast<int8_t>(std::nearbyint(value / step)); }

// Write one token's key and value [head size] at `position`.
template <class Number>
static void append(const HeadCache<Number>& head, int64_t capacity, int64_t size, int64_t position, const float* key,
                   const float* value) {
    float key_step = 1.0f, value_step = 1.0f;
    if (sizeof(typename Number::type) == 1) {
        head.key_steps[position] = key_step = cache_step(key, size);
        head.value_steps[position] = value_step = cache_step(value, size);
    }
    auto* keys = head.keys + position / LANES * size * LANES + position % LANES;
    for (int64_t i = 0; i < size; ++i) put(keys + i * LANES, key[i], key_step);
    for (int64_t i = 0; i < size; ++i)
        put(head.values + (i / LANES * capacity + position) * LANES + i % LANES, value[i], value_step);
}

// Up to TILE rows of queries that look at the same keys; row m sees the keys first[m]..last[m].
struct QueryRows {
    int count = 0;
    const float* query[TILE];
    float* out[TILE];
    int64_t first[TILE], last[TILE];
};

// What the softmax over a part of the keys leaves behind: largest score, sum of weights, weighted sum of values.
struct Partial {
    float largest[TILE], total[TILE];
    float values[TILE][MAX_HEAD];
};

struct Softmax {
    float scale, cap;  // cap: 0 for none
};

// The scores of 16 keys from `key`, but nothing of those before `first` or from `last` on.
static inline Floats mask(Floats scores, int64_t key, int64_t first, int64_t last) {
    alignas(64) static constexpr float LANE[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats lane = load(LANE), nothing = splat(2 * NOTHING);
    scores = where_less(lane, splat(static_cast<float>(first - key)), nothing, scores);
    return where_less(lane, splat(static_cast<float>(last - key)), scores, nothing);
}

// Scores of P panels of 16 keys from `key`, masked, for M rows.
template <class Number, int M, int P>
static inline void score_panels(const HeadCache<Number>& head, const Heads& heads, const QueryRows& rows, int64_t key,
                                const Softmax& softmax, float (&scores)[TILE][KEYS], int at) {
    Floats sums[M][P];
    const float* queries[M];
    for (int m = 0; m < M; ++m) {
        for (int p = 0; p < P; ++p) sums[m][p] = splat(0.0f);
        queries[m] = rows.query[m];
    }
    const int64_t size = heads.size * LANES;
    multiply_floats<Number, M, P>(head.keys + key * heads.size, size, queries, heads.size, sums);
    for (int p = 0; p < P; ++p, key += LANES, at += LANES) {
        Floats scale = splat(softmax.scale);
        if (sizeof(typename Number::type) == 1) scale = mul(scale, load(head.key_steps + key));
        for (int m = 0; m < M; ++m) {
            Floats score = mul(sums[m][p], scale);
            if (softmax.cap > 0)
                score = mul(splat(softmax.cap), hyperbolic_tangent(divide(score, splat(softmax.cap))));
            if (key < rows.first[m] || key + LANES > rows.last[m])
                score = mask(score, key, rows.first[m], rows.last[m]);
            store(&scores[m][at], score);
        }
    }
}

// Add the weighted values of `count` keys from `key` to P panels of channels.
template <class Number, int M, int P>
static inline void add_values(const HeadCache<Number>& head, int64_t capacity, int64_t key, int64_t count,
                              int64_t panel, const float (&scores)[TILE][KEYS], Partial& into) {
    Floats sums[M][P];
    const float* weights[M];
    for (int m = 0; m < M; ++m) {
        weights[m] = scores[m];
        for (int p = 0; p < P; ++p) sums[m][p] = load(into.values[m] + (panel + p) * LANES);
    }
    const auto* values = head.values + (panel * capacity + key) * LANES;
    multiply_floats<Number, M, P>(values, capacity * LANES, weights, count, sums);
    for (int m = 0; m < M; ++m)
        for (int p = 0; p < P; ++p) store(into.values[m] + (panel + p) * LANES, sums[m][p]);
}

// Turn a block's scores into weights relative to the largest score so far, and scale down what came before.
static inline void weigh_block(float* scores, int keys, float& largest, float& total, float* values, int64_t size) {
    Floats top = splat(largest);
    for (int i = 0; i < keys; i += LANES) top = maximum(top, load(scores + i));
    const float peak = max_lanes(top);
    const Floats fade = exponential(splat(largest - peak));
    Floats sum = splat(0.0f);
    for (int i = 0; i < keys; i += LANES) {
        const Floats weight = exponential(sub(load(scores + i), splat(peak)));
        store(scores + i, weight);
        sum = add(sum, weight);
    }
    for (int64_t i = 0; i < size; i += LANES) store(values + i, mul(load(values + i), fade));
    float factor[LANES];
    store(factor, fade);
    total = total * factor[0] + sum_lanes(sum);
    largest = peak;
}

// Attention of M rows over the keys start..end, `start` a multiple of 16.
template <class Number, int M>
static void attend_tile(const HeadCache<Number>& head, const Heads& heads, int64_t capacity, const QueryRows& rows,
                        int64_t start, int64_t end, const Softmax& softmax, Partial& into) {
    constexpr int P = float_panels_for(M);
    alignas(64) float scores[TILE][KEYS];
    const int64_t panels = heads.value_panels();
    for (int m = 0; m < M; ++m) {
        into.largest[m] = NOTHING;
        into.total[m] = 0.0f;
        for (int64_t i = 0; i < panels * LANES; i += LANES) store(into.values[m] + i, splat(0.0f));
    }
    for (int64_t block = start; block < end; block += KEYS) {
        const int keys = static_cast<int>(std::min<int64_t>(KEYS, (end - block + LANES - 1) / LANES * LANES));
        int at = 0;
        for (; at + P * LANES <= keys; at += P * LANES)
            score_panels<Number, M, P>(head, heads, rows, block + at, softmax, scores, at);
        for (; at < keys; at += LANES)
            score_panels<Number, M, 1>(head, heads, rows, block + at, softmax, scores, at);
        for (int m = 0; m < M; ++m) {
            weigh_block(scores[m], keys, into.largest[m], into.total[m], into.values[m], panels * LANES);
            if (sizeof(typename Number::type) == 1)
                for (int i = 0; i < keys; i += LANES)
                    store(scores[m] + i, mul(load(scores[m] + i), load(head.value_steps + block + i)));
        }
        // Exactly the keys there are: behind them the cache was never written, and 0 times NaN is NaN.
        const int64_t count = std::min<int64_t>(KEYS, end - block);
        int64_t panel = 0;
        for (; panel + P <= panels; panel += P)
            add_values<Number, M, P>(head, capacity, block, count, panel, scores, into);
        for (; panel < panels; ++panel)
            add_values<Number, M, 1>(head, capacity, block, count, panel, scores, into);
    }
}

template <class Number, int M>
static void attend_rows(const HeadCache<Number>& head, const Heads& heads, int64_t capacity, const QueryRows& rows,
                        int64_t start, int64_t end, const Softmax& softmax, Partial& into) {
    if constexpr (M > 0) {
        if (rows.count == M)
            return attend_tile<Number, M>(head, heads, capacity, rows, start, end, softmax, into);
        attend_rows<Number, M - 1>(head, heads, capacity, rows, start, end, softmax, into);
    }
}

// Write the attended values of the parts' rows, which cover all keys between them.
static inline void join_parts(const QueryRows& rows, const Partial* parts, int64_t count, int64_t size) {
    for (int m = 0; m < rows.count; ++m) {
        float largest = NOTHING, total = 0.0f, fade[MOST_PARTS];
        for (int64_t part = 0; part < count; ++part) largest = std::max(largest, parts[part].largest[m]);
        for (int64_t part = 0; part < count; ++part) {
            fade[part] = std::exp(parts[part].largest[m] - largest);
            total += parts[part].total[m] * fade[part];
        }
        const Divisor divisor(total);
        for (int64_t i = 0; i < size; i += LANES) {
            Floats sum = splat(0.0f);
            for (int64_t part = 0; part < count; ++part)
                sum = add(sum, mul(load(parts[part].values[m] + i), splat(fade[part])));
            store_part(rows.out[m] + i, divisor.divide_into(sum), size - i);
        }
    }
}
