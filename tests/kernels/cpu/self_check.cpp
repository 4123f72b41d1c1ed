// The CPU kernels against plain scalar code, where Python does not reach: under an emulated processor, and under the
// compiler's sanitizers. Goes through the C ABI, as Python does. Prints one line per failure; the exit code is their
// number.
//
// Everything that a kernel must not look at holds a trap: columns and rows of padding are random, and a cache that was
// not written yet is NaN.
#include "lmpress.cpp"

#include <cstdio>
#include <string>
#include <thread>

static int failures = 0;

static void check(bool good, const std::string& what) {
    if (good) return;
    ++failures;
    std::printf("FAILED: %s\n", what.c_str());
}

struct Random {
    uint64_t state = 88172645463325252u;
    uint64_t bits() {
        state ^= state << 13;
        state ^= state >> 7;
        return state ^= state << 17;
    }
    int64_t integer(int64_t low, int64_t high) {
        return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
    }
    float uniform() { return static_cast<float>(bits() >> 40) / (1 << 23) - 1.0f; }
    std::vector<float> floats(int64_t count) {
        std::vector<float> made(static_cast<size_t>(count));
        for (float& value : made) value = uniform();
        return made;
    }
    // The bits of a number between 2^-7 and 1 in magnitude, times 2^-down.
    uint16_t half(int32_t type, int down) {
        const uint64_t sign = bits() & 0x8000, exponent = (type == BFLOAT16 ? 126 : 14) - integer(0, 6) - down;
        return static_cast<uint16_t>(sign | (type == BFLOAT16 ? exponent << 7 | (bits() & 127)
                                                              : exponent << 10 | (bits() & 1023)));
    }
};

static float from_half(uint16_t bits, int32_t type) {
    if (type == BFLOAT16) {
        const uint32_t wide = static_cast<uint32_t>(bits) << 16;
        float value;
        std::memcpy(&value, &wide, sizeof value);
        return value;
    }
    const float value = std::ldexp(static_cast<float>(1024 + (bits & 1023)), (bits >> 10 & 31) - 25);
    return bits & 0x8000 ? -value : value;
}

static int64_t up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// Numbers as they lie in memory, and what they stand for.
struct Numbers {
    std::vector<float> floats;
    std::vector<uint16_t> halves;
    int32_t type = FLOAT32;

    Numbers(Random& random, int64_t count, int32_t type_, int down = 0) : type(type_) {
        if (type == FLOAT32) floats = random.floats(count);
        for (float& value : floats) value = std::ldexp(value, -down);
        for (int64_t i = 0; type != FLOAT32 && i < count; ++i) {
            halves.push_back(random.half(type, down));
            floats.push_back(from_half(halves.back(), type));
        }
    }
    const void* data() const {
        return type == FLOAT32 ? static_cast<const void*>(floats.data()) : static_cast<const void*>(halves.data());
    }
    float at(int64_t index) const { return floats[static_cast<size_t>(index)]; }
};

struct Shape {
    int64_t rows, columns;
    int32_t type, scale_type;
    int64_t group, scale_group;  // 0: one for all columns
    bool zero, bias;
    int64_t outliers;
};

// A random layer, packed as linear.h says, and the numbers it stands for.
struct Layer {
    Linear linear{};
    std::vector<uint8_t> packed;
    std::vector<int8_t> zeros;
    std::vector<float> bias;
    std::vector<int32_t> columns;
    std::vector<int64_t> counts = {0, 0};
    std::vector<Numbers> numbers;  // the weight or the scale, then the outlier weight
    std::vector<float> weight;     // [rows, columns]; 0 in outlier columns
    std::vector<float> outliers;   // [rows, columns]; 0 elsewhere

    Layer(Random& random, const Shape& shape) {
        linear.rows = shape.rows;
        linear.columns = shape.columns;
        linear.type = shape.type;
        linear.scale_type = shape.scale_type;
        linear.levels = shape.outliers > 0 ? 127.0f : 127.5f;
        weight.resize(static_cast<size_t>(shape.rows * shape.columns));
        outliers.resize(weight.size());
        if (shape.bias) bias = random.floats(shape.rows);
        linear.bias = shape.bias ? bias.data() : nullptr;
        is_integer(linear) ? fill_integers(random, shape) : fill_floats(random, shape);
    }

