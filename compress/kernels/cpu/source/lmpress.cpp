// The C ABI of the CPU kernels. Nothing throws across it: functions return 0, or 1 when memory ran out.
//
// Python passes pointers to contiguous memory that outlives the call; compress/kernels/cpu/library.py checks shapes.
#include "block.h"

#include <new>

#define EXPORT extern "C" __attribute__((visibility("default")))

template <class Task>
static int guarded(const Task& task) {
    try {
        task();
        return 0;
    } catch (const std::exception&) {  // bad_alloc: nothing else is thrown here
        return 1;
    }
}

// Sizes of the structures that Python mirrors, so that a mismatch shows before anything runs.
EXPORT int64_t lmpress_size_of_linear() { return sizeof(Linear); }
EXPORT int64_t lmpress_size_of_block() { return sizeof(Block); }
EXPORT int64_t lmpress_size_of_cache() { return sizeof(Cache); }

EXPORT void* lmpress_engine_new(int32_t threads) {
    try {
        return new Engine(threads);
    } catch (const std::exception&) {
        return nullptr;
    }
}

EXPORT void lmpress_engine_free(void* engine) { delete static_cast<Engine*>(engine); }

// y [rows, linear.rows] = x [rows, linear.columns] times the transposed weight, plus the bias.
EXPORT int32_t lmpress_multiply(void* engine, const Linear* linear, const float* x, int64_t rows, float* y) {
    return guarded([&] {
        Engine& self = *static_cast<Engine*>(engine);
        self.scratch.input.replace(x, linear->columns);
        multiply(self.pool, {{linear, {y, linear->rows, false}}}, rows, self.scratch.input);
    });
}

// x [count, columns] = the rows `ids` of a float32, bfloat16 or float16 weight.
EXPORT int32_t lmpress_embed(void*, const Linear* table, const int64_t* ids, int64_t count, float* x) {
    const int64_t columns = table->columns;
    for (int64_t i = 0; i < count; ++i)
        for (int64_t column = 0; column < columns; ++column) {
            const int64_t panel = ids[i] / LANES * table->padded_columns * LANES, row = ids[i] % LANES;
            float& to = x[i * columns + column];
            if (table->type == FLOAT32) {
                to = static_cast<const float*>(table->weight)[panel + column * LANES + row];
            } else if (table->type == BFLOAT16) {
                const int64_t at = panel + column / 2 * 2 * LANES + row * 2 + column % 2;
                to = from_bfloat16(static_cast<const uint16_t*>(table->weight)[at]);
            } else {
                uint16_t half[LANES] = {static_cast<const uint16_t*>(table->weight)[panel + column * LANES + row]};
                float lanes[LANES];
                store(lanes, load_float16(half));
                to = lanes[0];
            }
        }
    return 0;
}

// x [rows, width] normed to `to`.
EXPORT int32_t lmpress_norm(void* engine, const float* x, const float* weight, float epsilon, int64_t rows,
                            int64_t width, float* to) {
    return guarded([&] { norm(static_cast<Engine*>(engine)->pool, x, weight, epsilon, rows, width, to); });
}

// Take x [B * tokens, width] through `count` blocks; their keys and values join the cache, which the caller advances.
EXPORT int32_t lmpress_blocks(void* engine, const Block* blocks, int64_t count, const int64_t* sizes,
                              const Cache* cache, int64_t tokens, float* x) {
    return guarded([&] {
        Engine& self = *static_cast<Engine*>(engine);
        const Heads heads{sizes[0], sizes[1], sizes[2]};
        for (int64_t layer = 0; layer < count; ++layer) {
            const auto run = cache->type == INT8       ? run_block<Int8>
                             : cache->type == BFLOAT16 ? run_block<Bfloat16>
                                                       : run_block<Float32>;
            run(self, blocks[layer], heads, *cache, layer, tokens, x);
        }
    });
}

// Integers and steps that `linear` makes of x: for tests.
EXPORT int32_t lmpress_quantize(void* engine, const Linear* linear, const float* x, int64_t rows, int8_t* integers,
                                float* steps) {
    return guarded([&] {
        Engine& self = *static_cast<Engine*>(engine);
        Activations input;
        input.replace(x, linear->columns);
        quantize(self.pool, *linear, rows, input);
        for (int64_t row = 0; row < rows && is_integer(*linear); ++row)
            for (int64_t column = 0; column < input.padded; column += OCTET)
                std::memcpy(integers + row * input.padded + column,
                            &input.integers[static_cast<size_t>(input.start(row) + column / OCTET * input.hop(row))],
                            OCTET);
        std::copy(input.steps.begin(), input.steps.end(), steps);
    });
}

// Read `bytes` bytes once with all threads and return their sum, so that nothing can be left out.
EXPORT float lmpress_read(void* engine, const float* from, int64_t bytes) {
    Engine& self = *static_cast<Engine*>(engine);
    const int64_t count = bytes / static_cast<int64_t>(sizeof(float)), chunk_size = int64_t{1} << 16;
    std::vector<float> sums(static_cast<size_t>(count / chunk_size));
    self.pool.run(count / chunk_size, [&](int64_t chunk, int) {
        Floats sum[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
        for (int64_t i = 0; i < chunk_size; i += 4 * LANES)
            for (int part = 0; part < 4; ++part)
                sum[part] = add(sum[part], load(from + chunk * chunk_size + i + part * LANES));
        sums[static_cast<size_t>(chunk)] = sum_lanes(add(add(sum[0], sum[1]), add(sum[2], sum[3])));
    });
    float total = 0.0f;
    for (const float sum : sums) total += sum;
    return total;
}
