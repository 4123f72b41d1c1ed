// One decoder block: everything between two residual streams, in half a dozen parallel regions.
#pragma once

#include <memory>

#include "attention.h"
#if defined(__AMX_INT8__)
#include "matrix_amx.h"
#else
static inline bool allow_matrix_units() { return false; }
#endif

enum Activation : int32_t { SILU = 0, GELU = 1, GELU_TANH = 2 };

// One block's weights and switches; Python's `BlockLayout` mirrors it field by field. Null: not there.
struct Block {
    Linear query, key, value, output, gate, up, down;
    const float *input_norm, *attention_norm_after, *mlp_norm, *mlp_norm_after, *query_norm, *key_norm;
    const float *cosine, *sine;  // [positions, head size / 2]
    int64_t window;              // 0: sees everything
    float epsilon, query_scale, softcap;
    int32_t activation;
};

// What a model needs between two calls, grown as needed and kept.
struct Scratch {
    Buffer<float> normed, query, key, value, attended, gate, up, change;
    Buffer<Partial> parts;
    Activations input;
};

struct Engine {
    bool matrix_units;
    Pool pool;
    Scratch scratch;
    std::vector<std::unique_ptr<Engine>> alone;
    // Permission first: threads have what their process had when they were made.
    explicit Engine(int threads)
        : matrix_units(allow_matrix_units()), pool(threads), alone(static_cast<size_t>(threads)) {
        scratch.input.matrix_units = matrix_units;
    }
    // What `thread` uses when it works by itself.
    Engine& own(int thread) {
        std::unique_ptr<Engine>& engine = alone[static_cast<size_t>(thread)];
        if (!engine) engine = std::make_unique<Engine>(1);
        return *engine;
    }
};

// Call task(engine, first row, rows) for blocks of rows. Where there are enough, each block is one thread's work, so
// that what lies between its layers stays in that core's cache; few rows are one block, on which all threads work.
template <class Task>
static inline void each_block(Engine& engine, int64_t rows, const Task& task) {
    // A block has two to four units of rows, the last of all perhaps not whole: enough for matrix units in any case, so
    // that the number of threads changes no bit.
    constexpr int64_t UNIT = 32, LEAST = 2, MOST = 4;
    const int64_t threads = engine.pool.threads();
    if (rows < threads * LEAST * UNIT) return task(engine, 0, rows);
    const int64_t units = (rows + UNIT - 1) / UNIT, blocks = (units + threads * MOST - 1) / (threads * MOST) * threads;
    engine.pool.run(blocks, [&](int64_t chunk, int thread) {
        const int64_t first = chunk * units / blocks * UNIT, last = std::min(rows, (chunk + 1) * units / blocks * UNIT);
        task(engine.own(thread), first, last - first);
    });
}

// Call task(row) for every row: alone where there are few, in parallel chunks where there are many.
template <class Task>
static inline void each_row(Pool& pool, int64_t rows, const Task& task) {
    // As many as lie side by side in the cache's panels: two threads that write one line slow each other down.
    const int64_t size = rows > 4 * LANES ? LANES : 4;
    pool.run((rows + size - 1) / size, [&](int64_t chunk, int) {
        for (int64_t row = chunk * size; row < std::min(rows, (chunk + 1) * size); ++row) task(row);
    });
}

// Root mean square norm (arXiv 1910.07467) of `width` floats.
static inline void norm_row(const float* x, const float* weight, float epsilon, int64_t width, float* to) {
    Floats squares = splat(0.0f);
    for (int64_t i = 0; i < width; i += LANES) {
        const Floats part = load_part(x + i, width - i);
        squares = fma(part, part, squares);
    }
    const float factor = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(width) + epsilon);
    for (int64_t i = 0; i < width; i += LANES) {
        const Floats scaled = mul(load_part(x + i, width - i), splat(factor));
        store_part(to + i, mul(scaled, load_part(weight + i, width - i)), width - i);
    }
}

static inline void norm(Pool& pool, const float* x, const float* weight, float epsilon, int64_t rows, int64_t width,
                        float* to) {
    each_row(pool, rows, [&](int64_t row) { norm_row(x + row * width, weight, epsilon, width, to + row * width); });
}