    void fill_floats(Random& random, const Shape& shape) {
        const bool pairs = shape.type == BFLOAT16;
        const int64_t padded = pairs ? up(shape.columns, 8) : shape.columns;
        linear.padded_columns = linear.group = linear.scale_group = padded;
        numbers.emplace_back(random, panels_of(linear) * padded * LANES, shape.type);
        linear.weight = numbers[0].data();
        for (int64_t row = 0; row < shape.rows; ++row)
            for (int64_t column = 0; column < shape.columns; ++column) {
                const int64_t pair = 2 * place(row, column / 2, padded / 2) + column % 2;
                const int64_t at = pairs ? pair : place(row, column, padded);
                weight[row * shape.columns + column] = numbers[0].at(at);
            }
    }

    void fill_integers(Random& random, const Shape& shape) {
        const int64_t group = shape.group ? shape.group : up(shape.columns, is_sparse(linear) ? 32 : 8);
        const int64_t scale_group = shape.scale_group ? shape.scale_group : up(shape.columns, group);
        const int64_t padded = up(shape.columns, scale_group), groups = padded / scale_group;
        const int64_t panels = panels_of(linear), bytes = padded * bits(shape.type) / 8;
        linear.padded_columns = padded;
        linear.group = group;
        linear.scale_group = scale_group;
        for (int64_t i = 0; i < panels * bytes * LANES; ++i) packed.push_back(static_cast<uint8_t>(random.bits()));
        if (is_sparse(linear)) fill_positions(random);
        linear.weight = packed.data();
        // So that weights stay below 1, as those of the other types.
        const bool nibbles = shape.type == INT4 || shape.type == SPARSE4;
        numbers.emplace_back(random, panels * groups * LANES, shape.scale_type, nibbles ? 3 : 7);
        linear.scale = numbers[0].data();
        for (int64_t i = 0; shape.zero && i < panels * groups * LANES; ++i)
            zeros.push_back(static_cast<int8_t>(random.integer(-8, 7)));
        linear.zero = shape.zero ? zeros.data() : nullptr;
        for (int64_t row = 0; row < shape.rows; ++row)
            for (int64_t column = 0; column < shape.columns; ++column) {
                const int64_t at = place(row, column / scale_group, groups);
                const int zero = shape.zero ? zeros[static_cast<size_t>(at)] : 0;
                const int integer = unpack(row, column, bytes * LANES) - zero;
                weight[row * shape.columns + column] = static_cast<float>(integer) * numbers[0].at(at);
            }
        if (shape.outliers > 0) fill_outliers(random, shape);
    }

    // Bits of a panel per weight.
    static int64_t bits(int32_t type) {
        return type == INT4 ? 4 : type == INT8 ? 8 : type == SPARSE4 ? 3 : 5;
    }

    // Two places of every four columns, in padding too.
    void fill_positions(Random& random) {
        const size_t block = static_cast<size_t>(bits(linear.type)) * 64;
        for (size_t start = 0; start < packed.size(); start += block)
            for (size_t at = start; at < start + 64; at += 2)
                for (int unit = 0; unit < 4; ++unit) {
                    const int64_t first = random.integer(0, 2), second = random.integer(first + 1, 3);
                    const int keep = ~(3 << 2 * unit);
                    packed[at] = static_cast<uint8_t>((packed[at] & keep) | first << 2 * unit);
                    packed[at + 1] = static_cast<uint8_t>((packed[at + 1] & keep) | second << 2 * unit);
                }
    }