// One layer's product with the input at hand, written to `to` or added to what stands there.
struct Product {
    const Linear* linear;
    Output output;
};

static inline bool same_grid(const Linear& a, const Linear& b) {
    return is_integer(a) ? is_integer(b) && same_quantization(a, b) : !is_integer(b);
}

// Chunks of one product: a few panels, so that they stay in cache while the rows of a chunk pass by.
struct Chunks {
    static constexpr int64_t PANELS = 4, ROWS = 128;
    int64_t across, count;
    Chunks(const Linear& linear, int64_t rows)
        : across((panels_of(linear) + PANELS - 1) / PANELS), count(across * ((rows + ROWS - 1) / ROWS)) {}

    void run(const Product& product, int64_t rows, const Activations& input, int64_t chunk) const {
        const Linear& linear = *product.linear;
        const int64_t panel = chunk % across * PANELS, last = std::min(panels_of(linear), panel + PANELS);
        const int64_t row = chunk / across * ROWS, last_row = std::min(rows, row + ROWS);
#if defined(__AMX_INT8__)
        if (is_integer(linear) ? input.row_by_row : linear.type == BFLOAT16 && input.is_split)
            return multiply_matrix_units(linear, input, row, last_row, panel, last, product.output);
#endif
        multiply_range(linear, input, row, last_row, panel, last, product.output);
    }
};

// Products of one input [rows, columns] with several layers. Those on the same grid share its integers and one
// parallel region.
static inline void multiply(Pool& pool, const std::vector<Product>& products, int64_t rows, Activations& input) {
    for (size_t first = 0, last; first < products.size(); first = last) {
        std::vector<Chunks> parts;
        int64_t total = 0;
        for (last = first; last < products.size(); ++last) {
            if (!same_grid(*products[first].linear, *products[last].linear)) break;
            quantize(pool, *products[last].linear, rows, input);
            parts.emplace_back(*products[last].linear, rows);
            total += parts.back().count;
        }
        pool.run(total, [&](int64_t chunk, int) {
            size_t part = 0;
            while (chunk >= parts[part].count) chunk -= parts[part++].count;
            parts[part].run(products[first + part], rows, input, chunk);
        });
    }
}

// Turn one head's channels by its position (arXiv 2104.09864): channel i pairs with i + size / 2.
static inline void rotate(float* x, const float* cosine, const float* sine, int64_t size) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float left = x[i], right = x[i + half];
        x[i] = left * cosine[i] - right * sine[i];
        x[i + half] = right * cosine[i] + left * sine[i];
    }
}

// Queries, keys and values of one token, [heads, head size] each.
struct Token {
    float *queries, *keys;
    const float* values;
};

// Norm (where there is one) and turn queries and keys of a token, and store its keys and values.
template <class Number>
static void place_token(const Block& block, const Heads& heads, const Cache& cache, int64_t layer, int64_t tokens,
                        int64_t row, const Token& token) {
    const int64_t position = cache.length + row % tokens, size = heads.size;
    const float* cosine = block.cosine + position * (size / 2);
    const float* sine = block.sine + position * (size / 2);
    for (int64_t head = 0; head < heads.query; ++head) {
        float* query = token.queries + head * size;
        if (block.query_norm) norm_row(query, block.query_norm, block.epsilon, size, query);
        rotate(query, cosine, sine, size);
    }
    for (int64_t head = 0; head < heads.shared; ++head) {
        float* key = token.keys + head * size;
        if (block.key_norm) norm_row(key, block.key_norm, block.epsilon, size, key);
        rotate(key, cosine, sine, size);
        const HeadCache<Number> into(cache, heads, layer, row / tokens, head);
        append(into, cache.capacity, size, position, key, token.values + head * size);
    }
}