    void fill_outliers(Random& random, const Shape& shape) {
        for (int64_t i = 0; i < shape.outliers; ++i)
            columns.push_back(static_cast<int32_t>(i * shape.columns / shape.outliers));
        numbers.emplace_back(random, panels_of(linear) * shape.outliers * LANES, shape.scale_type);
        linear.outliers = shape.outliers;
        linear.outlier_columns = columns.data();
        linear.outlier_weight = numbers[1].data();
        linear.threshold = 0.9f;
        linear.counts = counts.data();
        for (int64_t row = 0; row < shape.rows; ++row)
            for (int64_t i = 0; i < shape.outliers; ++i) {
                const int64_t at = row * shape.columns + columns[static_cast<size_t>(i)];
                outliers[at] = numbers[1].at(place(row, i, shape.outliers));
                weight[at] = 0;
            }
    }

    // Where a panelled array of `width` entries per row keeps one.
    static int64_t place(int64_t row, int64_t entry, int64_t width) {
        return (row / LANES * width + entry) * LANES + row % LANES;
    }

    int unpack(int64_t row, int64_t column, int64_t panel_bytes) const {
        const uint8_t* panel = packed.data() + row / LANES * panel_bytes;
        if (is_sparse(linear)) return unpack_sparse(panel, row % LANES, column);
        const int64_t byte = 4 * (row % LANES) + column % 4;
        if (linear.type == INT8) return panel[column / 4 * 64 + byte] - 128;
        const uint8_t both = panel[column / 8 * 64 + byte];
        return (column % 8 < 4 ? both & 15 : both >> 4) - 8;
    }

    // What a row of a 2:4 panel keeps of a column, or 0.
    int unpack_sparse(const uint8_t* panel, int64_t row, int64_t column) const {
        const uint8_t* block = panel + column / 32 * bits(linear.type) * 64;
        const int64_t unit = column % 32 / 8, start = 4 * row + column % 8 / 4 * 2;
        for (int64_t byte = start; byte < start + 2; ++byte) {
            if ((block[byte] >> 2 * unit & 3) != column % 4) continue;
            if (linear.type == SPARSE8) return static_cast<int8_t>(block[64 + 64 * unit + byte]);
            const int nibble = block[64 + unit / 2 * 64 + byte] >> unit % 2 * 4 & 15;
            return nibble < 8 ? nibble : nibble - 16;
        }
        return 0;
    }
};

struct Rounded {
    std::vector<int> integers;  // [padded columns]
    std::vector<float> steps;
    int64_t missed = 0;
};

static Rounded round_row(const Linear& linear, const float* x) {
    std::vector<float> inside(static_cast<size_t>(linear.padded_columns), 0.0f);
    std::copy(x, x + linear.columns, inside.begin());
    for (int64_t i = 0; i < linear.outliers; ++i) inside[static_cast<size_t>(linear.outlier_columns[i])] = 0.0f;
    Rounded made;
    for (const float value : inside) made.missed += linear.threshold > 0 && std::fabs(value) >= linear.threshold;
    for (int64_t start = 0; start < linear.padded_columns; start += linear.group) {
        float largest = 0.0f;
        for (int64_t i = 0; i < linear.group; ++i) largest = std::max(largest, std::fabs(inside[start + i]));
        const float step = largest == 0.0f ? 1.0f : largest / linear.levels;
        for (int64_t i = 0; i < linear.group; ++i) {
            const float scaled = std::nearbyint(inside[start + i] / step);
            made.integers.push_back(static_cast<int>(std::min(127.0f, std::max(-128.0f, scaled))));
        }
        made.steps.push_back(step);
    }
    return made;
}

// One row of the product, and what its terms come to in magnitude, which rounding errors are relative to.
struct Row {
    std::vector<double> value, magnitude;
};

static Row multiply_row(const Layer& layer, const float* x) {
    const Linear& linear = layer.linear;
    Rounded rounded;
    if (is_integer(linear)) rounded = round_row(linear, x);
    Row made;
    for (int64_t row = 0; row < linear.rows; ++row) {
        double sum = linear.bias ? linear.bias[row] : 0.0, magnitude = std::fabs(sum);
        for (int64_t column = 0; column < linear.columns; ++column) {
            double input = x[column];
            if (is_integer(linear)) input = rounded.integers[column] * double{rounded.steps[column / linear.group]};
            const double term = input * layer.weight[row * linear.columns + column];
            const double outlier = double{x[column]} * layer.outliers[row * linear.columns + column];
            sum += term + outlier;
            magnitude += std::fabs(term) + std::fabs(outlier);
        }
        made.value.push_back(sum);
        made.magnitude.push_back(magnitude);
    }
    return made;
}

static std::string describe(const Shape& shape, int64_t tokens) {
    std::string text;
    const int64_t numbers[] = {shape.rows, shape.columns, shape.type, shape.scale_type, shape.group, shape.scale_group};
    for (const int64_t number : numbers) text += std::to_string(number) + " ";
    return text + (shape.zero ? "zero " : "") + (shape.bias ? "bias " : "") + std::to_string(shape.outliers) +
           " outliers, tokens " + std::to_string(tokens);
}

static void check_product(void* engine, Random& random, const Shape& shape, int64_t tokens) {
    Layer layer(random, shape);
    const std::vector<float> x = random.floats(tokens * shape.columns);
    std::vector<float> y(static_cast<size_t>(tokens * shape.rows), NAN);
    check(lmpress_multiply(engine, &layer.linear, x.data(), tokens, y.data()) == 0, "memory");
    int64_t missed = 0;
    for (int64_t token = 0; token < tokens; ++token) {
        const float* input = x.data() + token * shape.columns;
        const Row wanted = multiply_row(layer, input);
        if (shape.outliers > 0) missed += round_row(layer.linear, input).missed;
        for (int64_t row = 0; row < shape.rows; ++row) {
            const double error = std::fabs(y[token * shape.rows + row] - wanted.value[row]);
            // Also false for NaN.
            if (error <= 1e-6 * wanted.magnitude[row] + 1e-6) continue;
            check(false, "product of " + describe(shape, tokens) + ": off by " + std::to_string(error));
            return;
        }
    }
    if (shape.outliers > 0)
        check(layer.counts[0] == missed && layer.counts[1] == tokens * shape.columns, "outlier counts");
}

static void check_integers(void* engine, Random& random, int64_t columns, int64_t group) {
    Layer layer(random, {16, columns, INT8, FLOAT32, group, 0, false, false, 0});
    const Linear& linear = layer.linear;
    const int64_t tokens = 5, groups = linear.padded_columns / linear.group;
    std::vector<float> x = random.floats(tokens * columns);
    for (int64_t i = 0; i < columns; ++i) x[i] = static_cast<float>(i % 256 - 128) / 2;  // ties, and both ends
    std::fill_n(x.begin() + columns, columns, 0.0f);
    x[2 * columns] = NAN;
    x[3 * columns + columns - 1] = INFINITY;
    std::vector<int8_t> integers(static_cast<size_t>(tokens * linear.padded_columns));
    std::vector<float> steps(static_cast<size_t>(tokens * groups));
    check(lmpress_quantize(engine, &linear, x.data(), tokens, integers.data(), steps.data()) == 0, "memory");
    bool good = true;
    for (const int64_t token : {0, 1, 4}) {
        const Rounded wanted = round_row(linear, x.data() + token * columns);
        good &= std::equal(wanted.steps.begin(), wanted.steps.end(), steps.begin() + token * groups);
        good &= std::equal(wanted.integers.begin(), wanted.integers.end(),
                           integers.begin() + token * linear.padded_columns);
    }
    check(good, "integers of " + std::to_string(columns) + " columns in groups of " + std::to_string(group));
    check(!std::isfinite(steps[2 * groups]) && !std::isfinite(steps[4 * groups - 1]), "NaN or infinity must show");
}