// The rows of queries in one tile: for one new token all query heads of a group, else tokens of one head.
static inline QueryRows tile_rows(const Block& block, const Heads& heads, const Cache& cache, int64_t tokens,
                                  int64_t sequence, int64_t head, int64_t tile, Scratch& scratch) {
    const int64_t group = heads.query / heads.shared, size = heads.size;
    QueryRows rows;
    const int64_t start = tile * TILE, stop = std::min<int64_t>(start + TILE, tokens == 1 ? group : tokens);
    for (int64_t index = start; index < stop; ++index, ++rows.count) {
        const int64_t token = tokens == 1 ? 0 : index, query = tokens == 1 ? head * group + index : head;
        const int64_t at = (sequence * tokens + token) * spread(heads.query * size) + query * size;
        rows.query[rows.count] = scratch.query.data() + at;
        rows.out[rows.count] = scratch.attended.data() + at;
        rows.last[rows.count] = cache.length + token + 1;
        rows.first[rows.count] = block.window ? std::max<int64_t>(0, rows.last[rows.count] - block.window) : 0;
    }
    return rows;
}

template <class Number>
static void attend(Engine& engine, const Block& block, const Heads& heads, const Cache& cache, int64_t layer,
                   int64_t tokens) {
    const int64_t group = heads.query / heads.shared;
    // One new token: a tile is (part of) a group. Many: a tile is a few tokens of one query head.
    const int64_t lines = tokens == 1 ? heads.shared : heads.query;
    const int64_t tiles = ((tokens == 1 ? group : tokens) + TILE - 1) / TILE;
    const int64_t jobs = cache.batch * lines * tiles;
    // One new token's keys are cut into parts, for there are few heads. How many depends on the length alone: sums then
    // run in the same order whatever the batch and the number of threads.
    const int64_t blocks = (cache.length + 1 + KEYS - 1) / KEYS;
    const int64_t parts = tokens == 1 ? std::min(blocks, MOST_PARTS) : 1;
    Scratch& scratch = engine.scratch;
    // Uncut, a tile is done with once it is joined: one place per thread, which stays in its cache.
    const int64_t places = parts == 1 ? engine.pool.threads() : jobs * parts;
    if (static_cast<int64_t>(scratch.parts.size()) < places) scratch.parts.resize(places);
    const Softmax softmax{block.query_scale, block.softcap};
    const auto rows_of = [&](int64_t job) {
        return tile_rows(block, heads, cache, tokens, job / (lines * tiles), job / tiles % lines, job % tiles, scratch);
    };
    engine.pool.run(jobs * parts, [&](int64_t chunk, int thread) {
        Partial& into = scratch.parts[parts == 1 ? thread : chunk];
        const int64_t job = chunk / parts, part = chunk % parts, line = job / tiles % lines;
        const QueryRows rows = rows_of(job);
        const HeadCache<Number> head(cache, heads, layer, job / (lines * tiles), tokens == 1 ? line : line / group);
        const int64_t first = rows.first[0] / LANES * LANES, last = rows.last[rows.count - 1];
        const int64_t share = ((last - first + parts - 1) / parts + KEYS - 1) / KEYS * KEYS;
        const int64_t start = std::min(last, first + part * share), end = std::min(last, start + share);
        attend_rows<Number, TILE>(head, heads, cache.capacity, rows, start, end, softmax, into);
        if (parts == 1) join_parts(rows, &into, 1, heads.size);
    });
    if (parts == 1) return;
    engine.pool.run(jobs, [&](int64_t job, int) {
        join_parts(rows_of(job), &scratch.parts[job * parts], parts, heads.size);
    });
}

// gate [T, F] becomes activation(gate) * up.
static inline void gate_row(const Block& block, float* gate, const float* up, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) {
        const Floats x = load_part(gate + i, width - i);
        Floats active;
        if (block.activation == SILU) {
            active = mul(x, sigmoid(x));
        } else if (block.activation == GELU_TANH) {
            const Floats cube = mul(mul(x, x), x);
            const Floats inner = mul(splat(0.7978845608f), fma(cube, splat(0.044715f), x));
            active = mul(mul(splat(0.5f), x), add(splat(1.0f), hyperbolic_tangent(inner)));
        } else {
            float lanes[LANES];
            store(lanes, x);
            for (float& lane : lanes) lane = 0.5f * lane * (1.0f + std::erf(lane * 0.70710678f));
            active = load(lanes);
        }
        store_part(gate + i, mul(active, load_part(up + i, width - i)), width - i);
    }
}