static void check_products(void* engine, Random& random) {
    for (const int32_t type : {FLOAT32, BFLOAT16, FLOAT16})
        for (const int64_t tokens : {1, 3, 9}) {
            check_product(engine, random, {17, 13, type, type, 0, 0, false, false, 0}, tokens);
            check_product(engine, random, {96, 70, type, type, 0, 0, false, true, 0}, tokens);
        }
    for (const int32_t scale : {FLOAT32, BFLOAT16, FLOAT16})
        for (const int64_t tokens : {1, 2, 5, 8, 13})
            for (const bool zero : {false, true}) {
                check_product(engine, random, {35, 96, INT4, scale, 32, 32, zero, true, 0}, tokens);
                check_product(engine, random, {80, 150, INT4, scale, 32, 64, zero, false, 0}, tokens);
                check_product(engine, random, {7, 40, INT4, scale, 0, 0, zero, false, 0}, tokens);
                check_product(engine, random, {129, 100, INT8, scale, 0, 0, zero, false, 0}, tokens);
            }
    for (const int32_t type : {SPARSE4, SPARSE8})
        for (const int64_t tokens : {1, 3, 4, 7, 40})
            for (const int32_t scale : {FLOAT32, BFLOAT16}) {
                check_product(engine, random, {35, 96, type, scale, 32, 32, false, true, 0}, tokens);
                check_product(engine, random, {90, 152, type, scale, 32, 64, false, false, 0}, tokens);
                check_product(engine, random, {129, 100, type, scale, 0, 0, false, true, 0}, tokens);
            }
    for (const int64_t tokens : {1, 4, 70}) {
        check_product(engine, random, {33, 77, INT8, FLOAT16, 0, 0, false, true, 3}, tokens);
        check_product(engine, random, {48, 64, INT8, BFLOAT16, 0, 0, false, false, 7}, tokens);
    }
    for (const int64_t columns : {8, 30, 300})
        for (const int64_t group : {0, 8, 32}) check_integers(engine, random, columns, group);
}

static void check_embedding(Random& random) {
    for (const int32_t type : {FLOAT32, BFLOAT16, FLOAT16}) {
        Layer table(random, {21, 19, type, type, 0, 0, false, false, 0});
        const int64_t ids[] = {20, 0, 16, 15};
        std::vector<float> x(4 * 19, NAN);
        lmpress_embed(nullptr, &table.linear, ids, 4, x.data());
        bool good = true;
        for (int64_t i = 0; i < 4; ++i)
            good &= std::equal(x.begin() + i * 19, x.begin() + (i + 1) * 19, table.weight.begin() + ids[i] * 19);
        check(good, "embedding of type " + std::to_string(type));
    }
}

static std::vector<double> norm_of(const std::vector<double>& x, const float* weight, double epsilon) {
    double squares = 0;
    for (const double value : x) squares += value * value;
    std::vector<double> made(x);
    const double factor = 1 / std::sqrt(squares / static_cast<double>(x.size()) + epsilon);
    for (size_t i = 0; i < x.size(); ++i) made[i] *= factor * (weight ? weight[i] : 1.0);
    return made;
}

struct Family {
    const char* name;
    Heads heads;
    int64_t width, inner, window;
    float softcap;
    Activation activation;
    bool head_norms, norms_after, bias;
    int32_t type, cache;  // of the weights and of the cache
    double decibels;      // that the error must at least lie below the signal
};

// One decoder block of a family in double precision, one token at a time, with a cache of its own.
struct Model {
    static constexpr int64_t POSITIONS = 320;
    static constexpr float EPSILON = 1e-5f;
    Family family;
    std::vector<Layer> layers;                // query, key, value, output, gate, up, down
    std::vector<std::vector<float>> vectors;  // the norms, cosines, sines
    Block block{};
    std::vector<std::vector<std::vector<double>>> keys, values;  // [sequence][position][heads * size]

    Model(Random& random, const Family& family_, int64_t batch) : family(family_), keys(batch), values(batch) {
        const Heads& heads = family.heads;
        const int64_t query = heads.query * heads.size, shared = heads.shared * heads.size;
        const int64_t width = family.width, inner = family.inner;
        const int64_t shapes[7][2] = {{query, width}, {shared, width}, {shared, width}, {width, query},
                                      {inner, width}, {inner, width},  {width, inner}};
        const int64_t group = family.type == INT4 || family.type == SPARSE4 ? 32 : 0;
        for (const auto& shape : shapes)
            layers.emplace_back(random, Shape{shape[0], shape[1], family.type, BFLOAT16, group, group, false,
                                              family.bias, family.type == INT8 ? 2 : 0});
        for (const int64_t size : {family.width, family.width, family.width, family.width, heads.size, heads.size})
            vectors.push_back(random.floats(size));
        vectors.emplace_back();
        vectors.emplace_back();
        for (int64_t position = 0; position < POSITIONS; ++position)
            for (int64_t i = 0; i < heads.size / 2; ++i) {
                const double angle = static_cast<double>(position) * std::pow(100.0, -2.0 * i / heads.size);
                vectors[6].push_back(static_cast<float>(std::cos(angle)));
                vectors[7].push_back(static_cast<float>(std::sin(angle)));
            }
        point();
    }

    void point() {
        block.query = layers[0].linear;
        block.key = layers[1].linear;
        block.value = layers[2].linear;
        block.output = layers[3].linear;
        block.gate = layers[4].linear;
        block.up = layers[5].linear;
        block.down = layers[6].linear;
        block.input_norm = vectors[0].data();
        block.mlp_norm = vectors[1].data();
        block.attention_norm_after = family.norms_after ? vectors[2].data() : nullptr;
        block.mlp_norm_after = family.norms_after ? vectors[3].data() : nullptr;
        block.query_norm = family.head_norms ? vectors[4].data() : nullptr;
        block.key_norm = family.head_norms ? vectors[5].data() : nullptr;
        block.cosine = vectors[6].data();
        block.sine = vectors[7].data();
        block.window = family.window;
        block.epsilon = EPSILON;
        block.query_scale = 1.0f / std::sqrt(static_cast<float>(family.heads.size));
        block.softcap = family.softcap;
        block.activation = family.activation;
    }

    std::vector<double> product(int layer, const std::vector<double>& x) const {
        const std::vector<float> input(x.begin(), x.end());
        return multiply_row(layers[static_cast<size_t>(layer)], input.data()).value;
    }

    // Each head of x normed (where there are such norms) and turned.
    std::vector<double> placed(const std::vector<double>& x, const float* weight, int64_t position) const {
        const int64_t size = family.heads.size, half = size / 2;
        std::vector<double> made;
        for (size_t head = 0; head < x.size(); head += static_cast<size_t>(size)) {
            std::vector<double> part(x.begin() + head, x.begin() + head + size);
            if (weight) part = norm_of(part, weight, EPSILON);
            const std::vector<double> before = part;
            for (int64_t i = 0; i < half; ++i) {
                const double cosine = vectors[6][position * half + i], sine = vectors[7][position * half + i];
                part[i] = before[i] * cosine - before[i + half] * sine;
                part[i + half] = before[i + half] * cosine + before[i] * sine;
            }
            made.insert(made.end(), part.begin(), part.end());
        }
        return made;
    }

    // What the cache keeps of each head.
    std::vector<double> kept(std::vector<double> x) const {
        const int64_t size = family.heads.size;
        for (size_t head = 0; head < x.size(); head += static_cast<size_t>(size)) {
            double largest = 0;
            for (int64_t i = 0; i < size; ++i) largest = std::max(largest, std::fabs(x[head + i]));
            for (int64_t i = 0; i < size; ++i) {
                double& value = x[head + i];
                if (family.cache == INT8) value = std::nearbyint(value / (largest / 127)) * (largest / 127);
                if (family.cache == BFLOAT16) value = from_half(to_bfloat16(static_cast<float>(value)), BFLOAT16);
            }
        }
        return x;
    }

    std::vector<double> attended(const std::vector<double>& query, int64_t sequence) const {
        const Heads& heads = family.heads;
        const auto &past = keys[sequence], &content = values[sequence];
        const int64_t count = static_cast<int64_t>(past.size());
        const int64_t first = family.window ? std::max<int64_t>(0, count - family.window) : 0;
        std::vector<double> made(query.size(), 0.0);
        for (int64_t head = 0; head < heads.query; ++head) {
            const int64_t at = head * heads.size, other = head / (heads.query / heads.shared) * heads.size;
            std::vector<double> scores;
            for (int64_t position = first; position < count; ++position) {
                double score = 0;
                for (int64_t i = 0; i < heads.size; ++i) score += query[at + i] * past[position][other + i];
                score *= block.query_scale;
                scores.push_back(family.softcap > 0 ? family.softcap * std::tanh(score / family.softcap) : score);
            }
            const double largest = *std::max_element(scores.begin(), scores.end());
            double total = 0;
            for (int64_t position = first; position < count; ++position) {
                const double weight = std::exp(scores[position - first] - largest);
                total += weight;
                for (int64_t i = 0; i < heads.size; ++i) made[at + i] += weight * content[position][other + i];
            }
            for (int64_t i = 0; i < heads.size; ++i) made[at + i] /= total;
        }
        return made;
    }