// Add `change` to the stream x, normed first where the family norms what comes back (Gemma).
static inline void add_normed(Engine& engine, const float* weight, float epsilon, int64_t rows, int64_t width,
                              float* x) {
    float* change = engine.scratch.change.data();
    norm(engine.pool, change, weight, epsilon, rows, width, change);
    for (int64_t i = 0; i < rows * width; ++i) x[i] += change[i];
}

// A half block's last product: straight into the stream, or through a norm.
static inline void return_to_stream(Engine& engine, const Linear& linear, const float* norm_after, float epsilon,
                                    int64_t rows, float* x) {
    Scratch& scratch = engine.scratch;
    const int64_t width = linear.rows;
    if (norm_after == nullptr) return multiply(engine.pool, {{&linear, {x, width, true}}}, rows, scratch.input);
    float* change = room(scratch.change, rows * width);
    multiply(engine.pool, {{&linear, {change, width, false}}}, rows, scratch.input);
    add_normed(engine, norm_after, epsilon, rows, width, x);
}

static void run_mlp(Engine& engine, const Block& block, int64_t rows, float* x) {
    Scratch& scratch = engine.scratch;
    const int64_t width = block.gate.columns, inner = block.gate.rows, stride = spread(inner);
    float *normed = room(scratch.normed, rows * width), *gate = room(scratch.gate, rows * stride);
    float* up = room(scratch.up, rows * stride);
    norm(engine.pool, x, block.mlp_norm, block.epsilon, rows, width, normed);
    scratch.input.replace(normed, width);
    multiply(engine.pool, {{&block.gate, {gate, stride, false}}, {&block.up, {up, stride, false}}}, rows,
             scratch.input);
    each_row(engine.pool, rows, [&](int64_t row) { gate_row(block, gate + row * stride, up + row * stride, inner); });
    scratch.input.replace(gate, stride);
    return_to_stream(engine, block.down, block.mlp_norm_after, block.epsilon, rows, x);
}

// Queries of `rows` rows from the row `first` on, and their keys and values into the cache.
template <class Number>
static void place_rows(Engine& engine, const Block& block, const Heads& heads, const Cache& cache, int64_t layer,
                       int64_t tokens, int64_t first, int64_t rows, const float* x, float* query) {
    Scratch& scratch = engine.scratch;
    const int64_t width = block.query.columns, queries = spread(block.query.rows), keys = spread(block.key.rows);
    float *normed = room(scratch.normed, rows * width), *key = room(scratch.key, rows * keys);
    float* value = room(scratch.value, rows * keys);
    norm(engine.pool, x, block.input_norm, block.epsilon, rows, width, normed);
    scratch.input.replace(normed, width);
    multiply(engine.pool,
             {{&block.query, {query, queries, false}},
              {&block.key, {key, keys, false}},
              {&block.value, {value, keys, false}}},
             rows, scratch.input);
    each_row(engine.pool, rows, [&](int64_t row) {
        const Token token{query + row * queries, key + row * keys, value + row * keys};
        place_token<Number>(block, heads, cache, layer, tokens, first + row, token);
    });
}

template <class Number>
static void run_block(Engine& engine, const Block& block, const Heads& heads, const Cache& cache, int64_t layer,
                      int64_t tokens, float* x) {
    const int64_t rows = cache.batch * tokens, width = block.query.columns, stride = spread(block.query.rows);
    float* query = room(engine.scratch.query, rows * stride);
    float* attended = room(engine.scratch.attended, rows * stride);
    each_block(engine, rows, [&](Engine& own, int64_t first, int64_t count) {
        place_rows<Number>(own, block, heads, cache, layer, tokens, first, count, x + first * width,
                           query + first * stride);
    });
    attend<Number>(engine, block, heads, cache, layer, tokens);
    each_block(engine, rows, [&](Engine& own, int64_t first, int64_t count) {
        own.scratch.input.replace(attended + first * stride, stride);
        return_to_stream(own, block.output, block.attention_norm_after, block.epsilon, count, x + first * width);
        run_mlp(own, block, count, x + first * width);
    });
}