    double active(double x) const {
        if (family.activation == SILU) return x / (1 + std::exp(-x));
        if (family.activation == GELU) return x * (1 + std::erf(x / std::sqrt(2.0))) / 2;
        return x * (1 + std::tanh(std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x))) / 2;
    }

    std::vector<double> step(std::vector<double> x, int64_t sequence) {
        const int64_t position = static_cast<int64_t>(keys[sequence].size());
        const auto add = [&](std::vector<double> change, const float* weight) {
            if (weight) change = norm_of(change, weight, EPSILON);
            for (size_t i = 0; i < x.size(); ++i) x[i] += change[i];
        };
        std::vector<double> normed = norm_of(x, block.input_norm, EPSILON);
        const std::vector<double> query = placed(product(0, normed), block.query_norm, position);
        keys[sequence].push_back(kept(placed(product(1, normed), block.key_norm, position)));
        values[sequence].push_back(kept(product(2, normed)));
        add(product(3, attended(query, sequence)), block.attention_norm_after);
        normed = norm_of(x, block.mlp_norm, EPSILON);
        std::vector<double> gate = product(4, normed);
        const std::vector<double> wide = product(5, normed);
        for (size_t i = 0; i < gate.size(); ++i) gate[i] = active(gate[i]) * wide[i];
        add(product(6, gate), block.mlp_norm_after);
        return x;
    }
};

// A cache for one block, filled with NaN, or for int8 with integers whose steps are.
struct Storage {
    std::vector<uint8_t> keys, values;
    std::vector<float> key_steps, value_steps;
    Cache cache{};

    Storage(const Family& family, int64_t batch, int64_t capacity) {
        const int64_t heads = batch * family.heads.shared * capacity;
        const size_t bytes = family.cache == INT8 ? 1 : family.cache == BFLOAT16 ? 2 : 4;
        keys.assign(static_cast<size_t>(heads * family.heads.size) * bytes, 0xff);
        values.assign(static_cast<size_t>(heads * family.heads.value_panels() * LANES) * bytes, 0xff);
        key_steps.assign(static_cast<size_t>(heads), NAN);
        value_steps.assign(static_cast<size_t>(heads), NAN);
        const bool stepped = family.cache == INT8;
        cache = {keys.data(), values.data(), stepped ? key_steps.data() : nullptr,
                 stepped ? value_steps.data() : nullptr, batch, capacity, 0, family.cache, 0};
    }
};

// A prompt of `prompt` tokens, then single tokens, for `batch` sequences at once.
static void check_block(void* engine, Random& random, const Family& family, int64_t batch, int64_t prompt) {
    Model model(random, family, batch);
    Storage storage(family, batch, up(prompt + 3, LANES));
    const int64_t sizes[] = {family.heads.query, family.heads.shared, family.heads.size};
    double noise = 0, signal = 0, worst = 0;
    for (const int64_t tokens : {prompt, int64_t{1}, int64_t{1}}) {
        std::vector<float> x = random.floats(batch * tokens * family.width);
        const std::vector<float> input = x;
        const int32_t code = lmpress_blocks(engine, &model.block, 1, sizes, &storage.cache, tokens, x.data());
        check(code == 0, "memory");
        storage.cache.length += tokens;
        for (int64_t row = 0; row < batch * tokens; ++row) {
            const auto start = input.begin() + row * family.width;
            const std::vector<double> wanted = model.step({start, start + family.width}, row / tokens);
            for (int64_t i = 0; i < family.width; ++i) {
                const double error = x[row * family.width + i] - wanted[i];
                noise += error * error;
                signal += wanted[i] * wanted[i];
                worst = std::isnan(error) ? INFINITY : std::max(worst, std::fabs(error));
            }
        }
    }
    const double count = static_cast<double>(batch * (prompt + 2) * family.width);
    const double decibels = 10 * std::log10(signal / noise);
    const double peak = 20 * std::log10(std::sqrt(signal / count) / worst);
    std::printf("%-24s batch %d prompt %3d: error %.0f dB below the signal, its peak %.0f dB\n", family.name,
                static_cast<int>(batch), static_cast<int>(prompt), decibels, peak);
    check(decibels >= family.decibels && peak >= family.decibels - 30, std::string("block of ") + family.name);
}

static void check_blocks(void* engine, Random& random) {
    const Family families[] = {
        {"plain", {4, 2, 16}, 48, 80, 0, 0, SILU, false, false, false, FLOAT32, FLOAT32, 110},
        {"one head, odd sizes", {1, 1, 20}, 33, 50, 0, 0, GELU, false, false, true, FLOAT32, FLOAT32, 110},
        {"window, cap and norms", {6, 2, 32}, 40, 64, 9, 5, GELU_TANH, true, true, false, FLOAT32, FLOAT32, 110},
        {"many heads per key", {11, 1, 64}, 32, 40, 0, 0, SILU, true, false, false, FLOAT32, FLOAT32, 110},
        {"bfloat16 cache", {4, 2, 16}, 48, 80, 0, 0, SILU, false, false, false, BFLOAT16, BFLOAT16, 60},
        {"int8 cache", {4, 2, 24}, 48, 80, 20, 0, SILU, false, false, false, FLOAT16, INT8, 60},
        {"int4", {4, 2, 16}, 64, 96, 0, 0, SILU, false, false, true, INT4, FLOAT32, 40},
        {"2:4 int4", {4, 2, 16}, 64, 96, 0, 0, SILU, false, false, true, SPARSE4, FLOAT32, 40},
        {"2:4 int8", {4, 2, 16}, 48, 80, 0, 0, SILU, false, false, false, SPARSE8, BFLOAT16, 40},
        {"int8 with outliers", {4, 2, 16}, 48, 80, 0, 0, SILU, false, false, false, INT8, INT8, 40},
    };
    for (const Family& family : families) {
        check_block(engine, random, family, 1, 150);
        check_block(engine, random, family, 3, 7);
        check_block(engine, random, family, 2, 1);
    }
}

// Each chunk runs exactly once, however late a thread is.
static void check_pool(int threads, int rounds) {
    Pool pool(threads);
    Random random;
    bool good = true;
    for (int round = 0; round < rounds; ++round) {
        const int64_t count = random.integer(0, 9);
        std::vector<int> seen(static_cast<size_t>(count), 0), by(seen);
        pool.run(count, [&](int64_t chunk, int thread) {
            by[static_cast<size_t>(chunk)] = thread;
            ++seen[static_cast<size_t>(chunk)];
        });
        for (const int times : seen) good &= times == 1;
        for (const int thread : by) good &= thread >= 0 && thread < threads;
        if (round % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // let them fall asleep
    }
    check(good, "chunks of a pool of " + std::to_string(threads));
}

static void check_reading(void* engine) {
    const std::vector<float> ones(1 << 18, 1.0f);
    check(lmpress_read(engine, ones.data(), (1 << 18) * 4) == static_cast<float>(1 << 18), "reading");
}

int main(int argc, char** argv) {
    const int threads = argc > 1 ? std::atoi(argv[1]) : 3, rounds = argc > 2 ? std::atoi(argv[2]) : 2000;
    Random random;
    void* engine = lmpress_engine_new(threads);
    check_products(engine, random);
    check_embedding(random);
    check_blocks(engine, random);
    check_reading(engine);
    lmpress_engine_free(engine);
    for (const int size : {1, 2, threads + 2}) check_pool(size, rounds);
    for (int i = 0; i < 20; ++i) lmpress_engine_free(lmpress_engine_new(threads));
    std::printf(failures ? "%d failures\n" : "all good\n", failures);
    return failures > 0;
}
